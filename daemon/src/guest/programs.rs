//! Compiled components that are ready to start.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use trellis_engine::account::ActorId;

use super::component::Program;

/// How long a program that nobody starts is kept beside those of users who have more.
const UNUSED_TIME: Duration = Duration::from_secs(600);

/// The most recently used programs, bounded by their number and the memory that they take. Room is made among those that were not
/// used for long, and then among those of the user who has most: what a user has brought is not pushed out by another one that
/// brings more, be it a single program.
#[derive(Debug)]
pub(crate) struct Programs {
    n_max: usize,
    n_bytes_max: usize,
    n_bytes: usize, // sum over all entries
    n_uses: u64,
    /// By their keys.
    entries: HashMap<blake3::Hash, Entry>,
}

#[derive(Debug)]
struct Entry {
    program: Program,
    /// Who brought it.
    user: ActorId,
    last_use: u64,
    used: Instant,
}

/// What a user's programs come to.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    n_programs: usize,
    n_bytes: usize,
    oldest_use: u64,
}

impl Programs {
    pub(crate) fn new(n_max: usize, n_bytes_max: usize) -> Self {
        Self { n_max: n_max.max(1), n_bytes_max, n_bytes: 0, n_uses: 0, entries: HashMap::new() }
    }

    /// How many there are, and the bytes of memory that they take.
    pub(crate) fn ready(&self) -> (u64, u64) {
        (self.entries.len() as u64, self.n_bytes as u64)
    }

    pub(crate) fn get(&mut self, key: &blake3::Hash) -> Option<Program> {
        let entry = self.entries.get_mut(key)?;
        self.n_uses += 1;
        (entry.last_use, entry.used) = (self.n_uses, Instant::now());
        Some(entry.program.clone())
    }

    /// Adds a program that a user has brought, to be found by this key. Guests that run keep theirs, and a program larger than all the room is not kept at all.
    pub(crate) fn insert(&mut self, key: blake3::Hash, program: Program, user: ActorId) {
        if program.memory_bytes() > self.n_bytes_max {
            return;
        }
        self.n_uses += 1;
        let entry = Entry { program, user, last_use: self.n_uses, used: Instant::now() };
        self.n_bytes += entry.program.memory_bytes();
        let replaced = self.entries.insert(key, entry);
        self.n_bytes -= replaced.map_or(0, |entry| entry.program.memory_bytes());
        while self.entries.len() > self.n_max || self.n_bytes > self.n_bytes_max {
            let next = self.next_to_go().expect("the bounds are above none");
            let removed = self.entries.remove(&next).expect("it is there");
            self.n_bytes -= removed.program.memory_bytes();
        }
    }

    /// Takes out programs that no guest runs, of so many bytes together at most, those first that were not used for longest. Where
    /// each has more bytes than that, one goes that has fewest.
    pub(crate) fn take_unused(&mut self, n_bytes_max: usize) -> Vec<Program> {
        let mut unused: Vec<(u64, blake3::Hash)> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.program.is_unused())
            .map(|(&hash, entry)| (entry.last_use, hash))
            .collect();
        unused.sort_unstable_by_key(|&(last_use, _)| last_use);
        let bytes_of = |hash: &blake3::Hash| self.entries[hash].program.memory_bytes();
        let least = unused.iter().map(|(_, hash)| bytes_of(hash)).min().unwrap_or(0);
        let n_bytes_max = n_bytes_max.max(least);
        let (mut taken, mut n_bytes) = (Vec::new(), 0);
        for (_, hash) in unused {
            let n_more = self.entries[&hash].program.memory_bytes();
            if n_bytes + n_more > n_bytes_max {
                continue;
            }
            n_bytes += n_more;
            taken.extend(self.entries.remove(&hash).map(|entry| entry.program));
        }
        self.n_bytes -= n_bytes;
        taken
    }

    fn next_to_go(&self) -> Option<blake3::Hash> {
        let oldest_of = |user: Option<ActorId>| {
            let theirs =
                self.entries.iter().filter(move |(_, entry)| user.is_none_or(|user| entry.user == user));
            theirs.min_by_key(|(_, entry)| entry.last_use)
        };
        let (hash, oldest) = oldest_of(None)?;
        if oldest.used.elapsed() > UNUSED_TIME {
            return Some(*hash);
        }
        oldest_of(Some(self.user_with_most()?)).map(|(hash, _)| *hash)
    }

    /// The user with the most of what there is too much of; of several with as much, whose oldest was not used for longest.
    fn user_with_most(&self) -> Option<ActorId> {
        let mut shares: HashMap<ActorId, Share> = HashMap::new();
        for entry in self.entries.values() {
            let share =
                shares.entry(entry.user).or_insert(Share { oldest_use: u64::MAX, ..Share::default() });
            share.n_programs += 1;
            share.n_bytes += entry.program.memory_bytes();
            share.oldest_use = share.oldest_use.min(entry.last_use);
        }
        let is_short_of_bytes = self.n_bytes > self.n_bytes_max;
        let most = |(_, share): &(ActorId, Share)| {
            (if is_short_of_bytes { share.n_bytes } else { share.n_programs }, Reverse(share.oldest_use))
        };
        shares.into_iter().max_by_key(most).map(|(user, _)| user)
    }
}
