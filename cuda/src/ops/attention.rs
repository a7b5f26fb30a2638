//! Attention over the pages of contexts: one, a few or many tokens of each.
//!
//! - Comes in: queries, the pages of the step's contexts, and for each form of rows a list of shares (see `shares`).
//! - Goes out: the attended values of every token of the step.
//! - Must not happen: work that no list names, so that a captured launch serves every step of its bucket.
//!
//! The KV cache is page-major: inside a page lie `[n_layers][K, V][n_kv_heads][PAGE_LEN][head_dim]` of the model's type.

use super::attention_decode::{AttentionDecode, Blocks};
use super::attention_holes::{AttentionHoles, HolesInputs};
use super::attention_tiles::{AttentionTiles, TileForm};
use super::common::{Dtype, RowCount, expect, expect_i32, expect_rows, i32_of, type_name};
use super::shares::{CUT_WORDS, Cutting, N_SHARES_MAX, SHARE_WORDS};
use crate::{CudaError, Module, Pointer, Slice, Source, Stream};

pub use super::common::PAGE_LEN;

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
    /// Page tables. Only those entries are read whose positions some query attends to.
    pub entries: Slice,
    /// Positions that a query attends to, its own included; `None` for all up to its own.
    pub window: Option<usize>,
    /// For the rows of [`Form::Holed`].
    pub holes: Option<HolesInputs>,
}

/// A [`ShareList`](super::shares::ShareList) on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceShares {
    /// The shares; at least as many as the workers that there can be.
    pub shares: Slice,
    /// Workers that have work.
    pub workers: RowCount,
    /// Tiles that were cut.
    pub cut_list: Slice,
    /// How many.
    pub cuts: RowCount,
}

/// What is launched for a step, the same in every layer of a window; `None` where a form has no rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionWork {
    /// By [`Form`].
    pub lists: [Option<DeviceShares>; N_FORMS],
}

/// What shares of one tile are put together in. Layers may use the same one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Workspace {
    /// [`Attention::arrivals_bytes`] of zeros; zeros again after each launch.
    pub arrivals: Slice,
    /// [`Attention::partial_bytes`]; never read before it is written.
    pub partial: Slice,
}

/// Rows that a kernel takes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A token, or as many as fill the columns of a product.
    Single,
    /// Up to [`N_FEW_TOKENS_MAX`] tokens, which are computed at the speed of one.
    Few,
    /// More: a part of a prompt.
    Prompt,
    /// The pages that rows of one token have in common, read once for as many of them as a tile of a prompt has tokens.
    Shared,
    /// What such rows have for themselves.
    Own,
    /// Any number of tokens of a context from which some were evicted.
    Holed,
    /// As [`Form::Single`], where there are so many that blocks have them one after the other.
    Many,
}

/// How many there are.
pub const N_FORMS: usize = 7;

/// Tokens that a row of few tokens has at most.
pub const N_FEW_TOKENS_MAX: usize = 16;

impl Form {
    /// Every form, in the order of their numbers.
    pub const ALL: [Self; N_FORMS] =
        [Self::Single, Self::Few, Self::Prompt, Self::Shared, Self::Own, Self::Holed, Self::Many];

    /// Whether a launch of its own sums the shares of tiles that were cut; the kernels for single queries do it themselves.
    /// What is shared is summed with what rows have for themselves.
    #[must_use]
    pub fn sums_apart(self) -> bool {
        matches!(self, Self::Few | Self::Prompt | Self::Shared)
    }
}

/// How the kernels of a model want their work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuttings {
    /// Of [`Form::Single`].
    pub single: Cutting,
    /// Of [`Form::Few`] and of [`Form::Prompt`]; `None` where everything goes through single queries.
    pub tiles: Option<[Cutting; 2]>,
    /// Tokens of a row of [`Form::Single`] at most, when there are tiles.
    pub n_single_tokens_max: usize,
    /// Of [`Form::Holed`].
    pub holed: Cutting,
    /// Of [`Form::Many`]; `None` where that is no form of its own.
    pub many: Option<Cutting>,
}

impl Cuttings {
    /// The form of a row, in a context without holes.
    #[must_use]
    pub fn form(&self, n_tokens: usize) -> Form {
        match n_tokens {
            _ if self.tiles.is_none() || n_tokens <= self.n_single_tokens_max => Form::Single,
            _ if n_tokens <= N_FEW_TOKENS_MAX => Form::Few,
            _ => Form::Prompt,
        }
    }

    /// Whether so many tiles of single queries are many: half more than one for each worker.
    #[must_use]
    pub fn are_many(&self, n_tiles: usize) -> bool {
        self.many.is_some_and(|many| n_tiles > many.n_workers + many.n_workers / 2)
    }

