//! From hidden states to what was asked for.

use rayon::prelude::*;

use super::kept;
use super::late::{By, LateDraw};
use super::linear::{Gemm, Linear};
use super::mixed::Mixtures;
use super::plan::{Question, TokenLayout};
use crate::batch::{Others, Output, OutputFault, OutputKind, Start, Token, Within};
use crate::sampling::program::{DrawPlace, DrawState};
use crate::sampling::{Distribution, Sampler, Scratch, rank, sample, sample_by_program, sample_under};

/// Rows of logits in memory at once; enough to use every weight that is read many times.
const N_LOGIT_ROWS_MAX: usize = 64;

/// What came of the questions of a step.
#[derive(Default)]
pub(super) struct Answers {
    /// In the order of the requests.
    pub(super) outputs: Vec<Output>,
    /// Draws that wait for their masks, whose outputs say that they sat out.
    pub(super) late: Vec<LateDraw>,
}

/// Answers every question of the plan.
pub(super) fn answer(
    plan: &TokenLayout<'_>,
    gemm: &Gemm,
    lm_head: &Linear,
    hidden: &[f32], // [n_questions, hidden_size], after the final norm
    logits: &mut Vec<f32>,
) -> Answers {
    let mut outputs = vec![Output::Failed(OutputFault::NotANumber); plan.n_outputs];
    let mut late = Vec::new();
    let mut scratch = Scratch::default();
    let mut mixtures = Mixtures::default();
    if plan.questions.is_empty() {
        return Answers { outputs, late };
    }
    let hidden_size = hidden.len() / plan.questions.len();
    let vocab_size = lm_head.n_outputs();
    let groups = plan.questions.chunks(N_LOGIT_ROWS_MAX).zip(hidden.chunks(N_LOGIT_ROWS_MAX * hidden_size));
    for (questions, hidden) in groups {
        if questions.iter().any(Question::needs_logits) {
            logits.resize(questions.len() * vocab_size, 0.0);
            lm_head.write(gemm, hidden, logits);
        } else {
            logits.resize(questions.len() * vocab_size, f32::NAN);
        }
        let rows = questions
            .par_iter()
            .zip(hidden.par_chunks_exact(hidden_size))
            .zip(logits.par_chunks_exact(vocab_size));
        let answers: Vec<(usize, Output)> = rows
            .map_init(Scratch::default, |scratch, ((question, hidden), logits)| {
                let answer = |&(output_idx, kind): &(usize, &OutputKind<'_>)| {
                    let output = answer_one(question, kind, hidden, logits, scratch);
                    (output_idx, output.unwrap_or_else(Output::Failed))
                };
                question.requests.iter().map(answer).collect::<Vec<_>>()
            })
            .flatten_iter()
            .collect();
        for (output_idx, output) in answers {
            outputs[output_idx] = output;
        }
        for (question, logits) in questions.iter().zip(logits.chunks_exact(vocab_size)) {
            chained_draws(plan, question, logits, &mut outputs, &mut scratch);
        }
        for (question, logits) in questions.iter().zip(logits.chunks_exact(vocab_size)) {
            late.extend(late_draws(question, logits));
            mixtures.take(question, logits);
        }
        mixtures.draw(&mut outputs);
    }
    Answers { outputs, late }
}

/// Draws of programs that start where one before them ended, in their row or in another, one after the other.
fn chained_draws(
    plan: &TokenLayout<'_>,
    question: &Question<'_>,
    logits: &[f32],
    outputs: &mut [Output],
    scratch: &mut Scratch,
) {
    for &(output_idx, kind) in &question.requests {
        let OutputKind::Program { sampler, start, within, .. } = *kind else { continue };
        let before_idx = match start {
            Start::Before => output_idx - 1,
            Start::After { n_rows } => plan.first_outputs[question.row_idx - n_rows],
            Start::At(_) | Start::Drawn => continue,
        };
        let guessed = question.history.len() - 1;
        let is_guessed = |token: Token| question.history.copy_of(guessed..guessed + 1) == [token];
        outputs[output_idx] = match &outputs[before_idx] {
            Output::Programmed(candidate, left) if is_guessed(candidate.token) => {
                program_draw(question, sampler, left.next, within, logits, &[], scratch)
                    .unwrap_or_else(Output::Failed)
            }
            // What comes after a draw that failed, or that was not what was guessed, is not used.
            _ => Output::Failed(OutputFault::NothingToDraw),
        };
    }
}

