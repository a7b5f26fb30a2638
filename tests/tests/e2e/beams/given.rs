//! Searches with a sampler and under a constraint.

use std::sync::Arc;

use trellis_engine::account::{Account, Budget, Owner, Resource};
use trellis_engine::batch::Token;
use trellis_engine::constraint::{Begins, Constraint, ConstraintLimits, Grammar, Rule};
use trellis_engine::model::SpecialText;
use trellis_engine::sampling::beams::{BeamSettings, EarlyStopping, Finished};
use trellis_engine::sampling::program::{Definition, Program, PutOn, RowShape};
use trellis_engine::sampling::{Sampler, SamplerError, TokenMask};
use trellis_engine::{Answer, Ask, BeamSearch, Context, EngineError, ModelHandle};
use trellis_programs::Source;
use trellis_tests::engines::{Sizes, block_on, encode, engine, owner};

use super::TOLERANCE;

const PROMPT: &str = "<|begin_of_text|>Once upon a time";

fn settings(model: &ModelHandle, n_beams: usize, n_tokens_max: usize) -> BeamSettings {
    BeamSettings {
        early_stopping: EarlyStopping::Never,
        stop_tokens: model.model().stop_tokens.to_vec(),
        ..BeamSettings::of(n_beams, n_tokens_max)
    }
}

async fn search(
    model: &ModelHandle,
    owner: Owner,
    settings: BeamSettings,
    sampler: Option<Sampler>,
    rule: Option<&Arc<Rule>>,
) -> Result<Vec<Finished>, EngineError> {
    let mut context = Context::create(model, owner).await?;
    context.append(&encode(model, PROMPT)).await?;
    let n_beams = settings.n_beams;
    let mut search = BeamSearch::open(&mut context, settings, sampler.map(Arc::new), rule).await?;
    search.go_on(None).await?;
    Ok(search.best(n_beams))
}

fn program(model: &ModelHandle, definition: Definition) -> Sampler {
    let limits = model.limits();
    let shape = RowShape { vocab_size: limits.vocab_size, n_positions: limits.n_positions_max };
    let put_on = PutOn::new(Arc::new(Program::new(definition, shape).expect("in order")));
    Sampler { program: Some(Box::new(put_on)), ..Sampler::greedy() }
}

fn assert_alike(found: &[Finished], expected: &[Finished]) {
    let tokens = |all: &[Finished]| all.iter().map(|one| one.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(tokens(found), tokens(expected));
    for (found, expected) in found.iter().zip(expected) {
        assert!((found.score - expected.score).abs() < TOLERANCE, "{found:?} for {expected:?}");
    }
}

#[test]
fn what_a_sampler_makes_of_a_row_is_what_is_searched() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    block_on(async {
        let by = |sampler| search(model, owner(1), settings(model, 4, 12), sampler, None);
        let plain = by(None).await.expect("found");
        assert_alike(&by(Some(Sampler::greedy())).await.expect("found"), &plain);
        // The row is that of log-probabilities already.
        let same = program(model, Definition::build_row(|b| b.logits()));
        assert_alike(&by(Some(same)).await.expect("found"), &plain);
        let again = program(model, Definition::build_row(|b| b.logits().log_softmax()));
        assert_alike(&by(Some(again)).await.expect("found"), &plain);

        let forbidden = plain[0].tokens[0];
        let mut mask = TokenMask::all(model.limits().vocab_size);
        mask.set(forbidden, false);
        let masked = Sampler { mask: Some(Arc::new(mask)), ..Sampler::greedy() };
        let biased = Sampler { bias: vec![(forbidden, f32::NEG_INFINITY)], ..Sampler::greedy() };
        let found = by(Some(masked)).await.expect("found");
        assert!(found.iter().all(|one| !one.tokens.contains(&forbidden)), "{found:?}");
        assert_alike(&by(Some(biased)).await.expect("found"), &found);
        // Nothing is normalised again: a score is what the model says of the text.
        let mut context = Context::create(model, owner(1)).await.expect("created");
        context.append(&encode(model, PROMPT)).await.expect("fits");
        let ask = Ask::Continuation(found[0].tokens.clone());
        let answer = context.ask(ask).await.expect("asked").answer().await.expect("answered");
        let Answer::Scores(scores) = answer else { panic!("{answer:?}") };
        let expected = scores.iter().sum::<f32>() / scores.len() as f32;
        assert!((found[0].score - expected).abs() < TOLERANCE, "{} for {expected}", found[0].score);

        let hot = Sampler { temperature: 0.5, ..Sampler::greedy() };
        let refused = by(Some(hot)).await;
        let is_refused = matches!(
            refused,
            Err(EngineError::Sampler(SamplerError::OutOfRange { name: "temperature", .. }))
        );
        assert!(is_refused, "{refused:?}");
        let draws = program(model, Definition::build(|b| b.logits().draw(Source::SEED)));
        let keeps = program(
            model,
            Definition::build_row(|b| {
                let n = b.state(1.0);
                n.set(n.get() + 1.0);
                b.logits() + n.get()
            }),
        );
        for wrong in [draws, keeps] {
            let refused = by(Some(wrong)).await;
            assert!(matches!(refused, Err(EngineError::Sampler(SamplerError::EndsInNoRow))), "{refused:?}");
        }
    });
}

#[test]
fn hypotheses_keep_to_a_constraint() {
    let numbers = regex::Regex::new("^[0-9]{2,4}(,[0-9]{2,4}){0,2}$").expect("one");
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    let words = ["red", "green", "greenish", "light blue", "dark"];
    let grammars = [
        (Grammar::Choice(words.map(str::to_owned).to_vec()), 10),
        (Grammar::Regex("[0-9]{2,4}(,[0-9]{2,4}){0,2}".to_owned()), 24),
    ];
    block_on(async {
        for (grammar, n_tokens_max) in grammars {
            let account = Account::new("guest", Budget::UNLIMITED, None);
            let limits = ConstraintLimits::default();
            let constraint = Constraint::compile(&grammar, model, limits, &account).expect("a grammar");
            let rule = Arc::new(Rule::new(Arc::new(constraint), Begins::FirstDraw));
            let guest = Owner { account: Account::new("guest", Budget::UNLIMITED, None), ..owner(1) };
            for sampler in [None, Some(program(model, Definition::build_row(|b| b.logits())))] {
                let settings = settings(model, 8, n_tokens_max);
                let stop_tokens = settings.stop_tokens.clone();
                let found =
                    search(model, guest.clone(), settings, sampler, Some(&rule)).await.expect("found");
                assert!(found.len() >= 5, "{found:?}");
                for finished in &found {
                    let (last, before) = finished.tokens.split_last().expect("it has tokens");
                    assert!(stop_tokens.contains(last), "{finished:?}");
                    let text = text(model, before);
                    let is_of_it = match &grammar {
                        Grammar::Choice(texts) => texts.contains(&text),
                        _ => numbers.is_match(&text),
                    };
                    assert!(is_of_it, "{text:?}");
                }
            }
            for what in [Resource::Contexts, Resource::HostBytes] {
                assert_eq!(guest.account.used(what), 0, "{what:?}");
            }
        }
    });
}

fn text(model: &ModelHandle, tokens: &[Token]) -> String {
    model.model().tokenizer.decode(tokens, SpecialText::Skip)
}
