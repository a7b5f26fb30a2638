//! Rows of logits that stay on a card, for draws of other models.
//!
//! - Comes in: a length of rows; models whose rows are as long share the places.
//! - Goes out: a place for one row, free again when it is dropped.
//! - Must not happen: a place written to before what was launched to read it has run. All steps go through one stream, and a
//!   place that is given out anew is written to by a step behind all that read it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, PoisonError};

use trellis_engine::KeptRow;

use crate::memory::{Driver, Pool};
use crate::{Buffer, CudaError, Gpu, Slice};

/// Bytes of all places, as long as that is not more than so many rows: one for each of 128 contexts over 128K tokens.
const KEPT_BYTES_MAX: usize = 64 << 20;
const N_ROWS_MAX: usize = 1024;

/// The places of rows of one length.
#[derive(Debug)]
pub(crate) struct KeptRows {
    rows: Buffer, // f32 [n_rows, vocab_size]
    vocab_size: usize,
    free: FreeRows,
}

/// The places that nothing has, by their numbers. The lowest is taken first, so that rows that are asked for together mostly
/// lie together and are copied as one.
#[derive(Clone, Debug)]
pub(crate) struct FreeRows(Arc<Mutex<BinaryHeap<Reverse<u32>>>>);

/// The place of one row.
#[derive(Debug)]
pub(crate) struct KeptPlace {
    pub(crate) idx: u32,
    free: FreeRows,
}

impl KeptRows {
    /// Bytes that they take of a card.
    pub(crate) fn n_bytes(vocab_size: usize) -> usize {
        Pool::<Driver>::block_bytes(n_rows(vocab_size) * vocab_size * size_of::<f32>())
    }

    /// Takes the memory.
    pub(crate) fn new(gpu: &Gpu, vocab_size: usize) -> Result<Self, CudaError> {
        let n_rows = n_rows(vocab_size);
        let rows = gpu.allocate("rows of logits that are kept", n_rows * vocab_size * size_of::<f32>())?;
        Ok(Self { rows, vocab_size, free: FreeRows::new(n_rows) })
    }

    pub(crate) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// A place for one more row, if there is one.
    pub(crate) fn take(&self) -> Option<KeptRow> {
        self.free.take()
    }

    /// That a row has one of these places.
    pub(crate) fn check(&self, row: &KeptRow) {
        let place: &KeptPlace = row.get();
        assert!(Arc::ptr_eq(&place.free.0, &self.free.0), "models that share rows are on one card");
    }

    /// All places.
    pub(crate) fn slice(&self) -> Slice {
        self.rows.slice()
    }

    /// So many places from this one on.
    pub(crate) fn rows(&self, idx: u32, n: usize) -> Slice {
        let row_bytes = self.vocab_size * size_of::<f32>();
        self.slice().part(idx as usize * row_bytes, n * row_bytes)
    }
}

impl FreeRows {
    /// So many, all of them free.
    pub(crate) fn new(n: usize) -> Self {
        Self(Arc::new(Mutex::new((0..n as u32).map(Reverse).collect())))
    }

    pub(crate) fn take(&self) -> Option<KeptRow> {
        let Reverse(idx) = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(KeptRow::new(KeptPlace { idx, free: self.clone() }))
    }
}

impl Drop for KeptPlace {
    fn drop(&mut self) {
        self.free.0.lock().unwrap_or_else(PoisonError::into_inner).push(Reverse(self.idx));
    }
}

fn n_rows(vocab_size: usize) -> usize {
    (KEPT_BYTES_MAX / (vocab_size * size_of::<f32>())).clamp(1, N_ROWS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_one_row_s_and_free_again_after_it() {
        let free = FreeRows::new(3);
        let idx = |row: &KeptRow| row.get::<KeptPlace>().idx;
        let rows: Vec<KeptRow> = (0..3).map(|_| free.take().expect("one is free")).collect();
        assert_eq!(rows.iter().map(idx).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(free.take().is_none());
        let held = rows[1].clone();
        drop(rows);
        let rows = [free.take(), free.take()].map(|row| row.expect("two are free"));
        assert!(free.take().is_none() && rows.iter().all(|row| idx(row) != 1));
        drop(held);
        assert_eq!(free.take().as_ref().map(idx), Some(1));
    }

    #[test]
    fn places_take_so_much_memory_and_no_more() {
        assert_eq!((n_rows(128_256), n_rows(300), n_rows(1 << 25)), (130, 1024, 1));
    }
}
