//! What is wanted of a context: one file for each kind of job.
//!
//! A job says which tokens it needs computed and what the backend has to return for them, and takes in what came back.
//! It decides neither when it is served nor on which pages.

mod ask;
mod joint;
mod looks;
mod masks;
mod mixture;
mod run;
mod states;
mod verify;

pub(crate) use ask::{AskOutcome, AskWork, Part};
pub(crate) use joint::{JobId, JointWork, Membership, Stage, Wanted};
use looks::{attention_rows, states_rows};
pub(crate) use masks::LateMasks;
pub(crate) use mixture::{MixedWork, Mixture};
pub(crate) use run::RunWork;
pub(crate) use verify::VerifyWork;

use std::ops::Range;
use std::sync::Arc;

use smallvec::smallvec;

use crate::backend::Limits;
use crate::batch::{Others, OutputKind, OutputRequest, Requests, Start, Within};
use crate::command::{Ahead, Ask, Pooling};
use crate::completion::Tag;
use crate::error::EngineError;
use crate::guess::GuessTree;
use crate::run::{AheadWindow, RunEvent};
use crate::sampling::{Sampler, TokenMask};

/// What a program's reading of a row of logits costs, as a share of computing the row: 0.4 µs on an H100, where a row over
/// 128,256 tokens takes 0.9 to 1.6.
const READING_SHARE: f32 = 0.3;

/// A draw by a sampler's chain, or by its program from this start, which sees rows of others.
fn draw<'a>(sampler: &'a Sampler, start: Start, others: Others<'a>) -> OutputKind<'a> {
    match &sampler.program {
        None => OutputKind::Sample(sampler),
        Some(put_on) => OutputKind::Program { sampler, start, within: put_on.within.as_ref().into(), others },
    }
}

/// The same under a mask of the draw's own, or one that is late.
fn draw_under<'a>(
    sampler: &'a Arc<Sampler>,
    mask: Option<&'a Arc<TokenMask>>,
    start: Start,
    others: Others<'a>,
) -> OutputKind<'a> {
    match sampler.program {
        None => OutputKind::Masked { sampler, mask },
        Some(_) => {
            let within = mask.map_or(Within::Late, Within::Mask);
            OutputKind::Program { sampler, start, within, others }
        }
    }
}

/// The work of one context; a context has one at a time.
#[derive(Debug)]
pub(crate) enum Work {
    Ask(AskWork),
    Verify(VerifyWork),
    Run(RunWork),
    Joint(JointWork),
    Mixed(MixedWork),
}

impl Work {
    /// The operation that asked for it.
    pub(crate) fn tag(&self) -> Tag {
        match self {
            Self::Ask(work) => work.reply.tag(),
            Self::Verify(work) => work.reply.tag(),
            Self::Run(run) => run.queue.tag(),
            Self::Joint(work) => work.tag,
            Self::Mixed(work) => work.tag,
        }
    }

    /// Whether its guest waits for one answer.
    pub(crate) fn is_question(&self) -> bool {
        match self {
            Self::Ask(_) | Self::Verify(_) => true,
            Self::Joint(work) => work.member.stage == Stage::Rides,
            Self::Run(_) | Self::Mixed(_) => false,
        }
    }

    /// Whether it has a row kept for a draw.
    pub(crate) fn keeps_row(&self) -> bool {
        matches!(self, Self::Ask(work) if matches!(work.ask(), Ask::Keep))
    }

    /// Tokens of the context itself, of `n_tokens` that it has with those that its work puts after them.
    pub(crate) fn n_base(&self, n_tokens: usize) -> usize {
        match self {
            Self::Ask(work) => work.n_base,
            Self::Verify(work) => work.n_base,
            Self::Run(run) => n_tokens - run.n_expected,
            Self::Joint(_) | Self::Mixed(_) => n_tokens,
        }
    }

    /// Its part in a job over several contexts.
    pub(crate) fn member(&self) -> Option<&Membership> {
        match self {
            Self::Ask(_) | Self::Verify(_) => None,
            Self::Run(run) => run.mixture.as_ref().map(|mixture| &mixture.member),
            Self::Joint(work) => Some(&work.member),
            Self::Mixed(work) => Some(&work.member),
        }
    }

    /// As [`Self::member`].
    pub(crate) fn member_mut(&mut self) -> Option<&mut Membership> {
        match self {
            Self::Ask(_) | Self::Verify(_) => None,
            Self::Run(run) => run.mixture.as_mut().map(|mixture| &mut mixture.member),
            Self::Joint(work) => Some(&mut work.member),
            Self::Mixed(work) => Some(&mut work.member),
        }
    }

