//! A device that computes nothing and allocates nothing in a steady state.

use std::collections::VecDeque;
use std::time::Duration;

use crate::backend::{Backend, BackendError, Collected, Limits, WeightsInfo};
use crate::batch::{Batch, Candidate, HostPageId, LateMask, Output, PageId, Token};
use crate::model::Dtype;

/// Answers at once.
pub(super) struct Device {
    pub(super) limits: Limits,
    /// The outputs of the steps under way.
    pub(super) under_way: VecDeque<Vec<Output>>,
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
        let mut outputs = Vec::with_capacity(batch.rows.len());
        for row in &batch.rows {
            for request in &row.outputs {
                let token = request.position as Token % 100;
                outputs.push(Output::Sampled(Candidate { token, logprob: -1.0 }));
            }
        }
        self.under_way.push_back(outputs);
        Ok(())
    }

    fn supply(&mut self, _: &[LateMask<'_>]) -> Result<(), BackendError> {
        unreachable!("no draw is late here")
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        unreachable!("no draw is late here")
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

    fn swap_out(&mut self, _: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        unreachable!("there are pages for all")
    }

    fn swap_in(&mut self, _: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        unreachable!("there are pages for all")
    }
}
