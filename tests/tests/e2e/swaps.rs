//! Pages that are moved to host memory and back hold what they held.

use std::time::{Duration, Instant};

use trellis_engine::backend::{Backend, PAGE_LEN};
use trellis_engine::batch::{
    Batch, HostPageId, Input, Output, OutputKind, OutputRequest, PageId, Row, SlotId, Tokens,
};
use trellis_engine::model::{Dtype, ModelConfig};
use trellis_tests::device::{CardAlone, card_alone};
use trellis_tests::engines::{Random, Sizes, backend, cuda_backend};
use trellis_tests::models;

/// The share of the link's rate that a move has to reach.
const LINK_SHARE_MIN: f64 = 0.7;

/// Contexts of one length that lie in all pages of a backend.
struct Contexts {
    tokens: Vec<Vec<u32>>,
    pages: Vec<Vec<PageId>>,
}

impl Contexts {
    fn new(backend: &dyn Backend, n_contexts: usize, seed: u64) -> Self {
        let limits = backend.limits();
        let n_pages = backend.n_pages() / n_contexts;
        let mut random = Random(seed);
        // The last page of each is partly filled.
        let tokens =
            (0..n_contexts).map(|_| random.tokens(n_pages * PAGE_LEN - 3, limits.vocab_size)).collect();
        let page = |context: usize, idx: usize| PageId((context * n_pages + idx) as u32);
        let pages = (0..n_contexts).map(|c| (0..n_pages).map(|idx| page(c, idx)).collect()).collect();
        Self { tokens, pages }
    }

    fn row<'a>(&'a self, context: usize, start: usize, end: usize, kind: Option<OutputKind<'a>>) -> Row<'a> {
        let outputs = kind.into_iter().map(|kind| OutputRequest { position: end - 1, kind }).collect();
        Row {
            slot: SlotId(context as u32),
            tokens: Tokens::from(&self.tokens[context][..end]),
            start,
            pages: &self.pages[context][..end.div_ceil(PAGE_LEN)],
            n_same_pages: 0,
            n_pages_alike: 0,
            outputs,
            input: Input::Known,
            evicted: None,
            steered: None,
        }
    }

    fn prefill(&self, backend: &mut dyn Backend) {
        let n_tokens_max = backend.limits().n_tokens_max;
        for (context, tokens) in self.tokens.iter().enumerate() {
            for start in (0..tokens.len()).step_by(n_tokens_max) {
                let end = tokens.len().min(start + n_tokens_max);
                let batch = Batch { copies: &[], rows: vec![self.row(context, start, end, None)] };
                assert_eq!(backend.forward(&batch).expect("computed"), []);
            }
        }
    }

    /// The bits of the whole distribution after each context.
    fn probe(&self, backend: &mut dyn Backend) -> Vec<Vec<u32>> {
        let rows = (0..self.tokens.len())
            .map(|context| {
                let n = self.tokens[context].len();
                self.row(context, n - 1, n, Some(OutputKind::Full))
            })
            .collect();
        let outputs = backend.forward(&Batch { copies: &[], rows }).expect("computed");
        let bits = |output| match output {
            Output::Full(logprobs) => logprobs.iter().map(|logprob: &f32| logprob.to_bits()).collect(),
            other => panic!("{other:?}"),
        };
        outputs.into_iter().map(bits).collect()
    }

    /// A step of one token, which ends when all moves before it have.
    fn wait(&self, backend: &mut dyn Backend) -> Duration {
        let begun = Instant::now();
        let n = self.tokens[0].len();
        let rows = vec![self.row(0, n - 1, n, Some(OutputKind::Top { n: 1 }))];
        assert_eq!(backend.forward(&Batch { copies: &[], rows }).expect("computed").len(), 1);
        begun.elapsed()
    }
}

