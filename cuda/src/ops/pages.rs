//! Copies of whole KV pages, and of the tokens beside them, and of single cells of pages, within the device.

use trellis_engine::batch::{self, Pack, PageId};

use super::common::{PAGE_LEN, ROW_THREADS, RowCount, expect, expect_i32, expect_rows};
use crate::driver::params;
use crate::{CudaError, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// Words of 16 bytes that a thread has under way.
const N_WORDS: usize = 4;

/// The kernel's source.
#[must_use]
pub fn source() -> Source {
    Source::new("pages.cu", concat!(include_str!("common.cuh"), include_str!("pages.cu")))
        .with("N_THREADS", ROW_THREADS)
        .with("N_WORDS", N_WORDS)
        .with("PAGE_LEN", PAGE_LEN)
}

/// As in `pages.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct CopyPagesParams {
    kv: Pointer,
    page_tokens: Pointer,
    pairs: Pointer,
    n_pairs: Pointer,
    page_len: u64,
}
params!(CopyPagesParams, 40);

/// As in `pages.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct MoveCellsParams {
    kv: Pointer,
    page_len: u64,
    cell_len: u32,
    n_moves: u32,
    moves: [u32; 960],
}
params!(MoveCellsParams, 3864);

/// Moves of one launch: what its parameters have room for.
const N_MOVES_MAX: usize = 480;

/// A cell that is copied to another; both count from the first of page 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellMove {
    /// Where the keys and values come from.
    pub from: u32,
    /// Where they go.
    pub to: u32,
}

/// A cell of a page, counted from the first of page 0.
#[must_use]
pub fn cell_of(page: PageId, cell: usize) -> u32 {
    page.0 * PAGE_LEN as u32 + cell as u32
}

/// What a pack moves. Those of a step move at once: what one fills no other takes from.
pub fn moves(pack: &Pack) -> impl Iterator<Item = CellMove> {
    let cells = pack.from.iter().flat_map(|&(page, bits)| {
        (0..PAGE_LEN).filter(move |cell| bits >> cell & 1 == 1).map(move |cell| cell_of(page, cell))
    });
    let to = pack.to;
    cells.zip(0..PAGE_LEN).map(move |(from, cell)| CellMove { from, to: cell_of(to, cell) })
}

/// Moves that are made one after the other, in launches of as many as can be made at once: none of them fills what another
/// takes from, or fills too.
pub fn in_launches(moves: &[batch::CellMove]) -> impl Iterator<Item = Vec<CellMove>> {
    let cell = |cell: batch::Cell| cell_of(cell.page, cell.idx);
    let mut moves = moves.iter().map(move |it| CellMove { from: cell(it.src), to: cell(it.dst) }).peekable();
    std::iter::from_fn(move || {
        let mut launch: Vec<CellMove> = Vec::new();
        while let Some(next) = moves.next_if(|next| {
            launch.iter().all(|it| it.to != next.to && it.to != next.from && it.from != next.to)
        }) {
            launch.push(next);
        }
        (!launch.is_empty()).then_some(launch)
    })
}

/// Pairs that fit into one launch: the grid's second dimension.
pub const N_PAIRS_MAX: usize = 65_535;

/// Copies between pages; see `pages.cu`.
#[derive(Clone, Debug)]
pub struct CopyPages {
    kernel: Kernel<CopyPagesParams>,
    cells: Kernel<MoveCellsParams>,
}

