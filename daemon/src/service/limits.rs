//! What is in use of the daemon's limits, by the user that asks and by all.

use trellis_engine::account::{ActorId, Resource};

use crate::accounts::Accounts;
use crate::guest::GuestHost;
use crate::session::{SessionsUsed, Used};

/// All that is counted, at one moment.
pub(super) struct InUse {
    /// In the account of the user that asks.
    account: Amounts,
    /// In those of all users.
    accounts: Amounts,
    /// Guests of the user, and of all.
    n_guests: (u64, u64),
    /// Programs that are ready, and the bytes of their code.
    programs: (u64, u64),
    sessions: SessionsUsed,
    kv: KvUsed,
    /// Bytes on disk of what users saved: the user's that asks, and those of all.
    saved: (u64, u64),
}

/// What is held of KV, of all models and users.
pub(super) struct KvUsed {
    /// Bytes on devices.
    pub(super) bytes: u64,
    /// Bytes in host memory.
    pub(super) host_bytes: u64,
}

#[derive(Clone, Copy)]
struct Amounts {
    n_tokens: u64,
    n_pages: u64,
    n_contexts: u64,
    host_bytes: u64,
}

impl Amounts {
    fn of(used: impl Fn(Resource) -> u64) -> Self {
        Self {
            n_tokens: used(Resource::Tokens),
            n_pages: used(Resource::Pages),
            n_contexts: used(Resource::Contexts),
            host_bytes: used(Resource::HostBytes),
        }
    }

    fn named(&self, field: &str) -> Option<u64> {
        Some(match field {
            "n_tokens" => self.n_tokens,
            "n_pages" => self.n_pages,
            "n_contexts" => self.n_contexts,
            "host_bytes" => self.host_bytes,
            _ => return None,
        })
    }
}

/// How much of a limit is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    /// By the user that asks.
    pub(super) user: Option<u64>,
    /// By all users together.
    pub(super) all: Option<u64>,
}

impl Share {
    fn of((user, all): (u64, u64)) -> Self {
        Self { user: Some(user), all: Some(all) }
    }

    /// What nobody has alone.
    fn common(all: u64) -> Self {
        Self { user: None, all: Some(all) }
    }
}

impl InUse {
    pub(super) fn now(
        actor: ActorId,
        accounts: &Accounts,
        host: &GuestHost,
        sessions: SessionsUsed,
        kv: KvUsed,
        saved: (u64, u64),
    ) -> Self {
        Self {
            account: Amounts::of(|resource| accounts.used_by(actor, resource)),
            accounts: Amounts::of(|resource| accounts.used(resource)),
            n_guests: host.n_guests(actor),
            programs: host.programs_ready(),
            sessions,
            kv,
            saved,
        }
    }

    /// What is in use of the limit of this name; nothing of what is not counted, or of what each guest or session has.
    pub(super) fn of(&self, name: &str) -> Share {
        if let Some(field) =
            name.strip_prefix("budgets.user.").or_else(|| name.strip_prefix("budgets.daemon."))
        {
            return Share { user: self.account.named(field), all: self.accounts.named(field) };
        }
        let SessionsUsed { user, all } = self.sessions;
        let sessions = |amount: fn(&Used) -> u64| Share::of((amount(&user), amount(&all)));
        match name {
            "limits.n_guests" | "limits.n_guests_per_user" => Share::of(self.n_guests),
            "limits.n_programs" => Share::common(self.programs.0),
            "limits.program_bytes" => Share::common(self.programs.1),
            "sessions.n_connections" => sessions(|used| used.n_connections),
            "sessions.n_uploads" => sessions(|used| used.n_uploads),
            "sessions.n_uploads_waiting" => sessions(|used| used.n_uploads_waiting),
            "sessions.n_detached" => sessions(|used| used.n_detached),
            "sessions.n_detached_ended" => sessions(|used| used.n_detached_ended),
            "saved_disk_bytes" | "saved_disk_bytes_per_user" => Share::of(self.saved),
            "kv_bytes" => Share::common(self.kv.bytes),
            "kv_host_bytes" => Share::common(self.kv.host_bytes),
            _ => Share::default(),
        }
    }
}
