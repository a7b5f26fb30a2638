//! Tokens that are found in text before the vocabulary's own model sees it.
//!
//! The matching is that of `AddedVocabulary` in the `tokenizers` crate (leftmost, then longest; `lstrip`,
//! `rstrip` and `single_word` honoured), done here because that crate cannot be told, for each place in a
//! text, whether a special token may be recognised there.

use std::ops::Range;

use tokenizers::AddedToken;

use super::tokenizer::SpecialTokens;
use super::yield_point::{GivenUp, YieldPoint};
use crate::batch::Token;

/// Bytes looked at between two yield points.
const N_BETWEEN: usize = 512;

/// Added tokens of which some may be looked for.
#[derive(Debug)]
pub(crate) struct AddedTokens {
    by_first_byte: Vec<Vec<Pattern>>, // [256], each longest first
}

#[derive(Debug)]
struct Pattern {
    text: String,
    token: Token,
    rule: AddedToken,
}

/// A token found in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The bytes that the token stands for, with stripped space.
    pub(crate) range: Range<usize>,
    /// The token.
    pub(crate) token: Token,
    /// Whether it is a special token.
    pub(crate) special: bool,
}

impl Default for AddedTokens {
    fn default() -> Self {
        Self { by_first_byte: (0..256).map(|_| Vec::new()).collect() }
    }
}

impl AddedTokens {
    /// Adds a token that is recognised where `text` stands.
    pub(crate) fn insert(&mut self, text: String, token: Token, rule: AddedToken) {
        let Some(first) = text.bytes().next() else { return };
        let patterns = &mut self.by_first_byte[usize::from(first)];
        let place = patterns.partition_point(|other| other.text.len() >= text.len());
        patterns.insert(place, Pattern { text, token, rule });
    }

    /// Whether the text of a special token starts at the first byte of `text`.
    pub(crate) fn special_starts(&self, text: &str) -> bool {
        self.matches_at(text).any(|pattern| pattern.rule.special)
    }

    /// The tokens of a text from left to right.
    ///
    /// # Errors
    /// The work was given up.
    pub(crate) fn find(
        &self,
        text: &str,
        specials: SpecialTokens,
        yields: &YieldPoint,
    ) -> Result<Vec<Found>, GivenUp> {
        let mut found = Vec::new();
        let mut taken = 0; // everything before belongs to the last token
        let (mut idx, mut looked) = (0, 0);
        while idx < text.len() {
            if idx >= looked {
                yields.reach()?;
                looked = idx + N_BETWEEN;
            }
            let pattern = text
                .is_char_boundary(idx)
                .then(|| self.matches_at(&text[idx..]).find(|pattern| pattern.allowed(text, idx, specials)))
                .flatten();
            let Some(pattern) = pattern else {
                idx += 1;
                continue;
            };
            let mut range = idx..idx + pattern.text.len();
            if pattern.rule.lstrip {
                range.start = text[taken..idx].trim_end().len() + taken;
            }
            if pattern.rule.rstrip {
                let rest = &text[range.end..];
                range.end += rest.len() - rest.trim_start().len();
            }
            taken = range.end;
            idx = range.end;
            found.push(Found { range, token: pattern.token, special: pattern.rule.special });
        }
        Ok(found)
    }

    fn matches_at(&self, text: &str) -> impl Iterator<Item = &Pattern> {
        let patterns = text.bytes().next().map(|first| &self.by_first_byte[usize::from(first)]);
        patterns.into_iter().flatten().filter(move |pattern| text.starts_with(&pattern.text))
    }
}

impl Pattern {
    fn allowed(&self, text: &str, idx: usize, specials: SpecialTokens) -> bool {
        if self.rule.special && specials == SpecialTokens::AsText {
            return false;
        }
        let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !self.rule.single_word
            || !(is_word(text[..idx].chars().next_back())
                || is_word(text[idx + self.text.len()..].chars().next()))
    }
}
