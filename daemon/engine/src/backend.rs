//! What executes batches on one device.

mod host_pieces;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::batch::{Batch, CellMove, HostPageId, LateMask, Output, PageId};
use crate::kept::KeptRow;
use crate::model::Dtype;
use crate::port::{Name, names};

pub use host_pieces::HostPiece;

/// KV positions in one page, in every layer.
pub const PAGE_LEN: usize = 16;

/// What one backend can hold and execute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Device pages that have addresses, numbered `0..n_pages`. [`Backend::n_pages`] of them have memory.
    pub n_pages: usize,
    /// Pages that get their memory, and lose it, together.
    pub n_granule_pages: usize,
    /// Pages of host memory that device pages can be moved to, numbered `0..n_host_pages`.
    pub n_host_pages: usize,
    /// Bytes of one page over all layers, keys and values.
    pub page_bytes: usize,
    /// The most rows (contexts) in one batch.
    pub n_rows_max: usize,
    /// The most tokens in one batch, over all rows.
    pub n_tokens_max: usize,
    /// Attention to a part of a prompt takes as long as for the next multiple of so many tokens.
    pub n_tile_tokens: usize,
    /// The layers of a step take as long as for the next multiple of so many tokens, over all rows.
    pub n_block_tokens: usize,
    /// Query heads that share keys and values.
    pub n_queries_per_key: usize,
    /// The most positions of one context.
    pub n_positions_max: usize,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Length of a hidden state.
    pub hidden_size: usize,
    /// Layers of the model. A hidden state after all of them has a row of logits made with it.
    pub n_layers: usize,
    /// Steps that can be under way at once: with two, the next one is planned before the last is taken in.
    pub n_steps_under_way: usize,
    /// Contexts with a slot below this keep what was drawn for them last, so that a row can begin with it.
    pub n_slots: usize,
    /// Contexts with a slot below this keep the hidden state of the last token that was asked about, so that a row of no
    /// tokens can ask about it again.
    pub n_states: usize,
    /// The most stretches of a context from which tokens were evicted that attention tells apart; none where the model's
    /// layers see windows of positions.
    pub n_stretches_max: usize,
    /// What a row of logits costs, in tokens: the output projection beside all layers.
    pub logits_tokens: f32,
    /// What steering takes beside the additions themselves.
    pub steering: SteeringTimes,
    /// What may be asked of one batch.
    pub asks: AskLimits,
}

/// What it takes to add vectors to tokens between layers, whatever the tokens and the vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteeringTimes {
    /// Nanoseconds by which a step with steered tokens is longer.
    pub step_ns: u64,
    /// Nanoseconds that it takes to bring 1,024 bytes of vectors to the device.
    pub kib_ns: u64,
}

impl SteeringTimes {
    /// Those of a device that adds where it computes the layers, from where the vectors are.
    pub const NONE: Self = Self { step_ns: 0, kib_ns: 0 };
}

/// What the rows of one batch may ask for together. What a single row asks may be more, if no other asks for the like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskLimits {
    /// Bytes of rows that are brought back whole: log-probabilities of the vocabulary, and hidden states, in f32.
    pub whole_bytes: usize,
    /// The longest list of most probable tokens. A longer one is read out of a row that is brought back whole.
    pub n_top_max: usize,
    /// Entries of all such lists.
    pub n_top_entries: usize,
    /// Scores. More of them in one request are read out of a row that is brought back whole.
    pub n_scores: usize,
    /// Bytes of masks and biases.
    pub mask_bytes: usize,
    /// Bytes of masks that come late.
    pub late_mask_bytes: usize,
    /// Bytes of masks and biases that programs are given, each counted once.
    pub given_bytes: usize,
    /// Pages of tokens, as [`n_history_pages`] counts them, that draws look at apart from the pages of their contexts: behind
    /// the nodes of trees of guesses, each for itself, and where tokens were evicted. A tree that needs more alone is cut.
    pub n_history_pages: usize,
}

/// Pages from the one with the first of the last `n_tokens` tokens before `end` up to the end of their row, as they lie in a
/// context from which nothing is gone; none where a draw looks at no tokens.
#[must_use]
pub fn n_history_pages(n_tokens: usize, end: usize, row_end: usize) -> usize {
    match n_tokens {
        0 => 0,
        n => row_end.div_ceil(PAGE_LEN) - (end - n) / PAGE_LEN,
    }
}

