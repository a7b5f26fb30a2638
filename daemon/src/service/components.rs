//! Components that clients have uploaded: who did, and the bytes until they are compiled.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use trellis_wire::{ComponentHash, ErrorBody};

/// What all users keep together, in shares of one user.
const N_SHARES_MAX: usize = 4;

/// Components of one user whose bytes are kept, however small they are: each is looked through for every upload.
const N_KEPT_MAX: usize = 64;

/// Uploads of one user that are remembered. Who starts more components than that by turns uploads one now and then again.
const N_KNOWN_MAX: usize = 4096;

/// Users whose uploads are remembered.
const N_USERS_MAX: usize = 256;

/// How long bytes are kept that nobody asks for: a client starts at once what it has uploaded, or is gone.
const KEPT: Duration = Duration::from_secs(10);

/// The most recently uploaded components of each user, until they are compiled. Then the code is what is kept, for this user alone; and
/// a client that names a component by its hash is told to upload it until its own user has done so. Otherwise anybody could
/// ask what others have run, and run it without having it.
pub(super) struct Components {
    /// What one user may keep.
    n_bytes_max: usize,
    /// The user that has used its own least recently comes first.
    users: Mutex<VecDeque<Kept>>,
}

struct Kept {
    uid: u32,
    /// The oldest first.
    components: VecDeque<Uploaded>,
    /// Components that this user has shown to have; the oldest first.
    known: VecDeque<ComponentHash>,
    /// Whether somebody sees to it that bytes go that nobody asks for.
    is_watched: bool,
}

struct Uploaded {
    hash: ComponentHash,
    bytes: Bytes,
    last_use: Instant,
}

impl Kept {
    fn n_bytes(&self) -> usize {
        self.components.iter().map(|uploaded| uploaded.bytes.len()).sum()
    }

    fn note(&mut self, hash: ComponentHash) {
        if let Some(idx) = self.known.iter().rposition(|other| *other == hash) {
            self.known.remove(idx);
        }
        self.known.push_back(hash);
        if self.known.len() > N_KNOWN_MAX {
            self.known.pop_front();
        }
    }
}

impl Components {
    pub(super) fn new(n_bytes_max: usize) -> Self {
        Self { n_bytes_max, users: Mutex::default() }
    }

