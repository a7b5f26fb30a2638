//! A product: its shape, and how it is put into a stream.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;

use super::cache::CacheFile;
use super::handle::{Handle, Versions};
use super::problem::{self, Algorithm, Operands, Problem, is_refusal};
use super::tune::Bench;
use crate::ops::common::{Dtype, Element, expect};
use crate::{CudaError, Gpu, Slice, Stream};

/// `Y[n_tokens, n_out] = X[n_tokens, n_in] W[n_out, n_in]^T`, accumulated in `f32`; in a model of type `f32`
/// without TF32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MatmulShape {
    /// Rows of X and Y.
    pub n_tokens: usize,
    /// Rows of W.
    pub n_out: usize,
    /// Columns of X and W.
    pub n_in: usize,
    /// Type of X and W.
    pub dtype: Dtype,
    /// Type of Y.
    pub out: Element,
    /// What happens to Y.
    pub update: Update,
}

/// Tokens that the kernels of products on tensor cores compute together: of an 8B model on an H100, 192 tokens take no
/// longer than 160.
pub const BLOCK_TOKENS: usize = 64;

/// What a product does to the memory that takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Update {
    /// The product replaces what was there.
    Replace,
    /// The product is added to what was there, as to a residual stream.
    Add,
}

impl MatmulShape {
    /// The shape with its tokens rounded up to the next that are tuned.
    #[must_use]
    pub fn bucketed(self) -> Self {
        Self { n_tokens: tuned(self.n_tokens), ..self }
    }
}

/// Sizes that share a captured step end at powers of two and, from 16 on, halfway between.
#[must_use]
pub fn bucket(n_tokens: usize) -> usize {
    let power = n_tokens.next_power_of_two();
    let halfway = power / 4 * 3;
    if power > 16 && n_tokens <= halfway { halfway } else { power }
}

/// Token counts that share an algorithm end where buckets do, and between 256 and 512 every 32: there a product turns from
/// moving its matrix to computing, and a tile that suits 288 tokens (guesses of 8 for 32 contexts) leaves out a quarter of
/// what one for 384 computes.
#[must_use]
fn tuned(n_tokens: usize) -> usize {
    if (257..=512).contains(&n_tokens) { n_tokens.next_multiple_of(32) } else { bucket(n_tokens) }
}

/// The token counts that are tuned for `1..=n_tokens_max`.
#[must_use]
pub fn all_tuned(n_tokens_max: usize) -> Vec<usize> {
    let first = (n_tokens_max > 0).then(|| tuned(1));
    std::iter::successors(first, |&last| (last < n_tokens_max).then(|| tuned(last + 1))).collect()
}

/// cuBLASLt on one device, for one stream at a time.
#[derive(Debug)]
pub struct Blas {
    handle: Handle,
    gpu: Gpu,
    workspace: Slice,
    file: Option<CacheFile>,
    /// By bucket: timed here or by an earlier process.
    tuned: RefCell<HashMap<MatmulShape, Algorithm>>,
    /// By exact shape, for those that were not tuned or that refuse their bucket's algorithm.
    guessed: RefCell<HashMap<MatmulShape, Algorithm>>,
}

