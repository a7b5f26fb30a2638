//! Logit programs in the engine: the same tokens, states and reports however decoding is cut, undone and guessed.

use std::sync::Arc;

use trellis_engine::batch::Drawn;
use trellis_engine::sampling::program::{Definition, Program, PutOn, RowShape};
use trellis_engine::sampling::{Sampler, TokenMask};
use trellis_engine::{
    Ahead, Answer, Ask, Context, Guess, MaskSource, ModelHandle, Pull, RunKey, RunSettings,
};
use trellis_programs::library::{self, Dry};
use trellis_programs::{MaskId, Source, random};
use trellis_tests::device::Nat;
use trellis_tests::engines::{Random, Sizes, block_on, encode, engine, owner};

const N_TOKENS: usize = 24;

/// A sampler that draws by this program.
fn sampler(model: &ModelHandle, definition: Definition, seed: u64) -> Option<Arc<Sampler>> {
    let limits = model.limits();
    let shape = RowShape { vocab_size: limits.vocab_size, n_positions: limits.n_positions_max };
    let program = Program::new(definition, shape).ok()?;
    let mut mask = TokenMask::all(limits.vocab_size);
    (0..limits.vocab_size).step_by(3).for_each(|token| mask.set(token as u32, false));
    let put_on =
        PutOn { parameters: vec![3.0, 0.2], masks: vec![Arc::new(mask)], ..PutOn::new(Arc::new(program)) };
    Some(Arc::new(Sampler { seed, program: Some(Box::new(put_on)), ..Sampler::greedy() }))
}

/// Programs that keep something from token to token, and some that do not.
fn definitions() -> Vec<Definition> {
    let dry = Dry { window: 64, allowed_length: 2.0, multiplier: 0.8, base: 1.75, breakers: Some(MaskId(0)) };
    vec![
        Definition::build(|b| {
            let token = library::mirostat(b.logits(), 3.0, b.parameter(0), b.parameter(1));
            b.report(b.drawn());
            token
        }),
        Definition::build(|b| {
            let n = b.state(1.0);
            n.set(n.get() + 1.0);
            b.report(n.get());
            b.report(b.length());
            library::temperature(library::dry(b.logits(), dry), n.get() * 0.1).draw(Source::SEED)
        }),
        Definition::build(|b| {
            let x = library::minimum_length(b.logits(), b.mask(MaskId(0)), 5.0);
            library::typical(x, 0.9).draw(Source::Key { key: 7, n_tokens: 2, lane: 0 })
        }),
        Definition::build(|b| library::top_p(library::temperature(b.logits(), 0.8), 0.9).draw(Source::SEED)),
    ]
}

async fn context(model: &ModelHandle, tokens: &[u32]) -> Context {
    let mut context = Context::create(model, owner(1)).await.expect("created");
    context.append(tokens).await.expect("fits");
    context
}

async fn step(context: &mut Context, sampler: &Arc<Sampler>) -> Drawn {
    let answer = context.ask(Ask::Sample(sampler.clone())).await.expect("asked").answer().await;
    let Answer::Sampled(drawn) = answer.expect("drawn") else { panic!("a draw") };
    context.append_drawn(std::slice::from_ref(&drawn), sampler).await.expect("fits");
    drawn
}

async fn steps(context: &mut Context, sampler: &Arc<Sampler>, n: usize) -> Vec<Drawn> {
    let mut all = Vec::new();
    while all.len() < n {
        all.push(step(context, sampler).await);
    }
    all
}

fn settings(sampler: &Arc<Sampler>, ahead: Ahead) -> RunSettings {
    RunSettings {
        sampler: sampler.clone(),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead,
        masks: MaskSource::Sampler,
    }
}

async fn pull(context: &mut Context, sampler: &Arc<Sampler>, key: u64, n: usize) -> Vec<Drawn> {
    let mut all = Vec::new();
    while all.len() < n {
        match context.pull(RunKey(key), || settings(sampler, Ahead::Adaptive)).await.expect("pulled") {
            Pull::Token(drawn) => all.push(drawn),
            Pull::Finished(finish) => panic!("{finish:?}"),
        }
    }
    all
}

async fn verify(context: &mut Context, sampler: &Arc<Sampler>, guess: &[u32]) -> Vec<Drawn> {
    let ask = Ask::Verify { sampler: sampler.clone(), guess: Guess::Chain(guess.to_vec()) };
    let answer = context.ask(ask).await.expect("asked").answer().await.expect("verified");
    let Answer::Verified(drawn) = answer else { panic!("a verification") };
    context.append_drawn(&drawn, sampler).await.expect("fits");
    drawn
}

/// Tokens, and what the program left of state and reports.
fn seen(drawn: &[Drawn]) -> Vec<(u32, Nat, Vec<Nat>)> {
    let one = |drawn: &Drawn| {
        let left = drawn.left.as_ref().expect("a program drew it");
        let numbers = left.next.numbers.iter().chain(&left.reports).map(|&x| Nat(x)).collect();
        (drawn.candidate.token, Nat(drawn.candidate.logprob), numbers)
    };
    drawn.iter().map(one).collect()
}

fn tokens(drawn: &[Drawn]) -> Vec<u32> {
    drawn.iter().map(|drawn| drawn.candidate.token).collect()
}

