//! Where the tokens of an engine's contexts lie, and the keys of their pages.
//!
//! They lie in segments of a fixed length. Contexts that began as one hold the same segments as far as none has written
//! to them since: a fork counts holders and copies nothing. A context that writes into a segment that others hold takes a
//! copy of it first. Memory of segments is used again.

use std::cell::Cell;

use super::PrefixKey;
use super::shared::push_with_room;
use crate::backend::PAGE_LEN;
use crate::batch::{Token, Tokens};

/// The most segments whose memory is laid out at the start: a million tokens.
const N_LAID_OUT_MAX: usize = 4096;

/// Segments that a list has room for at first.
const N_LISTED_MIN: usize = 16;

/// A segment, while a context holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SegmentId(u32);

/// The tokens of some pages, and the key of each page that is full as far as any holder has computed it: it follows from
/// the tokens, so that it is the same for all holders whose tokens reach that far.
#[derive(Clone, Debug, Default)]
struct Segment {
    tokens: Box<[Token]>,
    keys: Box<[PrefixKey]>,
}

/// All segments of one model.
#[derive(Debug)]
pub(crate) struct TokenStore {
    /// Tokens in one segment: whole pages, and a power of two. They are looked up for every token.
    n_segment_bits: u32,
    /// Without memory where none was needed yet, or not for long.
    segments: Vec<Segment>,
    n_holders: Vec<u32>,
    /// Segments without a holder that have memory.
    spare: Vec<SegmentId>,
    /// Segments without memory.
    bare: Vec<SegmentId>,
    /// Segments that had memory from the start: as many are kept for others, whatever else there is.
    n_laid_out: usize,
}

/// The tokens of one context. An owner: it has to be emptied before it is dropped.
#[derive(Debug, Default)]
pub(crate) struct TokenList {
    segments: Vec<SegmentId>, // n_tokens over the length of a segment, rounded up
    n_tokens: usize,
    /// The last segment while it has no other holder, as far as is known. A decoded token is written there without a look at
    /// the counts of holders, which lie far from all else that a row touches.
    own_last: Cell<Option<SegmentId>>,
}

impl Segment {
    fn new(n_tokens: usize) -> Self {
        Self {
            tokens: vec![0; n_tokens].into(),
            keys: vec![PrefixKey::default(); n_tokens / PAGE_LEN].into(),
        }
    }
}

impl TokenStore {
    /// With memory for the tokens of so many pages, up to a bound: decoding then takes it from there.
    ///
    /// # Panics
    /// A segment is not of whole pages, or not as long as a power of two.
    pub(crate) fn new(n_segment_tokens: usize, n_pages: usize) -> Self {
        let is_fit = n_segment_tokens.is_power_of_two() && n_segment_tokens.is_multiple_of(PAGE_LEN);
        assert!(is_fit, "segments of {n_segment_tokens} tokens");
        let mut store = Self {
            n_segment_bits: n_segment_tokens.ilog2(),
            segments: Vec::new(),
            n_holders: Vec::new(),
            spare: Vec::new(),
            bare: Vec::new(),
            n_laid_out: 0,
        };
        store.lay_out(n_pages);
        store
    }

    /// Sees to it that there is memory for the tokens of so many pages, up to a bound.
    pub(super) fn lay_out(&mut self, n_pages: usize) {
        let n_laid_out = (n_pages * PAGE_LEN / self.n_segment_tokens()).min(N_LAID_OUT_MAX);
        let n_added = n_laid_out.saturating_sub(self.n_laid_out);
        self.n_laid_out += n_added;
        let start = self.segments.len();
        let n_segment_tokens = self.n_segment_tokens();
        self.segments.extend((0..n_added).map(|_| Segment::new(n_segment_tokens)));
        self.n_holders.resize(self.segments.len(), 0);
        let ids = (start..self.segments.len()).rev();
        self.spare.extend(ids.map(|idx| SegmentId(u32::try_from(idx).expect("segment counts fit 32 bits"))));
    }

    fn n_segment_tokens(&self) -> usize {
        1 << self.n_segment_bits
    }

    /// The segment of a position, among those of a list, and where in it that is.
    fn place_of(&self, position: usize) -> (usize, usize) {
        (position >> self.n_segment_bits, position & (self.n_segment_tokens() - 1))
    }

