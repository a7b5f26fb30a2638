//! Tokens that a grammar forces come several in a step, and are those that come one by one.

use std::sync::Arc;

use trellis_engine::account::{Account, Budget, HostCharge, Owner, Resource};
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Drawn, Token};
use trellis_engine::constraint::{Grammar, Rule};
use trellis_engine::sampling::program::Definition;
use trellis_engine::sampling::{Looks, Sampler};
use trellis_engine::{
    Ahead, Answer, Ask, Cause, Causes, Context, EngineError, Finish, ModelHandle, Pull, RunKey, RunSettings,
};
use trellis_programs::{Source, library};
use trellis_tests::device::Nat;
use trellis_tests::engines::{Sizes, block_on, encode, engine, owner};

use super::{context, hot, is_end, programmed, pull, rule, schema, settings, step, story};

/// Letters of which the vocabulary has no word: nothing but one token for each can spell it.
const ODD: &str = "~^@~^@~^@~^@~^@~^@~^@~^@~^@~^@";

/// Texts of which most is forced.
fn grammars() -> Vec<(&'static str, Grammar)> {
    let parcel = r#"{"type":"object","properties":{"identification_number":{"type":"integer","minimum":0,"maximum":99},
        "date_of_last_delivery":{"enum":["yesterday evening","yesterday morning"]},"destination_is_known":{"type":"boolean"}},
        "required":["identification_number","date_of_last_delivery","destination_is_known"],"additionalProperties":false}"#;
    let letter =
        r"Dear customer, your order [0-9]{2} has been shipped\. (It will arrive|You will have it) tomorrow\.";
    let choice = ["the quick brown fox jumps over the lazy dog", "the quick red fox sleeps all day long"];
    vec![
        ("schema", schema(parcel)),
        ("regex", Grammar::Regex(letter.to_owned())),
        ("choice", Grammar::Choice(choice.map(str::to_owned).to_vec())),
        ("odd", Grammar::Choice(vec![ODD.to_owned(), format!("{ODD}!")])),
    ]
}

fn samplers(model: &ModelHandle) -> Vec<Arc<Sampler>> {
    let counted = Definition::build(|b| {
        let n = b.state(1.0);
        n.set(n.get() + 1.0);
        b.report(n.get());
        library::temperature(b.logits(), n.get()).draw(Source::SEED)
    });
    let penalties = Sampler { frequency_penalty: 0.4, repetition_penalty: 1.2, ..Sampler::clone(&hot(5)) };
    vec![Arc::new(Sampler::greedy()), hot(1), hot(2), Arc::new(penalties), programmed(model, 3, counted)]
}

/// What one token after the other gives, up to the end that is drawn where the grammar is complete.
async fn steps(model: &ModelHandle, rule: &Arc<Rule>, sampler: &Arc<Sampler>) -> Vec<Drawn> {
    let mut context = context(model, rule).await;
    let mut all = Vec::new();
    loop {
        let answer = context.ask(Ask::Sample(sampler.clone())).await.expect("asked").answer().await;
        let Ok(Answer::Sampled(drawn)) = answer else { panic!("{answer:?}") };
        if is_end(model, drawn.candidate.token) {
            return all;
        }
        context.append_drawn(std::slice::from_ref(&drawn), sampler).await.expect("fits");
        all.push(drawn);
    }
}

/// What a run gives, and how it ends.
async fn run(context: &mut Context, settings: &RunSettings) -> (Vec<Drawn>, Result<Finish, EngineError>) {
    let mut all = Vec::new();
    loop {
        match context.pull(RunKey(1), || settings.clone()).await {
            Ok(Pull::Token(drawn)) => all.push(drawn),
            Ok(Pull::Finished(finish)) => return (all, Ok(finish)),
            Err(error) => return (all, Err(error)),
        }
    }
}

