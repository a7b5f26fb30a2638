//! Tokens that a mask forces, or nearly.
//!
//! A grammar forces bytes. What spells them is up to the model: for `name` there may be `na` and `me`, and every way is
//! allowed. So a mask leaves just one token only where no shorter and no longer one fits, which is certain to be drawn; where
//! all that it allows are beginnings of one of them, that one is what a model mostly draws: texts that it learnt from were cut
//! into the longest tokens there are. That is a guess, and a draw decides.

use super::Constraint;
use crate::batch::Token;
use crate::sampling::TokenMask;

/// Beginnings of one token that are looked at.
const N_SPELLINGS_MAX: usize = 16;

/// A token that a draw will give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) token: Token,
    /// Whether there is no other.
    pub(crate) is_certain: bool,
}

impl Constraint {
    /// What a draw under a mask of this constraint will give, where that can be told.
    pub(crate) fn expected(&self, mask: &TokenMask) -> Option<Expected> {
        let mut allowed = mask.allowed();
        let first = allowed.next()?;
        let Some(second) = allowed.next() else { return Some(Expected { token: first, is_certain: true }) };
        let bytes_of = |token: Token| {
            let is_named = self.is_end(token) || self.tokenizer().is_special(token);
            self.tokenizer().token_bytes(token).filter(|_| !is_named)
        };
        let (mut longest, mut bytes) = (first, bytes_of(first)?);
        for (idx, token) in std::iter::once(second).chain(allowed).enumerate() {
            let others = bytes_of(token)?;
            if idx + 2 > N_SPELLINGS_MAX || !(bytes.starts_with(others) || others.starts_with(bytes)) {
                return None;
            }
            if others.len() > bytes.len() {
                (longest, bytes) = (token, others);
            }
        }
        Some(Expected { token: longest, is_certain: false })
    }
}
