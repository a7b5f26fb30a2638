//! What is asked of a row of logits: log-probabilities, entropy, the most probable tokens.

use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, Simd, SimdIterable, SimdOp, SimdUnaryOp};
use rten_vecmath::Exp;

use super::select::{Entry, keep_largest};
use crate::batch::{Candidate, OutputFault, Token};

/// The softmax of one row of logits, without the row.
#[derive(Clone, Copy, Debug)]
pub struct Distribution<'a> {
    logits: &'a [f32], // [vocab_size]
    max: f32,
    log_sum_exp: f32,
}

impl<'a> Distribution<'a> {
    /// Normalises a row of logits.
    ///
    /// # Errors
    /// The row holds a NaN or +∞, or nothing but −∞.
    pub fn new(logits: &'a [f32]) -> Result<Self, OutputFault> {
        let max = largest(logits).filter(|max| max.is_finite()).ok_or(OutputFault::NotANumber)?;
        let log_sum_exp = max + exp_sum(logits, max).ln();
        Ok(Self { logits, max, log_sum_exp })
    }

    /// The most probable token, ties to the lower one.
    #[must_use]
    pub fn mode(&self) -> Token {
        position_of(self.logits, self.max)
    }

    /// The natural-log probability of a token of the vocabulary.
    #[must_use]
    pub fn logprob(&self, token: Token) -> f32 {
        self.logits[token as usize] - self.log_sum_exp
    }

    /// The natural-log probabilities of the whole vocabulary.
    #[must_use]
    pub fn logprobs(&self) -> Vec<f32> {
        self.logits.iter().map(|logit| logit - self.log_sum_exp).collect()
    }

    /// The `n` most probable tokens, or all when there are fewer; most probable first, ties by lower token.
    #[must_use]
    pub fn top(&self, n: usize) -> Vec<Candidate> {
        let mut kept = Vec::new();
        keep_largest(self.logits, n, &mut kept);
        kept.sort_unstable_by(Entry::by_rank);
        kept.truncate(n);
        kept.into_iter().map(|e| Candidate { token: e.token, logprob: e.logit - self.log_sum_exp }).collect()
    }

    /// The entropy in nats.
    #[must_use]
    pub fn entropy(&self) -> f32 {
        let Moments { sum, weighted } = Moments::of(self.logits, self.max);
        // H = ln Σe^x − Σ x·e^x / Σe^x with x = l − max; rounding must not make it negative.
        (sum.ln() - weighted / sum).max(0.0)
    }
}

/// The largest value, `None` when one is NaN.
pub(super) fn largest(values: &[f32]) -> Option<f32> {
    const LANES: usize = 16;
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            max[lane] = if chunk[lane] > max[lane] { chunk[lane] } else { max[lane] };
            nan[lane] |= chunk[lane].is_nan();
        }
    }
    if nan.contains(&true) || rest.iter().any(|x| x.is_nan()) {
        return None;
    }
    Some(max.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| a.max(b)))
}

/// The first index of a value that is there.
pub(super) fn position_of(values: &[f32], value: f32) -> Token {
    const GROUP: usize = 64;
    for (group_idx, group) in values.chunks(GROUP).enumerate() {
        // Without an early exit the inner loop compares many lanes at once.
        if group.iter().fold(false, |found, &x| found | (x == value)) {
            let offset = group.iter().position(|&x| x == value).expect("the group holds the value");
            return (group_idx * GROUP + offset) as Token;
        }
    }
    unreachable!("the value was taken from the slice")
}

/// `Σ exp(x − shift)`.
pub(super) fn exp_sum(values: &[f32], shift: f32) -> f32 {
    struct ExpSum<'a>(&'a [f32], f32);
    impl SimdOp for ExpSum<'_> {
        type Output = f32;
        #[inline(always)]
        fn eval<I: Isa>(self, isa: I) -> f32 {
            let ops = isa.f32();
            let shift = ops.splat(self.1);
            // A closure that is not inlined would be compiled without the instruction set.
            let sums = self.0.simd_iter(ops).fold_unroll::<4>(
                ops.zero(),
                #[inline(always)]
                |sum, x| ops.add(sum, Exp::apply(isa, ops.sub(x, shift))),
                #[inline(always)]
                |a, b| ops.add(a, b),
            );
            sums.to_array().into_iter().sum()
        }
    }
    ExpSum(values, shift).dispatch()
}

