//! KV memory in pages. A page holds all layers, so that copies and swaps are one move and memory that was never
//! used is never touched.

use std::ops::{Deref, DerefMut, Range};

use memmap2::MmapMut;
use zerocopy::{FromBytes, IntoBytes};

use crate::backend::{HostPiece, KvPlace, PAGE_LEN};
use crate::batch::{Cell, HostPageId, Pack, PageId};
use crate::model::ModelConfig;

/// Elements of a head that values keep together.
pub(super) const BLOCK_LEN: usize = 16;

/// One element of the keys of a head at every position of a page.
pub(super) type KeyColumn = [f32; PAGE_LEN];

/// One block of the values of a head at every position of a page.
pub(super) type ValueBlock = [[f32; BLOCK_LEN]; PAGE_LEN];

/// Where the parts of a page lie, in elements.
///
/// Keys of one head are `[head_dim, PAGE_LEN]`: 16 positions side by side fill the lanes of a vector, so a score
/// needs no sum across lanes. Values of one head are `[n_blocks, PAGE_LEN, BLOCK_LEN]`: the head cut into blocks
/// of 16, the last one padded, so that sums over positions stay in registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageLayout {
    n_layers: usize,
    n_kv_heads: usize,
    head_dim: usize,
}

impl PageLayout {
    pub(super) fn new(config: &ModelConfig) -> Self {
        Self { n_layers: config.n_layers, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim }
    }

    fn keys_len(self) -> usize {
        self.head_dim * PAGE_LEN
    }

    fn values_len(self) -> usize {
        self.head_dim.next_multiple_of(BLOCK_LEN) * PAGE_LEN
    }

    fn head_len(self) -> usize {
        self.keys_len() + self.values_len()
    }

    pub(super) fn page_len(self) -> usize {
        self.n_layers * self.n_kv_heads * self.head_len()
    }
}

/// Pages of one piece of device memory, and the most of one of host memory.
pub(super) const N_GRANULE_PAGES: usize = 64;

/// Host memory goes back to the system by pieces of so many bytes, or of one page that is larger: the system has a bound on how many
/// mappings a process has.
const HOST_GRANULE_BYTES: usize = 2 << 20;

/// All pages of the device and of host memory.
pub(super) struct KvPages {
    layout: PageLayout,
    /// Those that have memory.
    n_pages: usize,
    device: Vec<Mapped>, // [n_pages / N_GRANULE_PAGES], each [N_GRANULE_PAGES, n_layers, n_kv_heads, head_len]
    /// Pages of each piece of host memory.
    n_host_granule_pages: usize,
    n_host_pages: usize,
    host: Vec<HostGranule>,
    /// Memory of host pages stayed when it was to go back last.
    keeps_host_memory: bool,
}

/// Pages of host memory that go back to the system together.
struct HostGranule {
    memory: Mapped, // [n_host_granule_pages, n_layers, n_kv_heads, head_len]
    /// A bit for each page that was written to since the memory came from the system.
    written: u64,
}

const _: () = assert!(N_GRANULE_PAGES <= u64::BITS as usize, "a granule has a bit for each of its pages");

impl KvPages {
    /// `None` when the memory cannot be had.
    pub(super) fn new(layout: PageLayout, n_pages: usize, n_host_pages: usize) -> Option<Self> {
        let page_bytes = layout.page_len() * size_of::<f32>();
        let n_host_granule_pages = HOST_GRANULE_BYTES.div_ceil(page_bytes).min(N_GRANULE_PAGES);
        let granule = || {
            Some(HostGranule { memory: Mapped::new(n_host_granule_pages * layout.page_len())?, written: 0 })
        };
        let n_granules = n_host_pages.div_ceil(n_host_granule_pages);
        let host = (0..n_granules).map(|_| granule()).collect::<Option<_>>()?;
        let mut pages = Self {
            layout,
            n_pages: 0,
            device: Vec::new(),
            n_host_granule_pages,
            n_host_pages,
            host,
            keeps_host_memory: false,
        };
        pages.resize(n_pages).then_some(pages)
    }

    pub(super) fn n_pages(&self) -> usize {
        self.n_pages
    }

    /// Takes memory for so many pages and gives back that of the others; `false` when it cannot be had.
    pub(super) fn resize(&mut self, n_pages: usize) -> bool {
        let n_granules = n_pages.div_ceil(N_GRANULE_PAGES);
        let mut added = Vec::new();
        for _ in self.device.len()..n_granules {
            let Some(memory) = Mapped::new(N_GRANULE_PAGES * self.layout.page_len()) else { return false };
            added.push(memory);
        }
        self.device.truncate(n_granules);
        self.device.append(&mut added);
        self.n_pages = n_pages;
        true
    }