#[test]
fn streams_guesses_forks_and_what_is_undone_give_what_steps_give() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let prompt = encode(model, "Once upon a time there was a");
        for (idx, definition) in definitions().into_iter().enumerate() {
            for seed in [1, 2] {
                let sampler = sampler(model, definition.clone(), seed).expect("it is in order");
                let expected = steps(&mut context(model, &prompt).await, &sampler, N_TOKENS).await;
                let what = format!("program {idx}, seed {seed}");
                let mut streamed = context(model, &prompt).await;
                assert_eq!(
                    seen(&pull(&mut streamed, &sampler, 1, N_TOKENS).await),
                    seen(&expected),
                    "{what}"
                );

                // Undone to the k-th token, by a stream, steps and guesses in turn.
                let mut undone = context(model, &prompt).await;
                for k in [7, 3, 11, 0, 5] {
                    let n = undone.tokens().len() - prompt.len();
                    let rest = if n <= k { k - n + 4 } else { 4 };
                    let again = match k % 3 {
                        0 => pull(&mut undone, &sampler, k as u64, rest).await,
                        1 => steps(&mut undone, &sampler, rest).await,
                        _ => verify(&mut undone, &sampler, &tokens(&expected[n..n + rest - 1])).await,
                    };
                    assert_eq!(again.len(), rest, "{what}: right guesses are accepted");
                    assert_eq!(seen(&again), seen(&expected[n..n + rest]), "{what}, from {n} on");
                    undone.truncate(prompt.len() + k.min(n + rest)).await.expect("shorter");
                    let mut fork = undone.fork().await.expect("forked");
                    let k = fork.tokens().len() - prompt.len();
                    let forked = steps(&mut fork, &sampler, 2).await;
                    assert_eq!(seen(&forked), seen(&expected[k..k + 2]), "{what}: fork at {k}");
                }

                // Wrong guesses cost nothing but their computing.
                let mut guessed = context(model, &prompt).await;
                let mut wrong = tokens(&expected[..6]);
                wrong[3] ^= 1;
                let drawn = verify(&mut guessed, &sampler, &wrong).await;
                assert_eq!(seen(&drawn), seen(&expected[..4]), "{what}");
                assert_eq!(seen(&pull(&mut guessed, &sampler, 1, 3).await), seen(&expected[4..7]), "{what}");
            }
        }
    });
}

#[test]
fn an_appended_token_carries_state_on_and_another_program_begins_anew() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let prompt = encode(model, "Once upon a time");
        let counting = |from: f32| {
            Definition::build(move |b| {
                let n = b.state(from);
                n.set(n.get() + 1.0);
                b.report(n.get());
                b.logits().draw(Source::SEED)
            })
        };
        let first = sampler(model, counting(10.0), 1).expect("it is in order");
        let other = sampler(model, counting(50.0), 1).expect("it is in order");
        let mut context = context(model, &prompt).await;
        let mut reports = Vec::new();
        for sampler in [&first, &first, &other, &other, &first] {
            let drawn = step(&mut context, sampler).await;
            reports.push(drawn.left.expect("a program drew it").reports[0]);
            context.append(&[5]).await.expect("fits");
        }
        assert_eq!(reports, [10.0, 11.0, 50.0, 51.0, 10.0]);
        // Back where the first program drew last.
        context.truncate(prompt.len() + 4).await.expect("shorter");
        let drawn = pull(&mut context, &first, 1, 2).await;
        let reports: Vec<f32> =
            drawn.iter().map(|drawn| drawn.left.as_ref().expect("a program drew it").reports[0]).collect();
        assert_eq!(reports, [12.0, 13.0]);
    });
}

#[test]
fn random_programs_in_one_batch_draw_what_they_draw_alone() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let prompt = encode(model, "The old man said");
        let mut random_numbers = Random(4);
        let samplers: Vec<Arc<Sampler>> = (0..400)
            .filter_map(|seed| sampler(model, random::definition(seed, 8 + seed as usize % 40), seed))
            .take(24)
            .collect();
        assert_eq!(samplers.len(), 24);
        let mut jobs = tokio::task::JoinSet::new();
        let mut expected = Vec::new();
        for (idx, sampler) in samplers.iter().enumerate() {
            let n = 3 + random_numbers.below(6);
            expected.push(drawn_until_it_fails(model, &prompt, sampler, n).await);
            let (model, prompt, sampler) = (model.clone(), prompt.clone(), sampler.clone());
            jobs.spawn(async move { (idx, drawn_until_it_fails(&model, &prompt, &sampler, n).await) });
        }
        while let Some(job) = jobs.join_next().await {
            let (idx, drawn) = job.expect("it ends");
            assert_eq!(seen(&drawn), seen(&expected[idx]), "program {idx}");
        }
        assert!(expected.iter().filter(|drawn| drawn.len() > 2).count() > 8, "most programs draw");
    });
}

/// A program may leave no token to draw.
async fn drawn_until_it_fails(
    model: &ModelHandle,
    prompt: &[u32],
    sampler: &Arc<Sampler>,
    n: usize,
) -> Vec<Drawn> {
    let mut context = context(model, prompt).await;
    let mut all = Vec::new();
    while all.len() < n {
        match context.pull(RunKey(1), || settings(sampler, Ahead::Unbounded)).await {
            Ok(Pull::Token(drawn)) => all.push(drawn),
            Ok(Pull::Finished(finish)) => panic!("{finish:?}"),
            Err(_) => break,
        }
    }
    all
}
