//! A search between two steps.

mod check;

use std::borrow::Cow;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::chains::{Chain, Chains, LINK_BYTES};
use super::merge::{Continued, Merged, penalised};
use super::{BeamSettings, EarlyStopping};
use crate::batch::{Candidate, Token};
use crate::sampling::SamplerError;

/// A beam search: what lives, what is finished. It knows rows by their numbers in a step, and no contexts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Search {
    settings: BeamSettings,
    chains: Chains,
    /// Group after group, the best of each first.
    live: Vec<Hypothesis>,
    groups: Vec<Group>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Hypothesis {
    group_idx: usize,
    row: Row,
    /// Its place among those that lived before the last step.
    parent_idx: Option<usize>,
    chain: Chain,
    /// The sum of its log-probabilities.
    logprob: f32,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Group {
    /// Best first, at most as many as it has beams.
    finished: Vec<Ended>,
    is_done: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Ended {
    chain: Chain,
    score: f32,
}

/// What the next step computes for hypotheses.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Row {
    /// The row of the last step that it continues; the prompt when `None`.
    pub parent: Option<usize>,
    /// By what tokens.
    pub appended: Vec<Token>,
}

/// A hypothesis that lives.
#[derive(Clone, Debug, PartialEq)]
pub struct Live {
    /// Its group.
    pub group_idx: usize,
    /// The place among those that lived before the last step of the one that it continues; `None` for the prompt, and for one that
    /// was put in since.
    pub parent_idx: Option<usize>,
    /// Its last token, if it has any.
    pub token: Option<Token>,
    /// Tokens after the prompt.
    pub n_tokens: usize,
    /// The sum of their log-probabilities, with what was added to it.
    pub logprob: f32,
}

/// What is to live in the place of what lives.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// The place of a live hypothesis; the prompt when `None`, in the first group with room.
    pub from: Option<usize>,
    /// Appended to its tokens.
    pub tokens: Vec<Token>,
    /// The sum that it goes on with.
    pub logprob: f32,
}

/// A finished hypothesis.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Tokens after the prompt, a stop token included.
    pub tokens: Vec<Token>,
    /// Its score.
    pub score: f32,
}

impl Search {
    /// A search before its first step: in each group the prompt lives.
    #[must_use]
    pub fn new(settings: BeamSettings) -> Self {
        let root = |group_idx| Hypothesis {
            group_idx,
            row: Row { parent: None, appended: Vec::new() },
            parent_idx: None,
            chain: Chain::default(),
            logprob: 0.0,
        };
        Self {
            chains: Chains::default(),
            live: (0..settings.n_groups).map(root).collect(),
            groups: vec![Group::default(); settings.n_groups],
            settings,
        }
    }

    /// What it was told to do.
    #[must_use]
    pub fn settings(&self) -> &BeamSettings {
        &self.settings
    }

    /// Bytes that the tokens of a search with these settings take at most.
    #[must_use]
    pub fn n_bytes_max(settings: &BeamSettings) -> u64 {
        (n_links_max(settings).saturating_mul(LINK_BYTES)) as u64
    }

    /// Bytes that its tokens take.
    pub(crate) fn n_bytes(&self) -> u64 {
        (self.chains.len() * LINK_BYTES) as u64
    }

    /// Tokens that its hypotheses are about to append.
    pub(crate) fn n_appended(&self) -> usize {
        self.live.iter().map(|hypothesis| hypothesis.row.appended.len()).sum()
    }

    /// The same in tokens, with what its hypotheses are about to append.
    pub(crate) fn n_tokens(&self) -> usize {
        self.n_appended() + self.n_bytes() as usize / size_of::<Token>()
    }

    /// Candidates of each row that a step needs, of a vocabulary of this size.
    #[must_use]
    pub fn n_top(&self, vocab_size: usize) -> usize {
        self.settings.n_top(vocab_size)
    }

