//! Compiled components that are ready to start.

use std::collections::HashMap;

use super::component::Program;

/// The most recently used programs, bounded by their number and the memory that they take.
#[derive(Debug)]
pub(crate) struct Programs {
    n_max: usize,
    n_bytes_max: usize,
    n_bytes: usize, // sum over all entries
    n_uses: u64,
    entries: HashMap<blake3::Hash, Entry>,
}

#[derive(Debug)]
struct Entry {
    program: Program,
    last_use: u64,
}

impl Programs {
    pub(crate) fn new(n_max: usize, n_bytes_max: usize) -> Self {
        Self { n_max: n_max.max(1), n_bytes_max, n_bytes: 0, n_uses: 0, entries: HashMap::new() }
    }

    /// How many there are, and the bytes of memory that they take.
    pub(crate) fn ready(&self) -> (u64, u64) {
        (self.entries.len() as u64, self.n_bytes as u64)
    }

    pub(crate) fn get(&mut self, hash: &blake3::Hash) -> Option<Program> {
        let entry = self.entries.get_mut(hash)?;
        self.n_uses += 1;
        entry.last_use = self.n_uses;
        Some(entry.program.clone())
    }

    /// Adds a program; those that were not used for longest make room. Guests that run keep theirs, and a
    /// program larger than all the room is not kept at all.
    pub(crate) fn insert(&mut self, program: Program) {
        self.n_uses += 1;
        let entry = Entry { last_use: self.n_uses, program };
        self.n_bytes += entry.program.memory_bytes();
        let replaced = self.entries.insert(entry.program.hash(), entry);
        self.n_bytes -= replaced.map_or(0, |entry| entry.program.memory_bytes());
        while self.entries.len() > self.n_max || self.n_bytes > self.n_bytes_max {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_use).map(|(hash, _)| *hash);
            let removed =
                oldest.and_then(|hash| self.entries.remove(&hash)).expect("the bounds are above none");
            self.n_bytes -= removed.program.memory_bytes();
        }
    }
}
