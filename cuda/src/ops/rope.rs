//! Rotary position embedding of the fused Q, K and V projection, and the write of K and V into their pages.

use super::common::{Dtype, PAGE_LEN, RowCount, expect, expect_i32, expect_rows, i32_of, type_name};
use crate::driver::params;
use crate::{CudaError, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// Warps of a block; each takes one head at a time.
const N_WARPS: usize = 8;

/// The kernel's source, for a model of type `dtype`.
#[must_use]
pub fn source(dtype: Dtype) -> Source {
    Source::new("rope.cu", concat!(include_str!("common.cuh"), include_str!("rope.cu")))
        .with("MODEL_T", type_name(dtype))
        .with("N_WARPS", N_WARPS)
        .with("PAGE_LEN", PAGE_LEN)
}

/// As in `rope.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct RopeParams {
    qkv: Pointer,
    bias: Pointer,
    q_norm: Pointer,
    k_norm: Pointer,
    inv_freq: Pointer,
    positions: Pointer,
    kv_cells: Pointer,
    n_tokens: Pointer,
    q: Pointer,
    kv: Pointer,
    page_stride: u64,
    layer: i32,
    n_heads: i32,
    n_kv_heads: i32,
    head_dim: i32,
    eps: f32,
    unused: i32,
}
params!(RopeParams, 112);

/// Heads, and where a layer lies in the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Length of a head; even.
    pub head_dim: usize,
    /// Elements from one page to the next.
    pub page_stride: usize,
    /// The layer within a page.
    pub layer_idx: usize,
}

impl HeadShape {
    fn n_all_heads(self) -> usize {
        self.n_heads + 2 * self.n_kv_heads
    }
}

/// What is applied to a head before and while it is rotated.
#[derive(Clone, Copy, Debug)]
pub struct HeadWeights {
    /// Bias of the fused projection.
    pub bias: Option<Slice>, // T [n_heads + 2 * n_kv_heads, head_dim]
    /// RMSNorm over each head of Q and K.
    pub norm: Option<HeadNorm>,
    /// Radians a position.
    pub inv_freq: Slice, // f32 [head_dim / 2]
}

/// RMSNorm over each head of Q and K.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm {
    /// Factors of Q.
    pub q_weight: Slice, // T [head_dim]
    /// Factors of K.
    pub k_weight: Slice, // T [head_dim]
    /// Added to the mean square.
    pub eps: f32,
}

/// What one launch reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct HeadTensors {
    /// The projection, without its bias.
    pub qkv: Slice, // T [tokens, n_heads + 2 * n_kv_heads, head_dim]
    /// Position of each token.
    pub positions: Slice, // i32 [tokens]
    /// Cell that takes each token, counted from the first of page 0.
    pub kv_cells: Slice, // u32 [tokens], each inside `kv`
    /// Rotated queries.
    pub q: Slice, // T [tokens, n_heads, head_dim]
    /// All pages.
    pub kv: Slice, // T, pages of [n_layers, 2, n_kv_heads, 16, head_dim]
}

/// Splits, normalises and rotates heads; see `rope.cu`.
#[derive(Clone, Debug)]
pub struct Rope {
    kernel: Kernel<RopeParams>,
    dtype: Dtype,
}

