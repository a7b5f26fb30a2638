//! Which cells of a context's pages hold keys and values of tokens that are there.

use std::ops::Range;

use crate::backend::PAGE_LEN;

/// The cells of the computed tokens of a context with evictions, page by page in the order of its tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cells {
    /// A bit for each cell of each page.
    live: Vec<u16>,
    /// The cell that takes the next token.
    open: usize,
}

impl Cells {
    /// Those of so many tokens, none of which is gone.
    pub(super) fn whole(n_tokens: usize) -> Self {
        let mut cells = Self::default();
        cells.extend(n_tokens);
        cells
    }

    /// A bit for each cell of each page with a token.
    pub(super) fn live(&self) -> &[u16] {
        &self.live
    }

    /// The cell that takes the next token.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// Tokens in the first `n_pages` pages.
    pub(super) fn n_within(&self, n_pages: usize) -> usize {
        self.live.iter().take(n_pages).map(|bits| bits.count_ones() as usize).sum()
    }

    /// Takes in so many tokens more.
    pub(super) fn extend(&mut self, n_tokens: usize) {
        for cell in self.open..self.open + n_tokens {
            if cell / PAGE_LEN == self.live.len() {
                self.live.push(0);
            }
            self.live[cell / PAGE_LEN] |= 1 << (cell % PAGE_LEN);
        }
        self.open += n_tokens;
    }

    /// The cell of the token at an index, or the one that takes the next token.
    pub(super) fn cell_of(&self, index: usize) -> usize {
        let mut n_left = index;
        for (page_idx, &bits) in self.live.iter().enumerate() {
            let n = bits.count_ones() as usize;
            if n_left < n {
                let bits = (0..n_left).fold(bits, |bits, _| bits & (bits - 1));
                return page_idx * PAGE_LEN + bits.trailing_zeros() as usize;
            }
            n_left -= n;
        }
        assert_eq!(n_left, 0, "a token that is not there");
        self.open
    }

    /// Hides the tokens of these indices; returns which pages have none left, ascending. They are no longer counted.
    pub(super) fn hide(&mut self, indices: Range<usize>) -> Vec<usize> {
        if indices.is_empty() {
            return Vec::new();
        }
        let (first, last) = (self.cell_of(indices.start), self.cell_of(indices.end - 1));
        let touched = first / PAGE_LEN..last / PAGE_LEN + 1;
        for page_idx in touched.clone() {
            let page = page_idx * PAGE_LEN;
            self.live[page_idx] &= !bits_within(first.saturating_sub(page), (last + 1 - page).min(PAGE_LEN));
        }
        // All other pages have some, and of those the ones between the first and the last have none.
        let gone: Vec<usize> = touched.filter(|&page_idx| self.live[page_idx] == 0).collect();
        if let (Some(&first), Some(&last)) = (gone.first(), gone.last()) {
            self.live.drain(first..=last);
        }
        self.close();
        gone
    }

    /// Neighbouring pages whose tokens fit into one, several each, the last first; that which takes the next token, and those
    /// that may not be packed, are not among them.
    pub(super) fn packable(&self, may_be: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
        let n_pages = self.open / PAGE_LEN;
        let (mut found, mut start, mut n_tokens) = (Vec::new(), 0, 0);
        for (page_idx, bits) in self.live.iter().take(n_pages).enumerate() {
            let n = bits.count_ones() as usize;
            if n_tokens + n > PAGE_LEN || !may_be(page_idx) {
                found.push(start..page_idx);
                (start, n_tokens) = (page_idx, 0);
            }
            n_tokens += n;
            if !may_be(page_idx) {
                (start, n_tokens) = (page_idx + 1, 0);
            }
        }
        found.push(start..n_pages.max(start));
        found.retain(|pages| pages.len() > 1);
        found.reverse();
        found
    }

    /// The tokens of some pages lie in the first cells of one in their place.
    pub(super) fn pack(&mut self, pages: Range<usize>) {
        let n_tokens = self.live[pages.clone()].iter().map(|bits| bits.count_ones() as usize).sum();
        self.open -= (pages.len() - 1) * PAGE_LEN;
        self.live.splice(pages, [bits_within(0, n_tokens)]);
    }

