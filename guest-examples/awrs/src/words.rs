//! Words of a text.

/// The letters of the longest word.
pub(crate) fn longest_word(text: &str) -> usize {
    text.split(|c: char| !c.is_alphabetic()).map(|word| word.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_counted_and_nothing_else() {
        assert_eq!(longest_word(""), 0);
        assert_eq!(longest_word("It's 12345 o'clock, été."), 5);
    }
}
