//! Which tokens were taken out of the middle of a context, and what that does to the others. Both sides keep it: a guest's
//! context, which refuses what cannot be, and the engine's, which computes.
//!
//! A token's *number* counts the tokens that the context has had before it, its *index* those that it has. Without
//! evictions they are the same. Between them, and the position that a key is rotated by, lie:
//!
//! - *holes*: ranges of numbers whose tokens were evicted;
//! - *stretches*: tokens between which no hole was closed up. A query looks at the keys of each with a rotation of its own, so
//!   that to it they stand as many positions back as there are positions between, those that were closed up left out.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What an eviction does to the positions of the tokens after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Positions {
    /// They stay as they are: new tokens go on from the highest position.
    Keep,
    /// They close up: the tokens after the hole come to stand where it was. Their keys stay as they were rotated, and
    /// queries are rotated to fit (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453, section 3.2).
    CloseUp,
}

/// The most stretches of a context.
pub const N_STRETCHES_MAX: usize = 8;

/// What a token that is gone takes in the engine, with its share of the key of its page.
const TOKEN_BYTES: u64 = 6;

/// An eviction: it takes effect between two tokens, so that what was computed before it has seen what it took away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Eviction {
    /// Number of the first token that is computed after it.
    at: u32,
    /// Numbers of what it takes away, what was taken before included.
    start: u32,
    end: u32,
    pub(super) positions: Positions,
    /// Whether keys after it are rotated by their positions again. As they go on from those before them they would else
    /// come to be rotated by any number.
    turns_back: bool,
}

/// Evicted tokens between others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hole {
    start: usize,
    end: usize,
    /// Evicted tokens before it.
    n_before: usize,
}

/// Tokens between which no hole was closed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stretch {
    /// Number of its first token, or of a token before it that is gone.
    pub(super) first: usize,
    /// By how much the rotation of its keys is less than their numbers.
    pub(super) turned_back: usize,
    /// By how much their positions are less than their numbers.
    pub(super) closed_up: usize,
}

/// What some evictions come to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Gaps {
    holes: Vec<Hole>,        // ascending; they do not touch
    stretches: Vec<Stretch>, // ascending, at least one
}

/// All evictions of a context whose tokens are still about, in the order in which they were made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Evictions {
    list: Vec<Eviction>,
    gaps: Gaps,
}

/// An eviction would cut a context into too many stretches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooManyStretches {
    pub(crate) n_stretches: usize,
}

impl Default for Gaps {
    fn default() -> Self {
        Self { holes: Vec::new(), stretches: vec![Stretch::default()] }
    }
}

/// An eviction that can be made, and what all come to with it.
#[derive(Debug)]
pub(super) struct Evicting {
    eviction: Eviction,
    gaps: Gaps,
}

impl Eviction {
    /// Number of the first token that is computed after it.
    pub(super) fn at(&self) -> usize {
        self.at as usize
    }

