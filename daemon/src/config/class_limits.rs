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
    /// KV pages that each user of the class holds at once, in the place of `budgets.user.n_pages`.
    pub n_pages: Option<u64>,
    /// Contexts that each user of the class has open or saved at once, in the place of `budgets.user.n_contexts`.
    pub n_contexts: Option<u64>,
    /// Bytes of host memory of each user of the class at once, in the place of `budgets.user.host_bytes`. A connection of such a
    /// user may have all of it where the file does not set `budgets.session.host_bytes`.
    pub host_bytes: Option<u64>,
    /// Guests that each user of the class runs at once, in the place of `limits.n_guests_per_user`.
    pub n_guests: Option<u32>,
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
        let Self { n_tokens, n_pages, n_contexts, host_bytes, n_guests } = *self;
        let all = [
            ("n_tokens", "budgets.user.n_tokens", n_tokens),
            ("n_pages", "budgets.user.n_pages", n_pages),
            ("n_contexts", "budgets.user.n_contexts", n_contexts),
            ("host_bytes", "budgets.user.host_bytes", host_bytes),
            ("n_guests", "limits.n_guests_per_user", n_guests.map(u64::from)),
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
        let every: ClassLimits =
            toml::from_str("n_tokens = 1\nn_pages = 1\nn_contexts = 1\nhost_bytes = 1\nn_guests = 1")
                .expect("valid");
        let names: Vec<&str> = every.named().map(|(field, ..)| field).collect();
        assert_eq!(names, ClassLimits::FIELD_NAMES, "each is shown");
    }
}
