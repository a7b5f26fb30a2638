//! The accounts of users and sessions, in which those of guests lie, and around all of them the daemon's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use trellis_engine::account::{Account, ActorId, Budget, Resource, SessionId, USER};

use crate::classes::{Class, Classes};
use crate::config::{Budgets, HostBytes};
use crate::groups::{PATIENCE, look_up};
use crate::limits::UNLIMITED;
use crate::live::Live;
use crate::session::Actor;

/// One account for each user, kept while the daemon runs since saved contexts are charged to it, with the class that the user
/// had when it came first; and one for each session, kept until the session ends. Where classes have been replaced since, a user
/// who has nothing in the daemon any more comes as for the first time.
#[derive(Debug)]
pub(crate) struct Accounts {
    daemon: Arc<Account>,
    user: Budget,
    session: Budget,
    /// The most host memory that a class gives to a user.
    class_host_bytes: u64,
    /// Whether a session has as much host memory as its user, whatever that is.
    is_session_as_user: bool,
    /// Classes, and how often they had been replaced when these came.
    classes: Live<(Classes, u64)>,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    users: HashMap<ActorId, User>,
    sessions: HashMap<SessionId, Arc<Account>>,
}

#[derive(Debug)]
struct User {
    account: Arc<Account>,
    class: Found,
}

/// The class of a user, and how often classes had been replaced when those came that it was taken from; not where the machine did
/// not say who is in which.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    class: Class,
    n_replaced: Option<u64>,
}

#[cfg(test)]
impl From<Class> for Found {
    fn from(class: Class) -> Self {
        Self { class, n_replaced: Some(0) }
    }
}

impl User {
    /// Whether it may come with another class, once nothing holds its account.
    fn is_old(&self, n_replaced: u64) -> bool {
        let account = &self.account;
        // What it has computed counts for as long as the daemon runs, where that is bounded.
        let is_counted = account.used(Resource::Tokens) > 0 && account.limit(Resource::Tokens) < UNLIMITED;
        self.class.n_replaced != Some(n_replaced) && !is_counted
    }

    /// Whether it may come with another class.
    fn is_over(&self, n_replaced: u64) -> bool {
        self.is_old(n_replaced) && Arc::strong_count(&self.account) == 1
    }
}

impl Accounts {
    /// Without users and classes, as [`Self::with_classes`]. `memory_bytes` is what the daemon's process may come to.
    #[cfg(test)]
    pub(crate) fn new(budgets: &Budgets, memory_bytes: u64) -> Arc<Self> {
        Self::with_classes(budgets, budgets.host_bytes(memory_bytes, u64::MAX), Classes::default())
    }

    /// Without users. `host_bytes` are those of the budgets, worked out where they say nothing.
    pub(crate) fn with_classes(budgets: &Budgets, host_bytes: HostBytes, classes: Classes) -> Arc<Self> {
        Arc::new(Self {
            daemon: Account::new("daemon", budgets.daemon.budget(host_bytes.daemon), None),
            user: budgets.user.budget(host_bytes.user),
            session: budgets.session.budget(host_bytes.session),
            class_host_bytes: host_bytes.class_most,
            is_session_as_user: budgets.session.host_bytes.is_none(),
            classes: Live::new((classes, 0)),
            open: Mutex::default(),
        })
    }

    /// The class of an actor. For one that was never here its groups may have to be looked up, on a thread that may wait.
    pub(crate) async fn class_of(&self, actor: Actor) -> Found {
        let live = self.classes.get();
        let (classes, n_replaced) = &*live;
        let kept = {
            let open = self.open();
            let user = open.users.get(&ActorId(actor.uid)).filter(|user| !user.is_over(*n_replaced));
            user.map(|user| user.class.clone())
        };
        let found = |class| Found { class, n_replaced: Some(*n_replaced) };
        if let Some(found) = kept.or_else(|| classes.at_hand(actor).map(found)) {
            return found;
        }
        let asked = live.clone();
        let looked_up = tokio::time::timeout(PATIENCE, look_up(move || asked.0.look_up(actor))).await;
        match looked_up.ok().flatten() {
            Some(Ok(class)) => found(class),
            missing => {
                let error = missing.and_then(Result::err).map(|error| error.to_string());
                tracing::warn!(
                    uid = actor.uid,
                    error,
                    "the groups of a user cannot be looked up for its class"
                );
                Found { class: classes.in_any_case(actor), n_replaced: None }
            }
        }
    }

