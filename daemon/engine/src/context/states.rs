//! What programs left at the tokens that they drew.

use std::sync::Arc;

use crate::sampling::Sampler;
use crate::sampling::program::{DrawState, ProgramId};
use crate::segments::Segments;

/// Entries that forks share as a whole.
const N_SEGMENT_ENTRIES: usize = 64;

/// The state after each token that a program with state drew. A draw goes on from the last one, if the same program left it;
/// tokens that were appended carry it on.
#[derive(Debug, Default)]
pub(super) struct States {
    entries: Segments<Entry, N_SEGMENT_ENTRIES>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Tokens of the context with the one that was drawn.
    n_tokens: usize,
    program: ProgramId,
    state: DrawState,
}

/// What the draws of a program leave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaves {
    pub(super) n_reports: usize,
    /// The program, if its draws depend on where the one before them ended.
    carried_on: Option<ProgramId>,
}

impl Leaves {
    /// Nothing, where the chain draws.
    pub(super) fn of(sampler: &Sampler) -> Option<Self> {
        let program = &sampler.program.as_ref()?.program;
        let carried_on = program.carries_on().then(|| program.id());
        Some(Self { n_reports: program.n_reports(), carried_on })
    }
}

impl States {
    /// Host memory that they take.
    pub(super) fn n_bytes(&self) -> u64 {
        (self.entries.len() * size_of::<Entry>()) as u64
    }

    /// Host memory that they take once there are as many more as a program leaves by so many draws.
    pub(super) fn n_bytes_with(&self, leaves: Option<Leaves>, n_draws: usize) -> u64 {
        let is_kept = leaves.is_some_and(|leaves| leaves.carried_on.is_some());
        let n_more = if is_kept { n_draws } else { 0 };
        self.n_bytes() + (n_more * size_of::<Entry>()) as u64
    }

    pub(super) fn fork(&self) -> Self {
        Self { entries: self.entries.fork() }
    }

    /// Makes the program of a sampler go on from what it left last.
    pub(super) fn carry_on(&self, sampler: &mut Arc<Sampler>) {
        let (Some(put_on), Some(leaves)) = (&sampler.program, Leaves::of(sampler)) else { return };
        let start = match self.entries.last() {
            Some(entry) if leaves.carried_on == Some(entry.program) => entry.state,
            _ => put_on.program.first(),
        };
        if start != put_on.start
            && let Some(put_on) = &mut Arc::make_mut(sampler).program
        {
            put_on.start = start;
        }
    }

    /// A program drew the last of `n_tokens`.
    pub(super) fn note(&mut self, n_tokens: usize, leaves: Leaves, state: DrawState) {
        if let Some(program) = leaves.carried_on {
            self.entries.push(Entry { n_tokens, program, state });
        }
    }

    /// The tokens `start..end` are gone. What was left at the last of them is carried on from the token before them.
    pub(super) fn evict(&mut self, start: usize, end: usize) {
        let mut after: Vec<Entry> = Vec::new();
        while let Some(&entry) = self.entries.last().filter(|entry| entry.n_tokens > start) {
            self.entries.truncate(self.entries.len() - 1);
            match entry.n_tokens > end {
                true => after.push(Entry { n_tokens: entry.n_tokens - (end - start), ..entry }),
                // Of those within, the last counts; without a token before them there is none to carry it on.
                false if after.last().is_none_or(|next| next.n_tokens > start) && start > 0 => {
                    after.push(Entry { n_tokens: start, ..entry });
                }
                false => {}
            }
        }
        after.into_iter().rev().for_each(|entry| self.entries.push(entry));
    }

    /// The context keeps its first `n_tokens`.
    pub(super) fn truncate(&mut self, n_tokens: usize) {
        while self.entries.last().is_some_and(|entry| entry.n_tokens > n_tokens) {
            self.entries.truncate(self.entries.len() - 1);
        }
    }
}
