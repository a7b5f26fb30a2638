//! The backend that executes batches on a card.

mod load;

use std::collections::VecDeque;

use trellis_engine::KeptRow;
use trellis_engine::backend::{
    Backend, BackendError, Collected, Damage, KvBytes, KvPlace, Limits, OldestStep, WeightsInfo,
};
use trellis_engine::batch::{
    Batch, CellMove, HostPageId, Input, LateMask, Output, PageId, Row, SlotId, Token,
};

pub use self::load::{CudaOptions, LoadError, Needs};
use crate::memory::{HostPages, Reserved, move_pages, read_page};
use crate::model::Llama;
use crate::ops::pages::in_launches;
use crate::step::{InFlight, StepRow, Steps};
use crate::{Card, CudaError, Event, Gpu, Stream};

/// A step that was submitted and not collected.
#[derive(Debug)]
enum UnderWay {
    InStream(InFlight),
    Done(Result<Collected, CudaError>),
}

/// Executes batches on a card.
#[derive(Debug)]
pub struct CudaBackend {
    limits: Limits,
    device: String,
    weight_bytes: u64,
    /// Steps that were submitted and not collected, the oldest first.
    under_way: VecDeque<UnderWay>,
    /// For each of them the slots of its rows, with the last output of each.
    draws: VecDeque<Vec<(SlotId, usize)>>,
    /// Waits for the stream before the memory below goes.
    steps: Steps,
    llama: Llama,
    kv: Reserved, // pages
    host_pages: HostPages,
    /// Behind the copies of pages that were put into the stream last.
    copied: Event,
    _trimmed: TrimmedAfter,
    card: Card,
}

/// Gives what the model leaves in the cache back to the driver: other models map their memory, which the cache does not
/// serve.
#[derive(Debug)]
struct TrimmedAfter(Gpu);

impl Drop for TrimmedAfter {
    fn drop(&mut self) {
        if let Err(error) = self.0.trim() {
            tracing::warn!(%error, "device memory is kept");
        }
    }
}

impl CudaBackend {
    /// Whether the device still works after an error. If so, nothing is left of the step in the stream.
    fn settle(&mut self, error: CudaError) -> CudaError {
        if error.damage() == Damage::Device {
            return error;
        }
        let settled = self.card.gpu().make_current().and_then(|()| self.card.stream().synchronize());
        match settled {
            Err(worse) if worse.damage() == Damage::Device => worse,
            _ => error,
        }
    }

    fn launch(&mut self, batch: &Batch<'_>) -> Result<(), CudaError> {
        self.card.gpu().make_current()?;
        let mut rows: Vec<StepRow<'_>> = batch.rows.iter().map(StepRow::of).collect();
        let mut completed: Vec<Vec<Token>> = Vec::new();
        let is_on_host = match self.under_way.back() {
            Some(UnderWay::InStream(before)) => before.has_host_work(),
            Some(UnderWay::Done(_)) => true,
            None => false,
        };
        let has_drawn = rows.iter().any(StepRow::has_drawn);
        self.steps.begin(&rows, self.llama.config.n_layers);
        if has_drawn && (is_on_host || self.steps.may_draw_on_host(&rows, batch.copies)) {
            // The host can draw only after tokens that it knows.
            self.wait_for_all();
            for row in batch.rows.iter().filter(|row| row.input == Input::Drawn(row.slot)) {
                if let Some(Output::Programmed(_, left)) = self.drawn_before(row.slot) {
                    let next = left.next;
                    self.steps.note_left(row.slot, next);
                }
            }
            completed = batch.rows.iter().map(|row| self.known_tokens(row)).collect();
            rows =
                batch.rows.iter().zip(&completed).map(|(row, tokens)| StepRow::known(row, tokens)).collect();
        }
        let in_flight = self.steps.launch(&self.llama, self.kv.slice(), &rows, batch.copies)?;
        drop(rows);
        drop(completed);
        self.under_way.push_back(UnderWay::InStream(in_flight));
        // What each row drew last, in the order of the requests.
        let mut n_before = 0;
        let draws = batch.rows.iter().filter_map(|row| {
            let last = row.outputs.iter().rposition(|request| request.kind.draws());
            let draw = last.map(|idx| (row.slot, n_before + idx));
            n_before += row.outputs.len();
            draw
        });
        self.draws.push_back(draws.collect());
        Ok(())
    }

    /// Waits for every step under way, without collecting any.
    fn wait_for_all(&mut self) {
        for step in &mut self.under_way {
            if let UnderWay::InStream(in_flight) = step {
                *step = UnderWay::Done(self.steps.wait(std::mem::take(in_flight)));
            }
        }
    }