fn told(drawn: &[Drawn]) -> Vec<(Token, Nat, String)> {
    let told =
        |drawn: &Drawn| (drawn.candidate.token, Nat(drawn.candidate.logprob), format!("{:?}", drawn.left));
    drawn.iter().map(told).collect()
}

#[test]
fn what_is_forced_is_what_steps_give_and_takes_fewer_of_them() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        println!("| grammar | tokens | drawn beside others |");
        println!("|---|---|---|");
        for (name, grammar) in grammars() {
            let (mut n_drawn, mut n_expected) = (0, 0);
            let rule = rule(model, &grammar);
            for sampler in samplers(model) {
                let expected = steps(model, &rule, &sampler).await;
                for ahead in [Ahead::Adaptive, Ahead::Unbounded] {
                    let mut context = context(model, &rule).await;
                    context.ask(Ask::Prefill).await.expect("asked").answer().await.expect("computed");
                    let before = model.stats().await.expect("it runs");
                    let (found, finish) = run(&mut context, &settings(&sampler, ahead)).await;
                    // Where the grammar may go on, the end is drawn.
                    let is_end = |drawn: &Drawn| is_end(model, drawn.candidate.token);
                    let n_text = found.len() - usize::from(found.last().is_some_and(is_end));
                    assert_eq!(told(&found[..n_text]), told(&expected), "{name}, {sampler:?}");
                    assert!(matches!(finish, Ok(Finish::Complete)), "{finish:?}");
                    drop(context);
                    let after = model.stats().await.expect("it runs");
                    let spared = after.n_tokens_forced - before.n_tokens_forced;
                    let n_rows = after.n_rows - before.n_rows;
                    let n_idle = |causes: &Causes| causes.n_rows_in_vain() + causes[Cause::RowsSatOut];
                    let n_idle = n_idle(&after.causes) - n_idle(&before.causes);
                    let n_rows_max = found.len() as u64 - spared + n_idle;
                    assert!(n_rows <= n_rows_max, "{n_rows} rows, {n_rows_max} at most, {spared} spared");
                    (n_drawn, n_expected) = (n_drawn + found.len() as u64, n_expected + spared);
                }
            }
            println!("| {name} | {n_drawn} | {n_expected} |");
            // Masks that are worked out as fast as steps are made leave nothing to spare, and mostly they are faster.
            if name == "odd" {
                assert!(4 * n_expected > n_drawn, "{name}: {n_expected} of {n_drawn}");
            }
        }
    });
}

#[test]
fn what_ends_a_run_ends_it_within_what_is_forced() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let rule = rule(model, &Grammar::Choice(vec![ODD.to_owned(), format!("{ODD}!")]));
        let sampler = hot(1);
        let expected = steps(model, &rule, &sampler).await;
        let of = |n: usize| told(&expected[..n]);
        for n_max in [1, 2, 5, 16, 17, expected.len()] {
            let mut context = context(model, &rule).await;
            let settings = RunSettings { n_tokens_max: Some(n_max), ..settings(&sampler, Ahead::Unbounded) };
            let (found, finish) = run(&mut context, &settings).await;
            assert_eq!(told(&found), of(n_max));
            assert!(matches!(finish, Ok(Finish::MaxTokens)), "{finish:?}");
            assert_eq!(context.tokens().len(), story(model).len() + n_max);
        }
        let stop = encode(model, "@")[0];
        let n_stop =
            1 + expected.iter().position(|drawn| drawn.candidate.token == stop).expect("it is there");
        let mut stopped = context(model, &rule).await;
        let settings_of_stop =
            RunSettings { stop_tokens: Arc::new([stop]), ..settings(&sampler, Ahead::Unbounded) };
        let (found, finish) = run(&mut stopped, &settings_of_stop).await;
        assert!(matches!(finish, Ok(Finish::Stop)), "{finish:?}");
        assert_eq!(told(&found), of(n_stop));
        // What may not be drawn is not, though nothing else is left.
        let refusing =
            Arc::new(Sampler { bias: vec![(stop, f32::NEG_INFINITY)], ..Sampler::clone(&sampler) });
        let mut refused = context(model, &rule).await;
        let (found, finish) = run(&mut refused, &settings(&refusing, Ahead::Unbounded)).await;
        assert_eq!(told(&found), of(n_stop - 1));
        assert!(matches!(finish, Err(EngineError::Output(_))), "{finish:?}");
        // A budget of tokens ends it at the token for which there is none, not before.
        let (n_prompt, n_most) = (story(model).len() as u64, 13);
        let budget = Budget { n_tokens: n_prompt + n_most - 1, ..Budget::UNLIMITED };
        let guest = Owner { account: Account::new("guest", budget, None), ..owner(9) };
        let mut poor = Context::create(model, guest).await.expect("created");
        poor.append(&story(model)).await.expect("fits");
        poor.keep_to(Some(&rule));
        let (found, finish) = run(&mut poor, &settings(&sampler, Ahead::Unbounded)).await;
        assert!(matches!(finish, Err(EngineError::Budget(_))), "{finish:?}");
        assert_eq!(told(&found), of(n_most as usize));
    });
}

