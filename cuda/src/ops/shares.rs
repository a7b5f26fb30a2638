//! Which block of attention works on what: tiles of queries, cut along their keys and dealt to workers.
//!
//! - Comes in: tiles, each with the pages that its queries attend to; how many workers are resident together.
//! - Goes out: a list of shares for each worker, about as many bytes or operations for each, so that they end together;
//!   which tiles were cut, so that their parts are summed.
//! - Must not happen: a page that is read twice for a tile, or not at all; work that follows the longest context times
//!   the rows; an allocation once the lists have been as long before.
//!
//! Source of the cutting: stream-K (arXiv 2301.03598), which cuts the work of a product into equal spans.

use crate::Plain;

/// Shares of one tile at most.
pub const N_SHARES_MAX: usize = 128;

/// What beginning and ending a share costs, in pages.
const SHARE_PAGES: usize = 4;

/// Lengths are told apart in so many steps when tiles are put in order.
const N_LENGTHS: usize = 256;

/// Whole tiles may take longer than equal spans by one part of so many: cutting costs about that much.
const WHOLE_TOLERANCE: usize = 10;

/// A part of a tile is no shorter than an equal span's part of so many.
const SPAN_PARTS: usize = 12;

/// A page of a context, as its page table says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct PageEntry(pub u32);

// SAFETY: one word.
unsafe impl Plain for PageEntry {}

/// Consecutive tokens of a context that are worked on together, and the pages that they attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The first token, among the step's.
    pub token: u32,
    /// How many.
    pub n_tokens: u16,
    /// Position of the first.
    pub position: u32,
    /// Where the context's page table begins.
    pub entries: u32,
    /// First of the pages.
    pub page_begin: u32,
    /// The page behind the last.
    pub page_end: u32,
}

/// Some pages for one tile: a part of what a worker does. As the kernels read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Share {
    /// As of the tile.
    pub token: u32,
    /// As of the tile.
    pub position: u32,
    /// As of the tile.
    pub entries: u32,
    /// First of its pages.
    pub page_begin: u32,
    /// The page behind the last.
    pub page_end: u32,
    /// The worker's next share in the list; 0, which no share follows, after its last.
    pub next: u32,
    /// As of the tile.
    pub n_tokens: u16,
    /// Shares of the tile; 0 where its one result is left to be put together with others.
    pub n_shares: u16,
    /// Which of them.
    pub share_idx: u16,
    /// The place of the tile's first partial result, where there are several shares.
    pub partial: u16,
}

/// Words of a [`Share`].
pub const SHARE_WORDS: usize = 8;
const _: () = assert!(size_of::<Share>() == 4 * SHARE_WORDS);

// SAFETY: words and halves of words without padding.
unsafe impl Plain for Share {}

/// A tile of several shares. As the kernel that sums them reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Cut {
    /// As of the tile.
    pub token: u32,
    /// The place of its first partial result; the others follow.
    pub partial: u32,
    /// As of the tile.
    pub n_tokens: u32,
    /// Its shares.
    pub n_shares: u32,
}

/// Words of a [`Cut`].
pub const CUT_WORDS: usize = 4;
const _: () = assert!(size_of::<Cut>() == 4 * CUT_WORDS);

// SAFETY: words without padding.
unsafe impl Plain for Cut {}

/// How a kernel wants its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cutting {
    /// Tokens of a tile at most.
    pub tile_tokens: usize,
    /// Workers that are resident together.
    pub n_workers: usize,
    /// Tiles are cut at multiples of so many pages.
    pub quantum_pages: usize,
}

/// The tokens of a context in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// The first, among the step's.
    pub token: usize,
    /// How many.
    pub n_tokens: usize,
    /// Position of the first.
    pub position: usize,
    /// Where the context's page table begins.
    pub entries: usize,
    /// Pages from the first on that are those of the row before it too, and may be read once for both.
    pub n_pages_alike: usize,
    /// Whether tokens were evicted from the context: positions are then cells of its pages.
    pub has_holes: bool,
}

