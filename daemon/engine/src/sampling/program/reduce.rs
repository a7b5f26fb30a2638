//! What a row comes to, and which of its tokens are kept.

use crate::batch::Token;
use crate::sampling::maths::{exp_all, log, of_parts, parts, share_of};
use crate::sampling::select::{Entry, keep_largest};

/// NaN becomes −∞, what is above the largest number the largest.
pub(super) fn in_row(x: f32) -> f32 {
    let x = if x.is_nan() { f32::NEG_INFINITY } else { x };
    if x > f32::MAX { f32::MAX } else { x }
}

/// NaN becomes 0, what is above the largest number the largest.
pub(super) fn as_number(x: f32) -> f32 {
    let x = if x.is_nan() { 0.0 } else { x };
    if x > f32::MAX { f32::MAX } else { x }
}

/// The sum over a binary tree of neighbours. Uses up the values.
pub(super) fn sum(values: &mut [f32]) -> f32 {
    let mut n = values.len();
    if n == 0 {
        return 0.0;
    }
    while n > 1 {
        for idx in 0..n / 2 {
            values[idx] = in_row(values[2 * idx] + values[2 * idx + 1]);
        }
        if n % 2 == 1 {
            values[n / 2] = in_row(values[n - 1] + 0.0);
        }
        n = n.div_ceil(2);
    }
    values[0]
}

pub(super) fn max(values: &[f32]) -> f32 {
    values.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max })
}

/// Turns values into `exp(x − max)`; 0 where they are −∞. `max` is above −∞.
fn exponentials(values: &mut [f32], max: f32) {
    for x in values.iter_mut() {
        *x -= max;
    }
    exp_all(values);
}

/// ln Σ eˣ. Uses up the values.
pub(super) fn log_sum_exp(values: &mut [f32]) -> f32 {
    let max = max(values);
    if max == f32::NEG_INFINITY {
        return max;
    }
    exponentials(values, max);
    let sum: u64 = values.iter().map(|&weight| parts(weight)).sum();
    as_number(max + log(of_parts(sum)))
}

/// The entropy of the softmax. Uses up the values.
pub(super) fn entropy(values: &mut [f32]) -> f32 {
    let max = max(values);
    if max == f32::NEG_INFINITY {
        return 0.0;
    }
    let below: Vec<f32> = values.iter().map(|x| max - x).collect();
    exponentials(values, max);
    let (mut sum, mut weighted) = (0, 0);
    for (&weight, &below) in values.iter().zip(&below) {
        if weight > 0.0 {
            sum += parts(weight);
            weighted += parts(below * weight);
        }
    }
    let entropy = log(of_parts(sum)) + weighted as f32 / sum as f32;
    if entropy > 0.0 { entropy } else { 0.0 }
}

/// Marks the `k` largest above −∞ and those that tie with the k-th.
pub(super) fn largest(row: &[f32], k: f32, kept: &mut Vec<Entry>, set: &mut [bool]) {
    // A number below 1 keeps nothing; one that is too large for an integer keeps all.
    keep_largest(row, k as usize, kept);
    for entry in kept.iter() {
        set[entry.token as usize] = true;
    }
}

/// A token in the running for a nucleus.
struct Ranked {
    order: f32,
    token: Token,
    parts: u64,
}

/// Marks the first tokens by falling `order` whose softmax of `row` reaches `p`.
pub(super) fn nucleus(order: &[f32], row: &[f32], p: f32, set: &mut [bool]) {
    let max = max(row);
    if max == f32::NEG_INFINITY {
        return;
    }
    if p >= 1.0 {
        for (kept, &x) in set.iter_mut().zip(row) {
            *kept = x > f32::NEG_INFINITY;
        }
        return;
    }
    let mut weights = row.to_vec();
    exponentials(&mut weights, max);
    let entries = order.iter().zip(row).zip(&weights).enumerate();
    let mut ranked: Vec<Ranked> = entries
        .filter(|(_, ((_, x), _))| **x > f32::NEG_INFINITY)
        .map(|(token, ((&order, _), &weight))| Ranked { order, token: token as Token, parts: parts(weight) })
        .collect();
    let total: u64 = ranked.iter().map(|entry| entry.parts).sum();
    let target = share_of(p, total);
    let by_rank = |a: &Ranked, b: &Ranked| {
        // Adding 0 makes 0 of −0.
        (b.order + 0.0).total_cmp(&(a.order + 0.0)).then(a.token.cmp(&b.token))
    };
    let (mut sum, mut n_sorted) = (0, 0);
    while n_sorted < ranked.len() {
        // In growing parts: the set is mostly far smaller than the vocabulary.
        let end = (4 * n_sorted).max(128).min(ranked.len());
        if end < ranked.len() {
            ranked[n_sorted..].select_nth_unstable_by(end - n_sorted - 1, by_rank);
        }
        ranked[n_sorted..end].sort_unstable_by(by_rank);
        for entry in &ranked[n_sorted..end] {
            set[entry.token as usize] = true;
            sum += entry.parts;
            if sum >= target {
                return;
            }
        }
        n_sorted = end;
    }
}