/// Moves all pages out, spoils them, and moves them in elsewhere. The times of both moves.
fn there_and_back(backend: &mut dyn Backend, n_contexts: usize) -> (Duration, Duration) {
    let n_pages = backend.n_pages() as u32;
    let mut contexts = Contexts::new(backend, n_contexts, 1);
    contexts.prefill(backend);
    let expected = contexts.probe(backend);
    assert!(expected.iter().any(|row| row != &expected[0]), "the contexts differ");

    let step = (0..5).map(|_| contexts.wait(backend)).min().expect("five steps");
    let out: Vec<_> = (0..n_pages).map(|page| (PageId(page), HostPageId(page))).collect();
    let begun = Instant::now();
    backend.swap_out(&out).expect("moved");
    contexts.wait(backend);
    let out_time = begun.elapsed().saturating_sub(step);

    let others = Contexts::new(backend, n_contexts, 2);
    others.prefill(backend);
    assert!(others.probe(backend) != expected, "the pages hold something else");

    // Each page to another place than it came from.
    let elsewhere = |page: u32| PageId((page + n_pages / 2 + 1) % n_pages);
    let back: Vec<_> = (0..n_pages).map(|page| (HostPageId(page), elsewhere(page))).collect();
    for page in contexts.pages.iter_mut().flatten() {
        *page = elsewhere(page.0);
    }
    let begun = Instant::now();
    backend.swap_in(&back).expect("moved");
    contexts.wait(backend);
    let in_time = begun.elapsed().saturating_sub(step);

    assert!(contexts.probe(backend) == expected, "other results after the moves");
    (out_time, in_time)
}

#[test]
fn what_was_moved_is_unchanged() {
    let model = models::random("swapped", models::small(256), Dtype::F32);
    let sizes = Sizes { n_pages: 48, n_host_pages: 48, n_step_rows: 4, n_step_tokens: 64 };
    let mut backend = backend(&model, sizes);
    there_and_back(backend.as_mut(), 3);
}

/// Bytes a second of the link, in both directions, with one large copy from page-locked memory.
fn link_rates(alone: &CardAlone, n_bytes: usize) -> (f64, f64) {
    let gpu = alone.card.gpu();
    let stream = gpu.stream().expect("a stream");
    let buffer = gpu.allocate("the link's rate", n_bytes).expect("there is room");
    let mut host = gpu.pinned::<u8>(n_bytes).expect("there is room");
    let (mut out, mut back) = (Duration::MAX, Duration::MAX);
    for _ in 0..5 {
        let begun = Instant::now();
        buffer.slice().download(&stream, &mut host).expect("copied");
        out = out.min(begun.elapsed());
        let begun = Instant::now();
        buffer.slice().upload(&stream, &host).expect("copied");
        stream.synchronize().expect("copied");
        back = back.min(begun.elapsed());
    }
    (n_bytes as f64 / out.as_secs_f64(), n_bytes as f64 / back.as_secs_f64())
}

#[test]
fn a_gigabyte_moves_at_the_rate_of_the_link() {
    let Some(alone) = card_alone() else { return };
    let (n_contexts, n_layers) = (16, 8);
    // A page of 1 MiB: 8 layers, keys and values, 8 heads, 16 positions, 128 elements, float32.
    let config = ModelConfig {
        n_layers,
        n_heads: 8,
        n_kv_heads: 8,
        head_dim: 128,
        windows: vec![None; n_layers],
        ..models::small(1024)
    };
    let model = models::random("swapped", config, Dtype::F32);
    let sizes = Sizes { n_pages: 1024, n_host_pages: 1024, n_step_rows: n_contexts, n_step_tokens: 1024 };
    let mut backend = cuda_backend(&alone.card, &model, sizes, Dtype::F32).expect("the model loads");
    let n_bytes = backend.n_pages() * backend.limits().page_bytes;
    assert_eq!(n_bytes, 1 << 30);
    // Host memory is page-locked as pages are moved there: all of it is once it was used.
    there_and_back(&mut backend, n_contexts);
    let (out_time, in_time) = there_and_back(&mut backend, n_contexts);
    let (out, back) = (n_bytes as f64 / out_time.as_secs_f64(), n_bytes as f64 / in_time.as_secs_f64());
    let (link_out, link_back) = link_rates(&alone, 256 << 20);
    println!(
        "1 GiB of pages on {}: out {:.1} GB/s of {:.1}, in {:.1} GB/s of {:.1}",
        alone.card.gpu().name(),
        out / 1e9,
        link_out / 1e9,
        back / 1e9,
        link_back / 1e9
    );
    assert!(out >= LINK_SHARE_MIN * link_out, "{out:.3e} of {link_out:.3e} bytes a second");
    assert!(back >= LINK_SHARE_MIN * link_back, "{back:.3e} of {link_back:.3e} bytes a second");
}
