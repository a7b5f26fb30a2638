//! What keeps to a grammar: whatever draws, however decoding is cut, undone and guessed.

mod forced;
pub(crate) mod guest;
mod schemas;
mod suite;

use std::sync::Arc;

use regex::Regex;
use serde_json::Value;
use trellis_engine::account::Account;
use trellis_engine::account::Budget;
use trellis_engine::batch::{Drawn, OutputFault, Token};
use trellis_engine::constraint::{
    Begins, Constraint, ConstraintError, ConstraintLimits, Grammar, Rule, Whitespace,
};
use trellis_engine::model::SpecialText;
use trellis_engine::sampling::program::{Definition, Program, PutOn, RowShape};
use trellis_engine::sampling::{Sampler, TokenMask};
use trellis_engine::{
    Ahead, Answer, Ask, Context, EngineError, Finish, Guess, MaskSource, ModelHandle, Pull, RunKey,
    RunSettings,
};
use trellis_programs::Source;
use trellis_programs::library;
use trellis_tests::engines::{Random, Sizes, block_on, encode, engine, owner};

const LIST: &str = r#"{"type":"array","minItems":3,"maxItems":6,"items":
    {"anyOf":[{"type":"integer","minimum":-999,"maximum":9999},{"type":"string","maxLength":8},{"enum":["ab","abc",null,true]}]}}"#;

const SUM: &str =
    "start: sum\nsum: sum \"+\" term | term\nterm: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]{1,3}/";

/// Most of it is forced.
const LETTER: &str = r"(Dear customer, |~\^@~\^@~\^@)your order [0-9]{2} has been shipped\.( Thank you\.)?";

fn schema(text: &str) -> Grammar {
    Grammar::JsonSchema { schema: text.to_owned(), whitespace: Whitespace::Compact }
}

fn compile(model: &ModelHandle, grammar: &Grammar) -> Result<Arc<Constraint>, ConstraintError> {
    let account = Account::new("guest", Budget::UNLIMITED, None);
    Constraint::compile(grammar, model, ConstraintLimits::default(), &account).map(Arc::new)
}

fn rule(model: &ModelHandle, grammar: &Grammar) -> Arc<Rule> {
    rule_from(model, grammar, Begins::FirstDraw)
}

fn rule_from(model: &ModelHandle, grammar: &Grammar, begins: Begins) -> Arc<Rule> {
    Arc::new(Rule::new(compile(model, grammar).expect("a grammar"), begins))
}

fn hot(seed: u64) -> Arc<Sampler> {
    Arc::new(Sampler { temperature: 1.5, seed, ..Sampler::greedy() })
}

fn story(model: &ModelHandle) -> Vec<Token> {
    encode(model, "<|begin_of_text|><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n")
}

async fn context(model: &ModelHandle, rule: &Arc<Rule>) -> Context {
    let mut context = Context::create(model, owner(1)).await.expect("created");
    context.append(&story(model)).await.expect("fits");
    context.keep_to(Some(rule));
    context
}

