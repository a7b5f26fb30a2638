//! Which algorithm is the fastest: measured on the shape itself, with a matrix that no cache holds.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::result;

use super::MatmulShape;
use super::handle::Handle;
use super::problem::{self, Algorithm, Operands, Problem};
use crate::driver::check;
use crate::ops::common::Dtype;
use crate::{Buffer, CudaError, Event, Gpu, Slice, Stream, Timing};

/// The library's suggestions that are timed.
const N_CANDIDATES: usize = 16;

/// Copies of a matrix are used in turn, and together are larger than any device's L2 (126 MB on a B200).
const COLD_BYTES: usize = 256 << 20;

/// A candidate that is slower by more than this in a first, short measurement is out.
const N_TIMES_SLOWER: f32 = 1.2;

/// Runs of each candidate in the first measurement.
const N_FIRST_RUNS: usize = 3;

/// Those that are left are timed by turns so many times, for about so long each: a device becomes faster and slower, and
/// what is chosen stays.
const N_TURNS: usize = 7;
const TURN_MS: f32 = 1.0;

/// Memory to measure in.
pub(super) struct Bench {
    x: Buffer,
    w: Buffer,
    y: Buffer,
    workspace: Buffer,
    begin: Event,
    end: Event,
}

/// Lengths in bytes of X, W and Y.
fn n_bytes(shape: MatmulShape) -> [usize; 3] {
    let MatmulShape { n_tokens, n_out, n_in, dtype, out, .. } = shape;
    [n_tokens * n_in * dtype.n_bytes(), n_out * n_in * dtype.n_bytes(), n_tokens * n_out * out.n_bytes(dtype)]
}

impl Bench {
    /// The workspace is one of its own, of `workspace_bytes`: steps may use the other meanwhile, in another stream.
    pub(super) fn new(
        gpu: &Gpu,
        stream: &Stream,
        shapes: &[MatmulShape],
        workspace_bytes: usize,
    ) -> Result<Self, CudaError> {
        let most = shapes.iter().map(|&shape| n_bytes(shape)).fold([0; 3], |most, bytes| {
            [most[0].max(bytes[0]), most[1].max(bytes[1]), most[2].max(bytes[2])]
        });
        let what = "timing matrix products";
        let bench = Self {
            x: gpu.allocate(what, most[0])?,
            w: gpu.allocate(what, most[1].max(COLD_BYTES))?,
            y: gpu.allocate(what, most[2])?,
            workspace: gpu.allocate(what, workspace_bytes)?,
            begin: Event::new(gpu, Timing::On)?,
            end: Event::new(gpu, Timing::On)?,
        };
        bench.y.slice().fill(stream, 0)?;
        Ok(bench)
    }

    /// Times the candidates; `None` as soon as something disturbs it.
    pub(super) fn fastest(
        &self,
        handle: Handle,
        stream: &Stream,
        shape: MatmulShape,
        is_disturbed: &dyn Fn() -> bool,
    ) -> Result<Option<Algorithm>, CudaError> {
        // Numbers of the type, because a device draws less power, and runs faster, on zeros.
        fill_with_numbers(stream, self.x.slice(), shape.dtype)?;
        fill_with_numbers(stream, self.w.slice(), shape.dtype)?;
        let problem = Problem::new(shape)?;
        let mut first_round = vec![];
        let mut refusal = None;
        for candidate in problem.candidates(handle, self.workspace.slice().n_bytes, N_CANDIDATES)? {
            // The first run loads the kernel.
            let timed = self
                .time_ms(handle, stream, &problem, &candidate, 1)
                .and_then(|_loading_ms| self.time_ms(handle, stream, &problem, &candidate, N_FIRST_RUNS));
            if is_disturbed() {
                return Ok(None);
            }
            match timed {
                Ok(ms) => first_round.push((ms, candidate)),
                Err(Failure::Refused(status)) => refusal = Some(status),
                Err(Failure::Driver(error)) => return Err(error),
            }
        }
        let best_ms = first_round.iter().map(|(ms, _)| *ms).fold(f32::INFINITY, f32::min);
        first_round.retain(|(ms, _)| *ms <= N_TIMES_SLOWER * best_ms);
        let n_runs = (TURN_MS / best_ms).clamp(3.0, 20.0) as usize;
        let mut times = vec![[0f32; N_TURNS]; first_round.len()];
        for turn in 0..N_TURNS {
            for ((_, candidate), times) in first_round.iter().zip(&mut times) {
                times[turn] = self
                    .time_ms(handle, stream, &problem, candidate, n_runs)
                    .map_err(|failure| failure.into_error(shape))?;
            }
            if is_disturbed() {
                return Ok(None);
            }
        }
        let candidates = first_round.into_iter().zip(times).map(|((_, candidate), mut times)| {
            times.sort_unstable_by(f32::total_cmp);
            (times[N_TURNS / 2], candidate)
        });
        let fastest = candidates.min_by(|(a, _), (b, _)| a.total_cmp(b));
        let Some((ms, algorithm)) = fastest else {
            let status = refusal.expect("candidates were timed or refused");
            return Err(problem::error("cublasLtMatmul", shape, status));
        };
        tracing::debug!(?shape, ms, "fastest matrix product");
        Ok(Some(algorithm))
    }

