//! What a user may have of something that all users have together.
//!
//! Were it only bounded for each, a few could take all of it, and whoever comes then would be refused for what others hold. So
//! a user may have as much as would then be left free, and no more: the dynamic threshold of Choudhury and Hahne (Dynamic
//! queue length thresholds for shared-memory packet switches, IEEE/ACM Transactions on Networking 6(2), 1998). Of users who
//! take all that they can get, `k` at once have `1 / (k + 1)` each, and as much is left; one after the other, each has half of
//! what those before it have left. Whoever has less than is free, by a part in a thousand, is refused nothing because of others.

use std::sync::atomic::Ordering;

use super::Meter;

/// Parts of the whole by which a user sees what is left: no user is told by its refusals what others hold to the byte.
const N_PARTS: u64 = 1024;

/// The most that a user may come to with `n` more, who may have `limit` where nobody else has anything, while all together
/// have `used` of `limit_of_all`.
///
/// A user alone has its limit, also where that is more than half of what there is: then the threshold is so many times what is
/// left free that it comes to that. Where one may have all, nothing is kept for others.
#[must_use]
pub fn most_beside_others(limit: u64, used: u64, limit_of_all: u64, n: u64) -> u64 {
    let n_for_others = limit_of_all.saturating_sub(limit);
    if n_for_others == 0 {
        return limit;
    }
    let n_free = limit_of_all.saturating_sub(used).saturating_sub(n);
    let times = u128::from(limit).max(n_for_others.into());
    let n_most = u64::try_from(u128::from(n_free) * times / u128::from(n_for_others)).unwrap_or(u64::MAX);
    if n_most >= limit {
        return limit;
    }
    let part = (limit_of_all / N_PARTS).max(1);
    n_most / part * part
}

/// The same, of what the meter of all says.
pub(super) fn most(limit: u64, all: &Meter, n: u64) -> u64 {
    // Most of what is counted is bounded for each alone.
    match all.limit {
        u64::MAX => limit,
        limit_of_all => most_beside_others(limit, all.used.load(Ordering::Relaxed), limit_of_all, n),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Account, BESIDE_OTHERS, Budget, Resource, USER};
    use super::most_beside_others;

    /// Users one after the other, each of whom takes all that it can get, in pieces; what they come to have.
    fn greedy(limit: u64, limit_of_all: u64, n_users: usize) -> Vec<u64> {
        let budget = |host_bytes| Budget { host_bytes, ..Budget::UNLIMITED };
        let daemon = Account::new("daemon", budget(limit_of_all), None);
        let users = (0..n_users).map(|_| Account::new(USER, budget(limit), Some(daemon.clone())));
        let take = |user: std::sync::Arc<Account>| {
            while user.charge(Resource::HostBytes, 10).is_ok() {}
            user.used(Resource::HostBytes)
        };
        users.map(take).collect()
    }

    #[test]
    fn a_user_alone_has_its_limit() {
        let of_odd_parts = (750_500, 1_000_000);
        for (limit, limit_of_all) in
            [(500, 1000), (750, 1000), (100, 1000), (1000, 1000), (1000, 900), of_odd_parts]
        {
            assert_eq!(
                greedy(limit, limit_of_all, 1),
                [limit.min(limit_of_all)],
                "{limit} of {limit_of_all}"
            );
        }
    }

    #[test]
    fn whoever_comes_finds_as_much_as_it_leaves() {
        // Each has half of what those before it left.
        assert_eq!(greedy(500, 1000, 4), [500, 250, 120, 60]);
        assert_eq!(greedy(750, 1000, 3), [750, 180, 50], "three quarters of it");
        assert_eq!(greedy(100, 1000, 12)[..9], [100; 9], "what is free is enough for all");
    }

    #[test]
    fn who_is_refused_is_told_what_it_may_have_now() {
        let budget = |host_bytes| Budget { host_bytes, ..Budget::UNLIMITED };
        let daemon = Account::new("daemon", budget(1000), None);
        let [first, second] = [(); 2].map(|()| Account::new(USER, budget(500), Some(daemon.clone())));
        first.charge(Resource::HostBytes, 400).expect("it is alone");
        let exceeded = second.charge(Resource::HostBytes, 301).expect_err("299 would be left");
        assert_eq!((exceeded.level, exceeded.used, exceeded.limit), (BESIDE_OTHERS, 0, 299));
        second.charge(Resource::HostBytes, 300).expect("300 are left");
        first.charge(Resource::HostBytes, 1).expect_err("it has more than is left");
        first.charge(Resource::HostBytes, 0).expect("that is nothing");
        second.release(Resource::HostBytes, 300);
        first.charge(Resource::HostBytes, 100).expect("it is alone again");
    }

    #[test]
    fn what_others_hold_is_told_in_parts() {
        let most = |used| most_beside_others(1 << 30, used, 2 << 30, 1);
        assert_eq!(most(1 << 30), (1 << 30) - (2 << 20), "whole parts of 2 MiB");
        assert_eq!(most((1 << 30) + 4096), most(1 << 30));
    }
}
