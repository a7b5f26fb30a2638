//! Budgets that nest: what a user, a session and a guest may use.

mod host_charge;
mod lease;
mod priority;
mod prompts;
mod share;
mod step_log;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

pub use self::host_charge::HostCharge;
use self::lease::Lease;
pub use self::lease::{Lender, Lending};
pub use self::priority::Priority;
pub use self::prompts::Prompts;
pub use self::share::most_beside_others;
pub use self::step_log::{StepLog, StepNote};
use crate::archive::Restored;
use crate::causes::{Cause, Causes, Tally};
use crate::port::{Name, names_of_budgets};

/// Something that is counted and bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resource {
    /// Tokens computed; never given back.
    Tokens,
    /// KV pages held.
    Pages,
    /// Those of them that are in host memory; counted, and bounded by what the device has of it.
    HostPages,
    /// Contexts open or saved.
    Contexts,
    /// Bytes of host memory: on a guest's account for its token lists, masks and grammars, what its generations have drawn and its
    /// calls hold, on those above it for the memory of guests, their code, inboxes and outputs as well.
    HostBytes,
}

impl Resource {
    /// The name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Pages => "pages",
            Self::HostPages => "pages in host memory",
            Self::Contexts => "contexts",
            Self::HostBytes => "bytes of host memory",
        }
    }
}

/// The most of each resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// Tokens computed.
    pub n_tokens: u64,
    /// KV pages held at once.
    pub n_pages: u64,
    /// Contexts at once.
    pub n_contexts: u64,
    /// Bytes of host memory at once.
    pub host_bytes: u64,
}

impl Budget {
    /// No bound but the device's.
    pub const UNLIMITED: Self =
        Self { n_tokens: u64::MAX, n_pages: u64::MAX, n_contexts: u64::MAX, host_bytes: u64::MAX };
}

/// A budget would be passed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{what} of the {level}: {used} of {limit} in use, {requested} more asked for")]
pub struct BudgetExceeded {
    /// The resource.
    #[serde(with = "names_of_budgets")]
    pub what: Name,
    /// Whose budget: `guest`, `session`, `user` or `daemon`; `user beside others` where the user would leave less to the
    /// next one than it had itself.
    #[serde(with = "names_of_budgets")]
    pub level: Name,
    /// In use.
    pub used: u64,
    /// Asked for on top.
    pub requested: u64,
    /// The most.
    pub limit: u64,
}

#[derive(Debug)]
struct Meter {
    used: AtomicU64,
    limit: u64,
}

/// What one user, session or guest uses. Charges go to every enclosing account, or to none.
#[derive(Debug)]
pub struct Account {
    level: &'static str,
    parent: Option<Arc<Account>>,
    priority: Priority,
    tokens: Meter,
    pages: Meter,
    host_pages: Meter,
    contexts: Meter,
    host_bytes: Meter,
    causes: Tally,
    n_tokens_cached: AtomicU64,
    n_tokens_restored: AtomicU64,
    n_bytes_restored: AtomicU64,
    restoring_us: AtomicU64,
    n_tokens_guessed: AtomicU64,
    n_tokens_guessed_right: AtomicU64,
    n_tokens_forced: AtomicU64,
    prompts: Prompts,
    /// Room for operations that no engine has read.
    operations: Arc<Semaphore>,
    /// The steps with rows of it, once somebody looks on.
    steps: OnceLock<Arc<StepLog>>,
    /// What the daemon has lent to it, in another process.
    lease: Option<Lease>,
}

/// What engines have counted for a guest, at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    n_tokens: u64,
    n_pages: u64,
    causes: Causes,
    n_tokens_cached: u64,
    n_tokens_restored: u64,
    n_bytes_restored: u64,
    restoring_us: u64,
    n_tokens_guessed: u64,
    n_tokens_guessed_right: u64,
    n_tokens_forced: u64,
}

/// The level of a user's account.
pub const USER: &str = "user";

