//! Every form of the product against f64.

use super::*;
use crate::Buffer;
use crate::ops::common::check::*;
use crate::testing::{Random, TestGpu, gpu};

#[test]
fn compiles() {
    for dtype in DTYPES {
        let sources = [(8, 0), (9, 0)].map(|capability| sources(dtype, capability));
        sources.into_iter().flatten().for_each(assert_compiles);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Model,
    F32,
    AddF32,
    SwiGlu,
}

const EPS: f32 = 1e-5;

fn gemv(test: &TestGpu, dtype: Dtype) -> Gemv {
    let modules = sources(dtype, test.gpu.compute_capability()).map(|source| test.module(source));
    Gemv::new(&test.gpu, &modules, dtype).expect("the kernels")
}

/// Fills the memory with the pool, over and over.
fn repeat(test: &TestGpu, dtype: Dtype, buffer: &Buffer, pool: &[f32]) {
    let pool = upload_as(test, dtype, pool);
    let bytes = download(test, pool.slice(), pool.slice().n_bytes, 0u8);
    let n_bytes = buffer.slice().n_bytes;
    for start in (0..n_bytes).step_by(bytes.len()) {
        let part = buffer.slice().part(start, bytes.len().min(n_bytes - start));
        part.upload(&test.stream, &bytes[..part.n_bytes]).expect("an upload");
    }
}

/// Numbers on both sides. The matrix repeats a pool whose length is prime, so that no two rows are alike.
struct Case {
    dtype: Dtype,
    shape: GemvShape,
    x: Vec<f32>,        // [n_rows, n_in]: the input, or the residual before the norm
    norm: Vec<f32>,     // [n_in]
    pool: Vec<f32>,     // the matrix's value i is pool[i % len]
    bias: Vec<f32>,     // [2, n_out]
    before: Vec<f32>,   // [n_rows, n_out]
    d_x: Buffer,        // T
    d_residual: Buffer, // f32
    d_norm: Buffer,
    d_matrix: Buffer,
    d_bias: Buffer,
}

impl Case {
    /// `n_matrices`: 2 when there is an up projection as well.
    fn new(test: &TestGpu, random: &mut Random, dtype: Dtype, shape: GemvShape, n_matrices: usize) -> Self {
        let GemvShape { n_rows, n_out, n_in } = shape;
        let x = rounded(dtype, &random.normals(n_rows * n_in));
        let norm = rounded(dtype, &random.normals(n_in));
        let pool: Vec<f32> = random.normals(65_537).iter().map(|v| v / (n_in as f32).sqrt()).collect();
        let pool = rounded(dtype, &pool);
        let bias = rounded(dtype, &random.normals(2 * n_out));
        let before = random.normals(n_rows * n_out);
        let d_matrix = poisoned(test, n_matrices * n_out * n_in * dtype.n_bytes());
        repeat(test, dtype, &d_matrix, &pool);
        Self {
            dtype,
            shape,
            d_x: upload_as(test, dtype, &x),
            d_residual: upload(test, &x),
            d_norm: upload_as(test, dtype, &norm),
            d_matrix,
            d_bias: upload_as(test, dtype, &bias),
            x,
            norm,
            pool,
            bias,
            before,
        }
    }

    /// What the product is computed from, in exact numbers; the normalised rows are rounded to the type.
    fn input(&self, has_norm: bool) -> Vec<f32> {
        if !has_norm {
            return self.x.clone();
        }
        self.x
            .chunks(self.shape.n_in)
            .flat_map(|row| {
                let squares: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
                let scale = 1.0 / (squares / row.len() as f64 + f64::from(EPS)).sqrt();
                let row: Vec<f32> = row
                    .iter()
                    .zip(&self.norm)
                    .map(|(&x, &w)| (f64::from(w) * f64::from(x) * scale) as f32)
                    .collect();
                rounded(self.dtype, &row)
            })
            .collect()
    }

    /// One element of the product, and how far the kernel may be from it.
    fn product(&self, input: &[f32], token: usize, row: usize, has_norm: bool) -> (f64, f64) {
        let n_in = self.shape.n_in;
        let (mut sum, mut size, mut largest) = (0f64, 0f64, 0f64);
        for (k, &x) in input[token * n_in..][..n_in].iter().enumerate() {
            let term = f64::from(x) * f64::from(self.pool[(row * n_in + k) % self.pool.len()]);
            (sum, size, largest) = (sum + term, size + term.abs(), largest.max(term.abs()));
        }
        // A tensor core drops bits below about 2^-23 of the largest term; up to n_in / 256 products follow each
        // other in a warp, which for 14,336 is 56. In f32, 112 sums follow each other in a lane.
        let mut error = 1e-5 * size;
        if has_norm {
            // A normalised value next to a tie may round to the other side: one in a thousand, or a single one.
            error += 2.0 * rounding(self.dtype) * (0.002 * size + 2.0 * largest);
        }
        (sum, error)
    }

    fn run(&self, test: &TestGpu, gemv: &Gemv, random: &mut Random, to: To, has_norm: bool, has_bias: bool) {
        let GemvShape { n_rows, n_out, .. } = self.shape;
        let name = format!("{:?} {:?} to {to:?}, norm {has_norm}, bias {has_bias}", self.dtype, self.shape);
        let form = GemvForm { has_norm, has_swiglu: to == To::SwiGlu };
        if !gemv.fits(self.shape, form) {
            assert!(
                has_norm || gemv.shared_bytes_max < 110 << 10,
                "{name}: only normalised rows take much memory"
            );
            return;
        }
        let out_dtype = if matches!(to, To::Model | To::SwiGlu) { self.dtype } else { Dtype::F32 };
        let y = match to {
            To::AddF32 => upload(test, &self.before),
            _ => poisoned(test, n_rows * n_out * out_dtype.n_bytes()),
        };
        let input = if has_norm {
            GemvInput::RmsNorm { residual: self.d_residual.slice(), weight: self.d_norm.slice(), eps: EPS }
        } else {
            GemvInput::Plain(self.d_x.slice())
        };
        let output = match to {
            To::Model => GemvOutput::Model(y.slice()),
            To::F32 => GemvOutput::F32(y.slice()),
            To::AddF32 => GemvOutput::AddF32(y.slice()),
            To::SwiGlu => GemvOutput::SwiGlu(y.slice()),
        };
        let bias = has_bias.then(|| self.d_bias.slice());
        let weights = GemvWeights { matrix: self.d_matrix.slice(), bias };
        gemv.run(&test.stream, self.shape, input, weights, output).expect("a launch");
        let got = download_as(test, out_dtype, y.slice(), n_rows * n_out);
        assert!(got.iter().all(|value| value.is_finite()), "{name}: not all was written");

        // All rows of W where they are few; else the first and last tile and some between.
        let rows: Vec<usize> = if n_out <= 256 {
            (0..n_out).collect()
        } else {
            (0..16).chain(n_out - 17..n_out).chain((0..64).map(|_| random.below(n_out))).collect()
        };
        let x = self.input(has_norm);
        for token in 0..n_rows {
            for &row in &rows {
                let bias = |row: usize| if has_bias { f64::from(self.bias[row]) } else { 0.0 };
                let (sum, error) = self.product(&x, token, row, has_norm);
                let sum = sum + bias(row);
                let (expected, error) = match to {
                    To::Model | To::F32 => (sum, error),
                    To::AddF32 => (f64::from(self.before[token * n_out + row]) + sum, error),
                    To::SwiGlu => {
                        let (up, up_error) = self.product(&x, token, n_out + row, has_norm);
                        let up = up + bias(n_out + row);
                        let silu = sum / (1.0 + (-sum).exp());
                        // The slope of silu is below 1.1.
                        (silu * up, 1.1 * error * up.abs() + up_error * silu.abs() + error * up_error)
                    }
                };
                // Biases and residuals of up to 6, and a product of two such, cost further units of f32.
                let error = error + 5e-6;
                let got = f64::from(got[token * n_out + row]);
                let tolerance = error + 1.01 * rounding(out_dtype) * expected.abs();
                let diff = (got - expected).abs();
                assert!(
                    diff <= tolerance,
                    "{name}: [{token}, {row}] is {got}, not {expected} (±{tolerance:e})"
                );
            }
        }
    }
}

#[test]
fn agrees_with_the_reference() {
    let Some(test) = gpu() else { return };
    let mut random = Random(9);
    for dtype in DTYPES {
        let gemv = gemv(&test, dtype);
        for (n_rows, n_out, n_in) in [
            (1, 1, 8),
            (2, 17, 40),
            (3, 100, 200),
            (8, 33, 1032),
            (6, 48, 576),
            (8, 250, 2056),
            (1, 3072, 2048),
            (5, 2500, 4096),
            (7, 2304, 1024),
            (7, 300, 14336),
        ] {
            let case = Case::new(&test, &mut random, dtype, GemvShape { n_rows, n_out, n_in }, 2);
            for to in [To::Model, To::F32, To::AddF32, To::SwiGlu] {
                case.run(&test, &gemv, &mut random, to, false, n_rows % 2 == 1);
                if to != To::AddF32 {
                    case.run(&test, &gemv, &mut random, to, true, n_rows % 2 == 0);
                }
            }
        }
    }
}

#[test]
fn largest_shapes() {
    let Some(test) = gpu() else { return };
    let gemv = gemv(&test, Dtype::Bf16);
    let mut random = Random(10);
    for (n_rows, n_out, n_in, to, has_norm) in [
        (1, 128_256, 4096, To::F32, true),
        (8, 14_336, 4096, To::SwiGlu, true),
        (8, 8192, 2048, To::SwiGlu, false),
        (4, 4096, 14_336, To::AddF32, false),
    ] {
        let shape = GemvShape { n_rows, n_out, n_in };
        let case = Case::new(&test, &mut random, Dtype::Bf16, shape, if to == To::SwiGlu { 2 } else { 1 });
        case.run(&test, &gemv, &mut random, to, has_norm, false);
    }
}

#[test]
fn a_second_run_gives_the_same_bits() {
    let Some(test) = gpu() else { return };
    let gemv = gemv(&test, Dtype::Bf16);
    let shape = GemvShape { n_rows: 8, n_out: 5000, n_in: 4096 };
    let case = Case::new(&test, &mut Random(11), Dtype::Bf16, shape, 1);
    let run = || {
        let y = poisoned(&test, shape.n_rows * shape.n_out * 4);
        let weights = GemvWeights { matrix: case.d_matrix.slice(), bias: None };
        let input = GemvInput::Plain(case.d_x.slice());
        gemv.run(&test.stream, shape, input, weights, GemvOutput::F32(y.slice())).expect("a launch");
        download(&test, y.slice(), shape.n_rows * shape.n_out, 0u32)
    };
    let first = run();
    for _ in 0..20 {
        assert!(run() == first);
    }
}

/// How close the large shapes of 1B and 8B models come to the memory's rate. Weights rotate among copies that
/// together are larger than the L2 cache.
#[test]
#[ignore = "measures"]
fn speed() {
    const N_COLD_BYTES: usize = 256 << 20;
    const N_LAUNCHES: usize = 40;
    let Some(test) = gpu() else { return };
    let gemv = gemv(&test, Dtype::Bf16);
    let mut random = Random(1);
    let shapes = [
        (6144, 4096),
        (4096, 4096),
        (28_672, 4096),
        (4096, 14_336),
        (128_256, 4096),
        (3072, 2048),
        (2048, 2048),
        (16_384, 2048),
        (2048, 8192),
        (128_256, 2048),
    ];
    for n_rows in [1, 4, 8] {
        for (n_out, n_in) in shapes {
            let shape = GemvShape { n_rows, n_out, n_in };
            let matrix_bytes = 2 * n_out * n_in;
            let n_copies = N_COLD_BYTES.div_ceil(matrix_bytes).max(2);
            let matrices = poisoned(&test, n_copies * matrix_bytes);
            repeat(&test, Dtype::Bf16, &matrices, &random.normals(65_537));
            let x = upload_as(&test, Dtype::Bf16, &random.normals(n_rows * n_in));
            let y = poisoned(&test, 4 * n_rows * n_out);
            let mut run = |copy_idx: usize| {
                let matrix = matrices.slice().part(copy_idx % n_copies * matrix_bytes, matrix_bytes);
                let weights = GemvWeights { matrix, bias: None };
                let (input, output) = (GemvInput::Plain(x.slice()), GemvOutput::F32(y.slice()));
                gemv.run(&test.stream, shape, input, weights, output).expect("a launch");
            };
            (0..n_copies).for_each(&mut run);
            let mut runs: Vec<f64> = (0..7)
                .map(|_| {
                    test.stream.synchronize().expect("the launches before");
                    let start = std::time::Instant::now();
                    (0..N_LAUNCHES).for_each(&mut run);
                    test.stream.synchronize().expect("the launches");
                    start.elapsed().as_secs_f64() / N_LAUNCHES as f64
                })
                .collect();
            runs.sort_by(f64::total_cmp);
            let seconds = runs[runs.len() / 2];
            let rate = matrix_bytes as f64 / seconds / 1e9;
            println!("gemv, {n_rows} × {n_in} to {n_out}: {:.1} µs, {rate:.0} GB/s", seconds * 1e6);
        }
    }
}
