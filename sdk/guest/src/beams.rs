//! Beam search.

use crate::bindings::trellis::host::beams as raw;
use crate::{Context, Result, Sampler, Token};

#[doc(inline)]
pub use raw::EarlyStopping;
#[doc(inline)]
pub use raw::FinishedHypothesis as Finished;
#[doc(inline)]
pub use raw::LiveHypothesis as Live;

/// Settings of a beam search, made by [`Context::beams`]: one group, a length penalty of 1, early stopping by the heuristic, at most 40
/// tokens, the model's stop tokens.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing before `open` or `run`"]
pub struct Beams<'a> {
    context: &'a Context,
    settings: raw::BeamSettings,
    sampler: Option<&'a Sampler>,
}

impl<'a> Beams<'a> {
    pub(crate) fn new(context: &'a Context, n_beams: u32) -> Self {
        let settings = raw::BeamSettings {
            n_beams,
            n_groups: 1,
            diversity_penalty: 0.0,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
            max_tokens: 40,
            stop_tokens: context.model().info().stop_tokens.clone(),
        };
        Self { context, settings, sampler: None }
    }

    /// Groups of as many beams each, of which one is kept from what the groups before it go on with: the penalty is taken off
    /// the log-probability of a token for each time.
    pub fn groups(mut self, n: u32, diversity_penalty: f32) -> Self {
        (self.settings.n_groups, self.settings.diversity_penalty) = (n, diversity_penalty);
        self
    }

    /// A score is the sum of log-probabilities over the number of tokens to the power of this.
    pub fn length_penalty(mut self, penalty: f32) -> Self {
        self.settings.length_penalty = penalty;
        self
    }

    /// When a group with as many finished hypotheses as beams stops.
    pub fn early_stopping(mut self, early_stopping: EarlyStopping) -> Self {
        self.settings.early_stopping = early_stopping;
        self
    }

    /// The longest hypothesis.
    pub fn max_tokens(mut self, n: u32) -> Self {
        self.settings.max_tokens = n;
        self
    }

    /// The tokens that end a hypothesis, in place of the model's.
    pub fn stop_tokens(mut self, tokens: &[Token]) -> Self {
        self.settings.stop_tokens = tokens.to_vec();
        self
    }

    /// Searches by what a sampler makes of the log-probabilities, by its mask, bias and penalties; each hypothesis keeps to its
    /// constraint. It draws nothing: one with a temperature other than 0 is refused when the search is opened.
    pub fn by(mut self, sampler: &'a Sampler) -> Self {
        self.sampler = Some(sampler);
        self
    }

    /// The search, before its first step.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a setting out of range or a sampler that is no good for a search,
    /// [`ModelMismatch`](crate::Error::ModelMismatch), [`EmptyContext`](crate::Error::EmptyContext),
    /// [`ContextFull`](crate::Error::ContextFull), [`TokenOutOfRange`](crate::Error::TokenOutOfRange),
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn open(self) -> Result<BeamSearch> {
        let raw = raw::BeamSearch::open(self.context.raw(), &self.settings, self.sampler.map(Sampler::raw))?;
        Ok(BeamSearch { raw, model: self.context.model().clone() })
    }

    /// Searches to the end; the `n` best, best first.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`BeamSearch::run`].
    pub fn run(self, n: u32) -> Result<Vec<Finished>> {
        let search = self.open()?;
        search.run()?;
        Ok(search.best(n))
    }
}

/// A hypothesis that is to live on, for [`BeamSearch::keep`].
#[derive(Clone, Debug, PartialEq)]
pub struct Kept(raw::KeptHypothesis);

impl Kept {
    /// The one at this place of what lives, with this sum of log-probabilities.
    pub fn live(idx: usize, logprob: f32) -> Self {
        Self(raw::KeptHypothesis { continues: Some(idx as u32), tokens: Vec::new(), logprob })
    }

    /// The prompt, in the first group with room.
    pub fn prompt(logprob: f32) -> Self {
        Self(raw::KeptHypothesis { continues: None, tokens: Vec::new(), logprob })
    }

    /// Goes on with these tokens.
    #[must_use]
    pub fn then(mut self, tokens: &[Token]) -> Self {
        self.0.tokens.extend(tokens);
        self
    }
}

/// A beam search over what comes after a context, which is left as it is.
///
/// ```no_run
/// # use trellis_guest::{Context, Kept, Result};
/// # fn f(prompt: &Context) -> Result<()> {
/// let search = prompt.beams(8).length_penalty(0.6).open()?;
/// loop {
///     let live = search.step()?;
///     let Some(best) = live.iter().map(|one| one.logprob).max_by(f32::total_cmp) else { break };
///     // Prunes what has fallen far behind.
///     let kept = live.iter().enumerate().filter(|(_, one)| one.logprob > best - 4.0);
///     search.keep(kept.map(|(idx, one)| Kept::live(idx, one.logprob)))?;
/// }
/// let best = search.best(3);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct BeamSearch {
    raw: raw::BeamSearch,
    model: crate::Model,
}

impl BeamSearch {
    /// Goes on to the end, without a call for each token.
    ///
    /// # Errors
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded), [`InvalidArgument`](crate::Error::InvalidArgument) for more beams than
    /// a step has rows.
    pub fn run(&self) -> Result {
        Ok(self.raw.run()?)
    }

    /// Goes on by one token; what lives then, group after group, the best of each first. Nothing where the search is over.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn step(&self) -> Result<Vec<Live>> {
        Ok(self.raw.step()?)
    }

    /// What lives.
    pub fn live(&self) -> Vec<Live> {
        self.raw.live()
    }

    /// The tokens after the prompt of the hypothesis at this place of what lives.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) where there is none.
    pub fn tokens(&self, idx: usize) -> Result<Vec<Token>> {
        Ok(self.raw.tokens(idx as u32)?)
    }

    /// Has these live in the place of what lives.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a place where none lives, too many of one group, or one that is
    /// as long as it may be; [`TokenOutOfRange`](crate::Error::TokenOutOfRange). Nothing has changed then.
    pub fn keep(&self, kept: impl IntoIterator<Item = Kept>) -> Result {
        let kept: Vec<raw::KeptHypothesis> = kept.into_iter().map(|Kept(raw)| raw).collect();
        Ok(self.raw.keep(&kept)?)
    }

    /// The tokens with which the best hypothesis will begin, whatever comes.
    pub fn settled(&self) -> Vec<Token> {
        self.raw.settled()
    }

    /// The `n` best that are finished, best first.
    pub fn best(&self, n: u32) -> Vec<Finished> {
        self.raw.best(n)
    }

    /// A context of the prompt and the finished hypothesis at this place, from the best on.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) where there is none, [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn take(&self, idx: u32) -> Result<Context> {
        Ok(Context::from_raw(self.raw.take(idx)?, &self.model))
    }
}
