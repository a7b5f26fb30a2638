//! Programs inside steps, against the same draws made by the host from the same rows of logits.

use std::sync::Arc;

use trellis_engine::batch::{Input, Others, OutputKind, Row, Start, Token, Within};
use trellis_engine::model::{Dtype, Model};
use trellis_engine::sampling::program::{Definition, DrawState, Left, Program, PutOn, RowShape};
use trellis_engine::sampling::{Bias, Sampler, TokenMask};

use trellis_programs::{BiasId, MaskId, Source};

use super::tests::{card, load_on, random_models, row, tokens};
use super::*;
use crate::ops::program_library::library_programs;
use crate::ops::program_plan::{EncodedProgram, ProgramKind};
use crate::testing::Random;

const N_STEPS: usize = 12;
const N_SAMPLERS: usize = 32;
/// Tokens of a prompt: those of all samplers fit one step.
pub(super) const N_PROMPT: usize = 15;
/// Pages of a context.
const N_PAGES: usize = 6;

/// Each sampler of the library, with parameters, masks and biases that change with the row; every third is kept to a mask.
pub(super) fn samplers(model: &Model) -> Vec<Sampler> {
    samplers_of(model, |_| true)
}

/// Those of them whose programs are wanted.
fn samplers_of(model: &Model, is_wanted: impl Fn(&Program) -> bool) -> Vec<Sampler> {
    let shape = RowShape { vocab_size: model.config.vocab_size, n_positions: model.config.n_positions };
    let mut random = Random(4);
    let mut definitions = library_programs();
    definitions.push((
        "what is given",
        Definition::build(|b| {
            let x = b.logits() + b.bias(BiasId(0)) + b.bias(BiasId(1)) * b.parameter(0);
            b.report(b.parameter(0));
            b.report(x.max());
            b.report(b.drawn());
            x.keep(b.mask(MaskId(0))).draw(Source::SEED)
        }),
    ));
    let programs = definitions
        .into_iter()
        .map(|(_, definition)| Program::new(definition, shape).expect("it is in order"));
    let programs: Vec<Program> = programs.filter(is_wanted).collect();
    let sampler = |(idx, program): (usize, Program)| {
        let mut put_on = PutOn::new(Arc::new(program));
        let mut mask = TokenMask::none(shape.vocab_size);
        (0..shape.vocab_size).for_each(|token| mask.set(token as Token, random.below(3) > 0));
        put_on.parameters = vec![0.25 * idx as f32];
        let mask = Arc::new(mask);
        put_on.within = (idx % 3 == 0).then(|| mask.clone());
        put_on.masks = vec![mask];
        let pairs = (0..9).map(|i| (i * 31 % shape.vocab_size as u32, i as f32 - 4.0)).collect();
        let sparse = Bias::sparse(pairs, shape.vocab_size).expect("it is in order");
        let dense = Bias::dense(random.normals(shape.vocab_size), shape.vocab_size).expect("it is in order");
        put_on.biases = vec![Arc::new(sparse), Arc::new(dense)];
        Sampler { program: Some(Box::new(put_on)), seed: 77 + idx as u64, ..Sampler::greedy() }
    };
    // As many as a captured step of this size takes: another number of rows would go through other products.
    programs.into_iter().cycle().take(N_SAMPLERS).enumerate().map(sampler).collect()
}

/// A draw by a sampler's program.
pub(super) fn draw(sampler: &Sampler, start: Start) -> OutputKind<'_> {
    let put_on = sampler.program.as_ref().expect("it draws by a program");
    OutputKind::Program { sampler, start, within: put_on.within.as_ref().into(), others: Others::NONE }
}

/// Tokens, log-probabilities and what is left, to the bit.
pub(super) fn bits(outputs: &[Output]) -> Vec<(Token, u32, Vec<u32>, u32)> {
    let bits_of = |output: &Output| {
        let Output::Programmed(candidate, left) = output else { panic!("{output:?}") };
        let Left { next: DrawState { numbers, n_drawn }, reports } = **left;
        let numbers = numbers.iter().chain(&reports).map(|x| x.to_bits()).collect();
        (candidate.token, candidate.logprob.to_bits(), numbers, n_drawn)
    };
    outputs.iter().map(bits_of).collect()
}

