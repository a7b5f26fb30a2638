//! RMSNorm and LayerNorm of the residual stream, alone or after an addition to it.

use super::common::{Activation, Dtype, Element, Rows, address_or_null, expect, expect_rows, i32_of, suffix};
use crate::{Arg, CudaError, Kernel, Launch, Module, Slice, Source, Stream};

/// The kernels' source.
pub const SOURCE: Source =
    Source { file: "norm.cu", text: concat!(include_str!("common.cuh"), include_str!("norm.cu")) };

/// The longest row: 1,024 threads that hold four groups of four values.
pub const HIDDEN_SIZE_MAX: usize = 1024 * 16;

/// The parameters of one norm.
#[derive(Clone, Copy, Debug)]
pub struct NormWeights {
    /// Which norm.
    pub kind: NormKind,
    /// Length of a row, at most [`HIDDEN_SIZE_MAX`].
    pub hidden_size: usize,
    /// Factors.
    pub weight: Slice, // T [hidden_size]
    /// Added to the mean square.
    pub eps: f32,
}

/// Which norm.
#[derive(Clone, Copy, Debug)]
pub enum NormKind {
    /// `weight · x / sqrt(mean(x²) + eps)`
    Rms,
    /// `weight · (x - mean(x)) / sqrt(var(x) + eps) + bias`
    Layer {
        /// Added at the end.
        bias: Option<Slice>, // T [hidden_size]
    },
}

/// What is added to the residual stream before the norm.
#[derive(Clone, Copy, Debug)]
pub struct Delta {
    /// Added to each row.
    pub rows: Activation, // [rows, hidden_size]
    /// Added to every row: the bias of the projection that made the rows.
    pub bias: Option<Slice>, // T [hidden_size]
}

/// The norms of a model of one type; see `norm.cu`.
#[derive(Clone, Debug)]
pub struct Norm {
    rms: Forms,
    layer: Forms,
    dtype: Dtype,
}

#[derive(Clone, Debug)]
struct Forms {
    plain: Kernel,
    add_model: Kernel,
    add_f32: Kernel,
}

impl Forms {
    fn of(module: &Module, name: &str, dtype: Dtype) -> Result<Self, CudaError> {
        let kernel = |form: &str| module.kernel(&format!("{name}{form}_{}", suffix(dtype)));
        Ok(Self { plain: kernel("")?, add_model: kernel("_add_model")?, add_f32: kernel("_add_f32")? })
    }
}

