//! The gated activation of the MLP.

use super::common::{
    Activation, ByElement, Dtype, Rows, address_or_null, expect, expect_rows, i32_of, row_blocks,
};
use crate::{Arg, CudaError, Launch, Module, Slice, Source, Stream};

/// The kernels' source.
pub const SOURCE: Source =
    Source { file: "swiglu.cu", text: concat!(include_str!("common.cuh"), include_str!("swiglu.cu")) };

/// `y = silu(gate) · up`; see `swiglu.cu`.
#[derive(Clone, Debug)]
pub struct SwiGlu {
    kernels: ByElement,
    dtype: Dtype,
}

impl SwiGlu {
    /// Finds the kernels for a model of type `dtype` in the module of [`SOURCE`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        Ok(Self { kernels: ByElement::of(module, "swiglu_from", dtype)?, dtype })
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
        tokens: Rows,
        intermediate_size: usize,
        gate_up: Activation, // [tokens, 2, intermediate_size]
        bias: Option<Slice>, // T [2, intermediate_size]
        y: Slice,            // T [tokens, intermediate_size]
    ) -> Result<(), CudaError> {
        if tokens.n_max == 0 {
            return Ok(());
        }
        let n_values = tokens.n_max * intermediate_size;
        expect_rows(tokens);
        expect("gate_up", gate_up.slice, 2 * n_values, gate_up.element.n_bytes(self.dtype));
        expect("y", y, n_values, self.dtype.n_bytes());
        if let Some(bias) = bias {
            expect("bias", bias, 2 * intermediate_size, self.dtype.n_bytes());
        }
        let args = [
            gate_up.slice.into(),
            address_or_null(bias),
            y.into(),
            tokens.n.into(),
            Arg::I32(i32_of(intermediate_size)),
        ];
        let grid = (tokens.n_max as u32, row_blocks(intermediate_size, tokens.n_max), 1);
        let launch = Launch { grid, block: (256, 1, 1), shared_bytes: 0 };
        // SAFETY: the kernel's arguments in order, lengths checked above.
        unsafe { launch.run(stream, self.kernels.get(gate_up.element), &args) }
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
        let mut random = Random(3);
        for dtype in DTYPES {
            let swiglu = SwiGlu::new(&module, dtype).expect("the kernels");
            for element in [Element::Model, Element::F32] {
                for (n_max, n, size, has_bias) in [
                    (1, 1, 1, true),
                    (3, 2, 35, true),
                    (2, 2, 90, false),
                    (9, 8, 8192, true),
                    (1, 1, 28672, false),
                ] {
                    let input_dtype = if element == Element::Model { dtype } else { Dtype::F32 };
                    // Gates up to ±24, where exp is large or tiny.
                    let gate_up: Vec<f32> =
                        random.normals(n_max * 2 * size).iter().map(|x| 4.0 * x).collect();
                    let gate_up = rounded(input_dtype, &gate_up);
                    let bias = rounded(dtype, &random.normals(2 * size));
                    let (d_gate_up, d_bias) =
                        (upload_as(&test, input_dtype, &gate_up), upload_as(&test, dtype, &bias));
                    let d_y = poisoned(&test, n_max * size * dtype.n_bytes());
                    let count = Count::new(&test, n_max, n);
                    let gate_up_slice = Activation { element, slice: d_gate_up.slice() };
                    let bias_slice = has_bias.then(|| d_bias.slice());
                    swiglu
                        .run(&test.stream, count.rows(), size, gate_up_slice, bias_slice, d_y.slice())
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
                    let case = format!("{dtype:?} from {element:?}, {n} of {n_max} rows of {size}");
                    // Rounding to the type; f32 moves the sum with a bias by 2^-24 of up to 28, relative to the
                    // gate or to the up part alone, each times the other part.
                    assert_close(&case, &got[..n * size], &expected, 1e-4, 1.01 * rounding(dtype) + 1e-5);
                    assert_untouched(&case, &got[n * size..]);
                }
            }
        }
    }
}
