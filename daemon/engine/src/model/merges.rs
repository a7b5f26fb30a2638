//! The merges of a vocabulary of byte pairs, applied in parts to words that the `tokenizers` crate would be busy with for long.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use rustc_hash::FxHashMap;
use serde::Deserialize;
use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

use super::yield_point::{GivenUp, YieldPoint};
use crate::batch::Token;

/// Symbols, or merges, between two yield points.
const N_BETWEEN: usize = 1 << 10;

/// No symbol before, or after.
const NONE: u32 = u32::MAX;

/// What two neighbours become, and in which order.
#[derive(Debug)]
pub(crate) struct Merges(FxHashMap<(Token, Token), Merge>);

#[derive(Clone, Copy, Debug)]
struct Merge {
    rank: u32,
    token: Token,
}

/// As the model writes them.
#[derive(Deserialize)]
struct Written {
    merges: Vec<(String, String)>,
}

/// A part of the word that is a token for now, with its neighbours.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    token: Token,
    before: u32,
    after: u32,
    is_merged: bool, // into the one before it
}

impl Merges {
    /// Those of a model; `None` where its words are more than the merges of their bytes, or entries share a token.
    pub(crate) fn of(model: &BPE) -> Option<Self> {
        if model.continuing_subword_prefix.is_some() || model.end_of_word_suffix.is_some() {
            return None;
        }
        let vocabulary = model.get_vocab();
        if vocabulary.values().collect::<BTreeSet<_>>().len() < vocabulary.len() {
            return None;
        }
        let written: Written = serde_json::from_str(&serde_json::to_string(model).ok()?).ok()?;
        let merges = (0..).zip(written.merges).map(|(rank, (left, right))| {
            let pair = (model.token_to_id(&left)?, model.token_to_id(&right)?);
            Some((pair, Merge { rank, token: model.token_to_id(&(left + &right))? }))
        });
        merges.collect::<Option<_>>().map(Self)
    }

    /// The tokens of a word: always the first merge of the lowest rank, until there is none. As `Word::merge_all` of the
    /// `tokenizers` crate does.
    ///
    /// # Errors
    /// The work was given up.
    pub(crate) fn apply(
        &self,
        word: impl ExactSizeIterator<Item = Token>,
        yields: &YieldPoint,
    ) -> Result<Vec<Token>, GivenUp> {
        let n_symbols = word.len() as u32;
        let mut symbols: Vec<Symbol> = Vec::new();
        let mut queue = BinaryHeap::new();
        let push = |queue: &mut BinaryHeap<_>, place: u32, left: Token, right: Token| {
            if let Some(&Merge { rank, token }) = self.0.get(&(left, right)) {
                queue.push(Reverse((rank, place, token)));
            }
        };
        for (place, token) in (0..).zip(word) {
            if place as usize % N_BETWEEN == 0 {
                yields.reach()?;
            }
            if let Some(left) = symbols.last() {
                push(&mut queue, place - 1, left.token, token);
            }
            let before = if place == 0 { NONE } else { place - 1 };
            let after = if place + 1 == n_symbols { NONE } else { place + 1 };
            symbols.push(Symbol { token, before, after, is_merged: false });
        }
        let mut n_done = 0;
        while let Some(Reverse((_, place, token))) = queue.pop() {
            n_done += 1;
            if n_done % N_BETWEEN == 0 {
                yields.reach()?;
            }
            let left = symbols[place as usize];
            if left.is_merged || left.after == NONE {
                continue;
            }
            let right = symbols[left.after as usize];
            // What stood here when it was queued may have become something else.
            if self.0.get(&(left.token, right.token)).is_none_or(|merge| merge.token != token) {
                continue;
            }
            symbols[left.after as usize].is_merged = true;
            symbols[place as usize] = Symbol { token, after: right.after, ..left };
            if right.after != NONE {
                symbols[right.after as usize].before = place;
                push(&mut queue, place, token, symbols[right.after as usize].token);
            }
            if left.before != NONE {
                push(&mut queue, left.before, symbols[left.before as usize].token, token);
            }
        }
        Ok(symbols.iter().filter(|symbol| !symbol.is_merged).map(|symbol| symbol.token).collect())
    }
}
