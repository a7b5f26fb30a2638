//! Texts that others have written, in messages: a component has room for names of many kilobytes, and for many thousands.

use super::log::pieces;

/// Bytes of a name in a message.
pub(crate) const NAME_BYTES_MAX: usize = 120;

/// Names of a list in a message.
const N_LISTED_MAX: usize = 10;

/// Bytes of what the compiler or the runtime says of a component, which quotes it.
pub(crate) const REASON_BYTES_MAX: usize = 1 << 10;

/// The beginning of a text, up to the end of a character.
pub(crate) fn cut(text: &str, n_bytes_max: usize) -> String {
    pieces(text, n_bytes_max).next().unwrap_or_default().to_owned()
}

/// A name; of a long one the beginning.
pub(crate) fn name(text: &str) -> String {
    cut(text, NAME_BYTES_MAX)
}

/// Names; of many the first ones, and how many more there are.
pub(crate) fn list(names: &[String]) -> String {
    let (first, rest) = names.split_at(names.len().min(N_LISTED_MAX));
    let first: Vec<String> = first.iter().map(|text| name(text)).collect();
    match (first.is_empty(), rest.len()) {
        (true, _) => "nothing".to_owned(),
        (false, 0) => first.join(", "),
        (false, n_more) => format!("{} and {n_more} more", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_names_the_first_are_listed_and_the_others_counted() {
        let names = |n: usize| (0..n).map(|idx| format!("n{idx}")).collect::<Vec<_>>();
        assert_eq!(list(&names(0)), "nothing");
        assert_eq!(list(&names(2)), "n0, n1");
        assert_eq!(list(&names(10)), "n0, n1, n2, n3, n4, n5, n6, n7, n8, n9");
        assert_eq!(list(&names(90_000)), "n0, n1, n2, n3, n4, n5, n6, n7, n8, n9 and 89990 more");
        let long = vec!["é".repeat(50_000); 50_000];
        assert_eq!(list(&long).len(), 10 * NAME_BYTES_MAX + 9 * 2 + " and 49990 more".len());
    }
}
