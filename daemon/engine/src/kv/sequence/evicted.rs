//! A sequence from which tokens were evicted.
//!
//! All its tokens stay written down, those that are gone too: a KV that was computed while they were there has seen them, so
//! it can only be computed again with them. Evictions take effect where they were made, between two tokens: what comes before
//! is computed first, and a row ends there. So what was lost is computed again as it was the first time, hole by hole.

use std::ops::Range;

use super::super::cells::Cells;
use super::super::evictions::{Evictions, Gaps, N_STRETCHES_MAX, Positions, TooManyStretches};
use super::super::tokens::TokenList;
use super::super::{BlockId, PageTable, TokenStore};
use super::Sequence;
use crate::backend::PAGE_LEN;
use crate::batch::{Evicted, Pack, Stretch, Token, Tokens};
use crate::error::EngineError;

/// What a sequence knows beside its tokens once some were evicted.
#[derive(Debug)]
pub(super) struct Holed {
    evictions: Evictions,
    /// Evictions that have taken effect.
    n_applied: usize,
    /// What those come to.
    gaps: Gaps,
    /// Where the computed tokens lie.
    cells: Cells,
    /// Tokens that are there up to the next eviction that is to take effect, or all.
    tokens: TokenList,
    /// The stretches by their first cells.
    stretches: Vec<Stretch>,
    /// The most blocks that it needs on the way to the last eviction.
    n_blocks_most: usize,
    /// What the row that was planned last has to copy first.
    packs: Vec<Pack>,
}

impl Holed {
    fn new(tokens: &TokenList, n_computed: usize, store: &mut TokenStore) -> Self {
        let mut holed = Self {
            evictions: Evictions::default(),
            n_applied: 0,
            gaps: Gaps::default(),
            cells: Cells::whole(n_computed),
            tokens: tokens.fork(store),
            stretches: Vec::new(),
            n_blocks_most: 0,
            packs: Vec::new(),
        };
        holed.find_stretches();
        holed
    }

    fn fork(&self, store: &mut TokenStore) -> Self {
        let Self { evictions, n_applied, gaps, cells, tokens, stretches, n_blocks_most, .. } = self;
        Self {
            evictions: evictions.clone(),
            n_applied: *n_applied,
            gaps: gaps.clone(),
            cells: cells.clone(),
            tokens: tokens.fork(store),
            stretches: stretches.clone(),
            n_blocks_most: *n_blocks_most,
            packs: Vec::new(),
        }
    }

    /// Number of the first token that is computed after the next eviction.
    fn next_at(&self) -> Option<usize> {
        self.evictions.list().get(self.n_applied).map(|eviction| eviction.at())
    }

    /// The same of the last eviction that has taken effect.
    fn last_at(&self) -> usize {
        self.evictions.list()[..self.n_applied].last().map_or(0, |eviction| eviction.at())
    }

    /// The cell of the token of this number, which is not computed, or which comes next.
    fn cell_ahead(&self, number: usize, n_computed: usize) -> usize {
        self.cells.open() + (number - n_computed)
    }

    /// The most blocks that a sequence which holds so many needs for all tokens before `end` where evictions are still to
    /// take effect.
    fn n_blocks_anew(&self, n_held: usize, end: usize) -> usize {
        let last = self.evictions.list().last().map_or(0, |eviction| eviction.at());
        let n_after = end.saturating_sub(last);
        self.n_blocks_most.max(n_held) + n_after.div_ceil(PAGE_LEN) + 1
    }

    /// Writes down the tokens from an index on that are there before the next eviction.
    fn list_from(&mut self, index: usize, all: &TokenList, store: &mut TokenStore) {
        self.tokens.truncate(index, store);
        let start = self.gaps.number_of(index);
        let end = self.next_at().unwrap_or(all.len()).max(start);
        let kept: Vec<Range<usize>> = self.gaps.kept_within(start..end).collect();
        for numbers in kept {
            let tokens = all.view(store).copy_of(numbers);
            self.tokens.extend(&tokens, store);
        }
    }

    fn find_stretches(&mut self) {
        let Self { gaps, cells, stretches, .. } = self;
        let last = gaps.last_stretch();
        stretches.clear();
        stretches.extend(gaps.stretches().iter().map(|stretch| Stretch {
            first_cell: cells.cell_of(gaps.index_of(stretch.first)),
            extra_rotation: last.turned_back as i64 - last.closed_up as i64 + stretch.closed_up as i64
                - stretch.turned_back as i64,
        }));
    }
}

