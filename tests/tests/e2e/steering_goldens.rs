//! Steered contexts of both bundled models against Hugging Face: what may come next, what is decoded, and hidden states.

use std::fs;

use futures_util::future::join_all;
use serde::Deserialize;
use trellis_engine::{Answer, Ask, Context, ModelHandle, Pooling, Pull, RunKey};
use trellis_tests::engines::{Sizes, block_on, engine, owner};
use trellis_tests::pack;

use crate::hidden::{greedy_looking, hidden};
use crate::steering::full;

/// Float32 on both sides, summed in another order; the goldens have five decimals.
const TOLERANCE: f32 = 1e-3;

/// Besides, of a state's size: a state is rounded by up to 2^-24 of it wherever a layer adds to it, 16 times in 8 layers. One
/// number of 12000 may be off by 0.013.
const ROUNDING: f32 = 1e-6;

#[derive(Deserialize)]
struct Goldens {
    /// Every so manieth number of a state is there.
    state_stride: usize,
    /// And every so manieth log-probability of the vocabulary.
    row_stride: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    about: String,
    prompt_ids: Vec<u32>,
    /// The first token that is steered.
    start: usize,
    vectors: Vec<Vector>,
    greedy_ids: Vec<u32>,
    greedy_logprobs: Vec<f32>,
    /// Over all tokens that are steered.
    mean: Vec<Vec<f32>>, // [n_layers + 1, ..]
    places: Vec<Place>,
}

#[derive(Deserialize)]
struct Vector {
    layer: usize,
    /// A power of two: the products are exact.
    unit: f32,
    values: Vec<i16>, // [hidden_size]
}

/// After one token of the context.
#[derive(Deserialize)]
struct Place {
    idx: usize,
    states: Vec<Vec<f32>>, // [n_layers + 1, ..]
    logprobs: Vec<f32>,
    top_ids: Vec<u32>,
    top_logprobs: Vec<f32>,
}

impl Case {
    fn vectors(&self) -> Vec<(usize, Vec<f32>)> {
        let of =
            |vector: &Vector| vector.values.iter().map(|&value| vector.unit * f32::from(value)).collect();
        self.vectors.iter().map(|vector| (vector.layer, of(vector))).collect()
    }
}

/// The largest differences there were.
#[derive(Default)]
struct Worst {
    nat: f32,
    state: f32,
}

impl Worst {
    fn logprobs(&mut self, found: impl IntoIterator<Item = f32>, expected: &[f32], about: &str) {
        let found: Vec<f32> = found.into_iter().collect();
        assert_eq!(found.len(), expected.len(), "{about}");
        for (a, b) in found.iter().zip(expected) {
            let difference = (a - b).abs();
            assert!(difference <= TOLERANCE, "{about}: a log-probability of {a} for {b}");
            self.nat = self.nat.max(difference);
        }
    }

    fn states(&mut self, found: &[Vec<f32>], expected: &[Vec<f32>], stride: usize, about: &str) {
        assert_eq!(found.len(), expected.len(), "{about}");
        for (layer, (found, expected)) in found.iter().zip(expected).enumerate() {
            let found: Vec<f32> = found.iter().copied().step_by(stride).collect();
            assert_eq!(found.len(), expected.len(), "{about}, state {layer}");
            for (a, b) in found.iter().zip(expected) {
                let difference = (a - b).abs();
                let allowed = TOLERANCE + ROUNDING * b.abs();
                assert!(difference <= allowed, "{about}, state {layer}: {a} for {b}");
                self.state = self.state.max(difference / allowed);
            }
        }
    }
}

async fn ask(context: &mut Context, ask: Ask) -> Answer {
    context.ask(ask).await.expect("asked").answer().await.expect("answered")
}

