//! Steered contexts over a whole engine: what is shared and what is not, whatever becomes of their pages.

use std::sync::Arc;

use trellis_engine::batch::Token;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Answer, Ask, Context, EngineError, ModelHandle, SteeringError};
use trellis_tests::device::Nat;
use trellis_tests::engines::{Sizes, block_on, encode, engine, owner};

use crate::guests::{decode, model, run};

/// Long enough for several pages.
const TEXT: &str = "Once upon a time there was a little girl who lived in a small house near the forest. One day she \
                    went out to look for her cat, and on the way she met an old man with a long white beard.";

fn vectors(model: &ModelHandle, value: f32) -> Vec<(usize, Vec<f32>)> {
    let hidden_size = model.limits().hidden_size;
    let vector = |sign: f32| (0..hidden_size).map(|i| sign * value * (i % 7) as f32 / 7.0).collect();
    vec![(1, vector(1.0)), (3, vector(-1.0))]
}

async fn context(model: &ModelHandle, tokens: &[Token]) -> Context {
    let mut context = Context::create(model, owner(1)).await.expect("created");
    context.append(tokens).await.expect("fits");
    context
}

/// The log-probabilities of the whole vocabulary.
pub(crate) async fn full(context: &mut Context) -> Vec<f32> {
    match context.ask(Ask::Full).await.expect("asked").answer().await {
        Ok(Answer::Full(row)) => row,
        other => panic!("{other:?}"),
    }
}

async fn draw(context: &mut Context, sampler: &Arc<Sampler>) -> Token {
    match context.ask(Ask::Sample(sampler.clone())).await.expect("asked").answer().await {
        Ok(Answer::Sampled(drawn)) => drawn.candidate.token,
        other => panic!("{other:?}"),
    }
}

/// To the bit on the CPU, up to rounding on CUDA.
fn assert_same(found: &[f32], expected: &[f32]) {
    let nats = |row: &[f32]| row.iter().copied().map(Nat).collect::<Vec<_>>();
    assert!(nats(found) == nats(expected));
}

fn differ(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).any(|(a, b)| (a - b).abs() > 1e-2)
}

#[test]
fn steering_by_zero_changes_no_bit_and_neighbours_neither() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    block_on(async {
        let tokens = encode(model, TEXT);
        let plain = full(&mut context(model, &tokens).await).await;
        let mut zero = context(model, &tokens).await;
        for value in [0.0, -0.0] {
            zero.steer(vectors(model, value), 5).await.expect("it fits");
            assert_same(&full(&mut zero).await, &plain);
        }
        // In one batch with a steered one, which was computed as it is steered from its fifth token on.
        let mut steered = context(model, &tokens).await;
        steered.steer(vectors(model, 1.0), 5).await.expect("it fits");
        let mut other = context(model, &tokens[1..]).await;
        let alone = full(&mut context(model, &tokens[1..]).await).await;
        let asked = [steered.ask(Ask::Full).await, other.ask(Ask::Full).await];
        let [steered_row, other_row] = asked.map(|asked| asked.expect("asked"));
        let Ok(Answer::Full(steered_row)) = steered_row.answer().await else { panic!("a row") };
        let Ok(Answer::Full(other_row)) = other_row.answer().await else { panic!("a row") };
        assert_same(&other_row, &alone);
        assert!(differ(&steered_row, &plain));
        // Taken off again.
        steered.steer(Vec::new(), 0).await.expect("it fits");
        assert_same(&full(&mut steered).await, &plain);
    });
}