    /// Numbers of what it takes away, what was taken before included.
    pub(super) fn numbers(&self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

impl Gaps {
    /// Tokens that are gone.
    pub(super) fn n_evicted(&self) -> usize {
        self.holes.last().map_or(0, |hole| hole.n_before + hole.end - hole.start)
    }

    /// Ranges of tokens that are gone.
    pub(super) fn n_holes(&self) -> usize {
        self.holes.len()
    }

    /// Number of the first token that is gone.
    pub(super) fn first_hole(&self) -> Option<usize> {
        self.holes.first().map(|hole| hole.start)
    }

    /// The number of the token at an index.
    pub(super) fn number_of(&self, index: usize) -> usize {
        let n = self.holes.partition_point(|hole| hole.start - hole.n_before <= index);
        index
            + n.checked_sub(1)
                .map_or(0, |idx| self.holes[idx].n_before + self.holes[idx].end - self.holes[idx].start)
    }

    /// How many tokens with numbers below this there are.
    pub(super) fn index_of(&self, number: usize) -> usize {
        let n = self.holes.partition_point(|hole| hole.start < number);
        match n.checked_sub(1).map(|idx| self.holes[idx]) {
            Some(hole) => number - hole.n_before - (hole.end.min(number) - hole.start),
            None => number,
        }
    }

    /// The numbers in a range whose tokens are there.
    pub(super) fn kept_within(&self, numbers: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let first = self.holes.partition_point(|hole| hole.end <= numbers.start);
        let holes = self.holes[first..].iter().take_while(move |hole| hole.start < numbers.end);
        let ends = holes.clone().map(|hole| hole.start).chain([numbers.end]);
        let starts = [numbers.start].into_iter().chain(holes.map(|hole| hole.end));
        starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end)
    }

    pub(super) fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// That of tokens that come now.
    pub(super) fn last_stretch(&self) -> Stretch {
        *self.stretches.last().expect("there is one")
    }

    pub(super) fn apply(&mut self, eviction: &Eviction) {
        let numbers = eviction.numbers();
        let n_evicted = self.index_of(numbers.end) - self.index_of(numbers.start);
        self.dig(numbers.clone());
        if eviction.positions == Positions::CloseUp {
            let idx = self.stretches.partition_point(|stretch| stretch.first <= numbers.end) - 1;
            if self.stretches[idx].first < numbers.end {
                self.stretches.insert(idx + 1, Stretch { first: numbers.end, ..self.stretches[idx] });
            }
            let after = self.stretches.iter_mut().filter(|stretch| stretch.first >= numbers.end);
            after.for_each(|stretch| stretch.closed_up += n_evicted);
        }
        if eviction.turns_back {
            let Stretch { first, closed_up, .. } = self.last_stretch();
            if first == eviction.at() {
                self.stretches.pop();
            }
            self.stretches.push(Stretch { first: eviction.at(), turned_back: closed_up, closed_up });
        }
        // What has no tokens any more tells nothing.
        let holes = &self.holes;
        let firsts: Vec<usize> = self.stretches.iter().skip(1).map(|stretch| stretch.first).collect();
        let mut nexts = firsts.into_iter();
        self.stretches.retain(|stretch| match nexts.next() {
            Some(next) => !holes.iter().any(|hole| hole.start <= stretch.first && next <= hole.end),
            None => true,
        });
    }

    fn dig(&mut self, numbers: Range<usize>) {
        let first = self.holes.partition_point(|hole| hole.end < numbers.start);
        let end = self.holes.partition_point(|hole| hole.start <= numbers.end);
        let touched = &self.holes[first..end];
        let start = touched.first().map_or(numbers.start, |hole| hole.start.min(numbers.start));
        let last = touched.last().map_or(numbers.end, |hole| hole.end.max(numbers.end));
        let mut n_before =
            first.checked_sub(1).map_or(0, |idx| self.holes[idx].n_before + self.holes[idx].len());
        self.holes.splice(first..end, [Hole { start, end: last, n_before }]);
        for hole in &mut self.holes[first..] {
            hole.n_before = n_before;
            n_before += hole.len();
        }
    }

    /// Whether there is a position for each of so many tokens, and none is rotated by more than twice as many.
    fn have_positions(&self, n_numbers: usize, n_positions: usize) -> bool {
        let Stretch { turned_back, closed_up, .. } = self.last_stretch();
        let is_within = |n: usize, less: usize, most: usize| n.checked_sub(less).is_some_and(|n| n <= most);
        is_within(n_numbers, closed_up, n_positions)
            && is_within(n_numbers, turned_back, n_positions.saturating_mul(2))
    }

    /// Forgets tokens from this number on. The one before it is there.
    pub(super) fn truncate(&mut self, n_numbers: usize) {
        self.holes.retain(|hole| hole.start < n_numbers);
        self.stretches.retain(|stretch| stretch.first < n_numbers);
        if self.stretches.is_empty() || self.holes.is_empty() {
            *self = Self::default();
        }
    }
}

impl Hole {
    fn len(&self) -> usize {
        self.end - self.start
    }
}

impl Evictions {
    /// Bytes of its lists.
    pub(crate) fn n_bytes(&self) -> usize {
        size_of_val(&*self.list) + size_of_val(&*self.gaps.holes) + size_of_val(&*self.gaps.stretches)
    }