    /// Tokens of a prompt that fill whole tiles.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        self.tiles.map_or(1, |[_, prompt]| prompt.tile_tokens)
    }

    /// How a form wants its work.
    ///
    /// # Panics
    /// No row has that form.
    #[must_use]
    pub fn of(&self, form: Form) -> Cutting {
        match (form, self.tiles) {
            (Form::Single, _) => self.single,
            (Form::Holed, _) => self.holed,
            (Form::Many, _) => self.many.expect("a form of its own"),
            (Form::Few, Some([few, _])) => few,
            (Form::Prompt | Form::Shared, Some([_, prompt])) => prompt,
            (Form::Own, Some(_)) => Cutting { tile_tokens: 1, ..self.single },
            (Form::Few | Form::Prompt | Form::Shared | Form::Own, None) => {
                panic!("no row is of the form {form:?}")
            }
        }
    }
}

/// The attention kernels of a model.
#[derive(Clone, Debug)]
pub struct Attention {
    decode: AttentionDecode,
    many: Option<AttentionDecode>,
    holed: AttentionHoles,
    tiles: Option<AttentionTiles>,
    shape: AttentionShape,
}

impl Attention {
    /// The sources of the kernels that every model needs, for a shape: for single queries, and, where the shape has them, for
    /// many of them and for tiles.
    ///
    /// # Panics
    /// The shape is none that the kernels take.
    #[must_use]
    pub fn sources(shape: &AttentionShape) -> Vec<Source> {
        let many = Blocks::many(shape).map(AttentionDecode::source);
        let tiles = AttentionTiles::supports(shape).then(|| AttentionTiles::sources(shape));
        let single = AttentionDecode::source(Blocks::whole(shape));
        [single].into_iter().chain(many).chain(tiles.into_iter().flatten()).collect()
    }

    /// Finds the kernels in the modules of [`Attention::sources`] for the same shape, and takes the one for contexts with
    /// holes.
    ///
    /// # Errors
    /// The driver refused, or the device has too little shared memory.
    pub fn new(modules: &[Module], holed: AttentionHoles, shape: AttentionShape) -> Result<Self, CudaError> {
        let [single, rest @ ..] = modules else { panic!("no modules of attention") };
        let mut rest = rest.iter();
        let mut next = || rest.next().expect("a module for each source");
        Ok(Self {
            decode: AttentionDecode::new(single, Blocks::whole(&shape))?,
            holed,
            many: Blocks::many(&shape).map(|blocks| AttentionDecode::new(next(), blocks)).transpose()?,
            tiles: AttentionTiles::supports(&shape)
                .then(|| AttentionTiles::new([next(), next()], shape))
                .transpose()?,
            shape,
        })
    }

    /// The shape that the kernels are for.
    #[must_use]
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// Has a thread compile the kernel for contexts with holes.
    pub fn begin_holed(&self) {
        self.holed.begin();
    }

    /// Loads the kernel for contexts with holes if it is not there yet.
    ///
    /// # Errors
    /// As [`AttentionHoles::load`].
    pub fn load_holed(&self) -> Result<(), CudaError> {
        self.holed.load()
    }

    /// How the kernels want their work.
    #[must_use]
    pub fn cuttings(&self) -> Cuttings {
        let tiles =
            self.tiles.as_ref().map(|tiles| [tiles.cutting(TileForm::Few), tiles.cutting(TileForm::Prompt)]);
        Cuttings {
            single: self.decode.cutting(),
            tiles,
            // More heads than a product has columns go through tiles, which read keys and values once for all of them.
            n_single_tokens_max: AttentionDecode::n_tokens_max(&self.shape).unwrap_or(0),
            holed: self.holed.cutting(),
            many: self.many.as_ref().map(AttentionDecode::cutting),
        }
    }

    /// Bytes of [`Workspace::partial`].
    #[must_use]
    pub fn partial_bytes(&self) -> usize {
        let of_tiles = self.tiles.as_ref().map_or(0, AttentionTiles::partial_bytes);
        let of_own = self.tiles.as_ref().map_or(0, |_| self.decode.own_bytes());
        let of_many = self.many.as_ref().map_or(0, AttentionDecode::partial_bytes);
        self.decode.partial_bytes().max(of_many).max(self.holed.partial_bytes()).max(of_own + of_tiles)
    }

    /// Bytes of [`Workspace::arrivals`].
    #[must_use]
    pub fn arrivals_bytes(&self) -> usize {
        let of_many = self.many.as_ref().map_or(0, AttentionDecode::arrivals_bytes);
        self.decode.arrivals_bytes().max(of_many).max(self.holed.arrivals_bytes())
    }

