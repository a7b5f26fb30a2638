//! Keeps the text of messages apart from the special tokens of a template, through the rendering.
//!
//! Wherever a message holds the text of a special token, the first character is exchanged for a private-use
//! character that stands nowhere else. The template is free to trim, cut and join; in its output only its
//! own special tokens are found, and then the characters are put back. That a template cannot make a special
//! token out of parts of messages is checked with a second rendering, of messages in which every character
//! of any special token is exchanged.

use std::collections::BTreeSet;

use super::added_tokens::Found;
use super::chat::ChatError;
use super::tokenizer::Tokenizer;
use super::yield_point::{GivenUp, YieldPoint};
use crate::batch::Token;

/// Characters between two yield points.
const N_BETWEEN: usize = 1 << 10;

/// Exchanges characters of messages for unused ones.
#[derive(Debug)]
pub(crate) struct Shield {
    covers: Vec<(char, char)>, // first characters of special tokens, with their stand-ins
    letters: BTreeSet<char>,   // all characters of special tokens but white space
    blank: char,
}

impl Shield {
    /// Finds stand-ins that occur in none of the texts.
    pub(crate) fn new<'a>(
        tokenizer: &Tokenizer,
        texts: impl Iterator<Item = &'a str>,
        yields: &YieldPoint,
    ) -> Result<Self, ChatError> {
        let firsts: BTreeSet<char> =
            tokenizer.special_texts().filter_map(|special| special.chars().next()).collect();
        let letters: BTreeSet<char> =
            tokenizer.special_texts().flat_map(str::chars).filter(|c| !c.is_whitespace()).collect();

        let is_private = |c: &char| ('\u{F0000}'..='\u{10FFFD}').contains(c);
        let mut used = BTreeSet::new();
        for (n_seen, c) in texts.flat_map(str::chars).enumerate() {
            reach_at(n_seen, yields)?;
            used.extend(Some(c).filter(is_private));
        }
        used.extend(letters.iter().copied().filter(is_private));
        let mut unused = ('\u{F0000}'..='\u{10FFFD}').filter(|c| !used.contains(c));
        let blank = unused.next().ok_or(ChatError::NoPrivateCharacter)?;
        let mut covers = Vec::with_capacity(firsts.len());
        for first in firsts {
            covers.push((first, unused.next().ok_or(ChatError::NoPrivateCharacter)?));
        }
        Ok(Self { covers, letters, blank })
    }

    /// The text without anything that reads as a special token.
    pub(crate) fn cover(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        yields: &YieldPoint,
    ) -> Result<String, GivenUp> {
        let chars = text.char_indices().enumerate().map(|(n_seen, (idx, c))| {
            reach_at(n_seen, yields)?;
            Ok(match self.covers.iter().find(|(first, _)| *first == c) {
                Some((_, cover)) if tokenizer.added_tokens().special_starts(&text[idx..]) => *cover,
                _ => c,
            })
        });
        chars.collect()
    }

    /// The text without any character of a special token; as many characters as before.
    pub(crate) fn blank(&self, text: &str, yields: &YieldPoint) -> Result<String, GivenUp> {
        let chars = text.chars().enumerate().map(|(n_seen, c)| {
            reach_at(n_seen, yields)?;
            Ok(if self.letters.contains(&c) { self.blank } else { c })
        });
        chars.collect()
    }

    /// Puts the first characters back, and moves what was found accordingly.
    pub(crate) fn uncover(
        &self,
        rendered: &str,
        mut found: Vec<Found>,
        yields: &YieldPoint,
    ) -> Result<(String, Vec<Found>), GivenUp> {
        let mut text = String::with_capacity(rendered.len());
        let mut edges = found.iter_mut().flat_map(|found| [&mut found.range.start, &mut found.range.end]);
        let mut edge = edges.next();
        for (n_seen, (idx, c)) in rendered.char_indices().enumerate() {
            reach_at(n_seen, yields)?;
            while let Some(place) = edge.take_if(|place| **place == idx) {
                *place = text.len();
                edge = edges.next();
            }
            let first = self.covers.iter().find(|(_, cover)| *cover == c).map(|(first, _)| *first);
            text.push(first.unwrap_or(c));
        }
        // Only edges at the very end are left.
        for place in edge.into_iter().chain(edges) {
            *place = text.len();
        }
        Ok((text, found))
    }
}

/// Reaches a yield point with one character of so many.
fn reach_at(n_seen: usize, yields: &YieldPoint) -> Result<(), GivenUp> {
    if n_seen.is_multiple_of(N_BETWEEN) { yields.reach() } else { Ok(()) }
}

/// The special tokens among tokens found in a text.
pub(crate) fn special_tokens_of(found: &[Found]) -> impl Iterator<Item = Token> {
    found.iter().filter(|found| found.special).map(|found| found.token)
}
