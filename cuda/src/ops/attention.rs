//! What the two attention kernels share: the model's shape, the pages they read, lists of work.
//!
//! The KV cache is page-major: inside a page lie `[n_layers][K, V][n_kv_heads][PAGE_LEN][head_dim]` of the model's type.

use std::sync::OnceLock;

use super::common::{Dtype, Rows, expect, expect_i32, expect_rows, i32_of};
use crate::{Arg, Slice};

/// Positions of a page.
pub const PAGE_LEN: usize = 16;

/// The longest head that the kernels take.
pub const HEAD_DIM_MAX: usize = 256;

/// The attention of a model, the same in every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Type of queries, keys, values and outputs.
    pub dtype: Dtype,
    /// Query heads.
    pub n_heads: usize,
    /// Heads of keys and values; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Length of a head: a multiple of 8, at most [`HEAD_DIM_MAX`].
    pub head_dim: usize,
    /// What scores are multiplied by, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

impl AttentionShape {
    /// Elements of one layer in a page.
    #[must_use]
    pub fn layer_len(&self) -> usize {
        2 * self.n_kv_heads * PAGE_LEN * self.head_dim
    }

    /// Query heads for each KV head.
    #[must_use]
    pub fn group_len(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    #[track_caller]
    pub(crate) fn assert_supported(&self) {
        assert!(self.n_kv_heads > 0 && self.n_heads.is_multiple_of(self.n_kv_heads), "{self:?}");
        assert!(self.head_dim.is_multiple_of(8) && (8..=HEAD_DIM_MAX).contains(&self.head_dim), "{self:?}");
    }

    /// Scores go through exp2.
    pub(crate) fn scale_log2(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }
}

/// One layer of the KV cache.
#[derive(Clone, Copy, Debug)]
pub struct KvLayer {
    /// All pages.
    pub pages: Slice,
    /// Elements from one page to the next.
    pub page_stride: usize,
    /// The layer.
    pub layer_idx: usize,
}

/// Where the rows of a step and their contexts lie.
#[derive(Clone, Copy, Debug)]
pub struct Contexts {
    /// The most rows there can be.
    pub n_rows_max: usize,
    /// First token of each row: i32 `[rows + 1]`.
    pub row_start: Slice,
    /// Position of each row's first token: i32 `[rows]`.
    pub row_pos0: Slice,
    /// Page ids: i32 `[rows, page_table_stride]`. Only those are read whose positions some query attends to.
    pub page_table: Slice,
    /// Entries of a row of the page table.
    pub page_table_stride: usize,
}

/// What attention works on.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs {
    /// The most tokens there can be.
    pub n_tokens_max: usize,
    /// Queries: T `[n_tokens, n_heads, head_dim]`.
    pub q: Slice,
    /// Outputs: as the queries.
    pub out: Slice,
    /// Keys and values, those of the step included.
    pub kv: KvLayer,
    /// Rows.
    pub contexts: Contexts,
    /// Positions that a query attends to, its own included; `None` for all up to its own.
    pub window: Option<usize>,
}

/// Tiles of queries: a list on the device, made from [`plan_tiles`].
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    /// How many.
    pub count: Rows,
    /// i32 `[tiles, 2]`: row, and the first query's offset in it.
    pub list: Slice,
}

/// The queries of a row from `offset` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Index of the row in the step.
    pub row_idx: usize,
    /// Of the first query in its row.
    pub offset: usize,
    /// Keys that its queries attend to, counted once.
    pub n_keys: usize,
}

/// The tokens of a row in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// Index of the row in the step.
    pub row_idx: usize,
    /// Tokens in the step.
    pub n_tokens: usize,
    /// Position of the first.
    pub pos0: usize,
}

impl Tile {
    /// As the device reads it.
    #[must_use]
    pub fn words(self) -> [i32; 2] {
        [i32_of(self.row_idx), i32_of(self.offset)]
    }
}

/// Cuts rows into tiles of up to `tile_len` queries and puts them into `tiles`, the most work first, so that no long
/// one begins last.
///
/// # Panics
/// The tile length or the window is zero.
pub fn plan_tiles(rows: &[RowSpan], tile_len: usize, window: Option<usize>, tiles: &mut Vec<Tile>) {
    assert!(tile_len > 0 && window != Some(0), "tiles of {tile_len}, a window of {window:?}");
    tiles.clear();
    for row in rows {
        for offset in (0..row.n_tokens).step_by(tile_len) {
            let first = row.pos0 + offset;
            let end = first + tile_len.min(row.n_tokens - offset);
            let n_keys = end - window.map_or(0, |window| (first + 1).saturating_sub(window));
            tiles.push(Tile { row_idx: row.row_idx, offset, n_keys });
        }
    }
    tiles.sort_unstable_by_key(|tile| (std::cmp::Reverse(tile.n_keys), tile.row_idx, tile.offset));
}