    /// Writes the outputs of the tokens that the lists name, and no others. The same lists give the same bits.
    ///
    /// # Errors
    /// The driver refused a launch.
    ///
    /// # Panics
    /// A slice is too short, or there is work of a form that the shape or the inputs do not have.
    pub fn run(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        work: &AttentionWork,
        workspace: Workspace,
    ) -> Result<(), CudaError> {
        let [single, few, prompt, shared, own, holed, many] = work.lists;
        if let Some(list) = single {
            self.decode.run(stream, inputs, list, workspace)?;
        }
        if let Some(list) = many {
            let kernel = self.many.as_ref().expect("many only where the shape has them");
            kernel.run(stream, inputs, list, workspace)?;
        }
        if let Some(list) = holed {
            let holes = inputs.holes.expect("they are described where there are any");
            self.holed.run(stream, inputs, holes, list, workspace)?;
        }
        for (form, list) in [(TileForm::Few, few), (TileForm::Prompt, prompt)] {
            if let Some(list) = list {
                let tiles = self.tiles.as_ref().expect("tiles only where the shape has them");
                tiles.run(stream, form, inputs, list, workspace.partial)?;
            }
        }
        if let (Some(shared), Some(own)) = (shared, own) {
            let tiles = self.tiles.as_ref().expect("rows share pages only where the shape has tiles");
            let (partial, n_own) = (workspace.partial, self.decode.own_bytes());
            let own_partial =
                self.decode.run_apart(stream, inputs, own, partial.part(0, n_own), workspace.arrivals)?;
            let partial = partial.part(n_own, partial.n_bytes - n_own);
            tiles.run_shared(stream, inputs, shared, partial, own_partial)?;
        }
        Ok(())
    }
}

/// Where shares of cut tiles lie: maxima and sums first, then what they were not divided by.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartialResults {
    pub(super) acc: Slice,
    pub(super) ml: Slice,
}

impl PartialResults {
    /// Bytes for so many queries.
    pub(super) fn n_bytes(n_queries: usize, head_dim: usize) -> usize {
        4 * n_queries * (head_dim + 2)
    }

    /// The places in a workspace.
    #[track_caller]
    pub(super) fn of(workspace: Slice, n_queries: usize, head_dim: usize) -> Self {
        expect("partial", workspace, n_queries * (head_dim + 2), 4);
        let ml_bytes = 8 * n_queries;
        Self { ml: workspace.part(0, ml_bytes), acc: workspace.part(ml_bytes, 4 * n_queries * head_dim) }
    }
}

impl AttentionInputs {
    /// Checks lengths; returns where the layer begins.
    #[track_caller]
    pub(super) fn check(&self, shape: &AttentionShape, list: DeviceShares) -> Pointer {
        expect("shares", list.shares, SHARE_WORDS * list.workers.n_max, 4);
        expect("cut tiles", list.cut_list, CUT_WORDS * list.cuts.n_max, 4);
        expect_rows(list.workers);
        expect_rows(list.cuts);
        self.layer(shape)
    }

    /// The same without lists.
    #[track_caller]
    pub(super) fn layer(&self, shape: &AttentionShape) -> Pointer {
        let n_bytes = shape.dtype.n_bytes();
        let q_len = self.n_tokens_max * shape.n_heads * shape.head_dim;
        let layer_start = self.kv.layer_idx * shape.layer_len();
        expect("q", self.q, q_len, n_bytes);
        expect("out", self.out, q_len, n_bytes);
        expect("kv", self.kv.pages, self.kv.page_stride, n_bytes);
        assert!(layer_start + shape.layer_len() <= self.kv.page_stride, "layer {}", self.kv.layer_idx);
        assert!((self.kv.page_stride * n_bytes).is_multiple_of(16), "pages are aligned to 16 bytes");
        expect_i32("entries", self.entries, 1);
        let pages = self.kv.pages;
        let start = layer_start * n_bytes;
        pages.part(start, pages.n_bytes - start).into()
    }

    /// The window as the kernels take it.
    #[track_caller]
    pub(super) fn window(&self) -> i32 {
        assert!(self.window != Some(0), "a query attends to itself");
        self.window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX))
    }

    /// Elements from one page to the next.
    #[track_caller]
    pub(super) fn page_stride(&self) -> u32 {
        u32::try_from(self.kv.page_stride).expect("a page has less than 2^32 elements")
    }
}

/// A kernel's source for a shape, behind what the attention kernels share.
pub(super) fn source(shape: &AttentionShape, file: &'static str, text: &'static str) -> Source {
    shape.assert_supported();
    Source::new(file, text)
        .with("MODEL_T", type_name(shape.dtype))
        .with("ATTN_IS_F32", u8::from(shape.dtype == Dtype::F32))
        .with("ATTN_HEAD_DIM", shape.head_dim)
        .with("ATTN_GROUP", shape.group_len())
        .with("ATTN_PAGE_LEN", PAGE_LEN)
        .with("ATTN_SHARES_MAX", N_SHARES_MAX)
}

/// The number of workers, as a grid has it.
#[track_caller]
pub(super) fn grid_workers(workers: RowCount) -> u32 {
    u32::from(u16::try_from(workers.n_max).expect("a grid has up to 65,535 workers"))
}

/// The number of KV heads as kernels take it.
pub(super) fn n_kv_heads(shape: &AttentionShape) -> i32 {
    i32_of(shape.n_kv_heads)
}