async fn step(context: &mut Context, sampler: &Arc<Sampler>) -> Result<Token, EngineError> {
    let answer = context.ask(Ask::Sample(sampler.clone())).await?.answer().await?;
    let Answer::Sampled(drawn) = answer else { panic!("{answer:?}") };
    context.append_drawn(std::slice::from_ref(&drawn), sampler).await?;
    Ok(drawn.candidate.token)
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

async fn pull(
    context: &mut Context,
    sampler: &Arc<Sampler>,
    key: u64,
    ahead: Ahead,
) -> Result<Pull, EngineError> {
    context.pull(RunKey(key), || settings(sampler, ahead)).await
}

/// Draws to the end, which the stream says itself; the text.
async fn stream(context: &mut Context, sampler: &Arc<Sampler>, ahead: Ahead) -> String {
    let n_before = context.tokens().len();
    loop {
        match pull(context, sampler, 1, ahead).await.expect("pulled") {
            Pull::Token(_) => {}
            Pull::Finished(Finish::Complete) => break,
            Pull::Finished(finish) => panic!("{finish:?} after {:?}", text(context, n_before)),
        }
    }
    text(context, n_before)
}

fn text(context: &Context, from: usize) -> String {
    let tokens = context.tokens().copy_of(from..context.tokens().len());
    context.model().model().tokenizer.decode(&tokens, SpecialText::Skip)
}

fn is_end(model: &ModelHandle, token: Token) -> bool {
    model.model().stop_tokens.contains(&token)
}

/// Whether a text is a sum, told by a parser of its own.
fn is_sum(text: &str) -> bool {
    fn term(text: &str) -> Option<&str> {
        if let Some(rest) = text.strip_prefix('(') {
            return sum(rest)?.strip_prefix(')');
        }
        let n = text.bytes().take_while(u8::is_ascii_digit).count();
        (1..=3).contains(&n).then(|| &text[n..])
    }
    fn sum(text: &str) -> Option<&str> {
        let mut rest = term(text)?;
        while let Some(more) = rest.strip_prefix('+') {
            rest = term(more)?;
        }
        Some(rest)
    }
    sum(text) == Some("")
}

/// How a guest may come by its tokens.
#[derive(Clone, Copy, Debug)]
enum Mode {
    Steps,
    Stream(Ahead),
    /// Guesses, as many of their first tokens right as told.
    Guesses(usize),
    /// The same, as streams have them verified.
    Verified(usize),
}

/// Draws until the grammar is complete, with what interrupts it; the tokens without an end.
async fn interrupted(
    model: &ModelHandle,
    rule: &Arc<Rule>,
    sampler: &Arc<Sampler>,
    mode: Mode,
    seed: u64,
) -> Vec<Token> {
    let mut context = context(model, rule).await;
    let n_before = context.tokens().len();
    let mut random = Random(seed);
    let expected = match mode {
        Mode::Guesses(_) | Mode::Verified(_) => {
            let mut ahead = self::context(model, rule).await;
            stream(&mut ahead, sampler, Ahead::Unbounded).await;
            ahead.tokens().to_vec()
        }
        _ => Vec::new(),
    };
    for key in 1.. {
        // What is done to the context is the same in all modes, and comes at the same places.
        match random.below(4) {
            0 => context = context.fork().await.expect("forked"),
            1 => context.truncate(context.tokens().len().max(n_before + 2) - 2).await.expect("there"),
            _ => {}
        }
        context.keep_to(Some(rule));
        let n_next = context.tokens().len() + 1 + random.below(4);
        while context.tokens().len() < n_next {
            let token = match mode {
                Mode::Steps => step(&mut context, sampler).await.expect("drawn"),
                Mode::Stream(ahead) => match pull(&mut context, sampler, key, ahead).await.expect("pulled") {
                    Pull::Token(Drawn { candidate, .. }) => candidate.token,
                    Pull::Finished(Finish::Complete) => {
                        return context.tokens().copy_of(n_before..context.tokens().len());
                    }
                    Pull::Finished(finish) => panic!("{finish:?}"),
                },
                Mode::Verified(n_right) => {
                    let key = RunKey(key);
                    if let Some(drawn) = context.take_verified(key).expect("room") {
                        drawn.candidate.token
                    } else {
                        let n = context.tokens().len();
                        let mut guess: Vec<Token> = expected.iter().skip(n).take(n_right).copied().collect();
                        guess.extend([300, 301]);
                        if context
                            .verify(key, sampler, trellis_engine::Guess::Chain(guess))
                            .await
                            .expect("verified")
                            .is_none()
                        {
                            return context.tokens().copy_of(n_before..n);
                        }
                        continue;
                    }
                }
                Mode::Guesses(n_right) => {
                    let n = context.tokens().len();
                    let room = n_next - n - 1;
                    let mut guess: Vec<Token> = expected.iter().skip(n).take(n_right).copied().collect();
                    guess.extend([300, 301]);
                    guess.truncate(room);
                    let ask = Ask::Verify { sampler: sampler.clone(), guess: Guess::Chain(guess) };
                    let answer = context.ask(ask).await.expect("asked").answer().await.expect("verified");
                    let Answer::Verified(drawn) = answer else { panic!("{answer:?}") };
                    context.append_drawn(&drawn, sampler).await.expect("fits");
                    drawn.last().expect("one at least").candidate.token
                }
            };
            if is_end(model, token) {
                let n = context.tokens().len();
                return context.tokens().copy_of(n_before..n - 1);
            }
        }
    }
    unreachable!("there are keys enough")
}

#[test]
fn streams_guesses_forks_and_what_is_undone_give_what_steps_give() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        for (idx, grammar) in [schema(LIST), Grammar::Lark(SUM.to_owned()), Grammar::Regex(LETTER.to_owned())]
            .iter()
            .enumerate()
        {
            for seed in 0..4 {
                let sampler = match seed {
                    0 => Arc::new(Sampler { frequency_penalty: 0.4, ..Sampler::clone(&hot(seed)) }),
                    1 => programmed(
                        model,
                        seed,
                        Definition::build(|b| {
                            let n = b.state(1.0);
                            n.set(n.get() + 1.0);
                            library::temperature(b.logits(), n.get()).draw(Source::SEED)
                        }),
                    ),
                    _ => hot(seed),
                };
                let rule = rule(model, grammar);
                let expected = interrupted(model, &rule, &sampler, Mode::Steps, seed).await;
                assert!(expected.len() > 1, "{expected:?}");
                let modes = [
                    Mode::Stream(Ahead::Adaptive),
                    Mode::Stream(Ahead::Unbounded),
                    Mode::Guesses(0),
                    Mode::Guesses(1),
                    Mode::Guesses(9),
                    Mode::Verified(0),
                    Mode::Verified(3),
                    Mode::Verified(12),
                ];
                for mode in modes {
                    let found = interrupted(model, &rule, &sampler, mode, seed).await;
                    assert_eq!(found, expected, "grammar {idx}, seed {seed}, {mode:?}");
                }
            }
        }
    });
}