    /// The row's tokens, with the one that the step before drew for it.
    fn known_tokens(&self, row: &Row<'_>) -> Vec<Token> {
        let mut tokens = row.tokens.to_vec();
        if let Input::Drawn(slot) = row.input {
            let drawn = match self.drawn_before(slot) {
                Some(Output::Sampled(candidate) | Output::Programmed(candidate, _)) => Some(candidate.token),
                _ => None,
            };
            // Where nothing was drawn the row's result is not used.
            tokens.push(drawn.unwrap_or(0));
        }
        tokens
    }

    /// What the step before gave last for a slot, if it is done.
    fn drawn_before(&self, drawn_for: SlotId) -> Option<&Output> {
        let UnderWay::Done(Ok(collected)) = self.under_way.back()? else { return None };
        let &(_, output_idx) = self.draws.back()?.iter().find(|&&(slot, _)| slot == drawn_for)?;
        collected.outputs.get(output_idx)
    }

    /// The step that was submitted last has failed.
    fn give_up_last(&mut self, error: CudaError) -> BackendError {
        if let Some(UnderWay::InStream(step)) = self.under_way.pop_back() {
            self.steps.give_up(&step);
        }
        self.draws.pop_back();
        self.error(error)
    }

    /// Puts copies of pages into the stream of the steps, and marks where they end.
    fn copy(
        &mut self,
        put: impl FnOnce(&mut Self, &Stream) -> Result<(), CudaError>,
    ) -> Result<(), BackendError> {
        let card = self.card.clone();
        let copied = card.gpu().make_current().and_then(|()| {
            let stream = card.stream();
            let put = put(self, &stream);
            // Also behind a copy that was refused: there may be others before it.
            self.copied.record(&stream)?;
            put
        });
        copied.map_err(|error| self.error(error))
    }

    /// Waits for the copies of pages that were put into the stream; `false` where that fails, which the next step says too.
    fn has_copied(&self) -> bool {
        let waited = self.card.gpu().make_current().and_then(|()| self.copied.synchronize());
        if let Err(error) = &waited {
            tracing::warn!(%error, "host memory is not given back");
        }
        waited.is_ok()
    }

    fn error(&mut self, error: CudaError) -> BackendError {
        self.steps.forget_slots();
        let error = self.settle(error);
        self.told(error)
    }

    /// An error as the engine is told of it.
    fn told(&self, error: CudaError) -> BackendError {
        let device = self.device.clone();
        let damage = error.damage();
        match error {
            CudaError::OutOfMemory { needed_bytes, free_bytes, .. } => {
                BackendError::OutOfMemory { device, needed_bytes, free_bytes }
            }
            CudaError::Call { call, reason, .. } => BackendError::Device { device, call, reason, damage },
            other => BackendError::Device { device, call: "a step", reason: other.to_string(), damage },
        }
    }
}