    /// Keeps the first `n_tokens` tokens.
    pub(super) fn truncate(&mut self, n_tokens: usize) {
        let end = self.cell_of(n_tokens);
        if end == self.open {
            return;
        }
        self.live.truncate(end.div_ceil(PAGE_LEN));
        if let Some(bits) = self.live.last_mut() {
            *bits &= bits_within(0, end - (end.div_ceil(PAGE_LEN) - 1) * PAGE_LEN);
        }
        while self.live.last() == Some(&0) {
            self.live.pop();
        }
        self.close();
    }

    /// What comes next lies behind the last token.
    fn close(&mut self) {
        let in_last = self.live.last().map_or(0, |bits| PAGE_LEN - bits.leading_zeros() as usize);
        self.open = self.live.len().saturating_sub(1) * PAGE_LEN + in_last;
    }
}

fn bits_within(start: usize, end: usize) -> u16 {
    ((1u32 << end) - (1 << start)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_without_tokens_go_and_the_next_token_follows_the_last() {
        let mut cells = Cells::whole(50);
        assert_eq!((cells.live(), cells.open()), (&[u16::MAX, u16::MAX, u16::MAX, 3][..], 50));
        assert_eq!(cells.hide(4..40), [1]);
        assert_eq!((cells.live(), cells.open()), (&[0b1111, 0xff00, 3][..], 34));
        assert_eq!([0, 3, 4, 11, 12, 14].map(|index| cells.cell_of(index)), [0, 3, 24, 31, 32, 34]);
        assert_eq!((cells.n_within(0), cells.n_within(1), cells.n_within(9)), (0, 4, 14));
        cells.extend(15);
        assert_eq!((cells.live(), cells.open()), (&[0b1111, 0xff00, u16::MAX, 1][..], 49));
        cells.truncate(13);
        assert_eq!((cells.live(), cells.open()), (&[0b1111, 0xff00, 1][..], 33));
        cells.truncate(12);
        assert_eq!((cells.live(), cells.open()), (&[0b1111, 0xff00][..], 32));
        assert_eq!(cells.hide(5..12), Vec::<usize>::new());
        assert_eq!((cells.live(), cells.open()), (&[0b1111, 0x0100][..], 25));
        assert_eq!(cells.hide(4..5), [1]);
        cells.truncate(0);
        assert_eq!(cells, Cells::default());
        let mut long = Cells::whole(101);
        assert_eq!(long.hide(4..90), [1, 2, 3, 4], "of the first and the last some are left");
        assert_eq!((long.live(), long.n_within(9)), (&[0b1111, 0xfc00, 0x1f][..], 15));
        assert_eq!(long.hide(0..10), [0, 1]);
        assert_eq!((long.live(), long.open()), (&[0x1f][..], 5));
    }

    #[test]
    fn neighbours_that_fit_into_one_page_are_packed() {
        let mut cells = Cells::whole(101);
        cells.hide(20..60); // leaves 16, 4, 4, 16, 16, 5
        assert_eq!(cells.live(), [u16::MAX, 0xf, 0xf000, u16::MAX, u16::MAX, 0x1f]);
        assert_eq!(cells.packable(|_| true), std::slice::from_ref(&(1..3)));
        assert_eq!(cells.packable(|page_idx| page_idx != 2), Vec::<std::ops::Range<usize>>::new());
        let n_tokens = cells.n_within(9);
        cells.pack(1..3);
        assert_eq!(cells.live(), [u16::MAX, 0xff, u16::MAX, u16::MAX, 0x1f]);
        assert_eq!((cells.open(), cells.n_within(9)), (69, n_tokens));
        cells.hide(24..56);
        assert_eq!(cells.live(), [u16::MAX, 0xff, 0x1f]);
        assert_eq!(
            cells.packable(|_| true),
            Vec::<std::ops::Range<usize>>::new(),
            "the last one is written to"
        );
        let mut sparse = Cells::whole(16 * 6);
        for index in (0..6).rev() {
            sparse.hide(16 * index + 5..16 * index + 16);
        }
        sparse.extend(16);
        assert_eq!(sparse.packable(|_| true), [3..5, 0..3]);
    }
}