    /// What lies in the segment of a position, from the position on.
    pub(crate) fn piece(&self, segments: &[SegmentId], start: usize) -> &[Token] {
        let (idx, offset) = self.place_of(start);
        &self.segments[segments[idx].0 as usize].tokens[offset..]
    }

    fn take(&mut self) -> SegmentId {
        let id = self.spare.pop().unwrap_or_else(|| {
            let id = self.bare.pop().unwrap_or_else(|| {
                self.segments.push(Segment::default());
                self.n_holders.push(0);
                SegmentId(u32::try_from(self.segments.len() - 1).expect("segment counts fit 32 bits"))
            });
            self.segments[id.0 as usize] = Segment::new(self.n_segment_tokens());
            id
        });
        self.n_holders[id.0 as usize] = 1;
        id
    }

    fn release(&mut self, id: SegmentId) {
        let n_holders = &mut self.n_holders[id.0 as usize];
        *n_holders -= 1;
        if *n_holders > 0 {
            return;
        }
        // At most as many spare segments are kept as are used; the memory of the rest is freed.
        let n_used = self.segments.len() - self.spare.len() - self.bare.len();
        if self.spare.len() < self.n_laid_out.max(n_used) {
            self.spare.push(id);
        } else {
            self.segments[id.0 as usize] = Segment::default();
            self.bare.push(id);
        }
    }

    fn segment_mut(&mut self, id: SegmentId) -> &mut Segment {
        &mut self.segments[id.0 as usize]
    }

    /// The segment of a holder's own in this one's place, with the first `n_tokens` tokens and their keys.
    fn own(&mut self, id: &mut SegmentId, n_tokens: usize) {
        if self.n_holders[id.0 as usize] == 1 {
            return;
        }
        let shared = std::mem::replace(id, self.take());
        let [from, to] =
            self.segments.get_disjoint_mut([shared.0 as usize, id.0 as usize]).expect("they are two");
        to.tokens[..n_tokens].copy_from_slice(&from.tokens[..n_tokens]);
        let n_pages = n_tokens / PAGE_LEN;
        to.keys[..n_pages].copy_from_slice(&from.keys[..n_pages]);
        self.release(shared);
    }

    /// Checks that these lists are all that there are.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn check<'a>(&self, lists: impl Iterator<Item = &'a TokenList>) {
        let mut n_holders = vec![0; self.segments.len()];
        for list in lists {
            assert_eq!(list.segments.len(), list.n_tokens.div_ceil(self.n_segment_tokens()));
            if let Some(own) = list.own_last.get() {
                assert_eq!((Some(&own), self.n_holders[own.0 as usize]), (list.segments.last(), 1));
            }
            list.segments.iter().for_each(|id| n_holders[id.0 as usize] += 1);
        }
        for &id in self.spare.iter().chain(&self.bare) {
            assert_eq!(self.n_holders[id.0 as usize], 0, "{id:?} is held and is not");
        }
        assert_eq!(n_holders, self.n_holders);
        let n_unheld = n_holders.iter().filter(|&&n| n == 0).count();
        assert_eq!(n_unheld, self.spare.len() + self.bare.len());
    }

    /// Segments that more than one list holds.
    #[cfg(test)]
    pub(crate) fn n_shared(&self) -> usize {
        self.n_holders.iter().filter(|&&n| n > 1).count()
    }
}

impl TokenList {
    pub(crate) fn len(&self) -> usize {
        self.n_tokens
    }

    /// The same tokens, for another context.
    pub(crate) fn fork(&self, store: &mut TokenStore) -> Self {
        for id in &self.segments {
            store.n_holders[id.0 as usize] += 1;
        }
        self.own_last.set(None);
        Self { segments: self.segments.clone(), n_tokens: self.n_tokens, own_last: Cell::default() }
    }

    /// All of them.
    pub(crate) fn view<'a>(&'a self, store: &'a TokenStore) -> Tokens<'a> {
        Tokens::stored(store, &self.segments, self.n_tokens)
    }

    #[cfg(test)]
    pub(crate) fn push(&mut self, token: Token, store: &mut TokenStore) {
        self.extend(&[token], store);
    }

