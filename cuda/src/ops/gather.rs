//! Rows by index: those that need logits.

use super::common::{Rows, expect, expect_i32, expect_rows, i32_of};
use crate::{Arg, CudaError, Kernel, Launch, Module, Slice, Source, Stream};

/// The kernels' source.
pub const SOURCE: Source =
    Source { file: "gather.cu", text: concat!(include_str!("common.cuh"), include_str!("gather.cu")) };

/// `y[r] = x[indices[r]]`; see `gather.cu`.
#[derive(Clone, Debug)]
pub struct Gather {
    by_16_bytes: Kernel,
    by_2_bytes: Kernel,
}

impl Gather {
    /// Finds the kernels in the module of [`SOURCE`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module) -> Result<Self, CudaError> {
        Ok(Self {
            by_16_bytes: module.kernel("gather_16_bytes")?,
            by_2_bytes: module.kernel("gather_2_bytes")?,
        })
    }

    /// Copies rows of any type. Every index is below the number of rows of `x`.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or a row has an odd number of bytes.
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
        assert!(row_bytes.is_multiple_of(2), "a row has {row_bytes} bytes");
        expect_rows(rows);
        expect("x", x, row_bytes, 1);
        expect_i32("indices", indices, rows.n_max);
        expect("y", y, rows.n_max * row_bytes, 1);
        let (kernel, word_bytes) =
            if row_bytes.is_multiple_of(16) { (&self.by_16_bytes, 16) } else { (&self.by_2_bytes, 2) };
        let row_len = Arg::I32(i32_of(row_bytes / word_bytes));
        let args = [x.into(), indices.into(), rows.n.into(), y.into(), row_len];
        let launch = Launch { grid: (rows.n_max as u32, 1, 1), block: (256, 1, 1), shared_bytes: 0 };
        // SAFETY: the kernel's arguments in order; lengths were checked above, and the caller keeps the indices
        // inside `x`.
        unsafe { launch.run(stream, kernel, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        assert_compiles(SOURCE);
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let gather = Gather::new(&test.module(SOURCE)).expect("the kernels");
        let mut random = Random(5);
        for (n_x, n_max, n, row_bytes) in
            [(1, 1, 1, 2), (5, 3, 2, 34), (7, 9, 9, 48), (100, 33, 32, 16384), (3, 4, 3, 66 * 4)]
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