impl Sequence {
    /// Tokens that are there, those included that are to be computed.
    pub(crate) fn n_kept(&self) -> usize {
        self.tokens.len() - self.n_evicted()
    }

    /// Tokens that are gone, or will be once all before the last token is computed.
    pub(crate) fn n_evicted(&self) -> usize {
        self.holed.as_ref().map_or(0, |holed| holed.evictions.n_evicted())
    }

    /// The evictions, if there were any.
    pub(crate) fn evictions(&self) -> Option<&Evictions> {
        self.holed.as_ref().map(|holed| &holed.evictions)
    }

    /// Whether any tokens were evicted.
    pub(crate) fn is_holed(&self) -> bool {
        self.holed.is_some()
    }

    /// The position after the last token.
    pub(crate) fn end_position(&self) -> usize {
        self.tokens.len() - self.holed.as_ref().map_or(0, |holed| holed.evictions.n_closed_up())
    }

    /// The most tokens with which it has a position for each, of so many.
    pub(crate) fn n_tokens_most(&self, n_positions: usize) -> usize {
        n_positions + self.tokens.len() - self.end_position()
    }

    /// The first blocks that a row cannot have written to which began with the token of this number, whatever has been done
    /// with the sequence since.
    pub(crate) fn n_blocks_untouched(&self, start: usize) -> usize {
        if self.is_holed() { 0 } else { start / PAGE_LEN }
    }

    /// Evictions that take effect once all before them is computed.
    pub(crate) fn n_evictions_due(&self) -> usize {
        self.holed.as_ref().map_or(0, |holed| holed.evictions.list().len() - holed.n_applied)
    }

    /// Evictions that it keeps.
    pub(crate) fn n_evictions(&self) -> usize {
        self.evictions().map_or(0, |evictions| evictions.list().len())
    }

    /// Tokens from the first on, those that are gone included, up to the end of the first `n_kept` that are there.
    pub(super) fn n_numbers(&self, n_kept: usize) -> usize {
        match (&self.holed, n_kept.checked_sub(1)) {
            (Some(holed), Some(last)) => holed.evictions.gaps().number_of(last) + 1,
            _ => n_kept,
        }
    }

    /// Whether tokens from this number on are gone.
    pub(super) fn has_holes_from(&self, number: usize) -> bool {
        let holed = self.holed.as_ref();
        holed.is_some_and(|holed| {
            holed.evictions.list().iter().any(|eviction| eviction.numbers().start >= number)
        })
    }

    /// Where the tokens end that can be computed before the next eviction.
    pub(crate) fn up_to_eviction(&self, end: usize) -> usize {
        self.holed.as_ref().and_then(|holed| holed.next_at()).map_or(end, |at| end.min(at))
    }

    /// Cells from the first on up to the one that takes the token of this number, which is to be computed.
    fn n_cells_before(&self, number: usize) -> usize {
        match &self.holed {
            Some(holed) if number >= self.n_computed => holed.cell_ahead(number, self.n_computed),
            Some(holed) => holed.cells.cell_of(holed.gaps.index_of(number)),
            None => number,
        }
    }

    /// The block that takes the token of this number.
    pub(crate) fn block_of(&self, number: usize) -> usize {
        self.n_cells_before(number) / PAGE_LEN
    }

    /// Tokens of that block from the first on that are computed before the one of this number.
    pub(crate) fn n_before_in_block(&self, number: usize) -> usize {
        self.n_cells_before(number) % PAGE_LEN
    }

    /// Blocks that hold all tokens before `end`, which can be computed before the next eviction.
    pub(crate) fn n_blocks_to(&self, end: usize) -> usize {
        self.n_cells_before(end).div_ceil(PAGE_LEN)
    }

    /// The most blocks that it needs until all tokens before `end` are computed.
    pub(crate) fn n_blocks_until(&self, end: usize) -> usize {
        match &self.holed {
            Some(holed) if holed.next_at().is_some() => holed.n_blocks_anew(self.blocks.len(), end),
            _ => self.n_blocks_to(end),
        }
    }

