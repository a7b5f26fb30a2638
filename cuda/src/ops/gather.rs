//! Rows by index: those that need logits, of which some are kept for a later step.

use super::common::{ROW_THREADS, RowCount, expect, expect_i32, expect_rows, i32_of};
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
    tokens: Pointer,
    rows: Pointer,
    keeps: Pointer,
    n_rows: Pointer,
    y: Pointer,
    states: Pointer,
    row_len: i32,
    unused: i32,
}
params!(GatherParams, 56);

/// Where rows come from, and which of them are kept.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Row of each, or `-1 - s` for state `s`.
    pub indices: Slice, // i32 [rows]
    /// State that takes each, or a negative number. None is read and written.
    pub keeps: Slice, // i32 [rows]
    /// What was kept, by number.
    pub states: Slice, // [n_states, row_bytes]
}

/// `y[r] = x[indices[r]]`, and so into states; see `gather.cu`.
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

    /// Copies rows of any type into `y`, if there is one, and into the states. Every index is below the number of rows of
    /// `x`, and every state below that of the states.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or a row is not a multiple of 16 bytes.
    pub fn run(
        &self,
        stream: &Stream,
        rows: RowCount,
        row_bytes: usize,
        x: Slice, // [.., row_bytes]
        kept: Kept,
        y: Option<Slice>, // [rows, row_bytes]
    ) -> Result<(), CudaError> {
        if rows.n_max == 0 {
            return Ok(());
        }
        assert!(row_bytes.is_multiple_of(WORD_BYTES), "a row has {row_bytes} bytes");
        expect_rows(rows);
        expect("x", x, row_bytes, 1);
        expect("states", kept.states, row_bytes, 1);
        expect_i32("indices", kept.indices, rows.n_max);
        expect_i32("keeps", kept.keeps, rows.n_max);
        if let Some(y) = y {
            expect("y", y, rows.n_max * row_bytes, 1);
        }
        let params = GatherParams {
            tokens: x.into(),
            rows: kept.indices.into(),
            keeps: kept.keeps.into(),
            n_rows: rows.n.into(),
            y: y.into(),
            states: kept.states.into(),
            row_len: i32_of(row_bytes / WORD_BYTES),
            unused: 0,
        };
        let launch = Launch { grid: (rows.n_max as u32, 1, 1), block: (ROW_THREADS, 1, 1), shared_bytes: 0 };
        // SAFETY: lengths were checked above; the caller keeps the indices inside `x` and the states, and the count at most
        // `n_max`.
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
        let n_states = 4;
        for (n_x, n_max, n, row_bytes) in
            [(1, 1, 1, 16), (5, 3, 2, 48), (7, 9, 9, 16 * 257), (100, 33, 32, 16384), (3, 4, 3, 68 * 4)]
        {
            let mut bytes = |n: usize| (0..n * row_bytes).map(|_| random.next() as u8).collect::<Vec<u8>>();
            let (x, states) = (bytes(n_x), bytes(n_states));
            // Every third row comes from state 0 or 1; the first and the fifth go to states 2 and 3.
            let index = |r: usize| match r % 3 {
                2 => -1 - (r % 2) as i32,
                _ => random.below(n_x) as i32,
            };
            let indices: Vec<i32> = (0..n_max).map(index).collect();
            let keep = |r| [(0, 2), (4, 3)].iter().find(|kept| kept.0 == r).map_or(-1, |kept| kept.1);
            let keeps: Vec<i32> = (0..n_max).map(keep).collect();
            let (d_x, d_indices, d_keeps) =
                (upload(&test, &x), upload(&test, &indices), upload(&test, &keeps));
            let row_of = |r: usize| match usize::try_from(indices[r]) {
                Ok(idx) => &x[idx * row_bytes..][..row_bytes],
                Err(_) => &states[(-1 - indices[r]) as usize * row_bytes..][..row_bytes],
            };
            for has_y in [true, false] {
                let d_states = upload(&test, &states);
                let d_y = poisoned(&test, n_max * row_bytes);
                let count = DeviceCount::new(&test, n_max, n);
                let kept =
                    Kept { indices: d_indices.slice(), keeps: d_keeps.slice(), states: d_states.slice() };
                gather
                    .run(&test.stream, count.rows(), row_bytes, d_x.slice(), kept, has_y.then(|| d_y.slice()))
                    .expect("a launch");
                let got = download(&test, d_y.slice(), n_max * row_bytes, 0u8);
                for (r, row) in got.chunks(row_bytes).enumerate() {
                    match has_y && r < n {
                        true => assert_eq!(row, row_of(r), "row {r} of {row_bytes} bytes"),
                        false => assert!(row.iter().all(|&byte| byte == 0xff), "written past the end"),
                    }
                }
                let mut expected = states.clone();
                for r in (0..n).filter(|&r| keeps[r] >= 0) {
                    expected[keeps[r] as usize * row_bytes..][..row_bytes].copy_from_slice(row_of(r));
                }
                assert!(download(&test, d_states.slice(), expected.len(), 0u8) == expected, "states");
            }
        }
    }
}
