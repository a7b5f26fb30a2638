//! Mixtures: what a program draws from the logits of several contexts, against the same program over whole rows that the host
//! was given.

pub(crate) mod guest;
mod one_device;

use std::sync::Arc;

use trellis_engine::batch::{Drawn, Token};
use trellis_engine::sampling::Sampler;
use trellis_engine::sampling::program::{
    Definition, DrawPlace, DrawState, Machine, Program, PutOn, RowShape,
};
use trellis_engine::{
    Ahead, Answer, Ask, Context, EngineError, Finish, MaskSource, ModelHandle, Pull, RunKey, RunSettings,
};
use trellis_programs::{Builder, Row, Source, library};
use trellis_tests::engines::{Random, Sizes, block_on, encode, engine, owner};

const N_TOKENS: usize = 40;

/// By temperature from a row that is made of those of the members; the first parameter is the formula's, the second the
/// temperature.
fn sampler(
    model: &ModelHandle,
    formula: fn(&Builder) -> Row<'_>,
    parameters: [f32; 2],
    seed: u64,
) -> Arc<Sampler> {
    let definition = Definition::build(|b| {
        let n = b.state(0.0);
        n.set(n.get() + 1.0);
        b.report(n.get());
        library::temperature(formula(b), b.parameter(1)).draw(Source::SEED)
    });
    let limits = model.limits();
    let shape = RowShape { vocab_size: limits.vocab_size, n_positions: limits.n_positions_max };
    let put_on = PutOn::new(Arc::new(Program::new(definition, shape).expect("it is in order")));
    let put_on = PutOn { parameters: parameters.to_vec(), ..put_on };
    Arc::new(Sampler { seed, program: Some(Box::new(put_on)), ..Sampler::greedy() })
}

fn guidance(model: &ModelHandle, scale: f32, temperature: f32, seed: u64) -> Arc<Sampler> {
    sampler(model, |b| library::guidance(b.logits(), b.member(0), b.parameter(0)), [scale, temperature], seed)
}

fn expert(b: &Builder) -> Row<'_> {
    library::experts(b.logits(), b.member(0), b.member(1), b.parameter(0))
}

/// Of three members: the second of the others is left out.
fn product(b: &Builder) -> Row<'_> {
    let two = library::product(b.logits(), b.member(0), b.parameter(0));
    library::product(two, b.member(2), b.parameter(0))
}

fn settings(sampler: &Arc<Sampler>, n_tokens_max: usize, ahead: Ahead) -> RunSettings {
    let (sampler, stop_tokens) = (sampler.clone(), Arc::new([]));
    RunSettings { sampler, stop_tokens, n_tokens_max: Some(n_tokens_max), ahead, masks: MaskSource::Sampler }
}

async fn contexts(model: &ModelHandle, owner_number: u32, prompts: &[Vec<Token>]) -> Vec<Context> {
    let guest = owner(owner_number);
    let mut contexts = Vec::new();
    for prompt in prompts {
        let mut context = Context::create(model, guest.clone()).await.expect("created");
        context.append(prompt).await.expect("it fits");
        contexts.push(context);
    }
    contexts
}

async fn row(context: &mut Context) -> Vec<f32> {
    match context.ask(Ask::Full).await.expect("posted").answer().await {
        Ok(Answer::Full(row)) => row,
        other => panic!("{other:?}"),
    }
}

/// What a guest would draw that is given all rows, step by step, with the log-probability of each token.
async fn by_rows(
    model: &ModelHandle,
    prompts: &[Vec<Token>],
    sampler: &Sampler,
    n_tokens: usize,
) -> Vec<(Token, f32)> {
    by_rows_of(contexts(model, 99, prompts).await, sampler, n_tokens).await
}

async fn by_rows_of(mut members: Vec<Context>, sampler: &Sampler, n_tokens: usize) -> Vec<(Token, f32)> {
    let (mut machine, mut drawn) = (Machine::default(), Vec::new());
    let put_on = sampler.program.as_ref().expect("a program");
    let mut start: DrawState = sampler.start();
    for _ in 0..n_tokens {
        let mut rows = Vec::new();
        for member in &mut members {
            rows.push(row(member).await);
        }
        let others: Vec<&[f32]> = rows[1..].iter().map(Vec::as_slice).collect();
        let history = members[0].tokens().copy_of(0..members[0].tokens().len());
        let before = history.len().into();
        let place = DrawPlace { members: &others, before, seed: sampler.seed, start, within: None };
        let (token, left) = put_on.draw(&mut machine, &rows[0], &history, place).expect("a token");
        start = left.next;
        for member in &mut members {
            member.append(&[token]).await.expect("it fits");
        }
        drawn.push((token, rows[0][token as usize]));
    }
    drawn
}

