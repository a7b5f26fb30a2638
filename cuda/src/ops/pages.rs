//! Copies of whole KV pages, and of the tokens beside them, within the device.

use super::common::{PAGE_LEN, ROW_THREADS, Rows, expect, expect_i32, expect_rows};
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

/// Pairs that fit into one launch: the grid's second dimension.
pub const N_PAIRS_MAX: usize = 65_535;

/// Copies between pages; see `pages.cu`.
#[derive(Clone, Debug)]
pub struct CopyPages {
    kernel: Kernel<CopyPagesParams>,
}

impl CopyPages {
    /// Finds the kernel in the module of [`source`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("copy_pages")? })
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
        pairs: Rows,
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        assert_compiles(source());
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
            let count = Count::new(&test, n_max, n);
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
