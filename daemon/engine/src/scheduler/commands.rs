//! What each command does.

use super::admission::Standing;
use super::cost::Costs;
use super::{ContextState, Saved, Scheduler};
use crate::account::{ActorId, Owner, Resource};
use crate::batch::Token;
use crate::command::{Answer, Ask, Command, ContextId, Edit, Reply, RunSettings};
use crate::error::EngineError;
use crate::job::{AskWork, N_GUESS_MAX, RunWork, VerifyWork, Work};
use crate::kv::Footprint;
use crate::kv::PrefixKey;
use crate::kv::Sequence;
use crate::run::{AheadWindow, Finish, RunEvent, RunSender};

/// Whether the engine goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    Continue,
    Stop,
}

impl Scheduler {
    /// Carries out one command. Commands about contexts that are gone do nothing.
    pub(crate) fn apply(&mut self, command: Command) -> Flow {
        match command {
            Command::Create { id, owner } => {
                let kv = Sequence::new(self.root_key(owner.actor), owner.account.clone());
                self.insert(id, owner, kv, AheadWindow::default());
            }
            Command::Open { id, owner, name, reply } => {
                let _ = reply.send(self.open(id, owner, name));
            }
            Command::Edit { id, edit } => self.edit(id, edit),
            Command::Fork { id, edit, child } => self.fork(id, edit, child),
            Command::Ask { id, edit, ask, reply } => self.ask(id, edit, ask, reply),
            Command::Run { id, edit, settings, queue } => self.run(id, edit, settings, queue),
            Command::Resume { id } => self.enqueue(id),
            Command::Save { id, edit, name, reply } => {
                self.edit(id, edit);
                let _ = reply.send(self.save(id, name));
            }
            Command::Forget { owner, name, reply } => {
                let _ = reply.send(self.forget(owner.actor, name));
            }
            Command::Release { id } => self.release(id),
            Command::Stats { reply } => {
                let _ = reply.send(self.stats());
            }
            Command::Shutdown => return Flow::Stop,
        }
        Flow::Continue
    }

    fn root_key(&self, actor: ActorId) -> PrefixKey {
        PrefixKey::root(&self.settings.model_fingerprint, self.settings.prefix_scope, actor)
    }

    fn insert(&mut self, id: ContextId, owner: Owner, kv: Sequence, window: AheadWindow) {
        let context = ContextState {
            owner,
            slot: self.take_slot(),
            kv,
            work: None,
            window,
            is_queued: false,
            last_step: self.step,
            standing: Standing::default(),
            under_way: None,
            epoch: 0,
        };
        let earlier = self.contexts.insert(id, context);
        assert!(earlier.is_none(), "context ids are never used twice");
    }

    fn open(&mut self, id: ContextId, owner: Owner, name: String) -> Result<Vec<Token>, EngineError> {
        let key = (owner.actor, name);
        let Some(saved) = self.saved.get_mut(&key) else {
            return Err(EngineError::NotSaved { name: key.1 });
        };
        saved.last_step = self.step;
        let kv = saved.kv.fork(owner.account.clone(), &mut self.pages);
        let tokens = kv.tokens.clone();
        self.queue.charge(&owner, Costs::command_ns(kv.blocks.len()));
        self.insert(id, owner, kv, AheadWindow::default());
        Ok(tokens)
    }

    /// Ends what the context does and brings its tokens to the caller's. What a question or a run has put past them stays
    /// as far as it is what the caller appends: it was computed once.
    fn edit(&mut self, id: ContextId, edit: Edit) {
        self.stop_work(id);
        self.spares.remove(id);
        let Some(context) = self.contexts.get_mut(&id) else { return };
        context.kv.edit(edit.n_kept, &edit.appended, &mut self.pages);
    }

    fn stop_work(&mut self, id: ContextId) {
        self.leave_by_id(id);
        let Some(context) = self.contexts.get_mut(&id) else { return };
        match context.take_work() {
            Some(Work::Run(mut run)) => {
                let n_in_vain = run.queue.n_unread();
                context.window.note_interrupted(run.n_given - n_in_vain);
                context.owner.account.note_in_vain(n_in_vain as u64);
                self.stats.n_tokens_in_vain += n_in_vain as u64;
                run.queue.push(RunEvent::Failed(EngineError::Stopped));
            }
            Some(Work::Ask(_) | Work::Verify(_)) | None => {}
        }
    }