impl Backend for CudaBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn device(&self) -> &str {
        &self.device
    }

    fn weights(&self) -> WeightsInfo {
        WeightsInfo { dtype: self.llama.dtype, n_bytes: self.weight_bytes }
    }

    fn keep_row(&mut self) -> Option<KeptRow> {
        self.steps.keep_row()
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        self.launch(batch).map_err(|error| self.error(error))
    }

    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        let Some(UnderWay::InStream(step)) = self.under_way.back_mut() else {
            // Its late draws sat out, or it would not have been waited for.
            return Ok(masks.iter().map(|mask| mask.row_idx).collect());
        };
        let current = self.card.gpu().make_current();
        let supplied = current.and_then(|()| self.steps.supply(&self.llama, step, masks));
        supplied.map_err(|error| self.give_up_last(error))
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        let Some(UnderWay::InStream(step)) = self.under_way.back() else { return Ok(true) };
        let current = self.card.gpu().make_current();
        let waits = current.and_then(|()| self.steps.waits_for_masks(step));
        waits.map_err(|error| self.give_up_last(error))
    }

    fn oldest_step(&mut self) -> OldestStep {
        match self.under_way.front() {
            Some(UnderWay::InStream(in_flight)) if !self.steps.is_done(in_flight) => OldestStep::OnDevice,
            _ => OldestStep::Done,
        }
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        self.draws.pop_front();
        // The engine's thread is another than the one that loaded the model.
        let current = self.card.gpu().make_current();
        let collected = match self.under_way.pop_front().expect("a step is under way") {
            UnderWay::InStream(in_flight) => current.and_then(|()| self.steps.wait(in_flight)),
            UnderWay::Done(collected) => collected,
        };
        collected.map_err(|error| self.error(error))
    }

    fn n_pages(&self) -> usize {
        self.kv.mapped_bytes() / self.limits.page_bytes
    }

    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError> {
        let Limits { n_pages: n_most, n_granule_pages, page_bytes, .. } = self.limits;
        assert!(
            n_pages == n_most || n_pages < n_most && n_pages.is_multiple_of(n_granule_pages),
            "{n_pages}"
        );
        let resized = self.card.gpu().make_current().and_then(|()| {
            if n_pages < self.n_pages() {
                // Steps do not touch what goes, but pages may be on their way out of it.
                self.copied.synchronize()?;
            }
            self.kv.resize(n_pages * page_bytes)
        });
        // Steps go on in any case: there is nothing in the stream to wait for.
        resized.map_err(|error| self.told(error))
    }

    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        let page_bytes = self.limits.page_bytes;
        self.steps.lose_tokens(moves.iter().map(|&(_, to)| to));
        self.copy(|this, stream| move_pages(stream, this.kv.slice(), page_bytes, moves))
    }

    fn move_cells(&mut self, moves: &[CellMove]) -> Result<(), BackendError> {
        self.steps.lose_tokens(moves.iter().map(|it| it.dst.page));
        self.copy(|this, stream| {
            let Self { llama, kv, .. } = this;
            let head_bytes = llama.config.head_dim * llama.dtype.n_bytes();
            let page_bytes = llama.page_len() * llama.dtype.n_bytes();
            in_launches(moves).try_for_each(|moves| {
                llama.kernels().pages.pack(stream, &moves, page_bytes, head_bytes, kv.slice())
            })
        })
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        self.copy(|this, stream| this.host_pages.swap_out(stream, this.kv.slice(), moves))
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        self.steps.lose_tokens(moves.iter().map(|&(_, to)| to));
        self.copy(|this, stream| this.host_pages.swap_in(stream, this.kv.slice(), moves))
    }

    fn take_waited_for_host_pages(&mut self) -> bool {
        self.host_pages.take_waited()
    }

    fn is_moving(&mut self) -> bool {
        let done = self.card.gpu().make_current().and_then(|()| self.copied.is_done());
        // The next step says what has failed.
        done.is_ok_and(|is_done| !is_done)
    }

    fn can_release_host_pages(&self) -> bool {
        true
    }

    fn release_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> u64 {
        // A page that is free may still be read by a copy.
        if at_most == 0 || !self.has_copied() { 0 } else { self.host_pages.release(free, at_most) }
    }

    fn keeps_host_memory(&self) -> bool {
        self.host_pages.keeps()
    }

    fn gather_host_pages(&mut self, free: &[HostPageId], at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        if at_most == 0 || !self.has_copied() { Vec::new() } else { self.host_pages.gather(free, at_most) }
    }

    fn kv_bytes(&mut self) -> Option<&mut dyn KvBytes> {
        Some(self)
    }
}

impl KvBytes for CudaBackend {
    fn format(&self) -> String {
        let config = &self.llama.config;
        let (n_layers, n_kv_heads, head_dim) = (config.n_layers, config.n_kv_heads, config.head_dim);
        let (device, dtype) = (self.card.gpu().name(), self.llama.dtype.name());
        format!("cuda 1, {device}, {dtype}, {n_layers} layers of {n_kv_heads} heads of {head_dim}")
    }

    fn read(&mut self, pages: &[KvPlace], into: &mut Vec<u8>) -> Result<(), BackendError> {
        let page_bytes = self.limits.page_bytes;
        self.copy(|this, stream| {
            // Copies to host pages may be on their way.
            stream.synchronize()?;
            pages.iter().try_for_each(|&page| match page {
                KvPlace::Device(page) => read_page(stream, this.kv.slice(), page_bytes, page, into),
                KvPlace::Host(page) => {
                    this.host_pages.read(page, into);
                    Ok(())
                }
            })
        })
    }

    fn write(&mut self, pages: &[HostPageId], from: &[u8]) -> Result<(), BackendError> {
        let page_bytes = self.limits.page_bytes;
        self.copy(|this, stream| {
            // A page that is free may still be read by a copy.
            stream.synchronize()?;
            let parts = from.chunks_exact(page_bytes);
            pages.iter().zip(parts).for_each(|(&page, part)| this.host_pages.write(page, part));
            Ok(())
        })
    }
}

#[cfg(test)]
mod beside_cpu;
#[cfg(test)]
mod beside_tests;
#[cfg(test)]
mod evict_tests;
#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod late_tests;
#[cfg(test)]
mod mass_tests;
#[cfg(test)]
mod mixture_tests;
#[cfg(test)]
mod program_tests;
#[cfg(test)]
mod resize_tests;
#[cfg(test)]
mod search_tests;
#[cfg(test)]
mod slot_tests;
#[cfg(test)]
mod steer_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tree_tests;
