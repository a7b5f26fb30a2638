//! Pages whose memory comes and goes while contexts decode, and models that come and go on one card.

use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{OutputKind, OutputRequest, Token};
use trellis_engine::model::{Dtype, Model};
use trellis_engine::sampling::Sampler;

use super::tests::{bundled, card, card_alone, random_models, tokens};
use super::*;
use crate::testing::Random;

const N_CONTEXTS: usize = 3;
/// Pages of a context's prompt and of what it draws.
const N_CONTEXT_PAGES: u32 = 8;
const N_DRAWN: usize = 48;

fn options(model: &Model, n_pages: usize, n_pages_max: usize, n_tokens_max: usize) -> CudaOptions {
    let page_bytes = CudaBackend::page_bytes(&model.config, Dtype::F32);
    CudaOptions {
        dtype: Some(Dtype::F32),
        kv_bytes: n_pages as u64 * page_bytes,
        kv_bytes_max: n_pages_max as u64 * page_bytes,
        kv_host_bytes: 64 * page_bytes,
        n_rows_max: 16,
        n_tokens_max,
    }
}

fn load(card: &Card, model: &Model, options: &CudaOptions) -> CudaBackend {
    CudaBackend::load(card, model, options, &|_, _| {}).expect("the model loads")
}

/// Contexts that decode greedily, in pages that may lie anywhere.
struct Talks {
    contexts: Vec<(Vec<Token>, usize, Vec<PageId>)>, // tokens, computed, pages
}

impl Talks {
    fn new(vocab_size: usize) -> Self {
        let mut random = Random(6);
        let context = |idx| {
            let first = idx as u32 * N_CONTEXT_PAGES;
            let pages = (first..first + N_CONTEXT_PAGES).map(PageId).collect();
            (tokens(&mut random, 30 + 10 * idx, vocab_size), 0, pages)
        };
        Self { contexts: (0..N_CONTEXTS).map(context).collect() }
    }

    /// A step of all contexts, with something else while it is under way.
    fn step(&mut self, backend: &mut CudaBackend, meanwhile: impl FnOnce(&mut CudaBackend)) {
        let greedy = Sampler::greedy();
        let rows = self.contexts.iter().enumerate().map(|(idx, (tokens, n_computed, pages))| {
            let position = tokens.len() - 1;
            Row {
                slot: SlotId(idx as u32),
                tokens: tokens.into(),
                start: *n_computed,
                pages: &pages[..=tokens.len() / PAGE_LEN],
                n_same_pages: 0,
                n_pages_alike: 0,
                outputs: [OutputRequest { position, kind: OutputKind::Sample(&greedy) }]
                    .into_iter()
                    .collect(),
                input: Input::Known,
                evicted: None,
                steered: None,
            }
        });
        let batch = Batch { copies: &[], rows: rows.collect() };
        backend.submit(&batch).expect("the backend runs");
        drop(batch);
        meanwhile(backend);
        let outputs = backend.collect().expect("the backend runs").outputs;
        for ((tokens, n_computed, _), output) in self.contexts.iter_mut().zip(outputs) {
            let Output::Sampled(drawn) = output else { panic!("{output:?}") };
            *n_computed = tokens.len();
            tokens.push(drawn.token);
        }
    }

    /// Moves every page to where `place` says.
    fn move_pages(&mut self, backend: &mut CudaBackend, place: impl Fn(u32) -> u32) {
        let mut moves = Vec::new();
        for page in self.contexts.iter_mut().flat_map(|(.., pages)| pages) {
            let from = std::mem::replace(page, PageId(place(page.0)));
            moves.push((from, *page));
        }
        backend.move_pages(&moves).expect("moved");
    }

    fn said(&self) -> Vec<Vec<Token>> {
        self.contexts.iter().map(|(tokens, ..)| tokens.clone()).collect()
    }
}

/// What is said when nothing else happens.
fn undisturbed(backend: &mut CudaBackend, vocab_size: usize) -> Vec<Vec<Token>> {
    let mut talks = Talks::new(vocab_size);
    (0..N_DRAWN).for_each(|_| talks.step(backend, |_| {}));
    talks.said()
}

