//! Questions about the daemon, answered by turns of each user.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Semaphore;

/// Questions of one user that are answered at once. The others wait in the order in which they came: each takes a processor for a
/// while, of those that carry everybody's streams.
const N_AT_ONCE: usize = 2;

/// The turns of all users.
#[derive(Debug, Default)]
pub(crate) struct Questions(Mutex<HashMap<u32, Weak<Semaphore>>>);

impl Questions {
    /// The turns of one user, there as long as one of its connections has them.
    pub(crate) fn of(&self, uid: u32) -> Arc<Semaphore> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = users.get(&uid).and_then(Weak::upgrade) {
            return turns;
        }
        users.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Semaphore::new(N_AT_ONCE));
        users.insert(uid, Arc::downgrade(&turns));
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_a_user_share_its_turns_and_users_do_not() {
        let questions = Questions::default();
        let one = questions.of(1);
        assert!(Arc::ptr_eq(&one, &questions.of(1)));
        let two = questions.of(2);
        assert!(!Arc::ptr_eq(&one, &two));
        drop(one);
        questions.of(3);
        assert_eq!(questions.0.lock().expect("nobody panicked").len(), 2, "who has left is forgotten");
    }
}
