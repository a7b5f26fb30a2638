//! Work that the daemon does for its clients on the processors that carry everybody's streams, done by turns of each user.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Semaphore;

/// Questions of one user about the daemon that are answered at once. The others wait in the order in which they came: each takes
/// a processor for a while.
const N_QUESTIONS: usize = 2;

/// Large frames of one user that are decoded at once, and stops that are looked up.
const N_FRAMES: usize = 1;
const N_STOPS: usize = 1;

/// The turns of one user, whatever the number of its connections.
#[derive(Debug)]
pub(crate) struct Turns {
    pub(crate) questions: Semaphore,
    /// Apart from questions: who stops a guest does not wait for a list of all.
    pub(crate) stops: Semaphore,
    pub(crate) frames: Arc<Semaphore>,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            questions: Semaphore::new(N_QUESTIONS),
            stops: Semaphore::new(N_STOPS),
            frames: Arc::new(Semaphore::new(N_FRAMES)),
        }
    }
}

/// The turns of all users.
#[derive(Debug, Default)]
pub(crate) struct UserTurns(Mutex<HashMap<u32, Weak<Turns>>>);

impl UserTurns {
    /// The turns of one user, there as long as one of its connections has them.
    pub(crate) fn of(&self, uid: u32) -> Arc<Turns> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = users.get(&uid).and_then(Weak::upgrade) {
            return turns;
        }
        users.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Turns::default());
        users.insert(uid, Arc::downgrade(&turns));
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_a_user_share_its_turns_and_users_do_not() {
        let turns = UserTurns::default();
        let one = turns.of(1);
        assert!(Arc::ptr_eq(&one, &turns.of(1)));
        let two = turns.of(2);
        assert!(!Arc::ptr_eq(&one, &two));
        drop(one);
        turns.of(3);
        assert_eq!(turns.0.lock().expect("nobody panicked").len(), 2, "who has left is forgotten");
    }
}
