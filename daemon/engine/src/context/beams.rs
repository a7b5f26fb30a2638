//! A beam search as its caller has it.

use std::sync::Arc;

use super::keeps::Keeping;
use super::{Context, Pending};
use crate::account::Resource;
use crate::batch::Token;
use crate::command::{Answer, N_TOKENS_PER_WORD, Operation, SearchBeams};
use crate::constraint::Rule;
use crate::error::EngineError;
use crate::guess::n_words;
use crate::sampling::beams::{BeamSettings, Finished, Kept, Live, Row, Search};
use crate::sampling::{Sampler, TokenMask};

/// A beam search over what comes after a context.
///
/// It has a context for each beam, and one for the prompt; they are charged as forks are, with what their longest
/// hypotheses take in host memory, from the beginning. A step that failed may be asked for again.
#[derive(Debug)]
pub struct BeamSearch {
    base: Context,
    /// Those of the rows of the last step, in their order, then others.
    contexts: Vec<Context>,
    search: Search,
    sampler: Option<Arc<Sampler>>,
    /// Under a constraint, what each row of the last step keeps to.
    keepings: Vec<Keeping>,
}

impl BeamSearch {
    /// A search before its first step, over a fork of this context; what a row gives is what the sampler makes of it, and a
    /// hypothesis keeps to the rule.
    ///
    /// # Errors
    /// A setting is out of range, the context is empty or has no room for the longest hypothesis, a budget is used up, or
    /// the engine has failed or stopped.
    ///
    /// # Panics
    /// The rule's constraint was compiled for another model.
    pub async fn open(
        context: &mut Context,
        settings: BeamSettings,
        sampler: Option<Arc<Sampler>>,
        rule: Option<&Arc<Rule>>,
    ) -> Result<Self, EngineError> {
        let n_beams = settings.n_beams;
        Self::open_within(context, settings, sampler, rule).await.map_err(|error| about(n_beams, error))
    }

    async fn open_within(
        context: &mut Context,
        settings: BeamSettings,
        sampler: Option<Arc<Sampler>>,
        rule: Option<&Arc<Rule>>,
    ) -> Result<Self, EngineError> {
        let vocab_size = context.model.limits().vocab_size;
        settings.validate(vocab_size)?;
        sampler.as_ref().map_or(Ok(()), |sampler| sampler.validate_for_search(vocab_size))?;
        let (n_prompt, n_positions, n_free) = (context.tokens.len(), context.capacity(), context.n_free());
        if n_prompt == 0 {
            return Err(EngineError::EmptyContext);
        }
        if settings.n_tokens_max > n_free {
            // As for tokens that are appended.
            let n_tokens = (n_positions - n_free).saturating_add(settings.n_tokens_max);
            return Err(EngineError::ContextFull { n_tokens, n_positions });
        }
        let n_tokens = n_prompt + settings.n_tokens_max;
        // All at once, so that a refusal says how many that is.
        let (account, n_contexts) = (&context.caller.owner().account, 1 + settings.n_beams as u64);
        account.charge(Resource::Contexts, n_contexts)?;
        account.release(Resource::Contexts, n_contexts);
        let mut base = context.fork().await?;
        base.keep_to(rule);
        base.footprint.set_with(n_prompt, base.n_bytes_beside() + Search::n_bytes_max(&settings))?;
        let mut contexts = Vec::with_capacity(settings.n_beams);
        for _ in 0..settings.n_beams {
            let mut beam = Context::create(&base.model, base.caller.owner().clone()).await?;
            beam.footprint.set_with(n_tokens, base.evictions.n_bytes_held())?;
            contexts.push(beam);
        }
        Ok(Self { base, contexts, search: Search::new(settings), sampler, keepings: Vec::new() })
    }

    /// Goes so many steps on, or to the end when `None`; a search that is over stays as it is. Without a constraint the
    /// engine goes on by itself from step to step.
    ///
    /// # Errors
    /// What the engine found wrong. The search is then as it was after the last step.
    pub async fn go_on(&mut self, n_steps: Option<usize>) -> Result<(), EngineError> {
        let n_beams = self.search.settings().n_beams;
        self.go_on_within(n_steps).await.map_err(|error| about(n_beams, error))
    }

    async fn go_on_within(&mut self, n_steps: Option<usize>) -> Result<(), EngineError> {
        if self.base.keeps_to_a_rule() {
            let mut n_left = n_steps;
            while !self.search.is_over() && n_left != Some(0) {
                let masks = self.masks().await?;
                self.search_on(Some(1), masks).await?;
                n_left = n_left.map(|n| n - 1);
            }
            return Ok(());
        }
        if self.search.is_over() || n_steps == Some(0) {
            return Ok(());
        }
        self.search_on(n_steps, Vec::new()).await
    }