impl RowSpan {
    /// Adds the row's tiles. A query attends to `window` positions, its own included; `None` for all up to its own.
    ///
    /// # Panics
    /// A tile has no tokens, or a window no position.
    pub fn tiles(self, tile_tokens: usize, window: Option<usize>, page_len: usize, tiles: &mut Vec<Tile>) {
        assert!(tile_tokens > 0 && window != Some(0), "tiles of {tile_tokens}, a window of {window:?}");
        for offset in (0..self.n_tokens).step_by(tile_tokens) {
            let n_tokens = tile_tokens.min(self.n_tokens - offset);
            let position = self.position + offset;
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            tiles.push(Tile {
                token: (self.token + offset) as u32,
                n_tokens: n_tokens as u16,
                position: position as u32,
                entries: self.entries as u32,
                page_begin: (first / page_len) as u32,
                page_end: (position + n_tokens).div_ceil(page_len) as u32,
            });
        }
    }
}

impl Tile {
    fn n_pages(&self) -> usize {
        (self.page_end - self.page_begin) as usize
    }

    fn cost(&self) -> usize {
        self.n_pages() + SHARE_PAGES
    }
}

impl Share {
    fn of(tile: &Tile, page_begin: u32, page_end: u32) -> Self {
        Self {
            token: tile.token,
            position: tile.position,
            entries: tile.entries,
            page_begin,
            page_end,
            next: 0,
            n_tokens: tile.n_tokens,
            n_shares: 1,
            share_idx: 0,
            partial: 0,
        }
    }
}

/// The work of one launch; kept from step to step for its memory.
#[derive(Debug, Default)]
pub struct ShareList {
    /// Worker `w` begins with share `w`.
    pub shares: Vec<Share>,
    /// Workers that have work.
    pub n_workers: usize,
    /// Tiles of several shares.
    pub cuts: Vec<Cut>,
    /// Shares of tiles that were cut.
    pub n_partials: usize,
    /// Spans in order, each share with its worker.
    spans: Vec<(Share, usize)>,
    /// Tiles by length, the longest first.
    order: Vec<u32>,
    counts: Vec<u32>,
}

/// The most that a list has, for so many tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListSize {
    /// Shares.
    pub n_shares: usize,
    /// Workers.
    pub n_workers: usize,
    /// Tiles that were cut.
    pub n_cuts: usize,
}

impl ListSize {
    /// Nothing.
    pub const NONE: Self = Self { n_shares: 0, n_workers: 0, n_cuts: 0 };

    /// The longer of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            n_shares: self.n_shares.max(other.n_shares),
            n_workers: self.n_workers.max(other.n_workers),
            n_cuts: self.n_cuts.max(other.n_cuts),
        }
    }

    /// The most that comes of `n_tiles` tiles.
    #[must_use]
    pub fn most(n_tiles: usize, cutting: Cutting) -> Self {
        // Two workers that follow each other share a tile at most.
        let n_cuts = cutting.n_spans_max().min(n_tiles);
        Self {
            n_shares: n_tiles + cutting.n_spans_max(),
            n_workers: n_tiles.max(cutting.n_spans_max()),
            n_cuts,
        }
    }
}

impl Cutting {
    /// Equal spans at most: a tile may go through all of them.
    pub(super) fn n_spans_max(self) -> usize {
        self.n_workers.clamp(1, N_SHARES_MAX)
    }

    /// Partial results at most: a span has one where it begins and one where it ends.
    #[must_use]
    pub fn n_partials_max(self) -> usize {
        2 * self.n_spans_max()
    }
}