impl Norm {
    /// Finds the kernels for a model of type `dtype` in the module of [`SOURCE`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        Ok(Self {
            rms: Forms::of(module, "rms_norm", dtype)?,
            layer: Forms::of(module, "layer_norm", dtype)?,
            dtype,
        })
    }

    /// `x += delta`, where there is one; `y = norm(x)`.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or a row too long.
    pub fn run(
        &self,
        stream: &Stream,
        rows: Rows,
        weights: NormWeights,
        delta: Option<Delta>,
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
        let (forms, bias) = match weights.kind {
            NormKind::Rms => (&self.rms, None),
            NormKind::Layer { bias } => (&self.layer, bias),
        };
        let (kernel, delta_rows, delta_bias) = match delta {
            None => (&forms.plain, None, None),
            Some(Delta { rows: added, bias }) => {
                expect("delta", added.slice, rows.n_max * hidden_size, added.element.n_bytes(self.dtype));
                let kernel = match added.element {
                    Element::Model => &forms.add_model,
                    Element::F32 => &forms.add_f32,
                };
                (kernel, Some(added.slice), bias)
            }
        };
        for bias in [bias, delta_bias].into_iter().flatten() {
            expect("a bias", bias, hidden_size, self.dtype.n_bytes());
        }
        let args = [
            x.into(),
            address_or_null(delta_rows),
            address_or_null(delta_bias),
            weights.weight.into(),
            address_or_null(bias),
            y.into(),
            rows.n.into(),
            Arg::I32(i32_of(hidden_size)),
            Arg::F32(weights.eps),
        ];
        // Eight values a thread where the block may grow: half of what it could hold, for a shorter way.
        let n_threads = hidden_size.div_ceil(8).next_multiple_of(32).min(1024) as u32;
        let launch = Launch { grid: (rows.n_max as u32, 1, 1), block: (n_threads, 1, 1), shared_bytes: 0 };
        // SAFETY: the kernel's arguments in order, lengths checked above; 16 values a thread cover the row.
        unsafe { launch.run(stream, kernel, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, TestGpu, gpu};

    #[test]
    fn compiles() {
        assert_compiles(SOURCE);
    }

    fn reference(is_rms: bool, x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) -> Vec<f64> {
        let n = x.len() as f64;
        let mean = if is_rms { 0.0 } else { x.iter().map(|&x| f64::from(x)).sum::<f64>() / n };
        let squares = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        let scale = 1.0 / (squares + f64::from(eps)).sqrt();
        (0..x.len())
            .map(|i| {
                let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
                f64::from(weight[i]) * (f64::from(x[i]) - mean) * scale + bias
            })
            .collect()
    }

    #[derive(Clone, Copy, Debug)]
    struct Case {
        dtype: Dtype,
        is_rms: bool,
        delta: Option<Element>,
        has_bias: bool,
        n_max: usize,
        n: usize,
        hidden_size: usize,
    }

    fn run_case(test: &TestGpu, norm: &Norm, random: &mut Random, case: Case) {
        let Case { dtype, is_rms, delta, has_bias, n_max, n, hidden_size } = case;
        let n_values = n_max * hidden_size;
        // A mean far from zero, on which a one-pass variance would lose its digits.
        let x: Vec<f32> = random.normals(n_values).iter().map(|x| 3.0 * x + 20.0).collect();
        let weight = rounded(dtype, &random.normals(hidden_size));
        let bias = rounded(dtype, &random.normals(hidden_size));
        let delta_dtype = if delta == Some(Element::Model) { dtype } else { Dtype::F32 };
        let added = rounded(delta_dtype, &random.normals(n_values));
        let delta_bias = rounded(dtype, &random.normals(hidden_size));

        let d_x = upload(test, &x);
        let (d_weight, d_bias) = (upload_as(test, dtype, &weight), upload_as(test, dtype, &bias));
        let d_added = upload_as(test, delta_dtype, &added);
        let d_delta_bias = upload_as(test, dtype, &delta_bias);
        let d_y = poisoned(test, n_values * dtype.n_bytes());
        let count = Count::new(test, n_max, n);
        let bias_slice = has_bias.then(|| d_bias.slice());
        let kind = if is_rms { NormKind::Rms } else { NormKind::Layer { bias: bias_slice } };
        let weights = NormWeights { kind, hidden_size, weight: d_weight.slice(), eps: 1e-5 };
        let delta_slice = delta.map(|element| Delta {
            rows: Activation { element, slice: d_added.slice() },
            bias: has_bias.then(|| d_delta_bias.slice()),
        });
        norm.run(&test.stream, count.rows(), weights, delta_slice, d_x.slice(), d_y.slice())
            .expect("a launch");

        let got_x = download_as(test, Dtype::F32, d_x.slice(), n_values);
        let got_y = download_as(test, dtype, d_y.slice(), n_values);
        let name = format!("{case:?}");
        for r in 0..n_max {
            let row = r * hidden_size..(r + 1) * hidden_size;
            let mut sums = x[row.clone()].to_vec();
            if delta.is_some() && r < n {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum += added[row.start + i];
                    *sum += if has_bias { delta_bias[i] } else { 0.0 };
                }
            }
            // The same additions in the same order: exact.
            assert_eq!(got_x[row.clone()], sums, "{name}: residual of row {r}");
            if r >= n {
                assert_untouched(&name, &got_y[row]);
                continue;
            }
            let bias = (has_bias && !is_rms).then_some(bias.as_slice());
            let expected = reference(is_rms, &sums, &weight, bias, 1e-5);
            // Rounding to the type; f32 moves the mean, 20, by up to 4e-6, which the scale, 1/3, and a weight, up
            // to 6, carry into the result; and a few units in the last place of the scale.
            assert_close(&name, &got_y[row], &expected, 2e-5, 1.01 * rounding(dtype) + 1e-6);
        }
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let module = test.module(SOURCE);
        let mut random = Random(2);
        for dtype in DTYPES {
            let norm = Norm::new(&module, dtype).expect("the kernels");
            for is_rms in [true, false] {
                for delta in [None, Some(Element::Model), Some(Element::F32)] {
                    for (n_max, n, hidden_size, has_bias) in [
                        (1, 1, 1, false),
                        (3, 2, 33, true),
                        (4, 4, 66, true),
                        (7, 5, 576, false),
                        (33, 31, 4096, true),
                        (2, 2, 12292, false),
                        (1, 1, HIDDEN_SIZE_MAX, true),
                    ] {
                        let case = Case { dtype, is_rms, delta, has_bias, n_max, n, hidden_size };
                        run_case(&test, &norm, &mut random, case);
                    }
                }
            }
        }
    }
}
