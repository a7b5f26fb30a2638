//! Mixtures of up to four contexts, pulled token by token.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::hash_backend::{VOCAB, fails, mixed_drawn};
use super::{Model, N_POSITIONS, World};
use crate::batch::{Batch, Candidate, Drawn, Input, OutputKind};
use crate::command::{Ahead, ContextId, MaskSource, Operation, RunSettings};
use crate::error::EngineError;
use crate::run::{Finish, PullReport, RunEvent, RunQueue};
use crate::sampling::Sampler;
use crate::sampling::program::{Definition, Program, PutOn, RowShape};

/// Contexts of a mixture beside the first, at most.
const N_OTHERS_MAX: usize = 3;

/// A mixture that its caller pulls from.
pub(super) struct Mixing {
    members: Vec<ContextId>,
    queue: RunQueue,
    seed: u64,
    n_left: usize,
    /// Whether it has come to its end, or something else was done with a member.
    is_over: bool,
}

/// What became of mixtures.
#[derive(Debug, Default)]
pub(super) struct Seen {
    n_tokens: usize,
    n_finished: usize,
    n_interrupted: usize,
    n_too_large: usize,
    n_without_pages: usize,
    n_over_budget: usize,
    n_faults: usize,
    n_ahead: usize,
}

impl Seen {
    pub(super) fn add(&mut self, other: &Self) {
        self.n_tokens += other.n_tokens;
        self.n_finished += other.n_finished;
        self.n_interrupted += other.n_interrupted;
        self.n_too_large += other.n_too_large;
        self.n_without_pages += other.n_without_pages;
        self.n_over_budget += other.n_over_budget;
        self.n_faults += other.n_faults;
        self.n_ahead += other.n_ahead;
    }

    /// Tests are worth nothing if they never come here.
    pub(super) fn check(&self) {
        let Self { n_tokens, n_finished, n_interrupted, n_too_large, n_over_budget, n_faults, .. } = *self;
        assert!(n_tokens > 600 && n_finished > 100 && n_interrupted > 200, "{self:?}");
        assert!(n_too_large > 20 && n_over_budget > 10 && n_faults > 5, "{self:?}");
        assert!(self.n_ahead > 200 && self.n_without_pages > 10, "{self:?}");
    }
}

/// A sampler with a program that sees another member.
pub(super) fn by_program(seed: u64) -> Sampler {
    let definition = Definition::build(|b| (b.logits() + b.member(0)).argmax());
    let shape = RowShape { vocab_size: VOCAB as usize, n_positions: N_POSITIONS };
    let program = Program::new(definition, shape).expect("it is in order");
    Sampler { seed, program: Some(Box::new(PutOn::new(Arc::new(program)))), ..Sampler::greedy() }
}

impl Model {
    /// Ends the mixture that the context is part of; returns how many of its tokens were pulled.
    pub(super) fn end_mixing(&mut self, seen: &mut Seen) -> Option<usize> {
        let mixing = self.mixed.take()?;
        let mut mixing = mixing.borrow_mut();
        seen.n_interrupted += usize::from(!mixing.is_over);
        mixing.is_over = true;
        Some(mixing.queue.n_pulled())
    }
}

impl World {
    fn model_mut(&mut self, id: ContextId) -> &mut Model {
        &mut self.contexts.iter_mut().find(|(other, _)| *other == id).expect("it is there").1
    }

    /// Pulls a token of the mixture that a context is the first of; of a new one if there is none.
    pub(super) fn pull_mixed(&mut self, idx: usize) {
        let (id, model) = &self.contexts[idx];
        let id = *id;
        let found = model.mixed.clone();
        let goes_on = |it: &Rc<RefCell<Mixing>>| !it.borrow().is_over && it.borrow().members[0] == id;
        let mixing = match found.filter(goes_on) {
            Some(mixing) => mixing,
            None => match self.mix(idx) {
                Some(mixing) => mixing,
                None => return,
            },
        };
        let mut mixing = mixing.borrow_mut();
        let event = mixing.queue.try_pull();
        let progress = if event.is_some() { mixing.queue.progress() } else { mixing.queue.wait() };
        let (tag, is_waiting) = (mixing.queue.tag(), event.is_none());
        match event {
            Some(RunEvent::Token(Drawn { candidate, .. })) => {
                assert_eq!(candidate, self.expected(&mixing), "as if decoded step by step");
                assert!(mixing.n_left > 0);
                mixing.n_left -= 1;
                for &member in &mixing.members {
                    let model = self.model_mut(member);
                    model.tokens.push(candidate.token);
                    model.n_synced += 1;
                }
                self.n_mixed.n_tokens += 1;
            }
            Some(end) => {
                mixing.is_over = true;
                self.take_end(&mixing, end);
            }
            None => {}
        }
        if let Some(PullReport { n_tokens, is_waiting }) = progress {
            self.apply(Operation::Pulled { id, tag, n_tokens, is_waiting });
        }
        let is_served = mixing.is_over || self.scheduler.has_work() || !self.under_way.is_empty();
        assert!(!is_waiting || is_served, "the engine and a guest wait for each other");
    }

