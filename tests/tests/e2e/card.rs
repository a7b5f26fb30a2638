//! Models that share a card.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use trellis_cuda::{CudaBackend, CudaOptions, LoadError};
use trellis_engine::model::{Dtype, ModelConfig, shape};
use trellis_engine::sampling::Sampler;
use trellis_engine::{
    Ahead, Answer, Ask, Context, MaskSource, ModelHandle, OneModel, Pull, RunKey, RunSettings,
};
use trellis_tests::device::{CardAlone, card_alone};
use trellis_tests::engines::{Random, Sizes, block_on, cuda_backend, owner, start};
use trellis_tests::goldens;
use trellis_tests::models;

/// Generates the greedy goldens of a model, again and again, until it is over and every one has been seen.
async fn generate(model: ModelHandle, is_over: Arc<AtomicBool>) -> usize {
    let goldens = goldens::load(&model.model().name);
    let mut n_rounds = 0;
    while n_rounds < goldens.cases.len() || !is_over.load(Ordering::Relaxed) {
        let case = &goldens.cases[n_rounds % goldens.cases.len()];
        let mut context = Context::create(&model, owner(1)).await.expect("created");
        context.append(&case.prompt_ids).await.expect("fits");
        let settings = || RunSettings {
            sampler: Arc::new(Sampler::greedy()),
            stop_tokens: model.model().stop_tokens.clone().into(),
            n_tokens_max: Some(case.greedy_ids.len()),
            ahead: Ahead::Adaptive,
            masks: MaskSource::Sampler,
        };
        let mut tokens = Vec::new();
        while let Pull::Token(drawn) = context.pull(RunKey(0), settings).await.expect("pulled") {
            tokens.push(drawn.candidate.token);
        }
        assert_eq!(tokens, case.greedy_ids, "round {n_rounds}: {:?}", case.prompt);
        n_rounds += 1;
    }
    n_rounds
}

fn bundled(alone: &CardAlone, name: &str) -> OneModel {
    let (model, sizes) = (models::bundled(name), Sizes::default());
    let backend = cuda_backend(&alone.card, &model, sizes, Dtype::F32).expect("the model loads");
    start(model, Box::new(backend), sizes)
}

/// Asserts that a model does not fit, and that the refusal says by how much.
fn is_refused(alone: &CardAlone, config: ModelConfig, kv_bytes: u64) {
    let gpu = alone.card.gpu();
    let model = models::random("huge", config, Dtype::Bf16);
    let options = CudaOptions {
        dtype: None,
        kv_bytes,
        kv_bytes_max: kv_bytes,
        kv_host_bytes: 0,
        n_rows_max: 8,
        n_tokens_max: 64,
    };
    let before = gpu.memory_stats().in_use_bytes;
    let refusal = match CudaBackend::load(&alone.card, &model, &options, &|_, _| {}) {
        Ok(_) => panic!("it was loaded"),
        Err(refusal) => refusal,
    };
    println!("{refusal}");
    match refusal {
        LoadError::DoesNotFit { model, needed_bytes, weight_bytes, free_bytes, total_bytes, .. } => {
            assert_eq!(model, "huge");
            assert!(
                needed_bytes > free_bytes && weight_bytes <= needed_bytes,
                "{needed_bytes}, {weight_bytes}"
            );
            assert!(free_bytes <= total_bytes && total_bytes == gpu.total_bytes() as u64);
        }
        other => panic!("{other}"),
    }
    assert_eq!(gpu.memory_stats().in_use_bytes, before, "a model that was refused holds memory");
}

#[test]
fn models_share_a_card_and_one_too_large_is_refused_while_they_go_on() {
    let Some(alone) = card_alone() else { return };
    let engines = [bundled(&alone, "tiny"), bundled(&alone, "draft")];
    block_on(async {
        let is_over = Arc::new(AtomicBool::new(false));
        let tasks: Vec<_> = engines
            .iter()
            .map(|engine| tokio::spawn(generate(engine.handle().clone(), is_over.clone())))
            .collect();

        let total_bytes = alone.card.gpu().total_bytes() as u64;
        let large = shape("llama-3.2-1b").expect("a known shape");
        // Twice the card in weights; then weights that fit, with a KV cache that does not.
        let layer_bytes = 2 * 4 * (large.hidden_size * large.intermediate_size) as u64;
        let n_layers = (2 * total_bytes / layer_bytes) as usize;
        is_refused(&alone, ModelConfig { n_layers, windows: vec![None; n_layers], ..large.clone() }, 0);
        is_refused(&alone, large.clone(), total_bytes);

        // One that fits is loaded beside the two.
        let model = models::random("large", large, Dtype::Bf16);
        let sizes = Sizes { n_pages: 16_384, n_host_pages: 0, ..Sizes::default() };
        let backend = cuda_backend(&alone.card, &model, sizes, Dtype::Bf16).expect("it fits");
        let engine = start(model, Box::new(backend), sizes);
        let mut context = Context::create(engine.handle(), owner(2)).await.expect("created");
        let tokens = Random(3).tokens(300, 4096);
        context.append(&tokens).await.expect("fits");
        match context.ask(Ask::Full).await.expect("asked").answer().await.expect("computed") {
            Answer::Full(logprobs) => {
                let sum: f64 = logprobs.iter().map(|&logprob| f64::from(logprob).exp()).sum();
                assert!((sum - 1.0).abs() <= 1e-3, "the probabilities add up to {sum}");
            }
            other => panic!("{other:?}"),
        }
        drop((context, engine));

        is_over.store(true, Ordering::Relaxed);
        for task in tasks {
            assert!(task.await.expect("the others go on") > 0);
        }
    });
}
