//! What is known of a row by itself.

use super::PlannedRow;

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