/// Decodes with each sampler in a context of its own: the first draws start where the host says, the next where the device
/// left off, two steps under way, and every fourth step anew.
pub(super) fn decoded(
    backend: &mut CudaBackend,
    samplers: &[Sampler],
    prompts: &[Vec<Token>],
) -> Vec<Vec<Output>> {
    let mut contexts = prompts.to_vec();
    let mut lefts: Vec<DrawState> = samplers.iter().map(Sampler::start).collect();
    let mut outputs = Vec::new();
    for round in 0..N_STEPS / 4 {
        let first = contexts.iter().zip(samplers).zip(&lefts).enumerate();
        let first = first.map(|(idx, ((tokens, sampler), &left))| {
            let last = tokens.len() - 1;
            let kind = draw(sampler, Start::At(left));
            row(idx as u32, tokens, if round == 0 { 0 } else { last }, idx * N_PAGES, vec![(last, kind)])
        });
        backend.submit(&Batch { copies: &[], rows: first.collect() }).expect("it is submitted");
        for _ in 0..3 {
            let next = contexts.iter().zip(samplers).enumerate().map(|(idx, (tokens, sampler))| {
                let kind = draw(sampler, Start::Drawn);
                let n = tokens.len();
                let row = row(idx as u32, tokens, n, idx * N_PAGES, vec![(n, kind)]);
                Row { input: Input::Drawn(row.slot), ..row }
            });
            let next = next.collect();
            backend.submit(&Batch { copies: &[], rows: next }).expect("it is submitted");
            outputs.push(take(backend, &mut contexts, &mut lefts));
        }
        outputs.push(take(backend, &mut contexts, &mut lefts));
    }
    outputs
}

fn take(backend: &mut CudaBackend, contexts: &mut [Vec<Token>], lefts: &mut [DrawState]) -> Vec<Output> {
    let outputs = backend.collect().expect("it ran").outputs;
    for ((output, tokens), left) in outputs.iter().zip(contexts).zip(lefts) {
        let Output::Programmed(candidate, it_left) = output else { panic!("{output:?}") };
        tokens.push(candidate.token);
        *left = it_left.next;
    }
    outputs
}

#[test]
fn programs_in_steps_draw_what_the_host_draws() {
    let Some(card) = card() else { return };
    for model in random_models() {
        let samplers = samplers(&model);
        let mut random = Random(2);
        let prompts: Vec<Vec<Token>> =
            samplers.iter().map(|_| tokens(&mut random, N_PROMPT, model.config.vocab_size.min(40))).collect();
        let mut on_device = load_on(&card, &model, Dtype::F32);
        card.wait_for_programs();
        let found = decoded(&mut on_device, &samplers, &prompts);
        assert!(on_device.steps.n_by_host() == 0, "all of it is the device's");
        let mut on_host = load_on(&card, &model, Dtype::F32);
        on_host.steps.leave_programs_to_host();
        let expected = decoded(&mut on_host, &samplers, &prompts);
        assert!(on_host.steps.n_by_host() > 0);
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            for (idx, (found, expected)) in bits(found).into_iter().zip(bits(expected)).enumerate() {
                let all = library_programs();
                let name = all.get(idx % (all.len() + 1)).map_or("what is given", |it| it.0);
                assert_eq!(found.0, expected.0, "{}, step {step}, {name}", model.name);
                assert_eq!(found.2, expected.2, "{}, step {step}, {name}", model.name);
                assert_eq!(found.3, expected.3, "{}, step {step}, {name}", model.name);
                // The host's log-sum-exp is another sum.
                let (a, b) = (f32::from_bits(found.1), f32::from_bits(expected.1));
                assert!((a - b).abs() <= 1e-4, "{}, step {step}, {name}: {a} {b}", model.name);
            }
        }
    }
}

