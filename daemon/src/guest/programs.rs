//! Compiled components that are ready to start.

use std::collections::HashMap;

use super::component::Program;

/// The most recently used programs.
#[derive(Debug)]
pub(crate) struct Programs {
    n_max: usize,
    n_uses: u64,
    entries: HashMap<blake3::Hash, Entry>,
}

#[derive(Debug)]
struct Entry {
    program: Program,
    last_use: u64,
}

impl Programs {
    pub(crate) fn new(n_max: usize) -> Self {
        Self { n_max: n_max.max(1), n_uses: 0, entries: HashMap::new() }
    }

    pub(crate) fn get(&mut self, hash: &blake3::Hash) -> Option<Program> {
        let entry = self.entries.get_mut(hash)?;
        self.n_uses += 1;
        entry.last_use = self.n_uses;
        Some(entry.program.clone())
    }

    /// Adds a program; the one that was not used for longest makes room. Guests that run keep theirs.
    pub(crate) fn insert(&mut self, program: Program) {
        self.n_uses += 1;
        let entry = Entry { last_use: self.n_uses, program };
        self.entries.insert(entry.program.hash(), entry);
        while self.entries.len() > self.n_max {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_use).map(|(hash, _)| *hash);
            self.entries.remove(&oldest.expect("more than one entry"));
        }
    }
}
