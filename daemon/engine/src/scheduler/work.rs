//! What a context is asked to compute.

use crate::batch::{Output, OutputKind, OutputRequest, Token};
use crate::command::{Ahead, Answer, Ask, Reply, RunSettings};
use crate::error::EngineError;
use crate::run::{AheadWindow, RunSender};

/// The work of one context; a context has one at a time.
#[derive(Debug)]
pub(super) enum Work {
    Ask(AskWork),
    Run(RunWork),
}

#[derive(Debug)]
pub(super) struct AskWork {
    ask: Ask,
    reply: Reply<Answer>,
    /// Tokens of the context itself; a continuation lies past them while it is scored.
    pub(super) n_base: usize,
    /// Scores of the continuation so far.
    scores: Vec<f32>,
}

#[derive(Debug)]
pub(super) struct RunWork {
    pub(super) settings: RunSettings,
    pub(super) queue: RunSender,
    pub(super) n_given: usize,
}

impl AskWork {
    pub(super) fn new(ask: Ask, reply: Reply<Answer>, n_base: usize) -> Self {
        Self { ask, reply, n_base, scores: Vec::new() }
    }

    pub(super) fn answer(self, answer: Result<Answer, EngineError>) {
        // Nobody listens to a question that was cancelled.
        let _ = self.reply.send(answer);
    }

    /// Tokens that are computed after the context's own: the last one's successor is not asked for.
    pub(super) fn continuation(&self) -> &[Token] {
        match &self.ask {
            Ask::Continuation(tokens) => &tokens[..tokens.len().saturating_sub(1)],
            _ => &[],
        }
    }

    /// Answers at once what needs no computation.
    pub(super) fn is_trivial(&self) -> bool {
        match &self.ask {
            Ask::Prefill => self.n_base == 0,
            Ask::Continuation(tokens) => tokens.is_empty(),
            _ => false,
        }
    }

    pub(super) fn trivial_answer(&self) -> Answer {
        match &self.ask {
            Ask::Continuation(_) => Answer::Scores(Vec::new()),
            _ => Answer::Prefilled,
        }
    }
}

impl Work {
    /// Whether nobody waits for it any more.
    pub(super) fn is_cancelled(&self) -> bool {
        match self {
            Self::Ask(work) => work.reply.is_closed(),
            Self::Run(_) => false,
        }
    }

    /// Where the tokens to compute end, for a context of `n_tokens` tokens (a continuation included).
    ///
    /// A prefill leaves out the last token: whoever asks for what comes next computes it again anyway.
    pub(super) fn target(&self, n_tokens: usize) -> usize {
        match self {
            Self::Ask(AskWork { ask: Ask::Prefill, .. }) => n_tokens - 1,
            Self::Ask(_) | Self::Run(_) => n_tokens,
        }
    }

    /// The first position whose output is wanted, or the end of a prefill.
    pub(super) fn first_output(&self, n_tokens: usize) -> usize {
        match self {
            Self::Ask(work) => work.n_base - 1,
            Self::Run(_) => n_tokens - 1,
        }
    }

    /// Whether a token may be computed now: a run may be far enough ahead of its guest.
    pub(super) fn wants_more(&self, window: AheadWindow) -> bool {
        match self {
            Self::Ask(_) => true,
            Self::Run(run) => match run.settings.ahead {
                Ahead::Adaptive => run.queue.wants_more(window.n()),
                Ahead::Unbounded => true,
            },
        }
    }

    /// What the backend has to return for the tokens `start..end` of a context of `n_tokens`.
    pub(super) fn outputs(&self, start: usize, end: usize, n_tokens: usize) -> Vec<OutputRequest<'_>> {
        let last = |kind| {
            let position = n_tokens - 1;
            if end > position { vec![OutputRequest { position, kind }] } else { Vec::new() }
        };
        match self {
            Self::Run(run) => last(OutputKind::Sample(&run.settings.sampler)),
            Self::Ask(work) => match &work.ask {
                Ask::Prefill => Vec::new(),
                Ask::Sample(sampler) => last(OutputKind::Sample(sampler)),
                Ask::Top { n } => last(OutputKind::Top { n: *n }),
                Ask::Scores(tokens) => last(OutputKind::Scores(tokens)),
                Ask::Full => last(OutputKind::Full),
                Ask::Embedding => last(OutputKind::Embedding),
                Ask::Continuation(tokens) => (0..tokens.len())
                    .map(|idx| (work.n_base - 1 + idx, &tokens[idx..=idx]))
                    .filter(|(position, _)| (start..end).contains(position))
                    .map(|(position, token)| OutputRequest { position, kind: OutputKind::Scores(token) })
                    .collect(),
            },
        }
    }
}

/// What became of an ask after one step.
#[derive(Debug)]
pub(super) enum Progress {
    /// There is more to compute.
    Unfinished,
    /// The answer.
    Finished(Result<Answer, EngineError>),
}

impl AskWork {
    /// Takes in what the backend returned for the tokens from `start` on; `is_last` when all are computed.
    pub(super) fn take_outputs(&mut self, start: usize, outputs: Vec<Output>, is_last: bool) -> Progress {
        // KV that was forgotten in between is computed again, and with it scores that were there already.
        self.scores.truncate((start + 1).saturating_sub(self.n_base));
        let mut answer = match self.ask {
            Ask::Prefill if is_last => Some(Answer::Prefilled),
            _ => None,
        };
        for output in outputs {
            match (output, &self.ask) {
                (Output::Failed(fault), _) => return Progress::Finished(Err(fault.into())),
                (Output::Scores(scores), Ask::Continuation(_)) => self.scores.extend(scores),
                (Output::Scores(scores), _) => answer = Some(Answer::Scores(scores)),
                (Output::Sampled(candidate), _) => answer = Some(Answer::Sampled(candidate)),
                (Output::Top { candidates, entropy }, _) => {
                    answer = Some(Answer::Top { candidates, entropy })
                }
                (Output::Full(row), _) => answer = Some(Answer::Full(row)),
                (Output::Embedding(state), _) => answer = Some(Answer::Embedding(state)),
            }
        }
        if is_last && matches!(self.ask, Ask::Continuation(_)) {
            answer = Some(Answer::Scores(std::mem::take(&mut self.scores)));
        }
        match answer {
            Some(answer) => Progress::Finished(Ok(answer)),
            None => {
                assert!(!is_last, "the backend left out an output");
                Progress::Unfinished
            }
        }
    }
}
