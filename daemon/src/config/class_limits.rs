//! What each user of a class may have at most: `[classes.NAME.limits]`.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};
use trellis_engine::account::Budget;

/// What is set here holds in the place of what holds for each user; what is absent does not differ. Around a user the daemon's own limits
/// hold as ever, and those of a guest and of a session inside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ClassLimits {
    /// Tokens computed for each user of the class while the daemon lasts, in the place of `budgets.user.n_tokens`.
    pub n_tokens: Option<u64>,
    /// KV pages that each user of the class holds at once, in the place of `budgets.user.n_pages`. One connection has no more than
    /// `budgets.session.n_pages` all the same.
    pub n_pages: Option<u64>,
    /// Contexts that each user of the class has open or saved at once, in the place of `budgets.user.n_contexts`.
    /// One connection has no more than `budgets.session.n_contexts` all the same.
    pub n_contexts: Option<u64>,
    /// Bytes of host memory of each user of the class at once, in the place of `budgets.user.host_bytes`. A connection of such a
    /// user may have all of it where the file does not set `budgets.session.host_bytes`. Where guests have processes of their own, it is
    /// no more than such a process leaves (`limits.process_memory_bytes`), or than the file gives to every user.
    pub host_bytes: Option<u64>,
    /// Guests that each user of the class runs at once, in the place of `limits.n_guests_per_user`.
    pub n_guests: Option<u32>,
    /// Detached guests that each user of the class runs at once, in the place of `sessions.n_detached`.
    pub n_detached: Option<u32>,
    /// Connections that each user of the class has at once, in the place of `sessions.n_connections`. No user has more than the
    /// daemon's file descriptors leave to it.
    pub n_connections: Option<u32>,
    /// Bytes on disk of what each user of the class has saved, in the place of `saved_disk_bytes_per_user`; of all users together no
    /// more than `saved_disk_bytes`. Where less than before is left to a user, what was used longest ago goes when something is saved.
    pub saved_disk_bytes: Option<u64>,
}

impl ClassLimits {
    /// What a user may have who may have `most` without a class.
    pub(crate) fn over(&self, most: Budget) -> Budget {
        Budget {
            n_tokens: self.n_tokens.unwrap_or(most.n_tokens),
            n_pages: self.n_pages.unwrap_or(most.n_pages),
            n_contexts: self.n_contexts.unwrap_or(most.n_contexts),
            host_bytes: self.host_bytes.unwrap_or(most.host_bytes),
        }
    }

    /// Those that are set, by the names of their fields, each with the name of the limit in the place of which it holds.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        let Self { n_tokens, n_pages, n_contexts, host_bytes, .. } = *self;
        let Self { n_guests, n_detached, n_connections, saved_disk_bytes, .. } = *self;
        let all = [
            ("n_tokens", "budgets.user.n_tokens", n_tokens),
            ("n_pages", "budgets.user.n_pages", n_pages),
            ("n_contexts", "budgets.user.n_contexts", n_contexts),
            ("host_bytes", "budgets.user.host_bytes", host_bytes),
            ("n_guests", "limits.n_guests_per_user", n_guests.map(u64::from)),
            ("n_detached", "sessions.n_detached", n_detached.map(u64::from)),
            ("n_connections", "sessions.n_connections", n_connections.map(u64::from)),
            ("saved_disk_bytes", "saved_disk_bytes_per_user", saved_disk_bytes),
        ];
        all.into_iter().filter_map(|(field, limit, most)| Some((field, limit, most?)))
    }

    /// The lesser of both, one by one; where only one is set, that.
    pub(crate) fn least(&self, other: &Self) -> Self {
        fn least<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
            match (a, b) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            }
        }
        Self {
            n_tokens: least(self.n_tokens, other.n_tokens),
            n_pages: least(self.n_pages, other.n_pages),
            n_contexts: least(self.n_contexts, other.n_contexts),
            host_bytes: least(self.host_bytes, other.host_bytes),
            n_guests: least(self.n_guests, other.n_guests),
            n_detached: least(self.n_detached, other.n_detached),
            n_connections: least(self.n_connections, other.n_connections),
            saved_disk_bytes: least(self.saved_disk_bytes, other.saved_disk_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_absent_does_not_differ() {
        let most = Budget { n_tokens: 1, n_pages: 2, n_contexts: 3, host_bytes: 4 };
        assert_eq!(ClassLimits::default().over(most), most);
        let limits: ClassLimits = toml::from_str("n_pages = 9\nn_guests = 5").expect("valid");
        assert_eq!(limits.over(most), Budget { n_pages: 9, ..most });
        let named: Vec<_> = limits.named().collect();
        let expected = [("n_pages", "budgets.user.n_pages", 9), ("n_guests", "limits.n_guests_per_user", 5)];
        assert_eq!(named, expected);
        let less: ClassLimits = toml::from_str("n_pages = 8\nn_contexts = 7").expect("valid");
        let both: ClassLimits = toml::from_str("n_pages = 8\nn_contexts = 7\nn_guests = 5").expect("valid");
        assert_eq!((limits.least(&less), less.least(&limits)), (both, both));
        let of_each = |most: u64| -> ClassLimits {
            let fields = ClassLimits::FIELD_NAMES.iter().map(|field| format!("{field} = {most}\n"));
            toml::from_str(&fields.collect::<String>()).expect("valid")
        };
        let (every, more) = (of_each(1), of_each(2));
        let names: Vec<&str> = every.named().map(|(field, ..)| field).collect();
        assert_eq!(names, ClassLimits::FIELD_NAMES, "each is shown");
        assert_eq!((every.least(&more), more.least(&every)), (every, every));
    }
}
