//! What these tests share.

use std::path::PathBuf;
use std::sync::LazyLock;

use trellis_engine::backend::{Backend, PAGE_LEN};
use trellis_engine::batch::{
    Batch, Input, Output, OutputKind, OutputRequest, PageId, Row, SlotId, Token, Tokens,
};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::{Model, ModelSource};

pub(crate) fn options() -> CpuOptions {
    CpuOptions { n_pages: 640, n_host_pages: 16, n_threads: None, n_rows_max: 256, n_tokens_max: 2048 }
}

pub(crate) fn bundled_model(name: &str) -> Model {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models").join(name);
    Model::open(name, &ModelSource::Folder(folder)).expect("the bundled model opens")
}

pub(crate) fn bundled(name: &str) -> CpuBackend {
    CpuBackend::new(&bundled_model(name), &options()).expect("the bundled model loads")
}

pub(crate) fn n_pages(n_tokens: usize) -> usize {
    n_tokens.div_ceil(PAGE_LEN)
}

/// A page table of consecutive pages.
pub(crate) fn consecutive(first: usize, n: usize) -> &'static [PageId] {
    static PAGES: LazyLock<Vec<PageId>> = LazyLock::new(|| (0..1 << 20).map(PageId).collect());
    &PAGES[first..first + n]
}

/// A row over `tokens[start..]` whose pages are numbered from `first_page`, asking `kind` of one position.
pub(crate) fn row<'a>(
    tokens: &'a [Token],
    start: usize,
    first_page: usize,
    outputs: Vec<(usize, OutputKind<'a>)>,
) -> Row<'a> {
    Row {
        slot: SlotId(0),
        tokens: Tokens::from(tokens),
        start,
        pages: consecutive(first_page, n_pages(tokens.len())),
        n_same_pages: 0,
        n_pages_alike: 0,
        outputs: outputs.into_iter().map(|(position, kind)| OutputRequest { position, kind }).collect(),
        input: Input::Known,
        evicted: None,
        steered: None,
    }
}

pub(crate) fn forward(backend: &mut impl Backend, rows: Vec<Row<'_>>) -> Vec<Output> {
    backend.forward(&Batch { copies: &[], rows }).expect("the backend runs")
}

pub(crate) fn full(output: Output) -> Vec<f32> {
    match output {
        Output::Full(logprobs) => logprobs,
        other => panic!("expected a full row, got {other:?}"),
    }
}