/// A sampler that draws by a program.
fn programmed(model: &ModelHandle, seed: u64, definition: Definition) -> Arc<Sampler> {
    let limits = model.limits();
    let shape = RowShape { vocab_size: limits.vocab_size, n_positions: limits.n_positions_max };
    let program = Arc::new(Program::new(definition, shape).expect("it is in order"));
    Arc::new(Sampler { seed, program: Some(Box::new(PutOn::new(program))), ..Sampler::greedy() })
}

/// Samplers of every kind, most of them at odds with any grammar.
fn samplers(model: &ModelHandle, seed: u64) -> Vec<(&'static str, Arc<Sampler>)> {
    let with = |change: fn(&mut Sampler)| {
        let mut sampler = Sampler { temperature: 1.5, seed, ..Sampler::greedy() };
        change(&mut sampler);
        Arc::new(sampler)
    };
    let by = |definition| programmed(model, seed, definition);
    vec![
        ("greedy", with(|it| it.temperature = 0.0)),
        ("hot", with(|it| it.temperature = 1.5)),
        ("boiling", with(|it| it.temperature = 100.0)),
        ("top-k", with(|it| it.top_k = Some(1))),
        ("top-p", with(|it| it.top_p = Some(0.01))),
        ("min-p", with(|it| it.min_p = Some(1.0))),
        (
            "penalties",
            with(|it| (it.repetition_penalty, it.frequency_penalty, it.presence_penalty) = (5.0, 2.0, 2.0)),
        ),
        ("bias", with(|it| it.bias = (100..1000).map(|token| (token, 60.0)).collect())),
        // A program that asks for no constraint, with a truncation that would leave none of what the grammar has.
        ("program", by(Definition::build(|b| library::top_k(b.logits(), 3.0).draw(Source::SEED)))),
        ("noise", by(Definition::build(|b| library::temperature(b.logits(), 1e6).draw(Source::SEED)))),
        // One that knows of it, and draws from all tokens all the same.
        (
            "knows",
            by(Definition::build(|b| {
                b.report(b.logits().max_over(b.constraint()));
                b.logits().argmax()
            })),
        ),
    ]
}

#[test]
fn no_sampler_draws_what_a_grammar_refuses() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let date = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])(T[0-9]{2}:[0-9]{2})?";
        let words = ["yes", "no", "perhaps", "perhaps not", "\"quoted\"\n", "né"];
        let date_oracle = Regex::new(&format!("^(?:{date})$")).expect("a regex");
        let grammars = [
            schema(LIST),
            Grammar::Regex(date.to_owned()),
            Grammar::Lark(
                "start: NUMBER \"+\" NUMBER\nNUMBER: /[0-9]{1,3}/ | \"(\" /[0-9]/ \")\"".to_owned(),
            ),
            Grammar::Choice(words.map(str::to_owned).to_vec()),
        ];
        for (idx, grammar) in grammars.iter().enumerate() {
            let holds = |text: &str| match idx {
                0 => serde_json::from_str::<Value>(text)
                    .is_ok_and(|it| it.as_array().is_some_and(|it| (3..=6).contains(&it.len()))),
                1 => date_oracle.is_match(text),
                2 => is_sum(text),
                _ => words.contains(&text),
            };
            for seed in 0..3 {
                for (name, sampler) in samplers(model, seed) {
                    let rule = rule(model, grammar);
                    for ahead in [Ahead::Adaptive, Ahead::Unbounded] {
                        let mut streamed = context(model, &rule).await;
                        let text = stream(&mut streamed, &sampler, ahead).await;
                        assert!(holds(&text), "{name}, seed {seed}, {grammar:?}: {text:?}");
                    }
                }
            }
        }
        // The report of the program that knows of the constraint is over what that allows: the model's own logits.
        let rule = rule(model, &grammars[1]);
        let (_, knows) = samplers(model, 1).pop().expect("it is the last");
        let mut context = context(model, &rule).await;
        let answer = context.ask(Ask::Sample(knows)).await.expect("asked").answer().await;
        let Ok(Answer::Sampled(Drawn { left: Some(left), candidate, .. })) = answer else {
            panic!("{answer:?}")
        };
        let answer = context.ask(Ask::Scores(vec![candidate.token])).await.expect("asked").answer().await;
        let Ok(Answer::Scores(scores)) = answer else { panic!("{answer:?}") };
        assert!(
            (scores[0] - candidate.logprob).abs() < 1e-4 && left.reports[0].is_finite(),
            "{left:?} {scores:?}"
        );
    });
}

