//! The caller's side of a context.

use std::sync::Arc;

use crate::account::{Owner, Resource};
use crate::batch::{Candidate, Token};
use crate::command::{Answer, Ask, ContextId, Edit, Guess, Operation, RunSettings};
use crate::completion::Done;
use crate::error::EngineError;
use crate::handle::{Caller, Room};
use crate::job::N_GUESS_MAX;
use crate::kv::Footprint;
use crate::line::Standing;
use crate::model_handle::ModelHandle;
use crate::run::{Finish, Progress, RunEvent, RunQueue};

/// A token sequence whose KV cache the engine holds.
///
/// The tokens live here; the engine is told of changes with the next question, so that appending costs
/// nothing but the copy. Dropping a context frees its pages.
#[derive(Debug)]
pub struct Context {
    id: ContextId,
    engine: ModelHandle,
    caller: Arc<Caller>,
    tokens: Vec<Token>,
    footprint: Footprint,
    /// The engine has `tokens[..n_synced]`, and past them at most what a run decoded ahead.
    n_synced: usize,
    run: Option<Run>,
}

#[derive(Debug)]
struct Run {
    key: RunKey,
    queue: RunQueue,
}

/// Tells the streams over one context apart, and the settings of one stream before and after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunKey(pub u64);

/// What pulling a token gives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pull {
    /// The next token; it has been appended.
    Token(Candidate),
    /// There are no more.
    Finished(Finish),
}

/// An answer that is on its way. Dropping it cancels the question.
#[derive(Debug)]
pub struct Pending {
    place: Standing,
    engine: ModelHandle,
    /// The context that was asked about, while the answer is wanted.
    asked: Option<ContextId>,
}

impl Pending {
    /// The answer, once the engine has computed it.
    ///
    /// # Errors
    /// What the engine found wrong.
    pub async fn answer(mut self) -> Result<Answer, EngineError> {
        let done = self.place.take().await;
        self.asked = None;
        match done {
            Some(Done::Answer(answer)) => answer,
            Some(other) => unreachable!("asked a question, answered with {other:?}"),
            None => Err(self.engine.ended()),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(id) = self.asked {
            // A stopped engine computes nothing.
            let _ = self.engine.post_unbounded(Operation::Cancel { id, tag: self.place.tag() });
        }
    }
}

impl Context {
    /// An empty context.
    ///
    /// # Errors
    /// The owner's budget of contexts is used up, or the engine has failed or stopped.
    pub async fn create(engine: &ModelHandle, owner: Owner) -> Result<Self, EngineError> {
        engine.check_open()?;
        let context = Self::charged(engine, engine.caller(&owner)?, Vec::new())?;
        engine
            .post(&context.caller, Operation::Create { id: context.id, caller: context.caller.id() })
            .await?;
        Ok(context)
    }

    /// A context that was saved under this name by any guest of the same user.
    ///
    /// # Errors
    /// Nothing is saved under the name, a budget is used up, or the engine has failed or stopped.
    pub async fn open(engine: &ModelHandle, owner: Owner, name: &str) -> Result<Self, EngineError> {
        engine.check_open()?;
        let mut context = Self::charged(engine, engine.caller(&owner)?, Vec::new())?;
        let place = context.caller.stand();
        let (id, caller, tag) = (context.id, context.caller.id(), place.tag());
        engine.post(&context.caller, Operation::Open { id, caller, name: name.to_owned(), tag }).await?;
        let tokens = match place.take().await {
            Some(Done::Opened(opened)) => opened?,
            Some(other) => unreachable!("asked to open, answered with {other:?}"),
            None => return Err(engine.ended()),
        };
        context.footprint.set(tokens.len())?;
        context.tokens = tokens;
        context.n_synced = context.tokens.len();
        Ok(context)
    }

    fn charged(engine: &ModelHandle, caller: Arc<Caller>, tokens: Vec<Token>) -> Result<Self, EngineError> {
        let account = &caller.owner().account;
        let footprint = Footprint::new(account, tokens.len())?;
        account.charge(Resource::Contexts, 1)?;
        let (id, engine, n_synced) = (engine.note_opened(), engine.clone(), tokens.len());
        Ok(Self { id, engine, caller, tokens, footprint, n_synced, run: None })
    }

    /// The engine that holds it.
    #[must_use]
    pub fn engine(&self) -> &ModelHandle {
        &self.engine
    }

    /// The tokens.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// The most tokens.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.engine.limits().n_positions_max
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// A token out of range, or more tokens than fit; nothing is appended then.
    pub async fn append(&mut self, tokens: &[Token]) -> Result<(), EngineError> {
        self.check_continuation(tokens)?;
        if tokens.is_empty() {
            return Ok(());
        }
        let room = self.room_to_stop_run().await?;
        self.footprint.set(self.tokens.len() + tokens.len())?;
        self.tokens.extend_from_slice(tokens);
        self.stop_run(room)
    }