    fn fork(&mut self, id: ContextId, edit: Edit, child: ContextId) {
        self.edit(id, edit);
        let Some(parent) = self.contexts.get(&id) else { return };
        let (owner, window) = (parent.owner.clone(), parent.window);
        let kv = parent.kv.fork(owner.account.clone(), &mut self.pages);
        self.queue.charge(&owner, Costs::command_ns(kv.blocks.len()));
        self.insert(child, owner, kv, window);
    }

    fn ask(&mut self, id: ContextId, edit: Edit, ask: Ask, reply: Reply<Answer>) {
        self.edit(id, edit);
        let Some(context) = self.contexts.get_mut(&id) else { return };
        self.returns.note_asked(context.owner.guest);
        let n_tokens = context.kv.tokens.len();
        let work = match ask {
            Ask::Verify { sampler, guess } => {
                let work = VerifyWork::new(sampler, guess, reply, n_tokens);
                let n_tokens_max = N_GUESS_MAX.min(self.settings.n_step_tokens - 1);
                if work.guess().len() > n_tokens_max {
                    let n_tokens = work.guess().len();
                    return work.answer(Err(EngineError::GuessTooLong { n_tokens, n_tokens_max }));
                }
                context.kv.tokens.extend_from_slice(work.guess());
                Work::Verify(work)
            }
            ask => {
                let work = AskWork::new(ask, reply, n_tokens, context.kv.has_state());
                if work.is_trivial() {
                    let answer = work.trivial_answer();
                    return work.answer(Ok(answer));
                }
                context.kv.tokens.extend_from_slice(work.continuation());
                Work::Ask(work)
            }
        };
        if !work.is_of_head() {
            // The output of a position comes out of computing it, so its KV is computed once more if need be.
            context.kv.rewind(work.first_output(context.kv.tokens.len()));
            context.kv.forget_shared_unwritten(&mut self.pages);
        }
        context.work = Some(work);
        self.enqueue(id);
    }

    fn run(&mut self, id: ContextId, edit: Edit, settings: RunSettings, mut queue: RunSender) {
        self.edit(id, edit);
        let Some(context) = self.contexts.get_mut(&id) else { return };
        let n_tokens = context.kv.tokens.len();
        if settings.n_tokens_max == Some(0) {
            return queue.push(RunEvent::Finished(Finish::MaxTokens));
        }
        if n_tokens >= self.limits.n_positions_max {
            return queue.push(RunEvent::Finished(Finish::ContextFull));
        }
        context.kv.rewind(n_tokens - 1);
        context.kv.forget_shared_unwritten(&mut self.pages);
        context.work = Some(Work::Run(RunWork { settings, queue, n_given: 0 }));
        self.enqueue(id);
    }

    fn save(&mut self, id: ContextId, name: String) -> Result<(), EngineError> {
        let Some(context) = self.contexts.get(&id) else { return Err(EngineError::Stopped) };
        let owner = Owner { account: context.owner.account.root().clone(), ..context.owner.clone() };
        let key = (owner.actor, name);
        let footprint = Footprint::new(&owner.account, context.kv.tokens.len())?;
        if let Some(mut earlier) = self.saved.remove(&key) {
            earlier.kv.forget(&mut self.pages);
        } else {
            owner.account.charge(Resource::Contexts, 1)?;
        }
        let kv = context.kv.fork(owner.account.clone(), &mut self.pages);
        self.queue.charge(&owner, Costs::command_ns(kv.blocks.len()));
        self.saved.insert(key, Saved { kv, _footprint: footprint, owner, last_step: self.step });
        Ok(())
    }

    fn forget(&mut self, actor: ActorId, name: String) -> Result<(), EngineError> {
        let key = (actor, name);
        let Some(mut saved) = self.saved.remove(&key) else {
            return Err(EngineError::NotSaved { name: key.1 });
        };
        saved.kv.forget(&mut self.pages);
        saved.owner.account.release(Resource::Contexts, 1);
        Ok(())
    }

    fn release(&mut self, id: ContextId) {
        self.stop_work(id);
        self.spares.remove(id);
        if let Some(mut context) = self.contexts.remove(&id) {
            self.returns.forget(context.owner.guest);
            context.kv.forget(&mut self.pages);
            self.free_slots.push(context.slot);
        }
    }
}

impl ContextState {
    /// Ends the context's work with an error.
    pub(super) fn fail(&mut self, error: EngineError, pages: &mut crate::kv::PageTable) {
        if let Some(work) = self.take_work() {
            self.kv.truncate(work.n_base(self.kv.tokens.len()), pages);
            work.fail(error);
        }
    }
}