    /// The job that it is a part of.
    pub(crate) fn job(&self) -> Option<JobId> {
        self.member().map(|member| member.job)
    }

    /// Members whose next tokens ride with its own.
    pub(crate) fn n_members(&self) -> usize {
        match self {
            Self::Run(run) => run.mixture.as_ref().map_or(1, |mixture| 1 + mixture.n_others),
            Self::Ask(_) | Self::Verify(_) | Self::Joint(_) | Self::Mixed(_) => 1,
        }
    }

    /// Tokens at the end of the context that a run is expected to draw.
    pub(crate) fn n_expected(&self) -> usize {
        if let Self::Run(run) = self { run.n_expected } else { 0 }
    }

    /// Whether it goes on token by token, each of which its context gets.
    pub(crate) fn goes_on(&self) -> bool {
        matches!(self, Self::Run(_) | Self::Mixed(_))
    }

    /// The beam search of which it is a hypothesis that rides.
    pub(crate) fn search(&self) -> Option<JobId> {
        match self {
            Self::Joint(JointWork {
                member: Membership { job, stage: Stage::Rides, .. },
                wanted: Wanted::Top { .. } | Wanted::Ranked { .. },
                ..
            }) => Some(*job),
            _ => None,
        }
    }

    /// Tells the caller that waits for it that it has failed.
    pub(crate) fn fail(self, error: EngineError) {
        match self {
            Self::Ask(work) => work.answer(Err(error)),
            Self::Verify(work) => work.answer(Err(error)),
            Self::Run(mut run) => run.queue.push(RunEvent::Failed(error)),
            // The job tells its caller, once.
            Self::Joint(_) | Self::Mixed(_) => {}
        }
    }

    /// Whether a row from `start` on, which has `n_pending` tokens to compute, decodes: it then goes before prompts.
    pub(crate) fn decodes(&self, start: usize, n_pending: usize) -> bool {
        match self {
            Self::Verify(work) => start >= work.first_draw(),
            Self::Ask(work) => work.part == Part::Head || n_pending <= 1,
            Self::Run(run) => n_pending <= run.n_draws(),
            Self::Joint(_) | Self::Mixed(_) => n_pending <= 1,
        }
    }

    /// Whether what it asks leaves the state of the context's last token on the device. Of a tree there is no last token.
    pub(crate) fn leaves_state(&self) -> bool {
        let is_of_layers =
            matches!(self, Self::Ask(AskWork { ask: Ask::Hidden { .. } | Ask::Attention { .. }, .. }));
        !is_of_layers && self.tree().is_none()
    }

    /// The tree of guesses that it verifies.
    pub(crate) fn tree(&self) -> Option<&GuessTree> {
        if let Self::Verify(work) = self { work.tree() } else { None }
    }

    /// How what is guessed is drawn, if it verifies guesses.
    pub(crate) fn verifies_by(&self) -> Option<&Sampler> {
        if let Self::Verify(work) = self { Some(work.sampler()) } else { None }
    }

    /// Whether something comes back for each of many tokens, by as many as there is room for.
    pub(crate) fn asks_of_each(&self) -> bool {
        matches!(self, Self::Ask(AskWork { ask: Ask::Hidden { pooling: Pooling::MeanFrom(_), .. }, .. }))
    }

    /// Whether it asks the head alone.
    pub(crate) fn is_of_head(&self) -> bool {
        matches!(self, Self::Ask(AskWork { part: Part::Head, .. }))
    }

    /// Where a row from `start` on ends that may have `n_tokens_max` tokens, of those up to `target`; none when it has to
    /// wait for a step with more room.
    pub(crate) fn end(&self, start: usize, target: usize, n_tokens_max: usize) -> Option<usize> {
        match self {
            Self::Verify(work) => work.end(start, n_tokens_max),
            Self::Ask(work) => Some(work.end(start, target, n_tokens_max)),
            Self::Run(_) | Self::Joint(_) | Self::Mixed(_) => Some(target.min(start + n_tokens_max)),
        }
    }

    /// Where the tokens to compute end, for a context of `n_tokens` tokens (a continuation included).
    ///
    /// A prefill leaves out the last token: asking for what comes next computes it again anyway.
    pub(crate) fn target(&self, n_tokens: usize) -> usize {
        match self {
            Self::Ask(AskWork { ask: Ask::Prefill, .. }) => n_tokens - 1,
            _ if self.leads_up() => n_tokens - 1,
            Self::Ask(_) | Self::Verify(_) | Self::Run(_) | Self::Joint(_) | Self::Mixed(_) => n_tokens,
        }
    }

