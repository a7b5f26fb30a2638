//! Pages in host memory, and pages that move on the device.

use std::ops::Range;

use cudarc::driver::{result, sys};
use trellis_engine::batch::{HostPageId, PageId};

use super::locked::{Locked, one};
use crate::driver::check;
use crate::{CudaError, Gpu, Slice, Stream};

/// Host memory for pages that had to leave the card. Copies are put into the stream of the steps, whose order keeps a page
/// from being read before it is there.
#[derive(Debug)]
pub(crate) struct HostPages {
    memory: Locked, // [n_pages, page_bytes], slab by slab
    page_bytes: usize,
}

impl HostPages {
    /// Takes the addresses; memory comes, and is page-locked, as pages move there.
    ///
    /// # Errors
    /// There are no addresses for so much, or the machine has less memory.
    pub(crate) fn new(gpu: &Gpu, n_pages: usize, page_bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { memory: Locked::new(gpu.clone(), n_pages, page_bytes)?, page_bytes })
    }

    /// Moves what is in other pages than these to some of these, so that [`Self::release`] finds more, of so many bytes, of the last slab
    /// perhaps more. Returns from where to where.
    ///
    /// No copy is under way: the caller has waited for them.
    pub(crate) fn gather(&mut self, free: &[HostPageId], at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        self.memory.gather(free, at_most)
    }

    /// Whether a copy had to wait until its page had memory, since this was asked last.
    pub(crate) fn take_waited(&self) -> bool {
        self.memory.take_waited()
    }

    /// Gives memory of these pages, in which nothing is that is wanted, back to the system: slabs of which no other page is, until
    /// that are so many bytes, of the last perhaps more. Returns how many.
    ///
    /// No copy of these pages is under way: the caller has waited for them.
    pub(crate) fn release(&mut self, free: &[HostPageId], at_most: u64) -> u64 {
        self.memory.release(free.iter().map(|page| page.0 as usize), at_most)
    }

    /// Whether memory that could have gone back stayed when some was to go last.
    pub(crate) fn keeps(&self) -> bool {
        self.memory.keeps()
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
        for (host, device) in self.parts(kv, moves.iter().map(|&(page, host)| (page.0, host.0))) {
            let to = self.memory.at(&host);
            // SAFETY: both ranges are inside and of one length. Only copies in the same stream read or write the host's, and
            // the memory goes only after they have been waited for.
            check("cuMemcpyDtoHAsync", || unsafe {
                sys::cuMemcpyDtoHAsync_v2(to.cast(), device.address, device.n_bytes, stream.raw()).result()
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
        for (host, device) in self.parts(kv, moves.iter().map(|&(host, page)| (page.0, host.0))) {
            let from = self.memory.at(&host).cast_const();
            // SAFETY: as above.
            check("cuMemcpyHtoDAsync", || unsafe {
                sys::cuMemcpyHtoDAsync_v2(device.address, from.cast(), device.n_bytes, stream.raw()).result()
            })?;
        }
        Ok(())
    }

    /// Adds what is in a page to `into`.
    ///
    /// No copy of it is under way: the caller has waited for the stream.
    ///
    /// # Panics
    /// The page is not there.
    pub(crate) fn read(&self, page: HostPageId, into: &mut Vec<u8>) {
        let from = self.memory.at(&one(page)).cast_const();
        // SAFETY: a page's length from there on is inside, and nothing else reads or writes it.
        into.extend_from_slice(unsafe { std::slice::from_raw_parts(from, self.page_bytes) });
    }

    /// Fills a page. As for [`Self::read`].
    ///
    /// # Panics
    /// The page is not there, or has another length.
    pub(crate) fn write(&mut self, page: HostPageId, from: &[u8]) {
        assert_eq!(from.len(), self.page_bytes, "the bytes of a page");
        let to = self.memory.at(&one(page));
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    /// What is copied at a time: which pages on the host, and where on the device.
    fn parts(&self, kv: Slice, moves: impl Iterator<Item = (u32, u32)>) -> Vec<(Range<usize>, Slice)> {
        let page_bytes = self.page_bytes;
        let parts = runs(moves).into_iter().flat_map(|[device, host, n]| {
            let device = kv.part(device * page_bytes, n * page_bytes);
            let cut = self.memory.cut(host..host + n);
            cut.map(move |part| {
                let start = (part.start - host) * page_bytes;
                (part.clone(), device.part(start, part.len() * page_bytes))
            })
        });
        parts.collect()
    }
}

/// Adds what is in a device page to `into`, and waits for that.
///
/// # Errors
/// The driver refused the copy, or work before it has failed.
///
/// # Panics
/// The page is not there.
pub(crate) fn read_page(
    stream: &Stream,
    kv: Slice,
    page_bytes: usize,
    page: PageId,
    into: &mut Vec<u8>,
) -> Result<(), CudaError> {
    let start = into.len();
    into.resize(start + page_bytes, 0);
    kv.part(page.0 as usize * page_bytes, page_bytes).download(stream, &mut into[start..])
}

/// Starts copies of device pages to other device pages, of which none is read.
///
/// # Errors
/// The driver refused a copy.
///
/// # Panics
/// A page is not there.
pub(crate) fn move_pages(
    stream: &Stream,
    kv: Slice,
    page_bytes: usize,
    moves: &[(PageId, PageId)],
) -> Result<(), CudaError> {
    for run in runs(moves.iter().map(|&(src, dst)| (src.0, dst.0))) {
        let [src, dst, n_bytes] = run.map(|n| n * page_bytes);
        let (from, to) = (kv.part(src, n_bytes), kv.part(dst, n_bytes));
        // SAFETY: both ranges are inside and of one length, and do not meet, since no page is a source and a destination.
        // The backend waits for the stream before the memory goes.
        check("cuMemcpyDtoDAsync", || unsafe {
            result::memcpy_dtod_async(to.address, from.address, n_bytes, stream.raw())
        })?;
    }
    Ok(())
}

/// Moves that are neighbours on both sides as one: first page on the one side, on the other, pages.
fn runs(moves: impl Iterator<Item = (u32, u32)>) -> Vec<[usize; 3]> {
    let mut runs: Vec<[usize; 3]> = Vec::new();
    for (a, b) in moves {
        let (a, b) = (a as usize, b as usize);
        match runs.last_mut() {
            Some([first_a, first_b, n]) if *first_a + *n == a && *first_b + *n == b => *n += 1,
            _ => runs.push([a, b, 1]),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;

    use super::*;
    use crate::ops::common::check::{download, upload};
    use crate::testing::{Random, gpu};

    #[test]
    fn neighbours_move_together() {
        let moves = [(4, 0), (5, 1), (6, 3), (7, 4), (1, 5)];
        assert_eq!(runs(moves.into_iter()), [[4, 0, 2], [6, 3, 2], [1, 5, 1]]);
    }

    #[test]
    fn pages_outside_are_our_bug() {
        let Some(test) = gpu() else { return };
        let host = HostPages::new(&test.gpu, 1, 32).expect("pinned memory");
        let kv = Slice { address: 4096, n_bytes: 100 * 32 };
        let moved = std::panic::catch_unwind(AssertUnwindSafe(|| {
            host.swap_in(&test.stream, kv, &[(HostPageId(0), PageId(100))])
        }));
        assert!(moved.is_err(), "page 100 of 100");
    }

    #[test]
    fn pages_move_on_the_device() {
        let Some(test) = gpu() else { return };
        let (n_pages, page_bytes) = (12, 4096);
        let mut random = Random(9);
        let mut bytes: Vec<u8> = (0..n_pages * page_bytes).map(|_| random.next() as u8).collect();
        let kv = upload(&test, &bytes);
        let moves = [(8, 0), (9, 1), (10, 2), (4, 11), (6, 3)];
        let ids = moves.map(|(src, dst)| (PageId(src), PageId(dst)));
        move_pages(&test.stream, kv.slice(), page_bytes, &ids).expect("copies");
        for (src, dst) in moves.map(|(src, dst)| (src as usize, dst as usize)) {
            bytes.copy_within(src * page_bytes..(src + 1) * page_bytes, dst * page_bytes);
        }
        assert!(download(&test, kv.slice(), bytes.len(), 0u8) == bytes);
    }

    #[test]
    fn what_is_kept_elsewhere_is_what_was_there() {
        let Some(test) = gpu() else { return };
        let (n_pages, page_bytes) = (4, 4096);
        let mut random = Random(10);
        let bytes: Vec<u8> = (0..n_pages * page_bytes).map(|_| random.next() as u8).collect();
        let kv = upload(&test, &bytes);
        let mut host = HostPages::new(&test.gpu, n_pages, page_bytes).expect("pinned memory");
        let mut kept = Vec::new();
        read_page(&test.stream, kv.slice(), page_bytes, PageId(2), &mut kept).expect("a copy");
        host.swap_out(&test.stream, kv.slice(), &[(PageId(1), HostPageId(3))]).expect("a copy out");
        test.stream.synchronize().expect("it is done");
        host.read(HostPageId(3), &mut kept);
        assert!(kept[..page_bytes] == bytes[2 * page_bytes..][..page_bytes]);
        assert!(kept[page_bytes..] == bytes[page_bytes..][..page_bytes]);
        host.write(HostPageId(0), &kept[..page_bytes]);
        host.swap_in(&test.stream, kv.slice(), &[(HostPageId(0), PageId(0))]).expect("a copy back");
        let got = download(&test, kv.slice(), page_bytes, 0u8);
        assert!(got == kept[..page_bytes]);
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