impl AskLimits {
    /// Of a device that has the outputs where they are wanted.
    pub const NONE: Self = Self {
        whole_bytes: usize::MAX,
        n_top_max: usize::MAX,
        n_top_entries: usize::MAX,
        n_scores: usize::MAX,
        mask_bytes: usize::MAX,
        late_mask_bytes: usize::MAX,
        given_bytes: usize::MAX,
        n_history_pages: usize::MAX,
    };
}

#[cfg(any(test, feature = "fuzzing"))]
impl Limits {
    /// Those of a device that computes nothing, whose steps have so many rows.
    pub(crate) fn of_nothing(n_rows_max: usize, n_pages: usize) -> Self {
        Self {
            n_pages,
            n_granule_pages: 1,
            n_host_pages: 0,
            page_bytes: 1,
            n_rows_max,
            n_tokens_max: 1 << 21,
            n_tile_tokens: 1,
            n_block_tokens: 1,
            n_queries_per_key: 1,
            n_positions_max: 1 << 17,
            vocab_size: 1000,
            hidden_size: 1,
            n_layers: 6,
            n_steps_under_way: 2,
            n_slots: 1 << 16,
            n_states: 0,
            n_stretches_max: 0,
            logits_tokens: 1.0,
            steering: SteeringTimes::NONE,
            asks: AskLimits::NONE,
        }
    }
}

/// The weights as a backend holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    /// A place for a row of logits that a step of this model writes and steps behind it read, of any model of the same
    /// vocabulary on the device; `None` if there is none left.
    fn keep_row(&mut self) -> Option<KeptRow> {
        None
    }

    /// Starts a step: the page copies, then the tokens of every row, then the outputs that the rows ask for. Steps, and
    /// the copies of pages between them, take effect in the order in which they are submitted; a device that works by
    /// itself is not waited for. There are never more than [`Limits::n_steps_under_way`].
    ///
    /// # Errors
    /// The step failed. Of the pages that the batch writes, the contents from the first token on that it writes are then
    /// undefined; of those that it copies something to, all.
    /// [`BackendError::damage`] says whether there is any use in another step.
    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError>;

    /// Brings the late masks of the step that was submitted last and lets it draw. It is called once for each step with a
    /// draw that waits for its mask, before the step is collected and before another is submitted; no other step needs
    /// it. A late draw whose mask is not among these sits out: its output is [`Output::SatOut`], and the token that its
    /// slot keeps is no longer known.
    ///
    /// Returns the rows that sit out although their masks are among these: the device has no room for them.
    ///
    /// # Errors
    /// The step failed, as for [`Self::submit`]; it is no longer under way.
    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError>;

    /// Whether the step that was submitted last has come as far as it can before [`Self::supply`]: its layers are done.
    ///
    /// # Errors
    /// The step failed, as for [`Self::submit`]; it is no longer under way.
    fn waits_for_masks(&mut self) -> Result<bool, BackendError>;

    /// Where the oldest step under way is computed, and whether it is known to be done.
    fn oldest_step(&mut self) -> OldestStep {
        OldestStep::ByCaller
    }

    /// Waits for the oldest step under way. Its outputs come in the order of the requests: row by row, within a row in
    /// the row's order.
    ///
    /// # Errors
    /// The step failed, as for [`Self::submit`]; it is no longer under way.
    ///
    /// # Panics
    /// No step is under way.
    fn collect(&mut self) -> Result<Collected, BackendError>;

    /// Runs a step to its end while no other is under way; returns its outputs.
    ///
    /// # Errors
    /// As for [`Self::submit`] and [`Self::collect`].
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Vec<Output>, BackendError> {
        self.submit(batch)?;
        Ok(self.collect()?.outputs)
    }

    /// Device pages that have memory now: those below this number.
    fn n_pages(&self) -> usize;

    /// Gives memory to the pages below `n_pages` and takes it from all others; a multiple of [`Limits::n_granule_pages`], or
    /// all of [`Limits::n_pages`]. No step under way touches a page that loses its memory, and none that is submitted
    /// later touches one without. What is in pages that keep theirs stays, and steps under way are not waited for.
    ///
    /// # Errors
    /// There is no memory for more; nothing has changed then.
    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError>;

    /// Copies device pages to other device pages, in order with steps and with the other moves. No page is both a source
    /// and a destination.
    ///
    /// # Errors
    /// The copies failed. The contents of the destinations are then undefined.
    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError>;

    /// Copies tokens of pages, one after the other, in order with steps and with the other moves: a cell may be read by one
    /// and written by a later one. The tokens beside the pages that are written to are no longer known.
    ///
    /// # Errors
    /// The copies failed. The contents of the pages that are written to are then undefined.
    fn move_cells(&mut self, moves: &[CellMove]) -> Result<(), BackendError>;

    /// Copies device pages to host pages.
    ///
    /// # Errors
    /// The copies failed. The contents of the host pages are then undefined.
    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError>;

    /// Copies host pages to device pages.
    ///
    /// # Errors
    /// The copies failed. The contents of the device pages are then undefined.
    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError>;

    /// Whether a move had to wait until a host page had memory, since this was asked last: what the moves took says nothing of
    /// the link then.
    fn take_waited_for_host_pages(&mut self) -> bool {
        false
    }

    /// Whether moves that were submitted are not done: what waits for them waits for the steps before them as well.
    fn is_moving(&mut self) -> bool {
        false
    }

    /// Whether memory of host pages goes back to the system by [`Self::release_host_pages`].
    fn can_release_host_pages(&self) -> bool {
        false
    }

    /// Gives memory of these host pages, in which nothing is that is wanted, back to the system as far as that can be, until so many
    /// bytes have gone; moves that were submitted are waited for. A page has memory again once something moves there. Returns how many
    /// bytes went.
    fn release_host_pages(&mut self, _free: &[HostPageId], _at_most: u64) -> u64 {
        0
    }

    /// Whether the system did not take memory back that [`Self::release_host_pages`] was to give it last: then it is of no use to
    /// give anything up for it.
    fn keeps_host_memory(&self) -> bool {
        false
    }

    /// Moves what is in host pages other than these, of which each is free, to some of these, so that [`Self::release_host_pages`]
    /// finds more to give back: so many bytes at most, a piece more or less. Moves that were submitted are waited for. Returns from
    /// where to where; what is in the first page of each is not wanted any more.
    fn gather_host_pages(&mut self, _free: &[HostPageId], _at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        Vec::new()
    }

    /// The bytes of its pages; `None` where they are of no use to another process.
    fn kv_bytes(&mut self) -> Option<&mut dyn KvBytes> {
        None
    }
}

