//! What random operations are made of.

use super::hash_backend::mix;

/// Choices: those that bytes say as long as there are some, then splitmix64.
pub(super) struct Random {
    state: u64,
    given: std::vec::IntoIter<u8>,
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed, given: Vec::new().into_iter() }
    }

    /// Choices that these bytes say, and then those of a seed.
    #[cfg(feature = "fuzzing")]
    pub(super) fn given(bytes: &[u8], seed: u64) -> Self {
        Self { state: seed, given: Vec::from(bytes).into_iter() }
    }

    /// Whether bytes are left.
    #[cfg(feature = "fuzzing")]
    pub(super) fn is_given(&self) -> bool {
        self.given.len() > 0
    }

    /// A number that tells things apart, whatever the bytes say.
    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        let choice = match self.given.next() {
            Some(byte) if n <= 256 => u64::from(byte),
            Some(byte) => u64::from(byte) << 8 | u64::from(self.given.next().unwrap_or(0)),
            None => self.next(),
        };
        (choice % n as u64) as usize
    }
}