/// The level in errors where a user would have more than it leaves to others.
pub const BESIDE_OTHERS: &str = "user beside others";

/// Operations of one guest that engines have not read. Enough for every context of a large batch to have one on its way;
/// past that this guest waits, and no other.
pub(crate) const N_OPERATIONS_MAX: usize = 1024;

/// The same of all guests of a user, those included that have ended: one after the other could leave as many behind.
const N_USER_OPERATIONS_MAX: usize = 4 * N_OPERATIONS_MAX;

/// Tokens on their way with an operation that take the room of one more, of what its user has: 128 MiB of them wait at most, where
/// none brings more than 32 MiB, which is as much as one counts.
const N_TOKENS_PER_OPERATION: usize = 8192;

/// The room that an operation with so many tokens takes, of what there is for operations.
pub(crate) fn n_permits(n_tokens: usize) -> u32 {
    // No more than a guest without a user has: one that asks for more than there is would wait for ever. And a quarter of what a
    // user has: what its other guests ask does not wait until one operation has it all.
    (1 + n_tokens / N_TOKENS_PER_OPERATION).min(N_OPERATIONS_MAX) as u32
}

impl Account {
    /// An account under `parent`, with its priority.
    #[must_use]
    pub fn new(level: &'static str, budget: Budget, parent: Option<Arc<Account>>) -> Arc<Self> {
        let priority = parent.as_ref().map_or(Priority::EVEN, |parent| parent.priority);
        Self::with(level, budget, parent, priority, None)
    }

    /// An account under `parent` with a priority of its own: a user's.
    #[must_use]
    pub fn with_priority(
        level: &'static str,
        budget: Budget,
        parent: Option<Arc<Account>>,
        priority: Priority,
    ) -> Arc<Self> {
        Self::with(level, budget, parent, priority, None)
    }

    /// An account of another process: of some resources what it may use is lent to it by the daemon.
    #[must_use]
    pub fn lent(
        level: &'static str,
        budget: Budget,
        parent: Option<Arc<Account>>,
        lender: Arc<dyn Lender>,
        lendings: &[Lending],
    ) -> Arc<Self> {
        // Engines, whose business priorities are, have the daemon's account.
        let priority = parent.as_ref().map_or(Priority::EVEN, |parent| parent.priority);
        Self::with(level, budget, parent, priority, Some(Lease::new(lender, lendings)))
    }

    fn with(
        level: &'static str,
        budget: Budget,
        parent: Option<Arc<Account>>,
        priority: Priority,
        lease: Option<Lease>,
    ) -> Arc<Self> {
        let meter = |limit| Meter { used: AtomicU64::new(0), limit };
        Arc::new(Self {
            level,
            parent,
            priority,
            tokens: meter(budget.n_tokens),
            pages: meter(budget.n_pages),
            host_pages: meter(u64::MAX),
            contexts: meter(budget.n_contexts),
            host_bytes: meter(budget.host_bytes),
            causes: Tally::default(),
            n_tokens_cached: AtomicU64::new(0),
            n_tokens_restored: AtomicU64::new(0),
            n_bytes_restored: AtomicU64::new(0),
            restoring_us: AtomicU64::new(0),
            n_tokens_guessed: AtomicU64::new(0),
            n_tokens_guessed_right: AtomicU64::new(0),
            n_tokens_forced: AtomicU64::new(0),
            prompts: Prompts::default(),
            operations: Arc::new(Semaphore::new(match level {
                USER => N_USER_OPERATIONS_MAX,
                _ => N_OPERATIONS_MAX,
            })),
            steps: OnceLock::new(),
            lease,
        })
    }

    /// Room for operations of this guest; one takes a permit until an engine has read it.
    pub(crate) fn operations(&self) -> &Arc<Semaphore> {
        &self.operations
    }

    /// The same of its user, if it has one.
    pub(crate) fn operations_of_user(&self) -> Option<&Arc<Semaphore>> {
        match self.level {
            USER => Some(&self.operations),
            _ => self.parent.as_ref()?.operations_of_user(),
        }
    }

