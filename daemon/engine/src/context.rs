//! The caller's side of a context.

mod beams;
mod evict;
mod keeps;
mod mixture;
mod pending;
mod states;
mod steer;
mod together;
mod verified;
mod watch;

use std::sync::Arc;

use smallvec::SmallVec;

pub use self::beams::BeamSearch;
use self::keeps::{Foreseen, Keeping};
use self::mixture::Mixed;
pub use self::pending::Pending;
use self::states::{Leaves, States};
use self::verified::Verified;
use self::watch::{Foresight, Watching};
use crate::account::{HostCharge, Owner, Resource};
use crate::batch::{Drawn, Token, Tokens};
use crate::command::{Ask, ContextId, Edit, MaskSource, Operation, Pooling, RunSettings};
use crate::completion::{Done, Tag};
use crate::constraint::Rule;
use crate::error::EngineError;
use crate::guess::{Guess, N_GUESS_MAX};
use crate::handle::{Caller, Room};
use crate::history::History;
use crate::kv::{Evictions, Footprint};
use crate::model_handle::ModelHandle;
use crate::run::{Finish, PullReport, RunEvent, RunQueue};
use crate::sampling::program::N_REPORTS_MAX;
use crate::sampling::{Sampler, SamplerError, TokenMask};

/// A token sequence whose KV cache the engine holds.
///
/// The tokens live here; the engine is told of changes with the next question, so that appending costs
/// nothing but the copy. Dropping a context frees its pages.
#[derive(Debug)]
pub struct Context {
    id: ContextId,
    model: ModelHandle,
    caller: Arc<Caller>,
    tokens: History,
    /// What was taken out of the tokens.
    evictions: Evictions,
    /// The memory of what is added to the tokens.
    steering: Option<Arc<HostCharge>>,
    states: States,
    /// What the program of the last draw reported.
    reports: Reports,
    footprint: Footprint,
    /// The engine has `tokens[..n_synced]`, and past them at most what a run decoded ahead.
    n_synced: usize,
    run: Option<Run>,
    /// Its part in the run of another context.
    mixed: Option<Mixed>,
    verified: Option<Verified>,
    n_truncations: u64,
    /// What it draws under.
    rule: Option<Arc<Rule>>,
    /// What it drew under last.
    keeping: Option<Keeping>,
    /// What was worked out for its next draw.
    foreseen: Option<Foreseen>,
}

type Reports = SmallVec<[f32; N_REPORTS_MAX]>;

#[derive(Debug)]
struct Run {
    key: RunKey,
    queue: RunQueue,
    /// What its program leaves.
    leaves: Option<Leaves>,
    /// For a run under a rule.
    _watching: Option<Watching>,
}

/// Tells the streams over one context apart, and the settings of one stream before and after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunKey(pub u64);

/// What pulling a token gives.
#[derive(Clone, Debug, PartialEq)]
pub enum Pull {
    /// The next token; it has been appended.
    Token(Drawn),
    /// There are no more.
    Finished(Finish),
}

impl Context {
    /// An empty context.
    ///
    /// # Errors
    /// The owner's budget of contexts is used up, or the engine has failed or stopped.
    pub async fn create(model: &ModelHandle, owner: Owner) -> Result<Self, EngineError> {
        model.check_open()?;
        let context = Self::charged(model, model.caller(&owner)?, History::default())?;
        model
            .post(&context.caller, Operation::Create { id: context.id, caller: context.caller.id() })
            .await?;
        Ok(context)
    }

    /// A context that was saved under this name by any guest of the same user.
    ///
    /// # Errors
    /// Nothing is saved under the name, a budget is used up, or the engine has failed or stopped.
    pub async fn open(model: &ModelHandle, owner: Owner, name: &str) -> Result<Self, EngineError> {
        model.check_open()?;
        let mut context = Self::charged(model, model.caller(&owner)?, History::default())?;
        let place = context.caller.ticket();
        let (id, caller, tag) = (context.id, context.caller.id(), place.tag());
        model.post(&context.caller, Operation::Open { id, caller, name: name.to_owned(), tag }).await?;
        let opened = match place.take().await {
            Some(Done::Opened(opened)) => opened?,
            Some(other) => unreachable!("asked to open, answered with {other:?}"),
            None => return Err(model.ended()),
        };
        context.evictions = opened.evictions.unwrap_or_default();
        context.steering = context.charge_steering(opened.steering_bytes)?;
        context.footprint.set_with(opened.tokens.len(), context.n_bytes_beside())?;
        context.tokens = opened.tokens.fork();
        context.n_synced = context.tokens.len();
        Ok(context)
    }

