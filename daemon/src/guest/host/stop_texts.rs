//! Finding stop texts in text that comes in pieces.

/// Holds back text that could be the beginning of a stop text.
#[derive(Debug)]
pub(super) struct StopTexts {
    texts: Vec<String>, // none empty
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Scanned {
    /// This text is certain to come before any stop text.
    Text(String),
    /// This stop text is complete, and the rest of the text before it. Where several are, it is the one that begins first,
    /// and of those the first in the list.
    Stopped { text_idx: usize, rest: String },
}

impl StopTexts {
    /// `texts` holds no empty one.
    pub(super) fn new(texts: Vec<String>) -> Self {
        Self { texts, held: String::new() }
    }

    /// Adds a piece of text.
    pub(super) fn push(&mut self, piece: &str) -> Scanned {
        self.held.push_str(piece);
        let found =
            self.texts.iter().enumerate().filter_map(|(idx, stop)| Some((self.held.find(stop)?, idx)));
        if let Some((start, text_idx)) = found.min() {
            self.held.truncate(start);
            return Scanned::Stopped { text_idx, rest: std::mem::take(&mut self.held) };
        }
        let n_held = self.texts.iter().map(|stop| n_begun(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - n_held);
        Scanned::Text(std::mem::replace(&mut self.held, held))
    }

    /// What is still held back; no stop text will be completed any more.
    pub(super) fn finish(self) -> String {
        self.held
    }
}

/// Bytes at the end of `text` that begin `stop`, the most there are.
fn n_begun(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    // Both are UTF-8, so bytes that agree up to the end of `text` are whole characters.
    (1..=longest).rev().find(|&n| text.as_bytes().ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut scanner = StopTexts::new(stops.iter().map(|&stop| stop.to_owned()).collect());
        let mut text = String::new();
        for piece in pieces {
            match scanner.push(piece) {
                Scanned::Text(more) => text += &more,
                Scanned::Stopped { text_idx, rest } => return (text + &rest, Some(text_idx)),
            }
        }
        (text + &scanner.finish(), None)
    }

    #[test]
    fn text_ends_before_the_first_stop_text() {
        assert_eq!(run(&["\n\n"], &["one\n", "two\n", "\nthree"]), ("one\ntwo".to_owned(), Some(0)));
        assert_eq!(run(&["END", "ND"], &["the E", "ND"]), ("the ".to_owned(), Some(0)));
        assert_eq!(run(&["abc"], &["ab", "ab", "ab"]), ("ababab".to_owned(), None));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".to_owned(), Some(0)));
        assert_eq!(run(&["é!"], &["caf", "é", "?"]), ("café?".to_owned(), None));
        assert_eq!(run(&[], &["a", "b"]), ("ab".to_owned(), None));
        assert_eq!(run(&["x", "d", "de", "c"], &["ab", "cde"]), ("ab".to_owned(), Some(3)));
        assert_eq!(run(&["x", "de", "d"], &["abc", "de"]), ("abc".to_owned(), Some(1)), "both begin there");
    }

    proptest! {
        /// However the text is cut, the result is what searching the whole text gives. A stop text that is
        /// complete first wins, though another would begin before it in text that has not come yet.
        #[test]
        fn pieces_do_not_matter(
            text in "[abé]{0,40}",
            stops in prop::collection::vec("[abé]{1,4}", 0..3),
            cuts in prop::collection::vec(1..5_usize, 1..40),
        ) {
            let chars: Vec<char> = text.chars().collect();
            let mut scanner = StopTexts::new(stops.clone());
            let (mut shown, mut seen, mut rest) = (String::new(), String::new(), chars.as_slice());
            let mut stopped = None;
            for n in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, next) = rest.split_at((*n).min(rest.len()));
                rest = next;
                let piece: String = piece.iter().collect();
                seen += &piece;
                match scanner.push(&piece) {
                    Scanned::Text(more) => shown += &more,
                    Scanned::Stopped { text_idx, rest } => {
                        shown += &rest;
                        stopped = Some((shown.len(), text_idx));
                        break;
                    }
                }
                prop_assert!(seen.starts_with(&shown));
            }
            let found = stops.iter().enumerate().filter_map(|(idx, stop)| Some((seen.find(stop.as_str())?, idx)));
            let found = found.min();
            prop_assert_eq!(stopped, found);
            match found {
                Some((start, _)) => prop_assert_eq!(shown, &seen[..start]),
                None => prop_assert_eq!(shown + &scanner.finish(), seen),
            }
        }
    }
}
