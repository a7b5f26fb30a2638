//! Which uploads may send: one for each component, a few for each user. The others wait in the order in which they came.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use trellis_wire::{ComponentHash, ErrorBody};

use super::actor::Actor;

/// The uploads of all users.
#[derive(Debug)]
pub(crate) struct Uploads {
    n_max: AtomicUsize,
    n_waiting_max: AtomicUsize,
    users: Mutex<HashMap<u32, User>>,
}

#[derive(Debug, Default)]
struct User {
    /// Components that are being sent or stored, at most `n_max`.
    sending: HashSet<ComponentHash>,
    /// The first to come is the first here.
    waiting: VecDeque<Waiting>,
}

impl User {
    fn used(&self) -> UploadsUsed {
        // An upload that waits no more is forgotten when the next one comes.
        let n_waiting = self.waiting.iter().filter(|waiting| !waiting.outcome.is_closed()).count();
        UploadsUsed { n_sending: self.sending.len(), n_waiting }
    }
}

/// Uploads at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UploadsUsed {
    /// Those that may send.
    pub(crate) n_sending: usize,
    /// Those in the queue.
    pub(crate) n_waiting: usize,
}

/// An upload in the queue; its request is over if the receiver is gone.
#[derive(Debug)]
struct Waiting {
    hash: ComponentHash,
    outcome: oneshot::Sender<WaitOutcome>,
}

/// What ends an upload's wait.
#[derive(Debug)]
pub(crate) enum WaitOutcome {
    /// This upload may send.
    Send(UploadPermit),
    /// Another upload has brought the component.
    Stored,
}

/// Permission to send one component. Dropping it passes the permission to the next upload, one of the same component
/// included.
#[derive(Debug)]
pub(crate) struct UploadPermit {
    uploads: Arc<Uploads>,
    uid: u32,
    hash: ComponentHash,
    end: End,
}

/// Waits that have ended, told outside the lock: a permit whose request is over is dropped, which takes the lock again.
type Told = Vec<(oneshot::Sender<WaitOutcome>, WaitOutcome)>;

fn tell(told: Told) {
    for (sender, outcome) in told {
        // The request may be over.
        drop(sender.send(outcome));
    }
}

impl Uploads {
    pub(crate) fn new(n_max: usize, n_waiting_max: usize) -> Arc<Self> {
        let (n_max, n_waiting_max) = (AtomicUsize::new(n_max.max(1)), AtomicUsize::new(n_waiting_max));
        Arc::new(Self { n_max, n_waiting_max, users: Mutex::default() })
    }