/// The bytes of a backend's pages, as they are kept where no backend is. No step is under way when they are read or written;
/// moves that were submitted are waited for.
pub trait KvBytes {
    /// What makes bytes those of this backend: between two of the same format, for the same weights, they can be exchanged.
    fn format(&self) -> String;

    /// Adds what is in these pages to `into`, [`Limits::page_bytes`] each.
    ///
    /// # Errors
    /// The copies failed.
    fn read(&mut self, pages: &[KvPlace], into: &mut Vec<u8>) -> Result<(), BackendError>;

    /// Fills host pages that no move reads or writes with what was read of others, `from` being as long as all of them.
    ///
    /// # Errors
    /// The copies failed. The contents of the pages are then undefined.
    fn write(&mut self, pages: &[HostPageId], from: &[u8]) -> Result<(), BackendError>;
}

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPlace {
    /// On the device.
    Device(PageId),
    /// In host memory.
    Host(HostPageId),
}

/// What came of a step.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// In the order of the step's requests.
    pub outputs: Vec<Output>,
    /// How long the device worked on it.
    pub elapsed: Duration,
}

/// Where the oldest step under way is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldestStep {
    /// By the thread that calls [`Backend::submit`] and [`Backend::collect`], within them.
    ByCaller,
    /// On a device that works by itself.
    OnDevice,
    /// Nowhere: it is known to be done, and [`Backend::collect`] does not wait.
    Done,
}

/// How far the damage of a failed call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Damage {
    /// It ends with the call: what the call should have written is undefined, the next one may work.
    Call,
    /// The device is lost to this process, for every model on it, until it is opened again.
    Device,
}

/// A call of a backend that failed.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum BackendError {
    /// There was no memory for something that the step needs. The next step may find some.
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
        #[serde(with = "names")]
        call: Name,
        /// What the driver said.
        reason: String,
        /// What still works after it.
        damage: Damage,
    },
}

impl BackendError {
    /// How far the damage goes.
    #[must_use]
    pub fn damage(&self) -> Damage {
        match self {
            Self::OutOfMemory { .. } => Damage::Call,
            Self::Device { damage, .. } => *damage,
        }
    }
}
