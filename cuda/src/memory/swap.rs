//! Pages in host memory.

use cudarc::driver::result;
use trellis_engine::batch::{HostPageId, PageId};

use crate::driver::check;
use crate::{CudaError, Gpu, Pinned, Slice, Stream};

/// Page-locked memory for pages that had to leave the card. Copies are put into the stream of the steps, whose order
/// keeps a page from being read before it is there.
#[derive(Debug)]
pub(crate) struct HostPages {
    memory: Pinned<u8>, // [n_pages, page_bytes]
    page_bytes: usize,
}

impl HostPages {
    /// Takes the memory.
    ///
    /// # Errors
    /// The driver refused.
    pub(crate) fn new(gpu: &Gpu, n_pages: usize, page_bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { memory: gpu.pinned(n_pages * page_bytes)?, page_bytes })
    }

    /// Starts copies of device pages to host pages.
    ///
    /// # Errors
    /// The driver refused a copy.
    ///
    /// # Panics
    /// A page is not there.
    pub(crate) fn swap_out(
        &mut self,
        stream: &Stream,
        kv: Slice,
        moves: &[(PageId, HostPageId)],
    ) -> Result<(), CudaError> {
        for (device, host, n_pages) in runs(moves.iter().map(|&(page, host)| (page.0, host.0))) {
            let part = kv.part(device * self.page_bytes, n_pages * self.page_bytes);
            let range = host * self.page_bytes..(host + n_pages) * self.page_bytes;
            // SAFETY: both ranges are inside and of one length. Only copies in the same stream read or write the host's, and
            // the backend waits for the stream before it drops them.
            check("cuMemcpyDtoHAsync", || unsafe {
                result::memcpy_dtoh_async(&mut self.memory[range], part.address, stream.raw())
            })?;
        }
        Ok(())
    }

    /// Starts copies of host pages to device pages.
    ///
    /// # Errors
    /// The driver refused a copy.
    ///
    /// # Panics
    /// A page is not there.
    pub(crate) fn swap_in(
        &self,
        stream: &Stream,
        kv: Slice,
        moves: &[(HostPageId, PageId)],
    ) -> Result<(), CudaError> {
        for (device, host, n_pages) in runs(moves.iter().map(|&(host, page)| (page.0, host.0))) {
            let part = kv.part(device * self.page_bytes, n_pages * self.page_bytes);
            let range = host * self.page_bytes..(host + n_pages) * self.page_bytes;
            // SAFETY: as above.
            check("cuMemcpyHtoDAsync", || unsafe {
                result::memcpy_htod_async(part.address, &self.memory[range], stream.raw())
            })?;
        }
        Ok(())
    }
}

/// Moves that are neighbours on both sides as one: first device page, first host page, pages.
fn runs(moves: impl Iterator<Item = (u32, u32)>) -> Vec<(usize, usize, usize)> {
    let mut runs: Vec<(usize, usize, usize)> = Vec::new();
    for (device, host) in moves {
        let (device, host) = (device as usize, host as usize);
        match runs.last_mut() {
            Some((d, h, n)) if *d + *n == device && *h + *n == host => *n += 1,
            _ => runs.push((device, host, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::{download, upload};
    use crate::testing::{Random, gpu};

    #[test]
    fn neighbours_move_together() {
        let moves = [(4, 0), (5, 1), (6, 3), (7, 4), (1, 5)];
        assert_eq!(runs(moves.into_iter()), [(4, 0, 2), (6, 3, 2), (1, 5, 1)]);
    }

    #[test]
    fn pages_outside_are_our_bug() {
        let Some(test) = gpu() else { return };
        let host = HostPages::new(&test.gpu, 1, 32).expect("pinned memory");
        let kv = Slice { address: 4096, n_bytes: 100 * 32 };
        let moved =
            std::panic::catch_unwind(|| host.swap_in(&test.stream, kv, &[(HostPageId(0), PageId(100))]));
        assert!(moved.is_err(), "page 100 of 100");
    }

    #[test]
    fn what_went_out_comes_back() {
        let Some(test) = gpu() else { return };
        let (n_pages, page_bytes) = (40, 4096);
        let mut random = Random(8);
        let bytes: Vec<u8> = (0..n_pages * page_bytes).map(|_| random.next() as u8).collect();
        let kv = upload(&test, &bytes);
        let mut host = HostPages::new(&test.gpu, n_pages, page_bytes).expect("pinned memory");
        let mut order: Vec<u32> = (0..n_pages as u32).collect();
        for idx in (1..n_pages).rev() {
            order.swap(idx, random.below(idx + 1));
        }
        let out: Vec<_> =
            (0..n_pages as u32).map(|page| (PageId(page), HostPageId(order[page as usize]))).collect();
        host.swap_out(&test.stream, kv.slice(), &out).expect("copies out");
        kv.slice().fill(&test.stream, 0xff).expect("a fill");
        // Every page comes back one place further on.
        let back: Vec<_> =
            out.iter().map(|&(page, host)| (host, PageId((page.0 + 1) % n_pages as u32))).collect();
        host.swap_in(&test.stream, kv.slice(), &back).expect("copies back");
        let got = download(&test, kv.slice(), bytes.len(), 0u8);
        let want: Vec<u8> = bytes[bytes.len() - page_bytes..]
            .iter()
            .chain(&bytes[..bytes.len() - page_bytes])
            .copied()
            .collect();
        assert!(got == want, "the pages are those that left");
    }
}
