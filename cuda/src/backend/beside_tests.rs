//! How much a model that decodes notices of another that loads and goes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{OutputKind, Token};
use trellis_engine::model::{Dtype, Model, shape};
use trellis_engine::sampling::Sampler;

use super::tests::{root, row, tokens};
use super::*;
use crate::testing::{Random, gpu_alone};

const N_CONTEXTS: usize = 8;
const N_PROMPT: usize = 128;
/// Pages of a context: room for what it draws until it begins again.
const N_CONTEXT_PAGES: usize = 64;

/// Design, section 3 of the issue: the other's longest silence, and its pace.
const SILENCE_MAX: Duration = Duration::from_millis(100);
const PACE_MIN: f64 = 0.7;

/// Contexts that decode with two steps under way, as an engine would.
struct Stream<'a> {
    backend: &'a mut CudaBackend,
    contexts: Vec<Vec<Token>>,
    last: Instant,
    gaps: Vec<Duration>,
}

impl<'a> Stream<'a> {
    fn new(backend: &'a mut CudaBackend) -> Self {
        let mut random = Random(4);
        let contexts = (0..N_CONTEXTS).map(|_| tokens(&mut random, N_PROMPT, 100_000)).collect();
        let mut stream = Self { backend, contexts, last: Instant::now(), gaps: Vec::new() };
        stream.submit(|_| Input::Known, 0);
        stream
    }

    /// Submits a step of all contexts, from a position on or, at most, with their last token.
    fn submit(&mut self, input: fn(SlotId) -> Input, start: usize) {
        let greedy = Sampler::greedy();
        let rows = self.contexts.iter().enumerate().map(|(idx, tokens)| {
            let input = input(SlotId(idx as u32));
            let last = tokens.len() - usize::from(input == Input::Known);
            let asked = vec![(last, OutputKind::Sample(&greedy))];
            Row { input, ..row(idx as u32, tokens, start.min(last), idx * N_CONTEXT_PAGES, asked) }
        });
        let batch = Batch { copies: &[], rows: rows.collect() };
        self.backend.submit(&batch).expect("it runs");
    }

    fn step(&mut self) {
        self.submit(Input::Drawn, usize::MAX);
        let outputs = self.backend.collect().expect("it runs").outputs;
        self.gaps.push(self.last.elapsed());
        self.last = Instant::now();
        for (tokens, output) in self.contexts.iter_mut().zip(outputs) {
            let Output::Sampled(drawn) = output else { panic!("{output:?}") };
            tokens.push(drawn.token);
        }
        // Pages hold whatever they hold: the time does not depend on it.
        if self.contexts[0].len() + 4 >= N_CONTEXT_PAGES * PAGE_LEN {
            self.backend.collect().expect("it runs");
            self.contexts.iter_mut().for_each(|tokens| tokens.truncate(N_PROMPT));
            self.submit(|_| Input::Known, usize::MAX);
        }
    }

    /// Decodes until `is_over`; the longest silences, and steps a second.
    fn run(&mut self, mut is_over: impl FnMut(usize) -> bool) -> ([Duration; 5], f64) {
        self.gaps.clear();
        self.last = Instant::now();
        let begun = Instant::now();
        while !is_over(self.gaps.len()) {
            self.step();
        }
        let rate = self.gaps.len() as f64 / begun.elapsed().as_secs_f64();
        self.gaps.sort_unstable_by(|a, b| b.cmp(a));
        let mut longest = self.gaps.iter().copied();
        ([(); 5].map(|()| longest.next().unwrap_or_default()), rate)
    }
}

/// One model loads and goes, again and again, the first time with cold caches, while another decodes.
#[test]
#[ignore = "measures"]
fn a_model_loads_and_goes_beside_one_that_decodes() {
    let Some(_) = gpu_alone() else { return };
    let caches = tempfile::tempdir().expect("a folder");
    let card = Card::open(0, Some(caches.path())).expect("a card");
    let tokenizer = std::fs::read(root().join("daemon/models/tiny/tokenizer.json")).expect("a tokenizer");
    let model = |name| {
        let config = shape(name).expect("a shape");
        Model::with_random_weights(name, config, Dtype::Bf16, 1, &tokenizer).expect("a model")
    };
    let (decoded, loaded) = (model("llama-3.2-1b"), model("llama-3.1-8b"));
    let options = |model: &Model, n_pages: u64| CudaOptions {
        dtype: None,
        kv_bytes: n_pages * CudaBackend::page_bytes(&model.config, Dtype::Bf16),
        kv_bytes_max: n_pages * CudaBackend::page_bytes(&model.config, Dtype::Bf16),
        kv_host_bytes: 1 << 30,
        n_rows_max: 256,
        n_tokens_max: 2048,
    };
    let load = |model: &Model, n_pages| {
        CudaBackend::load(&card, model, &options(model, n_pages), &|_, _| {}).expect("it loads")
    };
    let mut backend = load(&decoded, 2048);
    let free_bytes = || card.gpu().free_bytes().expect("the driver answers");
    let mut stream = Stream::new(&mut backend);
    stream.run(|n_steps| n_steps == 200);
    let (alone_longest, alone_rate) = stream.run(|n_steps| n_steps == 2000);
    println!("{}: alone {alone_rate:.0} steps a second, longest silences {alone_longest:.2?}", decoded.name);
    let (mut free, mut failures) = (Vec::new(), Vec::new());
    for round in 0..4 {
        let is_over = AtomicBool::new(false);
        let mut judge = |what: &str, took: Duration, (longest, rate): ([Duration; 5], f64), pace_min: f64| {
            let pace = rate / alone_rate;
            let said = format!(
                "round {round}: {} {what} ({took:.3?}); beside it longest silences {longest:.2?}, pace {:.0} %",
                loaded.name,
                pace * 100.0
            );
            println!("{said}");
            // All rounds are to be seen before any is judged.
            let is_quiet = longest[0] <= SILENCE_MAX && pace >= pace_min;
            if !is_quiet {
                failures.push(said);
            }
        };
        std::thread::scope(|scope| {
            let (is_over, load, loaded) = (&is_over, &load, &loaded);
            let loading = scope.spawn(move || {
                let begun = Instant::now();
                let backend = load(loaded, 4096);
                is_over.store(true, Ordering::Relaxed);
                (backend, begun.elapsed())
            });
            let beside = stream.run(|_| is_over.load(Ordering::Relaxed));
            let (mut other, took) = loading.join().expect("no panic");
            judge("loads", took, beside, PACE_MIN);
            // Its first steps, on this thread: prompts, and decoding until it is captured. Both share the device then.
            let begun = Instant::now();
            let mut of_other = Stream::new(&mut other);
            let beside = stream.run(|n_steps| {
                of_other.step();
                n_steps == 50
            });
            judge("begins", begun.elapsed(), beside, 0.0);
            // The first of its host memory may still be being page-locked.
            let begun = Instant::now();
            let beside = stream.run(|_| begun.elapsed() > Duration::from_secs(1));
            judge("idles", begun.elapsed(), beside, PACE_MIN);
            is_over.store(false, Ordering::Relaxed);
            let leaving = scope.spawn(move || {
                let begun = Instant::now();
                drop(other);
                is_over.store(true, Ordering::Relaxed);
                begun.elapsed()
            });
            let beside = stream.run(|_| is_over.load(Ordering::Relaxed));
            // A few milliseconds, of which no pace can be told.
            judge("goes", leaving.join().expect("no panic"), beside, 0.0);
        });
        free.push(free_bytes());
    }
    println!("free after each round: {free:?}");
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(free[1..].iter().all(|&after| after == free[0]), "to the byte");
}
