//! A backend that shows every mistake with pages.

use crate::backend::PAGE_LEN;
use crate::batch::{Batch, Candidate, FollowUp, Output, OutputFault, OutputKind, Row, Token};
use crate::scheduler::Move;

/// Entries of its vocabulary.
pub(super) const VOCAB: u64 = 50;

pub(super) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

pub(super) fn extend_hash(hash: u64, token: Token) -> u64 {
    mix(hash ^ mix(u64::from(token) + 1))
}

pub(super) fn hash(tokens: &[Token]) -> u64 {
    tokens.iter().fold(0, |hash, &token| extend_hash(hash, token))
}

pub(super) fn drawn(prefix_hash: u64, seed: u64) -> Candidate {
    Candidate { token: (mix(prefix_hash ^ seed) % VOCAB) as Token, logprob: -((prefix_hash % 97) as f32) }
}

/// Whether drawing with this seed fails here; never with a multiple of 8.
pub(super) fn fails(prefix_hash: u64, seed: u64) -> bool {
    seed % 8 == 1 && mix(prefix_hash ^ !seed).is_multiple_of(8)
}

pub(super) fn score(prefix_hash: u64, token: Token) -> f32 {
    -((mix(prefix_hash ^ (u64::from(token) << 32)) % 1009) as f32)
}

/// A backend whose KV of a position is a hash of all tokens up to it, checked whenever it is read.
pub(super) struct HashBackend {
    pages: Vec<[u64; PAGE_LEN]>,
    host_pages: Vec<[u64; PAGE_LEN]>,
    /// Tokens begun with before the engine asked for them.
    pub(super) n_guesses: usize,
    /// Of which at the beginning of a page.
    pub(super) n_guesses_on_new_pages: usize,
}

/// What is in memory that nobody should read.
const GARBAGE: u64 = u64::MAX;

impl HashBackend {
    pub(super) fn new(n_pages: usize, n_host_pages: usize) -> Self {
        let pages = |n| vec![[GARBAGE; PAGE_LEN]; n];
        Self {
            pages: pages(n_pages),
            host_pages: pages(n_host_pages),
            n_guesses: 0,
            n_guesses_on_new_pages: 0,
        }
    }

    pub(super) fn run(&mut self, moves: &[Move], batch: &Batch<'_>) -> Vec<Output> {
        for step in moves {
            match *step {
                Move::Out(page, host) => {
                    self.host_pages[host.0 as usize] =
                        std::mem::replace(&mut self.pages[page.0 as usize], [GARBAGE; PAGE_LEN]);
                }
                Move::In(host, page) => {
                    self.pages[page.0 as usize] =
                        std::mem::replace(&mut self.host_pages[host.0 as usize], [GARBAGE; PAGE_LEN]);
                }
            }
        }
        for copy in &batch.copies {
            assert!(batch.copies.iter().all(|other| other.dst != copy.src), "a source is no destination");
            self.pages[copy.dst.0 as usize] = self.pages[copy.src.0 as usize];
        }
        // All rows are written before any is checked: a page shared in error would be seen.
        for row in &batch.rows {
            let mut prefix = hash(&row.tokens[..row.start]);
            for (position, &token) in row.tokens.iter().enumerate().skip(row.start) {
                prefix = extend_hash(prefix, token);
                self.pages[row.pages[position / PAGE_LEN].0 as usize][position % PAGE_LEN] = prefix;
            }
        }
        let mut outputs = Vec::new();
        for row in &batch.rows {
            assert!(row.start < row.tokens.len());
            check_n_pages(row);
            let mut prefix = 0;
            for (position, &token) in row.tokens.iter().enumerate() {
                prefix = extend_hash(prefix, token);
                let stored = self.pages[row.pages[position / PAGE_LEN].0 as usize][position % PAGE_LEN];
                assert_eq!(stored, prefix, "KV of position {position}");
            }
            for request in &row.outputs {
                assert!((row.start..row.tokens.len()).contains(&request.position));
                let prefix = hash(&row.tokens[..=request.position]);
                outputs.push(match &request.kind {
                    OutputKind::Sample(sampler) if fails(prefix, sampler.seed) => {
                        Output::Failed(OutputFault::NothingToDraw)
                    }
                    OutputKind::Sample(sampler) => Output::Sampled(drawn(prefix, sampler.seed)),
                    OutputKind::Top { n } => {
                        Output::Top { candidates: vec![drawn(prefix, 0); *n], entropy: score(prefix, 0) }
                    }
                    OutputKind::Scores(tokens) => {
                        Output::Scores(tokens.iter().map(|&token| score(prefix, token)).collect())
                    }
                    OutputKind::Full => Output::Full(vec![score(prefix, 7)]),
                    OutputKind::Embedding => Output::Embedding(vec![score(prefix, 8)]),
                });
            }
        }
        batch.rows.iter().for_each(|row| self.guess(row));
        outputs
    }

    /// Begins with the token that follows a row, as a device does that does not wait for the engine; with a wrong one,
    /// which nobody must see.
    fn guess(&mut self, row: &Row<'_>) {
        let position = row.tokens.len();
        if row.follow_up == FollowUp::Expected
            && let Some(page) = row.pages.get(position / PAGE_LEN)
        {
            self.pages[page.0 as usize][position % PAGE_LEN] = GARBAGE;
            self.n_guesses += 1;
            self.n_guesses_on_new_pages += usize::from(position.is_multiple_of(PAGE_LEN));
        }
    }
}

fn check_n_pages(row: &Row<'_>) {
    let n_needed = row.tokens.len().div_ceil(PAGE_LEN);
    let is_expected = row.follow_up == FollowUp::Expected;
    let has_one_more = is_expected && row.pages.len() == n_needed + 1;
    assert!(row.pages.len() == n_needed || has_one_more, "{} pages", row.pages.len());
    assert!(!has_one_more || row.tokens.len().is_multiple_of(PAGE_LEN), "a page that no token needs");
    if is_expected {
        let draws = |output: &crate::batch::OutputRequest<'_>| matches!(output.kind, OutputKind::Sample(_));
        assert!(row.outputs.last().is_some_and(draws), "only what draws has a follow-up");
    }
}