    /// Has other classes hold for users who come from now on. Called by one at a time.
    pub(crate) fn set_classes(&self, classes: Classes) {
        let n_replaced = self.classes.get().1;
        self.classes.set((classes, n_replaced + 1));
    }

    /// Whether a user comes with another class once its process of guests is gone, which is only kept for when it comes: nothing else
    /// holds the user's account, such as a session or what the user has saved.
    #[cfg(any(target_os = "linux", test))]
    pub(crate) fn awaits_another_class(&self, actor: ActorId) -> bool {
        const N_HELD_BY_PROCESS: usize = 1;
        let n_replaced = self.classes.get().1;
        let open = self.open();
        open.users.get(&actor).is_some_and(|user| {
            user.is_old(n_replaced) && Arc::strong_count(&user.account) == 1 + N_HELD_BY_PROCESS
        })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The class of a user that was here.
    pub(crate) fn class(&self, actor: ActorId) -> Option<Class> {
        self.open().users.get(&actor).map(|user| user.class.class.clone())
    }

    /// How much of the limit of this name a user has whose class is known, where each user has `most`.
    pub(crate) fn limit_of(&self, actor: ActorId, name: &str, most: u64) -> u64 {
        self.class(actor).and_then(|class| class.limit(name, most)).unwrap_or(most)
    }

    /// As [`Self::limit_of`], for what cannot be undone: none where classes set this limit and nobody can tell which one the user is in.
    pub(crate) fn sure_limit_of(&self, actor: ActorId, name: &str, most: u64) -> Option<u64> {
        let open = self.open();
        let Found { class, n_replaced } = &open.users.get(&actor)?.class;
        match class.limit(name, most) {
            Some(own) => n_replaced.map(|_| own),
            None => Some(most),
        }
    }

    /// Opens the account of a session. The first session of a user brings its class.
    pub(crate) fn begin_session(
        &self,
        actor: ActorId,
        session: SessionId,
        class: impl Into<Found>,
    ) -> Arc<Account> {
        let mut open = self.open();
        let account = self.account_in(&mut open, actor, class.into());
        open.sessions.insert(session, account.clone());
        account
    }

    /// An account as that of a session of a user, for what is held beside its sessions: it is over when nobody has it any more.
    pub(crate) fn beside_sessions(&self, actor: ActorId, class: impl Into<Found>) -> Arc<Account> {
        self.account_in(&mut self.open(), actor, class.into())
    }

    fn account_in(&self, open: &mut Open, actor: ActorId, class: Found) -> Arc<Account> {
        let n_replaced = self.classes.get().1;
        let users = &mut open.users;
        users.retain(|other, user| *other != actor || !user.is_over(n_replaced));
        let user = users.entry(actor).or_insert_with(|| {
            let (daemon, priority) = (Some(self.daemon.clone()), class.class.priority());
            let mut budget = class.class.budget(self.user);
            budget.host_bytes = budget.host_bytes.min(self.class_host_bytes);
            let account = Account::with_priority(USER, budget, daemon, priority);
            User { account, class }
        });
        let mut budget = self.session;
        if self.is_session_as_user {
            budget.host_bytes = user.account.limit(Resource::HostBytes);
        }
        Account::new("session", budget, Some(user.account.clone()))
    }

    /// The account of a session, unless the session has ended.
    pub(crate) fn session(&self, session: SessionId) -> Option<Arc<Account>> {
        self.open().sessions.get(&session).cloned()
    }

    /// What a user has in use; a user that was never here has nothing.
    pub(crate) fn used_by(&self, actor: ActorId, resource: Resource) -> u64 {
        self.open().users.get(&actor).map_or(0, |user| user.account.used(resource))
    }

    /// What all users have in use.
    pub(crate) fn used(&self, resource: Resource) -> u64 {
        self.daemon.used(resource)
    }

    pub(crate) fn end_session(&self, session: SessionId) {
        self.open().sessions.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::account::Priority;

    use super::*;

    #[test]
    fn who_asks_after_the_end_opens_nothing() {
        let accounts = Accounts::new(&Budgets::default(), 1 << 30);
        let (actor, session) = (ActorId(7), SessionId(1));
        assert!(accounts.session(session).is_none());
        let account = accounts.begin_session(actor, session, Class::default());
        assert!(Arc::ptr_eq(&account, &accounts.session(session).expect("it has begun")));
        accounts.end_session(session);
        assert!(accounts.session(session).is_none());
        assert!(accounts.open.lock().expect("nothing panicked").sessions.is_empty());
    }

    #[test]
    fn what_is_held_beside_sessions_is_its_users() {
        let accounts = Accounts::new(&Budgets::default(), 1 << 30);
        let beside = accounts.beside_sessions(ActorId(7), Class::default());
        beside.charge(Resource::HostBytes, 5).expect("within all budgets");
        assert_eq!(accounts.used_by(ActorId(7), Resource::HostBytes), 5);
        assert!(accounts.open().sessions.is_empty());
        beside.release(Resource::HostBytes, 5);
        assert_eq!(accounts.used(Resource::HostBytes), 0);
    }

    #[test]
    fn users_are_counted_apart_and_together() {
        let accounts = Accounts::new(&Budgets::default(), 1 << 30);
        for (uid, session, n_pages) in [(7, 1, 3), (7, 2, 4), (8, 3, 5)] {
            let account = accounts.begin_session(ActorId(uid), SessionId(session), Class::default());
            account.charge(Resource::Pages, n_pages).expect("within all budgets");
        }
        let by = |uid| accounts.used_by(ActorId(uid), Resource::Pages);
        assert_eq!((by(7), by(8), by(9), accounts.used(Resource::Pages)), (7, 5, 0, 12));
    }

    #[test]
    fn all_users_together_are_held_to_what_the_daemon_has() {
        let budgets: Budgets =
            toml::from_str("[daemon]\nn_pages = 5\nn_contexts = 2\nn_tokens = 9").expect("valid");
        let accounts = Accounts::new(&budgets, 1 << 30);
        let of = |uid| accounts.begin_session(ActorId(uid), SessionId(uid.into()), Class::default());
        for (resource, limit) in [(Resource::Pages, 5), (Resource::Contexts, 2), (Resource::Tokens, 9)] {
            of(1).charge(resource, limit).expect("all of it");
            let exceeded = of(2).charge(resource, 1).expect_err("nothing is left");
            assert_eq!((exceeded.level, exceeded.limit), ("daemon", limit), "{resource:?}");
        }
    }

    #[test]
    fn no_user_comes_to_more_than_half_of_what_the_others_leave() {
        let accounts = Accounts::new(&Budgets::default(), 3 << 30);
        let (one, other) = (ActorId(1), ActorId(2));
        let take = |actor, session| {
            let account = accounts.begin_session(actor, SessionId(session), Class::default());
            let mut n_bytes = 0;
            let exceeded = loop {
                match account.charge(Resource::HostBytes, 1 << 20) {
                    Ok(()) => n_bytes += 1 << 20,
                    Err(exceeded) => break exceeded,
                }
            };
            (n_bytes, exceeded.level)
        };
        let (n_bytes, level) = take(one, 1);
        assert_eq!((n_bytes, level), (512 << 20, "session"));
        assert_eq!(take(one, 2), (0, USER));
        assert_eq!(take(other, 3), (256 << 20, "user beside others"));
        assert_eq!(take(ActorId(3), 4), (128 << 20, "user beside others"));
    }

    #[tokio::test]
    async fn a_user_keeps_the_class_that_it_came_with() {
        let settings =
            toml::from_str("[fast]\nusers = [7, 8]\ngroups = [70]\nshare = 3\nrank = 1").expect("valid");
        let classes = Classes::of(&settings).expect("there are no names in it");
        let budgets = Budgets::default();
        let accounts = Accounts::with_classes(&budgets, budgets.host_bytes(1 << 30, u64::MAX), classes);
        // The machine knows no such user: the group of its connection counts for nothing.
        let uid = u32::MAX - 9;
        let begin = async |uid, gid, session| {
            let class = accounts.class_of(Actor { uid, gid }).await;
            accounts.begin_session(ActorId(uid), SessionId(session), class).priority()
        };
        let fast = begin(7, 1, 1).await;
        assert_eq!((fast.share.get(), fast.rank), (3, 1));
        assert_eq!(begin(8, 1, 2).await, fast);
        assert_eq!(begin(uid, 70, 3).await, Priority::EVEN);
        assert_eq!(begin(uid - 1, 1, 4).await, Priority::EVEN);

        // And where classes are replaced, for as long as it has something in the daemon.
        let slow = toml::from_str("[slow]\nusers = [7]\nshare = 2").expect("valid");
        let kept = accounts.session(SessionId(1)).expect("it has begun").user().clone();
        accounts.set_classes(Classes::of(&slow).expect("there are no names in it"));
        let awaits = || accounts.awaits_another_class(ActorId(7));
        assert_eq!(begin(7, 1, 5).await, fast);
        assert!(!awaits(), "it is there");
        for session in [1, 5] {
            accounts.end_session(SessionId(session));
        }
        assert!(awaits(), "its account is kept by its process of guests");
        let saved = kept.clone();
        assert!(!awaits(), "it would come with the same class: it has saved something");
        drop(saved);
        assert!(awaits());
        drop(kept);
        assert_eq!(begin(7, 1, 6).await.share.get(), 2);
        assert!(!awaits());
        accounts.end_session(SessionId(6));
        assert_eq!(begin(7, 1, 7).await.share.get(), 2);
        assert_eq!(begin(8, 1, 8).await, fast, "it was here all the time");
        let name = |uid| accounts.class(ActorId(uid)).map(|class| class.name().to_owned());
        assert_eq!((name(7), name(uid - 1), name(9)), (Some("slow".into()), Some("default".into()), None));
    }

    #[tokio::test]
    async fn a_user_of_a_class_has_what_that_says_within_what_the_daemon_has() {
        let settings = toml::from_str(
            "[lab]\nusers = [7]\n[lab.limits]\nn_pages = 9\nn_contexts = 50\nhost_bytes = 4096",
        );
        let classes = Classes::of(&settings.expect("valid")).expect("there are no names in it");
        let budgets: Budgets = toml::from_str(
            "[user]\nn_pages = 5\n[session]\nn_pages = 100\nn_contexts = 100\n[daemon]\nn_contexts = 20",
        )
        .expect("valid");
        let accounts = Accounts::with_classes(&budgets, budgets.host_bytes(1 << 30, u64::MAX), classes);
        let begin = async |uid| {
            let class = accounts.class_of(Actor { uid, gid: 1 }).await;
            accounts.begin_session(ActorId(uid), SessionId(uid.into()), class)
        };
        let exceeded = |account: &Arc<Account>, resource, n| {
            let exceeded = account.charge(resource, n).expect_err("it is more");
            (exceeded.level, exceeded.limit)
        };
        let lab = begin(7).await;
        lab.charge(Resource::Pages, 9).expect("as its class says");
        assert_eq!(exceeded(&lab, Resource::Pages, 1), (USER, 9));
        assert_eq!(exceeded(&lab, Resource::Contexts, 21), ("daemon", 20), "never above the daemon's");
        assert_eq!(exceeded(&lab, Resource::HostBytes, 4097).1, 4096);
        assert_eq!(lab.limit(Resource::HostBytes), 4096, "its session has no more to itself");
        let other = begin(8).await;
        assert_eq!(exceeded(&other, Resource::Pages, 6), (USER, 5));
    }

    #[tokio::test]
    async fn a_class_gives_no_more_host_memory_than_the_process_of_its_user_leaves() {
        let settings = toml::from_str("[lab]\nusers = [7]\n[lab.limits]\nhost_bytes = 99999999999");
        let classes = Classes::of(&settings.expect("valid")).expect("there are no names in it");
        let budgets = Budgets::default();
        let accounts = Accounts::with_classes(&budgets, budgets.host_bytes(48 << 30, 5 << 30), classes);
        let class = accounts.class_of(Actor { uid: 7, gid: 1 }).await;
        let session = accounts.begin_session(ActorId(7), SessionId(1), class);
        let of_both = [&session, session.user()].map(|account| account.limit(Resource::HostBytes));
        assert_eq!(of_both, [5 << 30; 2]);
    }
}
