//! Copies of whole KV pages: within the device, and to and from the host.

use std::ops::Range;

use cudarc::driver::result;

use super::common::{Rows, expect, expect_i32, expect_rows};
use crate::device::check;
use crate::{Arg, CudaError, Kernel, Launch, Module, Pinned, Slice, Source, Stream};

/// The kernel's source.
pub const SOURCE: Source =
    Source { file: "pages.cu", text: concat!(include_str!("common.cuh"), include_str!("pages.cu")) };

/// Pairs that fit into one launch: the grid's second dimension.
pub const N_PAIRS_MAX: usize = 65_535;

/// Copies between pages; see `pages.cu`.
#[derive(Clone, Debug)]
pub struct CopyPages {
    kernel: Kernel,
}

impl CopyPages {
    /// Finds the kernel in the module of [`SOURCE`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("copy_pages")? })
    }

    /// For each pair, copies its first page over its second. No page is written twice, none both read and
    /// written, and all lie inside `kv`.
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
        kv: Slice,         // [n_pages, page_bytes]
        page_pairs: Slice, // i32 [pairs, 2]
    ) -> Result<(), CudaError> {
        if pairs.n_max == 0 {
            return Ok(());
        }
        assert!(page_bytes.is_multiple_of(16), "pages of {page_bytes} bytes");
        assert!(pairs.n_max <= N_PAIRS_MAX, "{} pairs", pairs.n_max);
        expect_rows(pairs);
        expect("kv", kv, page_bytes, 1);
        expect_i32("page_pairs", page_pairs, 2 * pairs.n_max);
        let page_len = page_bytes / 16;
        // A turn of a block is 1,024 words; up to 64 blocks share a page.
        let grid = (page_len.div_ceil(1024).clamp(1, 64) as u32, pairs.n_max as u32, 1);
        let args = [kv.into(), page_pairs.into(), pairs.n.into(), Arg::U64(page_len as u64)];
        let launch = Launch { grid, block: (256, 1, 1), shared_bytes: 0 };
        // SAFETY: the kernel's arguments in order; the caller keeps the pages inside `kv`.
        unsafe { launch.run(stream, &self.kernel, &args) }
    }
}

/// Starts copies of pages to the host, one after the other from the start of `host`. Neighbours in `pages` that are
/// neighbours on the device go in one copy.
///
/// # Errors
/// The driver refused a copy.
///
/// # Panics
/// A page lies outside `kv`, or `host` is too short.
///
/// # Safety
/// Until `stream` has passed the copies, `host` is neither read nor written nor dropped.
pub unsafe fn swap_out(
    stream: &Stream,
    page_bytes: usize,
    kv: Slice, // [n_pages, page_bytes]
    pages: &[u32],
    host: &mut Pinned<u8>,
) -> Result<(), CudaError> {
    for (part, host_range) in parts(page_bytes, kv, pages) {
        // SAFETY: both ranges are in bounds and of one length; the caller keeps `host` untouched.
        check("cuMemcpyDtoHAsync", unsafe {
            result::memcpy_dtoh_async(&mut host[host_range], part.address, stream.raw())
        })?;
    }
    Ok(())
}

/// Starts the copies back: the pages from the start of `host` into `pages`, in order.
///
/// # Errors
/// The driver refused a copy.
///
/// # Panics
/// A page lies outside `kv`, or `host` is too short.
///
/// # Safety
/// Until `stream` has passed the copies, `host` is neither written nor dropped.
pub unsafe fn swap_in(
    stream: &Stream,
    page_bytes: usize,
    kv: Slice, // [n_pages, page_bytes]
    pages: &[u32],
    host: &Pinned<u8>,
) -> Result<(), CudaError> {
    for (part, host_range) in parts(page_bytes, kv, pages) {
        // SAFETY: both ranges are in bounds and of one length; the caller keeps `host` unchanged.
        check("cuMemcpyHtoDAsync", unsafe {
            result::memcpy_htod_async(part.address, &host[host_range], stream.raw())
        })?;
    }
    Ok(())
}

/// Runs of neighbouring pages, with the bytes of the host that belong to them.
fn parts(page_bytes: usize, kv: Slice, pages: &[u32]) -> impl Iterator<Item = (Slice, Range<usize>)> {
    let mut start_idx = 0;
    pages.chunk_by(|a, b| a.checked_add(1) == Some(*b)).map(move |run| {
        let part = kv.part(run[0] as usize * page_bytes, run.len() * page_bytes);
        let host_range = start_idx * page_bytes..(start_idx + run.len()) * page_bytes;
        start_idx += run.len();
        (part, host_range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        assert_compiles(SOURCE);
    }

    #[test]
    fn neighbours_go_in_one_copy() {
        let kv = Slice { address: 4096, n_bytes: 100 * 32 };
        let parts: Vec<_> = parts(32, kv, &[7, 8, 9, 3, 5, 6, 4]).collect();
        let part = |page: u64, n: usize| Slice { address: 4096 + 32 * page, n_bytes: 32 * n };
        assert_eq!(
            parts,
            [(part(7, 3), 0..96), (part(3, 1), 96..128), (part(5, 2), 128..192), (part(4, 1), 192..224)]
        );
    }

    #[test]
    #[should_panic(expected = "a part lies inside")]
    fn pages_outside_are_our_bug() {
        let kv = Slice { address: 4096, n_bytes: 100 * 32 };
        parts(32, kv, &[100]).for_each(drop);
    }

    #[test]
    fn copies() {
        let Some(test) = gpu() else { return };
        let copy = CopyPages::new(&test.module(SOURCE)).expect("the kernel");
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
            copy.run(&test.stream, count.rows(), page_bytes, kv.slice(), d_pairs.slice()).expect("a launch");
            let mut expected = before.clone();
            for pair in pairs[..2 * n].chunks(2) {
                let from = pair[0] as usize * page_bytes;
                expected.copy_within(from..from + page_bytes, pair[1] as usize * page_bytes);
            }
            let got = download(&test, kv.slice(), expected.len(), 0u8);
            assert!(got == expected, "{n} of {n_max} pairs of pages of {page_bytes} bytes");
        }
    }

    #[test]
    fn swaps_there_and_back() {
        let Some(test) = gpu() else { return };
        let (page_bytes, n_pages) = (16 * 100, 20);
        let mut random = Random(8);
        let before: Vec<u8> = (0..n_pages * page_bytes).map(|_| random.next() as u8).collect();
        let kv = upload(&test, &before);
        let (out, back) = ([3, 4, 5, 19, 0, 7], [10, 2, 3, 4, 5, 11]);
        let mut host = test.gpu.pinned::<u8>(out.len() * page_bytes).expect("pinned memory");
        // SAFETY: the stream is waited for before `host` is used again.
        unsafe { swap_out(&test.stream, page_bytes, kv.slice(), &out, &mut host) }.expect("copies");
        test.stream.synchronize().expect("the copies end");
        for (i, &page) in out.iter().enumerate() {
            let page = page as usize;
            assert_eq!(host[i * page_bytes..][..page_bytes], before[page * page_bytes..][..page_bytes]);
        }
        // SAFETY: as above.
        unsafe { swap_in(&test.stream, page_bytes, kv.slice(), &back, &host) }.expect("copies");
        test.stream.synchronize().expect("the copies end");
        let mut expected = before.clone();
        for (i, &page) in back.iter().enumerate() {
            expected[page as usize * page_bytes..][..page_bytes]
                .copy_from_slice(&host[i * page_bytes..][..page_bytes]);
        }
        let got = download(&test, kv.slice(), expected.len(), 0u8);
        assert!(got == expected);
    }
}