    fn check_tokens(&self, tokens: &[Token]) -> Result<(), EngineError> {
        let vocab_size = self.engine.limits().vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            Some(&token) => Err(EngineError::TokenOutOfRange { token, vocab_size }),
            None => Ok(()),
        }
    }

    fn check_continuation(&self, tokens: &[Token]) -> Result<(), EngineError> {
        self.check_tokens(tokens)?;
        let (n_tokens, n_positions) = (self.tokens.len() + tokens.len(), self.capacity());
        if n_tokens > n_positions {
            return Err(EngineError::ContextFull { n_tokens, n_positions });
        }
        Ok(())
    }

    /// Checks a guess, and cuts off what there would be no room for: drawing would end there, whatever was guessed.
    fn check_guess(&self, tokens: &mut Vec<Token>) -> Result<(), EngineError> {
        if tokens.len() > N_GUESS_MAX {
            let (n_tokens, n_tokens_max) = (tokens.len(), N_GUESS_MAX);
            return Err(EngineError::GuessTooLong { n_tokens, n_tokens_max });
        }
        self.check_tokens(tokens)?;
        self.check_continuation(&[0])?; // room for the token that is drawn
        tokens.truncate(self.capacity() - self.tokens.len() - 1);
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
        if n_tokens == length {
            let room = self.room_to_stop_run().await?;
            return self.stop_run(room);
        }
        let room = self.engine.room(&self.caller).await?;
        self.tokens.truncate(n_tokens);
        self.footprint.set(n_tokens)?;
        self.n_synced = self.n_synced.min(n_tokens);
        // Told at once, so that the pages are free for others.
        let edit = self.take_edit();
        self.engine.post_into(room, Operation::Edit { id: self.id, edit })
    }

    /// A second context with the same tokens and the same pages.
    ///
    /// # Errors
    /// The owner's budget of contexts is used up, or the engine has failed or stopped.
    pub async fn fork(&mut self) -> Result<Self, EngineError> {
        let room = self.engine.room(&self.caller).await?;
        let child = Self::charged(&self.engine, self.caller.clone(), self.tokens.clone())?;
        let edit = self.take_edit();
        self.engine.post_into(room, Operation::Fork { id: self.id, edit, child: child.id })?;
        Ok(child)
    }

    /// Keeps a copy under a name for all guests of the same user. An older one of that name is replaced.
    ///
    /// # Errors
    /// The user's budget of contexts is used up, or the engine has failed or stopped.
    pub async fn save(&mut self, name: &str) -> Result<(), EngineError> {
        let room = self.engine.room(&self.caller).await?;
        let place = self.caller.stand();
        let (id, edit, name, tag) = (self.id, self.take_edit(), name.to_owned(), place.tag());
        self.engine.post_into(room, Operation::Save { id, edit, name, tag })?;
        match place.take().await {
            Some(Done::Kept(saved)) => saved,
            Some(other) => unreachable!("asked to save, answered with {other:?}"),
            None => Err(self.engine.ended()),
        }
    }