    /// Keys and values of one head.
    pub(super) fn head(
        &self,
        page: PageId,
        layer_idx: usize,
        kv_head_idx: usize,
    ) -> (&[KeyColumn], &[ValueBlock]) {
        let start = self.head_start(page, layer_idx, kv_head_idx);
        let granule = &self.device[granule_of(page)];
        let (keys, values) = granule[start..start + self.layout.head_len()].split_at(self.layout.keys_len());
        (keys.as_chunks().0, values.as_chunks().0.as_chunks().0)
    }

    /// Stores one position of one layer.
    pub(super) fn store(
        &mut self,
        page: PageId,
        slot: usize,
        layer_idx: usize,
        key: &[f32],   // [n_kv_heads, head_dim]
        value: &[f32], // [n_kv_heads, head_dim]
    ) {
        let head_dim = self.layout.head_dim;
        let heads = key.chunks_exact(head_dim).zip(value.chunks_exact(head_dim));
        for (kv_head_idx, (key, value)) in heads.enumerate() {
            let start = self.head_start(page, layer_idx, kv_head_idx);
            let head = &mut self.device[granule_of(page)][start..start + self.layout.head_len()];
            let (keys, values) = head.split_at_mut(self.layout.keys_len());
            for (column, &x) in keys.chunks_exact_mut(PAGE_LEN).zip(key) {
                column[slot] = x;
            }
            let blocks = values.chunks_exact_mut(PAGE_LEN * BLOCK_LEN).zip(value.chunks(BLOCK_LEN));
            for (block, value) in blocks {
                block[slot * BLOCK_LEN..][..value.len()].copy_from_slice(value);
            }
        }
    }

    pub(super) fn copy(&mut self, src: PageId, dst: PageId) {
        let (from, to) = (granule_of(src), granule_of(dst));
        let (src, dst) = (self.in_granule(src), self.in_granule(dst));
        if from == to {
            return self.device[from].copy_within(src, dst.start);
        }
        let [from, to] = self.device.get_disjoint_mut([from, to]).expect("pages have memory");
        to[dst].copy_from_slice(&from[src]);
    }

    /// Copies tokens of some pages to the first cells of another.
    pub(super) fn pack(&mut self, pack: &Pack) {
        let layout = self.layout;
        let to = self.in_granule(pack.to);
        let mut page = self.device[granule_of(pack.to)][to.clone()].to_vec();
        let cells = pack.from.iter().flat_map(|&(from, bits)| {
            (0..PAGE_LEN).filter(move |slot| bits >> slot & 1 == 1).map(move |slot| (from, slot))
        });
        for (to_slot, (from, slot)) in cells.enumerate() {
            let source = &self.device[granule_of(from)][self.in_granule(from)];
            let heads = page.chunks_exact_mut(layout.head_len()).zip(source.chunks_exact(layout.head_len()));
            for (head, source) in heads {
                copy_slot(layout, (source, slot), (head, to_slot));
            }
        }
        self.device[granule_of(pack.to)][to].copy_from_slice(&page);
    }

    /// Copies one token.
    pub(super) fn move_cell(&mut self, src: Cell, dst: Cell) {
        let layout = self.layout;
        let source = self.device[granule_of(src.page)][self.in_granule(src.page)].to_vec();
        let to = self.in_granule(dst.page);
        let target = &mut self.device[granule_of(dst.page)][to];
        let heads = target.chunks_exact_mut(layout.head_len()).zip(source.chunks_exact(layout.head_len()));
        for (head, source) in heads {
            copy_slot(layout, (source, src.idx), (head, dst.idx));
        }
    }

    pub(super) fn swap_out(&mut self, src: PageId, dst: HostPageId) {
        let (from, to) = (self.in_granule(src), self.in_host_granule(dst));
        let (idx, bit) = self.host_bit(dst);
        let granule = &mut self.host[idx];
        granule.memory[to].copy_from_slice(&self.device[granule_of(src)][from]);
        granule.written |= bit;
    }

    pub(super) fn swap_in(&mut self, src: HostPageId, dst: PageId) {
        let (from, to) = (self.in_host_granule(src), self.in_granule(dst));
        let (idx, _) = self.host_bit(src);
        self.device[granule_of(dst)][to].copy_from_slice(&self.host[idx].memory[from]);
    }

