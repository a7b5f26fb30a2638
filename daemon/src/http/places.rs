//! Places for connections: as many as the settings give to the front, of those that the daemon has descriptors for.
//!
//! On a loopback address nobody is known before its first request with a token. Until then a connection has a place among those that are
//! nobody's, of which the oldest goes where another comes, and which it has for a short time only: whoever has no token keeps nobody
//! out that has one. From that request on the place is the user's.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::failure::Failure;
use crate::ipc;
use crate::session::{Actor, Quota, QuotaPermit};

/// Whose a connection on a loopback address is until a token says it: nobody's that the system knows. They are together one user
/// more beside those of the daemon's own socket.
const UNKNOWN: Actor = Actor { uid: u32::MAX, gid: u32::MAX };

/// The places that are nobody's, in those of a user.
const USERS_OF_UNKNOWN: usize = 4;

/// How long a connection may be nobody's before it has asked for anything.
const UNKNOWN_TIME: Duration = Duration::from_secs(5);

/// The places of the front.
#[derive(Debug)]
pub(super) struct Places {
    /// Those of each user.
    of_users: Arc<Quota>,
    unknown: Mutex<Unknown>,
    n_unknown_max: usize,
    /// Told when one of those that are nobody's is free again.
    is_freed: Notify,
    /// Those of the daemon, its own socket included.
    of_daemon: Arc<ipc::Places>,
}

/// Connections that are nobody's yet.
#[derive(Debug, Default)]
struct Unknown {
    n_come: u64,
    n: usize,
    /// How each is told to go, by the order in which they came. One that was told is not here.
    to_go: BTreeMap<u64, CancellationToken>,
}

/// Held for as long as a connection lasts.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    of_front: Mutex<OfFront>,
    of_daemon: Mutex<ipc::Place>,
    /// That it is to go, while it is nobody's.
    goes: CancellationToken,
}

#[derive(Debug)]
enum OfFront {
    User(u32, #[expect(dead_code, reason = "it is held")] QuotaPermit),
    Unknown {
        _among: AmongUnknown,
        /// Whether it has asked for something, and whose that is is being found out.
        is_asking: bool,
    },
}

/// A place among those that are nobody's.
#[derive(Debug)]
struct AmongUnknown {
    places: Arc<Places>,
    number: u64,
}

impl Drop for AmongUnknown {
    fn drop(&mut self) {
        let mut unknown = self.places.unknown();
        unknown.n -= 1;
        unknown.to_go.remove(&self.number);
        drop(unknown);
        self.places.is_freed.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Places {
    /// So many for each user, and [`USERS_OF_UNKNOWN`] times as many for all together whom nobody knows; all among those of the daemon.
    pub(super) fn new(n: usize, of_daemon: Arc<ipc::Places>) -> Arc<Self> {
        Arc::new(Self {
            of_users: Quota::new(n),
            unknown: Mutex::default(),
            n_unknown_max: n.saturating_mul(USERS_OF_UNKNOWN),
            is_freed: Notify::new(),
            of_daemon,
        })
    }

    fn unknown(&self) -> MutexGuard<'_, Unknown> {
        lock(&self.unknown)
    }

    /// One more for a user; none where it has all that it may have, or the daemon has no more.
    pub(super) fn take(self: &Arc<Self>, actor: Actor) -> Option<Place> {
        let of_front = OfFront::User(actor.uid, self.of_users.take(actor)?);
        let of_daemon = self.of_daemon.take(actor).ok()?;
        Some(self.place(of_front, of_daemon, CancellationToken::new()))
    }

    fn place(self: &Arc<Self>, of_front: OfFront, of_daemon: ipc::Place, goes: CancellationToken) -> Place {
        let (of_front, of_daemon) = (Mutex::new(of_front), Mutex::new(of_daemon));
        Place { places: self.clone(), of_front, of_daemon, goes }
    }

    /// One more whose connection is nobody's yet. Where there is none, the oldest of those connections is told to go, and waited for:
    /// none where the daemon has no more though all of them have gone. For one at a time.
    pub(super) async fn take_unknown(self: &Arc<Self>) -> Option<Place> {
        loop {
            if let Some(place) = self.try_take_unknown() {
                return Some(place);
            }
            let (oldest, n) = {
                let mut unknown = self.unknown();
                (unknown.to_go.pop_first(), unknown.n)
            };
            match oldest {
                Some((_, goes)) => goes.cancel(),
                // Those that were told before are on their way.
                None if n > 0 => {}
                None => return None,
            }
            while self.unknown().n >= n {
                self.is_freed.notified().await;
            }
        }
    }

    fn try_take_unknown(self: &Arc<Self>) -> Option<Place> {
        if self.unknown().n >= self.n_unknown_max {
            return None;
        }
        let of_daemon = self.of_daemon.take(UNKNOWN).ok()?;
        let goes = CancellationToken::new();
        let mut unknown = self.unknown();
        let number = unknown.n_come;
        unknown.n_come += 1;
        unknown.n += 1;
        unknown.to_go.insert(number, goes.clone());
        drop(unknown);
        let _among = AmongUnknown { places: self.clone(), number };
        Some(self.place(OfFront::Unknown { _among, is_asking: false }, of_daemon, goes))
    }
}

impl Place {
    /// Its connection has asked for something.
    pub(super) fn asks(&self) {
        if let OfFront::Unknown { is_asking, .. } = &mut *lock(&self.of_front) {
            *is_asking = true;
        }
    }

