//! What crosses from a process of guests to an engine.
//!
//! Guests that break out of their sandbox run code of their own in such a process, and may send any bytes. Here each operation
//! is held against what its caller may name and against what the guest's side of this crate lets through, before the engine's
//! thread sees it. What only that thread knows (which tokens a context has) it checks by itself, with one comparison each
//! (`scheduler/fits`). A sender of anything else is no guest of ours: its process is ended.

mod contents;
mod numbers;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};

use self::numbers::Numbers;
use crate::backend::Limits;
use crate::command::{Ask, ContextId, ModelId, Operation};
use crate::completion::CallerId;
use crate::kept::RowName;
use crate::violation::Violation;

/// The most rows that a process has names for.
const N_ROWS_MAX: usize = 1 << 16;

/// What operations on a model are held against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelFacts {
    vocab_size: usize,
    n_positions_max: usize,
    n_layers: usize,
    hidden_size: usize,
    n_stretches_max: usize,
    given_bytes: usize,
}

impl ModelFacts {
    /// Those of a model with this backend.
    pub(crate) fn of(limits: &Limits) -> Self {
        Self {
            vocab_size: limits.vocab_size,
            n_positions_max: limits.n_positions_max,
            n_layers: limits.n_layers,
            hidden_size: limits.hidden_size,
            n_stretches_max: limits.n_stretches_max,
            given_bytes: limits.asks.given_bytes,
        }
    }
}

/// What a process of guests may name at one engine.
#[derive(Debug)]
pub(crate) struct Customs {
    range: Range<u64>,
    numbers: FxHashMap<ModelId, Numbers>,
    callers: FxHashSet<CallerId>,
    contexts: FxHashMap<ContextId, CallerId>,
    /// The rows that are kept, as far as they were asked for, with the entries of each. Their names are the senders' choice, which
    /// a tree does not mind.
    rows: BTreeMap<(CallerId, u64), usize>,
}

impl Customs {
    /// For a process whose contexts have these numbers, of each model, and those of no other process.
    pub(crate) fn new(numbers: Range<u64>) -> Self {
        Self {
            range: numbers,
            numbers: FxHashMap::default(),
            callers: FxHashSet::default(),
            contexts: FxHashMap::default(),
            rows: BTreeMap::new(),
        }
    }

    /// A caller that was opened for a guest of the process, which may have so many at once.
    ///
    /// # Errors
    /// It has as many.
    pub(crate) fn enter(&mut self, caller: CallerId, limit: usize) -> Result<(), Violation> {
        if self.callers.len() >= limit {
            return Err(Violation::TooManyCallers { limit });
        }
        self.callers.insert(caller);
        Ok(())
    }

    /// A caller is gone; returns what has to be posted for what it still had.
    pub(crate) fn leave(&mut self, caller: CallerId) -> Vec<Operation> {
        self.callers.remove(&caller);
        let rows: Vec<(CallerId, u64)> =
            self.rows.range((caller, 0)..=(caller, u64::MAX)).map(|(&name, _)| name).collect();
        let mut left = Vec::with_capacity(rows.len());
        for name in rows {
            self.rows.remove(&name);
            left.push(Operation::LetGo { row: RowName::of(name) });
        }
        let mut own: Vec<ContextId> =
            self.contexts.iter().filter(|(_, of)| **of == caller).map(|(&id, _)| id).collect();
        own.sort_unstable();
        for id in own {
            self.contexts.remove(&id);
            left.push(Operation::Release { id, n_pulled: 0 });
        }
        left
    }

    /// Whether a caller has entered and not left.
    pub(crate) fn has(&self, caller: CallerId) -> bool {
        self.callers.contains(&caller)
    }

    /// Contexts that were made and not let go of.
    pub(crate) fn n_contexts(&self) -> usize {
        self.contexts.len()
    }

