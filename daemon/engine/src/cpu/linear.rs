//! Projections, computed by `rten-gemm` from weights that are packed once.
//!
//! Seeded results rest on one property of that crate, which a test here holds it to: with a packed right side,
//! every output element is the same chain of operations whatever the number of rows. The inner kernel
//! accumulates one element over the inputs in order, in blocks of 256 that depend on nothing but the number of
//! inputs; the number of rows in a tile and the number of threads only decide which elements are computed next
//! to each other. There is no separate path for a single row, as there is with unpacked weights.

use rten_gemm::{BiasVector, GemmExecutor, GemmInputA, GemmInputB, GemmOptions, PackedBMatrix};
use rten_tensor::NdTensorView;

/// Chooses the instruction set; costs nothing to make.
pub(super) type Gemm = GemmExecutor<f32, f32, f32>;

/// `y = x · Wᵀ + b`.
pub(super) struct Linear {
    weight: PackedBMatrix<f32>, // Wᵀ: [n_inputs, n_outputs], in column panels
    bias: Option<Vec<f32>>,     // [n_outputs]
}

impl Linear {
    pub(super) fn new(
        weight: &[f32], // [n_outputs, n_inputs]
        n_inputs: usize,
        bias: Option<Vec<f32>>,
    ) -> Self {
        let shape = [weight.len() / n_inputs, n_inputs];
        let weight = Gemm::new().prepack_b(NdTensorView::from_data(shape, weight).transposed());
        Self { weight, bias }
    }

    pub(super) fn n_outputs(&self) -> usize {
        self.weight.cols()
    }

    /// `out = x · Wᵀ + b`.
    pub(super) fn write(
        &self,
        gemm: &Gemm,
        x: &[f32],       // [n_rows, n_inputs]
        out: &mut [f32], // [n_rows, n_outputs]
    ) {
        self.run(gemm, x, out, 0.0);
    }

    /// `out += x · Wᵀ + b`.
    pub(super) fn add(
        &self,
        gemm: &Gemm,
        x: &[f32],       // [n_rows, n_inputs]
        out: &mut [f32], // [n_rows, n_outputs]
    ) {
        self.run(gemm, x, out, 1.0);
    }

    fn run(&self, gemm: &Gemm, x: &[f32], out: &mut [f32], beta: f32) {
        let n_rows = x.len() / self.weight.rows();
        let x = NdTensorView::from_data([n_rows, self.weight.rows()], x);
        let options =
            GemmOptions { beta, bias: self.bias.as_deref().map(BiasVector::Row), ..Default::default() };
        gemm.gemm(out, GemmInputA::Unpacked(x), GemmInputB::Packed(&self.weight), options)
            .expect("shapes agree and the weights were packed by the same kernel");
    }
}

#[cfg(test)]
mod tests {
    use rayon::ThreadPoolBuilder;

    use super::*;
    use crate::sampling::philox4x32;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        (0..n).map(|i| philox4x32([i as u32, 0, 0, 0], [seed, 0])[0] as f32 / 2f32.powi(31) - 1.0).collect()
    }

    /// Bits of each row must not depend on the rows around it nor on the threads.
    #[test]
    fn rows_do_not_depend_on_their_neighbours() {
        const N_ROWS: usize = 130;
        // Shapes of the bundled models, and odd ones around the tile sizes (6 by 32) and the depth block (256).
        let shapes = [
            (256, 512),
            (256, 1536),
            (768, 256),
            (128, 256),
            (384, 128),
            (1, 1),
            (3, 5),
            (17, 33),
            (255, 31),
            (257, 65),
            (513, 130),
            (1030, 7),
        ];
        for n_threads in [1, 2, 3] {
            let pool = ThreadPoolBuilder::new().num_threads(n_threads).build().expect("threads");
            for (n_inputs, n_outputs) in shapes {
                let weight = numbers(n_inputs * n_outputs, 1);
                let linear = Linear::new(&weight, n_inputs, Some(numbers(n_outputs, 2)));
                let x = numbers(N_ROWS * n_inputs, 3);
                let start = numbers(N_ROWS * n_outputs, 4);
                let run = |rows: std::ops::Range<usize>| {
                    let mut out = start[rows.start * n_outputs..rows.end * n_outputs].to_vec();
                    let x = &x[rows.start * n_inputs..rows.end * n_inputs];
                    pool.install(|| linear.add(&Gemm::new(), x, &mut out));
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let single: Vec<u32> = (0..N_ROWS).flat_map(|row| run(row..row + 1)).collect();
                for n_rows in 1..=N_ROWS {
                    // From both ends, so that every row is met at different places of a tile.
                    let end = n_rows * n_outputs;
                    assert_eq!(run(0..n_rows), single[..end], "{n_rows} rows of {n_inputs}x{n_outputs}");
                    let start = (N_ROWS - n_rows) * n_outputs;
                    assert_eq!(
                        run(N_ROWS - n_rows..N_ROWS),
                        single[start..],
                        "the last {n_rows} rows of {n_inputs}x{n_outputs}"
                    );
                }
            }
        }
    }

    #[test]
    fn agrees_with_f64() {
        for (n_rows, n_inputs, n_outputs) in [(1, 300, 70), (7, 33, 5), (40, 600, 64)] {
            let (weight, bias) = (numbers(n_inputs * n_outputs, 5), numbers(n_outputs, 6));
            let x = numbers(n_rows * n_inputs, 7);
            let mut out = vec![f32::NAN; n_rows * n_outputs];
            Linear::new(&weight, n_inputs, Some(bias.clone())).write(&Gemm::new(), &x, &mut out);
            for (idx, &got) in out.iter().enumerate() {
                let (row, column) = (idx / n_outputs, idx % n_outputs);
                let terms = (0..n_inputs)
                    .map(|i| f64::from(x[row * n_inputs + i]) * f64::from(weight[column * n_inputs + i]));
                let want = terms.sum::<f64>() + f64::from(bias[column]);
                assert!((f64::from(got) - want).abs() <= 1e-4, "{got} {want}");
            }
        }
    }
}