#[test]
fn contexts_go_on_while_pages_move_and_memory_comes_and_goes() {
    let Some(card) = card_alone() else { return };
    let model = random_models().remove(0);
    let vocab_size = model.config.vocab_size;
    // A granule is 128 pages of 48 KiB.
    let mut backend = load(&card, &model, &options(&model, 256, 640, 128));
    let Limits { n_pages, n_granule_pages, .. } = *backend.limits();
    assert_eq!((n_pages, n_granule_pages, backend.n_pages()), (640, 128, 256));
    let expected = undisturbed(&mut backend, vocab_size);
    // A step is captured when it comes the second time, which takes memory.
    assert_eq!(undisturbed(&mut backend, vocab_size), expected);
    // So does what the driver notes mappings in.
    backend.resize(640).expect("there is memory");
    backend.resize(256).expect("memory goes back");
    let free_bytes = || card.gpu().free_bytes().expect("the driver answers");
    let free_before = free_bytes();

    let mut talks = Talks::new(vocab_size);
    for step in 0..N_DRAWN {
        match step {
            8 => talks.step(&mut backend, |backend| backend.resize(640).expect("there is memory")),
            // Over the last granule.
            12 => talks.move_pages(&mut backend, |page| page + 600),
            20 => {
                talks.move_pages(&mut backend, |page| page - 560);
                // The copies are on their way out of what loses its memory.
                backend.resize(128).expect("memory goes back");
                assert_eq!(backend.n_pages(), 128);
            }
            24 => {
                let pages = talks.contexts[1].2.clone();
                let hosts = (0..N_CONTEXT_PAGES).map(HostPageId);
                let out: Vec<_> = pages.iter().copied().zip(hosts.clone()).collect();
                backend.swap_out(&out).expect("moved");
                talks.contexts[1].2 = (100..100 + N_CONTEXT_PAGES).map(PageId).collect();
                let back: Vec<_> = hosts.zip(talks.contexts[1].2.iter().copied()).collect();
                backend.swap_in(&back).expect("moved");
            }
            28 => talks.step(&mut backend, |backend| backend.resize(384).expect("there is memory")),
            32 => talks.step(&mut backend, |backend| backend.resize(256).expect("memory goes back")),
            _ => {}
        }
        if ![8, 28, 32].contains(&step) {
            talks.step(&mut backend, |_| {});
        }
    }
    assert_eq!(talks.said(), expected);
    assert_eq!((backend.n_pages(), free_bytes()), (256, free_before), "to the byte");
}

#[test]
fn pages_that_cannot_be_had_are_refused_and_decoding_goes_on() {
    let Some(card) = card_alone() else { return };
    let model = random_models().remove(0);
    let total = card.gpu().total_bytes();
    let page_bytes = CudaBackend::page_bytes(&model.config, Dtype::F32) as usize;
    let mut backend = load(&card, &model, &options(&model, 128, 2 * total / page_bytes / 128 * 128, 128));
    let expected = undisturbed(&mut backend, model.config.vocab_size);
    let (n_first, n_most) = (backend.n_pages(), backend.limits().n_pages);
    match backend.resize(n_most) {
        Err(BackendError::OutOfMemory { needed_bytes, free_bytes, .. }) => {
            assert_eq!(needed_bytes, ((n_most - n_first) * page_bytes) as u64);
            assert!(free_bytes < needed_bytes && free_bytes > 0, "{free_bytes}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(backend.n_pages(), n_first);
    assert_eq!(undisturbed(&mut backend, model.config.vocab_size), expected);
}

#[test]
fn a_model_that_comes_and_goes_leaves_nothing_behind() {
    let Some(card) = card_alone() else { return };
    let gpu = card.gpu();
    let free_bytes = || gpu.free_bytes().expect("the driver answers");
    let models = [bundled("tiny"), random_models().remove(0)];
    let at_start = free_bytes();
    let round = || {
        for model in &models {
            let options = options(model, 256, 512, 256);
            let needs = CudaBackend::needs(&card, model, &options).expect("its needs");
            let free_before = free_bytes();
            let mut backend = load(&card, model, &options);
            let taken = free_before - free_bytes();
            println!("{}: {needs:?}, {taken} bytes taken with 256 pages", model.name);
            undisturbed(&mut backend, model.config.vocab_size);
            let n_pages = backend.limits().n_pages;
            backend.resize(n_pages).expect("there is memory");
            let pages: Vec<_> = (0..60).map(|idx| (PageId(idx), HostPageId(idx))).collect();
            backend.swap_out(&pages).expect("moved");
        }
        free_bytes()
    };
    let after: Vec<usize> = (0..3).map(|_| round()).collect();
    let kept = after.iter().map(|&free| at_start as i64 - free as i64).collect::<Vec<_>>();
    println!("bytes that the driver keeps after each round, of {at_start} at the start: {kept:?}");
    assert_eq!(after[1], after[0], "to the byte");
    assert_eq!(after[2], after[0], "to the byte");
    assert_eq!(gpu.memory_stats().reserved_bytes, gpu.memory_stats().in_use_bytes.next_multiple_of(2 << 20));
}

#[test]
fn models_share_what_steps_compute_in_whoever_comes_and_goes() {
    let Some(card) = card() else { return };
    let model = random_models().remove(0);
    let vocab_size = model.config.vocab_size;
    let of = |n_tokens_max| load(&card, &model, &options(&model, 128, 128, n_tokens_max));
    let mut first = of(128);
    let expected = undisturbed(&mut first, vocab_size);
    // Brings more, by the residual stream alone; computes in it; the first goes on in its own.
    let mut second = of(8192);
    for _ in 0..2 {
        assert_eq!(undisturbed(&mut second, vocab_size), expected);
        assert_eq!(undisturbed(&mut first, vocab_size), expected);
    }
    let mut third = of(4096);
    drop(second);
    assert_eq!(undisturbed(&mut third, vocab_size), expected);
    assert_eq!(undisturbed(&mut first, vocab_size), expected);
    let fourth_options = options(&model, 128, 128, 8192);
    let needs = CudaBackend::needs(&card, &model, &fourth_options).expect("its needs");
    // The third still holds what the second brought.
    assert_eq!(needs.activation_bytes, 0);
    drop(third);
    let needs = CudaBackend::needs(&card, &model, &fourth_options).expect("its needs");
    assert!(needs.activation_bytes > 0);
    assert_eq!(undisturbed(&mut of(8192), vocab_size), expected);
    assert_eq!(undisturbed(&mut first, vocab_size), expected);
}
