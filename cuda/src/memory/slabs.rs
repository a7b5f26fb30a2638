//! Which pages of host memory get their memory, and lose it, together: bookkeeping alone, whoever locks and maps.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use trellis_engine::backend::HostPiece;
use trellis_engine::batch::HostPageId;

/// A slab of pages, unless one page is larger. A page has to wait for its slab to be locked, which takes some milliseconds, for
/// which calls of the driver may have to wait as well; and a slab goes back to the system only when all of its pages are free, so that
/// it is well below what goes at a time.
pub(crate) const SLAB_BYTES: usize = 16 << 20;

/// Slabs that are locked before anything is in them: as much as moves between two steps.
pub(super) const N_AHEAD: usize = 4;

/// How long no slab is locked ahead after memory was to go back: it would take again what has just gone.
pub(super) const REST: Duration = Duration::from_secs(60);

/// Where pages lie. Each is in one slab whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    n_pages: usize,
    page_bytes: usize,
    n_slab_pages: usize,
}

impl Layout {
    pub(super) fn new(n_pages: usize, page_bytes: usize) -> Self {
        Self { n_pages, page_bytes, n_slab_pages: (SLAB_BYTES / page_bytes.max(1)).max(1) }
    }

    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    pub(super) fn n_slabs(&self) -> usize {
        self.n_pages.div_ceil(self.n_slab_pages)
    }

    /// Bytes of a slab: the last may be shorter.
    pub(super) fn slab_bytes(&self, slab: usize) -> usize {
        self.pages(slab).len() * self.page_bytes
    }

    fn pages(&self, slab: usize) -> Range<usize> {
        slab * self.n_slab_pages..self.n_pages.min((slab + 1) * self.n_slab_pages)
    }

    /// The slab in which these pages lie, and where they begin in there, in bytes.
    ///
    /// # Panics
    /// They are not there, or not in one.
    pub(super) fn place(&self, pages: &Range<usize>) -> (usize, usize) {
        let slab = pages.start / self.n_slab_pages;
        let of_slab = self.pages(slab);
        assert!(pages.start < pages.end && pages.end <= of_slab.end, "{pages:?} of {of_slab:?}");
        (slab, (pages.start - of_slab.start) * self.page_bytes)
    }

    /// The parts of a run of pages that lie in one slab each.
    pub(super) fn cut(&self, pages: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let Self { n_slab_pages, .. } = *self;
        let n = if pages.is_empty() { 0 } else { pages.end.div_ceil(n_slab_pages) };
        (pages.start / n_slab_pages..n)
            .map(move |slab| pages.start.max(slab * n_slab_pages)..pages.end.min((slab + 1) * n_slab_pages))
    }
}

/// What a slab is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Addresses only.
    #[default]
    Bare,
    /// Somebody waits for it.
    Wanted,
    /// It is being locked.
    Coming,
    /// The device copies it by itself.
    Locked,
    /// The system does not lock as much: copies of it work, but the host waits for them.
    Ordinary,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slab {
    stage: Stage,
    /// Something was put there since its memory came.
    is_used: bool,
}

impl Slab {
    fn is_there(&self) -> bool {
        matches!(self.stage, Stage::Locked | Stage::Ordinary)
    }
}

/// Whether the memory of a slab is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Locked,
    Ordinary,
}

/// The slabs, and which of them are to be locked.
#[derive(Debug)]
pub(super) struct Book {
    layout: Layout,
    slabs: Vec<Slab>,
    /// Slabs are locked before somebody waits for them.
    locks_ahead: bool,
    /// But not before this moment, since memory was short.
    rests_until: Option<Instant>,
}

impl Book {
    pub(super) fn new(layout: Layout) -> Self {
        Self { layout, slabs: vec![Slab::default(); layout.n_slabs()], locks_ahead: true, rests_until: None }
    }

    /// Whether a slab has its memory, for something that is put there now. It comes, if it has not.
    pub(super) fn ask(&mut self, slab: usize) -> bool {
        let slab = &mut self.slabs[slab];
        match slab.stage {
            Stage::Bare => slab.stage = Stage::Wanted,
            Stage::Wanted | Stage::Coming => {}
            Stage::Locked | Stage::Ordinary => slab.is_used = true,
        }
        slab.is_used
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.slabs.iter().any(|slab| slab.stage == Stage::Wanted)
    }

    /// The slab to be locked next, which whoever asks does: one that somebody waits for, or else one ahead, if any is to be.
    pub(super) fn next(&mut self, now: Instant) -> Option<usize> {
        self.rests_until = self.rests_until.filter(|&until| now < until);
        let locks_ahead = self.locks_ahead && self.rests_until.is_none();
        let first = |stage| self.slabs.iter().position(|slab| slab.stage == stage);
        let found = first(Stage::Wanted).or_else(|| {
            let n_unused = self.slabs.iter().filter(|slab| slab.is_there() && !slab.is_used).count();
            if locks_ahead && n_unused < N_AHEAD { first(Stage::Bare) } else { None }
        })?;
        self.slabs[found].stage = Stage::Coming;
        Some(found)
    }

