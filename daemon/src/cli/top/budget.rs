//! What a guest has left of the limit that it is nearest to.

use trellis_client::{GuestAmounts, GuestInfo};

use crate::limits::UNLIMITED;

/// A limit, and the part of it that is left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Left {
    pub(super) name: &'static str,
    pub(super) part: f64,
}

impl Left {
    /// That of the limit of which a guest has the least left, if it has limits.
    pub(super) fn of(guest: &GuestInfo) -> Option<Self> {
        let (used, limits) = (parts(guest.used.as_ref()?), parts(guest.limits.as_ref()?));
        let left = used.into_iter().zip(limits).filter(|&(_, (_, limit))| (1..UNLIMITED).contains(&limit));
        let left = left.map(|((name, used), (_, limit))| {
            let part = if used >= limit { 0.0 } else { 1.0 - used as f64 / limit as f64 };
            Self { name, part }
        });
        left.min_by(|a, b| a.part.total_cmp(&b.part))
    }

    /// `63% n_tokens`
    pub(super) fn shown(self) -> String {
        // A guest that has something left is not told that it has nothing.
        format!("{:.0}% {}", (100.0 * self.part).ceil(), self.name)
    }
}

fn parts(amounts: &GuestAmounts) -> [(&'static str, u64); 6] {
    let GuestAmounts { memory_bytes, cpu_ms, n_pages, n_contexts, n_tokens, host_bytes } = *amounts;
    [
        ("memory_bytes", memory_bytes),
        ("cpu_ms", cpu_ms),
        ("n_pages", n_pages),
        ("n_contexts", n_contexts),
        ("n_tokens", n_tokens),
        ("host_bytes", host_bytes),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_limit_is_the_one_with_the_least_left_of_it() {
        let used = GuestAmounts { cpu_ms: 100, n_pages: 30, n_tokens: 1 << 40, ..GuestAmounts::default() };
        let none = u64::MAX;
        let limits = GuestAmounts {
            memory_bytes: 10,
            cpu_ms: 1000,
            n_pages: 40,
            n_contexts: none,
            n_tokens: UNLIMITED,
            host_bytes: none,
        };
        let guest = |used, limits| GuestInfo { used, limits, ..GuestInfo::default() };
        let left = Left::of(&guest(Some(used), Some(limits))).expect("there are limits");
        assert_eq!((left, left.shown().as_str()), (Left { name: "n_pages", part: 0.25 }, "25% n_pages"));
        let over = Some(GuestAmounts { n_pages: 41, ..used });
        assert_eq!(Left::of(&guest(over, Some(limits))).expect("a limit").shown(), "0% n_pages");
        assert_eq!(Left { name: "cpu_ms", part: 0.001 }.shown(), "1% cpu_ms");
        // An older daemon does not say.
        assert_eq!(Left::of(&guest(None, None)), None);
    }
}