    /// Has the steps of a guest noted from here on.
    pub fn watch_steps(&self) -> Arc<StepLog> {
        self.steps.get_or_init(Arc::default).clone()
    }

    /// Where its steps are noted, if somebody looks on.
    pub(crate) fn steps(&self) -> Option<&StepLog> {
        self.steps.get().map(Arc::as_ref)
    }

    fn meter(&self, resource: Resource) -> &Meter {
        match resource {
            Resource::Tokens => &self.tokens,
            Resource::Pages => &self.pages,
            Resource::HostPages => &self.host_pages,
            Resource::Contexts => &self.contexts,
            Resource::HostBytes => &self.host_bytes,
        }
    }

    /// Charges this account and every enclosing one.
    ///
    /// # Errors
    /// The innermost budget that would be passed; nothing is charged then.
    pub fn charge(&self, resource: Resource, n: u64) -> Result<(), BudgetExceeded> {
        if n == 0 {
            // Whoever has more than it may have by now is refused nothing but more.
            return Ok(());
        }
        let meter = self.meter(resource);
        let limit = self.limit_beside_others(resource, n);
        let charged = meter.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(n).filter(|&sum| sum <= limit)
        });
        if let Err(used) = charged {
            let is_its_own = used.saturating_add(n) > meter.limit;
            let level = if is_its_own { self.level } else { BESIDE_OTHERS };
            let limit = if is_its_own { meter.limit } else { limit };
            return Err(BudgetExceeded { what: resource.name(), level, used, requested: n, limit });
        }
        let lent = self.lease.as_ref().map_or(Ok(()), |lease| lease.cover(resource, n));
        if let Err(exceeded) = lent {
            meter.used.fetch_sub(n, Ordering::Relaxed);
            return Err(exceeded);
        }
        let charged = self.parent.as_ref().map_or(Ok(()), |parent| parent.charge(resource, n));
        if charged.is_err() {
            meter.used.fetch_sub(n, Ordering::Relaxed);
            if let Some(lease) = &self.lease {
                lease.uncover(resource, n, &meter.used);
            }
        }
        charged
    }

    /// The most that this account may come to with `n` more: a user's is less while others use much of what all may.
    fn limit_beside_others(&self, resource: Resource, n: u64) -> u64 {
        let limit = self.meter(resource).limit;
        match &self.parent {
            // Tokens are never given back: what others had once would count for ever.
            Some(all) if self.level == USER && resource != Resource::Tokens => {
                share::most(limit, all.meter(resource), n)
            }
            _ => limit,
        }
    }

    /// Charges this account and every enclosing one, also past their limits: for what passes from one holder to
    /// another and is held already.
    pub(crate) fn charge_beyond(&self, resource: Resource, n: u64) {
        self.meter(resource).used.fetch_add(n, Ordering::Relaxed);
        if let Some(parent) = &self.parent {
            parent.charge_beyond(resource, n);
        }
    }

    /// Gives back what was charged.
    pub fn release(&self, resource: Resource, n: u64) {
        let before = self.meter(resource).used.fetch_sub(n, Ordering::Relaxed);
        assert!(before >= n, "{} {} released, {before} charged", n, resource.name());
        if let Some(lease) = &self.lease {
            lease.uncover(resource, n, &self.meter(resource).used);
        }
        if let Some(parent) = &self.parent {
            parent.release(resource, n);
        }
    }

    /// What engines have counted for it.
    #[must_use]
    pub fn counted(&self) -> Counted {
        Counted {
            n_tokens: self.used(Resource::Tokens),
            n_pages: self.used(Resource::Pages),
            causes: self.causes(),
            n_tokens_cached: self.n_tokens_cached(),
            n_tokens_restored: self.n_tokens_restored(),
            n_bytes_restored: self.n_bytes_restored(),
            restoring_us: self.restoring_us(),
            n_tokens_guessed: self.n_tokens_guessed(),
            n_tokens_guessed_right: self.n_tokens_guessed_right(),
            n_tokens_forced: self.n_tokens_forced(),
        }
    }

    /// Takes over what engines of another process have counted for it there. It is not charged here.
    pub fn take_over(&self, counted: &Counted) {
        let pairs = [
            (&self.tokens.used, counted.n_tokens),
            (&self.pages.used, counted.n_pages),
            (&self.n_tokens_cached, counted.n_tokens_cached),
            (&self.n_tokens_restored, counted.n_tokens_restored),
            (&self.n_bytes_restored, counted.n_bytes_restored),
            (&self.restoring_us, counted.restoring_us),
            (&self.n_tokens_guessed, counted.n_tokens_guessed),
            (&self.n_tokens_guessed_right, counted.n_tokens_guessed_right),
            (&self.n_tokens_forced, counted.n_tokens_forced),
        ];
        for (here, there) in pairs {
            here.store(there, Ordering::Relaxed);
        }
        self.causes.set(&counted.causes);
    }

    /// How much is in use.
    #[must_use]
    pub fn used(&self, resource: Resource) -> u64 {
        self.meter(resource).used.load(Ordering::Relaxed)
    }

    /// Whether at least half would be free with so many more in use, here and in every enclosing account.
    pub(crate) fn is_half_free_beside(&self, resource: Resource, n: u64) -> bool {
        let Meter { used, limit } = self.meter(resource);
        used.load(Ordering::Relaxed).saturating_add(n) <= limit / 2
            && self.parent.as_ref().is_none_or(|parent| parent.is_half_free_beside(resource, n))
    }

    /// The most that may be in use, here and in every enclosing account.
    #[must_use]
    pub fn limit(&self, resource: Resource) -> u64 {
        let above = self.parent.as_ref().map_or(u64::MAX, |parent| parent.limit(resource));
        self.meter(resource).limit.min(above)
    }

    /// Counts what was computed in vain or waited for.
    pub(crate) fn note(&self, cause: Cause, n: u64) {
        self.causes.add(cause, n);
    }

    /// Counts tokens that the prefix cache held already.
    pub fn note_cached(&self, n: u64) {
        self.n_tokens_cached.fetch_add(n, Ordering::Relaxed);
    }

    /// Counts a saved context that came back from an archive: the tokens of which it had the KV, and what that cost.
    pub(crate) fn note_restored(&self, restored: &Restored) {
        self.n_tokens_restored.fetch_add(restored.n_tokens as u64, Ordering::Relaxed);
        self.n_bytes_restored.fetch_add(restored.n_bytes, Ordering::Relaxed);
        let us = u64::try_from(restored.time.as_micros()).unwrap_or(u64::MAX);
        self.restoring_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Counts tokens that were guessed, and those of them that were drawn.
    pub fn note_guessed(&self, n: u64, n_right: u64) {
        self.n_tokens_guessed.fetch_add(n, Ordering::Relaxed);
        self.n_tokens_guessed_right.fetch_add(n_right, Ordering::Relaxed);
    }

    /// Counts tokens that a constraint forced, or nearly, and that each spared a step.
    pub(crate) fn note_forced(&self, n: u64) {
        self.n_tokens_forced.fetch_add(n, Ordering::Relaxed);
    }

    /// What was computed in vain for it and what it waited for, by cause.
    #[must_use]
    pub fn causes(&self) -> Causes {
        self.causes.now()
    }

    /// Tokens that the prefix cache held already.
    #[must_use]
    pub fn n_tokens_cached(&self) -> u64 {
        self.n_tokens_cached.load(Ordering::Relaxed)
    }

    /// Tokens of saved contexts that it opened whose KV came back from an archive.
    #[must_use]
    pub fn n_tokens_restored(&self) -> u64 {
        self.n_tokens_restored.load(Ordering::Relaxed)
    }

    /// Bytes of that KV.
    #[must_use]
    pub fn n_bytes_restored(&self) -> u64 {
        self.n_bytes_restored.load(Ordering::Relaxed)
    }

    /// Microseconds from when it asked for such contexts until they were there, summed over them.
    #[must_use]
    pub fn restoring_us(&self) -> u64 {
        self.restoring_us.load(Ordering::Relaxed)
    }

    /// Tokens that were guessed and verified.
    #[must_use]
    pub fn n_tokens_guessed(&self) -> u64 {
        self.n_tokens_guessed.load(Ordering::Relaxed)
    }

    /// Those of them that were drawn.
    #[must_use]
    pub fn n_tokens_guessed_right(&self) -> u64 {
        self.n_tokens_guessed_right.load(Ordering::Relaxed)
    }

    /// Tokens that a constraint forced, or nearly, and that were drawn in one row with what follows them.
    #[must_use]
    pub fn n_tokens_forced(&self) -> u64 {
        self.n_tokens_forced.load(Ordering::Relaxed)
    }

    /// Its prompts that are being computed.
    #[must_use]
    pub fn prompts(&self) -> &Prompts {
        &self.prompts
    }

    /// The enclosing account of its user; the outermost one where none is a user's.
    #[must_use]
    pub fn user(self: &Arc<Self>) -> &Arc<Self> {
        let mut account = self;
        while account.level != USER
            && let Some(parent) = &account.parent
        {
            account = parent;
        }
        account
    }

    /// That of the user.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// The account that this one lies in.
    #[must_use]
    pub fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }
}

