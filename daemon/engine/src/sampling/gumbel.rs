//! Draws by Gumbel-max: the token with the largest `l + g` is distributed as `softmax(l)`.

use super::maths::log;
use crate::batch::Token;
use trellis_programs::philox4x32;

/// Tokens that share one Philox block.
const TOKENS_PER_BLOCK: usize = 4;

/// Above the largest Gumbel noise there is, which belongs to `u = 1 − 2⁻²⁴`.
pub const GUMBEL_MAX: f32 = 16.64;

/// Room for the rounding of `l + g` when a token is passed over on a bound, where the logits that can win are below this.
const BOUND_SLACK: f32 = 1.0 + 1e-4;
const BOUND_MAX: f32 = 256.0;

/// The place of a block in which a single number lies, which no token has.
const SINGLE: u32 = u32::MAX;

/// The random words of one draw.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    key: [u32; 2],
    /// What the counter holds besides the place of the block.
    counter: [u32; 3],
}

impl Words {
    /// Those of a position under a key; of one lane, by which noises at one position are apart.
    pub(super) fn new(key: u64, position: u64, lane: u16) -> Self {
        let [low, high] = halves(position);
        Self { key: halves(key), counter: [u32::from(lane), low, high] }
    }

    fn block(self, block_idx: u32) -> [u32; TOKENS_PER_BLOCK] {
        let [lane, low, high] = self.counter;
        philox4x32([block_idx, lane, low, high], self.key)
    }

    fn word(self, token: Token) -> u32 {
        self.block(token / TOKENS_PER_BLOCK as u32)[token as usize % TOKENS_PER_BLOCK]
    }

    /// The word of a number that belongs to no token.
    pub(super) fn single(self) -> u32 {
        self.block(SINGLE)[0]
    }

    /// Uniform noise for each token.
    pub(super) fn uniform_row(self, row: &mut [f32]) {
        self.row(row, uniform);
    }

    /// Gumbel noise for each token.
    pub(super) fn gumbel_row(self, row: &mut [f32]) {
        self.row(row, gumbel);
    }

    fn row(self, row: &mut [f32], noise: fn(u32) -> f32) {
        for (block_idx, entries) in (0..).zip(row.chunks_mut(TOKENS_PER_BLOCK)) {
            let words = self.block(block_idx);
            entries.iter_mut().zip(words).for_each(|(entry, word)| *entry = noise(word));
        }
    }
}

/// `[low, high]`.
fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// The uniform number of a word, strictly between 0 and 1 and exact in f32.
pub(super) fn uniform(word: u32) -> f32 {
    ((word >> 9) as f32 + 0.5) * (1.0 / (1u32 << 23) as f32)
}

/// `−ln(−ln u)`.
fn gumbel(word: u32) -> f32 {
    -log(-log(uniform(word)))
}

/// The leading token so far.
struct Leader {
    token: Token,
    score: f32,
    /// `exp(score − shift)`.
    weight: f32,
    shift: f32,
}

impl Leader {
    fn new(token: Token, logit: f32, shift: f32, words: Words) -> Self {
        let score = logit + gumbel(words.word(token));
        Self { token, score, weight: (score - shift).exp(), shift }
    }

    /// Whether no word could carry a token of this logit past the leader.
    fn is_out_of_reach(&self, logit: f32) -> bool {
        logit + GUMBEL_MAX < self.score
    }

    fn challenge(&mut self, token: Token, logit: f32, word: u32) {
        let score = logit + gumbel(word);
        if score > self.score || (score == self.score && token < self.token) {
            *self = Self { token, score, weight: (score - self.shift).exp(), shift: self.shift };
        }
    }
}