#[test]
fn pages_are_shared_up_to_the_first_steered_token_and_not_from_there_on() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    block_on(async {
        let tokens = encode(model, TEXT);
        let n_cached = || async { model.stats().await.expect("it works").n_tokens_cached };
        let mut steered = context(model, &tokens).await;
        steered.steer(vectors(model, 1.0), 20).await.expect("it fits");
        let first = full(&mut steered).await;
        assert_eq!(n_cached().await, 0);
        // One that is not steered finds the first page; one that is finds all full ones but that of its last token.
        let n_full = (tokens.len() as u64 - 1) / 16 * 16;
        let plain = full(&mut context(model, &tokens).await).await;
        assert_eq!(n_cached().await, 16);
        assert!(differ(&first, &plain));
        let mut again = context(model, &tokens).await;
        again.steer(vectors(model, 1.0), 20).await.expect("it fits");
        assert_same(&full(&mut again).await, &first);
        assert_eq!(n_cached().await, 16 + n_full);
        for (value, from, n_found) in [(1.0, 21, 16), (1.5, 20, 16), (1.0, 3, 0), (1.0, 40, 32)] {
            let before = n_cached().await;
            let mut other = context(model, &tokens).await;
            other.steer(vectors(model, value), from).await.expect("it fits");
            assert!(differ(&full(&mut other).await, &first));
            assert_eq!(n_cached().await - before, n_found, "{value} from {from}");
        }
    });
}

#[test]
fn forks_saved_copies_and_truncations_are_steered_as_what_they_come_from() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    block_on(async {
        let tokens = encode(model, TEXT);
        let (head, tail) = tokens.split_at(30);
        let mut whole = context(model, &tokens).await;
        whole.steer(vectors(model, 1.0), 25).await.expect("it fits");
        let expected = full(&mut whole).await;
        let plain = full(&mut context(model, &tokens).await).await;

        // Steered before the tokens come, and from a place past the end for a while.
        let mut early = context(model, head).await;
        early.steer(vectors(model, 1.0), 25).await.expect("it fits");
        early.truncate(10).await.expect("they are there");
        early.append(&tokens[10..30]).await.expect("fits");
        let mut fork = early.fork().await.expect("it is counted");
        fork.append(tail).await.expect("fits");
        assert_same(&full(&mut fork).await, &expected);
        early.save("steered").await.expect("it is counted");
        let mut opened = Context::open(model, owner(1), "steered").await.expect("it is there");
        opened.append(tail).await.expect("fits");
        assert_same(&full(&mut opened).await, &expected);
        // A fork that is steered no more changes nothing for the one that it comes from.
        fork.steer(Vec::new(), 0).await.expect("it fits");
        assert_same(&full(&mut fork).await, &plain);
        assert_same(&full(&mut whole).await, &expected);
        early.append(tail).await.expect("fits");
        assert_same(&full(&mut early).await, &expected);

        // What is drawn under steering is what one that holds it from the start would draw.
        let greedy = Arc::new(Sampler::greedy());
        let mut drawn = whole.fork().await.expect("it is counted");
        for _ in 0..20 {
            let mut fresh = context(model, &drawn.tokens().to_vec()).await;
            fresh.steer(vectors(model, 1.0), 25).await.expect("it fits");
            let token = draw(&mut drawn, &greedy).await;
            assert_eq!(token, draw(&mut fresh, &greedy).await);
            drawn.append(&[token]).await.expect("fits");
        }
    });
}

/// Contexts that push each other's pages to the host and out of memory.
#[test]
fn pages_that_were_moved_or_lost_come_back_steered() {
    let sizes = Sizes { n_pages: 64, n_host_pages: 8, n_step_rows: 8, n_step_tokens: 64 };
    let (small, large) = (engine("tiny", sizes), engine("tiny", Sizes::default()));
    block_on(async {
        let text = encode(large.handle(), &TEXT.repeat(6));
        let mut expected = Vec::new();
        let mut contexts = Vec::new();
        for idx in 0..8 {
            // Beginnings differ, so that no page is shared.
            let tokens = &text[idx..text.len().min(idx + 250)];
            let value = [0.0, 1.0, 1.5][idx % 3];
            let mut alone = context(large.handle(), tokens).await;
            alone.steer(vectors(large.handle(), value), 10 * idx).await.expect("it fits");
            expected.push(full(&mut alone).await);
            let mut one = context(small.handle(), tokens).await;
            one.steer(vectors(small.handle(), value), 10 * idx).await.expect("it fits");
            contexts.push(one);
        }
        for round in 0..3 {
            for (idx, (one, expected)) in contexts.iter_mut().zip(&expected).enumerate() {
                // Of some that were asked before, the last token is computed anew beside pages that came back.
                if (idx + round) % 2 == 0 {
                    let last = one.tokens().to_vec().pop().expect("a token");
                    one.truncate(one.tokens().len() - 1).await.expect("it is there");
                    one.append(&[last]).await.expect("fits");
                }
                assert_same(&full(one).await, expected);
            }
        }
        let stats = small.handle().stats().await.expect("it works");
        assert!(stats.n_swaps_out > 0 && stats.n_tokens_again > 0, "{stats:?}");
    });
}

