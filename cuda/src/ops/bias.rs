//! The bias of a projection, where no later kernel takes it along.

use super::common::{Dtype, ROW_THREADS, RowCount, expect, expect_rows, i32_of, over_rows, source_for};
use crate::driver::params;
use crate::{CudaError, Kernel, Module, Pointer, Slice, Source, Stream};

/// As in `bias.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AddBiasParams {
    y: Pointer,
    bias: Pointer,
    n_rows: Pointer,
    n: i32,
    unused: i32,
}
params!(AddBiasParams, 32);

/// The kernel's source, for a bias of type `dtype`.
#[must_use]
pub fn source(dtype: Dtype) -> Source {
    let text = concat!(include_str!("common.cuh"), include_str!("bias.cu"));
    source_for("bias.cu", text, dtype, ROW_THREADS)
}

/// `y += bias`; see `bias.cu`.
#[derive(Clone, Debug)]
pub struct AddBias {
    kernel: Kernel<AddBiasParams>,
    dtype: Dtype,
}

impl AddBias {
    /// Finds the kernel in the module of [`source`] for the same type.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("add_bias")?, dtype })
    }

    /// Adds the bias to every row.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short.
    pub fn run(
        &self,
        stream: &Stream,
        rows: RowCount,
        n_out: usize,
        y: Slice,    // f32 [rows, n_out]
        bias: Slice, // T [n_out]
    ) -> Result<(), CudaError> {
        if rows.n_max == 0 {
            return Ok(());
        }
        expect_rows(rows);
        expect("y", y, rows.n_max * n_out, 4);
        expect("bias", bias, n_out, self.dtype.n_bytes());
        let params = AddBiasParams {
            y: y.into(),
            bias: bias.into(),
            n_rows: rows.n.into(),
            n: i32_of(n_out),
            unused: 0,
        };
        // SAFETY: lengths were checked above; the caller keeps the count at most `n_max`.
        unsafe { over_rows(rows, n_out).run(stream, &self.kernel, &params) }
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
        let mut random = Random(4);
        for dtype in DTYPES {
            let add_bias = AddBias::new(&test.module(source(dtype)), dtype).expect("the kernel");
            for (n_max, n, n_out) in [(1, 1, 1), (3, 2, 35), (9, 8, 4096), (2, 2, 8190)] {
                let y = random.normals(n_max * n_out);
                let bias = rounded(dtype, &random.normals(n_out));
                let (d_y, d_bias) = (upload(&test, &y), upload_as(&test, dtype, &bias));
                let count = DeviceCount::new(&test, n_max, n);
                add_bias
                    .run(&test.stream, count.rows(), n_out, d_y.slice(), d_bias.slice())
                    .expect("a launch");
                let got = download(&test, d_y.slice(), n_max * n_out, 0f32);
                // One f32 addition, as here: exact.
                let sums: Vec<f32> = (0..n_max * n_out)
                    .map(|i| if i < n * n_out { y[i] + bias[i % n_out] } else { y[i] })
                    .collect();
                assert_eq!(got, sums, "{dtype:?}, rows of {n_out}");
            }
        }
    }
}
