//! What launchers share: types of activations, counts of rows, checks of lengths.

pub use trellis_engine::backend::PAGE_LEN;
pub use trellis_engine::model::Dtype;

use crate::{Launch, Slice, Source};

/// The type of an activation that a kernel takes in two forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// The model's type.
    Model,
    /// `f32`, as the residual stream.
    F32,
}

impl Element {
    /// Length of one element in a model of type `dtype`.
    #[must_use]
    pub fn n_bytes(self, dtype: Dtype) -> usize {
        match self {
            Self::Model => dtype.n_bytes(),
            Self::F32 => Dtype::F32.n_bytes(),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::F32 => "f32",
        }
    }
}

/// The type's name.
pub(crate) fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "f32",
        Dtype::F16 => "f16",
        Dtype::Bf16 => "bf16",
    }
}

/// What a type is called in the kernels' sources.
pub(crate) fn type_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float",
        Dtype::F16 => "f16",
        Dtype::Bf16 => "bf16",
    }
}

/// How many rows a launch works on. The grid is laid out for `n_max`; the blocks past `*n` end at once, so that
/// a captured launch serves every smaller batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCount {
    /// The most there can be.
    pub n_max: usize,
    /// The number of this step: one `i32` on the device, at most `n_max`.
    pub n: Slice,
}

/// Panics unless the slice has room for `n` elements and is aligned for 16-byte accesses.
#[track_caller]
pub(crate) fn expect(what: &str, slice: Slice, n: usize, element_bytes: usize) {
    let needed_bytes = n * element_bytes;
    assert!(slice.n_bytes >= needed_bytes, "{what} has {} bytes, {needed_bytes} are needed", slice.n_bytes);
    assert!(slice.address.is_multiple_of(16), "{what} at {:#x} is not aligned to 16 bytes", slice.address);
}

/// Panics unless the slice has room for `n` integers of 32 bits.
#[track_caller]
pub(crate) fn expect_i32(what: &str, slice: Slice, n: usize) {
    assert!(slice.n_bytes >= 4 * n, "{what} has {} bytes, {} are needed", slice.n_bytes, 4 * n);
    assert!(slice.address.is_multiple_of(4), "{what} at {:#x} is not aligned to 4 bytes", slice.address);
}

/// The number as a kernel argument.
///
/// # Panics
/// It does not fit.
#[track_caller]
pub(crate) fn i32_of(n: usize) -> i32 {
    i32::try_from(n).expect("kernels count in 32 bits")
}

/// Panics unless the count is one.
#[track_caller]
pub(crate) fn expect_rows(rows: RowCount) {
    expect_i32("the count of rows", rows.n, 1);
    assert!(rows.n_max <= i32::MAX as usize, "{} rows", rows.n_max);
}

/// A source that begins with `common.cuh`, for a model of type `dtype`; a block has `n_threads` threads.
pub(crate) fn source_for(file: &'static str, text: &'static str, dtype: Dtype, n_threads: u32) -> Source {
    Source::new(file, text).with("MODEL_T", type_name(dtype)).with("N_THREADS", n_threads)
}

/// Threads of a block of the kernels that go over rows value by value.
pub(crate) const ROW_THREADS: u32 = 256;

/// A launch over rows of `n` values, four a thread: one block a row when there are rows enough to fill the device, else
/// as many as the row has work for.
pub(crate) fn over_rows(rows: RowCount, n: usize) -> Launch {
    let most = n.div_ceil(4 * ROW_THREADS as usize).clamp(1, 64);
    let wanted = 1024usize.div_ceil(rows.n_max.max(1));
    let grid = (rows.n_max as u32, most.min(wanted) as u32, 1);
    Launch { grid, block: (ROW_THREADS, 1, 1), shared_bytes: 0 }
}

#[cfg(test)]
pub(crate) mod check {
    //! What the tests of kernels share.

    use half::{bf16, f16};

