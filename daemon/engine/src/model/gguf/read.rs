//! Elements of a GGUF file in the order and the type in which a decoder reads them.
//!
//! What is quantised becomes f32, block by block and never a tensor at once. The rows of Q and K of `llama` models are stored in
//! the order in which ggml rotates them, and are read in that of transformers.

use std::io;

use super::super::source::RangeFile;
use super::blocks::{BLOCK_LEN_MAX, Encoding};

/// Stored bytes that are read at once.
const CHUNK_BYTES: usize = 64 << 10;

/// The order of the rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Rows {
    /// As they are stored.
    AsStored,
    /// Of each head the rows are stored by pairs that are rotated together, `(0, 1), (2, 3)`, and read by halves:
    /// `(0, n / 2), (1, n / 2 + 1)`. `permute` in llama.cpp's `convert_hf_to_gguf.py` is the other way.
    ByHalves {
        /// Rows of a head.
        head_dim: usize,
        /// Elements of a row.
        row_len: usize,
    },
}

/// Where a tensor lies, and how.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Stored {
    pub(in super::super) offset: u64,
    pub(in super::super) encoding: Encoding,
    pub(in super::super) rows: Rows,
}

impl Rows {
    fn stored(self, row_idx: usize) -> usize {
        match self {
            Self::AsStored => row_idx,
            Self::ByHalves { head_dim, .. } => {
                let (head_idx, idx) = (row_idx / head_dim, row_idx % head_dim);
                let (half, pair_idx) = (idx / (head_dim / 2), idx % (head_dim / 2));
                head_idx * head_dim + 2 * pair_idx + half
            }
        }
    }
}

impl Stored {
    /// Fills `out` with the bytes of the elements as they are read, from byte `start` on.
    pub(in super::super) fn read(
        &self,
        file: &RangeFile,
        mut start: u64,
        mut out: &mut [u8],
    ) -> io::Result<()> {
        let Rows::ByHalves { row_len, .. } = self.rows else {
            return self.read_stored(file, 0, start, out);
        };
        let row_bytes = (row_len * self.encoding.read_dtype().n_bytes()) as u64;
        while !out.is_empty() {
            let (row_idx, within) = ((start / row_bytes) as usize, start % row_bytes);
            let n = usize::try_from(row_bytes - within).map_or(out.len(), |n| n.min(out.len()));
            let (part, rest) = out.split_at_mut(n);
            let n_blocks_before = self.rows.stored(row_idx) * row_len / self.encoding.block_len();
            self.read_stored(file, n_blocks_before as u64, within, part)?;
            (start, out) = (start + n as u64, rest);
        }
        Ok(())
    }

    /// As [`Self::read`], of elements in the order of the file, from one block on.
    fn read_stored(
        &self,
        file: &RangeFile,
        n_blocks_before: u64,
        mut start: u64,
        mut out: &mut [u8],
    ) -> io::Result<()> {
        let (block_len, block_bytes) = (self.encoding.block_len(), self.encoding.block_bytes());
        let base = self.offset + n_blocks_before * block_bytes as u64;
        if let Encoding::Plain(_) = self.encoding {
            return file.read_exact_at(out, base + start);
        }
        let read_bytes = block_len * self.encoding.read_dtype().n_bytes();
        let n_most = CHUNK_BYTES / block_bytes;
        let mut stored = vec![0; n_most.min(out.len() / read_bytes + 2) * block_bytes];
        let mut values = [0.0_f32; BLOCK_LEN_MAX];
        let values = &mut values[..block_len];
        while !out.is_empty() {
            let (block_idx, skipped) = (start / read_bytes as u64, (start % read_bytes as u64) as usize);
            let n_blocks = (skipped + out.len()).div_ceil(read_bytes).min(stored.len() / block_bytes);
            let stored = &mut stored[..n_blocks * block_bytes];
            file.read_exact_at(stored, base + block_idx * block_bytes as u64)?;
            let mut skipped = skipped;
            for block in stored.chunks_exact(block_bytes) {
                self.encoding.dequantize(block, values);
                let n = (read_bytes - skipped).min(out.len());
                let (part, rest) = out.split_at_mut(n);
                copy_bytes(values, skipped, part);
                (start, out, skipped) = (start + n as u64, rest, 0);
            }
        }
        Ok(())
    }
}

/// Copies the little-endian bytes of values, from byte `start` on.
fn copy_bytes(values: &[f32], start: usize, out: &mut [u8]) {
    if start.is_multiple_of(4) && out.len().is_multiple_of(4) {
        for (four, value) in out.chunks_exact_mut(4).zip(&values[start / 4..]) {
            four.copy_from_slice(&value.to_le_bytes());
        }
        return;
    }
    for (idx, byte) in out.iter_mut().enumerate() {
        *byte = values[(start + idx) / 4].to_le_bytes()[(start + idx) % 4];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two heads of four rows of 32 elements in Q8_0, each row full of its number.
    fn rows() -> (RangeFile, Stored) {
        let row = |idx: u8| [&half::f16::ONE.to_le_bytes()[..], &[idx; 32]].concat();
        let bytes: Vec<u8> = (0..8).flat_map(row).collect();
        let stored =
            Stored { offset: 3, encoding: Encoding::Q8_0, rows: Rows::ByHalves { head_dim: 4, row_len: 32 } };
        (RangeFile::Memory([vec![0; 3], bytes].concat().leak()), stored)
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
    }

    #[test]
    fn rows_of_a_head_are_read_by_halves() {
        let (file, stored) = rows();
        let mut out = vec![0; 8 * 32 * 4];
        stored.read(&file, 0, &mut out).expect("it is there");
        let firsts: Vec<f32> = floats(&out).chunks(32).map(|row| row[0]).collect();
        assert_eq!(firsts, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert!(floats(&out).chunks(32).all(|row| row.iter().all(|value| *value == row[0])));
    }

    #[test]
    fn any_range_has_the_bytes_of_the_whole() {
        let (file, by_halves) = rows();
        for stored in [by_halves, Stored { rows: Rows::AsStored, ..by_halves }] {
            let mut whole = vec![0; 8 * 32 * 4];
            stored.read(&file, 0, &mut whole).expect("it is there");
            for (start, len) in [(0, 1), (3, 130), (127, 2), (128, 128), (509, 515), (1000, 24), (1, 1023)] {
                let mut part = vec![0; len];
                stored.read(&file, start as u64, &mut part).expect("it is there");
                assert_eq!(part, whole[start..start + len], "{start} {len} {:?}", stored.rows);
            }
        }
    }
}
