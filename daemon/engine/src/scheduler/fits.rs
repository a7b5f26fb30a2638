//! Whether an operation fits what its context holds.
//!
//! The guest's side knows what its contexts hold, and asks for nothing else. A process of guests that runs other code may: each
//! such operation is not carried out, and its sender is told of, whose process is then ended. Everything is left as it was but
//! for the work of the contexts, which has ended, and where an edit came with it.

use super::{ContextState, Scheduler};
use crate::command::{Ask, ContextId, Edit, N_ATTENTION_TOKENS_MAX, Operation, Pooling};
use crate::completion::{CallerId, Done, Tag};
use crate::error::EngineError;
use crate::history::History;
use crate::kv::PageTable;
use crate::steering::SteeringError;
use crate::violation::Violation;

/// Whose operation it is: a caller's, or that of whoever has the context.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sender {
    Caller(CallerId),
    Of(ContextId),
}

impl Sender {
    pub(super) fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Create { caller, .. }
            | Operation::Open { caller, .. }
            | Operation::Forget { caller, .. }
            | Operation::Stats { caller, .. } => Self::Caller(*caller),
            Operation::LetGo { row } => Self::Caller(row.caller),
            Operation::Edit { id, .. }
            | Operation::Evict { id, .. }
            | Operation::Steer { id, .. }
            | Operation::Fork { id, .. }
            | Operation::Ask { id, .. }
            | Operation::Cancel { id, .. }
            | Operation::Run { id, .. }
            | Operation::Pulled { id, .. }
            | Operation::Mask { id, .. }
            | Operation::EndRun { id, .. }
            | Operation::Save { id, .. }
            | Operation::Release { id, .. } => Self::Of(*id),
            Operation::DrawTogether { members, .. } | Operation::Mix { members, .. } => {
                Self::Of(members.first().map_or(ContextId::LEAST, |&(id, _)| id))
            }
            Operation::SearchBeams(asked) => Self::Of(asked.base),
        }
    }
}

impl Scheduler {
    /// Says that a caller's operation was none that a guest of ours posts.
    pub(super) fn accuse(&self, sender: Sender, violation: Violation) {
        let caller = match sender {
            Sender::Caller(caller) => Some(caller),
            Sender::Of(id) => self.contexts.get(&id).map(|context| context.caller),
        };
        if let Some(caller) = caller {
            self.outbox.to(caller, Tag::new(0, 0)).send(Done::Expelled(violation));
        }
    }

    /// Checks that a context may be made.
    pub(super) fn check_new(&self, id: ContextId) -> Result<(), Violation> {
        if self.contexts.contains_key(&id) { Err(Violation::Exists { number: id.number }) } else { Ok(()) }
    }

    /// Checks that each of these contexts, as far as it is there, has a token after which something can be drawn.
    pub(super) fn check_members(&self, ids: &[ContextId]) -> Result<(), Violation> {
        let mut there = ids.iter().filter_map(|id| self.contexts.get(id));
        there.try_for_each(|context| context.check_last())
    }
}

impl ContextState {
    /// Brings the tokens to the caller's, as far as it keeps some that are there and has room for the others.
    pub(super) fn edit(
        &mut self,
        edit: &Edit,
        n_positions_max: usize,
        pages: &mut PageTable,
    ) -> Result<(), Violation> {
        self.kv.edit(edit.n_kept, &edit.appended, pages);
        let n_positions = self.kv.end_position();
        if n_positions > n_positions_max || u32::try_from(self.kv.tokens.len()).is_err() {
            self.kv.edit(edit.n_kept, &[], pages);
            return Err(
                EngineError::ContextFull { n_tokens: n_positions, n_positions: n_positions_max }.into()
            );
        }
        Ok(())
    }

    pub(super) fn check_edit(&self, edit: &Edit) -> Result<(), Violation> {
        let (n_kept, n_tokens) = (edit.n_kept, self.kv.n_kept());
        if n_kept > n_tokens { Err(Violation::KeepsMore { n_kept, n_tokens }) } else { Ok(()) }
    }

    /// Checks that there is a last token.
    pub(super) fn check_last(&self) -> Result<(), Violation> {
        if self.kv.tokens.len() == 0 { Err(EngineError::EmptyContext.into()) } else { Ok(()) }
    }

    /// Checks that there are positions for so many tokens more.
    pub(super) fn check_room(&self, n_more: usize, n_positions_max: usize) -> Result<(), Violation> {
        let n_tokens = self.kv.end_position().saturating_add(n_more);
        match n_tokens > n_positions_max {
            true => Err(EngineError::ContextFull { n_tokens, n_positions: n_positions_max }.into()),
            false => Ok(()),
        }
    }

    pub(super) fn check_ask(&self, ask: &Ask, n_positions_max: usize) -> Result<(), Violation> {
        if let Ask::Prefill = ask {
            return Ok(());
        }
        self.check_last()?;
        match ask {
            Ask::Sample(_) | Ask::Mix { .. } => self.check_room(1, n_positions_max),
            // The draws after the guess come to as much.
            Ask::Verify { guess, .. } => self.check_room(guess.tokens().len() + 1, n_positions_max),
            Ask::Continuation(tokens) | Ask::Tops { continuation: tokens, .. } => {
                self.check_room(tokens.len(), n_positions_max)
            }
            Ask::Hidden { pooling: Pooling::MeanFrom(first), .. } => self.check_mean(*first),
            Ask::Attention { .. } if self.kv.n_kept() > N_ATTENTION_TOKENS_MAX => {
                let (n_tokens, n_tokens_max) = (self.kv.n_kept(), N_ATTENTION_TOKENS_MAX);
                Err(EngineError::AttentionTooLong { n_tokens, n_tokens_max }.into())
            }
            _ => Ok(()),
        }
    }

    fn check_mean(&self, first: usize) -> Result<(), Violation> {
        let (length, n_evicted) = (self.kv.n_kept(), self.kv.n_evicted());
        if first >= length {
            return Err(EngineError::NotThere { start: first, end: length, length }.into());
        }
        if n_evicted > 0 { Err(EngineError::LooksAtEvicted { n_evicted }.into()) } else { Ok(()) }
    }

    pub(super) fn check_steering(&self, from: usize) -> Result<(), Violation> {
        let (length, n_evicted) = (self.kv.n_kept(), self.kv.n_evicted());
        if self.kv.is_holed() {
            return Err(SteeringError::Evicted { n_evicted }.into());
        }
        if from > length { Err(SteeringError::PastEnd { from, length }.into()) } else { Ok(()) }
    }

    pub(super) fn check_saved(&self, tokens: &History, pages: &PageTable) -> Result<(), Violation> {
        match self.kv.are_tokens(tokens, pages) {
            true => Ok(()),
            false => Err(Violation::OtherTokens),
        }
    }
}
