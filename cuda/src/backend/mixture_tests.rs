//! Mixtures inside steps: the device's draws against those that the host makes from the same rows of logits.

use std::sync::Arc;

use trellis_engine::KeptRow;
use trellis_engine::batch::{Candidate, Input, Others, OutputKind, Row, Start, Token, Within};
use trellis_engine::model::{Dtype, Model};
use trellis_engine::sampling::program::{Definition, DrawState, Left, Program, PutOn, RowShape};
use trellis_engine::sampling::{Sampler, TokenMask};
use trellis_programs::{Source, library};

use super::tests::{card, load_on, random_models, row, tokens};
use super::*;
use crate::testing::Random;

const N_STEPS: usize = 12;
/// Mixtures of two, three and four contexts, by turns; with their rows a captured step of 32.
const SIZES: [usize; 11] = [2, 3, 4, 2, 3, 4, 2, 3, 4, 2, 3];
const N_PROMPT: usize = 12;
/// Pages of a context.
const N_PAGES: usize = 4;

/// A mixture: its sampler, where its next draw starts, and the tokens of its members, the first of which has this slot.
struct Mixture {
    sampler: Sampler,
    start: DrawState,
    slot: usize,
    members: Vec<Vec<Token>>,
}

fn sampler(model: &Model, n_members: usize, seed: u64) -> Sampler {
    let shape = RowShape { vocab_size: model.config.vocab_size, n_positions: model.config.n_positions };
    let definition = Definition::build(|b| {
        let n = b.state(0.5);
        n.set(n.get() + b.parameter(0));
        b.report(n.get());
        let x = match n_members {
            2 => library::guidance(b.logits(), b.member(0), b.parameter(0)),
            3 => library::experts(b.logits(), b.member(0), b.member(1), b.parameter(0)),
            // One is named twice, and one that is not there is the first.
            _ => library::product(b.logits(), b.member(2), 0.3) + b.member(2) * 0.1 + b.member(7) * 0.1,
        };
        library::temperature(x, 0.8).draw(Source::SEED)
    });
    let program = Arc::new(Program::new(definition, shape).expect("it is in order"));
    let put_on = PutOn { parameters: vec![1.5], ..PutOn::new(program) };
    Sampler { program: Some(Box::new(put_on)), seed, ..Sampler::greedy() }
}

fn mixtures(model: &Model) -> Vec<Mixture> {
    let mut random = Random(2);
    let mut slot = 0;
    SIZES
        .iter()
        .zip(7..)
        .map(|(&n_members, seed)| {
            let prompt = |_| tokens(&mut random, N_PROMPT, model.config.vocab_size.min(40));
            let (sampler, members) = (sampler(model, n_members, seed), (0..n_members).map(prompt).collect());
            let mixture = Mixture { start: sampler.start(), sampler, slot, members };
            slot += n_members;
            mixture
        })
        .collect()
}

/// The rows of a step of all mixtures: from `first` on, or, if that is `None`, with what the step before draws.
fn rows<'a>(mixtures: &'a [Mixture], first: Option<usize>, within: Within<'a>) -> Vec<Row<'a>> {
    let of_one = |mixture: &'a Mixture| {
        let Mixture { sampler, start, slot, members } = mixture;
        members.iter().enumerate().map(move |(idx, tokens)| {
            let (position, from) = match first {
                Some(first) => (tokens.len() - 1, first.min(tokens.len() - 1)),
                None => (tokens.len(), tokens.len()),
            };
            let start = if first.is_some() { Start::At(*start) } else { Start::Drawn };
            let kind = match idx {
                0 => OutputKind::Program { sampler, start, within, others: Others::Rows(members.len() - 1) },
                _ => OutputKind::Mixed,
            };
            let row = row((slot + idx) as u32, tokens, from, (slot + idx) * N_PAGES, vec![(position, kind)]);
            let input = if first.is_some() { Input::Known } else { Input::Drawn(SlotId(*slot as u32)) };
            Row { input, ..row }
        })
    };
    mixtures.iter().flat_map(of_one).collect()
}

