//! RMSNorm of the residual stream.

use super::common::{Dtype, RowCount, expect, expect_rows, i32_of, type_name};
use crate::driver::params;
use crate::{CudaError, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// Most threads of a block.
const N_THREADS_MAX: usize = 1024;
/// Groups of four values that a thread holds.
const N_KEPT: usize = 4;

/// The longest row.
pub const HIDDEN_SIZE_MAX: usize = N_THREADS_MAX * 4 * N_KEPT;

/// The kernel's source, for a model of type `dtype`.
#[must_use]
pub fn source(dtype: Dtype) -> Source {
    Source::new("norm.cu", concat!(include_str!("common.cuh"), include_str!("norm.cu")))
        .with("MODEL_T", type_name(dtype))
        .with("N_THREADS_MAX", N_THREADS_MAX)
        .with("N_KEPT", N_KEPT)
}

/// As in `norm.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct RmsNormParams {
    x: Pointer,
    weight: Pointer,
    y: Pointer,
    n_rows: Pointer,
    hidden: i32,
    eps: f32,
}
params!(RmsNormParams, 40);

/// The parameters of one norm.
#[derive(Clone, Copy, Debug)]
pub struct NormWeights {
    /// Length of a row, at most [`HIDDEN_SIZE_MAX`].
    pub hidden_size: usize,
    /// Factors.
    pub weight: Slice, // T [hidden_size]
    /// Added to the mean square.
    pub eps: f32,
}

/// The norm of a model of one type; see `norm.cu`.
#[derive(Clone, Debug)]
pub struct Norm {
    kernel: Kernel<RmsNormParams>,
    dtype: Dtype,
}

impl Norm {
    /// Finds the kernel in the module of [`source`] for the same type.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("rms_norm")?, dtype })
    }

    /// `y = norm(x)`
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or a row too long.
    pub fn run(
        &self,
        stream: &Stream,
        rows: RowCount,
        weights: NormWeights,
        x: Slice, // f32 [rows, hidden_size]
        y: Slice, // T [rows, hidden_size]
    ) -> Result<(), CudaError> {
        if rows.n_max == 0 {
            return Ok(());
        }
        let hidden_size = weights.hidden_size;
        assert!((1..=HIDDEN_SIZE_MAX).contains(&hidden_size), "rows of {hidden_size}");
        expect_rows(rows);
        expect("x", x, rows.n_max * hidden_size, 4);
        expect("y", y, rows.n_max * hidden_size, self.dtype.n_bytes());
        expect("weight", weights.weight, hidden_size, self.dtype.n_bytes());
        let params = RmsNormParams {
            x: x.into(),
            weight: weights.weight.into(),
            y: y.into(),
            n_rows: rows.n.into(),
            hidden: i32_of(hidden_size),
            eps: weights.eps,
        };
        // Eight values a thread where the block may grow: half of what it could hold, for a shorter way.
        let n_threads = hidden_size.div_ceil(8).next_multiple_of(32).min(N_THREADS_MAX) as u32;
        let launch = Launch { grid: (rows.n_max as u32, 1, 1), block: (n_threads, 1, 1), shared_bytes: 0 };
        // SAFETY: lengths were checked above, and the threads cover the row; the caller keeps the count at most `n_max`.
        unsafe { launch.run(stream, &self.kernel, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, TestGpu, gpu};

    #[test]
    fn compiles() {
        DTYPES.into_iter().for_each(|dtype| assert_compiles(source(dtype)));
    }

    const EPS: f32 = 1e-5;

    fn reference(x: &[f32], weight: &[f32]) -> Vec<f64> {
        let squares = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (squares + f64::from(EPS)).sqrt();
        x.iter().zip(weight).map(|(&x, &w)| f64::from(w) * f64::from(x) * scale).collect()
    }

    #[derive(Clone, Copy, Debug)]
    struct Case {
        dtype: Dtype,
        n_max: usize,
        n: usize,
        hidden_size: usize,
    }

    fn run_case(test: &TestGpu, norm: &Norm, random: &mut Random, case: Case) {
        let Case { dtype, n_max, n, hidden_size } = case;
        let n_values = n_max * hidden_size;
        let x: Vec<f32> = random.normals(n_values).iter().map(|x| 3.0 * x).collect();
        let weight = rounded(dtype, &random.normals(hidden_size));
        let (d_x, d_weight) = (upload(test, &x), upload_as(test, dtype, &weight));
        let d_y = poisoned(test, n_values * dtype.n_bytes());
        let count = DeviceCount::new(test, n_max, n);
        let weights = NormWeights { hidden_size, weight: d_weight.slice(), eps: EPS };
        norm.run(&test.stream, count.rows(), weights, d_x.slice(), d_y.slice()).expect("a launch");

        assert_eq!(download(test, d_x.slice(), n_values, 0f32), x, "{case:?}: the residual");
        let got = download_as(test, dtype, d_y.slice(), n_values);
        let name = format!("{case:?}");
        let expected: Vec<f64> =
            x[..n * hidden_size].chunks(hidden_size).flat_map(|row| reference(row, &weight)).collect();
        // Rounding to the type, and a few units in the last place of the scale.
        assert_close(&name, &got[..n * hidden_size], &expected, 2e-5, 1.01 * rounding(dtype) + 1e-6);
        assert_untouched(&name, &got[n * hidden_size..]);
    }

    #[test]
    fn a_row_whose_squares_overflow_is_not_a_number() {
        let Some(test) = gpu() else { return };
        let norm = Norm::new(&test.module(source(Dtype::F32)), Dtype::F32).expect("the kernel");
        let x = [[2e19f32; 8], [1.0; 8], [f32::MAX; 8]].concat();
        let (d_x, d_weight) = (upload(&test, &x), upload(&test, &[1f32; 8]));
        let d_y = poisoned(&test, x.len() * 4);
        let count = DeviceCount::new(&test, 3, 3);
        let weights = NormWeights { hidden_size: 8, weight: d_weight.slice(), eps: EPS };
        norm.run(&test.stream, count.rows(), weights, d_x.slice(), d_y.slice()).expect("a launch");
        let got = download(&test, d_y.slice(), x.len(), 0f32);
        assert!(got[..8].iter().chain(&got[16..]).all(|y| y.is_nan()), "{got:?}");
        assert!(got[8..16].iter().all(|y| y.is_finite()), "{got:?}");
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let mut random = Random(2);
        for dtype in DTYPES {
            let norm = Norm::new(&test.module(source(dtype)), dtype).expect("the kernel");
            for (n_max, n, hidden_size) in [
                (1, 1, 1),
                (3, 2, 33),
                (4, 4, 66),
                (7, 5, 576),
                (33, 31, 4096),
                (2, 2, 12292),
                (1, 1, HIDDEN_SIZE_MAX),
            ] {
                run_case(&test, &norm, &mut random, Case { dtype, n_max, n, hidden_size });
            }
        }
    }
}
