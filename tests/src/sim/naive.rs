//! What a model answers, worked out from the tokens of a context alone: the oracle of every scene. It knows no pages, batches,
//! steps or caches.

use trellis_engine::batch::{Candidate, Token};

/// Entries of the vocabulary.
pub(super) const VOCAB: usize = 64;

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The keys and values of a token, after those of the token before it.
pub(super) fn kv(before: u64, token: Token) -> u64 {
    mix(before ^ mix(u64::from(token) + 1))
}

/// What a model makes of a token that sees these, itself included.
pub(super) fn state(kvs: impl IntoIterator<Item = u64>) -> u64 {
    kvs.into_iter().fold(0, |sum, kv| mix(sum ^ kv).wrapping_add(kv))
}

/// What a model makes of the last of these tokens. Models differ by their salt.
pub(super) fn state_after(salt: u64, tokens: &[Token]) -> u64 {
    state(tokens.iter().scan(salt, |before, &token| {
        *before = kv(*before, token);
        Some(*before)
    }))
}

/// The token that is drawn next.
pub(super) fn drawn(state: u64, seed: u64) -> Candidate {
    Candidate { token: (mix(state ^ seed) % VOCAB as u64) as Token, logprob: -((state % 97) as f32) }
}

/// The log-probability of a token as the next one.
pub(super) fn score(state: u64, token: Token) -> f32 {
    -((mix(state ^ (u64::from(token) << 32)) % 1009) as f32) / 100.0
}

/// The most probable tokens.
pub(super) fn top(state: u64, n: usize) -> Vec<Candidate> {
    let candidate = |token| Candidate { token, logprob: score(state, token) };
    let mut candidates: Vec<Candidate> = (0..VOCAB as Token).map(candidate).collect();
    candidates.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.token.cmp(&b.token)));
    candidates.truncate(n);
    candidates
}

/// The tokens that are drawn as long as each is the one that was guessed, and the first that is not.
pub(super) fn verified(salt: u64, tokens: &[Token], guess: &[Token], seed: u64) -> Vec<Token> {
    let mut all = tokens.to_vec();
    for idx in 0..=guess.len() {
        let token = drawn(state_after(salt, &all), seed).token;
        all.push(token);
        if guess.get(idx) != Some(&token) {
            break;
        }
    }
    all.split_off(tokens.len())
}
