//! Where a guest's time goes: what the daemon notes of it while it runs, as it travels to the client.
//!
//! - Comes in: the guest's calls, what it computes between them, and the steps that had rows of it.
//! - Goes out: bytes, a sequence of [`Entry`]s as MessagePack.
//! - Must not happen: that a guest is slower by more than a few hundred nanoseconds a call; that entries wait without bound.

use std::io::Cursor;

use serde::{Deserialize, Serialize};

/// A moment of a guest's life, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Moment {
    /// Since its start.
    pub(crate) at_ns: u64,
    /// Of processor time, its own and the host's for it.
    pub(crate) cpu_ns: u64,
}

/// What is noted. A text is said once, and then goes by its place among the texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// A name.
    Text(String),
    /// The guest's first instruction is next.
    Begin(Moment),
    /// A host call.
    Call {
        /// The function, as a text.
        name: u32,
        begin: Moment,
        end: Moment,
    },
    /// Where the guest was, functions from the innermost out, as texts.
    Sample { at_ns: u64, guest_ns: u64, stack: Vec<u32> },
    /// A step of the device with rows of the guest.
    Step { end_ns: u64, elapsed_ns: u64, n_rows: u32, n_tokens: u32 },
    /// The guest has ended.
    End {
        end: Moment,
        /// Entries for which there was no room.
        n_lost: u64,
    },
}

impl Entry {
    /// Appends it to bytes.
    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        rmp_serde::encode::write(to, self).expect("what is noted is plain data");
    }
}

/// The entries of a whole profile; those before the first that cannot be read, where there is one.
pub(crate) fn entries(bytes: &[u8]) -> Vec<Entry> {
    let mut cursor = Cursor::new(bytes);
    std::iter::from_fn(|| rmp_serde::from_read(&mut cursor).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let moment = Moment { at_ns: 7, cpu_ns: 5 };
        let all = [
            Entry::Text("context.append".to_owned()),
            Entry::Begin(Moment::default()),
            Entry::Call { name: 0, begin: Moment::default(), end: moment },
            Entry::Sample { at_ns: 9, guest_ns: 1_000_000, stack: vec![0, 0] },
            Entry::Step { end_ns: 8, elapsed_ns: u64::MAX, n_rows: 1, n_tokens: 2 },
            Entry::End { end: moment, n_lost: 3 },
        ];
        let mut bytes = Vec::new();
        all.iter().for_each(|entry| entry.write(&mut bytes));
        assert_eq!(entries(&bytes), all);
        bytes.pop();
        assert_eq!(entries(&bytes), all[..all.len() - 1]);
    }
}
