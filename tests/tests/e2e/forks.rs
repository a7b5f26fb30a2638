//! A fork shares pages: it takes neither memory nor time that grows with the text.

use std::sync::Arc;
use std::time::{Duration, Instant};

use trellis::config::Device;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::model::Dtype;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Answer, Ask, Context, EngineStats, ModelHandle};
use trellis_tests::device::device;
use trellis_tests::engines::{Random, Sizes, backend, block_on, owner, start};
use trellis_tests::models;

const N_FORKS: usize = 64;
const N_ROUNDS: usize = 21;

/// The most that a fork may take, for the guest and for the engine.
const FORK_TIME_MAX: Duration = Duration::from_micros(10);

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// By then an engine has carried out what it was asked.
const COMMANDS_TIME_MAX: Duration = Duration::from_secs(60);

/// What an engine says of itself once it has so many contexts. Commands of one guest are taken in by and by, and a question
/// that comes after them is another's.
async fn until_contexts(model: &ModelHandle, n_contexts: usize) -> EngineStats {
    let begun = Instant::now();
    loop {
        let stats = model.stats().await.expect("the engine lives");
        if stats.n_contexts == n_contexts {
            return stats;
        }
        assert!(begun.elapsed() < COMMANDS_TIME_MAX, "{n_contexts} contexts: {stats:?}");
    }
}

#[test]
fn a_fork_of_a_long_context_takes_no_page_and_no_time() {
    // A prompt of 8,192 tokens is too much for a test on the processor.
    let n_tokens = if device() == Device::Cuda { 8192 } else { 1024 };
    let config = models::small(n_tokens + PAGE_LEN);
    let vocab_size = config.vocab_size;
    let model = models::random("long", config, Dtype::F32);
    // Two pages for each fork to write to: a copy of the context would not fit.
    let sizes = Sizes {
        n_pages: n_tokens / PAGE_LEN + 1 + 2 * N_FORKS,
        n_host_pages: 0,
        n_step_rows: N_FORKS + 1,
        n_step_tokens: 512,
    };
    let backend = backend(&model, sizes);
    let engine = start(model, backend, sizes);
    let model = engine.handle();
    block_on(async {
        let mut root = Context::create(model, owner(1)).await.expect("created");
        root.append(&Random(1).tokens(n_tokens, vocab_size)).await.expect("fits");
        let prefilled = root.ask(Ask::Prefill).await.expect("asked").answer().await.expect("computed");
        assert_eq!(prefilled, Answer::Prefilled);
        let before = model.stats().await.expect("the engine lives");

        let (mut callers, mut engines) = (Vec::new(), Vec::new());
        let mut forks = Vec::new();
        for _ in 0..N_ROUNDS {
            forks.clear();
            until_contexts(model, 1).await;
            let begun = Instant::now();
            for _ in 0..N_FORKS {
                forks.push(root.fork().await.expect("forked"));
            }
            callers.push(begun.elapsed() / N_FORKS as u32);
            let stats = until_contexts(model, 1 + N_FORKS).await;
            engines.push(begun.elapsed() / N_FORKS as u32);
            assert_eq!(stats.n_pages_free, before.n_pages_free, "a fork has taken a page: {stats:?}");
            assert_eq!(stats.n_tokens, before.n_tokens, "a fork has computed something: {stats:?}");
        }
        let (caller, engine_side) = (median(&mut callers), median(&mut engines));
        println!(
            "fork of {n_tokens} tokens on {}: {caller:?} for the caller, {engine_side:?} until the engine has done it",
            model.device()
        );
        if device() == Device::Cuda {
            assert!(caller < FORK_TIME_MAX && engine_side < FORK_TIME_MAX, "{caller:?}, {engine_side:?}");
        }

        // Every fork goes on where the root does.
        let sampler = Arc::new(Sampler::greedy());
        let mut pending = Vec::new();
        for context in std::iter::once(&mut root).chain(&mut forks) {
            pending.push(context.ask(Ask::Sample(sampler.clone())).await.expect("asked"));
        }
        let mut drawn = Vec::new();
        for pending in pending {
            match pending.answer().await.expect("drawn") {
                Answer::Sampled(one) => drawn.push(one.candidate.token),
                other => panic!("{other:?}"),
            }
        }
        assert!(drawn.iter().all(|&token| token == drawn[0]), "{drawn:?}");
        drop((root, forks));
        let stats = until_contexts(model, 0).await;
        assert_eq!(stats.n_pages_free + stats.n_pages_cached, stats.n_pages, "to the page: {stats:?}");
    });
}