    /// A component that this user has uploaded.
    pub(super) fn get(&self, uid: u32, hash: &ComponentHash) -> Option<Bytes> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = take(&mut users, uid)?;
        let uploaded = kept.components.iter_mut().find(|uploaded| uploaded.hash == *hash);
        let bytes = uploaded.map(|uploaded| {
            uploaded.last_use = Instant::now();
            uploaded.bytes.clone()
        });
        users.push_back(kept);
        bytes
    }

    /// Whether this user has uploaded the component since the daemon began; its bytes may be gone.
    pub(super) fn is_known(&self, uid: u32, hash: &ComponentHash) -> bool {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut kept) = take(&mut users, uid) else { return false };
        let is_known = kept.known.iter().rev().any(|other| other == hash);
        if is_known {
            kept.note(*hash);
        }
        users.push_back(kept);
        is_known
    }

    /// The bytes are of no use any more: the component is compiled.
    pub(super) fn let_go(&self, uid: u32, hash: &ComponentHash) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = users.iter_mut().find(|kept| kept.uid == uid) {
            kept.components.retain(|uploaded| uploaded.hash != *hash);
        }
    }

    /// Lets go of the bytes of a user's components as nobody has asked for them for a while; returns when none are left.
    pub(super) async fn let_go_when_unused(self: Arc<Self>, uid: u32) {
        while let Some(rest) = self.rest(uid, Instant::now()) {
            tokio::time::sleep(rest).await;
        }
    }

    /// How long the bytes are kept of which that was asked longest ago, if nobody asks for them. Those whose time is over are let
    /// go, and `None` where that was all.
    fn rest(&self, uid: u32, now: Instant) -> Option<Duration> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = users.iter_mut().find(|kept| kept.uid == uid)?;
        let rest =
            |uploaded: &Uploaded| KEPT.saturating_sub(now.saturating_duration_since(uploaded.last_use));
        kept.components.retain(|uploaded| !rest(uploaded).is_zero());
        let least = kept.components.iter().map(rest).min();
        kept.is_watched = least.is_some();
        least
    }

    /// Keeps a component that this user has uploaded. Whoever is told `true` is to see to it that it goes when it is not used.
    ///
    /// # Errors
    /// It is larger than all that a user may keep.
    pub(super) fn keep(&self, uid: u32, hash: ComponentHash, bytes: Bytes) -> Result<bool, ErrorBody> {
        if bytes.len() > self.n_bytes_max {
            return Err(ErrorBody::over_limit(
                "component_bytes",
                bytes.len() as u64,
                self.n_bytes_max as u64,
            ));
        }
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Kept { uid, components: VecDeque::new(), known: VecDeque::new(), is_watched: false };
        let mut kept = take(&mut users, uid).unwrap_or_else(new);
        kept.note(hash);
        kept.components.retain(|uploaded| uploaded.hash != hash);
        kept.components.push_back(Uploaded { hash, bytes, last_use: Instant::now() });
        while kept.n_bytes() > self.n_bytes_max || kept.components.len() > N_KEPT_MAX {
            kept.components.pop_front();
        }
        let is_unwatched = !std::mem::replace(&mut kept.is_watched, true);
        users.push_back(kept);
        while users.iter().map(Kept::n_bytes).sum::<usize>() > N_SHARES_MAX * self.n_bytes_max {
            // Whoever has most makes room; of several with as much, who has used its own least recently.
            let Some(most) = users.iter_mut().rev().max_by_key(|kept| kept.n_bytes()) else { break };
            most.components.pop_front();
        }
        if users.len() > N_USERS_MAX {
            users.pop_front();
        }
        Ok(is_unwatched)
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
    fn who_let_go_of_the_bytes_has_had_them() {
        let components = Components::new(10);
        keep(&components, 7, 1, 4);
        keep(&components, 8, 1, 4);
        components.let_go(7, &hash(1));
        assert!(components.get(7, &hash(1)).is_none() && components.is_known(7, &hash(1)));
        assert!(components.get(8, &hash(1)).is_some(), "it is the other user's");
    }

    #[test]
    fn bytes_that_nobody_asks_for_are_let_go_and_not_that_they_were_here() {
        let components = Components::new(10);
        let begun = Instant::now();
        keep(&components, 7, 1, 4);
        std::thread::sleep(Duration::from_millis(1));
        assert!(components.get(7, &hash(1)).is_some());
        let rest = components.rest(7, begun + KEPT).expect("somebody has asked meanwhile");
        assert!(rest >= Duration::from_millis(1) && rest < KEPT, "{rest:?}");
        assert!(components.rest(7, Instant::now() + KEPT).is_none());
        assert!(components.get(7, &hash(1)).is_none() && components.is_known(7, &hash(1)));
    }

    #[test]
    fn one_watches_all_components_of_a_user_and_there_are_only_so_many() {
        let components = Components::new(10);
        let watched: Vec<bool> = (0..3 * N_KEPT_MAX as u8)
            .map(|n| components.keep(7, hash(n), Bytes::new()).expect("small enough"))
            .collect();
        assert!(watched[0] && watched[1..].iter().all(|is_unwatched| !is_unwatched));
        let kept = (0..3 * N_KEPT_MAX as u8).filter(|n| components.get(7, &hash(*n)).is_some());
        assert_eq!(kept.count(), N_KEPT_MAX);
        assert!(components.keep(8, hash(1), Bytes::new()).expect("small enough"), "each user by itself");
        assert!(components.rest(7, Instant::now()).is_some_and(|rest| rest > KEPT / 2));
        assert!(components.rest(7, Instant::now() + KEPT).is_none());
        assert!(components.keep(7, hash(1), Bytes::new()).expect("small enough"), "nobody watches any more");
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
        assert!(components.is_known(2, &hash(0)), "its bytes are gone, not that it had them");
    }

    #[test]
    fn who_has_most_makes_room_for_all() {
        let components = Components::new(10);
        keep(&components, 1, 0, 2);
        for uid in 2..=4 {
            for n in 0..2 {
                keep(&components, uid, n, 5);
            }
        }
        // All come to 32 bytes; the next ones make it 41.
        keep(&components, 5, 0, 9);
        assert!(components.get(1, &hash(0)).is_some(), "it has little, though it came first");
        let left = [0, 1].map(|n| components.get(2, &hash(n)).is_some());
        assert_eq!(left, [false, true], "its oldest goes, and not all that it has");
        let others = [(3, 0), (3, 1), (4, 0), (4, 1), (5, 0)];
        assert!(others.iter().all(|(uid, n)| components.get(*uid, &hash(*n)).is_some()));
    }

    #[test]
    fn who_has_uploaded_a_component_is_known_and_nobody_else() {
        let components = Components::new(10);
        keep(&components, 7, 1, 10);
        keep(&components, 7, 2, 10);
        assert!(components.get(7, &hash(1)).is_none(), "it made room");
        assert!(components.is_known(7, &hash(1)) && components.is_known(7, &hash(2)));
        assert!(!components.is_known(8, &hash(1)) && !components.is_known(7, &hash(3)));
        let many = |n: usize| ComponentHash(*blake3::hash(&n.to_le_bytes()).as_bytes());
        for n in 0..N_KNOWN_MAX - 1 {
            components.keep(7, many(n), Bytes::new()).expect("small enough");
            assert!(components.is_known(7, &hash(1)), "it is used all the time");
        }
        assert!(!components.is_known(7, &hash(2)), "it was not used for longest");
        for uid in 1_000..1_000 + N_USERS_MAX as u32 {
            keep(&components, uid, 1, 1);
        }
        assert!(!components.is_known(7, &hash(1)));
    }
}
