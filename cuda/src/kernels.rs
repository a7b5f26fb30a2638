//! All kernels of one model, compiled for its type and shape.

use std::thread;

use trellis_engine::model::{Dtype, ModelConfig};

use crate::ops::attention::AttentionShape;
use crate::ops::attention_decode::AttentionDecode;
use crate::ops::attention_prefill::AttentionPrefill;
use crate::ops::bias::AddBias;
use crate::ops::embedding::Embedding;
use crate::ops::gather::Gather;
use crate::ops::gemv::Gemv;
use crate::ops::logits::LogitsKernels;
use crate::ops::norm::Norm;
use crate::ops::pages::CopyPages;
use crate::ops::rope::Rope;
use crate::ops::swiglu::SwiGlu;
use crate::ops::{bias, embedding, gather, gemv, logits, norm, pages, rope, swiglu};
use crate::{Card, CudaError, Module, Source};

/// The kernels, loaded.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) embedding: Embedding,
    pub(crate) norm: Norm,
    pub(crate) rope: Rope,
    pub(crate) swiglu: SwiGlu,
    pub(crate) bias: AddBias,
    pub(crate) gather: Gather,
    pub(crate) pages: CopyPages,
    pub(crate) gemv: Gemv,
    pub(crate) attention_decode: AttentionDecode,
    pub(crate) attention_prefill: AttentionPrefill,
    pub(crate) logits: LogitsKernels,
    pub(crate) attention_shape: AttentionShape,
}

impl Kernels {
    /// Compiles what no earlier start has left behind, all sources side by side, and loads everything.
    ///
    /// # Errors
    /// NVRTC is missing, or the driver refused.
    ///
    /// # Panics
    /// [`supports`] says no to the model.
    pub(crate) fn load(card: &Card, config: &ModelConfig, dtype: Dtype) -> Result<Self, CudaError> {
        let ModelConfig { n_heads, n_kv_heads, head_dim, .. } = *config;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let attention_shape = AttentionShape { dtype, n_heads, n_kv_heads, head_dim, scale };
        let decode = AttentionDecode::source(&attention_shape);
        let prefill = AttentionPrefill::source(&attention_shape);
        let plain = [
            embedding::SOURCE,
            norm::SOURCE,
            rope::SOURCE,
            swiglu::SOURCE,
            bias::SOURCE,
            gather::SOURCE,
            pages::SOURCE,
            gemv::SOURCE,
            decode,
            prefill,
        ];
        compile(card, plain.iter().chain(&logits::SOURCES))?;
        let gpu = card.gpu();
        let module = |source: Source| Module::load(gpu, &card.compiler().cubin(source)?);
        Ok(Self {
            embedding: Embedding::new(&module(embedding::SOURCE)?, dtype)?,
            norm: Norm::new(&module(norm::SOURCE)?, dtype)?,
            rope: Rope::new(&module(rope::SOURCE)?, dtype)?,
            swiglu: SwiGlu::new(&module(swiglu::SOURCE)?, dtype)?,
            bias: AddBias::new(&module(bias::SOURCE)?, dtype)?,
            gather: Gather::new(&module(gather::SOURCE)?)?,
            pages: CopyPages::new(&module(pages::SOURCE)?)?,
            gemv: Gemv::new(gpu, &module(gemv::SOURCE)?, dtype)?,
            attention_decode: AttentionDecode::new(&module(decode)?, attention_shape)?,
            attention_prefill: AttentionPrefill::new(&module(prefill)?, attention_shape)?,
            logits: LogitsKernels::load(gpu, card.compiler())?,
            attention_shape,
        })
    }
}

/// Has every source compiled, so that it is found in the compiler's memory or on disk from here on.
fn compile<'a>(card: &Card, sources: impl Iterator<Item = &'a Source>) -> Result<(), CudaError> {
    thread::scope(|scope| {
        let compiled: Vec<_> =
            sources.map(|&source| scope.spawn(move || card.compiler().cubin(source).map(drop))).collect();
        compiled.into_iter().try_for_each(|thread| thread.join().expect("compiling does not panic"))
    })
}
