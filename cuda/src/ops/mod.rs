//! Kernels, each beside its launcher, its reference and its test.

pub mod attention;
#[cfg(test)]
mod attention_case;
pub mod attention_decode;
pub mod attention_prefill;
pub mod bias;
pub mod common;
pub mod embedding;
pub mod gather;
pub mod gemv;
pub mod logits;
#[cfg(test)]
mod logits_case;
pub mod norm;
pub mod pages;
pub mod rope;
pub mod sample;
pub mod stream;
pub mod swiglu;
pub mod topn;