    /// As [`Gaps::index_of`].
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn index_of(&self, number: usize) -> usize {
        self.gaps.index_of(number)
    }

    /// Host memory for them and for the tokens that are gone, on both sides, in bytes.
    pub(crate) fn n_bytes_held(&self) -> u64 {
        if self.list.is_empty() {
            return 0;
        }
        2 * self.n_bytes() as u64 + TOKEN_BYTES * self.n_evicted() as u64
    }

    pub(crate) fn list(&self) -> &[Eviction] {
        &self.list
    }

    pub(super) fn gaps(&self) -> &Gaps {
        &self.gaps
    }

    /// Tokens that are gone.
    pub(crate) fn n_evicted(&self) -> usize {
        self.gaps.n_evicted()
    }

    /// Number of the first token that is gone.
    pub(crate) fn first_hole(&self) -> Option<usize> {
        self.gaps.first_hole()
    }

    /// Those of them whose positions were closed up.
    pub(crate) fn n_closed_up(&self) -> usize {
        self.gaps.last_stretch().closed_up
    }

    /// Takes out the tokens of these indices, which are before the last of `n_tokens`. Contexts have `n_positions` positions.
    ///
    /// # Errors
    /// There would be more stretches than [`N_STRETCHES_MAX`]; nothing has changed then.
    pub(crate) fn evict(
        &mut self,
        indices: Range<usize>,
        n_tokens: usize,
        positions: Positions,
        n_positions: usize,
    ) -> Result<(), TooManyStretches> {
        let evicted = self.after(indices, n_tokens, positions, n_positions)?;
        self.take(evicted);
        Ok(())
    }

    /// What [`Self::evict`] adds.
    pub(super) fn after(
        &self,
        indices: Range<usize>,
        n_tokens: usize,
        positions: Positions,
        n_positions: usize,
    ) -> Result<Evicting, TooManyStretches> {
        assert!(!indices.is_empty() && indices.end < n_tokens, "{indices:?} of {n_tokens} tokens");
        let small = |number: usize| u32::try_from(number).expect("token counts fit 32 bits");
        let start = self.gaps.number_of(indices.start);
        let end = self.gaps.number_of(indices.end - 1) + 1;
        let at = self.gaps.number_of(n_tokens - 1);
        // Rotations stay below twice the positions of a context.
        let turns_back =
            positions == Positions::CloseUp && at - self.gaps.last_stretch().turned_back >= n_positions;
        let eviction =
            Eviction { at: small(at), start: small(start), end: small(end), positions, turns_back };
        let mut gaps = self.gaps.clone();
        gaps.apply(&eviction);
        let n_stretches = gaps.stretches.len();
        if n_stretches > N_STRETCHES_MAX {
            return Err(TooManyStretches { n_stretches });
        }
        Ok(Evicting { eviction, gaps })
    }

    pub(super) fn take(&mut self, Evicting { eviction, gaps }: Evicting) {
        self.gaps = gaps;
        self.list.push(eviction);
    }

    /// Keeps the first `n_tokens` tokens; returns whether the last of them counts as one that comes after evictions before
    /// which it was computed.
    pub(crate) fn truncate(&mut self, n_tokens: usize) -> bool {
        let Some(last) = n_tokens.checked_sub(1).map(|idx| self.gaps.number_of(idx)) else {
            *self = Self::default();
            return false;
        };
        self.list.retain(|eviction| eviction.numbers().start <= last);
        self.gaps.truncate(last + 1);
        let mut has_changed = false;
        for eviction in self.list.iter_mut().rev().take_while(|eviction| eviction.at as usize > last) {
            (eviction.at, eviction.turns_back, has_changed) = (last as u32, false, true);
        }
        has_changed
    }