#[test]
fn a_program_that_comes_by_its_token_otherwise_has_drawn_nothing() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let rule = rule(model, &Grammar::Regex("[ab]{2,9}c".to_owned()));
        let [a, x] = ["a", "x"].map(|text| encode(model, text)[0]);
        let fixed = |token: Token| {
            let sampler = programmed(model, 1, Definition::build(|b| b.parameter_token(0)));
            let mut sampler = Sampler::clone(&sampler);
            sampler.program.as_mut().expect("it has one").parameters = vec![token as f32];
            Arc::new(sampler)
        };
        let mut context = context(model, &rule).await;
        assert_eq!(step(&mut context, &fixed(a)).await.expect("the grammar has it"), a);
        let refused = step(&mut context, &fixed(x)).await;
        assert!(matches!(refused, Err(EngineError::Output(OutputFault::NothingToDraw))), "{refused:?}");
        let refused = pull(&mut context, &fixed(x), 1, Ahead::Adaptive).await;
        assert!(matches!(refused, Err(EngineError::Output(OutputFault::NothingToDraw))), "{refused:?}");
        assert!(matches!(pull(&mut context, &fixed(a), 2, Ahead::Adaptive).await, Ok(Pull::Token(_))));
    });
}

#[test]
fn it_begins_where_the_guest_says_and_what_comes_before_is_free() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let grammar = Grammar::Regex("[0-9]{3}".to_owned());
        let n_prompt = story(model).len();
        let digits = |text: &str| text.len() == 3 && text.bytes().all(|it| it.is_ascii_digit());

        let mut at = context(model, &rule_from(model, &grammar, Begins::At(n_prompt + 6))).await;
        stream(&mut at, &hot(1), Ahead::Adaptive).await;
        let free = text(&at, n_prompt);
        assert!(digits(&text(&at, n_prompt + 6)) && free.len() > 3 && !digits(&free), "{free:?}");

        // A token that the sampler is made to like comes soon.
        let comma = encode(model, ",")[0];
        let likes = Arc::new(Sampler { bias: vec![(comma, 6.0)], ..Sampler::clone(&hot(2)) });
        let mut after = context(model, &rule_from(model, &grammar, Begins::AfterToken(comma))).await;
        stream(&mut after, &likes, Ahead::Unbounded).await;
        let tokens = after.tokens().to_vec();
        let n_thought =
            n_prompt + tokens[n_prompt..].iter().position(|it| *it == comma).expect("it came") + 1;
        assert!(digits(&text(&after, n_thought)), "{:?}", text(&after, n_prompt));

        // The thought may be the guest's own, and the same rule holds for steps.
        let rule = rule_from(model, &grammar, Begins::AfterText("</think>".to_owned()));
        let mut thought = context(model, &rule).await;
        step(&mut thought, &hot(3)).await.expect("drawn");
        let mut fork = thought.fork().await.expect("forked");
        thought.append(&encode(model, " so it is.</think>")).await.expect("fits");
        let n_thought = thought.tokens().len();
        loop {
            thought.keep_to(Some(&rule));
            if is_end(model, step(&mut thought, &hot(3)).await.expect("drawn")) {
                break;
            }
        }
        thought.truncate(thought.tokens().len() - 1).await.expect("there");
        assert!(digits(&text(&thought, n_thought)), "{:?}", text(&thought, n_prompt));
        // The fork has not thought to the end: it may still say anything.
        fork.keep_to(Some(&rule));
        fork.append(&encode(model, " and 12")).await.expect("fits");
        step(&mut fork, &hot(3)).await.expect("drawn");
    });
}