/// What a mixture gives, token by token or to its end.
async fn mixed(
    members: &mut [Context],
    sampler: &Arc<Sampler>,
    n_tokens: usize,
    ahead: Ahead,
) -> Vec<(Token, f32)> {
    let (first, others) = members.split_first_mut().expect("a member");
    let mut others: Vec<&mut Context> = others.iter_mut().collect();
    let mut drawn = Vec::new();
    loop {
        let n_left = n_tokens - drawn.len();
        let pulled = first.pull_mixed(&mut others, RunKey(1), || settings(sampler, n_left, ahead)).await;
        match pulled.expect("a token") {
            Pull::Token(Drawn { candidate, .. }) => drawn.push((candidate.token, candidate.logprob)),
            Pull::Finished(Finish::MaxTokens) => return drawn,
            Pull::Finished(other) => panic!("{other:?}"),
        }
    }
}

fn check(found: &[(Token, f32)], expected: &[(Token, f32)], what: &str) {
    let tokens = |drawn: &[(Token, f32)]| drawn.iter().map(|it| it.0).collect::<Vec<_>>();
    assert_eq!(tokens(found), tokens(expected), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found.1 - expected.1).abs() <= 1e-3, "{what}: {found:?} {expected:?}");
    }
}

fn prompts(model: &ModelHandle, random: &mut Random, n: usize) -> Vec<Vec<Token>> {
    let text = encode(model, "<|begin_of_text|>Once upon a time there was a");
    (0..n)
        .map(|idx| {
            // Some begin alike, and some are longer than a page.
            let n_own = random.below(40);
            let own = random.tokens(n_own, model.limits().vocab_size);
            if idx % 2 == 0 { [text.clone(), own].concat() } else { [own, text.clone()].concat() }
        })
        .collect()
}

#[test]
fn a_mixture_draws_what_its_formula_says_of_whole_rows() {
    let engine = engine("tiny", Sizes::default());
    block_on(async {
        let model = engine.handle();
        let mut random = Random(4);
        for seed in 0..6 {
            let n_others = 1 + seed as usize % 3;
            let all = prompts(model, &mut random, 1 + n_others);
            let temperature = [0.3, 0.8, 1.2][seed as usize % 3];
            let sampler = match n_others {
                1 => guidance(model, 1.5, temperature, seed),
                2 => sampler(model, expert, [0.7, temperature], seed),
                _ => sampler(model, product, [0.4, temperature], seed),
            };
            let expected = by_rows(model, &all, &sampler, N_TOKENS).await;
            for ahead in [Ahead::Adaptive, Ahead::Unbounded] {
                let mut members = contexts(model, 1, &all).await;
                let found = mixed(&mut members, &sampler, N_TOKENS, ahead).await;
                check(&found, &expected, &format!("seed {seed}, {n_others} others, {ahead:?}"));
                for (member, prompt) in members.iter().zip(&all) {
                    let tokens = member.tokens().copy_of(prompt.len()..member.tokens().len());
                    assert_eq!(tokens, found.iter().map(|it| it.0).collect::<Vec<_>>(), "all get them");
                }
                assert_eq!(members[0].reports(), [(N_TOKENS - 1) as f32], "the first has the state");
            }
        }
    });
}

#[test]
fn others_without_weight_change_nothing() {
    let engine = engine("tiny", Sizes::default());
    block_on(async {
        let model = engine.handle();
        let mut random = Random(5);
        for seed in 0..4 {
            let all = prompts(model, &mut random, 2);
            let alone = sampler(model, Builder::logits, [0.0, 0.9], seed);
            let mut one = contexts(model, 1, &all[..1]).await;
            let expected = mixed(&mut one, &alone, N_TOKENS, Ahead::Adaptive).await;
            let sampler = guidance(model, 1.0, 0.9, seed);
            let mut members = contexts(model, 1, &all).await;
            let found = mixed(&mut members, &sampler, N_TOKENS, Ahead::Adaptive).await;
            check(&found, &expected, &format!("seed {seed}"));
        }
    });
}