    /// The mean time of a run.
    fn time_ms(
        &self,
        handle: Handle,
        stream: &Stream,
        problem: &Problem,
        algorithm: &Algorithm,
        n_runs: usize,
    ) -> Result<f32, Failure> {
        let w_bytes = n_bytes(problem.shape())[1];
        let stride = w_bytes.next_multiple_of(256);
        let n_copies = 1 + (self.w.slice().n_bytes - w_bytes) / stride;
        self.begin.record(stream)?;
        for run in 0..n_runs {
            let w = self.w.slice().part(run % n_copies * stride, w_bytes);
            let operands =
                Operands { x: self.x.slice(), w, y: self.y.slice(), workspace: self.workspace.slice() };
            problem.run(handle, stream, algorithm, operands).map_err(Failure::Refused)?;
        }
        self.end.record(stream)?;
        self.end.synchronize()?;
        Ok(self.begin.elapsed_ms(&self.end)? / n_runs as f32)
    }
}

enum Failure {
    Refused(CublasError),
    Driver(CudaError),
}

impl Failure {
    fn into_error(self, shape: MatmulShape) -> CudaError {
        match self {
            Self::Refused(status) => problem::error("cublasLtMatmul", shape, status),
            Self::Driver(error) => error,
        }
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        Self::Driver(error)
    }
}

/// A mebibyte of numbers between -1 and 1, over and over.
pub(crate) fn fill_with_numbers(stream: &Stream, slice: Slice, dtype: Dtype) -> Result<(), CudaError> {
    const POOL_BYTES: usize = 1 << 20;
    let n = POOL_BYTES / dtype.n_bytes();
    // Weyl's sequence of the golden ratio, with the bits mixed.
    let value = |i: usize| {
        let bits = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let bytes: Vec<u8> = match dtype {
        Dtype::F32 => (0..n).flat_map(|i| value(i).to_ne_bytes()).collect(),
        Dtype::F16 => (0..n).flat_map(|i| half::f16::from_f32(value(i)).to_ne_bytes()).collect(),
        Dtype::Bf16 => (0..n).flat_map(|i| half::bf16::from_f32(value(i)).to_ne_bytes()).collect(),
    };
    let mut n_filled = POOL_BYTES.min(slice.n_bytes);
    slice.upload(stream, &bytes[..n_filled])?;
    while n_filled < slice.n_bytes {
        let n_bytes = n_filled.min(slice.n_bytes - n_filled);
        let to = slice.part(n_filled, n_bytes);
        // SAFETY: both ranges are in the slice and do not meet.
        check("cuMemcpyDtoDAsync", || unsafe {
            result::memcpy_dtod_async(to.address, slice.address, n_bytes, stream.raw())
        })?;
        n_filled += n_bytes;
    }
    Ok(())
}