#[test]
fn what_is_looked_at_comes_with_each_forced_token() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let rule = rule(model, &Grammar::Choice(vec![ODD.to_owned()]));
        let looks = Looks { n_top: 3, hidden: vec![1] };
        let sampler = Arc::new(Sampler { looks, ..Sampler::clone(&hot(1)) });
        let mut free = context(model, &rule).await;
        let (found, _) = run(&mut free, &settings(&sampler, Ahead::Unbounded)).await;
        let mut stepped = context(model, &rule).await;
        for drawn in found {
            let answer = stepped.ask(Ask::Top { n: 3 }).await.expect("asked").answer().await;
            let Ok(Answer::Top { candidates, .. }) = answer else { panic!("{answer:?}") };
            let seen = drawn.seen.expect("it was looked at");
            let top = seen.top.expect("it was asked for");
            let of = |candidates: &[trellis_engine::batch::Candidate]| -> Vec<(Token, Nat)> {
                candidates.iter().map(|it| (it.token, Nat(it.logprob))).collect()
            };
            assert_eq!(of(&top.candidates), of(&candidates));
            assert_eq!(seen.hidden.len(), 1);
            stepped.append(&[drawn.candidate.token]).await.expect("fits");
        }
    });
}

#[test]
fn a_grammar_that_forces_more_than_there_is_room_for_ends_with_the_context_and_holds_up_nobody() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let n_positions = model.limits().n_positions_max;
        let long = rule(model, &Grammar::Choice(vec![ODD.repeat(1 + n_positions / ODD.len())]));
        let mut forced = context(model, &long).await;
        let n_prompt = forced.tokens().len();
        let mut beside = Context::create(model, owner(2)).await.expect("created");
        beside.append(&story(model)).await.expect("fits");
        let sampler = hot(1);
        let mut alone = beside.fork().await.expect("forked");
        let free = RunSettings { n_tokens_max: Some(40), ..settings(&sampler, Ahead::Adaptive) };
        let (expected, _) = run(&mut alone, &free).await;
        let before = model.stats().await.expect("it runs");
        let unbounded = settings(&sampler, Ahead::Unbounded);
        let of_free = async {
            let (found, _) = run(&mut beside, &free).await;
            (found, model.stats().await.expect("it runs").n_steps - before.n_steps)
        };
        let (of_forced, (found, n_steps)) = tokio::join!(run(&mut forced, &unbounded), of_free);
        assert_eq!(told(&found), told(&expected));
        assert!(n_steps < 4 * expected.len() as u64, "{n_steps} steps");
        let (drawn, finish) = of_forced;
        assert!(matches!(finish, Ok(Finish::ContextFull)), "{finish:?}");
        assert_eq!(drawn.len(), n_positions - n_prompt);
        let text: String = ODD.chars().cycle().take(drawn.len()).collect();
        let tokens: Vec<Token> = drawn.iter().map(|drawn| drawn.candidate.token).collect();
        assert_eq!(tokens, encode(model, &text));
    });
}