fn program_draw(
    question: &Question<'_>,
    sampler: &Sampler,
    start: DrawState,
    within: Within<'_>,
    logits: &[f32],     // [vocab_size]
    members: &[&[f32]], // [vocab_size] each
    scratch: &mut Scratch,
) -> Result<Output, OutputFault> {
    let within = match within {
        Within::All => None,
        Within::Mask(mask) => Some(&**mask),
        Within::Late => return Ok(Output::SatOut),
    };
    let (before, seed) = (question.before(), sampler.seed);
    let draw = DrawPlace { members, before, seed, start, within };
    let (candidate, left) = sample_by_program(logits, &looked_at(question, sampler), sampler, draw, scratch)?;
    Ok(Output::Programmed(candidate, Box::new(left)))
}

/// The draws at a place that wait for their masks.
fn late_draws(question: &Question<'_>, logits: &[f32]) -> impl Iterator<Item = LateDraw> {
    question.requests.iter().filter_map(|&(output_idx, kind)| {
        let (history, by) = match *kind {
            OutputKind::Masked { sampler, mask: None } => {
                (looked_at(question, sampler), By::Chain(sampler.clone()))
            }
            OutputKind::Program { sampler, start: Start::At(start), within: Within::Late, .. } => {
                (looked_at(question, sampler), By::Program(Box::new(sampler.clone()), start))
            }
            _ => return None,
        };
        let (row_idx, before) = (question.row_idx, question.before());
        Some(LateDraw { row_idx, output_idx, logits: logits.to_vec(), history, before, by, mask: None })
    })
}

/// The tokens that a draw looks at.
pub(super) fn looked_at(question: &Question<'_>, sampler: &Sampler) -> Vec<Token> {
    let n_tokens = question.history.len();
    question.history.copy_of(n_tokens - sampler.n_history(n_tokens)..n_tokens)
}

/// A hidden state, of `hidden_size` numbers, as it is returned.
pub(super) fn hidden_state(state: &[f32]) -> Result<Output, OutputFault> {
    match state.iter().any(|x| x.is_nan()) {
        true => Err(OutputFault::NotANumber),
        false => Ok(Output::Embedding(state.to_vec())),
    }
}

fn answer_one(
    question: &Question<'_>,
    kind: &OutputKind<'_>,
    hidden: &[f32], // [hidden_size]
    logits: &[f32], // [vocab_size]
    scratch: &mut Scratch,
) -> Result<Output, OutputFault> {
    match *kind {
        OutputKind::Sample(sampler) => {
            let (history, position) = (looked_at(question, sampler), question.before().position());
            sample(logits, &history, position, sampler, scratch).map(Output::Sampled)
        }
        // Once the rows of the others are there.
        OutputKind::Program { others: Others::Rows(1..), .. } => Err(OutputFault::NotANumber),
        OutputKind::Mixed => Ok(Output::Mixed),
        OutputKind::Program { sampler, start: Start::At(start), within, others } => {
            kept::read(others.kept(), logits.len(), |members| {
                program_draw(question, sampler, start, within, logits, members, scratch)
            })
        }
        OutputKind::Keep(row) => kept::write(row, logits).map(|()| Output::Kept),
        // Once the draw before it is there.
        OutputKind::Program { start: Start::Before | Start::After { .. }, .. } => {
            Err(OutputFault::NotANumber)
        }
        OutputKind::Program { start: Start::Drawn, .. } => unreachable!("one step is under way at a time"),
        OutputKind::Masked { mask: None, .. } => Ok(Output::SatOut),
        OutputKind::Masked { sampler, mask: Some(mask) } => {
            let (history, position) = (looked_at(question, sampler), question.before().position());
            sample_under(Some(mask), logits, &history, position, sampler, scratch).map(Output::Sampled)
        }
        OutputKind::Top { n } => {
            let distribution = Distribution::new(logits)?;
            Ok(Output::Top { candidates: distribution.top(n), entropy: distribution.entropy() })
        }
        OutputKind::Ranked { sampler, within, n } => {
            let (history, before) = (looked_at(question, sampler), question.before());
            let within = within.map(|mask| &**mask);
            rank(logits, &history, before, sampler, within, n, scratch).map(Output::Ranked)
        }
        OutputKind::Scores(tokens) => {
            let distribution = Distribution::new(logits)?;
            Ok(Output::Scores(tokens.iter().map(|&token| distribution.logprob(token)).collect()))
        }
        OutputKind::Full => Ok(Output::Full(Distribution::new(logits)?.logprobs())),
        OutputKind::Logits => Distribution::new(logits).map(|_| Output::Full(logits.to_vec())),
        OutputKind::Embedding | OutputKind::Hidden { .. } => hidden_state(hidden),
        OutputKind::Attention { .. } => unreachable!("layers answer that"),
    }
}
