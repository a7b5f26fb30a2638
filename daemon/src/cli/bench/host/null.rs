//! A device that computes nothing: every request is answered at once with made-up numbers.

use std::sync::Arc;
use std::time::Duration;

use trellis_engine::backend::{
    AskLimits, Backend, BackendError, Collected, Limits, PAGE_LEN, SteeringTimes, WeightsInfo,
};
use trellis_engine::batch::{
    Batch, Candidate, CellMove, HostPageId, LateMask, Output, OutputKind, PageId, Row, Token,
};
use trellis_engine::model::{Dtype, ModelConfig};

use super::allocations;
use super::desk::{Desk, Step};
use crate::cli::bench::engine::mixed;
use crate::thread_time::thread_time;

/// Far more than a prompt, so that a context of any length is there after one step.
const N_TOKENS_MAX: usize = 1 << 20;

/// What a step is said to have taken: long enough for the next to wait for guests that were just answered.
const STEP: Duration = Duration::from_millis(2);

/// Answers as a function of slot and position. It tells the desk what the engine's thread did between two calls.
pub(super) struct NullBackend {
    limits: Limits,
    desk: Arc<Desk>,
    /// The outputs of the step under way.
    outputs: Option<Vec<Output>>,
}

impl NullBackend {
    /// A device for the vocabulary of `config`, with as many rows and pages as asked for.
    pub(super) fn new(config: &ModelConfig, n_rows_max: usize, n_pages: usize, desk: Arc<Desk>) -> Self {
        let limits = Limits {
            n_pages,
            n_granule_pages: n_pages,
            n_host_pages: 0,
            page_bytes: PAGE_LEN,
            n_rows_max,
            n_tokens_max: N_TOKENS_MAX,
            n_tile_tokens: 1,
            n_block_tokens: 1,
            n_queries_per_key: config.n_heads / config.n_kv_heads,
            n_positions_max: config.n_positions,
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            n_layers: config.n_layers,
            n_steps_under_way: 1,
            n_slots: 0,
            n_states: 0,
            n_stretches_max: 0,
            logits_tokens: config.logits_tokens(),
            steering: SteeringTimes::NONE,
            asks: AskLimits::NONE,
        };
        Self { limits, desk, outputs: None }
    }

    fn token(&self, row: &Row<'_>, position: usize) -> Token {
        let place = (u64::from(row.slot.0) << 32) | position as u64;
        (mixed(place) % self.limits.vocab_size as u64) as Token
    }

    /// Different tokens, each less probable than the one before it, by steps that differ from row to row.
    fn candidates(&self, row: &Row<'_>, position: usize, n: usize) -> Vec<Candidate> {
        let first = u64::from(self.token(row, position));
        let step = 0.01 + (first % 64) as f32 * 0.01;
        let token = |idx: usize| ((first + idx as u64) % self.limits.vocab_size as u64) as Token;
        (0..n).map(|idx| Candidate { token: token(idx), logprob: -1.0 - step * idx as f32 }).collect()
    }

    fn output(&self, row: &Row<'_>, position: usize, kind: &OutputKind<'_>) -> Output {
        let candidate = Candidate { token: self.token(row, position), logprob: -1.0 };
        match kind {
            OutputKind::Sample(_) => Output::Sampled(candidate),
            OutputKind::Top { n } => {
                Output::Top { candidates: self.candidates(row, position, *n), entropy: 1.0 }
            }
            OutputKind::Scores(tokens) => Output::Scores(vec![-1.0; tokens.len()]),
            OutputKind::Full => Output::Full(vec![-1.0; self.limits.vocab_size]),
            OutputKind::Attention { .. } => Output::Attention(vec![0.0; position + 1]),
            OutputKind::Embedding | OutputKind::Hidden { .. } => {
                Output::Embedding(vec![0.0; self.limits.hidden_size])
            }
            other => unreachable!("nobody here asks for {other:?}"),
        }
    }
}

impl Backend for NullBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn weights(&self) -> WeightsInfo {
        WeightsInfo { dtype: Dtype::F32, n_bytes: 0 }
    }

    fn device(&self) -> &str {
        "a device that computes nothing"
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        let entered = thread_time();
        allocations::stop();
        let n_tokens: usize = batch.rows.iter().map(|row| row.end() - row.start).sum();
        self.desk.enter(Step { n_rows: batch.rows.len(), n_tokens, entered });
        let mut outputs = Vec::new();
        let mut n_drawn = 0;
        for row in &batch.rows {
            for request in &row.outputs {
                n_drawn += u64::from(matches!(request.kind, OutputKind::Sample(_)));
                outputs.push(self.output(row, request.position, &request.kind));
            }
        }
        self.desk.leave(n_drawn);
        allocations::start();
        self.outputs = Some(outputs);
        self.desk.left(thread_time());
        Ok(())
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        let outputs = self.outputs.take().expect("a step is under way");
        Ok(Collected { outputs, elapsed: STEP })
    }

    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        unreachable!("no draw is late here: {masks:?}")
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn n_pages(&self) -> usize {
        self.limits.n_pages
    }

    fn resize(&mut self, _n_pages: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn move_pages(&mut self, _moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        Ok(())
    }

    fn move_cells(&mut self, _moves: &[CellMove]) -> Result<(), BackendError> {
        Ok(())
    }

    fn swap_out(&mut self, _moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        unreachable!("there are no host pages")
    }

    fn swap_in(&mut self, _moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        unreachable!("there are no host pages")
    }
}