    /// Lets so many send and wait from now on; those that do already go on, and those that wait and now may send do.
    pub(crate) fn set_n_max(self: &Arc<Self>, n_max: usize, n_waiting_max: usize) {
        self.n_max.store(n_max.max(1), Ordering::Relaxed);
        self.n_waiting_max.store(n_waiting_max, Ordering::Relaxed);
        let mut users = self.lock();
        let told = users.iter_mut().flat_map(|(uid, user)| self.admit(*uid, user)).collect();
        drop(users);
        tell(told);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, User>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an upload until it may send. Dropping the receiver leaves the queue.
    ///
    /// # Errors
    /// As many uploads of this user wait as may.
    pub(crate) fn enter(
        self: &Arc<Self>,
        actor: Actor,
        hash: ComponentHash,
    ) -> Result<oneshot::Receiver<WaitOutcome>, ErrorBody> {
        let (outcome, receiver) = oneshot::channel();
        let mut users = self.lock();
        let user = users.entry(actor.uid).or_default();
        user.waiting.retain(|waiting| !waiting.outcome.is_closed());
        user.waiting.push_back(Waiting { hash, outcome });
        let told = self.admit(actor.uid, user);
        let n_waiting = user.waiting.len();
        let n_waiting_max = self.n_waiting_max.load(Ordering::Relaxed);
        let has_room = n_waiting <= n_waiting_max;
        if !has_room {
            user.waiting.pop_back();
        }
        drop(users);
        tell(told);
        if has_room {
            Ok(receiver)
        } else {
            Err(ErrorBody::over_limit("waiting uploads", n_waiting as u64, n_waiting_max as u64))
        }
    }

    /// Gives free permits to the uploads that have waited longest for a component that no other upload sends.
    fn admit(self: &Arc<Self>, uid: u32, user: &mut User) -> Told {
        let mut told = Vec::new();
        while user.sending.len() < self.n_max.load(Ordering::Relaxed) {
            user.waiting.retain(|waiting| !waiting.outcome.is_closed());
            let next = user.waiting.iter().position(|waiting| !user.sending.contains(&waiting.hash));
            let Some(Waiting { hash, outcome }) = next.and_then(|idx| user.waiting.remove(idx)) else {
                break;
            };
            user.sending.insert(hash);
            let permit = UploadPermit { uploads: self.clone(), uid, hash, end: End::Failed };
            told.push((outcome, WaitOutcome::Send(permit)));
        }
        told
    }

    /// Takes a permit back and passes it on; after a success, uploads that wait for the same component are done.
    fn leave(self: &Arc<Self>, uid: u32, hash: ComponentHash, end: End) {
        let mut users = self.lock();
        let user = users.get_mut(&uid).expect("a user with a permit is there");
        user.sending.remove(&hash);
        let mut told = Vec::new();
        if end == End::Stored {
            let (done, waiting) = user.waiting.drain(..).partition(|waiting| waiting.hash == hash);
            user.waiting = waiting;
            let done: VecDeque<Waiting> = done;
            told.extend(done.into_iter().map(|waiting| (waiting.outcome, WaitOutcome::Stored)));
        }
        told.extend(self.admit(uid, user));
        if user.sending.is_empty() && user.waiting.is_empty() {
            users.remove(&uid);
        }
        drop(users);
        tell(told);
    }

    /// Uploads of one user.
    pub(crate) fn n_of(&self, actor: Actor) -> UploadsUsed {
        self.lock().get(&actor.uid).map(User::used).unwrap_or_default()
    }

    /// Uploads of all users.
    pub(crate) fn n_of_all(&self) -> UploadsUsed {
        let users = self.lock();
        let all = users.values().map(User::used);
        all.fold(UploadsUsed::default(), |sum, one| UploadsUsed {
            n_sending: sum.n_sending + one.n_sending,
            n_waiting: sum.n_waiting + one.n_waiting,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Stored,
    Failed,
}

impl UploadPermit {
    /// The component is there: uploads that wait for the same one have nothing left to send.
    pub(crate) fn stored(mut self) {
        self.end = End::Stored;
    }
}

impl Drop for UploadPermit {
    fn drop(&mut self) {
        self.uploads.leave(self.uid, self.hash, self.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> ComponentHash {
        ComponentHash([n; 32])
    }

    fn actor(uid: u32) -> Actor {
        Actor { uid, gid: 0 }
    }

    fn permit(receiver: &mut oneshot::Receiver<WaitOutcome>) -> UploadPermit {
        match receiver.try_recv().expect("its turn has come") {
            WaitOutcome::Send(permit) => permit,
            WaitOutcome::Stored => panic!("nobody stored it"),
        }
    }

    #[test]
    fn one_component_is_sent_once() {
        let uploads = Uploads::new(4, 8);
        let enter = || uploads.enter(actor(1), hash(1)).expect("room");
        let [mut first, mut second, mut third] = [enter(), enter(), enter()];
        let mut of_another_user = uploads.enter(actor(2), hash(1)).expect("room");
        let sending = permit(&mut first);
        let _theirs = permit(&mut of_another_user);
        assert!(second.try_recv().is_err() && third.try_recv().is_err());
        drop(sending);
        let sending = permit(&mut second);
        assert!(third.try_recv().is_err(), "one takes over");
        sending.stored();
        assert!(matches!(third.try_recv(), Ok(WaitOutcome::Stored)));
        assert_eq!(uploads.lock().len(), 1, "a user without uploads is forgotten");
    }

    #[test]
    fn who_is_over_the_limit_waits_and_is_refused_at_the_next() {
        let uploads = Uploads::new(2, 2);
        let enter = |n| uploads.enter(actor(1), hash(n));
        let mut first = enter(1).expect("room");
        let _second = enter(2).expect("room");
        let mut third = enter(3).expect("waits");
        let gone = enter(4).expect("waits");
        let error = enter(5).expect_err("too many wait");
        let used = UploadsUsed { n_sending: 2, n_waiting: 2 };
        assert_eq!((uploads.n_of(actor(1)), uploads.n_of(actor(2))), (used, UploadsUsed::default()));
        assert_eq!(uploads.n_of_all(), used);
        assert_eq!(
            (error.name.as_deref(), error.value.as_deref(), error.limit),
            (Some("waiting uploads"), Some("3"), Some(2))
        );
        drop(gone);
        let mut fifth = enter(5).expect("who has left the queue leaves room");
        drop(permit(&mut first));
        drop(permit(&mut third));
        drop(permit(&mut fifth));
    }

    #[test]
    fn who_waits_sends_once_more_may() {
        let uploads = Uploads::new(1, 8);
        let enter = |uid, n| uploads.enter(actor(uid), hash(n)).expect("room");
        let [mut first, mut second, mut third, mut fourth] = [1, 2, 3, 4].map(|n| enter(1, n));
        let [mut of_another, mut next_of_another] = [1, 2].map(|n| enter(2, n));
        let _sending = [permit(&mut first), permit(&mut of_another)];
        assert!(second.try_recv().is_err() && next_of_another.try_recv().is_err());
        uploads.set_n_max(3, 8);
        let _more = [permit(&mut second), permit(&mut third), permit(&mut next_of_another)];
        assert!(fourth.try_recv().is_err(), "three may send");
        uploads.set_n_max(1, 8);
        assert_eq!(uploads.n_of(actor(1)), UploadsUsed { n_sending: 3, n_waiting: 1 }, "those go on");
    }

    #[test]
    fn a_turn_that_nobody_takes_goes_on() {
        let uploads = Uploads::new(1, 8);
        let mut first = uploads.enter(actor(1), hash(1)).expect("room");
        let second = uploads.enter(actor(1), hash(2)).expect("waits");
        let mut third = uploads.enter(actor(1), hash(3)).expect("waits");
        let sending = permit(&mut first);
        drop(second);
        drop(sending);
        drop(permit(&mut third));
        drop(uploads.enter(actor(1), hash(1)).expect("room"));
        assert_eq!(uploads.n_of_all(), UploadsUsed::default());
        assert!(uploads.lock().is_empty());
    }
}