/// On whose behalf the engine works, for fairness and accounting.
#[derive(Clone, Debug)]
pub struct Owner {
    /// The user, as the peer's user id.
    pub actor: ActorId,
    /// The connection.
    pub session: SessionId,
    /// The guest.
    pub guest: GuestId,
    /// The guest's account, inside its session's, inside its user's.
    pub account: Arc<Account>,
}

/// A user, by the user id of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ActorId(pub u32);

/// A connection, unique while the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SessionId(pub u64);

/// A run of a guest, unique while the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GuestId(pub u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_goes_to_every_level_or_to_none() {
        let user = Account::new("user", Budget { n_pages: 10, ..Budget::UNLIMITED }, None);
        let guest =
            |n_pages| Account::new("guest", Budget { n_pages, ..Budget::UNLIMITED }, Some(user.clone()));
        let (a, b) = (guest(8), guest(8));
        a.charge(Resource::Pages, 7).expect("within both");
        let own = a.charge(Resource::Pages, 2).expect_err("past the guest's own");
        assert_eq!((own.level, own.used, own.requested, own.limit), ("guest", 7, 2, 8));
        let outer = b.charge(Resource::Pages, 4).expect_err("past the user's");
        assert_eq!((outer.level, outer.used, outer.limit), ("user", 7, 10));
        assert_eq!(b.used(Resource::Pages), 0);
        let is_half_free = |guest: &Account, n| guest.is_half_free_beside(Resource::Pages, n);
        assert!(!is_half_free(&a, 0) && !is_half_free(&b, 0), "more than half of the user's is in use");
        a.release(Resource::Pages, 4);
        assert!(is_half_free(&a, 1) && !is_half_free(&a, 2), "of the guest's own");
        assert!(is_half_free(&b, 2) && !is_half_free(&b, 3), "of the user's");
        a.release(Resource::Pages, 3);
        assert_eq!(user.used(Resource::Pages), 0);
        assert_eq!(a.limit(Resource::Pages), 8);
    }

    #[test]
    fn sessions_and_guests_have_the_priority_of_their_user() {
        let priority = Priority { share: std::num::NonZeroU32::new(3).expect("above 0"), rank: 2 };
        let user = Account::with_priority(USER, Budget::UNLIMITED, None, priority);
        let session = Account::new("session", Budget::UNLIMITED, Some(user));
        assert_eq!(Account::new("guest", Budget::UNLIMITED, Some(session)).priority(), priority);
        assert_eq!(Account::new("guest", Budget::UNLIMITED, None).priority(), Priority::EVEN);
    }
}