    /// Whether a context of so many tokens, those that are gone included, can have come to them with so many positions. They may
    /// be anybody's.
    pub(crate) fn are_of(&self, n_numbers: usize, n_positions: usize) -> bool {
        let mut gaps = Gaps::default();
        let mut earlier = 0;
        for eviction in &self.list {
            let (numbers, at) = (eviction.numbers(), eviction.at());
            let is_in_order =
                numbers.start < numbers.end && numbers.end <= at && earlier <= at && at < n_numbers;
            // One that takes nothing away may lie before all stretches.
            if !is_in_order || gaps.index_of(numbers.start) == gaps.index_of(numbers.end) {
                return false;
            }
            gaps.apply(eviction);
            if gaps.stretches.len() > N_STRETCHES_MAX || !gaps.have_positions(at + 1, n_positions) {
                return false;
            }
            earlier = at;
        }
        gaps == self.gaps && gaps.have_positions(n_numbers, n_positions)
    }

    /// How many tokens a context had when each was made, those before it taken out.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        let mut gaps = Gaps::default();
        self.list.iter().map(move |eviction| {
            let length = gaps.index_of(eviction.at()) + 1;
            gaps.apply(eviction);
            length
        })
    }

    /// Whether nothing is gone.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const N_POSITIONS: usize = 60;

    /// The tokens of a context by their numbers, with where they stand.
    #[derive(Clone, Default)]
    struct Naive {
        numbers: Vec<usize>,
        positions: Vec<usize>,
        n_numbers: usize,
    }

    impl Naive {
        fn append(&mut self, n: usize) {
            for _ in 0..n {
                let position = self.positions.last().map_or(0, |last| last + 1);
                self.numbers.push(self.n_numbers);
                self.positions.push(position);
                self.n_numbers += 1;
            }
        }
    }

    proptest! {
        #[test]
        fn numbers_indices_and_distances_are_those_of_a_list(
            acts in prop::collection::vec((0..4usize, 0..1000usize, 0..1000usize), 0..40),
        ) {
            let (mut naive, mut evictions) = (Naive::default(), Evictions::default());
            naive.append(10);
            for (act, a, b) in acts {
                let n = naive.numbers.len();
                match act {
                    0 => naive.append(1 + a % 12),
                    1 if n > 0 => {
                        let n_kept = a % n;
                        naive.numbers.truncate(n_kept);
                        naive.positions.truncate(n_kept);
                        naive.n_numbers = naive.numbers.last().map_or(0, |last| last + 1);
                        evictions.truncate(n_kept);
                    }
                    _ if n > 1 => {
                        let start = a % (n - 1);
                        let end = start + 1 + b % (n - 1 - start);
                        let positions = [Positions::Keep, Positions::CloseUp][act % 2];
                        if evictions.evict(start..end, n, positions, N_POSITIONS).is_ok() {
                            naive.numbers.drain(start..end);
                            naive.positions.drain(start..end);
                            if positions == Positions::CloseUp {
                                naive.positions[start..].iter_mut().for_each(|position| *position -= end - start);
                            }
                        }
                    }
                    _ => {}
                }
                let gaps = evictions.gaps();
                prop_assert_eq!(evictions.n_evicted(), naive.n_numbers - naive.numbers.len());
                for (index, &number) in naive.numbers.iter().enumerate() {
                    prop_assert_eq!(gaps.number_of(index), number);
                    prop_assert_eq!(gaps.index_of(number), index);
                }
                let kept: Vec<usize> = gaps.kept_within(0..naive.n_numbers).flatten().collect();
                prop_assert_eq!(&kept, &naive.numbers);
                prop_assert!(gaps.stretches().len() <= N_STRETCHES_MAX);
                let stretch_of = |number: usize| {
                    *gaps.stretches().iter().rev().find(|stretch| stretch.first <= number).expect("there is one")
                };
                for (&number, &position) in naive.numbers.iter().zip(&naive.positions) {
                    prop_assert_eq!(number - stretch_of(number).closed_up, position);
                    prop_assert!(number >= stretch_of(number).turned_back);
                }
                // What was made again from the list is the same.
                let mut again = Gaps::default();
                evictions.list().iter().for_each(|eviction| again.apply(eviction));
                prop_assert_eq!(&again, gaps);
            }
        }
    }
}
