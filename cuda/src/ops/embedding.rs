//! Token embeddings into the residual stream, and tokens beside their pages.

use super::common::{
    Dtype, PAGE_LEN, ROW_THREADS, RowCount, expect, expect_i32, expect_rows, i32_of, over_rows, source_for,
};
use crate::driver::params;
use crate::{CudaError, Kernel, Module, Pointer, Slice, Source, Stream};

/// The kernel's source, for a table of type `dtype`.
#[must_use]
pub fn source(dtype: Dtype) -> Source {
    let text = concat!(include_str!("common.cuh"), include_str!("embedding.cu"));
    source_for("embedding.cu", text, dtype, ROW_THREADS).with("PAGE_LEN", PAGE_LEN)
}

/// As in `embedding.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct EmbedParams {
    tokens: Pointer,
    n_tokens: Pointer,
    slots: Pointer,
    cells: Pointer,
    page_tokens: Pointer,
    table: Pointer,
    x: Pointer,
    hidden: i32,
    unused: i32,
}
params!(EmbedParams, 64);

/// Tokens as the host names them.
#[derive(Clone, Copy, Debug)]
pub struct TokenIds {
    /// A token, or `-1 - s` for the one that `slots[s]` holds.
    pub ids: Slice, // i32 [tokens]
    /// Tokens that only the device knows.
    pub slots: Slice, // i32
}

/// Where tokens are noted: beside the pages of their keys and values.
#[derive(Clone, Copy, Debug)]
pub struct TokenPlaces {
    /// Cell of each, counted from the first of page 0.
    pub cells: Slice, // u32 [tokens]
    /// The tokens of all pages.
    pub page_tokens: Slice, // i32 [n_pages, PAGE_LEN]
}

/// `x[t] = table[tokens[t]]`; see `embedding.cu`.
#[derive(Clone, Debug)]
pub struct Embedding {
    kernel: Kernel<EmbedParams>,
    dtype: Dtype,
}

impl Embedding {
    /// Finds the kernel in the module of [`source`] for the same type.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("embed")?, dtype })
    }

    /// Writes the embeddings of the tokens, and each token beside its page. Every token is below the length of the table,
    /// every cell in one of the pages that have room for their tokens.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short.
    #[expect(clippy::too_many_arguments, reason = "each is a tensor of its own")]
    pub fn run(
        &self,
        stream: &Stream,
        tokens: RowCount,
        hidden_size: usize,
        ids: TokenIds,
        places: TokenPlaces,
        table: Slice, // T [vocab_size, hidden_size]
        x: Slice,     // f32 [tokens, hidden_size]
    ) -> Result<(), CudaError> {
        if tokens.n_max == 0 {
            return Ok(());
        }
        expect_rows(tokens);
        expect_i32("ids", ids.ids, tokens.n_max);
        expect_i32("cells", places.cells, tokens.n_max);
        expect_i32("page_tokens", places.page_tokens, PAGE_LEN);
        expect("table", table, hidden_size, self.dtype.n_bytes());
        expect("x", x, tokens.n_max * hidden_size, 4);
        let params = EmbedParams {
            tokens: ids.ids.into(),
            n_tokens: tokens.n.into(),
            slots: ids.slots.into(),
            cells: places.cells.into(),
            page_tokens: places.page_tokens.into(),
            table: table.into(),
            x: x.into(),
            hidden: i32_of(hidden_size),
            unused: 0,
        };
        // SAFETY: lengths were checked above; the caller keeps the ids inside the table, or inside the slots, the
        // cells inside `page_tokens`, and the count at most `n_max`.
        unsafe { over_rows(tokens, hidden_size).run(stream, &self.kernel, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        DTYPES.into_iter().for_each(|dtype| assert_compiles(source(dtype)));
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let mut random = Random(1);
        for dtype in DTYPES {
            let embedding = Embedding::new(&test.module(source(dtype)), dtype).expect("the kernel");
            for (n_max, n, vocab_size, hidden_size) in
                [(1, 1, 1, 1), (3, 2, 7, 33), (5, 5, 11, 66), (64, 61, 300, 2048), (2, 1, 5, 16384)]
            {
                let table = rounded(dtype, &random.normals(vocab_size * hidden_size));
                let ids: Vec<i32> = (0..n_max).map(|_| random.below(vocab_size) as i32).collect();
                let x = poisoned(&test, n_max * hidden_size * 4);
                // Every second token is named by the slot that holds it; slots are in the opposite order.
                let slots: Vec<i32> = ids.iter().rev().copied().collect();
                let named = |(t, &id): (usize, &i32)| if t % 2 == 0 { id } else { t as i32 - n_max as i32 };
                let named: Vec<i32> = ids.iter().enumerate().map(named).collect();
                let (d_table, d_ids) = (upload_as(&test, dtype, &table), upload(&test, &named));
                let d_slots = upload(&test, &slots);
                let count = DeviceCount::new(&test, n_max, n);
                let ids_there = TokenIds { ids: d_ids.slice(), slots: d_slots.slice() };
                // A page of its own for each token, in the opposite order.
                let cells: Vec<u32> =
                    (0..n_max).rev().map(|page| (page * PAGE_LEN + random.below(PAGE_LEN)) as u32).collect();
                let d_cells = upload(&test, &cells);
                let page_tokens = upload(&test, &vec![-7i32; n_max * PAGE_LEN]);
                let places = TokenPlaces { cells: d_cells.slice(), page_tokens: page_tokens.slice() };
                let (table_there, rows) = (d_table.slice(), count.rows());
                embedding
                    .run(&test.stream, rows, hidden_size, ids_there, places, table_there, x.slice())
                    .expect("a launch");
                let mut noted = vec![-7; n_max * PAGE_LEN];
                for (t, &id) in ids[..n].iter().enumerate() {
                    noted[cells[t] as usize] = id;
                }
                assert_eq!(download(&test, page_tokens.slice(), noted.len(), 0i32), noted);
                let got = download_as(&test, Dtype::F32, x.slice(), n_max * hidden_size);
                // Widening to f32 is exact.
                for (t, &id) in ids[..n].iter().enumerate() {
                    let row = &table[id as usize * hidden_size..][..hidden_size];
                    assert_eq!(&got[t * hidden_size..][..hidden_size], row, "{dtype:?}, token {t}");
                }
                assert_untouched("embedding", &got[n * hidden_size..]);
            }
        }
    }
}
