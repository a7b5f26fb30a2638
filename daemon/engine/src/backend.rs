//! What executes batches on one device.

use crate::batch::{Batch, HostPageId, Output, PageId};
use crate::model::Dtype;

/// KV positions in one page, in every layer.
pub const PAGE_LEN: usize = 16;

/// What one backend can hold and execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Device pages, numbered `0..n_pages`.
    pub n_pages: usize,
    /// Pages of host memory that device pages can be moved to, numbered `0..n_host_pages`.
    pub n_host_pages: usize,
    /// Bytes of one page over all layers, keys and values.
    pub page_bytes: usize,
    /// The most rows (contexts) in one batch.
    pub n_rows_max: usize,
    /// The most tokens in one batch, over all rows.
    pub n_tokens_max: usize,
    /// The most positions of one context.
    pub n_positions_max: usize,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Length of a hidden state.
    pub hidden_size: usize,
}

/// The weights as a backend holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightsInfo {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Bytes of all weights; a tied output projection is not counted twice.
    pub n_bytes: u64,
}

/// Executes batches on one device. Used by the engine thread alone.
///
/// The output of a row is a function of that row's tokens and of nothing else in the batch: not of the number of
/// rows, not of how a prompt was cut into chunks. Seeded results rest on this. The CPU holds it bit for bit. CUDA
/// holds it up to rounding of its element type, since other sizes take other kernels with other orders of
/// summation: two tokens whose logits are that close can change places.
pub trait Backend: Send {
    /// What this backend can hold and execute.
    fn limits(&self) -> &Limits;

    /// The weights that it holds.
    fn weights(&self) -> WeightsInfo;

    /// The device's name for people, such as `NVIDIA H100 80GB HBM3` or `cpu (2 threads)`.
    fn device(&self) -> &str;

    /// Runs the page copies, then the tokens of every row, then the outputs the rows ask for.
    ///
    /// Outputs come in the order of the requests: row by row, within a row in the row's order.
    ///
    /// # Errors
    /// The device failed. The contents of the pages that the batch writes are then undefined.
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Vec<Output>, BackendError>;

    /// Copies device pages to host pages.
    ///
    /// # Errors
    /// The device failed.
    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError>;

    /// Copies host pages to device pages.
    ///
    /// # Errors
    /// The device failed.
    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError>;
}

/// A device that failed; the engine cannot go on with it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BackendError {
    /// Memory that was promised at start-up could not be had.
    #[error("{device}: {needed_bytes} bytes needed, {free_bytes} free")]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// The driver or a library reported an error.
    #[error("{device}: {call}: {reason}")]
    Device {
        /// The device's name.
        device: String,
        /// The call that failed.
        call: &'static str,
        /// What the driver said.
        reason: String,
    },
}