    /// Checks one operation, in the order in which they are posted. `None` where there is nothing to post: what it is about is
    /// gone, as may be for what is said of a run or a question. `model` knows all models that the process was told of, but for those
    /// of which [`Self::check_gone`] is asked.
    ///
    /// # Errors
    /// No guest of ours posts it.
    pub(crate) fn check(
        &mut self,
        from: CallerId,
        operation: Operation,
        model: impl Fn(ModelId) -> Option<ModelFacts>,
    ) -> Result<Option<Operation>, Violation> {
        let Some(operation) = self.check_sender(from, operation)? else { return Ok(None) };
        if matches!(operation, Operation::LetGo { .. }) {
            return Ok(Some(operation));
        }
        let id = operation.model();
        let Some(facts) = model(id) else {
            return Err(Violation::NoSuchModel { place: id.place, generation: id.generation });
        };
        self.check_names(from, &operation, Some(&facts))?;
        contents::check(&operation, &facts)?;
        self.note(from, &operation, Some(&facts));
        Ok(Some(operation))
    }

    /// As [`Self::check`], of an operation on a model that its engine does not have any more: it is answered without a look at what
    /// is in it, and nothing is known that it could be held against.
    ///
    /// # Errors
    /// No guest of ours posts it.
    pub(crate) fn check_gone(
        &mut self,
        from: CallerId,
        operation: Operation,
    ) -> Result<Option<Operation>, Violation> {
        let Some(operation) = self.check_sender(from, operation)? else { return Ok(None) };
        if !matches!(operation, Operation::LetGo { .. }) {
            self.check_names(from, &operation, None)?;
            self.note(from, &operation, None);
        }
        Ok(Some(operation))
    }

    /// Which numbers contexts of models have had that are gone is of no use any more.
    pub(crate) fn forget_numbers(&mut self, is_there: impl Fn(ModelId) -> bool) {
        self.numbers.retain(|&model, _| is_there(model));
    }

    fn check_sender(&mut self, from: CallerId, operation: Operation) -> Result<Option<Operation>, Violation> {
        if self.comes_late(from, &operation) {
            return Ok(None);
        }
        if !self.has(from) {
            return Err(Violation::Stranger { caller: from.0 });
        }
        if let Operation::LetGo { row } = operation {
            in_its_name(from, row.caller)?;
            return Ok(self.rows.remove(&row.key()).map(|_| operation));
        }
        Ok(Some(operation))
    }

    /// Whether it says something of a context that is not the sender's, as it may once the context was let go of: a question
    /// outlives its context, and masks are made on other threads.
    fn comes_late(&self, from: CallerId, operation: &Operation) -> bool {
        match operation {
            Operation::Cancel { id, .. }
            | Operation::Pulled { id, .. }
            | Operation::Mask { id, .. }
            | Operation::EndRun { id, .. } => self.contexts.get(id) != Some(&from),
            Operation::LetGo { row } => row.caller == from && !self.has(from),
            _ => false,
        }
    }

    fn check_own(&self, from: CallerId, id: ContextId) -> Result<(), Violation> {
        match self.contexts.get(&id) {
            Some(&owner) if owner == from => Ok(()),
            _ => Err(Violation::NotItsOwn { number: id.number }),
        }
    }

    /// Checks a context that is to be made, of a model that is there or of one that is gone.
    fn check_new(&self, id: ContextId, facts: Option<&ModelFacts>) -> Result<(), Violation> {
        let refuse = |expected| Err(Violation::Number { number: id.number, expected });
        match (self.numbers.get(&id.model), facts) {
            (Some(numbers), Some(_)) => numbers.check(id.number),
            (None, Some(_)) => Numbers::new(self.range.clone()).check(id.number),
            (_, None) if !self.range.contains(&id.number) => refuse("one of the process's own"),
            (_, None) if self.contexts.contains_key(&id) => refuse("one that was not used before"),
            (_, None) => Ok(()),
        }
    }

