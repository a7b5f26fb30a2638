//! Rows of a step. The last token of a row may be one that only the device knows.

use trellis_engine::batch::{Input, OutputRequest, PageId, Row, SlotId, Token, Tokens};

/// Consecutive tokens of one context.
#[derive(Clone, Debug)]
pub(crate) struct StepRow<'a> {
    pub(crate) slot: SlotId,
    /// Tokens of the context that the host knows.
    known: Tokens<'a>,
    /// The slot for which the step before this one draws one more token that follows them, if it does.
    drawn_for: Option<SlotId>,
    /// Position of the first token to compute.
    pub(crate) start: usize,
    pub(crate) pages: &'a [PageId],
    /// Pages from the first on that are those of the row before this one for the slot.
    pub(crate) n_same_pages: usize,
    /// Pages from the first on that are those of the row before this one in the step too, which may be read once for both.
    pub(crate) n_pages_alike: usize,
    pub(crate) requests: &'a [OutputRequest<'a>],
}

impl<'a> StepRow<'a> {
    /// A row of a batch.
    pub(crate) fn of(row: &'a Row<'_>) -> Self {
        Self {
            slot: row.slot,
            known: row.tokens,
            drawn_for: match row.input {
                Input::Known => None,
                Input::Drawn(slot) => Some(slot),
            },
            start: row.start,
            pages: row.pages,
            n_same_pages: row.n_same_pages,
            n_pages_alike: row.n_pages_alike,
            requests: &row.outputs,
        }
    }

    /// A row of a batch, where every token has become known.
    pub(crate) fn known(row: &'a Row<'_>, tokens: &'a [Token]) -> Self {
        Self { known: tokens.into(), drawn_for: None, ..Self::of(row) }
    }

    /// Whether its last token is one that only the device knows.
    pub(crate) fn has_drawn(&self) -> bool {
        self.drawn_for.is_some()
    }

    /// Position after the last token.
    pub(crate) fn end(&self) -> usize {
        self.known.len() + usize::from(self.has_drawn())
    }

    /// Tokens to compute.
    pub(crate) fn n_tokens(&self) -> usize {
        self.end() - self.start
    }

    /// The tokens `start..end` as the device reads them: a negative one names the slot that holds it.
    pub(crate) fn words(&self, start: usize, end: usize) -> impl Iterator<Item = i32> + use<'a> {
        let n_known = self.known.len();
        let drawn = self.drawn_for.filter(|_| end > n_known).map(|slot| -1 - slot.0 as i32);
        let known = self.known.iter_range(start.min(n_known)..end.min(n_known));
        known.map(|token| token as i32).chain(drawn)
    }

    /// The tokens `start..end` as far as the host knows them.
    pub(crate) fn known_tokens(&self, start: usize, end: usize) -> impl Iterator<Item = Token> + use<'a> {
        self.known.iter_range(start.min(self.known.len())..end.min(self.known.len()))
    }

    /// Whether it computes nothing and asks about the state that was kept for its slot.
    pub(crate) fn is_of_head(&self) -> bool {
        self.start == self.end()
    }

    /// The tokens before `end` where the host knows them all.
    pub(crate) fn known_before(&self, end: usize) -> Option<Tokens<'a>> {
        (end <= self.known.len()).then(|| self.known.first(end))
    }
}