impl Blas {
    /// Algorithms may use `workspace`, which lives as long as the products; 32 MiB is what NVIDIA recommends from sm_90
    /// on. Timings are remembered in `cache_dir`.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(
        gpu: &Gpu,
        handle: Handle,
        workspace: Slice,
        cache_dir: Option<PathBuf>,
    ) -> Result<Self, CudaError> {
        gpu.make_current()?;
        let Versions { library, driver } = handle.versions();
        let file = cache_dir.map(|dir| {
            let key = format!(
                "{}\ndriver {driver}\ncublasLt {library}\nworkspace {}",
                gpu.name(),
                workspace.n_bytes
            );
            CacheFile::new(&dir, &key)
        });
        let tuned = file.as_ref().map(CacheFile::load).unwrap_or_default();
        let tuned = tuned.into_iter().filter(|(shape, algorithm)| {
            let accepted = Problem::new(*shape).and_then(|problem| problem.accepts(handle, algorithm));
            accepted.is_ok_and(|workspace_bytes| workspace_bytes <= workspace.n_bytes)
        });
        let tuned = RefCell::new(tuned.collect());
        Ok(Self { handle, gpu: gpu.clone(), workspace, file, tuned, guessed: RefCell::default() })
    }

    /// Times the candidates for the buckets of these shapes, as far as they are not known yet, and remembers the
    /// fastest. Takes and frees device memory: the largest matrix or 256 MiB, the largest X and Y, and a workspace.
    ///
    /// `is_disturbed` says whether something else computes on the device. Times that were taken meanwhile say little,
    /// and taking them slows the other down: the timing ends then, and shapes without an algorithm of their own take the
    /// library's first guess, here and until a process finds the device idle.
    ///
    /// # Errors
    /// There is no memory for it, or a kernel failed.
    pub fn tune(
        &self,
        stream: &Stream,
        shapes: &[MatmulShape],
        is_disturbed: &dyn Fn() -> bool,
    ) -> Result<(), CudaError> {
        let mut unknown: Vec<MatmulShape> = shapes.iter().map(|shape| shape.bucketed()).collect();
        unknown.retain(|shape| !self.tuned.borrow().contains_key(shape));
        unknown.sort_unstable();
        unknown.dedup();
        if unknown.is_empty() {
            return Ok(());
        }
        let started = std::time::Instant::now();
        let mut n_timed = 0;
        if !is_disturbed() {
            let bench = Bench::new(&self.gpu, stream, &unknown, self.workspace.n_bytes)?;
            for &shape in &unknown {
                let Some(fastest) = bench.fastest(self.handle, stream, shape, is_disturbed)? else { break };
                self.tuned.borrow_mut().insert(shape, fastest);
                n_timed += 1;
            }
        }
        let n_left = unknown.len() - n_timed;
        tracing::info!(n_timed, n_left, elapsed = ?started.elapsed(), "matrix products tuned");
        if let Some(file) = &self.file
            && n_timed > 0
        {
            file.store(&self.tuned.borrow());
        }
        Ok(())
    }

    /// Computes a product. A shape whose bucket was not tuned takes the library's first guess.
    ///
    /// # Errors
    /// The library has no algorithm for the shape, or refused the launch.
    ///
    /// # Panics
    /// A slice is too short or not aligned to 16 bytes.
    pub fn matmul(
        &self,
        stream: &Stream,
        shape: MatmulShape,
        x: Slice, // T [n_tokens, n_in]
        w: Slice, // T [n_out, n_in]
        y: Slice, // T or f32 [n_tokens, n_out]
    ) -> Result<(), CudaError> {
        let MatmulShape { n_tokens, n_out, n_in, dtype, out, .. } = shape;
        if n_tokens == 0 {
            return Ok(());
        }
        expect("x", x, n_tokens * n_in, dtype.n_bytes());
        expect("w", w, n_out * n_in, dtype.n_bytes());
        expect("y", y, n_tokens * n_out, out.n_bytes(dtype));
        let problem = Problem::new(shape)?;
        let operands = Operands { x, w, y, workspace: self.workspace };
        let guessed = self.guessed.borrow().get(&shape).copied();
        let known = guessed.or_else(|| self.tuned.borrow().get(&shape.bucketed()).copied());
        if let Some(algorithm) = known {
            match problem.run(self.handle, stream, &algorithm, operands) {
                Err(status) if guessed.is_none() && is_refusal(status) => {}
                result => return result.map_err(|status| problem::error("cublasLtMatmul", shape, status)),
            }
        }
        let algorithm = problem.candidates(self.handle, self.workspace.n_bytes, 1)?[0];
        self.guessed.borrow_mut().insert(shape, algorithm);
        problem
            .run(self.handle, stream, &algorithm, operands)
            .map_err(|status| problem::error("cublasLtMatmul", shape, status))
    }

    /// Whether the bucket of a shape has been timed.
    #[must_use]
    pub fn is_tuned(&self, shape: MatmulShape) -> bool {
        self.tuned.borrow().contains_key(&shape.bucketed())
    }
}

#[cfg(test)]
#[path = "matmul_tests.rs"]
mod tests;
