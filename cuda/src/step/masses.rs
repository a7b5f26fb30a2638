//! Attention that comes back as numbers: behind scores and lists, in the same copy.
//!
//! A step with such requests is launched call by call. Each layer that is asked for takes two launches more for up to 32
//! tokens, before its own attention.

use super::returned::Place;
use super::row::StepRow;
use crate::ops::masses::MassQuery;

/// All of a step.
#[derive(Debug, Default)]
pub(crate) struct Masses {
    /// Each with its layers.
    pub(crate) queries: Vec<(MassQuery, Vec<usize>)>,
    n_words: usize,
    /// Entries of lists in whose place they come back.
    n_entries: usize,
}

impl Masses {
    pub(crate) fn clear(&mut self) {
        self.queries.clear();
        (self.n_words, self.n_entries) = (0, 0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queries.is_empty()
    }

    /// Numbers that come back.
    pub(crate) fn n_words(&self) -> usize {
        self.n_words
    }

    /// Entries of lists in whose place they come back.
    pub(crate) fn n_entries(&self) -> usize {
        self.n_entries
    }

    /// Takes in that a row asks for the attention of a position; its first token is the step's `first_token`-th.
    pub(crate) fn push(
        &mut self,
        row: &StepRow<'_>,
        position: usize,
        layers: &[usize],
        first_token: usize,
        table: Option<usize>,
    ) -> Place {
        assert!((row.start..row.end()).contains(&position), "attention at {position} of a row");
        let (start, n) = (self.n_words, position + 1);
        self.n_words += n;
        self.n_entries += n.div_ceil(2);
        let query = MassQuery {
            token: first_token + position - row.start,
            cell: row.first_cell() + position - row.start,
            table: table.expect("a row with tokens has pages"),
            place: start,
            has_holes: row.evicted.is_some(),
            n_layers: layers.len(),
        };
        self.queries.push((query, layers.to_vec()));
        Place::Attention { start, n }
    }
}