    /// Asks a question about the end of the context. Questions to several contexts that are posted before the
    /// first answer is awaited are computed in one batch.
    ///
    /// # Errors
    /// The question does not fit the context or the model, or the engine has failed or stopped.
    pub async fn ask(&mut self, mut ask: Ask) -> Result<Pending, EngineError> {
        let vocab_size = self.engine.limits().vocab_size;
        match &mut ask {
            Ask::Prefill if self.tokens.is_empty() => {}
            _ if self.tokens.is_empty() => return Err(EngineError::EmptyContext),
            Ask::Sample(sampler) => {
                sampler.validate(vocab_size)?;
                self.check_continuation(&[0])?; // room for the token that is drawn
            }
            Ask::Verify { sampler, guess: Guess::Chain(tokens) } => {
                sampler.validate(vocab_size)?;
                self.check_guess(tokens)?;
            }
            Ask::Continuation(tokens) => self.check_continuation(tokens)?,
            Ask::Scores(tokens) => self.check_tokens(tokens)?,
            Ask::Prefill | Ask::Top { .. } | Ask::Full | Ask::Embedding => {}
        }
        let room = self.engine.room(&self.caller).await?;
        let place = self.caller.stand();
        let (id, edit, tag) = (self.id, self.take_edit(), place.tag());
        self.engine.post_into(room, Operation::Ask { id, edit, ask, tag })?;
        Ok(Pending { place, engine: self.engine.clone(), asked: Some(id) })
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
        if self.run.as_ref().is_none_or(|run| run.key != key) {
            self.start_run(key, settings()).await?;
        }
        // Before a token is taken that there would be no room for.
        self.footprint.set(self.tokens.len() + 1)?;
        let (id, engine) = (self.id, &self.engine);
        let queue = &mut self.run.as_mut().expect("a run was just started").queue;
        let tell = |queue: &RunQueue, progress: Option<Progress>| match progress {
            Some(Progress { n_tokens, is_waiting }) => {
                engine.post_unbounded(Operation::Pulled { id, tag: queue.tag(), n_tokens, is_waiting })
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
            RunEvent::Token(candidate) => {
                let progress = queue.progress();
                // An engine that has ended says so when there are no more tokens.
                let _ = tell(queue, progress);
                self.tokens.push(candidate.token);
                self.n_synced += 1;
                Ok(Pull::Token(candidate))
            }
            RunEvent::Finished(finish) => {
                self.run = None;
                Ok(Pull::Finished(finish))
            }
            RunEvent::Failed(error) => {
                self.run = None;
                // No more will come: the engine has ended.
                Err(if let EngineError::Stopped = error { self.engine.ended() } else { error })
            }
        }
    }

    async fn start_run(&mut self, key: RunKey, settings: RunSettings) -> Result<(), EngineError> {
        if self.tokens.is_empty() {
            return Err(EngineError::EmptyContext);
        }
        settings.sampler.validate(self.engine.limits().vocab_size)?;
        let room = self.engine.room(&self.caller).await?;
        let queue = RunQueue::new(self.caller.stand());
        let (id, edit, tag) = (self.id, self.take_edit(), queue.tag());
        self.engine.post_into(room, Operation::Run { id, edit, settings, tag })?;
        self.run = Some(Run { key, queue });
        Ok(())
    }

    /// Room for the command that ends a run, if there is a run.
    async fn room_to_stop_run(&self) -> Result<Option<Room>, EngineError> {
        match self.run {
            Some(_) => Ok(Some(self.engine.room(&self.caller).await?)),
            None => Ok(None),
        }
    }

    /// Ends a run, so that the engine does not go on with what nobody will pull.
    fn stop_run(&mut self, room: Option<Room>) -> Result<(), EngineError> {
        let Some(room) = room else { return Ok(()) };
        let edit = self.take_edit();
        self.engine.post_into(room, Operation::Edit { id: self.id, edit })
    }

    /// What the engine has to be told. The command that carries it must be on its way before anything is awaited:
    /// a caller that gives up in between would leave the engine with other tokens than this context.
    fn take_edit(&mut self) -> Edit {
        // Every edit ends the engine's run.
        let n_pulled = self.end_run();
        let appended = self.tokens[self.n_synced..].to_vec();
        let n_kept = std::mem::replace(&mut self.n_synced, self.tokens.len());
        Edit { n_kept, appended, n_pulled }
    }

    /// Forgets the run; returns how many of its tokens were taken.
    fn end_run(&mut self) -> usize {
        self.run.take().map_or(0, |run| run.queue.n_pulled())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.caller.owner().account.release(Resource::Contexts, 1);
        let (id, n_pulled) = (self.id, self.end_run());
        // A stopped engine holds nothing to release.
        let _ = self.engine.post_unbounded(Operation::Release { id, n_pulled });
        self.engine.note_dropped();
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::pin::pin;
    use std::task::{self, Poll, Waker};

    use super::*;
    use crate::account::{Account, ActorId, Budget, GuestId, N_OPERATIONS_MAX, SessionId};
    use crate::backend::{Backend, BackendError, Collected, Limits, WeightsInfo};
    use crate::batch::{Batch, HostPageId, PageId};
    use crate::command::{Ahead, ModelId};
    use crate::handle::{Link, Message, Served};
    use crate::model::{Dtype, Model, ModelSource};
    use crate::port::Port;
    use crate::sampling::Sampler;

    fn poll<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut task::Context::from_waker(Waker::noop()))
    }

    fn now<T>(future: impl Future<Output = Result<T, EngineError>>) -> T {
        let Poll::Ready(result) = poll(future) else { panic!("there is room") };
        result.expect("nothing is wrong")
    }

    fn engine() -> (ModelHandle, Served) {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let model = Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens");
        let limits = Limits {
            n_pages: 1,
            n_granule_pages: 1,
            n_host_pages: 0,
            page_bytes: 1,
            n_rows_max: 1,
            n_tokens_max: 1,
            n_positions_max: 100,
            vocab_size: 100,
            hidden_size: 1,
            n_steps_under_way: 1,
            n_slots: 0,
            n_states: 0,
            logits_tokens: 1.0,
        };
        let weights = WeightsInfo { dtype: Dtype::F32, n_bytes: 0 };
        let (link, served) = Link::new(Port::Encoded);
        let backend = Idle { limits, weights };
        (ModelHandle::new(link, ModelId::default(), Arc::new(model), &backend), served)
    }

