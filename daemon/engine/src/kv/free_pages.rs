//! Pages that hold nothing, of the device or of host memory.
//!
//! The lowest is taken first. A model's memory is a run of granules from its first page on, and the last of them is the one
//! that it gives up: so the first are the fullest, and the last come free by themselves. Host memory goes back to the system by
//! granules as well.

use crate::batch::PageId;

/// A set of pages, as a tree of bits: a bit of a level says whether the word below it has any. Taking a page and giving
/// it back touch one word of each level; there are four for 16 million pages.
#[derive(Clone, Debug, Default)]
pub(super) struct FreePages {
    /// The pages themselves first; the last level has one word.
    levels: Vec<Vec<u64>>,
    n: usize,
}

const WORD_LEN: usize = u64::BITS as usize;

impl FreePages {
    /// All pages `0..n_pages`.
    pub(super) fn all(n_pages: usize) -> Self {
        let mut free = Self::default();
        free.resize(0, n_pages);
        free
    }

    pub(super) fn len(&self) -> usize {
        self.n
    }

    /// There were `n_before` pages, of which some are free, and there are `n_pages` from now on: those that are added are
    /// free, and those that go are not.
    pub(super) fn resize(&mut self, n_before: usize, n_pages: usize) {
        for idx in n_pages..n_before {
            self.remove(idx);
        }
        let mut n_words = n_pages.div_ceil(WORD_LEN).max(1);
        let mut level = 0;
        loop {
            if self.levels.len() == level {
                self.levels.push(Vec::new());
            }
            self.levels[level].resize(n_words, 0);
            if n_words == 1 {
                break;
            }
            n_words = n_words.div_ceil(WORD_LEN);
            level += 1;
        }
        let is_higher = self.levels.len() > level + 1;
        self.levels.truncate(level + 1);
        if !is_higher {
            self.note_below();
        }
        for idx in n_before..n_pages {
            self.insert(idx);
        }
    }

    /// Brings all levels but the first up to date with the one below: a level that is new knows of nothing.
    fn note_below(&mut self) {
        for level in 1..self.levels.len() {
            let (below, above) = self.levels.split_at_mut(level);
            let below = &below[level - 1];
            for (word, part) in above[0].iter_mut().zip(below.chunks(WORD_LEN)) {
                *word = part.iter().enumerate().fold(0, |bits, (n, &word)| bits | u64::from(word != 0) << n);
            }
        }
    }

    /// Gives a page back, which was taken.
    pub(super) fn give(&mut self, page: PageId) {
        self.insert(page.0 as usize);
    }

    fn insert(&mut self, mut idx: usize) {
        for (level, words) in self.levels.iter_mut().enumerate() {
            let (word, bit) = (&mut words[idx / WORD_LEN], 1 << (idx % WORD_LEN));
            let was_empty = *word == 0;
            assert!(level > 0 || *word & bit == 0, "a page is given back once");
            *word |= bit;
            if !was_empty {
                break;
            }
            idx /= WORD_LEN;
        }
        self.n += 1;
    }

    fn remove(&mut self, mut idx: usize) {
        if self.levels[0][idx / WORD_LEN] >> (idx % WORD_LEN) & 1 == 0 {
            return;
        }
        for words in &mut self.levels {
            let word = &mut words[idx / WORD_LEN];
            *word &= !(1 << (idx % WORD_LEN));
            if *word != 0 {
                break;
            }
            idx /= WORD_LEN;
        }
        self.n -= 1;
    }

    /// Takes the first.
    pub(super) fn take(&mut self) -> Option<PageId> {
        if self.n == 0 {
            return None;
        }
        let idx = self.levels.iter().rev().fold(0, |idx, words| {
            let word = words[idx];
            idx * WORD_LEN + word.trailing_zeros() as usize
        });
        self.remove(idx);
        Some(PageId(u32::try_from(idx).expect("page counts fit 32 bits")))
    }

    /// Takes this one, which is free.
    pub(super) fn take_at(&mut self, page: PageId) {
        let n = self.n;
        self.remove(page.0 as usize);
        assert_eq!(self.n + 1, n, "{page:?} is free");
    }

    /// All of them, in their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = PageId> + '_ {
        let bits = |(at, word): (usize, u64)| {
            (0..WORD_LEN).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * WORD_LEN + bit)
        };
        self.levels[0].iter().copied().enumerate().flat_map(bits).map(|idx| PageId(idx as u32))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_lowest_page_that_is_free_is_taken_whatever_came_and_went() {
        let mut state = 1_u64;
        let mut below = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        for n_most in [1, 70, 5000, 300_000] {
            let mut n_pages = n_most / 2;
            let mut free = FreePages::all(n_pages);
            let mut expected: BTreeSet<u32> = (0..n_pages as u32).collect();
            for n_acts in 0..3000 {
                match below(100) {
                    0..60 => {
                        let first = expected.pop_first();
                        assert_eq!(free.take().map(|page| page.0), first);
                    }
                    60..98 if n_pages > 0 => {
                        let page = below(n_pages) as u32;
                        if expected.insert(page) {
                            free.give(PageId(page));
                        }
                    }
                    _ if n_acts % 10 == 0 => {
                        let n = below(n_most + 1);
                        free.resize(n_pages, n);
                        expected.retain(|&page| (page as usize) < n);
                        expected.extend(n_pages as u32..n as u32);
                        n_pages = n;
                    }
                    _ => {}
                }
                assert_eq!(free.len(), expected.len());
            }
            assert!(free.iter().map(|page| page.0).eq(expected));
        }
    }
}
