//! Hidden states of both bundled models against Hugging Face: of prompts, of means over them, and of what is decoded.

use std::fs;
use std::sync::Arc;

use serde::Deserialize;
use trellis_engine::sampling::{Looks, Sampler};
use trellis_engine::{
    Ahead, Answer, Ask, Context, MaskSource, ModelHandle, Pooling, Pull, RunKey, RunSettings,
};
use trellis_tests::engines::{Sizes, block_on, engine, owner};
use trellis_tests::pack;

/// Float32 on both sides, summed in another order; the goldens have five decimals.
const TOLERANCE: f32 = 1e-3;

#[derive(Deserialize)]
struct Goldens {
    /// Every so manieth number of a state is there.
    stride: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    /// Before each of the greedy tokens.
    last: Vec<Vec<Vec<f32>>>, // [n_greedy, n_layers + 1, ..]
    mean: Vec<Vec<f32>>,        // [n_layers + 1, ..]
    mean_from_1: Vec<Vec<f32>>, // [n_layers + 1, ..]
}

impl Goldens {
    fn compare(&self, found: &[Vec<f32>], expected: &[Vec<f32>], about: &str) {
        assert_eq!(found.len(), expected.len(), "{about}");
        for (layer, (found, expected)) in found.iter().zip(expected).enumerate() {
            let found: Vec<f32> = found.iter().copied().step_by(self.stride).collect();
            assert_eq!(found.len(), expected.len(), "{about}, layer {layer}");
            for (a, b) in found.iter().zip(expected) {
                assert!((a - b).abs() <= TOLERANCE, "{about}, layer {layer}: {a} for {b}");
            }
        }
    }
}

/// The states after so many layers, from the embedding on.
pub(crate) async fn hidden(context: &mut Context, pooling: Pooling) -> Vec<Vec<f32>> {
    let n_layers = (0..=context.model().model().config.n_layers).collect();
    match context.ask(Ask::Hidden { n_layers, pooling }).await.expect("asked").answer().await {
        Ok(Answer::Hidden(states)) => states,
        other => panic!("{other:?}"),
    }
}

/// So many greedy tokens, each with the hidden states after any number of layers and with the most probable tokens.
pub(crate) fn greedy_looking(model: &ModelHandle, n_top: usize, n_tokens: usize) -> RunSettings {
    let looks = Looks { n_top, hidden: (0..=model.model().config.n_layers).collect() };
    RunSettings {
        sampler: Arc::new(Sampler { looks, ..Sampler::greedy() }),
        stop_tokens: Arc::new([]),
        n_tokens_max: Some(n_tokens),
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    }
}

async fn check(model: &ModelHandle, goldens: &Goldens, case: &Case) {
    let mut context = Context::create(model, owner(1)).await.expect("created");
    context.append(&case.prompt_ids).await.expect("fits");
    goldens.compare(&hidden(&mut context, Pooling::MeanFrom(0)).await, &case.mean, "the mean");
    goldens.compare(&hidden(&mut context, Pooling::Last).await, &case.last[0], "the last token");
    goldens.compare(&hidden(&mut context, Pooling::MeanFrom(1)).await, &case.mean_from_1, "but the first");

    let settings = || greedy_looking(model, 3, case.greedy_ids.len());
    for (expected, &token) in case.last.iter().zip(&case.greedy_ids) {
        let Ok(Pull::Token(drawn)) = context.pull(RunKey(0), settings).await else { panic!("a token") };
        assert_eq!(drawn.candidate.token, token);
        let seen = drawn.seen.expect("it looks");
        goldens.compare(&seen.hidden, expected, "what is decoded");
        assert_eq!(seen.top.expect("three tokens").candidates[0].token, token);
    }
}

fn check_all(name: &str) {
    let path = pack::root().join(format!("tests/golden/hidden-{name}.json"));
    let goldens: Goldens =
        serde_json::from_slice(&fs::read(path).expect("the goldens are there")).expect("they parse");
    // Prompts in one piece, and cut.
    for n_step_tokens in [256, 7] {
        let engine = engine(name, Sizes { n_step_tokens, n_step_rows: 4, ..Sizes::default() });
        block_on(async {
            for case in &goldens.cases {
                check(engine.handle(), &goldens, case).await;
            }
        });
    }
}

#[test]
fn hidden_states_of_tiny_are_those_of_hugging_face() {
    check_all("tiny");
}

#[test]
fn hidden_states_of_draft_are_those_of_hugging_face() {
    check_all("draft");
}