    /// As [`Self::n_blocks_until`], also if it loses KV meanwhile: its evictions are then gone through once more.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn n_blocks_until_anew(&self, end: usize) -> usize {
        let anew = self.holed.as_ref().map_or(0, |holed| holed.n_blocks_anew(self.blocks.len(), end));
        anew.max(self.n_blocks_until(end))
    }

    /// What a row that begins with the token of this number knows of its context's evictions.
    pub(crate) fn evicted(&self, start: usize) -> Option<Evicted<'_>> {
        let holed = self.holed.as_ref()?;
        Some(Evicted {
            n_evicted: holed.gaps.n_evicted(),
            rotation: start - holed.gaps.last_stretch().turned_back,
            cell: holed.cell_ahead(start.max(self.n_computed), self.n_computed),
            n_whole: None,
            live: holed.cells.live(),
            open: holed.cells.open(),
            stretches: &holed.stretches,
            packs: &holed.packs,
        })
    }

    /// The tokens before `end` that are there, as a row with that end sees them.
    pub(crate) fn row_tokens<'a>(&'a self, end: usize, pages: &'a PageTable) -> Tokens<'a> {
        let end = end.min(self.tokens.len());
        match &self.holed {
            None => self.view(pages).first(end),
            Some(holed) => holed.tokens.view(&pages.tokens).first(holed.gaps.index_of(end)),
        }
    }

    /// The tokens that are there, or will be once all before the last token is computed, of one from which some were evicted.
    pub(crate) fn kept_tokens<'a>(&'a self, pages: &'a PageTable) -> impl Iterator<Item = Token> + 'a {
        let numbers = 0..self.tokens.len();
        let kept =
            self.holed.iter().flat_map(move |holed| holed.evictions.gaps().kept_within(numbers.clone()));
        kept.flat_map(|numbers| self.view(pages).iter_range(numbers))
    }

    /// The index of a token, or of the end, that a row computes.
    pub(crate) fn row_index(&self, number: usize) -> usize {
        self.holed.as_ref().map_or(number, |holed| holed.gaps.index_of(number))
    }

    /// Takes out tokens by their indices; the last token stays. What is before the last has seen them, the last has not.
    ///
    /// # Errors
    /// They are not before the last token, or too many stretches would be left; nothing has changed then.
    pub(crate) fn evict(
        &mut self,
        indices: Range<usize>,
        positions: Positions,
        n_positions: usize,
        pages: &mut PageTable,
    ) -> Result<(), EngineError> {
        let n_kept = self.n_kept();
        if indices.is_empty() || indices.end >= n_kept {
            return Err(EngineError::NotThere { start: indices.start, end: indices.end, length: n_kept });
        }
        let evicted = match &self.holed {
            Some(holed) => holed.evictions.after(indices, n_kept, positions, n_positions),
            None => Evictions::default().after(indices, n_kept, positions, n_positions),
        };
        let evicted = evicted.map_err(|TooManyStretches { n_stretches }| EngineError::TooManyStretches {
            n_stretches,
            n_stretches_max: N_STRETCHES_MAX,
        })?;
        let last = self.tokens.len() - 1;
        self.rewind(last, pages);
        let n_blocks = match &self.holed {
            // A hole leaves two pages that are not full.
            Some(holed) if holed.next_at().is_some() => {
                n_kept.div_ceil(PAGE_LEN) + 2 * holed.evictions.gaps().n_holes() + 1
            }
            _ => self.n_blocks_to(last),
        };
        let Self { holed, tokens, n_computed, .. } = self;
        let holed = holed.get_or_insert_with(|| Box::new(Holed::new(tokens, *n_computed, &mut pages.tokens)));
        holed.n_blocks_most = holed.n_blocks_most.max(n_blocks);
        holed.evictions.take(evicted);
        let n_listed = holed.gaps.index_of(last);
        if holed.next_at().is_some_and(|at| at == last) {
            holed.list_from(n_listed.min(holed.tokens.len()), tokens, &mut pages.tokens);
        }
        self.apply_due(pages);
        Ok(())
    }

    /// Lets the evictions take effect before which all is computed.
    pub(super) fn apply_due(&mut self, pages: &mut PageTable) {
        // What lies before this index is where it was.
        let mut first_changed = None;
        while let Some(holed) = &mut self.holed
            && holed.next_at().is_some_and(|at| at <= self.n_computed)
        {
            let eviction = holed.evictions.list()[holed.n_applied];
            let numbers = eviction.numbers();
            self.n_keys = self.n_keys.min(numbers.start / PAGE_LEN);
            let indices = holed.gaps.index_of(numbers.start)..holed.gaps.index_of(numbers.end);
            let gone = holed.cells.hide(indices.clone());
            holed.gaps.apply(&eviction);
            holed.n_applied += 1;
            first_changed =
                Some(first_changed.map_or(indices.start, |first: usize| first.min(indices.start)));
            self.release_blocks(&gone, pages);
        }
        if let (Some(first_changed), Some(holed)) = (first_changed, &mut self.holed) {
            holed.list_from(first_changed, &self.tokens, &mut pages.tokens);
            holed.find_stretches();
            self.trim(pages);
            self.unbundle_unwritten(pages);
        }
    }

    /// Forgets what an earlier row had to copy; returns blocks that can be packed into one each, the last first. No other
    /// context holds them.
    pub(crate) fn begin_packing(&mut self, pages: &PageTable) -> Vec<Range<usize>> {
        let n_bundled = self.n_bundled(pages);
        let Some(holed) = &mut self.holed else { return Vec::new() };
        holed.packs.clear();
        let blocks = &self.blocks;
        holed.cells.packable(|idx| idx >= n_bundled && !pages.is_shared(blocks[idx]))
    }

    /// Puts a block in the place of some; the row that is being planned copies what is in them to it. They stay where they are
    /// until it has.
    pub(crate) fn pack(&mut self, blocks: Range<usize>, own: BlockId, pages: &mut PageTable) {
        let holed = self.holed.as_mut().expect("tokens were evicted");
        let page = |block: BlockId, pages: &PageTable| pages.page(block).expect("it is on the device");
        let gone = &self.blocks[blocks.clone()];
        let bits = &holed.cells.live()[blocks.clone()];
        let from = gone.iter().zip(bits).map(|(&block, &bits)| (page(block, pages), bits)).collect();
        holed.packs.push(Pack { from, to: page(own, pages) });
        holed.cells.pack(blocks.clone());
        holed.find_stretches();
        self.places.n_same = self.places.n_same.min(blocks.start);
        let gone: Vec<BlockId> = self.blocks.own().splice(blocks, [own]).collect();
        self.own_from = self.blocks.len();
        for block in gone {
            pages.pin(block);
            pages.release(block, &self.account);
        }
    }

    /// Lets go of some blocks among others.
    fn release_blocks(&mut self, indices: &[usize], pages: &mut PageTable) {
        let Some(&first) = indices.first() else { return };
        while self.n_bundled(pages) > first {
            self.unbundle_last(pages);
        }
        self.places.n_same = self.places.n_same.min(first);
        let gone: Vec<BlockId> = indices.iter().map(|&idx| self.blocks[idx]).collect();
        let mut idx = 0;
        self.blocks.own().retain(|_| {
            idx += 1;
            indices.binary_search(&(idx - 1)).is_err()
        });
        self.own_from = self.blocks.len();
        gone.into_iter().rev().for_each(|block| pages.release(block, &self.account));
    }

    /// Notes in the cells that the tokens before `n_computed` are computed and no others.
    pub(super) fn note_computed(&mut self, n_computed: usize) {
        if let Some(holed) = &mut self.holed {
            if n_computed >= self.n_computed {
                holed.cells.extend(n_computed - self.n_computed);
            } else {
                holed.cells.truncate(holed.gaps.index_of(n_computed));
                holed.find_stretches();
            }
        }
        self.n_computed = n_computed;
    }

    /// Writes down a token that was appended.
    pub(super) fn list_appended(&mut self, tokens: &[Token], pages: &mut PageTable) {
        if let Some(holed) = &mut self.holed
            && holed.next_at().is_none()
        {
            holed.tokens.extend(tokens, &mut pages.tokens);
        }
    }

    /// Forgets tokens from this number on; the one before it is there.
    pub(super) fn truncate_holed(&mut self, n_numbers: usize, pages: &mut PageTable) {
        let Some(mut holed) = self.holed.take() else { return };
        let n_kept = holed.evictions.gaps().index_of(n_numbers);
        let before = holed.evictions.list().len();
        let kept_applied = holed.evictions.list()[..holed.n_applied]
            .iter()
            .filter(|e| e.numbers().start < n_numbers)
            .count();
        let has_changed = holed.evictions.truncate(n_kept);
        let n_computed = self.n_computed.min(if has_changed { n_numbers - 1 } else { n_numbers });
        if holed.evictions.is_empty() {
            // What is left has seen no eviction.
            holed.tokens.truncate(0, &mut pages.tokens);
            self.n_computed = n_computed;
            return self.enter_keys(pages);
        }
        self.n_once_computed = self.n_once_computed.min(if has_changed { n_numbers - 1 } else { n_numbers });
        self.n_to_state = self.n_to_state.filter(|&n| n <= n_computed);
        let has_fewer = holed.evictions.list().len() < before || has_changed;
        holed.n_applied = kept_applied;
        holed.gaps.truncate(n_numbers);
        holed.cells.truncate(holed.gaps.index_of(n_computed));
        self.n_computed = n_computed;
        let n_listed = match has_fewer {
            true => holed.gaps.index_of(n_computed),
            false => holed.gaps.index_of(n_numbers),
        };
        if n_listed < holed.tokens.len() || has_fewer {
            holed.list_from(n_listed.min(holed.tokens.len()), &self.tokens, &mut pages.tokens);
        }
        holed.find_stretches();
        self.holed = Some(holed);
        self.apply_due(pages);
    }

    /// What it computes again once it holds its first `n_blocks` blocks alone: all from the first hole on, unless no
    /// eviction came after the tokens that are lost. Returns how many of the blocks are of use.
    pub(super) fn lose_holed(&mut self, n_blocks: usize, pages: &mut PageTable) -> usize {
        let Some(holed) = &mut self.holed else { return n_blocks };
        let n_kept = holed.cells.n_within(n_blocks);
        let number = holed.gaps.number_of(n_kept).min(self.n_computed);
        if number == self.n_computed {
            return n_blocks;
        }
        if number >= holed.last_at() {
            self.note_computed(number);
            return n_blocks;
        }
        let n_whole = holed.gaps.first_hole().map_or(n_blocks, |first| n_blocks.min(first / PAGE_LEN));
        holed.n_applied = 0;
        holed.gaps = Gaps::default();
        holed.cells = Cells::whole(n_whole * PAGE_LEN);
        holed.list_from(n_whole * PAGE_LEN, &self.tokens, &mut pages.tokens);
        holed.find_stretches();
        // Its last token is not asked about before the holes are there again.
        self.n_to_state = None;
        self.n_computed = n_whole * PAGE_LEN;
        n_whole
    }

    /// Has these evictions take effect once the tokens before them are computed; none of its tokens is.
    ///
    /// # Panics
    /// Some are computed, or evicted.
    pub(super) fn restore_evictions(&mut self, evictions: Evictions, pages: &mut PageTable) {
        assert!(
            self.n_computed == 0 && !self.is_holed(),
            "a sequence is restored before anything is computed"
        );
        let mut holed = Holed::new(&self.tokens, 0, &mut pages.tokens);
        let n_holes = evictions.list().len();
        let longest = evictions.lengths().max().unwrap_or(0);
        // A hole leaves two pages that are not full.
        holed.n_blocks_most = longest.div_ceil(PAGE_LEN) + 2 * n_holes + 1;
        holed.evictions = evictions;
        holed.list_from(0, &self.tokens, &mut pages.tokens);
        holed.find_stretches();
        self.holed = Some(Box::new(holed));
    }

    /// The first blocks whose tokens no eviction has touched.
    pub(super) fn n_blocks_before_holes(&self) -> Option<usize> {
        let first = self.holed.as_ref()?.evictions.gaps().first_hole();
        Some(first.map_or(usize::MAX, |first| first / PAGE_LEN))
    }

    /// The same for another context.
    pub(super) fn fork_holed(&self, pages: &mut PageTable) -> Option<Box<Holed>> {
        self.holed.as_ref().map(|holed| Box::new(holed.fork(&mut pages.tokens)))
    }

    /// The lists of tokens that it holds.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn lists(&self) -> impl Iterator<Item = &TokenList> {
        [&self.tokens].into_iter().chain(self.holed.as_ref().map(|holed| &holed.tokens))
    }
}