/// Steps of programs that all have the same kernel, which takes the draws of a captured step as well.
#[test]
fn small_programs_in_steps_draw_what_the_host_draws() {
    let Some(card) = card() else { return };
    for model in random_models() {
        for kind in [ProgramKind::SinglePass, ProgramKind::Passes] {
            let is_of_kind =
                |program: &Program| EncodedProgram::new(program).is_ok_and(|plan| plan.kind() == kind);
            let samplers = samplers_of(&model, is_of_kind);
            assert_eq!(samplers.len(), N_SAMPLERS, "there are some");
            let mut random = Random(7);
            let n_tokens = model.config.vocab_size.min(40);
            let prompts: Vec<Vec<Token>> =
                samplers.iter().map(|_| tokens(&mut random, N_PROMPT, n_tokens)).collect();
            let mut on_device = load_on(&card, &model, Dtype::F32);
            card.wait_for_programs();
            let found = decoded(&mut on_device, &samplers, &prompts);
            assert_eq!(on_device.steps.n_by_host(), 0, "all of it is the device's");
            let mut on_host = load_on(&card, &model, Dtype::F32);
            on_host.steps.leave_programs_to_host();
            let expected = decoded(&mut on_host, &samplers, &prompts);
            for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
                for (idx, (found, expected)) in bits(found).into_iter().zip(bits(expected)).enumerate() {
                    let drawn = |(token, _, left, n_drawn)| (token, left, n_drawn);
                    assert_eq!(drawn(found), drawn(expected), "{}, {kind:?}, step {step}, {idx}", model.name);
                }
            }
        }
    }
}

/// Guesses that the draws agree with, in one row, and the same tokens one after the other.
#[test]
fn guesses_are_drawn_as_one_after_the_other() {
    let Some(card) = card() else { return };
    for model in random_models() {
        let samplers = samplers(&model);
        let mut random = Random(3);
        let prompts: Vec<Vec<Token>> =
            samplers.iter().map(|_| tokens(&mut random, N_PROMPT, model.config.vocab_size.min(40))).collect();
        let mut backend = load_on(&card, &model, Dtype::F32);
        card.wait_for_programs();
        let one_by_one = decoded(&mut backend, &samplers, &prompts);
        let contexts: Vec<Vec<Token>> = prompts
            .iter()
            .enumerate()
            .map(|(idx, prompt)| {
                let drawn = one_by_one[..4].iter().map(|outputs| match &outputs[idx] {
                    Output::Programmed(candidate, _) => candidate.token,
                    other => panic!("{other:?}"),
                });
                prompt.iter().copied().chain(drawn).collect()
            })
            .collect();
        let rows = contexts.iter().zip(&samplers).enumerate().map(|(idx, (tokens, sampler))| {
            let asked = (N_PROMPT - 1..N_PROMPT + 4).map(|position| {
                let start = if position == N_PROMPT - 1 { Start::At(sampler.start()) } else { Start::Before };
                (position, draw(sampler, start))
            });
            row(idx as u32, tokens, N_PROMPT - 1, idx * N_PAGES, asked.collect())
        });
        let outputs = backend.forward(&Batch { copies: &[], rows: rows.collect() }).expect("it runs");
        assert_eq!(backend.steps.n_by_host(), 0);
        for (idx, guessed) in outputs.chunks(5).enumerate() {
            let expected: Vec<Output> = (0..5).map(|step| one_by_one[step][idx].clone()).collect();
            let (found, expected) = (bits(guessed), bits(&expected));
            for (found, expected) in found.iter().zip(&expected).take(4) {
                assert_eq!((found.0, found.3), (expected.0, expected.3), "{} of {}", idx, model.name);
            }
        }
    }
}

