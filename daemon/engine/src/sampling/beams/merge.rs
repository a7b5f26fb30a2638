//! The candidates of several rows, best first. Each row is in order already: what is looked at grows with what is taken, and
//! not with the rows' lengths.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use crate::batch::{Candidate, Token};

/// A hypothesis with one more token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Continued {
    /// Which of the rows it is from.
    pub(super) row_idx: usize,
    pub(super) token: Token,
    /// The sum.
    pub(super) logprob: f32,
    /// Its place in the row.
    place: usize,
}

impl Ord for Continued {
    /// The better one is the greater.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_logprob = self.logprob.total_cmp(&other.logprob);
        by_logprob.then_with(|| (other.row_idx, other.place).cmp(&(self.row_idx, self.place)))
    }
}

impl PartialOrd for Continued {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Continued {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Continued {}

/// Rows with what is added to each of their candidates. What has no probability is left out.
pub(super) struct Merged<'a> {
    rows: Vec<(f32, Cow<'a, [Candidate]>)>,
    first: BinaryHeap<Continued>,
}

impl<'a> Merged<'a> {
    pub(super) fn new(rows: Vec<(f32, Cow<'a, [Candidate]>)>) -> Self {
        let first = (0..rows.len()).filter_map(|row_idx| continued(&rows, row_idx, 0)).collect();
        Self { rows, first }
    }
}

fn continued(rows: &[(f32, Cow<'_, [Candidate]>)], row_idx: usize, place: usize) -> Option<Continued> {
    let (so_far, row) = &rows[row_idx];
    let &Candidate { token, logprob } = row.get(place)?;
    (logprob > f32::NEG_INFINITY).then_some(Continued { row_idx, token, logprob: so_far + logprob, place })
}

impl Iterator for Merged<'_> {
    type Item = Continued;

    fn next(&mut self) -> Option<Continued> {
        let best = self.first.pop()?;
        self.first.extend(continued(&self.rows, best.row_idx, best.place + 1));
        Some(best)
    }
}

/// A row with so much taken off these tokens, in order again.
pub(super) fn penalised<'a>(
    row: &'a [Candidate],
    penalty: f32,
    counts: &FxHashMap<Token, usize>,
) -> Cow<'a, [Candidate]> {
    if counts.is_empty() || penalty == 0.0 {
        return Cow::Borrowed(row);
    }
    let lowered = row.iter().map(|&Candidate { token, logprob }| {
        let logprob = counts.get(&token).map_or(logprob, |&n| logprob - penalty * n as f32);
        Candidate { token, logprob }
    });
    let mut lowered: Vec<Candidate> = lowered.collect();
    lowered.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.token.cmp(&b.token)));
    Cow::Owned(lowered)
}