    /// No slab is locked ahead before this moment, if there is one.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        self.rests_until
    }

    /// A slab that was to be locked has its memory. Where that is ordinary, none is taken ahead any more.
    pub(super) fn note_came(&mut self, slab: usize, kind: Kind) {
        self.slabs[slab].stage = match kind {
            Kind::Locked => Stage::Locked,
            Kind::Ordinary => Stage::Ordinary,
        };
        self.locks_ahead &= kind == Kind::Locked;
    }

    /// Those that are locked.
    pub(super) fn locked(&self) -> impl Iterator<Item = usize> + '_ {
        let is_locked = |&idx: &usize| self.slabs[idx].stage == Stage::Locked;
        (0..self.slabs.len()).filter(is_locked)
    }

    /// The slabs that have memory and of which all pages are free, the last first: the first are used first. As many as have so many
    /// bytes, of the last perhaps more. Since memory is short, none is locked ahead before `rests_until`.
    pub(super) fn releasable(
        &mut self,
        free: impl IntoIterator<Item = usize>,
        at_most: u64,
        rests_until: Instant,
    ) -> Vec<(usize, Kind)> {
        self.rests_until = Some(rests_until);
        let mut n_free = vec![0; self.slabs.len()];
        free.into_iter().for_each(|page| n_free[page / self.layout.n_slab_pages] += 1);
        let mut n_bytes = 0;
        let mut found = Vec::new();
        for (idx, slab) in self.slabs.iter().enumerate().rev() {
            let kind = match slab.stage {
                Stage::Locked => Kind::Locked,
                Stage::Ordinary => Kind::Ordinary,
                Stage::Bare | Stage::Wanted | Stage::Coming => continue,
            };
            if n_bytes >= at_most {
                break;
            }
            if n_free[idx] == self.layout.pages(idx).len() {
                n_bytes += self.layout.slab_bytes(idx) as u64;
                found.push((idx, kind));
            }
        }
        found
    }

    /// Moves to free pages by which slabs come free that can be given back then, of so many bytes, of the last perhaps more.
    pub(super) fn gather(&self, free: &[HostPageId], at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        let free: BTreeSet<HostPageId> = free.iter().copied().collect();
        let there = (0..self.slabs.len()).filter(|&slab| self.slabs[slab].is_there());
        let pieces = there.map(|slab| {
            let pages = self.layout.pages(slab).map(|page| HostPageId(page as u32));
            let (free, used) = pages.partition(|page| free.contains(page));
            HostPiece { used, free, n_bytes: self.layout.slab_bytes(slab) as u64 }
        });
        HostPiece::gather(pieces.collect(), at_most)
    }

    /// The memory of a slab is not locked any more, and did not go back.
    pub(super) fn note_unlocked(&mut self, slab: usize) {
        self.slabs[slab].stage = Stage::Ordinary;
    }

    /// The memory of a slab went back.
    pub(super) fn note_went(&mut self, slab: usize) {
        self.slabs[slab] = Slab::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: usize = SLAB_BYTES / 4;

    const NONE: [usize; 0] = [];

    /// So many pages, four of which are a slab.
    fn book(n_pages: usize) -> Book {
        Book::new(Layout::new(n_pages, PAGE_BYTES))
    }

    /// Locks what is to be locked, and says what that was.
    fn bring(book: &mut Book) -> Vec<usize> {
        bring_at(book, Instant::now())
    }

    fn bring_at(book: &mut Book, now: Instant) -> Vec<usize> {
        let mut came = Vec::new();
        while let Some(slab) = book.next(now) {
            book.note_came(slab, Kind::Locked);
            came.push(slab);
        }
        came
    }

    fn released(book: &mut Book, free: &[usize], at_most: usize) -> Vec<usize> {
        let going = book.releasable(free.iter().copied(), at_most as u64, Instant::now() + REST);
        going.iter().for_each(|&(slab, _)| book.note_went(slab));
        going.into_iter().map(|(slab, _)| slab).collect()
    }

    #[test]
    fn runs_are_cut_where_slabs_end_and_no_page_is_in_two() {
        let layout = Layout::new(31, PAGE_BYTES);
        let parts = |pages| layout.cut(pages).map(|part| (part.start, part.end)).collect::<Vec<_>>();
        assert_eq!(parts(1..3), [(1, 3)]);
        assert_eq!(parts(4..8), [(4, 8)]);
        assert_eq!(parts(3..13), [(3, 4), (4, 8), (8, 12), (12, 13)]);
        assert_eq!(parts(5..5), []);
        assert_eq!(layout.place(&(5..8)), (1, PAGE_BYTES));
        assert_eq!(
            (layout.n_slabs(), layout.slab_bytes(0), layout.slab_bytes(7)),
            (8, SLAB_BYTES, 3 * PAGE_BYTES)
        );
        // One that is larger is a slab of its own, and one that does not divide a slab leaves a rest.
        let large = Layout::new(3, SLAB_BYTES + 4096);
        assert_eq!((large.n_slabs(), large.place(&(2..3))), (3, (2, 0)));
        assert_eq!(Layout::new(10, SLAB_BYTES / 3).slab_bytes(1), SLAB_BYTES / 3 * 3);
        assert_eq!(Layout::new(0, PAGE_BYTES).n_slabs(), 0);
    }

    #[test]
    #[should_panic(expected = "3..5 of 0..4")]
    fn pages_of_two_slabs_have_no_place() {
        Layout::new(8, PAGE_BYTES).place(&(3..5));
    }

    #[test]
    fn some_slabs_are_locked_ahead_of_what_is_used_and_what_is_waited_for_before_them() {
        let mut book = book(40);
        assert!(!book.ask(7), "it has no memory");
        assert_eq!(bring(&mut book), [7, 0, 1, 2]);
        assert!(book.ask(7) && book.ask(7), "it has");
        // In one of those something is now.
        assert_eq!(bring(&mut book), [3]);
        assert!(book.ask(0) && book.ask(1));
        assert_eq!(bring(&mut book), [4, 5]);
    }

    #[test]
    fn slabs_go_whole_the_last_first_and_no_more_than_asked_for() {
        let mut book = book(31);
        for slab in 0..8 {
            book.ask(slab);
        }
        bring(&mut book);
        let but = |used: &[usize]| (0..31).filter(|page| !used.contains(page)).collect::<Vec<_>>();
        assert_eq!(released(&mut book, &but(&[]), 0), NONE);
        // One page in use keeps its slab.
        let free = but(&[5, 27]);
        assert_eq!(released(&mut book, &free, 4 * PAGE_BYTES), [7, 5], "the last is shorter");
        assert_eq!(released(&mut book, &free, 1), [4], "a slab more or less");
        assert_eq!(released(&mut book, &free, usize::MAX), [3, 2, 0]);
        assert_eq!(released(&mut book, &free, usize::MAX), NONE);
        // While memory is short nothing comes back by itself, until something moves there.
        assert_eq!(bring(&mut book), NONE);
        assert!(!book.ask(0));
        assert_eq!(bring(&mut book), [0]);
        assert_eq!(book.locked().collect::<Vec<_>>(), [0, 1, 6]);
    }

    #[test]
    fn slabs_are_locked_ahead_again_some_time_after_the_last_had_to_go() {
        let mut book = book(40);
        assert_eq!(bring(&mut book), [0, 1, 2, 3]);
        let all = || 0..40;
        let begun = Instant::now();
        for round in 0..2 {
            let until = begun + REST * (round + 1);
            for (slab, _) in book.releasable(all(), u64::MAX, until) {
                book.note_went(slab);
            }
            assert_eq!(book.rests_until(), Some(until), "each time anew");
            assert_eq!(bring_at(&mut book, until - Duration::from_millis(1)), NONE);
        }
        assert_eq!(bring_at(&mut book, begun + REST * 2), [0, 1, 2, 3]);
        assert_eq!(book.rests_until(), None, "nobody has to look at a clock any more");
    }

    #[test]
    fn what_is_being_locked_does_not_go() {
        let mut book = book(8);
        assert_eq!(book.next(Instant::now()), Some(0));
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(released(&mut book, &all, usize::MAX), NONE);
        book.note_came(0, Kind::Locked);
        assert_eq!(released(&mut book, &all, usize::MAX), [0]);
    }

    #[test]
    fn what_lies_apart_moves_together_in_slabs_that_have_memory() {
        let mut book = book(24);
        [1, 2, 4].iter().for_each(|&slab| _ = book.ask(slab));
        assert_eq!(bring(&mut book)[..3], [1, 2, 4]);
        let free = |used: &[u32]| {
            (0..24).filter(|page| !used.contains(page)).map(HostPageId).collect::<Vec<HostPageId>>()
        };
        let moved = book.gather(&free(&[4, 5, 6, 9, 16]), u64::MAX);
        assert_eq!(
            moved,
            [(HostPageId(16), HostPageId(7))],
            "the other has no room, and nothing goes to slab 0"
        );
        assert_eq!(book.gather(&free(&[4, 5, 6, 7, 9]), u64::MAX), []);
    }

    #[test]
    fn where_the_system_locks_no_more_nothing_is_taken_ahead() {
        let mut book = book(40);
        assert_eq!(book.next(Instant::now()), Some(0));
        book.note_came(0, Kind::Ordinary);
        assert_eq!(book.next(Instant::now()), None);
        assert!(!book.ask(3) && book.is_wanted());
        assert_eq!(book.next(Instant::now()), Some(3));
        book.note_came(3, Kind::Ordinary);
        assert!(book.ask(3) && !book.is_wanted());
        assert_eq!(book.releasable(12..16, u64::MAX, Instant::now()), [(3, Kind::Ordinary)]);
        assert_eq!(book.locked().count(), 0);
    }
}
