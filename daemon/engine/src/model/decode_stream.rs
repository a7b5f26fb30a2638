//! Text that appears token by token.

use super::tokenizer::{SpecialText, Tokenizer};
use crate::batch::Token;

/// Longest incomplete UTF-8 character.
const N_PENDING_MAX: usize = 3;

/// Turns tokens into text as they come, and holds back the start of a character until its end is there.
///
/// The pieces joined are [`Tokenizer::decode`] of all tokens, but for the leading space of SentencePiece,
/// which stays, since a stream mostly continues a text.
#[derive(Clone, Debug)]
pub struct DecodeStream {
    specials: SpecialText,
    pending: Vec<u8>, // at most N_PENDING_MAX bytes, a proper prefix of one character
}

impl DecodeStream {
    /// A stream that has seen nothing.
    pub fn new(specials: SpecialText) -> Self {
        Self { specials, pending: Vec::with_capacity(N_PENDING_MAX) }
    }

    /// Adds a token and returns the text that is now certain, often empty. Bytes that can no longer become a
    /// character turn into U+FFFD.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: Token) -> String {
        self.push_bytes(tokenizer.visible_bytes(token, self.specials))
    }

    /// Whether no character is unfinished.
    pub fn is_whole(&self) -> bool {
        self.pending.is_empty()
    }

    /// Ends the stream: an unfinished character becomes U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }

    fn push_bytes(&mut self, new: &[u8]) -> String {
        let mut bytes = std::mem::take(&mut self.pending);
        bytes.extend_from_slice(new);
        let mut text = String::with_capacity(bytes.len());
        let mut rest = bytes.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => {
                    let (valid, broken) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("checked up to here"));
                    match error.error_len() {
                        Some(n_broken) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &broken[n_broken..];
                        }
                        None => {
                            debug_assert!(broken.len() <= N_PENDING_MAX);
                            self.pending.extend_from_slice(broken);
                            return text;
                        }
                    }
                }
            }
        }
    }
}