    /// Gives the memory of granules back to the system that have been written to, and of whose pages those are free, until that are
    /// `at_most` bytes, of the last granule perhaps more. Returns the bytes that were written.
    pub(super) fn release_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> u64 {
        let free_in = self.free_in(free);
        let page_bytes = self.host_page_bytes();
        self.keeps_host_memory = false;
        let mut n_bytes = 0;
        for (granule, free) in self.host.iter_mut().zip(free_in) {
            if n_bytes >= at_most {
                break;
            }
            if granule.written == 0 || granule.written & !free != 0 {
                continue;
            }
            // Where there is no other mapping to be had, the memory stays.
            let Some(memory) = Mapped::new(granule.memory.len()) else {
                self.keeps_host_memory = true;
                continue;
            };
            n_bytes += u64::from(granule.written.count_ones()) * page_bytes;
            *granule = HostGranule { memory, written: 0 };
        }
        n_bytes
    }

    /// Whether memory that could have gone back stayed when some was to go last.
    pub(super) fn keeps_host_memory(&self) -> bool {
        self.keeps_host_memory
    }

    /// Moves what is in pages that are not free to some that are and have memory, so that more granules can go back, of so many bytes at
    /// most, of the last one perhaps more. Returns from where to where.
    pub(super) fn gather_host_pages(
        &mut self,
        free: &[HostPageId],
        at_most: u64,
    ) -> Vec<(HostPageId, HostPageId)> {
        let (n, page_bytes) = (self.n_host_granule_pages, self.host_page_bytes());
        let free_in = self.free_in(free);
        let with_memory = self.host.iter().zip(free_in).enumerate().filter(|(_, (of, _))| of.written != 0);
        let pieces = with_memory.map(|(idx, (granule, free))| {
            let is_there = |bit: &usize| idx * n + bit < self.n_host_pages;
            let pages = |bits: u64| {
                let bits = (0..n).filter(is_there).filter(move |bit| bits >> bit & 1 == 1);
                bits.map(|bit| HostPageId((idx * n + bit) as u32)).collect()
            };
            let n_bytes = u64::from(granule.written.count_ones()) * page_bytes;
            // Pages that were never written take no memory: nothing of them moves, and nothing moves there.
            let (used, free) = (pages(granule.written & !free), pages(granule.written & free));
            HostPiece { used, free, n_bytes }
        });
        let moves = HostPiece::gather(pieces.collect(), at_most);
        for &(from, to) in &moves {
            let [source, target] = [from, to].map(|page| self.in_host_granule(page));
            let ((from, _), (to, bit)) = (self.host_bit(from), self.host_bit(to));
            let granules = self.host.get_disjoint_mut([from, to]);
            let [from, to] = granules.expect("pages move to other granules");
            to.memory[target].copy_from_slice(&from.memory[source]);
            to.written |= bit;
        }
        moves
    }

    /// For each granule of host memory the bits of those of its pages that are free.
    fn free_in(&self, free: &[HostPageId]) -> Vec<u64> {
        let mut free_in = vec![0; self.host.len()];
        for &page in free {
            let (idx, bit) = self.host_bit(page);
            free_in[idx] |= bit;
        }
        free_in
    }

    fn host_page_bytes(&self) -> u64 {
        (self.layout.page_len() * size_of::<f32>()) as u64
    }

    /// What makes the bytes of a page those of this layout and of this kind of processor.
    pub(super) fn format(&self) -> String {
        let PageLayout { n_layers, n_kv_heads, head_dim } = self.layout;
        let arch = std::env::consts::ARCH;
        format!("cpu 1, {arch}, f32, {n_layers} layers of {n_kv_heads} heads of {head_dim}")
    }

    /// What is in a page.
    pub(super) fn bytes(&self, page: KvPlace) -> &[u8] {
        let elements = match page {
            KvPlace::Device(page) => &self.device[granule_of(page)][self.in_granule(page)],
            KvPlace::Host(page) => &self.host[self.host_bit(page).0].memory[self.in_host_granule(page)],
        };
        elements.as_bytes()
    }

    /// Fills a page of host memory.
    pub(super) fn fill(&mut self, page: HostPageId, bytes: &[u8]) {
        let at = self.in_host_granule(page);
        let (idx, bit) = self.host_bit(page);
        let granule = &mut self.host[idx];
        granule.memory[at].as_mut_bytes().copy_from_slice(bytes);
        granule.written |= bit;
    }

    /// Where a page lies in its granule.
    fn in_granule(&self, page: PageId) -> Range<usize> {
        self.at(page.0 as usize % N_GRANULE_PAGES)
    }

    fn in_host_granule(&self, page: HostPageId) -> Range<usize> {
        self.at(page.0 as usize % self.n_host_granule_pages)
    }

    fn at(&self, idx: usize) -> Range<usize> {
        let len = self.layout.page_len();
        idx * len..(idx + 1) * len
    }