    /// Whether it is part of a job whose rows do not ride yet.
    fn leads_up(&self) -> bool {
        self.member().is_some_and(|member| member.stage == Stage::LeadsUp)
    }

    /// The first position whose output is wanted, or the end of a prefill.
    pub(crate) fn first_output(&self, n_tokens: usize) -> usize {
        match self {
            Self::Ask(work) => work.first_output(),
            Self::Verify(work) => work.first_draw(),
            Self::Run(run) => n_tokens - run.n_draws(),
            Self::Joint(_) | Self::Mixed(_) => n_tokens - 1,
        }
    }

    /// Whether a token may be computed now, beside `n_under_way` draws whose tokens are not known yet: a run may be far
    /// enough ahead of its guest, or at its end with them.
    pub(crate) fn wants_more(&mut self, window: AheadWindow, n_under_way: usize) -> bool {
        match self {
            Self::Ask(_) | Self::Verify(_) | Self::Joint(_) | Self::Mixed(_) => true,
            Self::Run(run) => {
                let is_last = run.settings.n_tokens_max.is_some_and(|n| n <= run.n_given + n_under_way);
                !is_last
                    && match run.settings.ahead {
                        Ahead::Adaptive => run.queue.wants_more(window.n(), n_under_way),
                        Ahead::Unbounded => true,
                    }
            }
        }
    }

    /// What the outputs of the tokens at these places cost, in thousandths of a token. The one row of a draw is part of
    /// decoding.
    pub(crate) fn outputs_cost(&self, tokens: Range<usize>, n_tokens: usize, limits: &Limits) -> u64 {
        let Range { start, end } = tokens;
        let is_last = end == n_tokens;
        let n_rows = match self {
            Self::Run(run) => {
                f32::from(is_last as u8) * run.n_draws() as f32 * run.settings.sampler.looks.n_rows()
            }
            Self::Mixed(_) | Self::Joint(JointWork { wanted: Wanted::Draw(_), .. }) => 0.0,
            Self::Joint(JointWork { wanted: Wanted::Top { .. }, .. }) => f32::from(is_last as u8),
            Self::Joint(JointWork { wanted: Wanted::Ranked { sampler, .. }, .. })
                if sampler.program.is_none() =>
            {
                f32::from(is_last as u8)
            }
            // It may have to leave the device.
            Self::Joint(_) => 4.0 * f32::from(is_last as u8),
            Self::Verify(work) => {
                let n_draws = end.saturating_sub(start.max(work.first_draw())) as f32;
                let of_looks = n_draws * work.sampler().looks.n_rows();
                match start >= work.first_draw() {
                    // By itself it is so many rows of decoding.
                    true => of_looks,
                    false => of_looks + end.saturating_sub(work.n_base) as f32,
                }
            }
            Self::Ask(work) => match &work.ask {
                Ask::Prefill | Ask::Sample(_) | Ask::Mix { .. } | Ask::Verify { .. } => 0.0,
                Ask::Continuation(_) | Ask::Tops { .. } => (end - start.max(work.n_base - 1).min(end)) as f32,
                Ask::Top { .. } | Ask::Scores(_) | Ask::Embedding => f32::from(is_last as u8),
                Ask::Hidden { n_layers, .. } => {
                    let n_tokens = end.saturating_sub(start.max(work.first_output()));
                    states_rows(n_layers, limits.n_layers) * n_tokens as f32
                }
                Ask::Attention { layers } => f32::from(is_last as u8) * attention_rows(layers.len()),
                // It is read and written once.
                Ask::Keep => READING_SHARE * f32::from(is_last as u8),
                // It leaves the device and is copied again for the guest.
                Ask::Full | Ask::Logits => 4.0 * f32::from(is_last as u8),
            },
        };
        (n_rows * limits.logits_tokens * 1000.0) as u64
    }

    /// What is read beside the row's own attention for the outputs of tokens up to `end`, of a context with so many pages, in
    /// pages over all layers: attention as an output reads the keys twice for each query head.
    pub(crate) fn n_pages_beside(&self, end: usize, n_tokens: usize, n_pages: usize, limits: &Limits) -> u64 {
        match self {
            Self::Ask(AskWork { ask: Ask::Attention { layers }, .. }) if end == n_tokens => {
                let of_all_layers = n_pages * limits.n_queries_per_key;
                (of_all_layers * layers.len()).div_ceil(limits.n_layers) as u64
            }
            _ => 0,
        }
    }

