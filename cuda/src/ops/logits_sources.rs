//! The sources of the kernels over rows of logits, and the numbers that they share with their launcher.

use trellis_engine::sampling::GUMBEL_MAX;

use super::common::PAGE_LEN;
use super::logits::{FAULT_NONE, FAULT_NOT_A_NUMBER, FAULT_NOTHING_TO_DRAW, NOWHERE, TOKEN_BITS, Wants};
use crate::Source;

/// Threads of a block that looks at a chunk of a row.
pub(super) const THREADS: usize = 256;
/// Groups of four tokens of a chunk that a thread holds.
const GROUPS: usize = 4;
/// Tokens of a row that one block looks at.
pub(super) const CHUNK: usize = THREADS * 4 * GROUPS;
/// Spans of a chunk, the largest value of each of which is kept where tokens are chosen: those of a warp.
pub(super) const SPANS: usize = THREADS / 32;
/// Bins of the histogram of a row, and threads of a block that looks at a whole row.
pub(super) const N_BINS: usize = 1024;
/// Blocks that look at chunks and are resident together: as many as leave registers for the values of a chunk.
const SCAN_RESIDENT: usize = 5;
/// As many blocks that draw from chunks.
const DRAW_RESIDENT: usize = 4;
/// About as many blocks draw: twice those that an H100 has at once. What a block knows of its row it works out once.
pub(super) const DRAW_BLOCKS: usize = 1024;
/// Loads of tokens of a history that a thread has under way: as many as leave room for that.
const HISTORY_LOADS: usize = 2;
/// Tokens of a chunk that could be drawn of which there is a list: mostly one, rarely ten.
pub(super) const HOPEFUL_MAX: usize = 32;
/// The largest top-k that is chosen for among few tokens.
pub(super) const TOP_K_MAX: usize = 256;
/// Threads of a block that chooses among the tokens of a row.
pub(super) const CHOOSE_THREADS: usize = 512;
/// As many such blocks are resident together that there is one for each of 256 rows.
const CHOOSE_RESIDENT: usize = 2;
/// Blocks of a row where rows are few, as a cluster: with more, each has a strip or none of most vocabularies.
pub(super) const CHOOSE_BLOCKS: usize = 8;
/// Rows that are few: each of their blocks has a multiprocessor to itself.
pub(super) const N_CHOOSE_FEW: usize = 16;
/// Threads of a block that finishes a row.
pub(super) const FINISH_THREADS: usize = 128;
pub(super) const PART_BYTES: usize = 32;

fn source(file: &'static str, text: &'static str) -> Source {
    Source::new(file, text)
        .with("THREADS", THREADS)
        .with("GROUPS", GROUPS)
        .with("BINS", N_BINS)
        .with("PAGE_LEN", PAGE_LEN)
        .with("HISTORY_LOADS", HISTORY_LOADS)
        .with("SCAN_RESIDENT", SCAN_RESIDENT)
        .with("DRAW_RESIDENT", DRAW_RESIDENT)
        .with("FINISH_THREADS", FINISH_THREADS)
        .with("TOKEN_BITS", TOKEN_BITS)
        .with("PART_BYTES", PART_BYTES)
        .with("HOPEFUL_MAX", HOPEFUL_MAX)
        .with("TOP_K_MAX", TOP_K_MAX)
        .with("CHOOSE_THREADS", CHOOSE_THREADS)
        .with("CHOOSE_RESIDENT", CHOOSE_RESIDENT)
        .with("GUMBEL_MAX", format!("{GUMBEL_MAX:?}f"))
        .with("NONE", format!("{NOWHERE}u"))
        .with("WANTS_SAMPLE", Wants::SAMPLE.0)
        .with("WANTS_TOP", Wants::TOP.0)
        .with("WANTS_SCORES", Wants::SCORES.0)
        .with("WANTS_FULL", Wants::FULL.0)
        .with("WANTS_PROGRAM", Wants::PROGRAM.0)
        .with("WANTS_RANKED", Wants::RANKED.0)
        .with("FAULT_NONE", FAULT_NONE)
        .with("FAULT_NOT_A_NUMBER", FAULT_NOT_A_NUMBER)
        .with("FAULT_NOTHING_TO_DRAW", FAULT_NOTHING_TO_DRAW)
}

/// What every source begins with.
macro_rules! text {
    ($($file:literal),+) => {
        concat!(
            include_str!("maths.cuh"),
            include_str!("noise.cuh"),
            include_str!("rows.cuh"),
            include_str!("logits.cuh"),
            $(include_str!($file)),+
        )
    };
}

/// The sources of the kernels over rows of logits that most steps need.
#[must_use]
pub fn sources() -> [Source; 4] {
    [
        source("logits.cu", text!("hopeful.cuh", "logits.cu")),
        source("finish.cu", text!("hopeful.cuh", "block.cuh", "finish.cu")),
        source("sample.cu", text!("hopeful.cuh", "sample.cu")),
        source("choose.cu", text!("hopeful.cuh", "block.cuh", "cluster.cuh", "choose.cu"))
            .with("CLUSTER", format!("(__CUDA_ARCH__ >= 900 ? {CHOOSE_BLOCKS} : 1)")),
    ]
}

/// The source of the kernels that search cutoffs.
#[must_use]
pub(super) fn search_source() -> Source {
    source("truncate.cu", text!("block.cuh", "select.cuh", "truncate.cu"))
}

/// The source of the kernel that lists the largest values.
#[must_use]
pub(super) fn top_source() -> Source {
    source("topn.cu", text!("block.cuh", "select.cuh", "topn.cu"))
}

/// All of them.
#[cfg(test)]
pub(super) fn all_sources() -> impl Iterator<Item = Source> {
    sources().into_iter().chain([search_source(), top_source()])
}
