//! What a user has of a device and of its memory beside others.

use std::num::NonZeroU32;

/// What a user is due beside others, and whose pages make room for its work. It is part of the user's account, and of every
/// account within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Priority {
    /// The weight of the user's virtual time: users that all have enough to do get work done in proportion to their shares.
    pub share: NonZeroU32,
    /// Pages of users of a lower rank make room first. It decides nothing about time: shares do.
    pub rank: u8,
}

impl Priority {
    /// That of every user where nothing else is said.
    pub const EVEN: Self = Self { share: NonZeroU32::MIN, rank: 0 };
}

impl Default for Priority {
    fn default() -> Self {
        Self::EVEN
    }
}
