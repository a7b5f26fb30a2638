//! What the kernels over rows of logits take.

use crate::Pointer;
use crate::driver::params;

/// As in `logits.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LogitsScanParams {
    pub(super) logits: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) tables: Pointer,
    pub(super) page_tokens: Pointer,
    pub(super) biases: Pointer,
    pub(super) masks: Pointer,
    pub(super) adjusted: Pointer,
    pub(super) parts: Pointer,
    pub(super) hopeful: Pointer,
    pub(super) spans: Pointer,
    pub(super) bin_counts: Pointer,
    pub(super) bin_weights: Pointer,
    pub(super) vocab: i32,
    pub(super) unused: i32,
}
params!(LogitsScanParams, 112);

/// As in `choose.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct ChooseParams {
    pub(super) logits: Pointer,
    pub(super) adjusted: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) parts: Pointer,
    pub(super) spans: Pointer,
    pub(super) stands: Pointer,
    pub(super) drawn: Pointer,
    pub(super) vocab: i32,
    pub(super) n_chunks: i32,
}
params!(ChooseParams, 72);

/// As in `truncate.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct SampleBinsParams {
    pub(super) logits: Pointer,
    pub(super) adjusted: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) parts: Pointer,
    pub(super) bin_counts: Pointer,
    pub(super) bin_weights: Pointer,
    pub(super) vocab: i32,
    pub(super) unused: i32,
}
params!(SampleBinsParams, 64);

/// As in `truncate.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct SampleTruncateParams {
    pub(super) logits: Pointer,
    pub(super) adjusted: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) parts: Pointer,
    pub(super) bin_counts: Pointer,
    pub(super) bin_weights: Pointer,
    pub(super) cutoffs: Pointer,
    pub(super) vocab: i32,
    pub(super) n_chunks: i32,
}
params!(SampleTruncateParams, 72);

/// As in `sample.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct SampleDrawParams {
    pub(super) logits: Pointer,
    pub(super) adjusted: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) parts: Pointer,
    pub(super) cutoffs: Pointer,
    pub(super) stands: Pointer,
    pub(super) drawn: Pointer,
    pub(super) vocab: i32,
    pub(super) n_chunks: i32,
}
params!(SampleDrawParams, 72);

/// As in `finish.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LogitsFinishParams {
    pub(super) logits: Pointer,
    pub(super) adjusted: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) parts: Pointer,
    pub(super) hopeful: Pointer,
    pub(super) stands: Pointer,
    pub(super) drawn: Pointer,
    pub(super) score_tokens: Pointer,
    pub(super) slots: Pointer,
    pub(super) outputs: Pointer,
    pub(super) scores: Pointer,
    pub(super) program_outputs: Pointer,
    pub(super) vocab: i32,
    pub(super) n_chunks: i32,
    pub(super) n_drawn: i32,
    pub(super) unused: i32,
}
params!(LogitsFinishParams, 120);

/// As in `logits.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LogitsRankedParams {
    pub(super) logits: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) tables: Pointer,
    pub(super) page_tokens: Pointer,
    pub(super) biases: Pointer,
    pub(super) masks: Pointer,
    pub(super) outputs: Pointer,
    pub(super) adjusted: Pointer,
    pub(super) parts: Pointer,
    pub(super) vocab: i32,
    pub(super) unused: i32,
}
params!(LogitsRankedParams, 88);

/// As in `topn.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct TopNParams {
    pub(super) logits: Pointer,
    pub(super) adjusted: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) parts: Pointer,
    pub(super) outputs: Pointer,
    pub(super) top: Pointer,
    pub(super) vocab: i32,
    pub(super) n_chunks: i32,
}
params!(TopNParams, 64);

/// As in `logits.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LogitsFullParams {
    pub(super) logits: Pointer,
    pub(super) rows: Pointer,
    pub(super) n_rows: Pointer,
    pub(super) outputs: Pointer,
    pub(super) vocab: i32,
    pub(super) unused: i32,
}
params!(LogitsFullParams, 40);