    /// What may come after each row of the next step.
    async fn masks(&mut self) -> Result<Vec<Arc<TokenMask>>, EngineError> {
        let of_prompt = self.base.keeping_of_search()?.expect("there is a rule");
        let keeping = |row: &&Row| row.parent.map_or(&of_prompt, |parent| &self.keepings[parent]).fork();
        let keepings = self.search.rows().iter().map(keeping).collect::<Result<Vec<_>, _>>()?;
        let tokens = self.search.row_tokens();
        let on_their_way: Vec<_> = keepings
            .iter()
            .zip(&tokens)
            .map(|(keeping, tokens)| keeping.mask_after(&self.base, tokens))
            .collect();
        let vocab_size = self.base.model.limits().vocab_size;
        let mut masks = Vec::with_capacity(on_their_way.len());
        for mask in on_their_way {
            masks.push(mask.there(vocab_size).await?);
        }
        self.keepings = keepings;
        Ok(masks)
    }

    async fn search_on(
        &mut self,
        n_steps: Option<usize>,
        masks: Vec<Arc<TokenMask>>,
    ) -> Result<(), EngineError> {
        let Self { base, contexts, search, .. } = self;
        let n_tokens = base.n_untold() + search.n_tokens() + N_TOKENS_PER_WORD * n_words(&masks);
        let room = base.model.room(&base.caller, n_tokens).await?;
        let place = base.caller.ticket();
        let asked = SearchBeams {
            base: base.id,
            edit: base.take_edit(),
            contexts: contexts.iter().map(|context| context.id).collect(),
            search: search.clone(),
            n_steps,
            sampler: self.sampler.clone(),
            masks,
            tag: place.tag(),
        };
        // Until it is known what the engine has made of them, the contexts hold nothing that is known.
        search.forget_rows();
        base.model.post_into(room, Operation::SearchBeams(Box::new(asked)))?;
        let (model, caller) = (base.model.clone(), base.caller.id());
        let pending = Pending::new(place, model, caller, base.id);
        match pending.answer().await? {
            Answer::Beams { search: gone_on, order } => {
                *search = *gone_on;
                let mut before: Vec<Option<Context>> =
                    std::mem::take(contexts).into_iter().map(Some).collect();
                *contexts = order.into_iter().filter_map(|place| before[place].take()).collect();
                Ok(())
            }
            other => unreachable!("asked to go on with a search, answered with {other:?}"),
        }
    }

    /// Whether nothing lives any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.search.is_over()
    }

    /// What lives, group after group, the best of each first.
    pub fn live(&self) -> impl ExactSizeIterator<Item = Live> {
        self.search.live()
    }

    /// The tokens of a live hypothesis after the prompt; `None` where none lives at this place.
    #[must_use]
    pub fn tokens(&self, live_idx: usize) -> Option<Vec<Token>> {
        (live_idx < self.search.live().len()).then(|| self.search.tokens(live_idx))
    }

    /// Has these live in the place of what lives.
    ///
    /// # Errors
    /// As [`Search::keep`].
    pub fn keep(&mut self, kept: &[Kept]) -> Result<(), EngineError> {
        Ok(self.search.keep(kept, self.base.model.limits().vocab_size)?)
    }

    /// The tokens with which the best hypothesis will begin, as [`Search::settled`].
    #[must_use]
    pub fn settled(&self) -> Vec<Token> {
        self.search.settled()
    }

    /// The `n` best that are finished, best first.
    #[must_use]
    pub fn best(&self, n: usize) -> Vec<Finished> {
        self.search.best(n)
    }

    /// A context of the prompt and these tokens. What of it the search has computed is found, as far as full pages of it
    /// are there.
    ///
    /// # Errors
    /// A token out of range, a budget is used up, or the engine has failed or stopped.
    pub async fn context(&mut self, tokens: &[Token]) -> Result<Context, EngineError> {
        let mut context = self.base.fork().await?;
        context.append(tokens).await?;
        Ok(context)
    }
}

/// What a budget has no room for is a search, of so many beams.
fn about(n_beams: usize, error: EngineError) -> EngineError {
    match error {
        EngineError::Budget(exceeded) => EngineError::BeamsOverBudget { n_beams, exceeded },
        other => other,
    }
}
