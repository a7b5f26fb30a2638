//! Operations of honest guests, sent again by others in the names of their own contexts, with something changed.

use std::sync::Arc;

use super::forged::Forger;
use crate::command::{Ask, Operation};
use crate::completion::CallerId;
use crate::history::History;
use crate::port::Port;

impl Forger {
    /// The same operation about a context of this caller's.
    pub(super) fn replay(&mut self, from: CallerId, operation: Operation) -> Operation {
        let mut operation = operation;
        self.rename(from, &mut operation);
        if self.random.below(3) == 0 {
            self.change(&mut operation);
        }
        operation
    }

    /// Puts its own contexts, with as many tokens as they have, in the places of others.
    fn rename(&mut self, from: CallerId, operation: &mut Operation) {
        match operation {
            Operation::Create { id, caller } => (*id, *caller) = (self.new_id(), from),
            Operation::Open { id, caller, tag, .. } => {
                (*id, *caller, *tag) = (self.new_id(), from, self.tag());
            }
            Operation::Edit { id, edit }
            | Operation::Evict { id, edit, .. }
            | Operation::Steer { id, edit, .. } => {
                *id = self.id(from);
                edit.n_kept = self.length(*id);
            }
            Operation::Fork { id, edit, child } => {
                *id = self.id(from);
                (edit.n_kept, *child) = (self.length(*id), self.new_id());
            }
            Operation::Ask { id, edit, tag, .. } | Operation::Run { id, edit, tag, .. } => {
                (*id, *tag) = (self.id(from), self.tag());
                edit.n_kept = self.length(*id);
            }
            Operation::DrawTogether { members, tag, .. } | Operation::Mix { members, tag, .. } => {
                *tag = self.tag();
                for (id, edit) in members {
                    *id = self.id(from);
                    edit.n_kept = self.length(*id);
                }
            }
            Operation::SearchBeams(asked) => {
                (asked.base, asked.tag) = (self.id(from), self.tag());
                asked.edit.n_kept = self.length(asked.base);
                let own = self.own.iter().filter(|(id, owner, _)| *owner == from && *id != asked.base);
                let mut own: Vec<_> = own.map(|&(id, ..)| id).collect();
                let n_beams = asked.contexts.len();
                while own.len() > n_beams {
                    own.swap_remove(self.random.below(own.len()));
                }
                while own.len() < n_beams {
                    own.push(self.new_id());
                }
                asked.contexts = own;
            }
            Operation::Cancel { id, tag }
            | Operation::Pulled { id, tag, .. }
            | Operation::Mask { id, tag, .. }
            | Operation::EndRun { id, tag, .. } => (*id, *tag) = (self.id(from), self.tag()),
            Operation::Save { id, edit, tag, .. } => {
                (*id, *tag) = (self.id(from), self.tag());
                edit.n_kept = self.length(*id);
            }
            Operation::Forget { caller, tag, .. } | Operation::Stats { caller, tag, .. } => {
                (*caller, *tag) = (from, self.tag());
            }
            Operation::LetGo { row } => row.caller = from,
            Operation::Release { id, .. } => *id = self.id(from),
        }
        if let Operation::Mask { id, position, .. } | Operation::EndRun { id, position, .. } = operation {
            *position = self.length(*id);
        }
    }

    /// Changes a number, a token or a list.
    fn change(&mut self, operation: &mut Operation) {
        match operation {
            Operation::Evict { start, end, .. } => match self.random.below(3) {
                0 => *start = self.number(*start),
                1 => *end = self.number(*end),
                _ => std::mem::swap(start, end),
            },
            Operation::Steer { steering, from, .. } => match self.random.below(2) {
                0 => *steering = self.steering(),
                _ => *from = self.number(*from),
            },
            Operation::Ask { ask, .. } => match ask {
                Ask::Continuation(tokens) | Ask::Scores(tokens) | Ask::Tops { continuation: tokens, .. } => {
                    tokens.push(self.token());
                }
                Ask::Sample(sampler) | Ask::Verify { sampler, .. } => *sampler = self.sampler(),
                _ => {}
            },
            Operation::DrawTogether { members, .. } | Operation::Mix { members, .. } => {
                match self.random.below(3) {
                    0 => members.clear(),
                    1 => members.extend(members.first().cloned()),
                    _ => members.iter_mut().for_each(|(_, edit)| edit.n_kept = self.number(edit.n_kept)),
                }
            }
            Operation::SearchBeams(asked) => match self.random.below(4) {
                0 => asked.contexts.extend(asked.contexts.first().copied()),
                1 => asked.contexts.truncate(1),
                2 => asked.masks.push(self.mask()),
                _ => asked.n_steps = Some(self.number(1)),
            },
            Operation::Run { settings, .. } => settings.sampler = self.sampler(),
            Operation::Pulled { n_tokens, .. } => *n_tokens = self.number(*n_tokens),
            Operation::Mask { position, turn, mask, expected, .. } => match self.random.below(4) {
                0 => *position = self.number(*position),
                1 => *turn = turn.wrapping_add(1),
                2 => *mask = self.mask(),
                _ => *expected = Some(self.token()),
            },
            Operation::EndRun { position, .. } => *position = self.number(*position),
            Operation::Save { tokens, .. } => {
                let mut changed: Vec<_> = tokens.iter().copied().collect();
                changed.push(self.token());
                *tokens = Arc::new(History::from(changed));
            }
            Operation::Edit { edit, .. } | Operation::Fork { edit, .. } => {
                edit.n_kept = self.number(edit.n_kept);
            }
            Operation::Release { n_pulled, .. } => *n_pulled = self.number(*n_pulled),
            Operation::Create { .. }
            | Operation::Open { .. }
            | Operation::Cancel { .. }
            | Operation::Forget { .. }
            | Operation::Stats { .. }
            | Operation::LetGo { .. } => {}
        }
    }

    /// The operation after some of its bytes were changed on its way; none where that is no operation any more.
    pub(super) fn garble(&mut self, operation: Operation) -> Option<Operation> {
        let mut bytes = Port::bytes_of(&operation);
        for _ in 0..1 + self.random.below(3) {
            let (idx, bit) = (self.random.below(bytes.len()), self.random.below(12));
            bytes[idx] = match bit {
                8 => 0,
                9 => 0x7f,
                10 => bytes[idx].wrapping_add(1),
                11 => bytes[idx].wrapping_sub(1),
                bit => bytes[idx] ^ 1 << bit,
            };
        }
        Port::value_of(&bytes)
    }
}
