//! The bookkeeping of beam search: which candidates live, which are finished, and when to stop.
//!
//! Follows `_beam_search` in `generation/utils.py` of Hugging Face transformers 5 for a batch of one, in the
//! same precision: sums of log-probabilities and scores in f32.

use std::ops::ControlFlow;
use std::str::FromStr;

use trellis_guest::{Candidate, Token};

/// When a search with enough finished hypotheses may stop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum EarlyStopping {
    /// When the best running beam, scored at its present length, is no better than the worst finished one.
    False,
    /// As soon as there are as many finished hypotheses as beams.
    True,
    /// When the best running beam cannot become better than the worst finished one at any length.
    Never,
}

impl FromStr for EarlyStopping {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        match name {
            "false" => Ok(Self::False),
            "true" => Ok(Self::True),
            "never" => Ok(Self::Never),
            _ => Err(()),
        }
    }
}

pub(crate) struct Settings {
    /// At least 1.
    pub(crate) n_beams: usize,
    /// The longest hypothesis, at least 1.
    pub(crate) max_tokens: usize,
    /// A score is the sum of log-probabilities over the number of new tokens to the power of this.
    pub(crate) length_penalty: f64,
    pub(crate) early_stopping: EarlyStopping,
    pub(crate) stop_tokens: Vec<Token>,
}

impl Settings {
    /// Candidates kept of each step, and so those needed of each beam. At most `stop_tokens` of one beam's can
    /// end it, which leaves enough to go on with `n_beams`.
    pub(crate) fn n_candidates(&self) -> usize {
        self.n_beams.saturating_mul((1 + self.stop_tokens.len()).max(2))
    }

    fn score(&self, logprob: f32, n_tokens: usize) -> f32 {
        logprob / (n_tokens as f64).powf(self.length_penalty) as f32
    }
}

/// The last step of a beam.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    /// Which of the beams before this step it continues.
    pub(crate) parent_idx: usize,
    /// By what token.
    pub(crate) token: Token,
}

struct Beam {
    step: Step,
    /// All new tokens, that of the step included.
    tokens: Vec<Token>,
    /// Their sum.
    logprob: f32,
}

struct Finished {
    tokens: Vec<Token>,
    score: f32,
}

pub(crate) struct Search {
    settings: Settings,
    /// Best first. One empty beam before the first step, `n_beams` after it.
    running: Vec<Beam>,
    /// Best first, at most `n_beams`.
    finished: Vec<Finished>,
}

impl Search {
    pub(crate) fn new(settings: Settings) -> Self {
        let root = Beam { step: Step { parent_idx: 0, token: 0 }, tokens: Vec::new(), logprob: 0.0 };
        Self { settings, running: vec![root], finished: Vec::new() }
    }

    /// The beams to be continued, best first.
    pub(crate) fn running(&self) -> impl Iterator<Item = Step> {
        self.running.iter().map(|beam| beam.step)
    }