#[test]
fn what_does_not_fit_a_context_is_refused_and_changes_nothing() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    block_on(async {
        let tokens = encode(model, TEXT);
        let (n_layers, hidden_size) = (model.model().config.n_layers, model.limits().hidden_size);
        let mut one = context(model, &tokens).await;
        let expected = full(&mut one).await;
        let long = vec![1.0; hidden_size];
        for (vectors, from, told) in [
            (vec![(n_layers + 1, long.clone())], 0, "no vector is added after"),
            (vec![(1, long.clone()), (1, long.clone())], 0, "two vectors after 1 layers"),
            (vec![(0, vec![1.0])], 0, "a vector of 1 numbers after 0 layers"),
            (vec![(2, vec![f32::NAN; hidden_size])], 0, "number 0 of the vector after 2 layers is NaN"),
            (vec![(2, long.clone())], tokens.len() + 1, "steered from token"),
        ] {
            match one.steer(vectors, from).await {
                Err(EngineError::Steering(error)) => {
                    assert!(error.to_string().contains(told), "{error}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert_same(&full(&mut one).await, &expected);
        if model.limits().n_stretches_max > 0 {
            one.evict(3, 6, trellis_engine::Positions::Keep).await.expect("the model can");
            let refused = one.steer(vec![(1, long)], 0).await;
            let is_said = |error: &SteeringError| *error == SteeringError::Evicted { n_evicted: 3 };
            assert!(matches!(&refused, Err(EngineError::Steering(error)) if is_said(error)), "{refused:?}");
        }
    });
}

/// The example: without strength the very text, with it a text nearer to where the direction points.
pub(crate) async fn steering(name: &str) {
    let prompt = "The";
    let report = |strength: &'static str| async move {
        let told = ["--layer", "2", "--strength", strength, "--temperature", "0", "--max-tokens", "24"];
        run(name, &[&told[..], &["--json", prompt]].concat()).await.well().json.remove(0)
    };
    let mut plain = Context::create(model(), owner(u32::MAX)).await.expect("created");
    plain.append(model().model().bos_token.as_slice()).await.expect("fits");
    plain.append(&encode(model(), prompt)).await.expect("fits");
    let greedy = Arc::new(Sampler::greedy());
    let mut expected = Vec::new();
    while expected.len() < 24 {
        let token = draw(&mut plain, &greedy).await;
        expected.push(token);
        if crate::guests::is_stop(token) {
            break;
        }
        plain.append(&[token]).await.expect("fits");
    }
    let logprobs = |report: &serde_json::Value| {
        [0, 1].map(|idx| report["logprobs"][idx].as_f64().expect("a number") as f32)
    };

    let without = report("0").await;
    assert_eq!(without["tokens"], serde_json::json!(expected));
    assert_eq!(without["text"], decode(&expected));
    let [steered, plain] = logprobs(&without);
    assert_eq!(Nat(steered), Nat(plain));
    // Of 30 tokens of a story, which the bundled model takes for likelier by 4 to 11 nats.
    for strength in ["0.5", "1", "-1"] {
        let moved = report(strength).await;
        println!("strength {strength}: {moved}");
        let [steered, again] = logprobs(&moved);
        assert_eq!(Nat(again), Nat(plain));
        match strength {
            "-1" => assert!(steered < plain - 2.0, "{moved}"),
            _ => assert!(steered > plain + 2.0, "{moved}"),
        }
    }

    let refused = run(name, &["--layer", "99", "x"]).await;
    let message = &refused.reason().message;
    assert!(message.contains("--layer is 99, and has to be less than"), "{message}");
}