fn take(backend: &mut CudaBackend, mixtures: &mut [Mixture]) -> Vec<(Candidate, Left)> {
    let mut outputs = backend.collect().expect("it ran").outputs.into_iter();
    let drawn = mixtures.iter_mut().map(|mixture| {
        let output = outputs.next().expect("the first member's");
        let Output::Programmed(candidate, left) = output else { panic!("{output:?}") };
        for _ in 1..mixture.members.len() {
            assert_eq!(outputs.next(), Some(Output::Mixed));
        }
        mixture.members.iter_mut().for_each(|tokens| tokens.push(candidate.token));
        mixture.start = left.next;
        (candidate, *left)
    });
    let drawn = drawn.collect();
    assert_eq!(outputs.next(), None);
    drawn
}

/// Decodes with two steps under way, and every fourth step anew.
fn decoded(backend: &mut CudaBackend, model: &Model) -> Vec<Vec<(Candidate, Left)>> {
    let mut mixtures = mixtures(model);
    let mut drawn = Vec::new();
    for round in 0..N_STEPS / 4 {
        let first = if round == 0 { 0 } else { usize::MAX };
        backend
            .submit(&Batch { copies: &[], rows: rows(&mixtures, Some(first), Within::All) })
            .expect("it is submitted");
        for _ in 0..3 {
            backend
                .submit(&Batch { copies: &[], rows: rows(&mixtures, None, Within::All) })
                .expect("it is submitted");
            drawn.push(take(backend, &mut mixtures));
        }
        drawn.push(take(backend, &mut mixtures));
    }
    drawn
}

#[test]
fn mixtures_in_steps_draw_what_the_host_draws() {
    let Some(card) = card() else { return };
    for model in random_models() {
        let mut on_device = load_on(&card, &model, Dtype::F32);
        card.wait_for_programs();
        let found = decoded(&mut on_device, &model);
        assert_eq!(on_device.steps.n_by_host(), 0, "all of it is the device's");
        let mut on_host = load_on(&card, &model, Dtype::F32);
        on_host.steps.leave_programs_to_host();
        let expected = decoded(&mut on_host, &model);
        assert_eq!(on_host.steps.n_by_host(), N_STEPS * SIZES.len());
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            for (idx, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert_eq!(found.0.token, expected.0.token, "{}, step {step}, mixture {idx}", model.name);
                assert_eq!(found.1, expected.1, "{}, step {step}, mixture {idx}", model.name);
                let (a, b) = (found.0.logprob, expected.0.logprob);
                assert!((a - b).abs() <= 1e-4, "{}, step {step}, mixture {idx}: {a} {b}", model.name);
            }
        }
    }
}

/// Under a mask by turns on the device and, with the rows of the others, on the host.
#[test]
fn a_mixture_under_a_mask_draws_within_it() {
    let Some(card) = card() else { return };
    let model = &random_models()[0];
    let mut mask = TokenMask::none(model.config.vocab_size);
    (0..model.config.vocab_size).step_by(3).for_each(|token| mask.set(token as Token, true));
    let mask = Arc::new(mask);
    let drawn = |leaves_to_host: bool| {
        let mut backend = load_on(&card, model, Dtype::F32);
        card.wait_for_programs();
        if leaves_to_host {
            backend.steps.leave_programs_to_host();
        }
        let mut mixtures = mixtures(model);
        let steps = [0, usize::MAX, usize::MAX].map(|first| {
            let rows = rows(&mixtures, Some(first), Within::Mask(&mask));
            backend.submit(&Batch { copies: &[], rows }).expect("it is submitted");
            let drawn = take(&mut backend, &mut mixtures);
            drawn.into_iter().map(|(candidate, _)| candidate.token).collect::<Vec<_>>()
        });
        assert_eq!(backend.steps.n_by_host(), if leaves_to_host { 3 * SIZES.len() } else { 0 });
        assert!(steps.iter().flatten().all(|&token| mask.allows(token)), "{steps:?}");
        steps
    };
    assert_eq!(drawn(false), drawn(true));
}

