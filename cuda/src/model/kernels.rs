//! All kernels of one model, compiled for its type and shape.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};

use trellis_engine::model::{Dtype, ModelConfig};

use crate::ops::attention::{Attention, AttentionShape};
use crate::ops::attention_holes::AttentionHoles;
use crate::ops::bias::AddBias;
use crate::ops::edits::Edits;
use crate::ops::embedding::Embedding;
use crate::ops::gather::Gather;
use crate::ops::gemv::Gemv;
use crate::ops::logits::LogitsKernels;
use crate::ops::masses::Masses;
use crate::ops::norm::Norm;
use crate::ops::pages::CopyPages;
use crate::ops::rope::Rope;
use crate::ops::steer::Steer;
use crate::ops::swiglu::SwiGlu;
use crate::ops::{bias, edits, embedding, gather, gemv, logits, norm, pages, rope, swiglu};
use crate::{Card, CudaError, Module, Source};

/// The kernels, loaded.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) embedding: Embedding,
    pub(crate) norm: Norm,
    pub(crate) rope: Rope,
    pub(crate) swiglu: SwiGlu,
    /// Where a projection without a kernel behind it has a bias.
    pub(crate) bias: Option<AddBias>,
    pub(crate) gather: Gather,
    pub(crate) pages: CopyPages,
    pub(crate) edits: Edits,
    pub(crate) gemv: Gemv,
    pub(crate) attention: Attention,
    pub(crate) masses: Masses,
    pub(crate) steer: Steer,
    pub(crate) logits: LogitsKernels,
}

impl Kernels {
    /// Loads the kernels of attention alone, which say how much memory steps take; compiles beside them what the model needs
    /// besides, so that a first start waits for the slowest once.
    ///
    /// # Errors
    /// NVRTC is missing, or the driver refused.
    ///
    /// # Panics
    /// The kernels do not take a model of this shape.
    pub(crate) fn attention(card: &Card, config: &ModelConfig, dtype: Dtype) -> Result<Attention, CudaError> {
        let (gpu, compiler, cores) = (card.gpu(), card.compiler(), &Cores::of(card));
        let shape = attention_shape(config, dtype);
        thread::scope(|scope| {
            let compile = |source: Source| scope.spawn(move || cores.lend(|| compiler.cubin(&source)));
            // An error is found again when the model is loaded.
            let compile_all =
                |sources: Vec<Source>| sources.into_iter().for_each(|source| drop(compile(source)));
            // What takes longest comes first.
            compile_all(long_sources(dtype, gpu.compute_capability()));
            let attention: Vec<_> = Attention::sources(&shape).into_iter().map(compile).collect();
            compile_all(short_sources(config, dtype));
            let load = |cubin: Compiling<'_>| {
                let cubin = cubin.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                Module::load(gpu, &cubin?)
            };
            let modules = attention.into_iter().map(load).collect::<Result<Vec<_>, _>>()?;
            Attention::new(&modules, AttentionHoles::new(gpu, compiler, shape), shape)
        })
    }

    /// Compiles what the model needs and no earlier start has left behind, all sources side by side, and loads it. What only
    /// some steps need is compiled some time after that, and loaded when one does.
    ///
    /// # Errors
    /// NVRTC is missing, or the driver refused.
    ///
    /// # Panics
    /// The kernels do not take a model of this shape.
    pub(crate) fn load(card: &Card, config: &ModelConfig, dtype: Dtype) -> Result<Self, CudaError> {
        let attention_shape = attention_shape(config, dtype);
        let (gpu, compiler, cores) = (card.gpu(), card.compiler(), &Cores::of(card));
        thread::scope(|scope| {
            let compile = |source: Source| scope.spawn(move || cores.lend(|| compiler.cubin(&source)));
            let embedding = compile(embedding::source(dtype));
            let norm = compile(norm::source(dtype));
            let rope = compile(rope::source(dtype));
            let swiglu = compile(swiglu::source(dtype));
            let bias = has_bias(config).then(|| compile(bias::source(dtype)));
            let gather = compile(gather::source());
            let pages = compile(pages::source());
            let edits = compile(edits::source());
            let [gemv_plain, gemv_norm] = gemv::sources(dtype, gpu.compute_capability()).map(compile);
            let attention: Vec<_> = Attention::sources(&attention_shape).into_iter().map(compile).collect();
            let logits = logits::sources().map(compile);
            let load = |cubin: Compiling<'_>| {
                let cubin = cubin.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                Module::load(gpu, &cubin?)
            };
            let attention = attention.into_iter().map(load).collect::<Result<Vec<_>, _>>()?;
            let holed = AttentionHoles::new(gpu, compiler, attention_shape);
            let kernels = Self {
                embedding: Embedding::new(&load(embedding)?, dtype)?,
                norm: Norm::new(&load(norm)?, dtype)?,
                rope: Rope::new(&load(rope)?, dtype)?,
                swiglu: SwiGlu::new(&load(swiglu)?, dtype)?,
                bias: bias.map(|bias| AddBias::new(&load(bias)?, dtype)).transpose()?,
                gather: Gather::new(&load(gather)?)?,
                pages: CopyPages::new(&load(pages)?)?,
                edits: Edits::new(&load(edits)?)?,
                gemv: Gemv::new(gpu, &[load(gemv_plain)?, load(gemv_norm)?], dtype)?,
                attention: Attention::new(&attention, holed, attention_shape)?,
                masses: Masses::new(gpu, compiler, attention_shape),
                steer: Steer::new(gpu, compiler),
                logits: LogitsKernels::new(gpu, compiler, logits.map(load))?,
            };
            // Behind all that the first step needs.
            kernels.attention.begin_holed();
            kernels.masses.begin();
            kernels.steer.begin();
            kernels.logits.begin();
            Ok(kernels)
        })
    }
}