    /// A backend that nothing is asked of.
    struct Idle {
        limits: Limits,
        weights: WeightsInfo,
    }

    impl Backend for Idle {
        fn limits(&self) -> &Limits {
            &self.limits
        }

        fn weights(&self) -> WeightsInfo {
            self.weights
        }

        fn device(&self) -> &str {
            "idle"
        }

        fn submit(&mut self, _: &Batch<'_>) -> Result<(), BackendError> {
            unreachable!("there is no engine")
        }

        fn collect(&mut self) -> Result<Collected, BackendError> {
            unreachable!("there is no engine")
        }

        fn n_pages(&self) -> usize {
            self.limits.n_pages
        }

        fn resize(&mut self, _: usize) -> Result<(), BackendError> {
            unreachable!("there is no engine")
        }

        fn move_pages(&mut self, _: &[(PageId, PageId)]) -> Result<(), BackendError> {
            unreachable!("there is no engine")
        }

        fn swap_out(&mut self, _: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
            unreachable!("there is no engine")
        }

        fn swap_in(&mut self, _: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
            unreachable!("there is no engine")
        }
    }

    fn owner(budget: Budget) -> Owner {
        Owner {
            actor: ActorId(0),
            session: SessionId(0),
            guest: GuestId(0),
            account: Account::new("guest", budget, None),
        }
    }

    #[test]
    fn token_lists_are_charged_while_they_are_there() {
        let (engine, _served) = engine();
        let owner = owner(Budget { host_bytes: 5_120, ..Budget::UNLIMITED });
        let mut context = now(Context::create(&engine, owner.clone()));
        now(context.append(&[1; 90]));
        let fork = now(context.fork());
        let mut third = now(Context::create(&engine, owner.clone()));
        let Poll::Ready(Err(EngineError::Budget(exceeded))) = poll(third.append(&[1])) else {
            panic!("two lists of up to 256 tokens are all there is room for")
        };
        assert_eq!((exceeded.what, exceeded.used, exceeded.limit), ("bytes of host memory", 5_120, 5_120));
        assert!(third.tokens().is_empty());
        drop(fork);
        now(third.append(&[1]));
        now(third.truncate(0));
        drop(context);
        assert_eq!(owner.account.used(Resource::HostBytes), 0);
    }

    #[test]
    fn a_guest_whose_contexts_come_and_go_is_held_up_like_any_other() {
        let (engine, _served) = engine();
        let owner = owner(Budget::UNLIMITED);
        let comes_and_goes = || match poll(Context::create(&engine, owner.clone())) {
            Poll::Ready(context) => {
                drop(context.expect("nothing is wrong"));
                true
            }
            Poll::Pending => false,
        };
        let n = (0..10_000).take_while(|_| comes_and_goes()).count();
        assert_eq!(n, N_OPERATIONS_MAX, "the engine reads nothing");
    }

    #[test]
    fn who_gives_up_waiting_for_room_has_told_the_engine_nothing_and_noted_nothing() {
        let (engine, mut served) = engine();
        let owner = owner(Budget::UNLIMITED);
        let settings = || RunSettings {
            sampler: Arc::new(Sampler::greedy()),
            stop_tokens: Arc::new([]),
            n_tokens_max: None,
            ahead: Ahead::Adaptive,
        };
        for given_up in 0..6 {
            let mut context = now(Context::create(&engine, owner.clone()));
            now(context.append(&[1, 2, 3]));
            if given_up >= 4 {
                assert!(poll(context.pull(RunKey(1), settings)).is_pending(), "the run has begun");
            }
            let rooms: Vec<Room> = std::iter::from_fn(|| match poll(engine.room(&context.caller)) {
                Poll::Ready(room) => room.ok(),
                Poll::Pending => None,
            })
            .collect();
            let is_pending = match given_up {
                0 => poll(context.pull(RunKey(1), settings)).is_pending(),
                1 => poll(context.ask(Ask::Prefill)).is_pending(),
                2 => poll(context.fork()).is_pending(),
                3 => poll(context.save("name")).is_pending(),
                4 => poll(context.append(&[4])).is_pending(),
                _ => poll(context.truncate(2)).is_pending(),
            };
            assert!(is_pending, "{given_up}");
            drop(rooms);
            // The next command brings the engine to what the context holds.
            drop(now(context.ask(Ask::Prefill)));
            let mut told = Vec::new();
            while let Ok(posted) = served.messages.try_recv() {
                if let Message::Operation(Operation::Run { edit, .. } | Operation::Ask { edit, .. }) =
                    posted.message
                {
                    told.truncate(edit.n_kept);
                    told.extend(edit.appended);
                }
            }
            assert_eq!(told, context.tokens(), "{given_up}");
            assert_eq!(told, [1, 2, 3], "{given_up}");
        }
    }
}