/// Programs beside other rows, in steps that hold for late masks, and beside a prompt.
#[test]
fn programs_share_steps_with_all_else() {
    let Some(card) = card() else { return };
    let model = &random_models()[0];
    let samplers = samplers(model);
    let vocab_size = model.config.vocab_size;
    let mut random = Random(5);
    let mut backend = load_on(&card, model, Dtype::F32);
    card.wait_for_programs();
    let prompt = tokens(&mut random, 40, vocab_size);
    let mut alone = Vec::new();
    for sampler in &samplers {
        let kind = draw(sampler, Start::At(sampler.start()));
        let rows = vec![row(0, &prompt, 0, 0, vec![(39, kind)])];
        alone.push(backend.forward(&Batch { copies: &[], rows }).expect("it runs").remove(0));
    }
    let chain = Arc::new(Sampler { temperature: 1.0, ..Sampler::greedy() });
    let mask = Arc::new(TokenMask::all(vocab_size));
    for (sampler, alone) in samplers.iter().zip(&alone) {
        let kind = draw(sampler, Start::At(sampler.start()));
        let rows = vec![
            row(1, &prompt, 0, 10, vec![(39, OutputKind::Sample(&chain)), (38, OutputKind::Top { n: 3 })]),
            row(0, &prompt, 0, 0, vec![(39, kind)]),
            row(2, &prompt, 0, 20, vec![(39, OutputKind::Masked { sampler: &chain, mask: None })]),
        ];
        backend.submit(&Batch { copies: &[], rows }).expect("it is submitted");
        let late = [LateMask { row_idx: 2, mask: &mask }];
        assert!(backend.supply(&late).expect("it draws").is_empty());
        let outputs = backend.collect().expect("it ran").outputs;
        let [Output::Sampled(free), Output::Sampled(masked)] = [&outputs[0], &outputs[3]] else {
            panic!("{outputs:?}")
        };
        assert_eq!(free.token, masked.token);
        assert_eq!(bits(&outputs[2..3])[0].0, bits(std::slice::from_ref(alone))[0].0);
    }
    assert_eq!(backend.steps.n_by_host(), 0);
}

/// Each program under a mask of the draw's own: in time, late, and late without coming.
#[test]
fn programs_keep_to_masks_that_are_late() {
    let Some(card) = card() else { return };
    for model in random_models() {
        let samplers = samplers(&model);
        let vocab_size = model.config.vocab_size;
        let mut random = Random(6);
        let mut backend = load_on(&card, &model, Dtype::F32);
        card.wait_for_programs();
        let prompt = tokens(&mut random, 40, vocab_size);
        let mut mask = TokenMask::none(vocab_size);
        (0..vocab_size).for_each(|token| mask.set(token as Token, random.below(2) == 0));
        let mask = Arc::new(mask);
        for (idx, sampler) in samplers.iter().enumerate() {
            let start = Start::At(sampler.start());
            let kind = |within| OutputKind::Program { sampler, start, within, others: Others::NONE };
            let asked = |within| vec![row(0, &prompt, 0, 0, vec![(39, kind(within))])];
            let in_time = Batch { copies: &[], rows: asked(Within::Mask(&mask)) };
            let in_time = backend.forward(&in_time).expect("it runs");
            // Launched, captured, run as captured; with its mask, and without.
            for round in 0..4 {
                let mut rows = asked(Within::Late);
                let next = [(39, kind(Within::Late))];
                rows.extend(next.map(|next| row(1, &prompt, 0, 10, vec![next])));
                backend.submit(&Batch { copies: &[], rows }).expect("it is submitted");
                let late = [LateMask { row_idx: round % 2, mask: &mask }];
                assert!(backend.supply(&late).expect("it draws").is_empty());
                let outputs = backend.collect().expect("it ran").outputs;
                assert_eq!(outputs[1 - round % 2], Output::SatOut);
                let drawn = &outputs[round % 2..][..1];
                assert_eq!(bits(drawn)[0].0, bits(&in_time)[0].0, "{idx} of {}", model.name);
                let Output::Programmed(candidate, _) = &drawn[0] else { unreachable!("its bits are there") };
                assert!(mask.allows(candidate.token));
            }
        }
        assert_eq!(backend.steps.n_by_host(), 0);
    }
}