    use super::{Dtype, RowCount};
    pub(crate) use crate::bare::{download, poisoned, upload};
    use crate::ops::usage::assert_registers_suffice;
    use crate::testing::{TestGpu, include_dir};
    use crate::{Buffer, Compiler, CudaError, Slice, Source};

    pub(crate) const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

    /// Compiles a source for the oldest and the usual architecture where NVRTC is to be found, and looks at the registers
    /// of its kernels.
    pub(crate) fn assert_compiles(source: Source) {
        for capability in [(8, 0), (9, 0)] {
            assert_compiles_for(source.clone(), capability);
        }
    }

    /// As [`assert_compiles`], for one architecture.
    pub(crate) fn assert_compiles_for(source: Source, capability: (i32, i32)) {
        match Compiler::new(capability, include_dir(), None).cubin(&source) {
            Ok(cubin) => {
                let arch = format!("sm_{}{}", capability.0, capability.1);
                assert_registers_suffice(source.file, &arch, &cubin);
            }
            Err(CudaError::NoLibrary { .. }) if !is_set("TRELLIS_REQUIRE_NVRTC") => {
                eprintln!("skipped: no NVRTC");
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn is_set(name: &str) -> bool {
        std::env::var_os(name).is_some_and(|value| value == "1")
    }

    /// The half unit in the last place of a number of size 1: how far rounding to the type may move it.
    pub(crate) fn rounding(dtype: Dtype) -> f64 {
        match dtype {
            Dtype::F32 => 2f64.powi(-24),
            Dtype::F16 => 2f64.powi(-11),
            Dtype::Bf16 => 2f64.powi(-8),
        }
    }

    /// The values that the type can hold nearest to these.
    pub(crate) fn rounded(dtype: Dtype, values: &[f32]) -> Vec<f32> {
        values
            .iter()
            .map(|&value| match dtype {
                Dtype::F32 => value,
                Dtype::F16 => f16::from_f32(value).to_f32(),
                Dtype::Bf16 => bf16::from_f32(value).to_f32(),
            })
            .collect()
    }

    /// A count on the device, to be kept until the launch is done.
    pub(crate) struct DeviceCount {
        n_max: usize,
        n: Buffer,
    }

    impl DeviceCount {
        pub(crate) fn new(test: &TestGpu, n_max: usize, n: usize) -> Self {
            Self { n_max, n: upload(test, &[n as i32]) }
        }

        pub(crate) fn rows(&self) -> RowCount {
            RowCount { n_max: self.n_max, n: self.n.slice() }
        }
    }

    pub(crate) fn upload_as(test: &TestGpu, dtype: Dtype, values: &[f32]) -> Buffer {
        match dtype {
            Dtype::F32 => upload(test, values),
            Dtype::F16 => upload(test, &values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>()),
            Dtype::Bf16 => upload(test, &values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>()),
        }
    }

    pub(crate) fn download_as(test: &TestGpu, dtype: Dtype, slice: Slice, n: usize) -> Vec<f32> {
        match dtype {
            Dtype::F32 => download(test, slice, n, 0f32),
            Dtype::F16 => download(test, slice, n, f16::ZERO).into_iter().map(f16::to_f32).collect(),
            Dtype::Bf16 => download(test, slice, n, bf16::ZERO).into_iter().map(bf16::to_f32).collect(),
        }
    }

    /// `|got - expected| <= absolute + relative * |expected|` everywhere; NaN fails.
    #[track_caller]
    pub(crate) fn assert_close(case: &str, got: &[f32], expected: &[f64], absolute: f64, relative: f64) {
        assert_eq!(got.len(), expected.len(), "{case}");
        for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
            let diff = (f64::from(got) - expected).abs();
            let tolerance = absolute + relative * expected.abs();
            assert!(diff <= tolerance, "{case}: [{i}] is {got}, not {expected} (±{tolerance:e})");
        }
    }

    /// All NaN: nothing was written here.
    #[track_caller]
    pub(crate) fn assert_untouched(case: &str, got: &[f32]) {
        assert!(got.iter().all(|value| value.is_nan()), "{case}: written past the end");
    }
}
