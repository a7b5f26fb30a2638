//! Rows of logits that are kept for draws of other models.

use std::sync::{PoisonError, RwLock};

use crate::batch::OutputFault;
use crate::kept::KeptRow;
use crate::sampling::Distribution;

/// One row.
#[derive(Default)]
struct Row(RwLock<Vec<f32>>); // [vocab_size] once it is written

/// A place for a row. The memory is the processor's: there is always one more.
pub(super) fn place() -> KeptRow {
    KeptRow::new(Row::default())
}

/// Writes a row of logits.
pub(super) fn write(row: &KeptRow, logits: &[f32]) -> Result<(), OutputFault> {
    Distribution::new(logits)?;
    let mut place = row.get::<Row>().0.write().unwrap_or_else(PoisonError::into_inner);
    place.clear();
    place.extend_from_slice(logits);
    Ok(())
}

/// Reads rows; nothing is written to them meanwhile. One that was not written after all is not a number.
pub(super) fn read<T>(
    rows: &[KeptRow],
    vocab_size: usize,
    read: impl FnOnce(&[&[f32]]) -> Result<T, OutputFault>,
) -> Result<T, OutputFault> {
    let guards: Vec<_> =
        rows.iter().map(|row| row.get::<Row>().0.read().unwrap_or_else(PoisonError::into_inner)).collect();
    let rows: Vec<&[f32]> = guards.iter().map(|row| row.as_slice()).collect();
    match rows.iter().all(|row| row.len() == vocab_size) {
        true => read(&rows),
        false => Err(OutputFault::NotANumber),
    }
}