    /// Goes one token on, given the most probable next tokens of each running beam. Breaks when the search is
    /// over.
    pub(crate) fn advance<'a>(&mut self, tops: impl Iterator<Item = &'a [Candidate]>) -> ControlFlow<()> {
        let settings = &self.settings;
        let mut steps: Vec<(Step, f32)> = Vec::new();
        for (parent_idx, (parent, top)) in self.running.iter().zip(tops).enumerate() {
            steps.extend(
                top.iter()
                    .map(|next| (Step { parent_idx, token: next.token }, parent.logprob + next.logprob)),
            );
        }
        steps.sort_by(|a, b| b.1.total_cmp(&a.1));
        steps.truncate(settings.n_candidates());

        let n_tokens = self.running[0].tokens.len() + 1;
        let at_limit = n_tokens == settings.max_tokens;
        let mut running = Vec::new();
        for (rank, (step, logprob)) in steps.into_iter().enumerate() {
            let extend = || [self.running[step.parent_idx].tokens.as_slice(), &[step.token]].concat();
            if at_limit || settings.stop_tokens.contains(&step.token) {
                // An end outside the best `n_beams` candidates does not count: something better runs on.
                if rank < settings.n_beams {
                    self.finished
                        .push(Finished { tokens: extend(), score: settings.score(logprob, n_tokens) });
                }
            } else if running.len() < settings.n_beams {
                running.push(Beam { step, tokens: extend(), logprob });
            }
        }
        self.running = running;
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(settings.n_beams);

        if at_limit || !self.may_improve(n_tokens) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    /// Whether a running beam could still enter the finished ones.
    fn may_improve(&self, n_tokens: usize) -> bool {
        let settings = &self.settings;
        let Some(best) = self.running.first() else { return false };
        let Some(worst) = self.finished.get(settings.n_beams - 1) else { return true };
        // Under a positive penalty a negative sum scores best at the greatest length.
        let n_tokens_best = match settings.early_stopping {
            EarlyStopping::True => return false,
            EarlyStopping::Never if settings.length_penalty > 0.0 => settings.max_tokens,
            EarlyStopping::Never | EarlyStopping::False => n_tokens,
        };
        settings.score(best.logprob, n_tokens_best) > worst.score
    }

    /// The `n` best hypotheses and their scores.
    pub(crate) fn best(self, n: usize) -> (Vec<Vec<Token>>, Vec<f32>) {
        self.finished.into_iter().take(n).map(|hypothesis| (hypothesis.tokens, hypothesis.score)).unzip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOP: Token = 0;
    const N_TOKENS: Token = 3;

    /// A model whose next token depends on the last one: log-probabilities of `[stop, 1, 2]`.
    fn top(last: Option<Token>) -> Vec<Candidate> {
        let probabilities: [f32; 3] = match last {
            None => [0.1, 0.5, 0.4],
            Some(1) => [0.3, 0.1, 0.6],
            _ => [0.45, 0.35, 0.2],
        };
        (0..N_TOKENS).map(|token| Candidate { token, logprob: probabilities[token as usize].ln() }).collect()
    }

    fn search(n_beams: usize, length_penalty: f64, early_stopping: EarlyStopping) -> Vec<(Vec<Token>, f32)> {
        let settings =
            Settings { n_beams, max_tokens: 5, length_penalty, early_stopping, stop_tokens: vec![STOP] };
        let mut search = Search::new(settings);
        loop {
            let tops: Vec<_> = search.running.iter().map(|beam| top(beam.tokens.last().copied())).collect();
            if search.advance(tops.iter().map(Vec::as_slice)).is_break() {
                let (sequences, scores) = search.best(n_beams);
                return sequences.into_iter().zip(scores).collect();
            }
        }
    }

    /// All texts of the model with their scores, best first.
    fn enumerate(length_penalty: f64) -> Vec<(Vec<Token>, f32)> {
        let mut open = vec![(Vec::new(), 0.0f32)];
        let mut closed = Vec::new();
        while let Some((tokens, logprob)) = open.pop() {
            for next in top(tokens.last().copied()) {
                let extended = [tokens.as_slice(), &[next.token]].concat();
                let logprob = logprob + next.logprob;
                if next.token == STOP || extended.len() == 5 {
                    let divisor = (extended.len() as f64).powf(length_penalty) as f32;
                    closed.push((extended, logprob / divisor));
                } else {
                    open.push((extended, logprob));
                }
            }
        }
        closed.sort_by(|a, b| b.1.total_cmp(&a.1));
        closed
    }

    #[test]
    fn as_many_beams_as_texts_find_the_best_texts() {
        for length_penalty in [0.0, 0.6, 1.0, 2.0] {
            let all = enumerate(length_penalty);
            let found = search(all.len(), length_penalty, EarlyStopping::Never);
            let scores = |texts: &[(Vec<Token>, f32)]| texts.iter().map(|text| text.1).collect::<Vec<_>>();
            assert_eq!(scores(&found), scores(&all), "length penalty {length_penalty}");
            assert_eq!(found[0].0, all[0].0);
        }
    }

    #[test]
    fn early_stopping_takes_the_first_that_finish() {
        // "2 stop" (0.18) ranks second at the second step, behind "1 2" (0.30), whose "1 2 stop" (0.135) leads the
        // third. Later ones are less probable, but better for their length.
        let first = search(2, 1.0, EarlyStopping::True);
        assert_eq!([&first[0].0, &first[1].0], [&vec![1, 2, 0], &vec![2, 0]]);
        let best = search(2, 1.0, EarlyStopping::Never);
        assert!(best[1].1 > first[1].1, "{best:?}");
    }

    #[test]
    fn the_limit_finishes_what_still_runs() {
        let settings = |n_beams| Settings {
            n_beams,
            max_tokens: 1,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::False,
            stop_tokens: vec![STOP],
        };
        let mut search = Search::new(settings(2));
        assert!(search.advance([top(None).as_slice()].into_iter()).is_break());
        assert_eq!(search.best(2).0, [[1], [2]]);
    }
}
