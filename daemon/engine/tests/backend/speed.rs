//! Tokens per second of `tiny`, printed. Run in release:
//! `cargo test --release -p trellis-engine --test backend -- --ignored --nocapture speed`.

use std::time::Instant;

use trellis_engine::backend::Backend;
use trellis_engine::batch::{Output, OutputKind, Token};
use trellis_engine::cpu::CpuBackend;
use trellis_engine::sampling::Sampler;

use crate::support::{bundled, forward, n_pages, row};

const N_PROMPT_TOKENS: usize = 20;
const N_NEW_TOKENS: usize = 256;

fn prompt(context_idx: usize) -> Vec<Token> {
    (0..N_PROMPT_TOKENS).map(|i| ((i * 37 + context_idx * 101) % 4000 + 10) as Token).collect()
}

/// Decodes `n_contexts` side by side and returns tokens per second.
fn decode(backend: &mut CpuBackend, n_contexts: usize, sampler: &Sampler) -> f64 {
    let mut contexts: Vec<Vec<Token>> = (0..n_contexts).map(prompt).collect();
    let pages_each = n_pages(N_PROMPT_TOKENS + N_NEW_TOKENS);
    let mut started = Instant::now();
    for step in 0..N_NEW_TOKENS {
        if step == 1 {
            started = Instant::now();
        }
        let rows = contexts.iter().enumerate().map(|(idx, tokens)| {
            let start = if step == 0 { 0 } else { tokens.len() - 1 };
            row(tokens, start, idx * pages_each, vec![(tokens.len() - 1, OutputKind::Sample(sampler))])
        });
        let outputs = forward(backend, rows.collect());
        for (tokens, output) in contexts.iter_mut().zip(outputs) {
            let Output::Sampled(drawn) = output else { panic!("{output:?}") };
            tokens.push(drawn.token);
        }
    }
    ((N_NEW_TOKENS - 1) * n_contexts) as f64 / started.elapsed().as_secs_f64()
}

#[test]
#[ignore = "prints timings; meant for a release build on an idle machine"]
fn speed() {
    let started = Instant::now();
    let mut backend = bundled("tiny");
    println!("loaded in {} ms", started.elapsed().as_millis());
    println!("{}", backend.device());
    let greedy = Sampler::greedy();
    let seeded = Sampler { temperature: 1.0, seed: 1, ..Sampler::greedy() };
    let nucleus = Sampler { top_p: Some(0.9), ..seeded.clone() };
    for (name, sampler) in [("greedy", &greedy), ("seeded", &seeded), ("nucleus", &nucleus)] {
        for n_contexts in [1, 2, 4, 8, 16, 32] {
            let rate = (0..3).map(|_| decode(&mut backend, n_contexts, sampler)).fold(0.0, f64::max);
            println!("{name:8} {n_contexts:3} contexts {rate:8.0} tokens/s");
        }
    }
    let tokens: Vec<Token> = (0..1000).map(|i| (i * 37 % 4000) as Token).collect();
    let started = Instant::now();
    forward(&mut backend, vec![row(&tokens, 0, 0, vec![(999, OutputKind::Sample(&greedy))])]);
    println!("prefill  {:8.0} tokens/s", 1000.0 / started.elapsed().as_secs_f64());
}