/// Draws of one model with rows that another has left on the card, put into the stream before either step is waited for.
#[test]
fn a_draw_reads_what_a_step_of_another_model_has_kept() {
    let Some(card) = card() else { return };
    let models = random_models();
    let [large, small] = [&models[0], &models[2]];
    let sampler = sampler(large, 3, 5);
    let drawn = |leaves_to_host: bool| {
        let [mut of_large, mut of_small] = [large, small].map(|model| load_on(&card, model, Dtype::F32));
        card.wait_for_programs();
        if leaves_to_host {
            of_large.steps.leave_programs_to_host();
        }
        let mut random = Random(3);
        let mut texts: Vec<Vec<Token>> = (0..9).map(|_| tokens(&mut random, N_PROMPT, 40)).collect();
        let mut start = [sampler.start(); 3];
        let mut drawn = Vec::new();
        for step in 0..N_STEPS {
            let places: Vec<KeptRow> = (0..6).map(|_| of_small.keep_row().expect("there is room")).collect();
            let from = |text: &Vec<Token>| if step == 0 { 0 } else { text.len() - 1 };
            let others = texts[3..].iter().zip(&places).enumerate().map(|(idx, (text, place))| {
                let asked = vec![(text.len() - 1, OutputKind::Keep(place))];
                row(idx as u32, text, from(text), idx * N_PAGES, asked)
            });
            of_small.submit(&Batch { copies: &[], rows: others.collect() }).expect("it is submitted");
            let firsts = texts[..3].iter().enumerate().map(|(idx, text)| {
                let (start, others) = (Start::At(start[idx]), Others::Kept(&places[2 * idx..2 * idx + 2]));
                let kind = OutputKind::Program { sampler: &sampler, start, within: Within::All, others };
                row(idx as u32, text, from(text), idx * N_PAGES, vec![(text.len() - 1, kind)])
            });
            of_large.submit(&Batch { copies: &[], rows: firsts.collect() }).expect("it is submitted");
            // Whoever gets them now writes behind that.
            drop(places);
            assert_eq!(of_small.collect().expect("it ran").outputs, vec![Output::Kept; 6]);
            let outputs = of_large.collect().expect("it ran").outputs;
            for (idx, output) in outputs.into_iter().enumerate() {
                let Output::Programmed(candidate, left) = output else { panic!("{output:?}") };
                start[idx] = left.next;
                for text in [idx, 3 + 2 * idx, 4 + 2 * idx] {
                    texts[text].push(candidate.token);
                }
                drawn.push((candidate, *left));
            }
        }
        assert_eq!(of_large.steps.n_by_host(), if leaves_to_host { 3 * N_STEPS } else { 0 });
        drawn
    };
    let (found, expected) = (drawn(false), drawn(true));
    for (idx, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!((found.0.token, &found.1), (expected.0.token, &expected.1), "draw {idx}");
        let (a, b) = (found.0.logprob, expected.0.logprob);
        assert!((a - b).abs() <= 1e-4, "draw {idx}: {a} {b}");
    }
    // The rows are what the draws say: with other others they are different.
    let texts = found.iter().map(|(candidate, _)| candidate.token);
    assert!(texts.collect::<std::collections::HashSet<_>>().len() > 3);
}

/// Models of one vocabulary share the places, and there is an end to them.
#[test]
fn places_for_rows_are_shared_and_bounded() {
    let Some(card) = card() else { return };
    let models = random_models();
    let [mut one, mut other] = [&models[0], &models[1]].map(|model| load_on(&card, model, Dtype::F32));
    let rows: Vec<KeptRow> = std::iter::from_fn(|| one.keep_row()).collect();
    assert!(rows.len() >= 64 && other.keep_row().is_none(), "{}", rows.len());
    drop(rows);
    assert!(other.keep_row().is_some());
}