#[test]
fn what_has_no_memory_ahead_or_no_pages_draws_what_steps_draw() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let rule = rule(model, &Grammar::Choice(vec![ODD.repeat(3)]));
        let sampler = hot(1);
        let expected = steps(model, &rule, &sampler).await;
        let n_prompt = story(model).len();
        let poor = |budget| Owner { account: Account::new("guest", budget, None), ..owner(9) };
        // Masks ahead of their draws are held where at least half of the memory stays free.
        let n_bytes = 1 << 20;
        let guest = poor(Budget { host_bytes: n_bytes, ..Budget::UNLIMITED });
        let account = guest.account.clone();
        let mut context = Context::create(model, guest).await.expect("created");
        context.append(&story(model)).await.expect("fits");
        context.keep_to(Some(&rule));
        let answer = context.ask(Ask::Sample(sampler.clone())).await.expect("asked").answer().await;
        assert!(answer.is_ok(), "{answer:?}");
        let n_left = model.limits().vocab_size as u64;
        let rest = n_bytes / 2 - account.used(Resource::HostBytes) - n_left;
        let _rest = HostCharge::new(&account, rest).expect("there is more");
        let before = account.n_tokens_forced();
        let (found, finish) = run(&mut context, &settings(&sampler, Ahead::Unbounded)).await;
        assert_eq!(told(&found), told(&expected));
        assert!(matches!(finish, Ok(Finish::Complete)), "{finish:?}");
        assert_eq!(account.n_tokens_forced(), before);
        // A budget of pages ends the run at the token for which there is no page.
        let n_pages = n_prompt.div_ceil(PAGE_LEN) + 2;
        let mut context =
            Context::create(model, poor(Budget { n_pages: n_pages as u64, ..Budget::UNLIMITED }))
                .await
                .expect("created");
        context.append(&story(model)).await.expect("fits");
        context.keep_to(Some(&rule));
        let (found, finish) = run(&mut context, &settings(&sampler, Ahead::Unbounded)).await;
        assert!(matches!(finish, Err(EngineError::Budget(_))), "{finish:?}");
        assert_eq!(told(&found), told(&expected[..n_pages * PAGE_LEN + 1 - n_prompt]));
    });
}

#[test]
fn what_is_dropped_or_given_up_while_forced_tokens_ride_is_given_back() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let rule = rule(model, &Grammar::Choice(vec![ODD.repeat(3)]));
        let sampler = hot(1);
        let expected = steps(model, &rule, &sampler).await;
        let guest = owner(9);
        for n_pulled in [1, 2, 3, 5, 8, 13, 40] {
            let mut context = Context::create(model, guest.clone()).await.expect("created");
            context.append(&story(model)).await.expect("fits");
            context.keep_to(Some(&rule));
            for drawn in &expected[..n_pulled] {
                let pulled = pull(&mut context, &sampler, 1, Ahead::Unbounded).await.expect("pulled");
                assert!(
                    matches!(pulled, Pull::Token(found) if found.candidate.token == drawn.candidate.token)
                );
            }
            let fork = context.fork().await.expect("forked");
            context.truncate(context.tokens().len() - 1).await.expect("there");
            for (mut context, n_drawn) in [(context, n_pulled - 1), (fork, n_pulled)] {
                context.keep_to(Some(&rule));
                let next = step(&mut context, &sampler).await.expect("drawn");
                assert_eq!(next, expected[n_drawn].candidate.token, "{n_pulled} pulled");
                pull(&mut context, &sampler, 2, Ahead::Unbounded).await.expect("pulled");
            }
        }
        for what in [Resource::HostBytes, Resource::Pages, Resource::Contexts] {
            while guest.account.used(what) > 0 {
                tokio::task::yield_now().await;
            }
        }
    });
}
