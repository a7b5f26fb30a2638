//! Both bundled models against Hugging Face, through scheduler and engine.

use std::sync::Arc;

use trellis_engine::sampling::Sampler;
use trellis_engine::{
    Ahead, Answer, Ask, Context, Finish, MaskSource, ModelHandle, Pull, RunKey, RunSettings,
};
use trellis_tests::engines::{Sizes, block_on, encode, engine, owner};
use trellis_tests::goldens::{self, Case, Goldens};

/// Largest difference of a log-probability; float32 on both sides, summed in another order.
const TOLERANCE: f32 = 1e-3;

/// Tokens of a greedy golden, the stop token included.
const N_GREEDY_MAX: usize = 40;

async fn ask(context: &mut Context, ask: Ask) -> Answer {
    context.ask(ask).await.expect("asked").answer().await.expect("answered")
}

/// The largest difference over all positions of a prompt.
async fn compare_positions(model: &ModelHandle, case: &Case) -> f32 {
    let mut context = Context::create(model, owner(1)).await.expect("created");
    let mut worst = 0f32;
    for (position, &token) in case.prompt_ids.iter().enumerate() {
        context.append(&[token]).await.expect("fits");
        let (ids, expected) = (&case.top10_ids[position], &case.top10_logprobs[position]);
        let Answer::Scores(scores) = ask(&mut context, Ask::Scores(ids.clone())).await else {
            panic!("asked for scores");
        };
        let Answer::Top { candidates, .. } = ask(&mut context, Ask::Top { n: ids.len() }).await else {
            panic!("asked for the top");
        };
        assert_eq!(candidates.len(), ids.len());
        for (rank, &expected) in expected.iter().enumerate() {
            for found in [scores[rank], candidates[rank].logprob] {
                let difference = (found - expected).abs();
                assert!(
                    difference <= TOLERANCE,
                    "{:?}, position {position}, rank {rank}: {found} for {expected}",
                    case.prompt
                );
                worst = worst.max(difference);
            }
        }
    }
    worst
}

async fn greedy_by_stream(model: &ModelHandle, prompt: &[u32]) -> Vec<u32> {
    let mut context = Context::create(model, owner(1)).await.expect("created");
    context.append(prompt).await.expect("fits");
    let settings = || RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: model.model().stop_tokens.clone().into(),
        n_tokens_max: Some(N_GREEDY_MAX),
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    let mut tokens = Vec::new();
    loop {
        match context.pull(RunKey(0), settings).await.expect("pulled") {
            Pull::Token(drawn) => tokens.push(drawn.candidate.token),
            Pull::Finished(finish) => {
                let expected = if tokens.len() == N_GREEDY_MAX { Finish::MaxTokens } else { Finish::Stop };
                assert!(finish == expected || finish == Finish::Stop, "{finish:?} after {tokens:?}");
                return tokens;
            }
        }
    }
}

async fn greedy_by_steps(model: &ModelHandle, prompt: &[u32]) -> Vec<u32> {
    let mut context = Context::create(model, owner(1)).await.expect("created");
    context.append(prompt).await.expect("fits");
    let mut tokens = Vec::new();
    while tokens.len() < N_GREEDY_MAX {
        let sampler = Arc::new(Sampler::greedy());
        let Answer::Sampled(drawn) = ask(&mut context, Ask::Sample(sampler)).await else {
            panic!("asked for a token");
        };
        tokens.push(drawn.candidate.token);
        if model.model().stop_tokens.contains(&drawn.candidate.token) {
            break;
        }
        context.append(&[drawn.candidate.token]).await.expect("fits");
    }
    tokens
}

/// Compares what an engine computes with what Hugging Face did, on every position of every case.
pub(crate) fn compare(model: &ModelHandle, goldens: &Goldens) {
    block_on(async {
        let mut worst = 0f32;
        for case in &goldens.cases {
            assert_eq!(case.top10_ids.len(), case.prompt_ids.len(), "every position has a golden");
            worst = worst.max(compare_positions(model, case).await);
            assert_eq!(greedy_by_stream(model, &case.prompt_ids).await, case.greedy_ids, "{:?}", case.prompt);
            assert_eq!(greedy_by_steps(model, &case.prompt_ids).await, case.greedy_ids, "{:?}", case.prompt);
        }
        println!("{} on {}: largest difference {worst:e} nat", goldens.model, model.device());
    });
}

fn compare_bundled(model: &str) {
    let goldens = goldens::load(model);
    assert_eq!(goldens.model, model);
    assert_eq!(goldens.cases.len(), 8, "all cases are there");
    let engine = engine(model, Sizes::default());
    for case in &goldens.cases {
        assert_eq!(encode(engine.handle(), &case.prompt), case.prompt_ids, "{:?}", case.prompt);
    }
    compare(engine.handle(), &goldens);
}

#[test]
fn tiny_is_what_hugging_face_computes() {
    compare_bundled("tiny");
}

#[test]
fn draft_is_what_hugging_face_computes() {
    compare_bundled("draft");
}
