//! The tokens of a context on its caller's side.

use super::segments::Segments;
use crate::batch::{Token, Tokens};

/// Tokens that forks share as a whole.
const N_SEGMENT_TOKENS: usize = 4096;

pub(super) type History = Segments<Token, N_SEGMENT_TOKENS>;

impl History {
    pub(super) fn view(&self) -> Tokens<'_> {
        Tokens::shared(self.segments(), self.tail(), N_SEGMENT_TOKENS)
    }
}
