//! Elements of a checkpoint in the type that is wanted.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use trellis_engine::model::{Checkpoint, Dtype, ModelError};

use crate::Plain;

// Files, host and device agree on the order of bytes.
const _: () = assert!(cfg!(target_endian = "little"));

/// Elements converted at a time: stored, as f32 and as wanted they are at most 384 KiB, which stay in the L2 of a
/// core.
const CHUNK_LEN: usize = 32 << 10;

/// Memory for conversions, taken when first needed.
#[derive(Default)]
pub(super) struct Scratch {
    stored: Vec<f32>, // room for CHUNK_LEN elements of any type
    values: Vec<f32>, // [CHUNK_LEN]
}

/// Reads elements of a tensor from `start` on, as `dtype`: as stored, or rounded to the nearest.
///
/// # Panics
/// `out` is not a whole number of elements, or not aligned to them.
pub(super) fn read(
    checkpoint: &Checkpoint,
    tensor: &str,
    start: usize,
    dtype: Dtype,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), ModelError> {
    let stored = checkpoint.tensor(tensor).map_or(dtype, |info| info.dtype);
    let stored_bytes = stored.n_bytes();
    if stored == dtype {
        return checkpoint.read_bytes_at(tensor, start * stored_bytes, out);
    }
    scratch.stored.resize(CHUNK_LEN, 0.0);
    scratch.values.resize(CHUNK_LEN, 0.0);
    for (chunk_idx, out) in out.chunks_mut(CHUNK_LEN * dtype.n_bytes()).enumerate() {
        let n_elements = out.len() / dtype.n_bytes();
        let bytes = &mut bytes_mut(&mut scratch.stored)[..n_elements * stored_bytes];
        checkpoint.read_bytes_at(tensor, (start + chunk_idx * CHUNK_LEN) * stored_bytes, bytes)?;
        let values = &mut scratch.values[..n_elements];
        match stored {
            Dtype::F32 => values.copy_from_slice(view(bytes)),
            Dtype::F16 => view::<f16>(bytes).convert_to_f32_slice(values),
            Dtype::Bf16 => view::<bf16>(bytes).convert_to_f32_slice(values),
        }
        match dtype {
            Dtype::F32 => view_mut(out).copy_from_slice(values),
            Dtype::F16 => view_mut::<f16>(out).convert_from_f32_slice(values),
            Dtype::Bf16 => view_mut::<bf16>(out).convert_from_f32_slice(values),
        }
    }
    Ok(())
}

/// The bytes of numbers.
pub(super) fn bytes_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    let n_bytes = size_of_val(values);
    // SAFETY: a `Plain` is initialised bytes throughout, any bytes are a valid one, and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), n_bytes) }
}

/// Bytes as numbers.
fn view<T: Plain>(bytes: &[u8]) -> &[T] {
    // SAFETY: any bytes are a valid `Plain`.
    let (before, values, after) = unsafe { bytes.align_to() };
    assert!(before.is_empty() && after.is_empty(), "whole and aligned numbers");
    values
}

fn view_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: any bytes are a valid `Plain`, and a `Plain` is initialised bytes throughout.
    let (before, values, after) = unsafe { bytes.align_to_mut() };
    assert!(before.is_empty() && after.is_empty(), "whole and aligned numbers");
    values
}