    /// Checks contexts of one operation: they are the sender's, of one model, and each is there once.
    fn check_all<'a>(
        &self,
        from: CallerId,
        model: ModelId,
        ids: impl IntoIterator<Item = &'a ContextId>,
    ) -> Result<(), Violation> {
        let mut seen = FxHashSet::default();
        for &id in ids {
            self.check_own(from, id)?;
            if id.model != model {
                return Err(Violation::SeveralModels);
            }
            if !seen.insert(id) {
                return Err(Violation::Twice { number: id.number });
            }
        }
        match seen.is_empty() {
            true => Err(Violation::Count { what: "contexts", n: 0, expected: "at least 1".to_owned() }),
            false => Ok(()),
        }
    }

    /// Checks whom and what an operation names.
    fn check_names(
        &self,
        from: CallerId,
        operation: &Operation,
        facts: Option<&ModelFacts>,
    ) -> Result<(), Violation> {
        match operation {
            Operation::Create { id, caller } | Operation::Open { id, caller, .. } => {
                in_its_name(from, *caller)?;
                self.check_new(*id, facts)
            }
            Operation::Fork { id, child, .. } => {
                self.check_own(from, *id)?;
                if child.model != id.model {
                    return Err(Violation::SeveralModels);
                }
                self.check_new(*child, facts)
            }
            Operation::Ask { id, ask, tag, .. } => {
                self.check_own(from, *id)?;
                match ask {
                    Ask::Keep => self.check_new_row(RowName { caller: from, tag: *tag }),
                    Ask::Mix { rows, .. } => rows.iter().try_for_each(|row| match facts {
                        Some(facts) => self.check_row(from, row, facts.vocab_size),
                        None => in_its_name(from, row.caller),
                    }),
                    _ => Ok(()),
                }
            }
            Operation::Edit { id, .. }
            | Operation::Evict { id, .. }
            | Operation::Steer { id, .. }
            | Operation::Cancel { id, .. }
            | Operation::Run { id, .. }
            | Operation::Pulled { id, .. }
            | Operation::Mask { id, .. }
            | Operation::EndRun { id, .. }
            | Operation::Save { id, .. } => self.check_own(from, *id),
            // A context that was given up before it was made is let go of all the same.
            Operation::Release { id, .. } => {
                self.check_own(from, *id).or_else(|_| self.check_new(*id, facts))
            }
            Operation::DrawTogether { members, .. } | Operation::Mix { members, .. } => {
                self.check_all(from, operation.model(), members.iter().map(|(id, _)| id))
            }
            Operation::SearchBeams(asked) => {
                let all = std::iter::once(&asked.base).chain(&asked.contexts);
                self.check_all(from, asked.base.model, all)
            }
            Operation::Forget { caller, .. } => in_its_name(from, *caller),
            Operation::LetGo { row } => in_its_name(from, row.caller),
            // They tell of all users.
            Operation::Stats { .. } => Err(Violation::NotForGuests),
        }
    }

    fn check_new_row(&self, name: RowName) -> Result<(), Violation> {
        if self.rows.contains_key(&name.key()) {
            return Err(Violation::RowTwice);
        }
        let n = self.rows.len();
        if n < N_ROWS_MAX {
            return Ok(());
        }
        Err(Violation::Count { what: "kept rows", n: n + 1, expected: format!("at most {N_ROWS_MAX}") })
    }

    /// Checks a row that a draw over so many tokens takes. One that is not there the engine misses too.
    fn check_row(&self, from: CallerId, name: &RowName, vocab_size: usize) -> Result<(), Violation> {
        in_its_name(from, name.caller)?;
        match self.rows.get(&name.key()) {
            Some(&n_tokens) if n_tokens != vocab_size => {
                Err(Violation::RowOfAnother { n_tokens, vocab_size })
            }
            _ => Ok(()),
        }
    }

    /// Takes note of what an operation that is posted makes and lets go of. A model that is gone keeps no rows, and takes no numbers.
    fn note(&mut self, from: CallerId, operation: &Operation, facts: Option<&ModelFacts>) {
        let made = match (operation, facts) {
            (Operation::Create { id, .. } | Operation::Open { id, .. }, _) => *id,
            (Operation::Fork { child, .. }, _) => *child,
            (Operation::Release { id, .. }, _) => {
                // One that was never made is not made any more.
                if self.contexts.remove(id).is_none() && facts.is_some() {
                    self.take_number(*id);
                }
                return;
            }
            (Operation::Ask { ask: Ask::Keep, tag, .. }, Some(facts)) => {
                self.rows.insert(RowName { caller: from, tag: *tag }.key(), facts.vocab_size);
                return;
            }
            _ => return,
        };
        if facts.is_some() {
            self.take_number(made);
        }
        self.contexts.insert(made, from);
    }

    fn take_number(&mut self, id: ContextId) {
        let range = &self.range;
        self.numbers.entry(id.model).or_insert_with(|| Numbers::new(range.clone())).take(id.number);
    }
}

fn in_its_name(from: CallerId, named: CallerId) -> Result<(), Violation> {
    if from == named { Ok(()) } else { Err(Violation::InAnothersName { from: from.0, named: named.0 }) }
}
