//! What the tests of kernels share.

use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) use crate::bare::{TestGpu, include_dir};
use crate::driver::Graph;
use crate::{CudaError, Event, Gpu, Timing};

/// Tests share the device, but for those that count its memory.
static DEVICE: RwLock<()> = RwLock::new(());

#[expect(dead_code, reason = "held until the test's thread ends")]
enum DeviceGuard {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

thread_local! {
    /// A test thread takes the lock of the device once: taking it twice could wait for itself.
    static HELD: RefCell<Option<DeviceGuard>> = const { RefCell::new(None) };
}

/// A device for tests; `None`, with a line that says so, on a machine without one. With `TRELLIS_REQUIRE_CUDA=1`
/// that is a failure instead.
pub(crate) fn gpu() -> Option<TestGpu> {
    let share = || DeviceGuard::Shared(DEVICE.read().unwrap_or_else(PoisonError::into_inner));
    HELD.with_borrow_mut(|held| _ = held.get_or_insert_with(share));
    open()
}

/// As [`gpu`], while no other test has it.
pub(crate) fn gpu_alone() -> Option<TestGpu> {
    let take = || DeviceGuard::Alone(DEVICE.write().unwrap_or_else(PoisonError::into_inner));
    HELD.with_borrow_mut(|held| {
        assert!(!matches!(held, Some(DeviceGuard::Shared(_))), "the test shares the device already");
        held.get_or_insert_with(take);
    });
    open()
}

fn open() -> Option<TestGpu> {
    match Gpu::open_without_cache(0) {
        Ok(gpu) => Some(TestGpu::on(gpu)),
        Err(error) => {
            let is_required = std::env::var_os("TRELLIS_REQUIRE_CUDA").is_some_and(|value| value == "1");
            assert!(!is_required, "TRELLIS_REQUIRE_CUDA=1, but: {error}");
            eprintln!("skipped: no CUDA device ({error})");
            None
        }
    }
}

impl TestGpu {
    /// Microseconds of what is launched, in a captured graph as in the engine's steps: the median of 200 launches, ten of
    /// which follow each other.
    pub(crate) fn median_us(&self, mut launch: impl FnMut()) -> f32 {
        const N_LAUNCHES: usize = 10;
        // The first launch loads the kernel, which cannot be captured.
        launch();
        self.stream.synchronize().expect("no failure");
        let launches = || {
            (0..N_LAUNCHES).for_each(|_| launch());
            Ok::<(), CudaError>(())
        };
        let graph = Graph::capture(&self.stream, launches).expect("a graph");
        let [begin, end] = [(); 2].map(|()| Event::new(&self.gpu, Timing::On).expect("a mark"));
        let replay = || {
            begin.record(&self.stream).expect("a mark");
            graph.launch(&self.stream).expect("launched");
            end.record(&self.stream).expect("a mark");
            end.synchronize().expect("no failure");
            begin.elapsed_ms(&end).expect("a time") * 1e3 / N_LAUNCHES as f32
        };
        let mut times: Vec<f32> = (0..21).map(|_| replay()).skip(1).collect();
        times.sort_by(f32::total_cmp);
        times[times.len() / 2]
    }
}

/// splitmix64: numbers for tests, the same on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// About normal, mean 0 and variance 1.
    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f64 = (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum();
        (sum - 6.0) as f32
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}