    /// Whether nothing lives any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.live.is_empty()
    }

    /// The rows of the next step: one for all hypotheses that are the same. In the order in which they come first.
    #[must_use]
    pub fn rows(&self) -> Vec<&Row> {
        let (rows, _) = self.rows_of_live();
        rows
    }

    /// The rows of the next step, and which of them each hypothesis has.
    fn rows_of_live(&self) -> (Vec<&Row>, Vec<usize>) {
        let mut places: FxHashMap<&Row, usize> = FxHashMap::default();
        let mut rows = Vec::with_capacity(self.live.len());
        let of_live = self.live.iter().map(|hypothesis| {
            *places.entry(&hypothesis.row).or_insert_with(|| {
                rows.push(&hypothesis.row);
                rows.len() - 1
            })
        });
        let of_live = of_live.collect();
        (rows, of_live)
    }

    /// The tokens after the prompt that the rows of the next step end with.
    #[must_use]
    pub fn row_tokens(&self) -> Vec<Vec<Token>> {
        let (rows, row_of_live) = self.rows_of_live();
        let first = |row_idx| row_of_live.iter().position(|&of_live| of_live == row_idx);
        let tokens = |row_idx| first(row_idx).map(|live_idx| self.tokens(live_idx));
        (0..rows.len()).filter_map(tokens).collect()
    }

    /// Goes one token on, given the most probable tokens of each row: [`Search::n_top`] of them, most probable first, ties
    /// by lower token; fewer where no others can come.
    ///
    /// # Panics
    /// There are not as many lists as rows.
    pub fn advance(&mut self, tops: &[&[Candidate]]) {
        let (rows, row_of_live) = self.rows_of_live();
        assert_eq!(rows.len(), tops.len(), "a list for each row");
        self.make_room(2 * self.settings.n_beams);
        let before = std::mem::take(&mut self.live);
        let mut taken: FxHashMap<Token, usize> = FxHashMap::default();
        let mut start = 0;
        while let Some(first) = before.get(start) {
            let group_idx = first.group_idx;
            let n_live = before[start..].iter().take_while(|live| live.group_idx == group_idx).count();
            let parents = start..start + n_live;
            let list = |idx: usize| {
                (
                    before[idx].logprob,
                    penalised(tops[row_of_live[idx]], self.settings.diversity_penalty, &taken),
                )
            };
            let lists: Vec<(f32, Cow<'_, [Candidate]>)> = parents.clone().map(list).collect();
            let going_on = self.advance_group(group_idx, &before[parents], Merged::new(lists));
            for Going { continued, .. } in &going_on {
                *taken.entry(continued.token).or_default() += 1;
            }
            for Going { continued, chain } in self.end_group(group_idx, going_on) {
                let parent_idx = start + continued.row_idx;
                let row = Row { parent: Some(row_of_live[parent_idx]), appended: vec![continued.token] };
                let logprob = continued.logprob;
                self.live.push(Hypothesis { group_idx, row, parent_idx: Some(parent_idx), chain, logprob });
            }
            start += n_live;
        }
    }

    /// Takes the best candidates of a group; returns those that would go on.
    fn advance_group(
        &mut self,
        group_idx: usize,
        parents: &[Hypothesis],
        candidates: Merged<'_>,
    ) -> Vec<Going> {
        let Self { settings, chains, groups, .. } = self;
        let group = &mut groups[group_idx];
        let n_beams = settings.n_group_beams();
        let is_one_group = settings.n_groups == 1;
        let mut going_on: Vec<Going> = Vec::with_capacity(n_beams);
        let mut best = None;
        for (rank, continued) in candidates.enumerate() {
            let parent = &parents[continued.row_idx];
            let n_tokens = parent.chain.n_tokens + 1;
            best = best.or((!is_one_group).then_some((continued.logprob, n_tokens)));
            let is_at_most = n_tokens >= settings.n_tokens_max;
            let is_stop = settings.stop_tokens.contains(&continued.token);
            if is_stop || is_at_most && is_one_group {
                if rank < n_beams {
                    let score = settings.score(continued.logprob, n_tokens);
                    group.finished.push(Ended { chain: chains.push(parent.chain, continued.token), score });
                } else if is_at_most && is_one_group {
                    // What follows is no better.
                    break;
                }
                continue;
            }
            best = best.or(Some((continued.logprob, n_tokens)));
            going_on.push(Going { continued, chain: chains.push(parent.chain, continued.token) });
            if going_on.len() == n_beams {
                break;
            }
        }
        group.rank(n_beams);
        group.is_done = going_on.is_empty() || group.is_done_with(best, settings);
        going_on
    }

    /// Ends a group, or those of its hypotheses that have come to their most tokens; returns those that go on.
    fn end_group(&mut self, group_idx: usize, going_on: Vec<Going>) -> Vec<Going> {
        let Self { settings, groups, .. } = self;
        let group = &mut groups[group_idx];
        if group.is_done {
            return Vec::new();
        }
        // Of several groups, those at their most tokens end once it is known that their group is not done.
        let (ended, going_on): (Vec<Going>, Vec<Going>) =
            going_on.into_iter().partition(|going| going.chain.n_tokens >= settings.n_tokens_max);
        for Going { continued, chain } in ended {
            group.finished.push(Ended { chain, score: settings.score(continued.logprob, chain.n_tokens) });
        }
        group.rank(settings.n_group_beams());
        group.is_done = going_on.is_empty();
        going_on
    }

    /// What lives, group after group, the best of each first.
    pub fn live(&self) -> impl ExactSizeIterator<Item = Live> {
        self.live.iter().map(|hypothesis| Live {
            group_idx: hypothesis.group_idx,
            parent_idx: hypothesis.parent_idx,
            token: self.chains.last(hypothesis.chain),
            n_tokens: hypothesis.chain.n_tokens,
            logprob: hypothesis.logprob,
        })
    }

    /// The tokens of a live hypothesis after the prompt.
    ///
    /// # Panics
    /// There is none at this place.
    #[must_use]
    pub fn tokens(&self, live_idx: usize) -> Vec<Token> {
        self.chains.tokens(self.live[live_idx].chain)
    }

    /// Has these live in the place of what lives. Nothing is scored anew: a stop token among the tokens ends nothing.
    ///
    /// # Errors
    /// A place where nothing lives, a hypothesis that would be at its most tokens, a token outside the vocabulary, more hypotheses than a group has beams,
    /// or a sum that is not a number below +∞; nothing has changed then.
    pub fn keep(&mut self, kept: &[Kept], vocab_size: usize) -> Result<(), SamplerError> {
        let n_group_beams = self.settings.n_group_beams();
        let mut n_of_group = vec![0; self.settings.n_groups];
        let mut group_idxs = Vec::with_capacity(kept.len());
        for one in kept {
            let refuse = |name, value: f32, expected| Err(SamplerError::OutOfRange { name, value, expected });
            let parent = match one.from {
                None => None,
                Some(idx) => match self.live.get(idx) {
                    Some(parent) => Some(parent),
                    None => return refuse("from", idx as f32, "the place of a live hypothesis"),
                },
            };
            let n_tokens = parent.map_or(0, |parent| parent.chain.n_tokens) + one.tokens.len();
            if n_tokens >= self.settings.n_tokens_max {
                return refuse("tokens", n_tokens as f32, "less than max-tokens in all");
            }
            if let Some(&token) = one.tokens.iter().find(|&&token| token as usize >= vocab_size) {
                return Err(SamplerError::TokenOutOfRange { token, vocab_size });
            }
            if !one.logprob.is_finite() {
                return refuse("logprob", one.logprob, "a finite number");
            }
            let has_room = |&idx: &usize| n_of_group[idx] < n_group_beams && !self.groups[idx].is_done;
            let group_idx = match parent {
                Some(parent) => Some(parent.group_idx).filter(has_room),
                None => (0..self.settings.n_groups).find(has_room),
            };
            let Some(group_idx) = group_idx else {
                return refuse("hypotheses", kept.len() as f32, "as many of a group as it has beams");
            };
            n_of_group[group_idx] += 1;
            group_idxs.push(group_idx);
        }
        self.make_room(kept.iter().map(|one| one.tokens.len()).sum());
        let before = std::mem::take(&mut self.live);
        for (one, group_idx) in kept.iter().zip(group_idxs) {
            let parent = one.from.map(|idx| &before[idx]);
            let chain = parent.map_or(Chain::default(), |parent| parent.chain);
            let chain = one.tokens.iter().fold(chain, |chain, &token| self.chains.push(chain, token));
            let (parent_row, so_far) =
                parent.map_or((None, [].as_slice()), |parent| (parent.row.parent, &parent.row.appended));
            let row = Row { parent: parent_row, appended: [so_far, &one.tokens].concat() };
            // One that is as it was keeps its parent.
            let parent_idx = parent.filter(|_| one.tokens.is_empty()).and_then(|parent| parent.parent_idx);
            self.live.push(Hypothesis { group_idx, row, parent_idx, chain, logprob: one.logprob });
        }
        self.live.sort_by(|a, b| a.group_idx.cmp(&b.group_idx).then(b.logprob.total_cmp(&a.logprob)));
        Ok(())
    }

    /// Forgets the rows of the last step: all that lives continues the prompt, by all its tokens.
    pub fn forget_rows(&mut self) {
        for hypothesis in &mut self.live {
            hypothesis.row = Row { parent: None, appended: self.chains.tokens(hypothesis.chain) };
        }
    }

    /// The tokens with which the best hypothesis will begin, whatever comes: what all that live have in common with each
    /// other and with the best that is finished.
    #[must_use]
    pub fn settled(&self) -> Vec<Token> {
        let live = self.live.iter().map(|hypothesis| hypothesis.chain);
        let common = live.chain(self.best_ended()).reduce(|one, other| self.chains.common(one, other));
        self.chains.tokens(common.unwrap_or_default())
    }

    fn best_ended(&self) -> Option<Chain> {
        self.ended().first().map(|ended| ended.chain)
    }

    /// All that is finished, best first.
    fn ended(&self) -> Vec<Ended> {
        let mut ended: Vec<Ended> =
            self.groups.iter().flat_map(|group| group.finished.iter().copied()).collect();
        ended.sort_by(|a, b| b.score.total_cmp(&a.score));
        ended
    }

    /// The `n` best that are finished, best first, of all groups; fewer where there are fewer.
    #[must_use]
    pub fn best(&self, n: usize) -> Vec<Finished> {
        let of = |Ended { chain, score }: Ended| Finished { tokens: self.chains.tokens(chain), score };
        self.ended().into_iter().take(n).map(of).collect()
    }

    /// Sees to it that so many more tokens fit.
    fn make_room(&mut self, n_tokens: usize) {
        if self.chains.len() + n_tokens > n_links_max(&self.settings) {
            let Self { chains, live, groups, .. } = self;
            let of_live = live.iter_mut().map(|hypothesis| &mut hypothesis.chain);
            let finished = groups.iter_mut().flat_map(|group| &mut group.finished);
            chains.keep(of_live.chain(finished.map(|ended| &mut ended.chain)));
        }
    }
}

/// A candidate that goes on.
struct Going {
    continued: Continued,
    chain: Chain,
}

impl Group {
    fn rank(&mut self, n_beams: usize) {
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(n_beams);
    }

    /// Whether nothing that runs on can still get in, where the best of that has this sum over so many tokens.
    fn is_done_with(&self, best: Option<(f32, usize)>, settings: &BeamSettings) -> bool {
        let Some(worst) = self.finished.get(settings.n_group_beams() - 1) else { return false };
        let Some((logprob, n_tokens)) = best else { return true };
        // Under a positive penalty a negative sum scores best at the greatest length.
        let n_tokens = match settings.early_stopping {
            EarlyStopping::AtOnce => return true,
            EarlyStopping::Never if settings.length_penalty > 0.0 => settings.n_tokens_max,
            EarlyStopping::Never | EarlyStopping::Heuristic => n_tokens,
        };
        settings.score(logprob, n_tokens) <= worst.score
    }
}

/// Tokens that are held at most: those of all that live and are finished, and what a step, or the guest, puts to them.
fn n_links_max(settings: &BeamSettings) -> usize {
    settings.n_tokens_max.saturating_add(1).saturating_mul(3 * settings.n_beams)
}