fn attention_shape(config: &ModelConfig, dtype: Dtype) -> AttentionShape {
    let ModelConfig { n_heads, n_kv_heads, head_dim, .. } = *config;
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionShape { dtype, n_heads, n_kv_heads, head_dim, scale }
}

fn has_bias(config: &ModelConfig) -> bool {
    config.attention_output_bias || config.mlp_bias
}

/// Of the kernels that every model needs but those of attention, those that take a second or so to compile.
fn long_sources(dtype: Dtype, capability: (i32, i32)) -> Vec<Source> {
    logits::sources().into_iter().chain(gemv::sources(dtype, capability)).collect()
}

/// The others.
fn short_sources(config: &ModelConfig, dtype: Dtype) -> Vec<Source> {
    let mut sources = vec![
        embedding::source(dtype),
        norm::source(dtype),
        rope::source(dtype),
        swiglu::source(dtype),
        gather::source(),
        pages::source(),
        edits::source(),
    ];
    sources.extend(has_bias(config).then(|| bias::source(dtype)));
    sources
}

/// Cores of the processor that compile: half of them beside the steps of others, whose thread must not wait for one.
struct Cores {
    n_free: Mutex<usize>,
    freed: Condvar,
}

impl Cores {
    fn of(card: &Card) -> Self {
        let n = thread::available_parallelism().map_or(1, usize::from);
        let n_free = if card.is_computing() { n.div_ceil(2) } else { n };
        Self { n_free: Mutex::new(n_free), freed: Condvar::new() }
    }

    /// Does something on one of them, when one is free.
    fn lend<R>(&self, work: impl FnOnce() -> R) -> R {
        let n_free = self.n_free.lock().unwrap_or_else(PoisonError::into_inner);
        let is_none = |n_free: &mut usize| *n_free == 0;
        *self.freed.wait_while(n_free, is_none).unwrap_or_else(PoisonError::into_inner) -= 1;
        let _lent = Lent(self);
        work()
    }
}

/// A core that comes back, also when the work panics.
struct Lent<'a>(&'a Cores);

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        *self.0.n_free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}

/// A source that is being compiled, or found in the cache.
type Compiling<'scope> = ScopedJoinHandle<'scope, Result<Arc<[u8]>, CudaError>>;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn no_more_cores_are_lent_than_there_are_and_all_work_is_done() {
        let cores = Cores { n_free: Mutex::new(2), freed: Condvar::new() };
        let (n_now, n_most, n_done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let work = |idx| {
            n_most.fetch_max(n_now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            thread::yield_now();
            n_now.fetch_sub(1, Ordering::SeqCst);
            n_done.fetch_add(1, Ordering::SeqCst);
            assert_ne!(idx, 5, "this one fails");
        };
        let outcomes: Vec<_> = thread::scope(|scope| {
            let (cores, work) = (&cores, &work);
            let threads: Vec<_> = (0..20).map(|idx| scope.spawn(move || cores.lend(|| work(idx)))).collect();
            threads.into_iter().map(|thread| thread.join().is_ok()).collect()
        });
        assert_eq!(outcomes.iter().filter(|is_ok| !**is_ok).count(), 1);
        assert_eq!(n_done.into_inner(), 20);
        assert!((1..=2).contains(&n_most.into_inner()));
        assert_eq!(cores.n_free.into_inner().expect("nobody panics under the lock"), 2);
    }
}