    /// The granule of a page of host memory, and its bit in there.
    fn host_bit(&self, page: HostPageId) -> (usize, u64) {
        let (page_idx, n) = (page.0 as usize, self.n_host_granule_pages);
        (page_idx / n, 1 << (page_idx % n))
    }

    /// Where a head begins in the granule of its page.
    fn head_start(&self, page: PageId, layer_idx: usize, kv_head_idx: usize) -> usize {
        let PageLayout { n_layers, n_kv_heads, .. } = self.layout;
        let layer = page.0 as usize % N_GRANULE_PAGES * n_layers + layer_idx;
        (layer * n_kv_heads + kv_head_idx) * self.layout.head_len()
    }
}

/// Copies the key and the value of a head from a slot of one page to a slot of another.
fn copy_slot(layout: PageLayout, (source, slot): (&[f32], usize), (head, to_slot): (&mut [f32], usize)) {
    let (keys, values) = head.split_at_mut(layout.keys_len());
    let (source_keys, source_values) = source.split_at(layout.keys_len());
    for (column, source) in keys.chunks_exact_mut(PAGE_LEN).zip(source_keys.chunks_exact(PAGE_LEN)) {
        column[to_slot] = source[slot];
    }
    let blocks = values.chunks_exact_mut(PAGE_LEN * BLOCK_LEN);
    for (block, source) in blocks.zip(source_values.chunks_exact(PAGE_LEN * BLOCK_LEN)) {
        let source = &source[slot * BLOCK_LEN..][..BLOCK_LEN];
        block[to_slot * BLOCK_LEN..][..BLOCK_LEN].copy_from_slice(source);
    }
}

fn granule_of(page: PageId) -> usize {
    page.0 as usize / N_GRANULE_PAGES
}

/// Zeroes that cost no memory before they are touched, and go back to the system when they are dropped: what the process's
/// allocator gives out it may zero at once, and keep.
struct Mapped(MmapMut);

impl Mapped {
    /// `None` when the memory cannot be had.
    fn new(len: usize) -> Option<Self> {
        MmapMut::map_anon(len.checked_mul(size_of::<f32>())?).ok().map(Self)
    }
}

impl Deref for Mapped {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        <[f32]>::ref_from_bytes(&self.0).expect("a mapping begins with a page and is whole numbers long")
    }
}

