//! Components that clients have uploaded, until they are compiled.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use trellis_wire::{ComponentHash, ErrorBody};

/// What all users keep together, in shares of one user.
const N_SHARES_MAX: usize = 4;

/// The most recently uploaded components of each user. Once one has been compiled, its code is what is kept; a client that
/// asks for one that is gone is told to upload it again.
pub(super) struct Components {
    /// What one user may keep.
    n_bytes_max: usize,
    /// The user that has used its own least recently comes first.
    users: Mutex<VecDeque<Kept>>,
}

struct Kept {
    uid: u32,
    /// The oldest first.
    components: VecDeque<(ComponentHash, Bytes)>,
}

impl Kept {
    fn n_bytes(&self) -> usize {
        self.components.iter().map(|(_, bytes)| bytes.len()).sum()
    }
}

impl Components {
    pub(super) fn new(n_bytes_max: usize) -> Self {
        Self { n_bytes_max, users: Mutex::default() }
    }

    /// A component that this user has uploaded.
    pub(super) fn get(&self, uid: u32, hash: &ComponentHash) -> Option<Bytes> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = take(&mut users, uid)?;
        let bytes = kept.components.iter().find(|(other, _)| other == hash).map(|(_, bytes)| bytes.clone());
        users.push_back(kept);
        bytes
    }

    pub(super) fn keep(&self, uid: u32, hash: ComponentHash, bytes: Bytes) -> Result<(), ErrorBody> {
        if bytes.len() > self.n_bytes_max {
            return Err(ErrorBody::over_limit(
                "component_bytes",
                bytes.len() as u64,
                self.n_bytes_max as u64,
            ));
        }
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = take(&mut users, uid).unwrap_or_else(|| Kept { uid, components: VecDeque::new() });
        kept.components.retain(|(other, _)| *other != hash);
        kept.components.push_back((hash, bytes));
        while kept.n_bytes() > self.n_bytes_max {
            kept.components.pop_front();
        }
        users.push_back(kept);
        while users.iter().map(Kept::n_bytes).sum::<usize>() > N_SHARES_MAX * self.n_bytes_max {
            users.pop_front();
        }
        Ok(())
    }
}

fn take(users: &mut VecDeque<Kept>, uid: u32) -> Option<Kept> {
    let idx = users.iter().position(|kept| kept.uid == uid)?;
    users.remove(idx)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> ComponentHash {
        ComponentHash([n; 32])
    }

    fn keep(components: &Components, uid: u32, n: u8, n_bytes: usize) {
        components.keep(uid, hash(n), Bytes::from(vec![n; n_bytes])).expect("small enough");
    }

    #[test]
    fn the_oldest_make_room() {
        let components = Components::new(10);
        for n in 1..=3 {
            keep(&components, 7, n, 4);
        }
        assert!(components.get(7, &hash(1)).is_none());
        assert_eq!(components.get(7, &hash(3)).as_deref(), Some(&[3; 4][..]));
        let refused =
            components.keep(7, hash(4), Bytes::from(vec![0; 11])).expect_err("larger than all room");
        assert_eq!(refused.limit, Some(10));
        assert!(components.get(7, &hash(2)).is_some(), "what is refused displaces nothing");
    }

    #[test]
    fn users_do_not_displace_each_other() {
        let components = Components::new(10);
        keep(&components, 7, 1, 10);
        for n in 2..100 {
            keep(&components, 8, n, 10);
        }
        assert!(components.get(7, &hash(1)).is_some());
        assert!(components.get(8, &hash(1)).is_none(), "it is the other user's");
    }

    #[test]
    fn of_too_many_users_the_least_recent_is_forgotten() {
        let components = Components::new(10);
        for uid in 1..=4 {
            keep(&components, uid, 0, 10);
        }
        assert!(components.get(1, &hash(0)).is_some());
        keep(&components, 5, 0, 1);
        let known = [1, 2, 3, 4, 5].map(|uid| components.get(uid, &hash(0)).is_some());
        assert_eq!(known, [true, false, true, true, true]);
    }
}