/// `Σ e^x` and `Σ x·e^x` with `x = value − max`.
struct Moments {
    sum: f32,
    weighted: f32,
}

impl Moments {
    fn of(values: &[f32], max: f32) -> Self {
        struct Op<'a>(&'a [f32], f32);
        impl SimdOp for Op<'_> {
            type Output = [f32; 2];
            #[inline(always)]
            fn eval<I: Isa>(self, isa: I) -> [f32; 2] {
                let ops = isa.f32();
                let max = ops.splat(self.1);
                // Keeps 0 · −∞ out of the sum: e^x is 0 far above this.
                let least = ops.splat(-1e4);
                let sums = self.0.simd_iter(ops).fold_n_unroll::<2, 2>(
                    [ops.zero(); 2],
                    #[inline(always)]
                    |[sum, weighted], value| {
                        let x = ops.max(ops.sub(value, max), least);
                        let e = Exp::apply(isa, x);
                        [ops.add(sum, e), ops.mul_add(x, e, weighted)]
                    },
                    #[inline(always)]
                    |a, b| [ops.add(a[0], b[0]), ops.add(a[1], b[1])],
                );
                sums.map(|lanes| lanes.to_array().into_iter().sum())
            }
        }
        let [sum, weighted] = Op(values, max).dispatch();
        Self { sum, weighted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(logits: &[f32]) -> Vec<f64> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
        logits.iter().map(|&l| f64::from(l - max) - sum.ln()).collect()
    }

    /// A row of any length with values over a wide range.
    fn row(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 37.0).collect()
    }

    #[test]
    fn agrees_with_f64() {
        for n in [1, 2, 15, 16, 17, 63, 64, 65, 1000, 4096, 5003] {
            let logits = row(n);
            let expected = reference(&logits);
            let distribution = Distribution::new(&logits).expect("finite logits");
            let entropy: f64 = -expected.iter().map(|p| p.exp() * p).sum::<f64>();
            assert!((f64::from(distribution.entropy()) - entropy).abs() <= 1e-5, "entropy of {n}");
            for (token, (got, want)) in distribution.logprobs().iter().zip(&expected).enumerate() {
                assert!((f64::from(*got) - want).abs() <= 1e-5, "token {token} of {n}: {got} {want}");
                assert_eq!(*got, distribution.logprob(token as Token));
            }
        }
    }

    #[test]
    fn top_orders_by_logit_then_token() {
        let logits = [1.0, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
        let distribution = Distribution::new(&logits).expect("finite logits");
        let tokens = |n| distribution.top(n).iter().map(|c| c.token).collect::<Vec<_>>();
        assert!(tokens(0).is_empty());
        assert_eq!(tokens(1), [1]);
        assert_eq!(tokens(3), [1, 3, 2]);
        assert_eq!(tokens(99), [1, 3, 2, 0]);
        assert_eq!(distribution.mode(), 1);
    }

    #[test]
    fn top_agrees_with_a_full_sort() {
        let logits = row(5003);
        let distribution = Distribution::new(&logits).expect("finite logits");
        let mut sorted: Vec<usize> = (0..logits.len()).collect();
        sorted.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        for n in [1, 2, 10, 100, 1000, 5003] {
            let top: Vec<usize> = distribution.top(n).iter().map(|c| c.token as usize).collect();
            assert_eq!(top, sorted[..n], "top {n}");
        }
    }

    #[test]
    fn nan_anywhere_is_a_fault() {
        for n in [1, 16, 33] {
            for at in 0..n {
                let mut logits = row(n);
                logits[at] = f32::NAN;
                assert_eq!(Distribution::new(&logits).err(), Some(OutputFault::NotANumber), "{at} of {n}");
            }
        }
        assert!(Distribution::new(&[f32::INFINITY, 0.0]).is_err());
    }
}
