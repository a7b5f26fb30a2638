//! The largest logits of a row, without sorting the row.

use std::cmp::Ordering;

use super::maths::{exp, parts};
use crate::batch::Token;

/// A token that is still in the running.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) token: Token,
    pub(super) logit: f32,
}

impl Entry {
    /// Larger logits first, ties by lower token.
    pub(super) fn by_rank(a: &Self, b: &Self) -> Ordering {
        b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
    }
}

/// Keeps the `k` largest logits above −∞, and all that tie with the k-th, in no order.
pub(super) fn keep_largest(logits: &[f32], k: usize, kept: &mut Vec<Entry>) {
    const GROUP: usize = 16;
    kept.clear();
    if k == 0 {
        return;
    }
    // Lower logits cannot be among the k largest any more.
    let mut floor = f32::NEG_INFINITY;
    let mut n_before_prune = 2 * k.min(logits.len()) + 64;
    for (group_idx, group) in logits.chunks(GROUP).enumerate() {
        if group.iter().all(|&logit| logit < floor) {
            continue;
        }
        let above =
            group.iter().enumerate().filter(|&(_, &logit)| logit >= floor && logit > f32::NEG_INFINITY);
        kept.extend(above.map(|(i, &logit)| Entry { token: (group_idx * GROUP + i) as Token, logit }));
        if kept.len() >= n_before_prune {
            floor = prune(kept, k);
            // Ties may leave more than k; waiting for twice as many keeps the whole pass linear.
            n_before_prune = 2 * kept.len() + 64;
        }
    }
    if kept.len() > k {
        prune(kept, k);
    }
}

/// Drops what is below the k-th largest and returns that logit. There are at least `k` entries.
fn prune(kept: &mut Vec<Entry>, k: usize) -> f32 {
    let (_, kth, _) = kept.select_nth_unstable_by(k - 1, |a, b| b.logit.total_cmp(&a.logit));
    let floor = kth.logit;
    kept.retain(|entry| entry.logit >= floor);
    floor
}

/// Cuts `kept` to the shortest run of its most probable tokens whose weight, the sum of `exp(logit)` in parts, reaches
/// `target`; at least one stays. What stays is in order of rank.
pub(super) fn keep_weight(kept: &mut Vec<Entry>, target: u64) {
    let mut weight = 0;
    let mut n_sorted = 0;
    while n_sorted < kept.len() {
        // Sorting in growing parts: the set is usually far smaller than the vocabulary.
        let end = (4 * n_sorted).max(128).min(kept.len());
        if end < kept.len() {
            kept[n_sorted..].select_nth_unstable_by(end - n_sorted - 1, Entry::by_rank);
        }
        kept[n_sorted..end].sort_unstable_by(Entry::by_rank);
        for idx in n_sorted..end {
            weight += parts(exp(kept[idx].logit));
            if weight >= target {
                kept.truncate(idx + 1);
                return;
            }
        }
        n_sorted = end;
    }
}

#[cfg(test)]
mod tests {
    use super::super::maths::share_of;
    use super::*;

    fn tokens(kept: &mut [Entry]) -> Vec<Token> {
        kept.sort_unstable_by(Entry::by_rank);
        kept.iter().map(|e| e.token).collect()
    }

    #[test]
    fn ties_with_the_kth_stay() {
        let mut kept = Vec::new();
        keep_largest(&[1.0, 0.0, 1.0, 2.0, 1.0], 2, &mut kept);
        assert_eq!(tokens(&mut kept), [3, 0, 2, 4]);
        keep_largest(&[f32::NEG_INFINITY, 0.0], 2, &mut kept);
        assert_eq!(tokens(&mut kept), [1]);
        keep_largest(&vec![0.5; 10_000], 3, &mut kept);
        assert_eq!(kept.len(), 10_000);
    }

    #[test]
    fn agrees_with_a_sort() {
        let logits: Vec<f32> = (0..3001).map(|i| (i * 7919 % 3001) as f32).collect();
        let mut kept = Vec::new();
        for k in [1, 5, 64, 200, 3000, 3001, 5000] {
            keep_largest(&logits, k, &mut kept);
            let mut expected: Vec<Token> = (0..3001).collect();
            expected.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
            expected.truncate(k);
            assert_eq!(tokens(&mut kept), expected, "k = {k}");
        }
    }

    #[test]
    fn weight_is_reached_by_the_shortest_run() {
        let logits: Vec<f32> = (0..1000).map(|i| -((i * 7 % 1000) as f32) / 100.0).collect();
        let mut order: Vec<Entry> =
            logits.iter().enumerate().map(|(t, &logit)| Entry { token: t as Token, logit }).collect();
        order.sort_unstable_by(Entry::by_rank);
        let total: u64 = order.iter().map(|e| parts(exp(e.logit))).sum();
        for share in [0.0001, 0.3, 0.7, 0.9, 0.99, 0.9999] {
            let mut kept = Vec::new();
            keep_largest(&logits, 1000, &mut kept);
            let target = share_of(share, total);
            keep_weight(&mut kept, target);
            let mut weight = 0;
            let n = 1 + order
                .iter()
                .take_while(|e| {
                    weight += parts(exp(e.logit));
                    weight < target
                })
                .count();
            assert_eq!(kept, order[..n], "share {share}");
        }
    }
}
