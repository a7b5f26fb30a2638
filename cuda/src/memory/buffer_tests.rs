//! Buffers on a card.

use crate::testing::gpu;
use crate::{CudaError, Gpu};

#[test]
fn buffers_are_apart_and_all_comes_back() {
    if gpu().is_none() {
        return;
    }
    let gpu = Gpu::open(0).expect("a device");
    let stream = gpu.stream().expect("a stream");
    let lengths = [1, 511, 513, 4096, 1 << 20, (1 << 20) + 1, 5 << 20];
    for round in 0..3 {
        let before = gpu.memory_stats();
        let buffers = lengths.map(|n_bytes| gpu.allocate("a test", n_bytes).expect("device memory"));
        for (idx, buffer) in buffers.iter().enumerate() {
            let slice = buffer.slice();
            assert_eq!((slice.address % 512, slice.n_bytes), (0, lengths[idx]));
            slice.fill(&stream, idx as u8 + 1).expect("filled");
        }
        for (idx, buffer) in buffers.iter().enumerate() {
            let mut found = vec![0u8; lengths[idx]];
            buffer.slice().download(&stream, &mut found).expect("it comes back");
            assert!(found.iter().all(|byte| *byte == idx as u8 + 1), "buffer {idx} was written by another");
        }
        let stats = gpu.memory_stats();
        assert!(stats.in_use_bytes >= lengths.iter().sum());
        assert_eq!(stats.n_allocations, before.n_allocations + lengths.len() as u64);
        if round > 0 {
            assert_eq!(stats.n_driver_allocations, before.n_driver_allocations);
        }
        drop(buffers);
        assert_eq!(gpu.memory_stats().in_use_bytes, 0);
    }
    assert!(gpu.memory_stats().reserved_bytes > 0);
    gpu.trim().expect("given back");
    assert_eq!(gpu.memory_stats().reserved_bytes, 0);
}

#[test]
fn too_much_is_refused_with_the_numbers_and_the_device_lives() {
    if gpu().is_none() {
        return;
    }
    let gpu = Gpu::open(0).expect("a device");
    drop(gpu.allocate("a test", 64 << 20).expect("device memory"));
    assert_eq!(gpu.memory_stats().reserved_bytes, 64 << 20);
    for needed in [gpu.total_bytes() + 1, usize::MAX] {
        match gpu.allocate("all of it", needed) {
            Err(CudaError::OutOfMemory { what, needed_bytes, free_bytes, total_bytes }) => {
                assert_eq!((what, needed_bytes), ("all of it", needed as u64));
                assert_eq!(total_bytes, gpu.total_bytes() as u64);
                assert!((64 << 20..=total_bytes).contains(&free_bytes), "{free_bytes} bytes free");
            }
            other => panic!("{other:?}"),
        }
    }
    gpu.allocate("a test", 1 << 20).expect("the device lives");
}

#[test]
fn memory_comes_back_only_after_the_work_on_it() {
    if gpu().is_none() {
        return;
    }
    let gpu = Gpu::open(0).expect("a device");
    let stream = gpu.stream().expect("a stream");
    let n_bytes = 512 << 20;
    let first = gpu.allocate("a test", n_bytes).expect("device memory");
    let address = first.slice().address;
    for _ in 0..100 {
        first.slice().fill(&stream, 1).expect("filled");
    }
    drop(first);
    // The same memory, written by another stream at once.
    let second = gpu.allocate("a test", n_bytes).expect("device memory");
    assert_eq!(second.slice().address, address);
    let other = gpu.stream().expect("a stream");
    second.slice().fill(&other, 2).expect("filled");
    stream.synchronize().expect("no failure");
    let mut found = vec![0u8; n_bytes];
    second.slice().download(&other, &mut found).expect("it comes back");
    assert!(found.iter().all(|byte| *byte == 2));
}