/// The winner over the whole vocabulary. `first` is any token above −∞, best the largest; `max` is the largest logit, and
/// `weights` is `exp(logits − max)`.
pub(super) fn draw_dense(logits: &[f32], weights: &[f32], first: Token, max: f32, words: Words) -> Token {
    let mut leader = Leader::new(first, logits[first as usize], max, words);
    let is_bounded = max.abs() < BOUND_MAX;
    let blocks = logits.chunks(TOKENS_PER_BLOCK).zip(weights.chunks(TOKENS_PER_BLOCK));
    for (block_idx, (logits, weights)) in (0..).zip(blocks) {
        if logits.iter().all(|&logit| leader.is_out_of_reach(logit)) {
            continue;
        }
        let words = words.block(block_idx);
        for (lane, (&logit, &weight)) in logits.iter().zip(weights).enumerate() {
            // −ln u ≥ 1 − u, so g ≤ −ln(1 − u): no logarithm is needed to see most tokens lose.
            if is_bounded && (1.0 - uniform(words[lane])) * leader.weight > weight * BOUND_SLACK {
                continue;
            }
            leader.challenge(block_idx * TOKENS_PER_BLOCK as u32 + lane as u32, logit, words[lane]);
        }
    }
    leader.token
}

/// The winner over the tokens given with their logits, of which there is at least one; fastest when the
/// largest comes first.
pub(super) fn draw_sparse(tokens: impl IntoIterator<Item = (Token, f32)>, words: Words) -> Option<Token> {
    let mut tokens = tokens.into_iter();
    let (first, logit) = tokens.next()?;
    let mut leader = Leader::new(first, logit, 0.0, words);
    for (token, logit) in tokens {
        if !leader.is_out_of_reach(logit) {
            leader.challenge(token, logit, words.word(token));
        }
    }
    Some(leader.token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_never_reaches_its_ends() {
        assert_eq!(uniform(0), 2f32.powi(-24));
        assert_eq!(uniform(u32::MAX), 1.0 - 2f32.powi(-24));
        assert!(gumbel(u32::MAX) < GUMBEL_MAX, "{}", gumbel(u32::MAX));
        assert!(gumbel(0).is_finite());
    }

    #[test]
    fn large_logits_tie_where_their_sums_round_to_one() {
        for (offset, position) in
            [1e4, 1e6, 1e7, 1e8].into_iter().flat_map(|x| (0..200u64).map(move |p| (x, p)))
        {
            let words = Words::new(5, position, 0);
            let logits: Vec<f32> = (0..64)
                .map(|t| offset + (philox4x32([t, 2, position as u32, 0], [1, 2])[0] % 9) as f32)
                .collect();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = logits.iter().map(|l| (l - max).exp()).collect();
            let mut expected = (0, f32::NEG_INFINITY);
            for (token, logit) in (0..).zip(&logits) {
                let score = logit + gumbel(words.word(token));
                if score > expected.1 {
                    expected = (token, score);
                }
            }
            let first = logits.iter().position(|x| *x == max).expect("there is one") as Token;
            assert_eq!(draw_dense(&logits, &weights, first, max, words), expected.0, "{offset}, {position}");
        }
    }

    #[test]
    fn bounds_never_change_the_winner() {
        for position in 0..2000u64 {
            let words = Words::new(7, position, 0);
            // Logits from the generator itself: 0 down to −20, some tied, some forbidden.
            let logits: Vec<f32> = (0..103)
                .map(|t| match philox4x32([t, 1, position as u32, 0], [1, 2])[0] % 64 {
                    0 => f32::NEG_INFINITY,
                    x => -(x as f32) / 3.2,
                })
                .collect();
            let weights: Vec<f32> = logits.iter().map(|l| l.exp()).collect();
            let mut expected = (0, f32::NEG_INFINITY);
            for (token, logit) in logits.iter().enumerate() {
                let score = logit + gumbel(words.word(token as Token));
                if score > expected.1 {
                    expected = (token as Token, score);
                }
            }
            let finite = logits.iter().enumerate().filter(|(_, l)| l.is_finite());
            let first = finite.clone().next().expect("most logits are finite").0 as Token;
            assert_eq!(draw_dense(&logits, &weights, first, 0.0, words), expected.0);
            assert_eq!(draw_sparse(finite.map(|(t, &l)| (t as Token, l)), words), Some(expected.0));
        }
    }
}
