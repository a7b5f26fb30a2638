//! A row of a step, and what is known of it by itself.

use std::sync::Arc;

use super::tree::PlannedTree;
use crate::account::Account;
use crate::batch::Input;
use crate::command::ContextId;
use crate::fair::Class;

/// The tokens `start..end` of a context; none where the head alone is asked.
#[derive(Clone, Debug)]
pub(in crate::scheduler) struct PlannedRow {
    pub(in crate::scheduler) id: ContextId,
    pub(in crate::scheduler) start: usize,
    pub(in crate::scheduler) end: usize,
    pub(in crate::scheduler) input: Input,
    /// Tokens of the context when the step begins; the last may be one that only the device knows.
    pub(in crate::scheduler) n_tokens: usize,
    pub(in crate::scheduler) n_outputs: usize,
    pub(in crate::scheduler) draws: bool,
    /// Tokens at its end that a run is expected to draw.
    pub(in crate::scheduler) n_expected: usize,
    /// Whether the mask of its draw has not come.
    pub(in crate::scheduler) waits_for_mask: bool,
    /// Whether the device keeps the state of its last token.
    pub(in crate::scheduler) keeps_state: bool,
    pub(in crate::scheduler) n_charged: u64,
    pub(in crate::scheduler) class: Class,
    /// What it was taken to cost.
    pub(in crate::scheduler) cost_ns: u64,
    /// Whom its tokens were charged to: its context may be gone before it is taken in.
    pub(in crate::scheduler) account: Arc<Account>,
    /// Its last tokens are the nodes of a tree, which are rows of their own to the backend.
    pub(in crate::scheduler) tree: Option<PlannedTree>,
    /// Of the context, when the row was planned.
    pub(in crate::scheduler) epoch: u64,
}

impl PlannedRow {
    /// Whether it asks the head alone.
    pub(in crate::scheduler) fn is_of_head(&self) -> bool {
        self.start == self.end
    }

    /// Rows of the step that it comes to.
    pub(in crate::scheduler) fn n_rows(&self) -> usize {
        1 + self.tree.map_or(0, |tree| tree.n_nodes)
    }

    /// Position after the last of its tokens that follow each other.
    pub(in crate::scheduler) fn end_in_order(&self) -> usize {
        self.end - self.tree.map_or(0, |tree| tree.n_nodes)
    }

    /// Tokens whose KV had been computed before.
    pub(in crate::scheduler) fn n_again(&self) -> usize {
        self.end - self.start - self.n_charged as usize
    }
}
