//! A device that computes nothing and allocates nothing in a steady state.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::backend::{Backend, BackendError, Collected, Limits, OldestStep, WeightsInfo};
use crate::batch::{Batch, Candidate, CellMove, HostPageId, LateMask, Output, PageId, Token};
use crate::model::Dtype;

/// Lists for the outputs of steps, which the engine keeps. The measurement keeps this filled.
#[derive(Clone, Default)]
pub(in crate::engine) struct Stock(Arc<Mutex<Vec<Vec<Output>>>>);

impl Stock {
    /// Sees to it that there are lists for the next steps, of so many rows.
    pub(super) fn fill(&self, n_rows: usize) {
        let mut lists = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while lists.len() < 4 {
            lists.push(Vec::with_capacity(n_rows));
        }
    }

    fn take(&self) -> Vec<Output> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }
}

/// Answers at once, or when it is let.
pub(in crate::engine) struct Device {
    pub(super) limits: Limits,
    pub(super) stock: Stock,
    /// The outputs of the steps under way.
    pub(super) under_way: VecDeque<Vec<Output>>,
    /// Whether steps are done; where there is none, they are computed by the caller.
    gate: Option<Arc<AtomicBool>>,
}

impl Device {
    pub(in crate::engine) fn new(limits: Limits, stock: Stock) -> Self {
        Self { limits, stock, under_way: VecDeque::with_capacity(4), gate: None }
    }

    /// One whose steps are not done before the gate is opened.
    pub(in crate::engine) fn behind(gate: Arc<AtomicBool>, limits: Limits) -> Self {
        Self { gate: Some(gate), ..Self::new(limits, Stock::default()) }
    }
}

impl Backend for Device {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn weights(&self) -> WeightsInfo {
        WeightsInfo { dtype: Dtype::F32, n_bytes: 0 }
    }

    fn device(&self) -> &'static str {
        "a device that computes nothing"
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        let mut outputs = self.stock.take();
        for row in &batch.rows {
            for request in &row.outputs {
                let token = request.position as Token % 100;
                outputs.push(Output::Sampled(Candidate { token, logprob: -1.0 }));
            }
        }
        self.under_way.push_back(outputs);
        Ok(())
    }

    fn supply(&mut self, _: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        unreachable!("no draw is late here")
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        unreachable!("no draw is late here")
    }

    fn oldest_step(&mut self) -> OldestStep {
        match &self.gate {
            None => OldestStep::ByCaller,
            Some(gate) if gate.load(Ordering::SeqCst) => OldestStep::Done,
            Some(_) => OldestStep::OnDevice,
        }
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        let outputs = self.under_way.pop_front().expect("a step is under way");
        Ok(Collected { outputs, elapsed: Duration::from_millis(1) })
    }

    fn n_pages(&self) -> usize {
        self.limits.n_pages
    }

    fn resize(&mut self, _: usize) -> Result<(), BackendError> {
        unreachable!("one model keeps its pages")
    }

    fn move_pages(&mut self, _: &[(PageId, PageId)]) -> Result<(), BackendError> {
        unreachable!("there are pages for all")
    }

    fn move_cells(&mut self, _: &[CellMove]) -> Result<(), BackendError> {
        unreachable!("nobody guesses")
    }

    fn swap_out(&mut self, _: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        unreachable!("there are pages for all")
    }

    fn swap_in(&mut self, _: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        unreachable!("there are pages for all")
    }
}
