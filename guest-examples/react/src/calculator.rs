//! The tool: one operation of two numbers.

use fasteval3::{EmptyNamespace, ez_eval};

/// How tightly what a word says binds; 0 where it is no operation.
fn strength(word: Option<&&str>) -> u8 {
    match word {
        Some(&"+" | &"-") => 1,
        Some(&"*" | &"/") => 2,
        _ => 0,
    }
}

/// The operations of a text, with one space around each of their signs, that may be worked out first: those that no other has to
/// come before. Each is in the text as it stands here.
pub(crate) fn open_actions(text: &str) -> Vec<String> {
    let words: Vec<&str> = text.split(' ').map(|word| word.trim_end_matches(['.', '?', ','])).collect();
    let action = |idx: usize| words[idx - 1..=idx + 1].join(" ");
    let is_number = |idx: usize| words.get(idx).is_some_and(|word| word.parse::<f64>().is_ok());
    let is_open = |idx: &usize| {
        let own = strength(words.get(*idx));
        let before = idx.checked_sub(2).map_or(0, |idx| strength(words.get(idx)));
        let is_operation = is_number(idx - 1) && is_number(idx + 1) && text.contains(&action(*idx));
        is_operation && own > before && own >= strength(words.get(idx + 2))
    };
    (1..words.len()).filter(is_open).map(action).collect()
}

/// The value of an operation, or what is wrong with it, for the model to read.
pub(crate) fn evaluate(action: &str) -> String {
    ez_eval(action, &mut EmptyNamespace).map_or_else(|error| error.to_string(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_binds_tighter_or_stands_before_comes_first() {
        assert_eq!(open_actions("Work out 12 * 7 + 5."), ["12 * 7"]);
        assert_eq!(open_actions("Work out 5 + 12 * 7, please."), ["12 * 7"]);
        assert_eq!(open_actions("Is 10 - 4 - 3 more?"), ["10 - 4"]);
        assert_eq!(open_actions("2 * 3 + 4 * 5"), ["2 * 3", "4 * 5"]);
        assert!(open_actions("12 *, 7").is_empty() && open_actions("12, * 7").is_empty());
        assert!(open_actions("What is 3 plus 4 - ?").is_empty());
        assert!(open_actions("").is_empty() && open_actions("3  4").is_empty());
    }

    #[test]
    fn operations_have_values() {
        for (action, value) in
            [("12 * 7", "84"), ("3 - 5", "-2"), ("2 + 3", "5"), ("1 / 4", "0.25"), ("1 / 0", "inf")]
        {
            assert_eq!(evaluate(action), value);
        }
    }
}