#[test]
fn a_rule_that_is_made_anew_begins_anew_and_one_that_goes_on_counts_what_is_appended() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let grammar = Grammar::Choice(vec!["yes".to_owned(), "no".to_owned()]);
        let first = rule(model, &grammar);
        let mut context = context(model, &first).await;
        let n_before = context.tokens().len();
        assert!(["yes", "no"].contains(&stream(&mut context, &hot(1), Ahead::Adaptive).await.as_str()));
        // It is complete: all that a step may draw is an end, and after that nothing.
        let token = step(&mut context, &hot(1)).await.expect("an end");
        assert!(is_end(model, token));
        let refused = step(&mut context, &hot(1)).await;
        assert!(matches!(refused, Err(EngineError::Output(OutputFault::NothingToDraw))), "{refused:?}");
        assert_eq!(
            pull(&mut context, &hot(1), 9, Ahead::Adaptive).await.expect("pulled"),
            Pull::Finished(Finish::Complete)
        );
        // What follows is not of the grammar.
        let n_tokens = context.tokens().len();
        let more = encode(model, "\nReally?\n");
        context.append(&more).await.expect("fits");
        let left = ConstraintError::Left { position: n_tokens, token: more[0] };
        let refused = step(&mut context, &hot(1)).await;
        assert!(matches!(&refused, Err(EngineError::Constraint(error)) if *error == left), "{refused:?}");
        let refused = pull(&mut context, &hot(1), 10, Ahead::Adaptive).await;
        assert!(matches!(&refused, Err(EngineError::Constraint(error)) if *error == left), "{refused:?}");
        // Put on anew, it begins here; without it, anything goes; and the old one has been forgotten.
        context.keep_to(Some(&rule(model, &grammar)));
        let n_tokens = context.tokens().len();
        stream(&mut context, &hot(2), Ahead::Unbounded).await;
        assert!(["yes", "no"].contains(&text(&context, n_tokens).as_str()));
        context.keep_to(None);
        step(&mut context, &hot(2)).await.expect("free");
        // Truncated to before it began, it begins where it is drawn under next.
        context.truncate(n_before - 1).await.expect("there");
        context.keep_to(Some(&first));
        assert!(["yes", "no"].contains(&stream(&mut context, &hot(3), Ahead::Adaptive).await.as_str()));
    });
}

#[test]
fn the_mask_of_the_sampler_holds_beside_the_grammar() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let rule = rule(model, &Grammar::Regex("[a-z]{1,4}(,[a-z]{1,4}){3}".to_owned()));
        let vocab_size = model.limits().vocab_size;
        let mut mask = TokenMask::all(vocab_size);
        for token in 0..vocab_size as Token {
            let bytes = model.model().tokenizer.token_bytes(token).unwrap_or_default();
            mask.set(token, bytes.len() == 1 && bytes != b"e" && bytes != b"a");
        }
        for seed in 0..3 {
            let sampler =
                Arc::new(Sampler { mask: Some(Arc::new(mask.clone())), ..Sampler::clone(&hot(seed)) });
            let mut streamed = context(model, &rule).await;
            let text = stream(&mut streamed, &sampler, Ahead::Adaptive).await;
            assert!(!text.contains(['a', 'e']) && text.split(',').count() == 4, "{text:?}");
            let mut stepped = context(model, &rule).await;
            while !is_end(model, *stepped.tokens().to_vec().last().expect("a prompt"))
                && stepped.tokens().len() < 80
            {
                match step(&mut stepped, &sampler).await {
                    Ok(_) => {}
                    // The mask has no end among its tokens.
                    Err(EngineError::Output(OutputFault::NothingToDraw)) => break,
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!(stepped.tokens().to_vec(), streamed.tokens().to_vec());
        }
    });
}

#[test]
fn what_is_held_for_a_constraint_is_given_back() {
    block_on(async {
        let engine = engine("tiny", Sizes::default());
        let model = engine.handle();
        let guest = owner(7);
        let used = || guest.account.used(trellis_engine::account::Resource::HostBytes);
        let limits = ConstraintLimits::default();
        let constraint =
            Constraint::compile(&schema(LIST), model, limits, &guest.account).expect("a grammar");
        let rule = Arc::new(Rule::new(Arc::new(constraint), Begins::FirstDraw));
        let of_grammar = used();
        let mut context = Context::create(model, guest.clone()).await.expect("created");
        context.append(&story(model)).await.expect("fits");
        context.keep_to(Some(&rule));
        pull(&mut context, &hot(1), 1, Ahead::Adaptive).await.expect("pulled");
        let of_matcher = 16 << 10;
        assert!(used() >= of_grammar + of_matcher);
        let fork = context.fork().await.expect("forked");
        assert!(used() >= of_grammar + 2 * of_matcher, "a fork has a matcher of its own");
        drop((context, fork, rule));
        // A thread may be at the mask of a stream that has just been dropped.
        while used() > 0 {
            tokio::task::yield_now().await;
        }
    });
}