impl DerefMut for Mapped {
    fn deref_mut(&mut self) -> &mut [f32] {
        <[f32]>::mut_from_bytes(&mut self.0).expect("a mapping begins with a page and is whole numbers long")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_host_pages_goes_back_by_granules_of_which_all_that_was_written_is_free() {
        let layout = PageLayout { n_layers: 1, n_kv_heads: 1, head_dim: 16 };
        let page_bytes = (layout.page_len() * size_of::<f32>()) as u64;
        let n_host_pages = N_GRANULE_PAGES + 3;
        let mut pages = KvPages::new(layout, N_GRANULE_PAGES, n_host_pages).expect("there is memory");
        let host = |idx: usize| HostPageId(idx as u32);
        let all: Vec<HostPageId> = (0..n_host_pages).map(host).collect();
        assert_eq!(pages.release_host_pages(&all, u64::MAX), 0, "nothing was written");
        let bytes = |value: u8| vec![value; page_bytes as usize];
        for idx in [0, 1, N_GRANULE_PAGES + 2] {
            pages.fill(host(idx), &bytes(idx as u8 + 1));
        }
        let but_the_first: Vec<HostPageId> = all[1..].to_vec();
        assert_eq!(
            pages.release_host_pages(&but_the_first, u64::MAX),
            page_bytes,
            "the first granule has one in use"
        );
        assert_eq!(pages.bytes(KvPlace::Host(host(0))), bytes(1));
        assert_eq!(pages.bytes(KvPlace::Host(host(N_GRANULE_PAGES + 2))), bytes(0), "it is new memory");
        assert_eq!(pages.release_host_pages(&all, u64::MAX), 2 * page_bytes);
        assert_eq!(pages.release_host_pages(&all, u64::MAX), 0, "it is gone");
        pages.fill(host(1), &bytes(7));
        pages.swap_in(host(1), PageId(3));
        pages.swap_out(PageId(3), host(N_GRANULE_PAGES));
        assert_eq!(pages.bytes(KvPlace::Host(host(N_GRANULE_PAGES))), bytes(7));
        assert_eq!(pages.release_host_pages(&all, 0), 0);
        assert_eq!(pages.release_host_pages(&all, 1), page_bytes, "the other granule is for the next time");
        assert_eq!(pages.release_host_pages(&all, u64::MAX), page_bytes);
    }

    #[test]
    fn what_lies_apart_is_gathered_so_that_granules_come_free() {
        let layout = PageLayout { n_layers: 1, n_kv_heads: 1, head_dim: 16 };
        let page_bytes = (layout.page_len() * size_of::<f32>()) as u64;
        let n_host_pages = 2 * N_GRANULE_PAGES + 3;
        let mut pages = KvPages::new(layout, N_GRANULE_PAGES, n_host_pages).expect("there is memory");
        for idx in 0..n_host_pages {
            pages.fill(HostPageId(idx as u32), &vec![idx as u8; page_bytes as usize]);
        }
        // Two are in use of the first granule, one of the second, and one of the last, which is short.
        let used = [3, 9, N_GRANULE_PAGES + 5, 2 * N_GRANULE_PAGES + 1].map(|idx| HostPageId(idx as u32));
        let free = |used: &[HostPageId]| {
            let all = (0..n_host_pages as u32).map(HostPageId);
            all.filter(|page| !used.contains(page)).collect::<Vec<_>>()
        };
        assert_eq!(pages.release_host_pages(&free(&used), u64::MAX), 0, "each has one in use");
        assert_eq!(pages.gather_host_pages(&free(&used), 0), []);
        let moves = pages.gather_host_pages(&free(&used), u64::MAX);
        let now = used.map(|page| moves.iter().find(|(from, _)| *from == page).map_or(page, |&(_, to)| to));
        let granule_bytes = N_GRANULE_PAGES as u64 * page_bytes;
        assert_eq!(pages.release_host_pages(&free(&now), u64::MAX), granule_bytes + 3 * page_bytes);
        for (was, now) in used.into_iter().zip(now) {
            assert_eq!(pages.bytes(KvPlace::Host(now)), vec![was.0 as u8; page_bytes as usize]);
        }
        assert_eq!(pages.gather_host_pages(&free(&now), u64::MAX), [], "they are together");
    }

    #[test]
    fn what_is_gathered_takes_no_memory_that_was_not_taken_before() {
        let layout = PageLayout { n_layers: 1, n_kv_heads: 1, head_dim: 16 };
        let page_bytes = (layout.page_len() * size_of::<f32>()) as u64;
        let n_host_pages = 2 * N_GRANULE_PAGES;
        let mut pages = KvPages::new(layout, N_GRANULE_PAGES, n_host_pages).expect("there is memory");
        let [first, third, other, unwritten] =
            [0, 2, N_GRANULE_PAGES, N_GRANULE_PAGES + 1].map(|idx| HostPageId(idx as u32));
        let free = |used: &[HostPageId]| {
            let all = (0..n_host_pages as u32).map(HostPageId);
            all.filter(|page| !used.contains(page)).collect::<Vec<_>>()
        };
        for page in [first, other] {
            pages.fill(page, &vec![page.0 as u8 + 1; page_bytes as usize]);
        }
        assert_eq!(
            pages.gather_host_pages(&free(&[first, other]), u64::MAX),
            [],
            "each has one page's memory"
        );
        // One that is taken and not yet written to has nothing to move.
        assert_eq!(pages.gather_host_pages(&free(&[first, other, unwritten]), u64::MAX), []);
        pages.fill(third, &vec![9; page_bytes as usize]);
        let moves = pages.gather_host_pages(&free(&[first, other]), u64::MAX);
        assert_eq!(moves, [(other, third)], "to the one page that has memory and is free");
        assert_eq!(pages.release_host_pages(&free(&[first, third]), u64::MAX), page_bytes);
        assert_eq!(pages.bytes(KvPlace::Host(third)), vec![other.0 as u8 + 1; page_bytes as usize]);
    }

    #[test]
    fn memory_of_large_host_pages_goes_back_page_by_page() {
        let layout = PageLayout { n_layers: 64, n_kv_heads: 8, head_dim: 64 };
        let page_bytes = layout.page_len() * size_of::<f32>();
        assert!(page_bytes >= HOST_GRANULE_BYTES);
        let mut pages = KvPages::new(layout, 0, 3).expect("there is memory");
        for idx in 0..3 {
            pages.fill(HostPageId(idx), &vec![idx as u8 + 1; page_bytes]);
        }
        assert_eq!(pages.release_host_pages(&[HostPageId(1)], u64::MAX), page_bytes as u64);
        for (idx, value) in [1, 0, 3].into_iter().enumerate() {
            let bytes = pages.bytes(KvPlace::Host(HostPageId(idx as u32)));
            assert!(bytes.iter().all(|&byte| byte == value), "of page {idx}");
        }
    }
}