impl Rope {
    /// Finds the kernel in the module of [`source`] for the same type.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("rope")?, dtype })
    }

    /// Writes Q, and K and V into the pages.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or the heads' length is odd.
    pub fn run(
        &self,
        stream: &Stream,
        tokens: RowCount,
        shape: HeadShape,
        weights: HeadWeights,
        tensors: HeadTensors,
    ) -> Result<(), CudaError> {
        if tokens.n_max == 0 {
            return Ok(());
        }
        self.check(tokens, shape, weights, tensors);
        let HeadShape { n_heads, n_kv_heads, head_dim, page_stride, layer_idx } = shape;
        let params = RopeParams {
            qkv: tensors.qkv.into(),
            bias: weights.bias.into(),
            q_norm: weights.norm.map(|norm| norm.q_weight).into(),
            k_norm: weights.norm.map(|norm| norm.k_weight).into(),
            inv_freq: weights.inv_freq.into(),
            positions: tensors.positions.into(),
            kv_cells: tensors.kv_cells.into(),
            n_tokens: tokens.n.into(),
            q: tensors.q.into(),
            kv: tensors.kv.into(),
            page_stride: page_stride as u64,
            layer: i32_of(layer_idx),
            n_heads: i32_of(n_heads),
            n_kv_heads: i32_of(n_kv_heads),
            head_dim: i32_of(head_dim),
            eps: weights.norm.map_or(0.0, |norm| norm.eps),
            unused: 0,
        };
        // Few tokens: a head for each warp. Many: one block a token, which computes its cosines once.
        let n_shares = if tokens.n_max <= 64 { shape.n_all_heads().div_ceil(N_WARPS) } else { 1 };
        let launch = Launch {
            grid: (tokens.n_max as u32, n_shares as u32, 1),
            block: (32 * N_WARPS as u32, 1, 1),
            // Pairs of rotations are read 16 bytes at a time, also the last one of an odd half.
            shared_bytes: ((head_dim / 2).div_ceil(2) * 16) as u32,
        };
        // SAFETY: lengths were checked above; the caller keeps the cells of the tokens inside `kv`, and the count at most
        // `n_max`.
        unsafe { launch.run(stream, &self.kernel, &params) }
    }

    fn check(&self, tokens: RowCount, shape: HeadShape, weights: HeadWeights, tensors: HeadTensors) {
        let (head_dim, element_bytes) = (shape.head_dim, self.dtype.n_bytes());
        assert!(head_dim.is_multiple_of(2) && head_dim <= 1024, "heads of {head_dim}");
        let layer_len = 2 * shape.n_kv_heads * PAGE_LEN * head_dim;
        assert!(
            (shape.layer_idx + 1) * layer_len <= shape.page_stride,
            "layer {} in a page",
            shape.layer_idx
        );
        expect_rows(tokens);
        let n_values = tokens.n_max * shape.n_all_heads() * head_dim;
        expect("qkv", tensors.qkv, n_values, element_bytes);
        expect_i32("positions", tensors.positions, tokens.n_max);
        expect_i32("kv_cells", tensors.kv_cells, tokens.n_max);
        expect("q", tensors.q, tokens.n_max * shape.n_heads * head_dim, element_bytes);
        expect("kv", tensors.kv, shape.page_stride, element_bytes);
        expect("inv_freq", weights.inv_freq, head_dim / 2, 4);
        if let Some(bias) = weights.bias {
            expect("bias", bias, shape.n_all_heads() * head_dim, element_bytes);
        }
        if let Some(norm) = weights.norm {
            expect("q_weight", norm.q_weight, head_dim, element_bytes);
            expect("k_weight", norm.k_weight, head_dim, element_bytes);
        }
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

    const EPS: f32 = 1e-6;

    /// In f64, except for the angle, which is one f32 product by definition.
    fn reference(head: &[f64], weight: Option<&[f32]>, position: i32, inv_freq: &[f32]) -> Vec<f64> {
        let half = head.len() / 2;
        let mut head = head.to_vec();
        if let Some(weight) = weight {
            let squares = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
            let scale = 1.0 / (squares + f64::from(EPS)).sqrt();
            for (x, &w) in head.iter_mut().zip(weight) {
                *x *= scale * f64::from(w);
            }
        }
        (0..head.len())
            .map(|i| {
                let (sin, cos) = f64::from(position as f32 * inv_freq[i % half]).sin_cos();
                if i < half {
                    head[i] * cos - head[i + half] * sin
                } else {
                    head[i] * cos + head[i - half] * sin
                }
            })
            .collect()
    }

    #[derive(Clone, Copy, Debug)]
    struct Case {
        dtype: Dtype,
        n_max: usize,
        n: usize,
        n_heads: usize,
        n_kv_heads: usize,
        head_dim: usize,
        has_bias: bool,
        has_norm: bool,
    }

    fn run_case(test: &TestGpu, rope: &Rope, random: &mut Random, case: Case) {
        let Case { dtype, n_max, n, n_heads, n_kv_heads, head_dim, has_bias, has_norm } = case;
        let (n_layers, layer_idx, n_pages) = (3, 1, 5 * n_max);
        let layer_len = 2 * n_kv_heads * PAGE_LEN * head_dim;
        let page_stride = n_layers * layer_len;
        let n_all = n_heads + 2 * n_kv_heads;

        let qkv = rounded(dtype, &random.normals(n_max * n_all * head_dim));
        let bias = rounded(dtype, &random.normals(n_all * head_dim));
        let weights = [(); 2].map(|()| rounded(dtype, &random.normals(head_dim)));
        let inv_freq: Vec<f32> =
            (0..head_dim / 2).map(|i| 10_000f32.powf(-(2.0 * i as f32) / head_dim as f32)).collect();
        // The largest position has a first angle past 105,615, where sincosf changes its method.
        let positions: Vec<i32> =
            (0..n_max).map(|t| if t == 0 { 131_071 } else { random.below(9000) as i32 }).collect();
        // Every token in a page of its own, in any cell of it: tokens may have been evicted before it.
        let cells: Vec<u32> = (0..n_max)
            .map(|t| ((5 * t + random.below(5)) * PAGE_LEN + random.below(PAGE_LEN)) as u32)
            .collect();

        let d_qkv = upload_as(test, dtype, &qkv);
        let d_bias = upload_as(test, dtype, &bias);
        let d_weights = [0, 1].map(|i| upload_as(test, dtype, &weights[i]));
        let d_inv_freq = upload(test, &inv_freq);
        let (d_positions, d_cells) = (upload(test, &positions), upload(test, &cells));
        let d_q = poisoned(test, n_max * n_heads * head_dim * dtype.n_bytes());
        let d_kv = poisoned(test, n_pages * page_stride * dtype.n_bytes());
        let count = DeviceCount::new(test, n_max, n);
        let shape = HeadShape { n_heads, n_kv_heads, head_dim, page_stride, layer_idx };
        let norm = HeadNorm { q_weight: d_weights[0].slice(), k_weight: d_weights[1].slice(), eps: EPS };
        let head_weights = HeadWeights {
            bias: has_bias.then(|| d_bias.slice()),
            norm: has_norm.then_some(norm),
            inv_freq: d_inv_freq.slice(),
        };
        let tensors = HeadTensors {
            qkv: d_qkv.slice(),
            positions: d_positions.slice(),
            kv_cells: d_cells.slice(),
            q: d_q.slice(),
            kv: d_kv.slice(),
        };
        rope.run(&test.stream, count.rows(), shape, head_weights, tensors).expect("a launch");

        let got_q = download_as(test, dtype, d_q.slice(), n_max * n_heads * head_dim);
        let mut got_kv = download_as(test, dtype, d_kv.slice(), n_pages * page_stride);
        let name = format!("{case:?}");
        for t in 0..n {
            for head in 0..n_all {
                let input: Vec<f64> = (0..head_dim)
                    .map(|i| {
                        let bias = if has_bias { bias[head * head_dim + i] } else { 0.0 };
                        f64::from(qkv[(t * n_all + head) * head_dim + i] + bias)
                    })
                    .collect();
                let is_v = head >= n_heads + n_kv_heads;
                let weight = has_norm.then(|| weights[usize::from(head >= n_heads)].as_slice());
                let expected = if is_v { input } else { reference(&input, weight, positions[t], &inv_freq) };
                let got = if head < n_heads {
                    got_q[(t * n_heads + head) * head_dim..][..head_dim].to_vec()
                } else {
                    // [page][layer][K, V][kv head][cell of the page][head_dim]
                    let cell = cells[t] as usize;
                    let start = cell / PAGE_LEN * page_stride
                        + layer_idx * layer_len
                        + ((head - n_heads) * PAGE_LEN + cell % PAGE_LEN) * head_dim;
                    let values = got_kv[start..start + head_dim].to_vec();
                    got_kv[start..start + head_dim].fill(f32::NAN);
                    values
                };
                // Rounding to the type; about eight f32 operations on pairs of values up to 12 and weights up to
                // 6, whose sum may cancel.
                assert_close(&name, &got, &expected, 3e-5, 1.01 * rounding(dtype) + 1e-6);
            }
        }
        assert_untouched(&name, &got_q[n * n_heads * head_dim..]);
        assert_untouched(&name, &got_kv);
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let mut random = Random(6);
        for dtype in DTYPES {
            let rope = Rope::new(&test.module(source(dtype)), dtype).expect("the kernel");
            for (n_max, n, n_heads, n_kv_heads, head_dim, has_bias, has_norm) in [
                (1, 1, 1, 1, 2, false, false),
                (3, 2, 3, 1, 6, true, true),
                (5, 5, 8, 2, 64, true, false),
                (4, 3, 16, 8, 128, false, true),
                (70, 67, 6, 2, 80, true, true),
                (2, 2, 2, 1, 1024, true, true),
            ] {
                let case = Case { dtype, n_max, n, n_heads, n_kv_heads, head_dim, has_bias, has_norm };
                run_case(&test, &rope, &mut random, case);
            }
        }
    }
}
