//! Which granules have memory: over a number line that stands for the driver, and on a card.

use std::collections::BTreeMap;

use cudarc::driver::sys::CUresult;

use super::*;
use crate::driver::faults::{self, Lasts};
use crate::testing::{Random, gpu_alone};

const MIB: usize = 1 << 20;

/// Memory of so many bytes, and where it is.
#[derive(Debug)]
struct MappedMemory {
    limit_bytes: usize,
    pieces: BTreeMap<u64, (usize, bool)>, // length, whether it may be read and written
    refuses_to_allow: bool,
    refuses_to_unmap: bool,
}

impl MappedMemory {
    fn mapped_bytes(&self) -> usize {
        self.pieces.values().map(|(n_bytes, _)| n_bytes).sum()
    }
}

fn refusal(code: CUresult) -> CudaError {
    CudaError::Call { call: "a test", code: Some(code), reason: String::new() }
}

impl Mapper for MappedMemory {
    fn map(&mut self, at: Slice) -> Result<(), CudaError> {
        if self.mapped_bytes() + at.n_bytes > self.limit_bytes {
            return Err(refusal(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        }
        let end = at.address + at.n_bytes as u64;
        let before = self.pieces.range(..end).next_back();
        assert!(before.is_none_or(|(start, (n_bytes, _))| start + *n_bytes as u64 <= at.address), "{at:?}");
        self.pieces.insert(at.address, (at.n_bytes, false));
        Ok(())
    }

    fn allow(&mut self, at: Slice) -> Result<(), CudaError> {
        if self.refuses_to_allow {
            return Err(refusal(CUresult::CUDA_ERROR_INVALID_VALUE));
        }
        let mut end = at.address;
        for (start, (n_bytes, is_allowed)) in self.pieces.range_mut(at.address..) {
            if end < at.address + at.n_bytes as u64 {
                assert_eq!((*start, *is_allowed), (end, false), "{at:?}");
                (end, *is_allowed) = (start + *n_bytes as u64, true);
            }
        }
        assert_eq!(end, at.address + at.n_bytes as u64, "whole pieces");
        Ok(())
    }

    fn unmap(&mut self, at: Slice) -> Result<(), CudaError> {
        if self.refuses_to_unmap {
            return Err(refusal(CUresult::CUDA_ERROR_INVALID_VALUE));
        }
        let mut end = at.address;
        while end < at.address + at.n_bytes as u64 {
            end += self.pieces.remove(&end).expect("a piece begins here").0 as u64;
        }
        assert_eq!(end, at.address + at.n_bytes as u64, "whole pieces");
        Ok(())
    }
}

fn granules(granule_bytes: usize, range_bytes: usize, limit_bytes: usize) -> Granules<MappedMemory> {
    let line = MappedMemory {
        limit_bytes,
        pieces: BTreeMap::new(),
        refuses_to_allow: false,
        refuses_to_unmap: false,
    };
    Granules::new(line, Slice { address: 1 << 40, n_bytes: range_bytes }, granule_bytes)
}

#[test]
fn granules_are_whole_items_in_whole_units() {
    const GIB: usize = 1 << 30;
    // A page of the 8B shape, of the 1B shape, of 36 layers with 8 heads, of a tiny model.
    for (item_bytes, wanted_bytes, range_bytes, expected) in [
        (2 * MIB, 16 * GIB, 20 * GIB, 64 * MIB),
        (MIB / 2, 4 * GIB, 20 * GIB, 64 * MIB),
        (9 << 18, 4 * GIB, 20 * GIB, 54 * MIB),
        (12 << 10, 128 * (12 << 10), GIB, 6 * MIB),
        (30 << 10, GIB, GIB, 60 * MIB),
        // More than is usual: one of them is still whole.
        (305 << 10, GIB, GIB, 610 * MIB),
        // The whole of a large card.
        (2 * MIB, 16 * GIB, 100 * GIB, 200 * MIB),
        (12 << 10, 128 * (12 << 10), 100 * GIB, 198 * MIB),
        (2 * MIB, 16 * GIB, 1000 * GIB, 256 * MIB),
    ] {
        let found = granule_bytes(item_bytes, 2 * MIB, wanted_bytes, range_bytes);
        assert_eq!(found, expected, "{item_bytes} {wanted_bytes} {range_bytes}");
        assert!(found.is_multiple_of(item_bytes) && found.is_multiple_of(2 * MIB));
    }
}

#[test]
fn random_sizes_have_their_memory_and_no_more() {
    let mut random = Random(3);
    for _ in 0..200 {
        let granule_bytes = (1 + random.below(60)) * 2 * MIB;
        let range_bytes = (1 + random.below(3000)) * 2 * MIB;
        let limit_bytes = random.below(2 * range_bytes);
        let mut granules = granules(granule_bytes, range_bytes, limit_bytes);
        for _ in 0..20 {
            let wanted = random.below(range_bytes + 1);
            let before = granules.usable_bytes;
            let end = wanted.next_multiple_of(granule_bytes).min(range_bytes);
            let resized = granules.resize(wanted);
            if end <= limit_bytes {
                resized.expect("there is room");
                assert_eq!(granules.usable_bytes, end);
            } else {
                assert!(resized.expect_err("there is no room").is_out_of_memory());
                assert_eq!(granules.usable_bytes, before, "nothing has changed");
            }
            assert_eq!(granules.mapper.mapped_bytes(), granules.usable_bytes);
            assert!(granules.mapper.pieces.values().all(|(_, is_allowed)| *is_allowed));
        }
        granules.resize(0).expect("memory goes back");
        assert!(granules.mapper.pieces.is_empty());
    }
}

#[test]
fn what_cannot_be_read_is_not_kept() {
    let mut granules = granules(4 * MIB, 64 * MIB, 64 * MIB);
    granules.resize(8 * MIB).expect("there is room");
    granules.mapper.refuses_to_allow = true;
    granules.resize(32 * MIB).expect_err("refused");
    assert_eq!((granules.usable_bytes, granules.mapper.mapped_bytes()), (8 * MIB, 8 * MIB));
}

#[test]
fn what_could_not_be_taken_back_is_used_later() {
    let mut granules = granules(4 * MIB, 64 * MIB, 24 * MIB);
    granules.resize(8 * MIB).expect("there is room");
    granules.mapper.refuses_to_unmap = true;
    granules.resize(32 * MIB).expect_err("there is no room");
    assert_eq!((granules.usable_bytes, granules.mapper.mapped_bytes()), (8 * MIB, 24 * MIB));
    granules.resize(0).expect_err("refused");
    assert_eq!(granules.usable_bytes, 8 * MIB);
    granules.mapper.limit_bytes = 40 * MIB;
    granules.resize(40 * MIB).expect("there is room");
    assert!(granules.mapper.pieces.values().all(|(_, is_allowed)| *is_allowed));
    granules.mapper.refuses_to_unmap = false;
    granules.resize(4 * MIB).expect("memory goes back");
    assert_eq!((granules.usable_bytes, granules.mapper.mapped_bytes()), (4 * MIB, 4 * MIB));
}

/// A length whose last granule is shorter, with numbers in it that say where they lie.
const N_BYTES: usize = 50 * MIB;
const GRANULE: usize = 8 * MIB;

fn numbers(n_bytes: usize, seed: u32) -> Vec<u32> {
    (0..(n_bytes / 4) as u32).map(|idx| idx.wrapping_mul(0x9e37_79b9) ^ seed).collect()
}

#[test]
fn memory_comes_and_goes_and_what_stays_keeps_its_contents() {
    let Some(test) = gpu_alone() else { return };
    let round = || {
        let mut reserved = test.gpu.reserve("a test", N_BYTES, GRANULE).expect("addresses");
        // What the driver notes mappings in may stay with the addresses.
        reserved.resize(N_BYTES).expect("memory");
        reserved.resize(0).expect("memory goes back");
        let free_before = test.gpu.free_bytes().expect("the driver answers");
        let write = |reserved: &Reserved, start: usize, n_bytes: usize, seed| {
            let part = reserved.slice().part(start, n_bytes);
            part.upload(&test.stream, &numbers(n_bytes, seed)).expect("a copy");
            test.stream.synchronize().expect("a copy");
        };
        let holds = |reserved: &Reserved, start: usize, n_bytes: usize, seed| {
            let mut found = vec![0u32; n_bytes / 4];
            reserved.slice().part(start, n_bytes).download(&test.stream, &mut found).expect("a copy");
            assert!(found == numbers(n_bytes, seed), "{n_bytes} bytes at {start}");
        };
        reserved.resize(GRANULE).expect("memory");
        assert_eq!(reserved.mapped_bytes(), GRANULE);
        write(&reserved, 0, GRANULE, 1);
        // From here over all granules at once, and back into the first.
        reserved.resize(N_BYTES).expect("memory");
        assert_eq!(reserved.mapped_bytes(), N_BYTES);
        holds(&reserved, 0, GRANULE, 1);
        write(&reserved, GRANULE, N_BYTES - GRANULE, 2);
        holds(&reserved, 0, GRANULE, 1);
        reserved.resize(2 * GRANULE).expect("memory goes back");
        holds(&reserved, 0, GRANULE, 1);
        holds(&reserved, GRANULE, GRANULE, 2);
        reserved.resize(N_BYTES).expect("memory");
        holds(&reserved, GRANULE, GRANULE, 2);
        write(&reserved, 2 * GRANULE, N_BYTES - 2 * GRANULE, 3);
        holds(&reserved, 2 * GRANULE, N_BYTES - 2 * GRANULE, 3);
        reserved.resize(0).expect("memory goes back");
        assert_eq!(test.gpu.free_bytes().expect("the driver answers"), free_before, "to the byte");
        drop(reserved);
        free_before
    };
    let first = round();
    assert_eq!(round(), first, "to the byte");
    assert_eq!(test.gpu.free_bytes().expect("the driver answers"), first);
}

#[test]
fn too_much_is_refused_with_the_numbers_and_changes_nothing() {
    let Some(test) = gpu_alone() else { return };
    let n_bytes = 2 * test.gpu.total_bytes();
    let mut reserved = test.gpu.reserve("a test", n_bytes, 64 * MIB).expect("addresses cost nothing");
    reserved.resize(64 * MIB).expect("memory");
    // The driver keeps what it notes mappings in.
    reserved.resize(n_bytes).expect_err("there is not as much");
    reserved.slice().part(0, 4 * MIB).upload(&test.stream, &numbers(4 * MIB, 4)).expect("a copy");
    let free_before = test.gpu.free_bytes().expect("the driver answers");
    match reserved.resize(n_bytes) {
        Err(CudaError::OutOfMemory { what, needed_bytes, free_bytes, total_bytes }) => {
            assert_eq!(what, "a test");
            // In whole units.
            let least = (n_bytes - 64 * MIB) as u64;
            assert!((least..least + GRANULE as u64).contains(&needed_bytes), "{needed_bytes} for {least}");
            assert_eq!(total_bytes, test.gpu.total_bytes() as u64);
            // What was mapped on the way has made the driver note more than before.
            assert!(free_bytes.abs_diff(free_before as u64) <= MIB as u64, "{free_bytes} of {free_before}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(reserved.mapped_bytes(), 64 * MIB);
    let mut found = vec![0u32; MIB];
    reserved.slice().part(0, 4 * MIB).download(&test.stream, &mut found).expect("a copy");
    assert!(found == numbers(4 * MIB, 4));
}

#[test]
fn any_call_may_fail_and_nothing_has_changed() {
    let Some(test) = gpu_alone() else { return };
    let mut reserved = test.gpu.reserve("a test", N_BYTES, GRANULE).expect("addresses");
    reserved.resize(GRANULE).expect("memory");
    faults::clear();
    reserved.resize(N_BYTES).expect("memory");
    let calls = faults::clear();
    assert!(calls.contains(&"cuMemCreate") && calls.contains(&"cuMemMap"), "{calls:?}");
    reserved.resize(GRANULE).expect("memory goes back");
    let free_before = test.gpu.free_bytes().expect("the driver answers");
    for (n_before, call) in calls.iter().enumerate() {
        for code in [CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_ERROR_INVALID_VALUE] {
            faults::inject(n_before, code, Lasts::Once);
            let resized = reserved.resize(N_BYTES);
            faults::clear();
            // A second try after the cache was emptied may have helped.
            if resized.is_err() {
                assert_eq!(reserved.mapped_bytes(), GRANULE, "call {n_before}, {call}: {code:?}");
            }
            reserved.resize(GRANULE).expect("memory goes back");
            let free = test.gpu.free_bytes().expect("the driver answers");
            assert_eq!(free, free_before, "call {n_before}, {call}: {code:?}");
        }
    }
    faults::inject(1, CUresult::CUDA_ERROR_INVALID_VALUE, Lasts::Once);
    reserved.resize(0).expect_err("cuMemUnmap fails");
    faults::clear();
    assert_eq!(reserved.mapped_bytes(), GRANULE);
    reserved.resize(0).expect("memory goes back");
}
