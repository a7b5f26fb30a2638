//! The bias of a projection, where no later kernel takes it along.

use super::common::{Activation, ByElement, Dtype, Rows, expect, expect_rows, i32_of, row_blocks};
use crate::{Arg, CudaError, Launch, Module, Slice, Source, Stream};

/// The kernels' source.
pub const SOURCE: Source =
    Source { file: "bias.cu", text: concat!(include_str!("common.cuh"), include_str!("bias.cu")) };

/// `y += bias`; see `bias.cu`.
#[derive(Clone, Debug)]
pub struct AddBias {
    kernels: ByElement,
    dtype: Dtype,
}

impl AddBias {
    /// Finds the kernels for a model of type `dtype` in the module of [`SOURCE`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        Ok(Self { kernels: ByElement::of(module, "add_bias_to", dtype)?, dtype })
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
        rows: Rows,
        n_out: usize,
        y: Activation, // [rows, n_out]
        bias: Slice,   // T [n_out]
    ) -> Result<(), CudaError> {
        if rows.n_max == 0 {
            return Ok(());
        }
        expect_rows(rows);
        expect("y", y.slice, rows.n_max * n_out, y.element.n_bytes(self.dtype));
        expect("bias", bias, n_out, self.dtype.n_bytes());
        let args = [y.slice.into(), bias.into(), rows.n.into(), Arg::I32(i32_of(n_out))];
        let grid = (rows.n_max as u32, row_blocks(n_out, rows.n_max), 1);
        let launch = Launch { grid, block: (256, 1, 1), shared_bytes: 0 };
        // SAFETY: the kernel's arguments in order, lengths checked above.
        unsafe { launch.run(stream, self.kernels.get(y.element), &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::Element;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        assert_compiles(SOURCE);
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let module = test.module(SOURCE);
        let mut random = Random(4);
        for dtype in DTYPES {
            let add_bias = AddBias::new(&module, dtype).expect("the kernels");
            for element in [Element::Model, Element::F32] {
                for (n_max, n, n_out) in [(1, 1, 1), (3, 2, 35), (9, 8, 4096), (2, 2, 8190)] {
                    let y_dtype = if element == Element::Model { dtype } else { Dtype::F32 };
                    let y = rounded(y_dtype, &random.normals(n_max * n_out));
                    let bias = rounded(dtype, &random.normals(n_out));
                    let (d_y, d_bias) = (upload_as(&test, y_dtype, &y), upload_as(&test, dtype, &bias));
                    let count = Count::new(&test, n_max, n);
                    let y_slice = Activation { element, slice: d_y.slice() };
                    add_bias
                        .run(&test.stream, count.rows(), n_out, y_slice, d_bias.slice())
                        .expect("a launch");
                    let got = download_as(&test, y_dtype, d_y.slice(), n_max * n_out);
                    // One f32 addition and one rounding, as here: exact.
                    let sums: Vec<f32> = (0..n_max * n_out)
                        .map(|i| if i < n * n_out { y[i] + bias[i % n_out] } else { y[i] })
                        .collect();
                    assert_eq!(got, rounded(y_dtype, &sums), "{dtype:?} to {element:?}, rows of {n_out}");
                }
            }
        }
    }
}