    fn take_end(&mut self, mixing: &Mixing, end: RunEvent) {
        let is_full = |world: &mut Self, id| world.model_mut(id).n_free() == 0;
        match end {
            RunEvent::Finished(Finish::Stop) => {
                assert_eq!(self.model_mut(mixing.members[0]).tokens.last(), Some(&3));
            }
            RunEvent::Finished(Finish::MaxTokens) => assert_eq!(mixing.n_left, 0),
            RunEvent::Finished(Finish::ContextFull) => {
                assert!(mixing.members.iter().any(|&id| is_full(self, id)));
            }
            RunEvent::Failed(EngineError::Budget(_)) => self.n_mixed.n_over_budget += 1,
            RunEvent::Failed(EngineError::NoPages { n_needed, n_pages }) => {
                assert!(n_needed > n_pages);
                self.n_mixed.n_without_pages += 1;
            }
            RunEvent::Failed(EngineError::JobTooLarge { n_rows, n_rows_max }) => {
                assert!(n_rows == mixing.members.len() && n_rows > n_rows_max);
                self.n_mixed.n_too_large += 1;
            }
            RunEvent::Failed(EngineError::Output(_)) => {
                let first = self.model_mut(mixing.members[0]);
                assert!(fails(first.chain().last, mixing.seed));
                self.n_mixed.n_faults += 1;
            }
            // In the worlds where steps fail.
            RunEvent::Failed(EngineError::Step(_)) => {}
            other => panic!("{other:?}"),
        }
        self.n_mixed.n_finished += usize::from(matches!(end, RunEvent::Finished(_)));
    }

    fn expected(&self, mixing: &Mixing) -> Candidate {
        let tokens_of = |id: &ContextId| {
            let (_, model) = self.contexts.iter().find(|(other, _)| other == id).expect("it is there");
            model.chain().last
        };
        let prefixes: Vec<u64> = mixing.members.iter().map(tokens_of).collect();
        mixed_drawn(&prefixes, mixing.seed)
    }

    /// Begins a mixture of this context and others of its guest's, if there are some with a token.
    fn mix(&mut self, idx: usize) -> Option<Rc<RefCell<Mixing>>> {
        let (seed, n_left, n_others) =
            (self.random.next(), 1 + self.random.below(30), 1 + self.random.below(N_OTHERS_MAX));
        let caller = self.contexts[idx].1.caller;
        let is_other = |&other: &usize| {
            let model = &self.contexts[other].1;
            other != idx && model.caller == caller && model.is_free() && !model.tokens.is_empty()
        };
        let others: Vec<usize> = (0..self.contexts.len()).filter(is_other).take(n_others).collect();
        if others.is_empty() {
            return None;
        }
        let queue = self.guests.queue(caller);
        let tag = queue.tag();
        let ends = [idx].into_iter().chain(others);
        let members: Vec<_> = ends
            .map(|idx| {
                let (id, model) = &mut self.contexts[idx];
                (*id, Self::edit(model, &mut self.n_mixed))
            })
            .collect();
        let settings = RunSettings {
            sampler: Arc::new(by_program(seed)),
            stop_tokens: Arc::new([3]),
            n_tokens_max: Some(n_left),
            ahead: if seed.is_multiple_of(4) { Ahead::Unbounded } else { Ahead::Adaptive },
            masks: MaskSource::Sampler,
        };
        let ids: Vec<ContextId> = members.iter().map(|&(id, _)| id).collect();
        let mixing = Mixing { members: ids.clone(), queue, seed, n_left, is_over: false };
        let mixing = Rc::new(RefCell::new(mixing));
        for id in ids {
            self.model_mut(id).mixed = Some(mixing.clone());
        }
        self.apply(Operation::Mix { members, settings, tag });
        Some(mixing)
    }

    /// All rows of a mixture's draw are in one step, one behind the other.
    pub(super) fn check_mixtures(batch: &Batch<'_>, seen: &mut Seen) {
        let mut n_others_left = 0;
        for row in &batch.rows {
            let is_other = row.outputs.iter().any(|asked| matches!(asked.kind, OutputKind::Mixed));
            assert_eq!(is_other, n_others_left > 0, "the others come behind the first");
            if is_other {
                n_others_left -= 1;
            }
            for asked in &row.outputs {
                if let OutputKind::Program { others, .. } = asked.kind {
                    let n_others = others.n_rows();
                    n_others_left = n_others;
                    seen.n_ahead += usize::from(row.input != Input::Known);
                }
            }
        }
        assert_eq!(n_others_left, 0);
    }
}
