//! The bundled models against what Hugging Face transformers computed for them in float32.

use std::path::PathBuf;

use serde::Deserialize;
use trellis_engine::batch::{Output, OutputKind, Token};
use trellis_engine::sampling::Sampler;

use crate::support::{bundled, bundled_model, forward, full, row};

/// Design section 10; the reference prints five decimals.
const TOLERANCE: f32 = 1e-3;
const N_NEW_TOKENS_MAX: usize = 40;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    prompt_ids: Vec<Token>,
    top10_ids: Vec<Vec<Token>>,
    top10_logprobs: Vec<Vec<f32>>,
    greedy_ids: Vec<Token>,
}

fn cases(model: &str) -> Vec<Case> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/{model}.json"));
    let text = std::fs::read_to_string(&path).expect("the golden file is there");
    serde_json::from_str::<Golden>(&text).expect("the golden file has its format").cases
}

fn check_logprobs(model: &str) {
    let mut backend = bundled(model);
    for case in cases(model) {
        let asked = (0..case.prompt_ids.len()).map(|position| (position, OutputKind::Full)).collect();
        let outputs = forward(&mut backend, vec![row(&case.prompt_ids, 0, 0, asked)]);
        assert_eq!(outputs.len(), case.top10_ids.len());
        for (position, output) in outputs.into_iter().enumerate() {
            let logprobs = full(output);
            let golden = case.top10_ids[position].iter().zip(&case.top10_logprobs[position]);
            for (&token, want) in golden {
                let got = logprobs[token as usize];
                let diff = (got - want).abs();
                assert!(diff <= TOLERANCE, "{model} {:?} at {position}: {got} {want}", case.prompt);
            }
        }
    }
}

fn check_greedy(model: &str) {
    let stop_tokens = bundled_model(model).stop_tokens;
    let mut backend = bundled(model);
    let greedy = Sampler::greedy();
    for case in cases(model) {
        let (mut tokens, mut start) = (case.prompt_ids.clone(), 0);
        loop {
            let last = tokens.len() - 1;
            let asked = vec![(last, OutputKind::Sample(&greedy))];
            let outputs = forward(&mut backend, vec![row(&tokens, start, 0, asked)]);
            let [Output::Sampled(drawn)] = outputs[..] else { panic!("{outputs:?}") };
            start = tokens.len();
            tokens.push(drawn.token);
            let n_new = tokens.len() - case.prompt_ids.len();
            if stop_tokens.contains(&drawn.token) || n_new == N_NEW_TOKENS_MAX {
                break;
            }
        }
        assert_eq!(tokens[case.prompt_ids.len()..], case.greedy_ids, "{model} {:?}", case.prompt);
    }
}

#[test]
fn logprobs_of_tiny() {
    check_logprobs("tiny");
}

#[test]
fn logprobs_of_draft() {
    check_logprobs("draft");
}

#[test]
fn greedy_sequences_of_tiny() {
    check_greedy("tiny");
}

#[test]
fn greedy_sequences_of_draft() {
    check_greedy("draft");
}
