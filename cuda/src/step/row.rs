//! Rows of a step. The last token of a row may be one that only the device knows.

use trellis_engine::Steered;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Evicted, Input, OutputRequest, Pack, PageId, Row, SlotId, Token, Tokens};

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
    /// Where its tokens lie, in a context from which some were evicted, and for a node of a tree of guesses.
    pub(crate) evicted: Option<&'a Evicted<'a>>,
    /// What is added to its tokens.
    pub(crate) steered: Option<Steered<'a>>,
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
            evicted: row.evicted.as_ref(),
            steered: row.steered.filter(|steered| steered.from < row.end()),
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

    /// Whether it is a node of a tree of guesses. Those of a tree lie behind the row of the token before them, for its slot, which
    /// keeps nothing of them.
    pub(crate) fn is_node(&self) -> bool {
        self.evicted.is_some_and(|evicted| evicted.n_whole.is_some())
    }

    /// Tokens that were evicted: the positions of draws count them too.
    pub(crate) fn n_evicted(&self) -> usize {
        self.evicted.map_or(0, |evicted| evicted.n_evicted)
    }

    /// What is copied together before all else with the row.
    pub(crate) fn packs(&self) -> impl Iterator<Item = &'a Pack> + use<'a> {
        self.evicted.into_iter().flat_map(|evicted| evicted.packs)
    }

    /// What the first token to compute is rotated by; those after it follow.
    pub(crate) fn rotation(&self) -> usize {
        self.evicted.map_or(self.start, |evicted| evicted.rotation)
    }

    /// Cells of its pages before the one that takes the first token to compute.
    pub(crate) fn first_cell(&self) -> usize {
        self.evicted.map_or(self.start, |evicted| evicted.cell)
    }

    /// Pages from the first on in which its tokens lie.
    pub(crate) fn n_pages(&self) -> usize {
        (self.first_cell() + self.n_tokens()).div_ceil(PAGE_LEN)
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
