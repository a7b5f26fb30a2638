//! Which tokens are green, drawing, and how green a text is.

use serde::Serialize;
use trellis_guest::Token;

/// Decides which tokens are green. Where the paper shuffles the vocabulary and takes the first part, this
/// tosses a coin for each token, which asks for no list.
pub(crate) struct Rule {
    /// A secret of the sampler and the detector.
    pub(crate) key: u64,
    /// Share of the vocabulary that is green, in (0, 1).
    pub(crate) gamma: f64,
}

/// How green a text is.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Measure {
    /// Tokens with a token before them.
    n_tokens: usize,
    n_green: usize,
    /// Standard deviations above what an unmarked text has; above 4 is no chance. None for an empty text.
    z: Option<f64>,
}

impl Rule {
    /// Whether a token is green after this one.
    pub(crate) fn is_green(&self, previous: Token, token: Token) -> bool {
        let coin = mix(mix(self.key ^ u64::from(previous)) ^ u64::from(token));
        unit(coin) < self.gamma
    }

    /// Counts the green tokens of a text.
    pub(crate) fn measure(&self, tokens: &[Token]) -> Measure {
        let n_tokens = tokens.len().saturating_sub(1);
        let n_green = tokens.windows(2).filter(|pair| self.is_green(pair[0], pair[1])).count();
        let expected = self.gamma * n_tokens as f64;
        let deviation = (expected * (1.0 - self.gamma)).sqrt();
        let z = (n_tokens > 0).then(|| (n_green as f64 - expected) / deviation);
        Measure { n_tokens, n_green, z }
    }
}

/// An index, drawn in proportion to the weights. The draw depends on the seed and the position alone.
pub(crate) fn draw(weights: &[f32], seed: u64, position: u32) -> usize {
    let mut left = unit(mix(mix(seed) ^ u64::from(position))) as f32 * weights.iter().sum::<f32>();
    weights
        .iter()
        .position(|weight| {
            left -= weight;
            left < 0.0
        })
        // Rounding may leave a little after the last weight.
        .unwrap_or(weights.len() - 1)
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The upper 53 bits as a number in [0, 1).
fn unit(x: u64) -> f64 {
    (x >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Rule = Rule { key: 7, gamma: 0.25 };

    #[test]
    fn a_share_of_gamma_is_green_after_every_token() {
        for previous in [0, 1, 4095] {
            let n_green = (0..4096).filter(|&token| RULE.is_green(previous, token)).count();
            // 4096 tosses with a standard deviation of 27.7; 5 of them either way.
            assert!((885..=1163).contains(&n_green), "{n_green} green after {previous}");
        }
    }

    #[test]
    fn z_is_that_of_the_paper() {
        // A walk along green tokens only: z = (T - T/4) / sqrt(3T/16) = sqrt(3T).
        let mut tokens = vec![0];
        while tokens.len() < 13 {
            let previous = tokens[tokens.len() - 1];
            tokens.push((0..).find(|&token| RULE.is_green(previous, token)).unwrap());
        }
        let measure = RULE.measure(&tokens);
        assert_eq!((measure.n_tokens, measure.n_green), (12, 12));
        assert!((measure.z.unwrap() - 6.0).abs() <= 1e-9);
        assert_eq!(RULE.measure(&[]), Measure { n_tokens: 0, n_green: 0, z: None });
    }

    #[test]
    fn another_key_sees_nothing() {
        let mut marked = vec![0];
        for i in 0..200 {
            marked.push((i * 20..).find(|&token| RULE.is_green(marked[i as usize], token)).unwrap());
        }
        assert!(RULE.measure(&marked).z.unwrap() > 20.0);
        let other = Rule { key: 8, ..RULE };
        assert!(other.measure(&marked).z.unwrap().abs() < 6.0);
    }

    #[test]
    fn draws_follow_the_weights() {
        let mut counts = [0u32; 3];
        for position in 0..10_000 {
            counts[draw(&[1.0, 0.0, 3.0], 42, position)] += 1;
        }
        assert_eq!(counts[1], 0);
        // A standard deviation of 43; 5 of them either way.
        assert!((2283..=2717).contains(&counts[0]), "{counts:?}");
        assert_eq!(draw(&[1.0], 1, 1), 0);
    }
}