/// Whatever is done with a member meanwhile, the mixture goes on with what its contexts hold then.
#[test]
fn a_mixture_goes_on_with_what_its_contexts_hold() {
    let engine = engine("tiny", Sizes::default());
    block_on(async {
        let model = engine.handle();
        let mut random = Random(6);
        let all = prompts(model, &mut random, 3);
        let sampler = guidance(model, 2.0, 0.8, 3);
        let mut members = contexts(model, 1, &all).await;
        for round in 0..12 {
            let idx = round % 3;
            match round % 4 {
                0 => members[idx].append(&[20 + round as Token, 30]).await.expect("it fits"),
                1 => {
                    let n_tokens = members[idx].tokens().len();
                    members[idx].truncate(n_tokens - 2).await.expect("there are as many");
                }
                2 => drop(row(&mut members[idx]).await),
                _ => {
                    let fork = members[idx].fork().await.expect("a fork");
                    members[idx] = fork;
                }
            }
            let held: Vec<Vec<Token>> =
                members.iter().map(|it| it.tokens().copy_of(0..it.tokens().len())).collect();
            let (first, others) = members.split_first_mut().expect("a member");
            let mut others: Vec<&mut Context> = others.iter_mut().collect();
            let mut found = Vec::new();
            for _ in 0..5 {
                let run = || settings(&sampler, 1000, Ahead::Adaptive);
                match first.pull_mixed(&mut others, RunKey(7), run).await {
                    Ok(Pull::Token(drawn)) => found.push((drawn.candidate.token, drawn.candidate.logprob)),
                    other => panic!("{other:?}"),
                }
            }
            check(&found, &by_rows(model, &held, &sampler, 5).await, &format!("round {round}"));
        }
    });
}

/// The tokens of each are those of the formula over the rows of both models, at any place of the one or the other.
#[test]
fn models_of_one_vocabulary_are_mixed() {
    let engines = ["tiny", "draft"].map(|name| engine(name, Sizes::default()));
    block_on(async {
        let [large, small] = engines.each_ref().map(|engine| engine.handle());
        let mut random = Random(9);
        for seed in 0..4 {
            let all = prompts(large, &mut random, 3);
            let sampler = sampler(large, expert, [0.7, 0.8], seed);
            let members = async |number| {
                let mut members = contexts(large, number, &all[..2]).await;
                members.splice(1..1, contexts(small, number, &all[2..]).await);
                members
            };
            let expected = by_rows_of(members(99).await, &sampler, N_TOKENS).await;
            let mut mixture = members(1).await;
            let found = mixed(&mut mixture, &sampler, N_TOKENS, Ahead::Adaptive).await;
            check(&found, &expected, &format!("seed {seed}"));
            let tokens: Vec<Token> = found.iter().map(|it| it.0).collect();
            let n_before = [&all[0], &all[2], &all[1]].map(Vec::len);
            for (member, n_before) in mixture.iter().zip(n_before) {
                assert_eq!(member.tokens().copy_of(n_before..member.tokens().len()), tokens, "all get them");
            }
            assert_eq!(mixture[0].reports(), [(N_TOKENS - 1) as f32], "the first has the state");
        }
        // They end where one of them is full.
        let n_positions = small.limits().n_positions_max;
        let mut members = contexts(large, 1, &[vec![20, 21]]).await;
        members.extend(contexts(small, 1, &[vec![20; n_positions - 3]]).await);
        let sampler = guidance(large, 1.5, 0.8, 1);
        let (first, others) = members.split_first_mut().expect("a member");
        let mut others: Vec<&mut Context> = others.iter_mut().collect();
        let mut n_drawn = 0;
        let finish = loop {
            let run = || settings(&sampler, 100, Ahead::Adaptive);
            match first.pull_mixed(&mut others, RunKey(1), run).await.expect("a token") {
                Pull::Token(_) => n_drawn += 1,
                Pull::Finished(finish) => break finish,
            }
        };
        assert_eq!((finish, n_drawn), (Finish::ContextFull, 3));
    });
}

