//! The groups of users, looked up when they are asked for and remembered for some seconds.
//!
//! - Comes in: users; the machine's directory, which may be a server that is slow or away.
//! - Goes out: their groups, or an error that may be tried again. Whoever is taken out of a group is soon
//!   in it no more.
//! - One look-up of a user serves all who ask for it, and goes on where none of them waits any longer. A few go on at a time, of all
//!   users together: each takes a thread for as long as the directory takes.
//! - Must not happen: a look-up that failed and counts as an answer; groups by what a client says. A user that the machine does not
//!   know is in none.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use tokio::sync::Semaphore;
use trellis_wire::{ErrorBody, ErrorCode};

use crate::directory::Directory;

/// How long the groups of a user are remembered.
const GROUPS_TIME: Duration = Duration::from_secs(10);

/// How long whoever asks waits for the directory.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Look-ups that go on at a time.
const N_LOOK_UPS: usize = 4;

static TURNS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(N_LOOK_UPS)));

/// What a look-up has come to; none where it failed.
type Flight = Shared<BoxFuture<'static, Option<Arc<[u32]>>>>;

#[derive(Debug)]
enum Entry {
    Known { read: Instant, gids: Arc<[u32]> },
    Coming(Flight),
}

type Known = Mutex<HashMap<u32, Entry>>;

#[derive(Debug)]
pub(crate) struct Groups {
    directory: Arc<dyn Directory>,
    turns: Arc<Semaphore>,
    patience: Duration,
    known: Arc<Known>,
}

impl Groups {
    pub(crate) fn of_directory(directory: Arc<dyn Directory>) -> Self {
        Self { directory, turns: TURNS.clone(), patience: PATIENCE, known: Arc::default() }
    }

    /// The groups of a user.
    ///
    /// # Errors
    /// The directory does not say, or not in time; it may at another.
    pub(crate) async fn of(&self, uid: u32) -> Result<Arc<[u32]>, ErrorBody> {
        let flight = {
            let mut known = locked(&self.known);
            known.retain(|_, entry| match entry {
                Entry::Known { read, .. } => read.elapsed() < GROUPS_TIME,
                Entry::Coming(_) => true,
            });
            match known.get(&uid) {
                Some(Entry::Known { gids, .. }) => return Ok(gids.clone()),
                Some(Entry::Coming(flight)) => flight.clone(),
                None => {
                    let flight = self.look_up(uid);
                    known.insert(uid, Entry::Coming(flight.clone()));
                    flight
                }
            }
        };
        let answer = tokio::time::timeout(self.patience, flight).await;
        answer.ok().flatten().ok_or_else(|| no_answer(uid))
    }

    /// In a task of its own: who has asked may be gone when the answer comes.
    fn look_up(&self, uid: u32) -> Flight {
        let (directory, turns, known) = (self.directory.clone(), self.turns.clone(), self.known.clone());
        let task = tokio::spawn(async move {
            let gids: Option<Arc<[u32]>> = match in_turn(turns, move || directory.groups_of(uid)).await {
                Some(Ok(gids)) => Some(gids.unwrap_or_default().into()),
                Some(Err(error)) => {
                    tracing::warn!(uid, %error, "the groups of a user cannot be looked up");
                    None
                }
                None => None,
            };
            let mut known = locked(&known);
            match &gids {
                Some(gids) => known.insert(uid, Entry::Known { read: Instant::now(), gids: gids.clone() }),
                None => known.remove(&uid),
            };
            gids
        });
        async move { task.await.ok().flatten() }.boxed().shared()
    }

    /// Whether nothing is known or looked up.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        locked(&self.known).is_empty()
    }
}

fn locked(known: &Known) -> MutexGuard<'_, HashMap<u32, Entry>> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the directory when it is its turn among all look-ups; none where that panics.
pub(crate) async fn look_up<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    in_turn(TURNS.clone(), work).await
}

async fn in_turn<T: Send + 'static>(
    turns: Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let turn = turns.acquire_owned().await.ok()?;
    let work = move || {
        // Until the thread is free, whether or not anybody waits for it.
        let _turn = turn;
        work()
    };
    tokio::task::spawn_blocking(work).await.ok()
}

fn no_answer(uid: u32) -> ErrorBody {
    let message = format!(
        "the groups of user {uid} cannot be looked up now, and what it may do depends on them; try again"
    );
    ErrorBody::new(ErrorCode::Overloaded, message).about("groups").with_value(uid)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;
    use crate::directory::Kind;
    use crate::directory::village::Village;

    /// The village, which answers when it is told to.
    #[derive(Debug)]
    struct Slow {
        answers: Mutex<mpsc::Receiver<()>>,
        n_asked: AtomicUsize,
    }

    impl Directory for Slow {
        fn id(&self, kind: Kind, name: &str) -> io::Result<Option<u32>> {
            Village.id(kind, name)
        }

        fn names(&self, kind: Kind) -> BTreeSet<String> {
            Village.names(kind)
        }

        fn groups_of(&self, uid: u32) -> io::Result<Option<Vec<u32>>> {
            self.n_asked.fetch_add(1, Ordering::SeqCst);
            let _ = self.answers.lock().expect("nothing panicked").recv();
            Village.groups_of(uid)
        }
    }

    fn groups(n_turns: usize, patience: Duration) -> (Groups, Arc<Slow>, mpsc::Sender<()>) {
        let (sender, receiver) = mpsc::channel();
        let slow = Arc::new(Slow { answers: Mutex::new(receiver), n_asked: AtomicUsize::new(0) });
        let turns = Arc::new(Semaphore::new(n_turns));
        let groups = Groups { directory: slow.clone(), turns, patience, known: Arc::default() };
        (groups, slow, sender)
    }

    #[tokio::test]
    async fn one_look_up_serves_all_who_ask_and_goes_on_where_none_waits() {
        let (groups, slow, answer) = groups(1, Duration::from_millis(50));
        for refused in <[_; 3]>::from(tokio::join!(groups.of(1), groups.of(1), groups.of(2))) {
            let error = refused.expect_err("nothing comes in time");
            assert!(error.code.is_retryable() && error.name.as_deref() == Some("groups"), "{error:?}");
        }
        assert!(slow.n_asked.load(Ordering::SeqCst) <= 1, "the other user waits for a turn");
        drop(answer);
        let wait = async { while groups.of(1).await.is_err() || groups.of(2).await.is_err() {} };
        tokio::time::timeout(Duration::from_secs(60), wait).await.expect("it comes");
        assert_eq!(slow.n_asked.load(Ordering::SeqCst), 2);
        assert_eq!(*groups.of(1).await.expect("it is known"), [10, 11]);
    }

    #[tokio::test]
    async fn failures_are_not_remembered_and_who_is_unknown_is_in_no_group() {
        let (groups, slow, answer) = groups(1, Duration::from_secs(60));
        drop(answer);
        for n in 1..=2 {
            assert!(groups.of(3).await.expect_err("the village does not say").code.is_retryable());
            assert_eq!(slow.n_asked.load(Ordering::SeqCst), n);
        }
        assert!(groups.is_empty());
        assert!(groups.of(9).await.expect("it answers").is_empty());
    }
}