    fn charged(model: &ModelHandle, caller: Arc<Caller>, tokens: History) -> Result<Self, EngineError> {
        let account = &caller.owner().account;
        let footprint = Footprint::new(account, tokens.len())?;
        account.charge(Resource::Contexts, 1)?;
        let (id, model, n_synced) = (model.note_opened(), model.clone(), tokens.len());
        let (states, reports) = (States::default(), Reports::default());
        let (run, mixed, verified, n_truncations) = (None, None, None, 0);
        Ok(Self {
            id,
            model,
            caller,
            tokens,
            evictions: Evictions::default(),
            steering: None,
            states,
            reports,
            footprint,
            n_synced,
            run,
            mixed,
            verified,
            n_truncations,
            rule: None,
            keeping: None,
            foreseen: None,
        })
    }

    /// The model that it is of.
    #[must_use]
    pub fn model(&self) -> &ModelHandle {
        &self.model
    }

    /// The tokens.
    #[must_use]
    pub fn tokens(&self) -> Tokens<'_> {
        self.tokens.view()
    }

    /// The most tokens.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.model.limits().n_positions_max
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// A token out of range, or more tokens than fit; nothing is appended then.
    pub async fn append(&mut self, tokens: &[Token]) -> Result<(), EngineError> {
        self.append_with(tokens, self.n_bytes_beside()).await
    }

    /// Appends tokens to a context that is about to take so many bytes beside its tokens.
    async fn append_with(&mut self, tokens: &[Token], n_bytes_beside: u64) -> Result<(), EngineError> {
        self.check_continuation(tokens)?;
        if tokens.is_empty() {
            return Ok(());
        }
        let room = self.room_to_stop_run(tokens.len()).await?;
        self.footprint.set_with(self.tokens.len() + tokens.len(), n_bytes_beside)?;
        self.tokens.append(tokens);
        self.verified = None;
        self.stop_run(room)
    }

    /// Appends tokens that were drawn with this sampler, as answers to questions about the end of the context, and notes what
    /// its program left.
    ///
    /// # Errors
    /// As for [`Self::append`].
    pub async fn append_drawn(&mut self, drawn: &[Drawn], sampler: &Sampler) -> Result<(), EngineError> {
        let n_before = self.tokens.len();
        let tokens: SmallVec<[Token; 16]> = drawn.iter().map(|drawn| drawn.candidate.token).collect();
        let leaves = Leaves::of(sampler);
        let n_bytes = self.n_bytes_with(leaves, drawn.len());
        self.append_with(&tokens, n_bytes).await?;
        for (idx, drawn) in drawn.iter().enumerate() {
            self.note_left(n_before + idx + 1, drawn, leaves);
        }
        Ok(())
    }

    /// Notes what the program left that drew the last of `n_tokens`.
    fn note_left(&mut self, n_tokens: usize, drawn: &Drawn, leaves: Option<Leaves>) {
        self.reports.clear();
        if let (Some(leaves), Some(left)) = (leaves, &drawn.left) {
            self.reports.extend_from_slice(&left.reports[..leaves.n_reports]);
            self.states.note(n_tokens, leaves, left.next);
        }
    }

    /// The numbers that the program of the last draw reported.
    #[must_use]
    pub fn reports(&self) -> &[f32] {
        &self.reports
    }

    fn check_tokens(&self, tokens: &[Token]) -> Result<(), EngineError> {
        let vocab_size = self.model.limits().vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            Some(&token) => Err(EngineError::TokenOutOfRange { token, vocab_size }),
            None => Ok(()),
        }
    }

    /// Checks the first token of a mean, for which all tokens from there on are computed.
    fn check_mean(&self, first: usize) -> Result<(), EngineError> {
        let (length, n_evicted) = (self.tokens.len(), self.evictions.n_evicted());
        if first >= length {
            return Err(EngineError::NotThere { start: first, end: length, length });
        }
        match n_evicted {
            0 => Ok(()),
            _ => Err(EngineError::LooksAtEvicted { n_evicted }),
        }
    }

    fn check_continuation(&self, tokens: &[Token]) -> Result<(), EngineError> {
        self.check_tokens(tokens)?;
        let (n_free, n_positions) = (self.n_free(), self.capacity());
        if tokens.len() > n_free {
            // Positions of tokens that are gone count, where they were kept.
            let n_tokens = n_positions - n_free + tokens.len();
            return Err(EngineError::ContextFull { n_tokens, n_positions });
        }
        Ok(())
    }

    /// Checks a guess, and cuts off what there would be no room for: drawing would end there, whatever was guessed.
    fn check_guess(&self, guess: &mut Guess) -> Result<(), EngineError> {
        let n_tokens = guess.tokens().len();
        if guess.tree().is_none() && n_tokens > N_GUESS_MAX {
            return Err(EngineError::GuessTooLong { n_tokens, n_tokens_max: N_GUESS_MAX });
        }
        self.check_tokens(guess.tokens())?;
        self.check_continuation(&[0])?; // room for the token that is drawn
        guess.cut(self.n_free() - 1);
        Ok(())
    }

    /// Keeps the first `n_tokens` tokens.
    ///
    /// # Errors
    /// There are fewer.
    pub async fn truncate(&mut self, n_tokens: usize) -> Result<(), EngineError> {
        let length = self.tokens.len();
        if n_tokens > length {
            return Err(EngineError::TooLong { n_tokens, length });
        }
        self.verified = None;
        if n_tokens == length {
            let room = self.room_to_stop_run(0).await?;
            return self.stop_run(room);
        }
        let n_untold = n_tokens.saturating_sub(self.n_synced);
        let room = self.model.room(&self.caller, n_untold).await?;
        self.tokens.truncate(n_tokens);
        self.evictions.truncate(n_tokens);
        self.n_truncations += 1;
        self.states.truncate(n_tokens);
        if self.keeping.as_ref().is_some_and(|keeping| keeping.first > n_tokens) {
            self.keeping = None;
        }
        self.reports.clear();
        self.footprint.set_with(n_tokens, self.n_bytes_beside())?;
        self.n_synced = self.n_synced.min(n_tokens);
        // Told at once, so that the pages are free for others.
        let edit = self.take_edit();
        self.model.post_into(room, Operation::Edit { id: self.id, edit })
    }

    /// A second context with the same tokens and the same pages.
    ///
    /// # Errors
    /// The owner's budget of contexts is used up, or the engine has failed or stopped.
    pub async fn fork(&mut self) -> Result<Self, EngineError> {
        let room = self.model.room(&self.caller, self.n_untold()).await?;
        let mut child = Self::charged(&self.model, self.caller.clone(), self.tokens.fork())?;
        child.footprint.set_with(child.tokens.len(), self.n_bytes_beside())?;
        child.evictions = self.evictions.clone();
        child.steering = self.steering.clone();
        child.states = self.states.fork();
        child.reports.clone_from(&self.reports);
        child.keeping = self.keeping.as_ref().map(Keeping::fork).transpose()?;
        let edit = self.take_edit();
        self.model.post_into(room, Operation::Fork { id: self.id, edit, child: child.id })?;
        Ok(child)
    }

    /// Keeps a copy under a name for all guests of the same user. An older one of that name is replaced.
    ///
    /// # Errors
    /// The user's budget of contexts is used up, or the engine has failed or stopped.
    pub async fn save(&mut self, name: &str) -> Result<(), EngineError> {
        let room = self.model.room(&self.caller, self.n_untold()).await?;
        let place = self.caller.ticket();
        let (id, edit, name, tag) = (self.id, self.take_edit(), name.to_owned(), place.tag());
        let tokens = Arc::new(self.tokens.fork());
        self.model.post_into(room, Operation::Save { id, edit, name, tokens, tag })?;
        match place.take().await {
            Some(Done::Kept(saved)) => saved,
            Some(other) => unreachable!("asked to save, answered with {other:?}"),
            None => Err(self.model.ended()),
        }
    }

    /// Asks a question about the end of the context. Questions to several contexts that are posted before the
    /// first answer is awaited are computed in one batch.
    ///
    /// # Errors
    /// The question does not fit the context or the model, or the engine has failed or stopped.
    pub async fn ask(&mut self, mut ask: Ask) -> Result<Pending, EngineError> {
        let vocab_size = self.model.limits().vocab_size;
        match &mut ask {
            Ask::Prefill if self.tokens.is_empty() => {}
            _ if self.tokens.is_empty() => return Err(EngineError::EmptyContext),
            Ask::Sample(sampler) => {
                sampler.validate(vocab_size)?;
                self.states.carry_on(sampler);
                self.check_continuation(&[0])?; // room for the token that is drawn
            }
            Ask::Verify { sampler, guess } => {
                sampler.validate(vocab_size)?;
                self.model.check_layers(&sampler.looks.hidden)?;
                self.states.carry_on(sampler);
                self.check_guess(guess)?;
            }
            Ask::Continuation(tokens) | Ask::Tops { continuation: tokens, .. } => {
                self.check_continuation(tokens)?;
            }
            Ask::Scores(tokens) => self.check_tokens(tokens)?,
            Ask::Hidden { n_layers, pooling } => {
                self.model.check_layers(n_layers)?;
                if let Pooling::MeanFrom(first) = *pooling {
                    self.check_mean(first)?;
                }
            }
            Ask::Attention { layers } => self.model.check_attention(layers, self.tokens.len())?,
            Ask::Mix { sampler, .. } => {
                sampler.validate(vocab_size)?;
                self.model.check_layers(&sampler.looks.hidden)?;
                self.check_continuation(&[0])?;
            }
            Ask::Prefill | Ask::Top { .. } | Ask::Full | Ask::Logits | Ask::Keep | Ask::Embedding => {}
        }
        let ask = self.constrained(ask).await?;
        let room = self.model.room(&self.caller, self.n_untold() + ask.n_tokens()).await?;
        let place = self.caller.ticket();
        let (id, edit, tag) = (self.id, self.take_edit(), place.tag());
        self.model.post_into(room, Operation::Ask { id, edit, ask, tag })?;
        Ok(Pending::new(place, self.model.clone(), self.caller.id(), id))
    }

    /// Draws the next token and appends it, as `ask(Ask::Sample)` and `append` would, but decoded ahead: as
    /// long as `key` stays the same and nothing else is done with the context, the tokens that follow are
    /// on their way already.
    ///
    /// `settings` is asked for when a run starts, that is with a new key or after an interruption, and is told
    /// nothing of earlier runs: a bound on the tokens has to be the one that is left.
    ///
    /// # Errors
    /// What the engine found wrong; the run has ended then.
    pub async fn pull(
        &mut self,
        key: RunKey,
        settings: impl FnOnce() -> RunSettings,
    ) -> Result<Pull, EngineError> {
        self.start(key, settings).await?;
        self.pull_started().await
    }

    /// The next token of the run that was started.
    async fn pull_started(&mut self) -> Result<Pull, EngineError> {
        // Before a token is taken that there would be no room for.
        let leaves = self.run.as_ref().and_then(|run| run.leaves);
        self.footprint.set_with(self.tokens.len() + 1, self.n_bytes_with(leaves, 1))?;
        let (id, model, caller) = (self.id, &self.model, self.caller.id());
        let queue = &mut self.run.as_mut().expect("a run was just started").queue;
        let tell = |queue: &RunQueue, progress: Option<PullReport>| match progress {
            Some(PullReport { n_tokens, is_waiting }) => {
                model.post_unbounded(caller, Operation::Pulled { id, tag: queue.tag(), n_tokens, is_waiting })
            }
            None => Ok(()),
        };
        let event = match queue.try_pull() {
            Some(event) => event,
            None => {
                let progress = queue.wait();
                tell(queue, progress)?;
                queue.pull().await.unwrap_or(RunEvent::Failed(EngineError::Stopped))
            }
        };
        match event {
            RunEvent::Token(drawn) => {
                let progress = queue.progress();
                // An engine that has ended says so when there are no more tokens.
                let _ = tell(queue, progress);
                self.tokens.push(drawn.candidate.token);
                self.n_synced += 1;
                let leaves = self.run.as_ref().and_then(|run| run.leaves);
                self.note_left(self.tokens.len(), &drawn, leaves);
                Ok(Pull::Token(drawn))
            }
            RunEvent::Finished(finish) => {
                self.run = None;
                Ok(Pull::Finished(finish))
            }
            RunEvent::Failed(error) => {
                self.run = None;
                // No more will come: the engine has ended.
                Err(if let EngineError::Stopped = error { self.model.ended() } else { error })
            }
        }
    }

    /// Starts what [`Self::pull`] with this key pulls from, unless it has been started: so that its first mask can be
    /// supplied before its first token is waited for.
    ///
    /// # Errors
    /// The settings do not fit the model, or the engine has failed or stopped.
    pub async fn start(
        &mut self,
        key: RunKey,
        settings: impl FnOnce() -> RunSettings,
    ) -> Result<(), EngineError> {
        if self.run.as_ref().is_none_or(|run| run.key != key) {
            self.start_run(key, settings()).await?;
        }
        Ok(())
    }

    /// What the token after those that were pulled may be, for a stream whose masks come from its caller
    /// ([`MaskSource::Caller`](crate::MaskSource::Caller)). The engine computes meanwhile; a token whose mask comes too late
    /// for its step is drawn in one of the next. Another mask for the same token, or one without such a stream, does
    /// nothing.
    ///
    /// # Errors
    /// The mask is one for another vocabulary, or the engine has failed or stopped.
    pub async fn supply_mask(&mut self, mask: Arc<TokenMask>) -> Result<(), EngineError> {
        let (n_tokens, vocab_size) = (mask.vocab_size(), self.model.limits().vocab_size);
        if n_tokens != vocab_size {
            return Err(SamplerError::MaskSize { n_tokens, vocab_size }.into());
        }
        let Some(run) = &self.run else { return Ok(()) };
        let (id, tag, position) = (self.id, run.queue.tag(), self.tokens.len());
        let mask = Operation::Mask { id, tag, position, turn: 0, mask, expected: None };
        self.model.post(&self.caller, mask).await
    }

    async fn start_run(&mut self, key: RunKey, settings: RunSettings) -> Result<(), EngineError> {
        self.post_run(key, settings, Foresight::Expected, 0, |context, settings, tag| Operation::Run {
            id: context.id,
            edit: context.take_edit(),
            settings,
            tag,
        })
        .await
        .map(drop)
    }

    /// Checks the settings of a run, has its program go on where it left off, and posts the operation that begins it;
    /// returns what its tokens come under.
    async fn post_run(
        &mut self,
        key: RunKey,
        mut settings: RunSettings,
        foresight: Foresight,
        n_untold_of_others: usize,
        operation: impl FnOnce(&mut Self, RunSettings, Tag) -> Operation,
    ) -> Result<Tag, EngineError> {
        if self.tokens.is_empty() {
            return Err(EngineError::EmptyContext);
        }
        settings.sampler.validate(self.model.limits().vocab_size)?;
        self.model.check_layers(&settings.sampler.looks.hidden)?;
        self.states.carry_on(&mut settings.sampler);
        let masks = self.masks_of_run(&settings.sampler, foresight)?;
        if masks.is_some() {
            settings.masks = MaskSource::Caller;
        }
        let n_untold = self.n_untold() + n_untold_of_others;
        let room = self.model.room(&self.caller, n_untold).await?;
        let queue = RunQueue::new(self.caller.ticket());
        let (leaves, tag) = (Leaves::of(&settings.sampler), queue.tag());
        let operation = operation(self, settings, tag);
        self.model.post_into(room, operation)?;
        let _watching = masks.map(|masks| masks.begin(&self.model, self.caller.id(), self.id, &queue));
        self.run = Some(Run { key, queue, leaves, _watching });
        Ok(tag)
    }

    /// Room for the command that ends a run, if there is a run, or one that it is part of, and brings so many tokens more.
    async fn room_to_stop_run(&self, n_more: usize) -> Result<Option<Room>, EngineError> {
        match (&self.run, &self.mixed) {
            (None, None) => Ok(None),
            _ => Ok(Some(self.model.room(&self.caller, self.n_untold() + n_more).await?)),
        }
    }

    /// Ends a run, so that the engine does not go on with tokens that will not be pulled.
    fn stop_run(&mut self, room: Option<Room>) -> Result<(), EngineError> {
        let Some(room) = room else { return Ok(()) };
        let edit = self.take_edit();
        self.model.post_into(room, Operation::Edit { id: self.id, edit })
    }

    /// Tokens of which the engine has to be told.
    fn n_untold(&self) -> usize {
        self.tokens.len().saturating_sub(self.n_synced)
    }

    /// What the engine has to be told. The command that carries it must be on its way before anything is awaited:
    /// a caller that gives up in between would leave the engine with other tokens than this context.
    fn take_edit(&mut self) -> Edit {
        // Every edit ends the engine's run.
        let n_pulled = self.end_run();
        self.verified = None;
        let appended = self.tokens().copy_of(self.n_synced..self.tokens.len());
        let n_kept = std::mem::replace(&mut self.n_synced, self.tokens.len());
        Edit { n_kept, appended, n_pulled }
    }

    /// Forgets the run; returns how many of its tokens were taken.
    fn end_run(&mut self) -> usize {
        let of_another = self.mixed.take().map_or(0, |mixed| mixed.n_pulled());
        self.run.take().map_or(of_another, |run| run.queue.n_pulled())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.caller.owner().account.release(Resource::Contexts, 1);
        let (id, n_pulled) = (self.id, self.end_run());
        // A stopped engine holds nothing to release.
        let _ = self.model.post_unbounded(self.caller.id(), Operation::Release { id, n_pulled });
        self.model.note_dropped();
    }
}

#[cfg(test)]
mod tests;
