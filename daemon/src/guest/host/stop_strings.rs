//! Finding stop strings in text that comes in pieces.

/// Holds back text that could be the beginning of a stop string.
#[derive(Debug)]
pub(super) struct StopStrings {
    strings: Vec<String>, // none empty
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Scanned {
    /// This text is certain to come before any stop string.
    Text(String),
    /// A stop string is complete; this is the rest of the text before it.
    Stopped(String),
}

impl StopStrings {
    /// `strings` holds no empty one.
    pub(super) fn new(strings: Vec<String>) -> Self {
        Self { strings, held: String::new() }
    }

    /// Adds a piece of text.
    pub(super) fn push(&mut self, piece: &str) -> Scanned {
        self.held.push_str(piece);
        let first = self.strings.iter().filter_map(|stop| self.held.find(stop)).min();
        if let Some(start) = first {
            self.held.truncate(start);
            return Scanned::Stopped(std::mem::take(&mut self.held));
        }
        let n_held = self.strings.iter().map(|stop| n_begun(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - n_held);
        Scanned::Text(std::mem::replace(&mut self.held, held))
    }

    /// What is still held back; no stop string will be completed any more.
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

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut scanner = StopStrings::new(stops.iter().map(|&stop| stop.to_owned()).collect());
        let mut text = String::new();
        for piece in pieces {
            match scanner.push(piece) {
                Scanned::Text(more) => text += &more,
                Scanned::Stopped(rest) => return (text + &rest, true),
            }
        }
        (text + &scanner.finish(), false)
    }

    #[test]
    fn text_ends_before_the_first_stop_string() {
        assert_eq!(run(&["\n\n"], &["one\n", "two\n", "\nthree"]), ("one\ntwo".to_owned(), true));
        assert_eq!(run(&["END", "ND"], &["the E", "ND"]), ("the ".to_owned(), true));
        assert_eq!(run(&["abc"], &["ab", "ab", "ab"]), ("ababab".to_owned(), false));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".to_owned(), true));
        assert_eq!(run(&["é!"], &["caf", "é", "?"]), ("café?".to_owned(), false));
        assert_eq!(run(&[], &["a", "b"]), ("ab".to_owned(), false));
    }

    proptest! {
        /// However the text is cut, the result is what searching the whole text gives. A stop string that is
        /// complete first wins, though another would begin before it in text that has not come yet.
        #[test]
        fn pieces_do_not_matter(
            text in "[abé]{0,40}",
            stops in prop::collection::vec("[abé]{1,4}", 0..3),
            cuts in prop::collection::vec(1..5_usize, 1..40),
        ) {
            let chars: Vec<char> = text.chars().collect();
            let mut scanner = StopStrings::new(stops.clone());
            let (mut shown, mut seen, mut rest) = (String::new(), String::new(), chars.as_slice());
            let mut is_stopped = false;
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
                    Scanned::Stopped(more) => {
                        shown += &more;
                        is_stopped = true;
                        break;
                    }
                }
                prop_assert!(seen.starts_with(&shown));
            }
            let found = stops.iter().filter_map(|stop| seen.find(stop.as_str())).min();
            prop_assert_eq!(is_stopped, found.is_some());
            match found {
                Some(start) => prop_assert_eq!(shown, &seen[..start]),
                None => prop_assert_eq!(shown + &scanner.finish(), seen),
            }
        }
    }
}
