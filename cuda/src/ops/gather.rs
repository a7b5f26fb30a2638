//! Rows by index: those that need logits.

use super::common::{ROW_THREADS, Rows, expect, expect_i32, expect_rows, i32_of};
use crate::driver::params;
use crate::{CudaError, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// The kernel's source.
#[must_use]
pub fn source() -> Source {
    Source::new("gather.cu", include_str!("gather.cu")).with("N_THREADS", ROW_THREADS)
}

/// What the kernel copies at once.
const WORD_BYTES: usize = 16;

/// As in `gather.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GatherParams {
    x: Pointer,
    rows: Pointer,
    n_rows: Pointer,
    y: Pointer,
    row_len: i32,
    unused: i32,
}
params!(GatherParams, 40);

/// `y[r] = x[indices[r]]`; see `gather.cu`.
#[derive(Clone, Debug)]
pub struct Gather {
    kernel: Kernel<GatherParams>,
}

impl Gather {
    /// Finds the kernel in the module of [`source`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("gather")? })
    }

    /// Copies rows of any type. Every index is below the number of rows of `x`.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or a row is not a multiple of 16 bytes.
    pub fn run(
        &self,
        stream: &Stream,
        rows: Rows,
        row_bytes: usize,
        x: Slice,       // [.., row_bytes]
        indices: Slice, // i32 [rows]
        y: Slice,       // [rows, row_bytes]
    ) -> Result<(), CudaError> {
        if rows.n_max == 0 {
            return Ok(());
        }
        assert!(row_bytes.is_multiple_of(WORD_BYTES), "a row has {row_bytes} bytes");
        expect_rows(rows);
        expect("x", x, row_bytes, 1);
        expect_i32("indices", indices, rows.n_max);
        expect("y", y, rows.n_max * row_bytes, 1);
        let params = GatherParams {
            x: x.into(),
            rows: indices.into(),
            n_rows: rows.n.into(),
            y: y.into(),
            row_len: i32_of(row_bytes / WORD_BYTES),
            unused: 0,
        };
        let launch = Launch { grid: (rows.n_max as u32, 1, 1), block: (ROW_THREADS, 1, 1), shared_bytes: 0 };
        // SAFETY: lengths were checked above; the caller keeps the indices inside `x`, and the count at most `n_max`.
        unsafe { launch.run(stream, &self.kernel, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        assert_compiles(source());
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let gather = Gather::new(&test.module(source())).expect("the kernel");
        let mut random = Random(5);
        for (n_x, n_max, n, row_bytes) in
            [(1, 1, 1, 16), (5, 3, 2, 48), (7, 9, 9, 16 * 257), (100, 33, 32, 16384), (3, 4, 3, 68 * 4)]
        {
            let x: Vec<u8> = (0..n_x * row_bytes).map(|_| random.next() as u8).collect();
            let indices: Vec<i32> = (0..n_max).map(|_| random.below(n_x) as i32).collect();
            let (d_x, d_indices) = (upload(&test, &x), upload(&test, &indices));
            let d_y = poisoned(&test, n_max * row_bytes);
            let count = Count::new(&test, n_max, n);
            gather
                .run(&test.stream, count.rows(), row_bytes, d_x.slice(), d_indices.slice(), d_y.slice())
                .expect("a launch");
            let got = download(&test, d_y.slice(), n_max * row_bytes, 0u8);
            for (r, &idx) in indices.iter().enumerate() {
                let row = &got[r * row_bytes..][..row_bytes];
                if r < n {
                    assert_eq!(
                        row,
                        &x[idx as usize * row_bytes..][..row_bytes],
                        "row {r} of {row_bytes} bytes"
                    );
                } else {
                    assert!(row.iter().all(|&byte| byte == 0xff), "written past the end");
                }
            }
        }
    }
}