impl AttentionInputs {
    /// Checks lengths and lays out the arguments that both kernels begin with.
    #[track_caller]
    pub(crate) fn args(&self, shape: &AttentionShape, tiles: Tiles) -> Vec<Arg> {
        let n_bytes = shape.dtype.n_bytes();
        let q_len = self.n_tokens_max * shape.n_heads * shape.head_dim;
        let contexts = &self.contexts;
        let layer_start = self.kv.layer_idx * shape.layer_len();
        expect("q", self.q, q_len, n_bytes);
        expect("out", self.out, q_len, n_bytes);
        expect("kv", self.kv.pages, self.kv.page_stride, n_bytes);
        assert!(layer_start + shape.layer_len() <= self.kv.page_stride, "layer {}", self.kv.layer_idx);
        assert!((self.kv.page_stride * n_bytes).is_multiple_of(16), "pages are aligned to 16 bytes");
        expect_i32("row_start", contexts.row_start, contexts.n_rows_max + 1);
        expect_i32("row_pos0", contexts.row_pos0, contexts.n_rows_max);
        expect_i32("page_table", contexts.page_table, contexts.n_rows_max * contexts.page_table_stride);
        expect_i32("tiles", tiles.list, 2 * tiles.count.n_max);
        assert!(tiles.list.address.is_multiple_of(8), "a tile is read as one word of 8 bytes");
        expect_rows(tiles.count);
        vec![
            self.out.into(),
            self.q.into(),
            Arg::Pointer(self.kv.pages.address + (layer_start * n_bytes) as u64),
            contexts.page_table.into(),
            contexts.row_start.into(),
            contexts.row_pos0.into(),
            tiles.list.into(),
            tiles.count.n.into(),
        ]
    }

    /// The arguments that both kernels end with.
    #[track_caller]
    pub(crate) fn last_args(&self, shape: &AttentionShape) -> [Arg; 6] {
        assert!(self.window != Some(0), "a query attends to itself");
        let window = self.window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX));
        [
            Arg::I32(i32_of(shape.n_heads)),
            Arg::I32(i32_of(shape.n_kv_heads)),
            Arg::U32(u32::try_from(self.kv.page_stride).expect("a page has less than 2^32 elements")),
            Arg::I32(i32_of(self.contexts.page_table_stride)),
            Arg::I32(window),
            Arg::F32(shape.scale_log2()),
        ]
    }
}

/// Texts of one kernel for each head length and type that was asked for.
pub(crate) struct Texts([[OnceLock<String>; 3]; HEAD_DIM_MAX / 8]);

impl Texts {
    pub(crate) const fn new() -> Self {
        Self([const { [const { OnceLock::new() }; 3] }; HEAD_DIM_MAX / 8])
    }

    /// The text for a shape, made once.
    pub(crate) fn get(&'static self, shape: &AttentionShape, file: &str, kernel: &str) -> &'static str {
        shape.assert_supported();
        let (dtype_idx, name) = match shape.dtype {
            Dtype::F32 => (0, "float"),
            Dtype::F16 => (1, "f16"),
            Dtype::Bf16 => (2, "bf16"),
        };
        self.0[shape.head_dim / 8 - 1][dtype_idx].get_or_init(|| {
            format!(
                "#define ATTN_HEAD_DIM {}\n#define ATTN_T {name}\n#define ATTN_IS_F32 {}\n{}\n{}\n#line 1 \"{file}\"\n{kernel}",
                shape.head_dim,
                u8::from(shape.dtype == Dtype::F32),
                include_str!("common.cuh"),
                include_str!("attention.cuh"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_query_once_and_begin_with_the_longest() {
        let rows = [
            RowSpan { row_idx: 0, n_tokens: 1, pos0: 500 },
            RowSpan { row_idx: 1, n_tokens: 130, pos0: 0 },
            RowSpan { row_idx: 2, n_tokens: 0, pos0: 9 },
        ];
        let mut tiles = Vec::new();
        plan_tiles(&rows, 64, None, &mut tiles);
        let listed: Vec<_> = tiles.iter().map(|tile| (tile.row_idx, tile.offset, tile.n_keys)).collect();
        assert_eq!(listed, [(0, 0, 501), (1, 128, 130), (1, 64, 128), (1, 0, 64)]);
        plan_tiles(&rows, 64, Some(10), &mut tiles);
        let listed: Vec<_> = tiles.iter().map(|tile| (tile.row_idx, tile.offset, tile.n_keys)).collect();
        // Queries 64 to 127 with a window of 10 attend to keys 55 to 127.
        assert_eq!(listed, [(1, 64, 73), (1, 0, 64), (1, 128, 11), (0, 0, 10)]);
        assert_eq!(tiles[0].words(), [1, 64]);
    }
}