impl ShareList {
    /// Deals the tiles to workers: whole, the longest first, where that ends about as early as equal spans would;
    /// in equal spans otherwise, one for each worker, of which the first and the last tile may be cut.
    ///
    /// # Panics
    /// A tile has no pages.
    pub fn plan(&mut self, tiles: &[Tile], cutting: Cutting) {
        self.clear();
        assert!(tiles.iter().all(|tile| tile.page_begin < tile.page_end), "a tile has pages");
        if tiles.is_empty() {
            return;
        }
        self.sort(tiles);
        if self.ends_together_whole(tiles, cutting.n_workers.max(1)) {
            self.n_workers = tiles.len();
            let shares = self.order.iter().map(|&idx| &tiles[idx as usize]);
            self.shares.extend(shares.map(|tile| Share::of(tile, tile.page_begin, tile.page_end)));
            return;
        }
        self.cut(tiles, cutting);
        self.deal();
    }

    /// Has what was planned left for another launch to put together with others, also of tiles that were not cut. The tiles are
    /// then listed in the order of their tokens.
    ///
    /// # Panics
    /// There are more tiles than spans.
    pub fn leave_apart(&mut self) {
        for share in self.shares.iter_mut().filter(|share| share.n_shares == 1) {
            let partial = self.n_partials;
            (share.n_shares, share.partial) = (0, u16::try_from(partial).expect("few tiles"));
            self.cuts.push(Cut {
                token: share.token,
                partial: partial as u32,
                n_tokens: u32::from(share.n_tokens),
                n_shares: 1,
            });
            self.n_partials += 1;
        }
        self.cuts.sort_unstable_by_key(|cut| cut.token);
    }

    /// Deals tiles to a worker each, whole, whose results are left at these places.
    pub fn plan_apart(&mut self, tiles: &[(Tile, u16)]) {
        self.clear();
        self.n_workers = tiles.len();
        let share = |&(tile, partial): &(Tile, u16)| Share {
            n_shares: 0,
            partial,
            ..Share::of(&tile, tile.page_begin, tile.page_end)
        };
        self.shares.extend(tiles.iter().map(share));
    }

    /// Leaves nothing to do.
    pub fn clear(&mut self) {
        self.shares.clear();
        self.cuts.clear();
        self.spans.clear();
        (self.n_workers, self.n_partials) = (0, 0);
    }

    /// The list's lengths.
    #[must_use]
    pub fn size(&self) -> ListSize {
        ListSize { n_shares: self.shares.len(), n_workers: self.n_workers, n_cuts: self.cuts.len() }
    }

    /// Puts the tiles in order by about how long they are, the longest first, in linear time.
    fn sort(&mut self, tiles: &[Tile]) {
        let longest = tiles.iter().map(Tile::cost).max().unwrap_or(1);
        let place = |tile: &Tile| (longest - tile.cost()) * (N_LENGTHS - 1) / longest;
        self.counts.clear();
        self.counts.resize(N_LENGTHS + 1, 0);
        for tile in tiles {
            self.counts[place(tile) + 1] += 1;
        }
        for idx in 0..N_LENGTHS {
            self.counts[idx + 1] += self.counts[idx];
        }
        self.order.clear();
        self.order.resize(tiles.len(), 0);
        for (idx, tile) in tiles.iter().enumerate() {
            let next = &mut self.counts[place(tile)];
            self.order[*next as usize] = idx as u32;
            *next += 1;
        }
    }

    /// Whether whole tiles, which workers take one after the other, end about as early as equal spans. With k n + 1
    /// tiles of a length or longer, one of n workers has k + 1 of them.
    fn ends_together_whole(&self, tiles: &[Tile], n_workers: usize) -> bool {
        let total: usize = tiles.iter().map(Tile::cost).sum();
        let longest = self.order.iter().step_by(n_workers).zip(1..);
        let end = longest.map(|(&idx, k)| k * tiles[idx as usize].cost()).max().unwrap_or(0);
        end * n_workers * WHOLE_TOLERANCE <= total * (WHOLE_TOLERANCE + 1)
    }