/// What is decoded greedily, and the states that it is drawn from.
async fn check_stream(context: &mut Context, goldens: &Goldens, case: &Case, worst: &mut Worst) {
    let model = context.model().clone();
    let settings = || greedy_looking(&model, 0, case.greedy_ids.len());
    for (idx, &token) in case.greedy_ids.iter().enumerate() {
        let about = format!("{}, decoded {idx}", case.about);
        let Ok(Pull::Token(drawn)) = context.pull(RunKey(0), settings).await else { panic!("{about}") };
        assert_eq!(drawn.candidate.token, token, "{about}");
        worst.logprobs([drawn.candidate.logprob], &case.greedy_logprobs[idx..=idx], &about);
        let seen = drawn.seen.expect("it looks");
        if let Some(place) = case.places.iter().find(|place| place.idx + 1 == case.prompt_ids.len() + idx) {
            worst.states(&seen.hidden, &place.states, goldens.state_stride, &about);
        }
    }
}

/// A case; its context may have been steered otherwise, and computed so, before.
async fn check(model: &ModelHandle, goldens: &Goldens, case: &Case, earlier: Option<&Case>) -> Worst {
    let (about, mut worst) = (&case.about, Worst::default());
    let mut context = Context::create(model, owner(1)).await.expect("created");
    context.append(&case.prompt_ids).await.expect("fits");
    if let Some(earlier) = earlier {
        context.steer(earlier.vectors(), 0).await.expect("it fits");
        full(&mut context).await;
    }
    context.steer(case.vectors(), case.start).await.expect("it fits");
    match ask(&mut context, Ask::Continuation(case.greedy_ids.clone())).await {
        Answer::Scores(scores) => worst.logprobs(scores, &case.greedy_logprobs, about),
        other => panic!("{other:?}"),
    }
    check_stream(&mut context, goldens, case, &mut worst).await;
    for place in &case.places {
        let about = format!("{about}, token {}", place.idx);
        let mut up_to = context.fork().await.expect("it is counted");
        up_to.truncate(place.idx + 1).await.expect("it is there");
        let row = full(&mut up_to).await;
        worst.logprobs(row.iter().copied().step_by(goldens.row_stride), &place.logprobs, &about);
        worst.logprobs(place.top_ids.iter().map(|&id| row[id as usize]), &place.top_logprobs, &about);
        let states = hidden(&mut up_to, Pooling::Last).await;
        worst.states(&states, &place.states, goldens.state_stride, &about);
        match ask(&mut up_to, Ask::Embedding).await {
            Answer::Embedding(state) => {
                let last = &place.states[place.states.len() - 1..];
                worst.states(
                    &[state],
                    last,
                    goldens.state_stride,
                    &format!("{about}, what the final norm gives"),
                );
            }
            other => panic!("{other:?}"),
        }
    }
    let mean = hidden(&mut context, Pooling::MeanFrom(case.start)).await;
    worst.states(&mean, &case.mean, goldens.state_stride, &format!("{about}, the mean"));
    worst
}

fn check_all(name: &str) {
    let path = pack::root().join(format!("tests/golden/steering-{name}.json"));
    let goldens: Goldens =
        serde_json::from_slice(&fs::read(path).expect("the goldens are there")).expect("they parse");
    assert_eq!(goldens.cases.len(), 13, "all cases are there");
    // One user: the cases share what was computed before their first steered tokens.
    let mut all = Vec::new();
    let alone = engine(name, Sizes::default());
    for case in &goldens.cases {
        all.push(block_on(check(alone.handle(), &goldens, case, None)));
    }
    // All in the same steps, which cut the prompts, in contexts that were steered as another case is.
    let crowd = engine(name, Sizes { n_step_tokens: 24, n_step_rows: 16, ..Sizes::default() });
    let others = goldens.cases.iter().cycle().skip(1);
    let together = goldens
        .cases
        .iter()
        .zip(others)
        .map(|(case, other)| check(crowd.handle(), &goldens, case, Some(other)));
    all.extend(block_on(join_all(together)));
    let largest = |of: fn(&Worst) -> f32| all.iter().map(of).fold(0.0, f32::max);
    let (nat, state) = (largest(|worst| worst.nat), largest(|worst| worst.state));
    println!(
        "{name} on {}: largest differences {nat:e} nat, {state:e} of what a state is allowed",
        alone.handle().device()
    );
}

#[test]
fn steered_tiny_is_what_hugging_face_computes() {
    check_all("tiny");
}

#[test]
fn steered_draft_is_what_hugging_face_computes() {
    check_all("draft");
}
