//! What the guests of a session, of a user and of the daemon may use together.

use documented::DocumentedFields;
use serde::{Deserialize, Deserializer, Serialize};
use trellis_engine::account::Budget;

/// Budgets around those of single guests, each inside the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct Budgets {
    /// All guests of one connection.
    #[serde(deserialize_with = "of_session")]
    pub session: SharedBudget,
    /// All guests of one user, and what they saved.
    #[serde(deserialize_with = "of_user")]
    pub user: SharedBudget,
    /// All guests of all users. Beside others a user has no more pages, contexts and host memory than it leaves to the next one,
    /// where its own limit is below this one; where it is not, one user may have all.
    #[serde(deserialize_with = "of_daemon")]
    pub daemon: SharedBudget,
}

/// The most of each resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, DocumentedFields)]
pub struct SharedBudget {
    /// Tokens computed while the session, or the daemon, lasts.
    pub n_tokens: u64,
    /// KV pages held at once.
    pub n_pages: u64,
    /// Contexts open or saved at once.
    pub n_contexts: u64,
    /// Bytes of host memory at once: the linear memory of guests, what starting one takes, twice the code
    /// of the programs that guests of a user run (once for each, where they have no process of their own), token lists of contexts open or
    /// saved, ten a token, masks, grammars, messages that no guest has received, outputs that no client has read, and
    /// frames and uploads on their way in. When absent a third of the machine's memory, or of what its control group may
    /// have, for the daemon, and half of that for a user and for a session; where guests have processes, no more than
    /// `process_memory_bytes` leaves beside what such a process needs for itself. Beside others a user has no more than is left
    /// for the next one: of users who take all that they can get, at once two have a third each, three a quarter.
    pub host_bytes: Option<u64>,
}

/// What a file sets of a level; the rest is what that level has by default, which is not the same for each.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Written {
    n_tokens: Option<u64>,
    n_pages: Option<u64>,
    n_contexts: Option<u64>,
    host_bytes: Option<u64>,
}

impl Written {
    fn over(self, level: SharedBudget) -> SharedBudget {
        SharedBudget {
            n_tokens: self.n_tokens.unwrap_or(level.n_tokens),
            n_pages: self.n_pages.unwrap_or(level.n_pages),
            n_contexts: self.n_contexts.unwrap_or(level.n_contexts),
            host_bytes: self.host_bytes.or(level.host_bytes),
        }
    }
}

fn of_session<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SharedBudget, D::Error> {
    Written::deserialize(deserializer).map(|written| written.over(Budgets::default().session))
}

fn of_user<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SharedBudget, D::Error> {
    Written::deserialize(deserializer).map(|written| written.over(Budgets::default().user))
}

fn of_daemon<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SharedBudget, D::Error> {
    Written::deserialize(deserializer).map(|written| written.over(Budgets::default().daemon))
}

/// Bytes of host memory for each level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostBytes {
    pub(crate) session: u64,
    pub(crate) user: u64,
    pub(crate) daemon: u64,
    /// The most that a user may have by its class: what the process of its guests leaves, or what the file gives to every user.
    pub(crate) class_most: u64,
}

/// What of the machine's memory guests may have. As much again may be KV memory, code and models that are bundled.
const PART_OF_MACHINE: u64 = 3;

/// What of that one user may have alone: another one finds as much.
const PART_OF_DAEMON: u64 = 2;

/// Parts are whole numbers of this.
const WHOLE_BYTES: u64 = 1 << 20;

impl SharedBudget {
    /// No bound but those of what lies inside and of the device. A TOML integer has 63 bits.
    pub const UNLIMITED: Self = Self {
        n_tokens: i64::MAX as u64,
        n_pages: i64::MAX as u64,
        n_contexts: i64::MAX as u64,
        host_bytes: Some(i64::MAX as u64),
    };

    /// With so many bytes of host memory.
    pub(crate) fn budget(&self, host_bytes: u64) -> Budget {
        let Self { n_tokens, n_pages, n_contexts, .. } = *self;
        Budget { n_tokens, n_pages, n_contexts, host_bytes }
    }
}

impl Default for SharedBudget {
    fn default() -> Self {
        Self { n_pages: 65_536, n_contexts: 8_192, host_bytes: None, ..Self::UNLIMITED }
    }
}

impl Default for Budgets {
    fn default() -> Self {
        Self {
            session: SharedBudget { n_contexts: 4_096, ..SharedBudget::default() },
            user: SharedBudget::default(),
            daemon: SharedBudget { host_bytes: None, ..SharedBudget::UNLIMITED },
        }
    }
}

impl Budgets {
    /// Bytes of host memory of each level in a process that may come to so many. A user for whom nothing is said, or of whom a class
    /// says more, has `user_most` at most.
    pub(crate) fn host_bytes(&self, memory_bytes: u64, user_most: u64) -> HostBytes {
        let whole = |n_bytes: u64| n_bytes.next_multiple_of(WHOLE_BYTES);
        let daemon = self.daemon.host_bytes.unwrap_or(whole(memory_bytes / PART_OF_MACHINE));
        let user = self.user.host_bytes.unwrap_or(whole(daemon / PART_OF_DAEMON).min(user_most));
        let session = self.session.host_bytes.unwrap_or(user);
        HostBytes { session, user, daemon, class_most: user_most.max(user) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_of_a_level_is_that_levels_own() {
        let defaults = Budgets::default();
        for level in ["session", "user", "daemon"] {
            let empty: Budgets = toml::from_str(&format!("[{level}]")).expect("valid");
            assert_eq!(empty, defaults, "{level}");
        }
        let told: Budgets = toml::from_str("[session]\nn_pages = 7\n[daemon]\nn_tokens = 9").expect("valid");
        assert_eq!(told.session, SharedBudget { n_pages: 7, ..defaults.session });
        assert_eq!(told.daemon, SharedBudget { n_tokens: 9, ..defaults.daemon });
    }

    #[test]
    fn what_is_not_said_is_a_part_of_what_lies_around() {
        let gib = 1 << 30;
        let parts = |text: &str| {
            let budgets: Budgets = toml::from_str(text).expect("valid");
            let HostBytes { session, user, daemon, .. } = budgets.host_bytes(12 * gib, 5 * gib);
            [session, user, daemon].map(|n_bytes| n_bytes / gib)
        };
        assert_eq!(parts(""), [2, 2, 4]);
        assert_eq!(parts("[daemon]\nhost_bytes = 8589934592"), [4, 4, 8]);
        assert_eq!(parts("[user]\nhost_bytes = 1073741824"), [1, 1, 4]);
        assert_eq!(parts("[session]\nhost_bytes = 1073741824\nn_pages = 7"), [1, 2, 4]);
        assert_eq!(parts("[daemon]\nhost_bytes = 12884901888"), [5, 5, 12], "no more than the most");
        assert_eq!(parts("[user]\nhost_bytes = 6442450944"), [6, 6, 4], "it was said");
        let class_most = |text: &str| {
            let budgets: Budgets = toml::from_str(text).expect("valid");
            budgets.host_bytes(12 * gib, 5 * gib).class_most / gib
        };
        assert_eq!(class_most(""), 5);
        assert_eq!(class_most("[user]\nhost_bytes = 6442450944"), 6);
    }
}
