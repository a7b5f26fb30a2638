//! Detached guests: they go on without the connection that started them, and clients read them by their numbers.
//!
//! - Comes in: a start ([`start`]), from a connection that may go at any moment afterwards; readers ([`DetachedGuest::attach`],
//!   [`read`]) and what they acknowledge, from any connection of the same user.
//! - Goes out: what the guest sends and how it ended, to one reader at a time, from the event that the reader asks for.
//! - A task of each guest's own (`keep`) moves its output into what is kept (`kept`), under a credit that only acknowledgements
//!   give back: a guest that is not read waits, as one does whose client is slow. [`DetachedGuests`] finds them, and counts those of
//!   each user.
//! - Each is a session of its own in the accounts: what is kept is charged there, inside its user's.
//! - Must not happen: a guest of one user found by another, or told apart by another from one that is not there; an event that is
//!   dropped before it was acknowledged; a guest without a reader, or the end of one, that is kept for ever.

mod guest;
mod guests;
mod keep;
mod kept;
mod read;

pub(crate) use guest::DetachedGuest;
pub(super) use guests::{DetachedGuests, DetachedUsed};
pub(super) use keep::{Start, start};
pub(super) use read::{Line, read};