impl CopyPages {
    /// Finds the kernel in the module of [`source`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("copy_pages")?, cells: module.kernel("move_cells")? })
    }

    /// For each pair, copies its first page over its second. No page is written twice, none both read and
    /// written, and all lie inside `kv` and `page_tokens`.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or a page is not a multiple of 16 bytes.
    pub fn run(
        &self,
        stream: &Stream,
        pairs: RowCount,
        page_bytes: usize,
        kv: Slice,          // [n_pages, page_bytes]
        page_tokens: Slice, // i32 [n_pages, PAGE_LEN]
        page_pairs: Slice,  // i32 [pairs, 2]
    ) -> Result<(), CudaError> {
        if pairs.n_max == 0 {
            return Ok(());
        }
        assert!(page_bytes.is_multiple_of(16), "pages of {page_bytes} bytes");
        assert!(pairs.n_max <= N_PAIRS_MAX, "{} pairs", pairs.n_max);
        expect_rows(pairs);
        expect("kv", kv, page_bytes, 1);
        expect_i32("page_tokens", page_tokens, PAGE_LEN);
        expect_i32("page_pairs", page_pairs, 2 * pairs.n_max);
        let page_len = page_bytes / 16;
        // Up to 64 blocks share a page.
        let n_blocks = page_len.div_ceil(ROW_THREADS as usize * N_WORDS).clamp(1, 64);
        let grid = (n_blocks as u32, pairs.n_max as u32, 1);
        let params = CopyPagesParams {
            kv: kv.into(),
            page_tokens: page_tokens.into(),
            pairs: page_pairs.into(),
            n_pairs: pairs.n.into(),
            page_len: page_len as u64,
        };
        let launch = Launch { grid, block: (ROW_THREADS, 1, 1), shared_bytes: 0 };
        // SAFETY: lengths were checked above; the caller keeps the pages inside `kv` and `page_tokens`, and the count at most
        // `n_max`.
        unsafe { launch.run(stream, &self.kernel, &params) }
    }

    /// Copies cells, keys and values in every layer; the tokens beside their pages stay behind. No cell is written twice, none
    /// both read and written, and all lie inside `kv`.
    ///
    /// # Errors
    /// The driver refused a launch.
    ///
    /// # Panics
    /// A slice is too short, or a cell of a head is not a multiple of 16 bytes.
    pub fn pack(
        &self,
        stream: &Stream,
        moves: &[CellMove],
        page_bytes: usize,
        head_bytes: usize,
        kv: Slice, // [n_pages, heads of all layers, PAGE_LEN, head_bytes]
    ) -> Result<(), CudaError> {
        if moves.is_empty() {
            return Ok(());
        }
        assert!(
            head_bytes.is_multiple_of(16) && page_bytes.is_multiple_of(PAGE_LEN * head_bytes),
            "{head_bytes}"
        );
        expect("kv", kv, page_bytes, 1);
        let n_cell_words = page_bytes / PAGE_LEN / 16;
        let n_blocks = n_cell_words.div_ceil(ROW_THREADS as usize).clamp(1, 64);
        for moves in moves.chunks(N_MOVES_MAX) {
            let mut params = MoveCellsParams {
                kv: kv.into(),
                page_len: (page_bytes / 16) as u64,
                cell_len: (head_bytes / 16) as u32,
                n_moves: moves.len() as u32,
                moves: [0; 960],
            };
            for (words, cell) in params.moves.chunks_exact_mut(2).zip(moves) {
                words.copy_from_slice(&[cell.from, cell.to]);
            }
            let launch = Launch {
                grid: (n_blocks as u32, moves.len() as u32, 1),
                block: (ROW_THREADS, 1, 1),
                shared_bytes: 0,
            };
            // SAFETY: lengths were checked above; the caller keeps the cells inside `kv`.
            unsafe { launch.run(stream, &self.cells, &params) }?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        assert_compiles(source());
    }

    #[test]
    fn a_pack_moves_its_cells_to_the_first_of_another_page() {
        let pack =
            Pack { from: smallvec![(PageId(3), 0b1000_0000_0000_0101), (PageId(9), 0b10)], to: PageId(1) };
        let found: Vec<_> = moves(&pack).map(|CellMove { from, to }| (from, to)).collect();
        assert_eq!(found, [(48, 16), (50, 17), (63, 18), (145, 19)]);
    }

    #[test]
    fn moves_of_one_launch_do_not_depend_on_each_other() {
        let cell = |idx: usize| batch::Cell { page: PageId(2), idx };
        let it = |src: usize, dst: usize| batch::CellMove { src: cell(src), dst: cell(dst) };
        // As a branch closes up: 5 is read before it is filled.
        let moves = [it(3, 2), it(5, 3), it(6, 4), it(9, 5), it(10, 6)];
        let found: Vec<Vec<[u32; 2]>> = in_launches(&moves)
            .map(|launch| launch.iter().map(|it| [it.from - 32, it.to - 32]).collect())
            .collect();
        assert_eq!(found, [vec![[3, 2]], vec![[5, 3], [6, 4]], vec![[9, 5], [10, 6]]]);
        assert_eq!(in_launches(&[]).count(), 0);
    }

    #[test]
    fn moves_cells() {
        let Some(test) = gpu() else { return };
        let copy = CopyPages::new(&test.module(source())).expect("the kernel");
        let mut random = Random(8);
        for (n_pages, n_moves, n_heads, head_bytes) in
            [(2, 1, 1, 16), (9, 40, 6, 48), (80, 479, 4, 256), (80, 481, 2, 128), (130, 1000, 32, 256)]
        {
            let page_bytes = n_heads * PAGE_LEN * head_bytes;
            let before: Vec<u8> = (0..n_pages * page_bytes).map(|_| random.next() as u8).collect();
            // From the lower half of the pages; each cell of the upper half once.
            let half = n_pages / 2 * PAGE_LEN;
            let moves: Vec<CellMove> = (0..n_moves)
                .map(|idx| CellMove { from: random.below(half) as u32, to: (half + idx) as u32 })
                .collect();
            let kv = upload(&test, &before);
            copy.pack(&test.stream, &moves, page_bytes, head_bytes, kv.slice()).expect("a launch");
            let mut expected = before.clone();
            for CellMove { from, to } in moves {
                let start = |cell: u32, head: usize| {
                    let (page, cell) = (cell as usize / PAGE_LEN, cell as usize % PAGE_LEN);
                    page * page_bytes + (head * PAGE_LEN + cell) * head_bytes
                };
                for head in 0..n_heads {
                    let from = start(from, head);
                    expected.copy_within(from..from + head_bytes, start(to, head));
                }
            }
            let got = download(&test, kv.slice(), expected.len(), 0u8);
            assert!(got == expected, "{n_moves} cells of {n_heads} heads of {head_bytes} bytes");
        }
    }

    #[test]
    fn copies() {
        let Some(test) = gpu() else { return };
        let copy = CopyPages::new(&test.module(source())).expect("the kernel");
        let mut random = Random(7);
        for (n_pages, n_max, n, page_bytes) in [
            (2, 1, 1, 16),
            (9, 5, 4, 16 * 37),
            (40, 17, 17, 16 * 1025),
            (64, 32, 30, 64 << 10),
            (6, 2, 2, (2 << 20) + 16),
        ] {
            let before: Vec<u8> = (0..n_pages * page_bytes).map(|_| random.next() as u8).collect();
            // Sources from the lower half of the pages, each target once from the upper half.
            let half = n_pages / 2;
            let pairs: Vec<i32> = (0..n_max)
                .flat_map(|j| [random.below(half) as i32, (half + j % (n_pages - half)) as i32])
                .collect();
            let (kv, d_pairs) = (upload(&test, &before), upload(&test, &pairs));
            let count = DeviceCount::new(&test, n_max, n);
            let mut tokens: Vec<i32> = (0..(n_pages * PAGE_LEN) as i32).collect();
            let d_tokens = upload(&test, &tokens);
            let (kv_there, tokens_there) = (kv.slice(), d_tokens.slice());
            copy.run(&test.stream, count.rows(), page_bytes, kv_there, tokens_there, d_pairs.slice())
                .expect("a launch");
            let mut expected = before.clone();
            for pair in pairs[..2 * n].chunks(2) {
                let from = pair[0] as usize * page_bytes;
                expected.copy_within(from..from + page_bytes, pair[1] as usize * page_bytes);
                let from = pair[0] as usize * PAGE_LEN;
                tokens.copy_within(from..from + PAGE_LEN, pair[1] as usize * PAGE_LEN);
            }
            assert!(download(&test, d_tokens.slice(), tokens.len(), 0i32) == tokens, "tokens go along");
            let got = download(&test, kv.slice(), expected.len(), 0u8);
            assert!(got == expected, "{n} of {n_max} pairs of pages of {page_bytes} bytes");
        }
    }
}