    pub(crate) fn extend(&mut self, mut tokens: &[Token], store: &mut TokenStore) {
        while !tokens.is_empty() {
            let (_, offset) = store.place_of(self.n_tokens);
            let last = match self.own_last.get() {
                Some(own) if offset > 0 => own,
                _ => self.own_last(offset, store),
            };
            let n = tokens.len().min(store.n_segment_tokens() - offset);
            let (first, rest) = tokens.split_at(n);
            store.segment_mut(last).tokens[offset..offset + n].copy_from_slice(first);
            self.n_tokens += n;
            tokens = rest;
        }
    }

    /// A segment of its own for the token that comes next, at this place in it.
    fn own_last(&mut self, offset: usize, store: &mut TokenStore) -> SegmentId {
        match self.segments.last_mut() {
            Some(last) if offset > 0 => store.own(last, offset),
            _ => {
                let next = store.take();
                push_with_room(&mut self.segments, next, N_LISTED_MIN);
            }
        }
        let last = self.segments.last().copied();
        self.own_last.set(last);
        last.expect("there is one by now")
    }

    /// Keeps the first `n_tokens`, if there are more.
    pub(crate) fn truncate(&mut self, n_tokens: usize, store: &mut TokenStore) {
        self.n_tokens = self.n_tokens.min(n_tokens);
        let (n_full, n_over) = store.place_of(self.n_tokens);
        let n_segments = n_full + usize::from(n_over > 0);
        if n_segments < self.segments.len() {
            self.own_last.set(None);
        }
        self.segments.drain(n_segments..).for_each(|id| store.release(id));
    }

    /// The tokens of one page, all of which are there.
    pub(crate) fn page<'a>(&self, page_idx: usize, store: &'a TokenStore) -> &'a [Token] {
        let start = page_idx * PAGE_LEN;
        assert!(start + PAGE_LEN <= self.n_tokens, "page {page_idx} of {} tokens", self.n_tokens);
        &store.piece(&self.segments, start)[..PAGE_LEN]
    }

    /// The key of a page that was noted for it.
    pub(crate) fn key(&self, page_idx: usize, store: &TokenStore) -> PrefixKey {
        let (idx, offset) = store.place_of(page_idx * PAGE_LEN);
        store.segments[self.segments[idx].0 as usize].keys[offset / PAGE_LEN]
    }

    /// Notes the key of a page. Other contexts that hold the segment and have these tokens have the same key for them.
    pub(crate) fn note_key(&mut self, page_idx: usize, key: PrefixKey, store: &mut TokenStore) {
        let (idx, offset) = store.place_of(page_idx * PAGE_LEN);
        store.segment_mut(self.segments[idx]).keys[offset / PAGE_LEN] = key;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_shares_what_nobody_writes_to() {
        let mut store = TokenStore::new(32, 20);
        let all: Vec<Token> = (0..100).collect();
        let mut parent = TokenList::default();
        parent.extend(&all, &mut store);
        let mut child = parent.fork(&mut store);
        assert_eq!(store.n_shared(), 4);
        child.truncate(40, &mut store);
        child.push(1000, &mut store);
        parent.push(2000, &mut store);
        assert_eq!(store.n_shared(), 1, "each has written into what they shared");
        let expected: Vec<Token> = (0..40).chain([1000]).collect();
        assert_eq!(child.view(&store).to_vec(), expected);
        assert_eq!(parent.view(&store).to_vec(), (0..100).chain([2000]).collect::<Vec<_>>());
        store.check([&parent, &child].into_iter());
        parent.truncate(0, &mut store);
        child.truncate(0, &mut store);
        store.check([&parent, &child].into_iter());
        assert_eq!(store.spare.len(), store.segments.len(), "their memory is there for others");
    }

    #[test]
    fn memory_that_nobody_needs_for_long_goes() {
        let mut store = TokenStore::new(16, 10);
        let mut list = TokenList::default();
        assert_eq!(store.spare.len(), 10);
        list.extend(&[7; 16 * 100], &mut store);
        list.truncate(0, &mut store);
        assert!((10..60).contains(&store.spare.len()), "{}", store.spare.len());
        list.extend(&[7; 16 * 100], &mut store);
        store.check([&list].into_iter());
        assert_eq!(store.segments.len(), 100);
    }
}