    /// Walks over the tiles and closes a worker's span wherever an equal part of the work is behind it.
    fn cut(&mut self, tiles: &[Tile], cutting: Cutting) {
        let quantum = cutting.quantum_pages.max(1);
        let n_pieces: usize = tiles.iter().map(|tile| tile.n_pages().div_ceil(quantum)).sum();
        let n_spans = n_pieces.min(cutting.n_spans_max());
        let total: usize = tiles.iter().map(Tile::cost).sum();
        // Beside long spans a part has to be longer: workers may as well end by so little apart.
        let least = quantum.div_ceil(2).max(total / n_spans / SPAN_PARTS);
        let mut behind = 0; // work that is dealt
        let mut span_idx = 0; // the one whose end comes next
        let mut worker = 0;
        let mut is_empty = true; // the worker has nothing so far
        for tile in tiles {
            let first_share = self.spans.len();
            let (mut at, end) = (tile.page_begin as usize, tile.page_end as usize);
            behind += SHARE_PAGES;
            while at < end {
                let boundary = total * (span_idx + 1) / n_spans;
                let cut = match span_idx + 1 == n_spans {
                    true => end,
                    false => nearest_cut(at..end, boundary as isize - behind as isize, quantum, least),
                };
                if cut > at {
                    self.spans.push((Share::of(tile, at as u32, cut as u32), worker));
                    is_empty = false;
                    behind += cut - at;
                    at = cut;
                }
                if at < end {
                    // The boundary lies in this tile, or so close before it that nothing of it is worth a share.
                    span_idx += 1;
                    worker += usize::from(!is_empty);
                    is_empty = true;
                }
            }
            self.close(tile, first_share);
        }
        self.n_workers = self.spans.last().map_or(0, |&(_, last)| last + 1);
    }

    /// Tells the shares of a tile, from `first_share` on, how many they are.
    fn close(&mut self, tile: &Tile, first_share: usize) {
        let n_shares = self.spans.len() - first_share;
        if n_shares == 1 {
            return;
        }
        let partial = self.n_partials;
        for (share_idx, (share, _)) in self.spans[first_share..].iter_mut().enumerate() {
            *share = Share {
                n_shares: n_shares as u16,
                share_idx: share_idx as u16,
                partial: partial as u16,
                ..*share
            };
        }
        self.cuts.push(Cut {
            token: tile.token,
            partial: partial as u32,
            n_tokens: u32::from(tile.n_tokens),
            n_shares: n_shares as u32,
        });
        self.n_partials += n_shares;
    }

    /// Lists the first share of each worker, then what follows them.
    fn deal(&mut self) {
        self.shares.resize(self.n_workers, Share::default());
        let mut before = None; // the worker that had the last share, and its place
        for &(share, worker) in &self.spans {
            let idx = match before {
                Some((last_worker, last_idx)) if last_worker == worker => {
                    let idx = self.shares.len();
                    let last: &mut Share = &mut self.shares[last_idx];
                    last.next = idx as u32;
                    self.shares.push(share);
                    idx
                }
                _ => {
                    self.shares[worker] = share;
                    worker
                }
            };
            before = Some((worker, idx));
        }
    }
}

/// Where to cut the pages so that about `room` of them come before the cut: at a multiple of `quantum`, or at one of
/// their ends where a part would have less than `least` pages.
fn nearest_cut(pages: std::ops::Range<usize>, room: isize, quantum: usize, least: usize) -> usize {
    let ideal = pages.start.saturating_add_signed(room.max(0));
    let cut = (ideal + quantum / 2) / quantum * quantum;
    let (is_first_worth, is_rest_worth) = (cut >= pages.start + least, cut + least <= pages.end);
    match (is_first_worth, is_rest_worth) {
        (true, true) => cut,
        (true, false) => pages.end,
        (false, true) => pages.start,
        // Too short to be cut: whole, where that is nearer to the room than nothing.
        (false, false) if 2 * room > pages.len() as isize - SHARE_PAGES as isize => pages.end,
        (false, false) => pages.start,
    }
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