    /// What the programs cost that draw at the end of these tokens, in thousandths of a token, where a row of logits costs
    /// `logits_tokens`.
    pub(crate) fn programs_cost(&self, tokens: Range<usize>, n_tokens: usize, logits_tokens: f32) -> u64 {
        let (sampler, n_draws) = match self {
            Self::Run(run) => (&run.settings.sampler, run.n_draws()),
            Self::Joint(JointWork {
                wanted: Wanted::Draw(sampler) | Wanted::Ranked { sampler, .. }, ..
            }) => (sampler, 1),
            Self::Ask(AskWork { ask: Ask::Sample(sampler) | Ask::Mix { sampler, .. }, .. }) => (sampler, 1),
            Self::Verify(work) => {
                (work.sampler(), tokens.end.saturating_sub(tokens.start.max(work.first_draw())))
            }
            Self::Joint(_) | Self::Ask(_) | Self::Mixed(_) => return 0,
        };
        match &sampler.program {
            Some(put_on) if tokens.end == n_tokens => {
                let readings = put_on.program.cost() * n_draws as f32;
                (readings * READING_SHARE * logits_tokens * 1000.0) as u64
            }
            _ => 0,
        }
    }

    /// What the backend has to return for the tokens `start..end` of a context of `n_tokens`, one that is not known yet
    /// included.
    pub(crate) fn outputs(&self, start: usize, end: usize, n_tokens: usize) -> Requests<'_> {
        let last = |kind| {
            let position = n_tokens - 1;
            if end > position { smallvec![OutputRequest { position, kind }] } else { Requests::new() }
        };
        match self {
            _ if self.leads_up() => Requests::new(),
            Self::Run(run) if end == n_tokens => run.outputs(n_tokens),
            Self::Run(_) => Requests::new(),
            Self::Mixed(_) => last(OutputKind::Mixed),
            Self::Joint(work) => last(match &work.wanted {
                Wanted::Draw(sampler) => draw(sampler, Start::At(sampler.start()), Others::NONE),
                Wanted::Top { n } => OutputKind::Top { n: *n },
                Wanted::Ranked { sampler, within, n } => {
                    OutputKind::Ranked { sampler, within: within.as_ref(), n: *n }
                }
            }),
            Self::Verify(work) => work.outputs(end),
            Self::Ask(work) => match &work.ask {
                // A verification is work of its own kind.
                Ask::Prefill | Ask::Verify { .. } => Requests::new(),
                Ask::Sample(sampler) => last(draw(sampler, Start::At(sampler.start()), Others::NONE)),
                Ask::Mix { sampler, .. } => {
                    let draws = last(draw(sampler, Start::At(sampler.start()), Others::Kept(&work.rows)));
                    let looks =
                        draws.iter().flat_map(|_| sampler.looks.requests(n_tokens - 1)).collect::<Vec<_>>();
                    draws.into_iter().chain(looks).collect()
                }
                Ask::Keep => last(OutputKind::Keep(work.rows.first().expect("it was given a row"))),
                Ask::Logits => last(OutputKind::Logits),
                Ask::Top { n } => last(OutputKind::Top { n: *n }),
                Ask::Scores(tokens) => last(OutputKind::Scores(tokens)),
                Ask::Full => last(OutputKind::Full),
                Ask::Embedding => last(OutputKind::Embedding),
                Ask::Attention { layers } => last(OutputKind::Attention { layers }),
                Ask::Hidden { n_layers, .. } => (start.max(work.first_output())..end)
                    .flat_map(|position| {
                        let kinds = n_layers.iter().map(|&n_layers| OutputKind::Hidden { n_layers });
                        kinds.map(move |kind| OutputRequest { position, kind })
                    })
                    .collect(),
                Ask::Continuation(tokens) => (0..tokens.len())
                    .map(|idx| (work.n_base - 1 + idx, &tokens[idx..=idx]))
                    .filter(|(position, _)| (start..end).contains(position))
                    .map(|(position, token)| OutputRequest { position, kind: OutputKind::Scores(token) })
                    .collect(),
                Ask::Tops { continuation, n } => (work.n_base - 1..work.n_base - 1 + continuation.len())
                    .filter(|position| (start..end).contains(position))
                    .map(|position| OutputRequest { position, kind: OutputKind::Top { n: *n } })
                    .collect(),
            },
        }
    }
}