/// Little room, and streams of others.
#[test]
fn mixtures_stay_the_same_beside_the_work_of_others_and_without_room() {
    let ample = engine("tiny", Sizes::default());
    let tight = engine("tiny", Sizes { n_pages: 64, n_host_pages: 8, n_step_rows: 6, n_step_tokens: 24 });
    block_on(async {
        let mut random = Random(7);
        let mut expected = Vec::new();
        for seed in 0..6 {
            let all = prompts(ample.handle(), &mut random, 2 + seed as usize % 2);
            let sampler = guidance(ample.handle(), 1.7, 0.8, seed);
            let tokens = by_rows(ample.handle(), &all, &sampler, 60).await;
            expected.push((all, seed, tokens));
        }
        let streams = (0..4).map(|number| {
            let model = tight.handle().clone();
            tokio::spawn(async move {
                let prompt = vec![20 + number; 100];
                let mut context = contexts(&model, 10 + number, &[prompt]).await.remove(0);
                let sampler =
                    Arc::new(Sampler { temperature: 0.8, seed: u64::from(number), ..Sampler::greedy() });
                for _ in 0..100 {
                    let run = || settings(&sampler, 100, Ahead::Adaptive);
                    context.pull(RunKey(1), run).await.expect("a token");
                }
            })
        });
        let streams: Vec<_> = streams.collect();
        let mixtures = expected.into_iter().map(|(all, seed, expected)| {
            let model = tight.handle().clone();
            tokio::spawn(async move {
                let sampler = guidance(&model, 1.7, 0.8, seed);
                let ahead = if seed % 2 == 0 { Ahead::Adaptive } else { Ahead::Unbounded };
                let mut members = contexts(&model, 1 + seed as u32 % 3, &all).await;
                let found = mixed(&mut members, &sampler, 60, ahead).await;
                check(&found, &expected, &format!("seed {seed}"));
            })
        });
        let mixtures: Vec<_> = mixtures.collect();
        for task in mixtures.into_iter().chain(streams) {
            task.await.expect("it comes to its end");
        }
    });
}

#[test]
fn what_cannot_be_mixed_is_refused_with_its_name() {
    let engine = engine("tiny", Sizes { n_step_rows: 3, ..Sizes::default() });
    block_on(async {
        let model = engine.handle();
        let sampler = guidance(model, 1.5, 0.8, 1);
        let pull = async |members: &mut [Context], sampler: &Arc<Sampler>| {
            let (first, others) = members.split_first_mut().expect("a member");
            let mut others: Vec<&mut Context> = others.iter_mut().collect();
            first.pull_mixed(&mut others, RunKey(1), || settings(sampler, 5, Ahead::Adaptive)).await
        };
        let prompts = vec![vec![20, 21]; 10];
        let mut members = contexts(model, 1, &prompts).await;
        let plain = Arc::new(Sampler::greedy());
        let refused = pull(&mut members[..2], &plain).await;
        assert!(matches!(refused, Err(EngineError::MixtureWithoutProgram)), "{refused:?}");
        let refused = pull(&mut members, &sampler).await;
        let limits = (9, 8);
        assert!(
            matches!(refused, Err(EngineError::MixtureTooLarge { n_others, n_others_max }) if (n_others, n_others_max) == limits),
            "{refused:?}"
        );
        let refused = pull(&mut members[..4], &sampler).await;
        assert!(matches!(refused, Err(EngineError::JobTooLarge { n_rows: 4, n_rows_max: 3 })), "{refused:?}");
        let mut strangers = contexts(model, 2, &prompts[..1]).await;
        strangers.insert(0, members.remove(0));
        let refused = pull(&mut strangers, &sampler).await;
        assert!(matches!(refused, Err(EngineError::JobMixed)), "{refused:?}");
        let mut empty = contexts(model, 1, &[vec![20], Vec::new()]).await;
        let refused = pull(&mut empty, &sampler).await;
        assert!(matches!(refused, Err(EngineError::EmptyContext)), "{refused:?}");
        // A program that leaves nothing to draw ends the run, and nothing else.
        let nothing = Definition::build(|b| b.logits().keep(b.nothing()).draw(Source::SEED));
        let limits = model.limits();
        let shape = RowShape { vocab_size: limits.vocab_size, n_positions: limits.n_positions_max };
        let put_on = PutOn::new(Arc::new(Program::new(nothing, shape).expect("it is in order")));
        let nothing = Arc::new(Sampler { program: Some(Box::new(put_on)), ..Sampler::greedy() });
        let refused = pull(&mut members[..2], &nothing).await;
        assert!(matches!(refused, Err(EngineError::Output(_))), "{refused:?}");
        assert!(matches!(pull(&mut members[..2], &sampler).await, Ok(Pull::Token(_))));
        assert_eq!(members[1].tokens().len(), 3);
    });
}
