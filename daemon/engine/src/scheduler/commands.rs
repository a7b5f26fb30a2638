//! What each command does.

use std::sync::Arc;

use super::admission::Standing;
use super::fits::Sender;
use super::holders::Listing;
use super::room::Victim;
use super::{ContextState, Saved, Scheduler};
use crate::account::{ActorId, Owner, Resource};
use crate::archive::Restored;
use crate::backend::PAGE_LEN;
use crate::causes::{Cause, Causes};
use crate::command::{Ahead, Answer, Ask, ContextId, Edit, Operation, RunSettings};
use crate::completion::{CallerId, Done, Opened, Reply, Tag};
use crate::error::EngineError;
use crate::fair::Seat;
use crate::history::History;
use crate::job::{AskWork, RunWork, VerifyWork, Work};
use crate::kept::RowName;
use crate::kv::{Evictions, Footprint, PageTable, PrefixKey, Sequence};
use crate::run::{AheadWindow, Finish, RunEvent, RunReply};
use crate::violation::Violation;

impl Scheduler {
    /// Carries out one operation. Those about contexts that are gone, or of callers that never entered, do nothing.
    ///
    /// Returns what it costs the engine's thread, in nanoseconds.
    pub(crate) fn apply(&mut self, operation: Operation) -> u64 {
        let operation = match &self.settings.operator {
            Some(operator) => operation.behind(operator),
            None => operation,
        };
        let price_ns = self.price_ns(&operation);
        self.charge_operation(&operation, price_ns);
        let sender = Sender::of(&operation);
        if let Err(violation) = self.carry_out(operation, price_ns) {
            self.accuse(sender, violation);
        }
        price_ns
    }

    /// # Errors
    /// No guest of ours posts it, in the state that its contexts are in.
    fn carry_out(&mut self, operation: Operation, price_ns: u64) -> Result<(), Violation> {
        match operation {
            Operation::Create { id, caller } => {
                self.check_new(id)?;
                let Some(owner) = self.commons.callers.get(&caller).cloned() else { return Ok(()) };
                let kv = Sequence::new(self.root_key(owner.actor), owner.account.clone());
                let seat = self.commons.queue.seat(&owner);
                self.insert(id, caller, owner, seat, kv, AheadWindow::default());
            }
            Operation::Open { id, caller, name, tag } => {
                self.check_new(id)?;
                let opened = self.open(id, caller, name, price_ns);
                self.outbox.to(caller, tag).send(Done::Opened(opened));
            }
            Operation::Edit { id, edit } => self.edit(id, edit)?,
            Operation::Evict { id, edit, start, end, positions } => {
                self.edit(id, edit)?;
                if let Some(context) = self.contexts.get_mut(&id) {
                    let n_positions = self.limits.n_positions_max;
                    context.kv.evict(start..end, positions, n_positions, &mut self.pages)?;
                }
            }
            Operation::Steer { id, edit, steering, from } => {
                self.edit(id, edit)?;
                if let Some(context) = self.contexts.get_mut(&id) {
                    context.check_steering(from)?;
                    context.kv.steer(steering, from, &mut self.pages);
                }
            }
            Operation::Fork { id, edit, child } => self.fork(id, edit, child)?,
            Operation::Ask { id, edit, ask, tag } => {
                if let Some(reply) = self.reply(id, tag) {
                    self.ask(id, edit, ask, reply)?;
                }
            }
            Operation::DrawTogether { members, sampler, tag } => self.draw_together(members, sampler, tag)?,
            Operation::SearchBeams(asked) => self.search_beams(*asked)?,
            Operation::Mix { members, settings, tag } => self.mix(members, settings, tag)?,
            Operation::Cancel { id, tag } => self.cancel(id, tag),
            Operation::Run { id, edit, settings, tag } => {
                if let Some(reply) = self.reply(id, tag) {
                    self.run(id, edit, settings, reply)?;
                }
            }
            Operation::Pulled { id, tag, n_tokens, is_waiting } => {
                self.note_pulled(id, tag, n_tokens, is_waiting);
            }
            Operation::Mask { id, tag, position, turn, mask, expected } => {
                self.take_mask((id, tag), position, turn, mask, expected);
            }
            Operation::EndRun { id, tag, position, turn, end } => {
                self.end_run_at((id, tag), position, turn, end);
            }
            Operation::Save { id, edit, name, tokens, tag } => {
                self.edit(id, edit)?;
                if let Some(context) = self.contexts.get(&id) {
                    context.check_saved(&tokens, &self.pages)?;
                }
                let saved = self.save(id, name, tokens);
                if let Some(reply) = self.reply(id, tag) {
                    reply.send(Done::Kept(saved));
                }
            }
            Operation::Forget { caller, name, tag, .. } => {
                let Some(actor) = self.commons.callers.get(&caller).map(|owner| owner.actor) else {
                    return Ok(());
                };
                let forgotten = self.forget(actor, name);
                self.outbox.to(caller, tag).send(Done::Kept(forgotten));
            }
            Operation::Stats { caller, tag, .. } => {
                self.outbox.to(caller, tag).send(Done::Stats(Ok(Box::new(self.stats()))));
            }
            Operation::LetGo { row } => self.commons.kept.let_go(row),
            Operation::Release { id, n_pulled } => self.release(id, n_pulled),
        }
        Ok(())
    }