    /// Has it be this user's from now on, if it is not yet.
    ///
    /// # Errors
    /// The user has as many as it may have.
    pub(super) fn is_of(&self, actor: Actor) -> Result<(), Failure> {
        let mut of_front = lock(&self.of_front);
        if matches!(*of_front, OfFront::User(uid, _) if uid == actor.uid) {
            return Ok(());
        }
        let places = &self.places;
        let permit = places.of_users.take(actor).ok_or_else(|| {
            let limit = places.of_users.n_max();
            Failure::too_many_connections(format!("this user has {limit} connections, which is the limit"))
        })?;
        let passed = places.of_daemon.pass(&mut lock(&self.of_daemon), actor);
        passed.map_err(|error| Failure::too_many_connections(error.to_string()))?;
        *of_front = OfFront::User(actor.uid, permit);
        Ok(())
    }

    /// Resolves when its connection has to go that is nobody's: another comes, or it has asked for nothing in this time, or in
    /// [`UNKNOWN_TIME`] if that is less.
    pub(super) async fn has_to_go(&self, time: Duration) {
        let is_late = async {
            tokio::time::sleep(time.min(UNKNOWN_TIME)).await;
            if self.has_asked() {
                pending::<()>().await;
            }
        };
        tokio::select! {
            () = self.goes.cancelled() => {}
            () = is_late => {}
        }
        if self.is_users() {
            pending::<()>().await;
        }
    }

    fn has_asked(&self) -> bool {
        matches!(*lock(&self.of_front), OfFront::User(..) | OfFront::Unknown { is_asking: true, .. })
    }

    fn is_users(&self) -> bool {
        matches!(*lock(&self.of_front), OfFront::User(..))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn user(uid: u32) -> Actor {
        Actor { uid, gid: 0 }
    }

    fn of(n: usize, n_of_daemon: usize) -> (Arc<Places>, Arc<ipc::Places>) {
        let of_daemon = Arc::new(ipc::Places::new(n_of_daemon));
        (Places::new(n, of_daemon.clone()), of_daemon)
    }

    fn has_to_go(place: &Place) -> bool {
        place.has_to_go(LONG).now_or_never().is_some()
    }

    #[test]
    fn users_have_no_more_than_the_daemon_has_descriptors_for() {
        let (places, of_daemon) = of(256, 4);
        let taken: Vec<_> = (1..9).filter_map(|uid| places.take(user(uid))).collect();
        assert_eq!(taken.len(), 4);
        assert!(of_daemon.take(user(9)).is_err(), "its own socket has none left either");
        assert!(places.take_unknown().now_or_never().expect("nobody is waited for").is_none());
        drop(taken);
        let taken: Vec<_> = (0..9).filter_map(|_| places.try_take_unknown()).collect();
        assert_eq!(taken.len(), 2, "whom nobody knows leave as many to others");
        assert!(places.take(user(1)).is_some());
    }

    #[test]
    fn each_user_has_what_the_settings_say_and_all_whom_nobody_knows_together() {
        let (places, _) = of(2, 100);
        for uid in [1, 2] {
            let taken: Vec<_> = (0..9).filter_map(|_| places.take(user(uid))).collect();
            assert_eq!(taken.len(), 2);
            drop(taken);
            assert!(places.take(user(uid)).is_some());
        }
        let taken: Vec<_> = (0..99).filter_map(|_| places.try_take_unknown()).collect();
        assert_eq!(taken.len(), 2 * USERS_OF_UNKNOWN);
    }

    #[tokio::test]
    async fn the_oldest_that_is_nobodys_goes_for_who_comes() {
        let (places, _) = of(1, 100);
        let mut taken: Vec<_> = (0..USERS_OF_UNKNOWN).filter_map(|_| places.try_take_unknown()).collect();
        let known = taken.remove(0);
        known.is_of(user(7)).expect("it has none");
        taken.push(places.try_take_unknown().expect("that of the user is free"));
        assert!(!taken.iter().any(has_to_go));
        let mut comes = Box::pin(places.take_unknown());
        assert!(comes.as_mut().now_or_never().is_none(), "the oldest is waited for");
        assert!(has_to_go(&taken[0]) && !taken[1..].iter().any(has_to_go) && !has_to_go(&known));
        drop(taken.remove(0));
        let come = comes.await.expect("there is room");
        assert!(!has_to_go(&come) && !taken.iter().any(has_to_go), "one goes for one that comes");
    }

    #[tokio::test]
    async fn who_asks_for_nothing_goes_soon_and_who_has_asked_stays() {
        let (places, _) = of(2, 100);
        let [silent, asking, known] = [0; 3].map(|_| places.try_take_unknown().expect("there is room"));
        asking.asks();
        known.is_of(user(7)).expect("it has none");
        let soon = Duration::from_millis(20);
        tokio::time::timeout(LONG, silent.has_to_go(soon)).await.expect("it goes");
        for stays in [&asking, &known] {
            assert!(tokio::time::timeout(soon * 10, stays.has_to_go(soon)).await.is_err());
        }
    }

    #[test]
    fn a_place_is_its_users_from_its_token_on() {
        let (places, of_daemon) = of(1, 8);
        let [one, other] = [0; 2].map(|_| places.try_take_unknown().expect("there is room"));
        one.is_of(user(7)).expect("it has none");
        one.is_of(user(7)).expect("it is its own");
        let failure = other.is_of(user(7)).expect_err("it has one");
        assert_eq!((failure.status.as_u16(), failure.code.as_str()), (429, "too_many_connections"));
        assert!(of_daemon.take(user(7)).is_ok() && places.unknown().n == 1);
        one.is_of(user(8)).expect("it has none");
        other.is_of(user(7)).expect("it was given back");
        drop((one, other));
        assert!(places.take(user(7)).is_some() && places.unknown().n == 0);
    }
}
