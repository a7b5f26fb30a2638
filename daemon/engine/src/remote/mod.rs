//! An engine and guests in different processes: what they ask and what they are answered as data, and an end for each side.
//!
//! - In the process of the guests a [`FarEngine`] takes the place of the engine: contexts and handles are the same as in the
//!   engine's own process, and what they would post comes out as [`Asked`].
//! - In the daemon a [`NearEngine`] checks what has come (`customs`) and posts it in the name of the guest; what comes back goes
//!   to an [`Outward`], as [`Answered`].
//! - Ids are unique over all processes without a word between them: each process numbers its callers and contexts in a
//!   [`Numbers`] of its own.
//! - Must not happen: an id of one process that reaches what is another's; a process that holds up the engine's thread, which
//!   only ever puts what it has into a queue.

pub(crate) mod customs;
mod facts;
mod far;
mod message;
mod near;
mod parts;

pub use facts::ModelFacts;
pub use far::{FarEngine, FarModel, Spokesman};
pub use message::{Answered, Asked};
pub use near::{NearEngine, Outward, Registry, Violation};

use std::ops::Range;

/// The ids that one process gives to its callers and contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Numbers(u64);

/// How many ids a process has. The daemon's own are below.
const N_NUMBERS: u64 = 1 << 40;

impl Numbers {
    /// Those of the process with this number.
    ///
    /// # Panics
    /// There were too many processes, more than ten million.
    #[must_use]
    pub fn of(process: u64) -> Self {
        assert!(process < (1 << 23) - 1, "there were {process} processes");
        Self((process + 1) * N_NUMBERS)
    }

    pub(crate) fn first(self) -> u64 {
        self.0
    }

    /// All of them.
    pub(crate) fn range(self) -> Range<u64> {
        self.0..self.0 + N_NUMBERS
    }
}
