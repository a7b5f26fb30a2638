//! The gated activation of the MLP.

use super::common::{Dtype, ROW_THREADS, RowCount, expect, expect_rows, i32_of, over_rows, source_for};
use crate::driver::params;
use crate::{CudaError, Kernel, Module, Pointer, Slice, Source, Stream};

/// The kernel's source, for a model of type `dtype`.
#[must_use]
pub fn source(dtype: Dtype) -> Source {
    let text = concat!(include_str!("common.cuh"), include_str!("swiglu.cu"));
    source_for("swiglu.cu", text, dtype, ROW_THREADS)
}

/// As in `swiglu.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct SwiGluParams {
    gate_up: Pointer,
    bias: Pointer,
    y: Pointer,
    n_tokens: Pointer,
    n: i32,
    unused: i32,
}
params!(SwiGluParams, 40);

/// `y = silu(gate) · up`; see `swiglu.cu`.
#[derive(Clone, Debug)]
pub struct SwiGlu {
    kernel: Kernel<SwiGluParams>,
    dtype: Dtype,
}

impl SwiGlu {
    /// Finds the kernel in the module of [`source`] for the same type.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("swiglu")?, dtype })
    }

    /// Activates the rows of a fused gate and up projection.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short.
    pub fn run(
        &self,
        stream: &Stream,
        tokens: RowCount,
        intermediate_size: usize,
        gate_up: Slice,      // T [tokens, 2, intermediate_size]
        bias: Option<Slice>, // T [2, intermediate_size]
        y: Slice,            // T [tokens, intermediate_size]
    ) -> Result<(), CudaError> {
        if tokens.n_max == 0 {
            return Ok(());
        }
        let n_values = tokens.n_max * intermediate_size;
        expect_rows(tokens);
        expect("gate_up", gate_up, 2 * n_values, self.dtype.n_bytes());
        expect("y", y, n_values, self.dtype.n_bytes());
        if let Some(bias) = bias {
            expect("bias", bias, 2 * intermediate_size, self.dtype.n_bytes());
        }
        let params = SwiGluParams {
            gate_up: gate_up.into(),
            bias: bias.into(),
            y: y.into(),
            n_tokens: tokens.n.into(),
            n: i32_of(intermediate_size),
            unused: 0,
        };
        // SAFETY: lengths were checked above; the caller keeps the count at most `n_max`.
        unsafe { over_rows(tokens, intermediate_size).run(stream, &self.kernel, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        DTYPES.into_iter().for_each(|dtype| assert_compiles(source(dtype)));
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let mut random = Random(3);
        for dtype in DTYPES {
            let swiglu = SwiGlu::new(&test.module(source(dtype)), dtype).expect("the kernel");
            for (n_max, n, size, has_bias) in [
                (1, 1, 1, true),
                (3, 2, 35, true),
                (2, 2, 90, false),
                (9, 8, 8192, true),
                (1, 1, 28672, false),
            ] {
                // Gates up to ±24, where exp is large or tiny.
                let gate_up: Vec<f32> = random.normals(n_max * 2 * size).iter().map(|x| 4.0 * x).collect();
                let gate_up = rounded(dtype, &gate_up);
                let bias = rounded(dtype, &random.normals(2 * size));
                let (d_gate_up, d_bias) = (upload_as(&test, dtype, &gate_up), upload_as(&test, dtype, &bias));
                let d_y = poisoned(&test, n_max * size * dtype.n_bytes());
                let count = DeviceCount::new(&test, n_max, n);
                let bias_slice = has_bias.then(|| d_bias.slice());
                swiglu
                    .run(&test.stream, count.rows(), size, d_gate_up.slice(), bias_slice, d_y.slice())
                    .expect("a launch");
                let got = download_as(&test, dtype, d_y.slice(), n_max * size);
                let expected: Vec<f64> = (0..n * size)
                    .map(|i| {
                        let (t, i) = (i / size, i % size);
                        let part = |k: usize| {
                            let bias = if has_bias { bias[k * size + i] } else { 0.0 };
                            f64::from(gate_up[(t * 2 + k) * size + i]) + f64::from(bias)
                        };
                        part(0) / (1.0 + (-part(0)).exp()) * part(1)
                    })
                    .collect();
                let case = format!("{dtype:?}, {n} of {n_max} rows of {size}");
                // Rounding to the type; f32 moves the sum with a bias by 2^-24 of up to 28, relative to the
                // gate or to the up part alone, each times the other part.
                assert_close(&case, &got[..n * size], &expected, 1e-4, 1.01 * rounding(dtype) + 1e-5);
                assert_untouched(&case, &got[n * size..]);
            }
        }
    }
}