    /// Where what comes of a context's work goes.
    pub(super) fn reply(&self, id: ContextId, tag: Tag) -> Option<Reply> {
        self.contexts.get(&id).map(|context| self.outbox.to(context.caller, tag))
    }

    /// A question whose caller has stopped waiting is not computed.
    fn cancel(&mut self, id: ContextId, tag: Tag) {
        if let Some(job) = self.jobs.search_of(id, tag) {
            return self.end_job(job, &EngineError::JobDisturbed);
        }
        let Some(context) = self.contexts.get(&id) else { return };
        let work = context.work.as_ref().filter(|work| work.tag() == tag);
        let Some(n_base) = work.map(|work| work.n_base(context.kv.tokens.len())) else { return };
        self.stop_work(id, 0);
        if let Some(context) = self.contexts.get_mut(&id) {
            context.kv.truncate(n_base, &mut self.pages);
        }
    }

    fn note_pulled(&mut self, id: ContextId, tag: Tag, n_tokens: usize, is_waiting: bool) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        if let Some(Work::Run(run)) = &mut context.work
            && run.queue.tag() == tag
        {
            run.queue.note_pulled(n_tokens, is_waiting);
            self.enqueue(id);
        }
    }

    pub(super) fn root_key(&self, actor: ActorId) -> PrefixKey {
        PrefixKey::root(&self.settings.model_fingerprint, self.settings.prefix_scope, actor)
    }

    fn insert(
        &mut self,
        id: ContextId,
        caller: CallerId,
        owner: Owner,
        seat: Seat,
        kv: Sequence,
        window: AheadWindow,
    ) {
        let mut listing = Listing::default();
        self.holders.note_changed(id, &mut listing);
        let context = ContextState {
            caller,
            owner,
            seat,
            slot: self.slots.take(id),
            kv,
            work: None,
            prefill: None,
            window,
            is_queued: false,
            last_step: self.commons.step,
            steered_in: None,
            ready_since: None,
            standing: Standing::default(),
            under_way: None,
            listing,
            epoch: 0,
        };
        let earlier = self.contexts.insert(id, Box::new(context));
        assert!(earlier.is_none(), "context ids are never used twice");
    }

    fn open(
        &mut self,
        id: ContextId,
        caller: CallerId,
        name: String,
        price_ns: u64,
    ) -> Result<Opened, EngineError> {
        let Some(owner) = self.commons.callers.get(&caller).cloned() else {
            return Err(EngineError::Stopped);
        };
        let key = (owner.actor, name);
        let Some(saved) = self.saved.get_mut(&key) else {
            return Err(EngineError::NotSaved { name: key.1 });
        };
        saved.last_step = self.commons.step;
        let restored = std::mem::take(&mut saved.restored);
        owner.account.note_restored(&restored);
        self.holders.note_saved(&key, &mut saved.listing);
        let kv = saved.kv.fork(owner.account.clone(), &mut self.pages);
        let opened = Opened {
            tokens: saved.tokens.clone(),
            evictions: kv.evictions().cloned(),
            steering_bytes: kv.steering_bytes(),
        };
        let seat = self.commons.queue.seat(&owner);
        let of_archive_ns = self.archive_ns(restored.n_tokens.div_ceil(PAGE_LEN));
        self.commons.queue.charge(&seat, price_ns + of_archive_ns);
        self.insert(id, caller, owner, seat, kv, AheadWindow::default());
        Ok(opened)
    }

    /// Ends what the context does and brings its tokens to the caller's. What a question or a run has put past them stays
    /// as far as it is what the caller appends: it was computed once.
    ///
    /// # Errors
    /// More is to be kept than there is, or there is no room for what is appended.
    pub(super) fn edit(&mut self, id: ContextId, edit: Edit) -> Result<(), Violation> {
        self.stop_work(id, edit.n_pulled);
        self.spares.remove(id);
        let Some(context) = self.contexts.get_mut(&id) else { return Ok(()) };
        let edited = context
            .check_edit(&edit)
            .and_then(|()| context.edit(&edit, self.limits.n_positions_max, &mut self.pages));
        if edited.is_err() {
            // A page for what was being drawn is not the guest's to pay for.
            context.kv.forget_unwritten(&mut self.pages);
        }
        edited
    }

    /// Ends what the context does; its guest has had so many tokens of a run.
    fn stop_work(&mut self, id: ContextId, n_pulled: usize) {
        self.leave_by_id(id);
        if self.is_mixed(id) {
            return self.interrupt_mixture(id, n_pulled);
        }
        let Some(context) = self.contexts.get_mut(&id) else { return };
        match context.end_work(Cause::RowsGivenUp, &mut self.stats.causes) {
            Some(Work::Run(run)) => {
                self.interrupt_run(id, run, n_pulled);
            }
            Some(Work::Joint(work)) => self.end_job(work.member.job, &EngineError::JobDisturbed),
            Some(Work::Ask(_) | Work::Verify(_) | Work::Mixed(_)) | None => {}
        }
    }

    /// Takes note of a run that ends early, of which its guest has had so many tokens; returns how many are in vain.
    pub(super) fn interrupt_run(&mut self, id: ContextId, mut run: RunWork, n_pulled: usize) -> usize {
        run.queue.note_pulled(n_pulled, false);
        let n_in_vain = run.queue.n_unread();
        let context = self.contexts.get_mut(&id).expect("it had the run");
        context.window.note_interrupted(run.n_given - n_in_vain);
        context.note(Cause::TokensGivenUp, n_in_vain as u64, &mut self.stats.causes);
        n_in_vain
    }

    fn fork(&mut self, id: ContextId, edit: Edit, child: ContextId) -> Result<(), Violation> {
        self.check_new(child)?;
        self.edit(id, edit)?;
        let Some(parent) = self.contexts.get(&id) else { return Ok(()) };
        let (caller, owner, window) = (parent.caller, parent.owner.clone(), parent.window);
        let kv = self.fork_kv(id, owner.account.clone()).expect("the parent is there");
        let parent = &self.contexts[&id];
        let seat = self.commons.queue.seat_beside(&parent.seat);
        self.insert(child, caller, owner, seat, kv, window);
        Ok(())
    }

    fn ask(&mut self, id: ContextId, edit: Edit, ask: Ask, reply: Reply) -> Result<(), Violation> {
        self.edit(id, edit)?;
        let guesses = self.guess_limits();
        let Some(context) = self.contexts.get_mut(&id) else { return Ok(()) };
        context.check_ask(&ask, self.limits.n_positions_max)?;
        if !matches!(ask, Ask::Keep) {
            self.returns.note_asked(context.owner.guest, self.commons.are_late);
        }
        let n_tokens = context.kv.tokens.len();
        let work = match ask {
            Ask::Verify { sampler, guess } => {
                let guess = match guesses.fitting(guess, &sampler, &context.kv) {
                    Ok(guess) => guess,
                    Err(error) => {
                        reply.send(Done::Answer(Err(error)));
                        return Ok(());
                    }
                };
                let work = VerifyWork::new(sampler, guess, reply, n_tokens);
                context.kv.append(work.guess(), &mut self.pages);
                Work::Verify(work)
            }
            ask => {
                let n_states_max =
                    self.limits.asks.whole_bytes / (self.limits.hidden_size * size_of::<f32>());
                let mut work = AskWork::new(ask, reply, n_tokens, context.kv.has_state(), n_states_max);
                let name = RowName { caller: context.caller, tag: work.reply.tag() };
                if !work.take_rows((id, name), &mut self.next_row, &mut self.commons.kept) {
                    work.answer(Ok(Answer::NotKept));
                    return Ok(());
                }
                if work.is_trivial() {
                    let answer = work.trivial_answer();
                    work.answer(Ok(answer));
                    return Ok(());
                }
                context.kv.append(work.continuation(), &mut self.pages);
                Work::Ask(work)
            }
        };
        let is_of_head = work.is_of_head();
        context.work = Some(work);
        if !is_of_head {
            context.rewind_to_outputs(&mut self.pages);
        }
        self.enqueue(id);
        Ok(())
    }

    fn run(
        &mut self,
        id: ContextId,
        edit: Edit,
        settings: RunSettings,
        reply: Reply,
    ) -> Result<(), Violation> {
        self.edit(id, edit)?;
        let Some(context) = self.contexts.get_mut(&id) else { return Ok(()) };
        context.check_last()?;
        let n_tokens = context.kv.tokens.len();
        let n_ahead = match settings.ahead {
            Ahead::Adaptive => context.window.n(),
            Ahead::Unbounded => usize::MAX,
        };
        let mut queue = RunReply::new(reply, n_ahead, n_tokens);
        if settings.n_tokens_max == Some(0) {
            queue.push(RunEvent::Finished(Finish::MaxTokens));
            return Ok(());
        }
        if context.kv.end_position() >= self.limits.n_positions_max {
            queue.push(RunEvent::Finished(Finish::ContextFull));
            return Ok(());
        }
        context.kv.rewind(n_tokens - 1, &mut self.pages);
        context.kv.forget_shared_unwritten(&mut self.pages);
        context.work = Some(Work::Run(RunWork::new(settings, queue, n_tokens)));
        self.enqueue(id);
        Ok(())
    }

    fn save(&mut self, id: ContextId, name: String, tokens: Arc<History>) -> Result<(), EngineError> {
        let Some(context) = self.contexts.get_mut(&id) else { return Err(EngineError::Stopped) };
        let owner = Owner { account: context.owner.account.user().clone(), ..context.owner.clone() };
        let key = (owner.actor, name);
        let mut footprint = Footprint::new(&owner.account, 0)?;
        let of_evictions = context.kv.evictions().map_or(0, Evictions::n_bytes_held);
        footprint.set_with(context.kv.n_kept(), of_evictions + context.kv.steering_bytes())?;
        if let Some(mut earlier) = self.saved.remove(&key) {
            earlier.kv.forget(&mut self.pages);
            self.holders.forget(Victim::Saved(key.clone()), &earlier.owner, earlier.listing);
        } else {
            owner.account.charge(Resource::Contexts, 1)?;
        }
        let kv = self.fork_kv(id, owner.account.clone()).expect("the context is there");
        let mut listing = Listing::default();
        self.holders.note_saved(&key, &mut listing);
        let (last_step, version) = (self.commons.step, self.next_version());
        if self.settings.is_archived {
            self.newly_saved = Some(key.clone());
            // Its pages are read.
            let context = &self.contexts[&id];
            self.commons.queue.charge(&context.seat, self.archive_ns(kv.n_to_keep().0));
        }
        let saved = Saved {
            kv,
            tokens,
            _footprint: footprint,
            owner,
            last_step,
            listing,
            version,
            restored: Restored::default(),
        };
        self.saved.insert(key, saved);
        Ok(())
    }

    pub(super) fn forget(&mut self, actor: ActorId, name: String) -> Result<(), EngineError> {
        let key = (actor, name);
        let Some(mut saved) = self.saved.remove(&key) else {
            return Err(EngineError::NotSaved { name: key.1 });
        };
        saved.kv.forget(&mut self.pages);
        self.holders.forget(Victim::Saved(key), &saved.owner, saved.listing);
        saved.owner.account.release(Resource::Contexts, 1);
        Ok(())
    }

    fn release(&mut self, id: ContextId, n_pulled: usize) {
        self.stop_work(id, n_pulled);
        self.spares.remove(id);
        if let Some(mut context) = self.contexts.remove(&id) {
            context.kv.forget(&mut self.pages);
            let ContextState { seat, slot, listing, owner, .. } = *context;
            self.holders.forget(Victim::Context(id), &owner, listing);
            self.commons.queue.vacate(seat);
            self.slots.give(slot);
        }
    }
}

impl ContextState {
    /// Ends the context's work with an error.
    pub(super) fn fail(&mut self, error: EngineError, pages: &mut PageTable, causes: &mut Causes) {
        if let Some(work) = self.end_work(Cause::RowsFailed, causes) {
            self.kv.truncate(work.n_base(self.kv.tokens.len()), pages);
            work.fail(error);
        }
    }
}
