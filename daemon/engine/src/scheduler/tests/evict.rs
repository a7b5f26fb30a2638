//! Contexts out of whose middle tokens are taken, among random operations.

use super::hash_backend::Chain;
use super::verify::House;
use super::{Model, N_PAGES_MIN, N_POSITIONS, World};
use crate::batch::Token;
use crate::command::{Ask, ContextId, Edit, Operation};
use crate::kv::{Evictions, N_STRETCHES_MAX, Positions};

/// Pages that closed holes may leave half empty, beside those of a context without.
pub(super) const N_PAGES_OF_HOLES: usize = 2 * N_STRETCHES_MAX;

/// What a model without pages knows of a context's holes.
#[derive(Clone, Default)]
pub(super) struct Past {
    pub(super) evictions: Evictions,
    /// The KV of the first tokens, as it was computed before the last eviction.
    kvs: Vec<u64>,
    /// Tokens before each hole.
    holes: Vec<usize>,
    /// What is added to its tokens from this one on, those that are gone counted too.
    pub(super) steered: Option<(u64, usize)>,
}

impl Past {
    /// What the KV of the next token follows from.
    pub(super) fn chain(&self, tokens: &[Token]) -> Chain {
        let first = match self.holes.is_empty() {
            true => self.steer(Chain::from(0), 0),
            false => self.steer(Chain::holed(&self.kvs), self.kvs.len()),
        };
        let n_known = if self.holes.is_empty() { 0 } else { self.kvs.len() };
        tokens[n_known..].iter().fold(first, |chain, &token| chain.extend(token))
    }

    /// The chain of so many tokens that are there, to be extended by what is steered.
    fn steer(&self, chain: Chain, n_tokens: usize) -> Chain {
        let from = |(digest, number): (u64, usize)| (digest, self.evictions.index_of(number));
        chain.steered(self.steered.map(from), n_tokens)
    }

    fn truncate(&mut self, n_tokens: usize) {
        self.evictions.truncate(n_tokens);
        // What was computed before an eviction and is last now is computed after it.
        self.kvs.truncate(n_tokens.saturating_sub(1));
        self.holes.retain(|&hole| hole < n_tokens);
        if self.holes.is_empty() {
            *self = Self { steered: self.steered, ..Self::default() };
        }
    }

    fn evict(&mut self, start: usize, end: usize, tokens: &[Token], positions: Positions) -> bool {
        let mut chain = match self.holes.is_empty() {
            true => self.steer(Chain::from(0), 0),
            false => self.steer(Chain::holed(&self.kvs), self.kvs.len()),
        };
        if self.evictions.evict(start..end, tokens.len(), positions, N_POSITIONS).is_err() {
            return false;
        }
        for &token in &tokens[self.kvs.len()..tokens.len() - 1] {
            chain = chain.extend(token);
            self.kvs.push(chain.last);
        }
        self.kvs.drain(start..end);
        self.holes.retain(|hole| !(start..=end).contains(hole));
        self.holes.iter_mut().filter(|hole| **hole > end).for_each(|hole| *hole -= end - start);
        self.holes.push(start);
        true
    }
}

impl Model {
    /// What the KV of the next token follows from.
    pub(super) fn chain(&self) -> Chain {
        self.past.chain(&self.tokens)
    }

    pub(super) fn truncate(&mut self, n_tokens: usize) {
        self.tokens.truncate(n_tokens);
        self.past.truncate(n_tokens);
    }

    /// How many more tokens fit.
    pub(super) fn n_free(&self) -> usize {
        let n_kept = self.past.evictions.n_evicted() - self.past.evictions.n_closed_up();
        N_POSITIONS - self.tokens.len() - n_kept
    }
}

/// A question or a run was refused `n_needed` pages on a device of `n_pages`, whose context takes `n_most` at most. Without
/// holes a context fits every device. Holes leave pages half empty; those are packed into fewer where another page is at hand, and
/// there is none while its context has the whole device.
pub(super) fn check_refused(n_needed: usize, n_pages: usize, n_most: usize) {
    assert!(n_needed > n_pages && n_pages >= N_PAGES_MIN, "{n_needed} of {n_pages}");
    assert!(n_most > n_pages, "{n_most} of {n_pages} would do for {n_needed}");
}

impl World {
    /// The most pages that a context takes until all its tokens are computed, those that its work has put after them included.
    pub(super) fn n_pages_most(&self, id: ContextId) -> usize {
        let context = self.scheduler.contexts.get(&id);
        context.map_or(0, |context| context.kv.n_blocks_until_anew(context.kv.tokens.len()))
    }

    /// Takes tokens out of a context.
    pub(super) fn evict(&mut self, idx: usize) {
        let n_tokens = self.contexts[idx].1.tokens.len();
        if n_tokens < 2 {
            return;
        }
        // Mostly the oldest behind some that stay, sometimes whatever.
        let start =
            if self.random.below(3) > 0 { n_tokens.min(6) - 2 } else { self.random.below(n_tokens - 1) };
        let n = 1 + self.random.below((n_tokens - 1 - start).min(40));
        let end = start + n;
        let positions = [Positions::Keep, Positions::CloseUp][self.random.below(2)];
        let (id, model) = &mut self.contexts[idx];
        let id = *id;
        if !model.past.evict(start, end, &model.tokens, positions) {
            return;
        }
        let edit = Self::edit(model, &mut self.n_mixed);
        model.tokens.drain(start..end);
        model.n_synced = model.tokens.len();
        self.n_evicted += n;
        self.apply(Operation::Evict { id, edit, start, end, positions });
    }
}

#[test]
fn holes_are_what_a_model_without_pages_makes_of_them() {
    let (mut n_evicted, mut n_answers, mut n_pulled, mut n_again, mut n_swaps) = (0, 0, 0, 0, 0);
    let (mut n_verified, mut n_in_vain, mut n_packs, mut n_searched) = (0, 0, 0, 0);
    for seed in 20_000..20_150 {
        let mut world = World::with_pages(seed, N_PAGES_MIN + N_PAGES_OF_HOLES);
        world.n_evictions_in_100 = 12;
        for n_acts in 0..500 {
            world.act();
            if n_acts % 8 == 0 {
                world.kvs().for_each(|kv| {
                    kv.check_keys(&world.scheduler.pages);
                    kv.check_own(&world.scheduler.pages);
                });
            }
            if world.random.below(3) == 0 {
                world.step();
            }
        }
        let world = world.finish();
        n_evicted += world.n_evicted;
        n_answers += world.n_answers;
        n_pulled += world.n_tokens_pulled;
        n_verified += world.n_verified;
        n_packs += world.backend.n_packs;
        n_searched += world.n_searches.n_found_holed;
        let stats = world.scheduler.stats();
        n_again += stats.n_tokens_again;
        n_swaps += stats.n_swaps_out;
        n_in_vain += stats.causes.n_rows_in_vain();
    }
    assert!(
        n_evicted > 20_000 && n_answers > 4_000 && n_pulled > 4_000,
        "{n_evicted} {n_answers} {n_pulled}"
    );
    assert!(n_again > 300 && n_swaps > 200 && n_in_vain > 200, "{n_again} {n_swaps} {n_in_vain}");
    assert!(n_verified > 300 && n_packs > 20 && n_searched > 50, "{n_verified} {n_packs} {n_searched}");
}

/// The device keeps the state of its last token all the same, but what that has seen is not put together before the holes are
/// there again.
#[test]
fn a_context_with_holes_that_loses_its_pages_before_it_is_asked_is_computed_again() {
    let mut house = House::new(32, u64::MAX);
    let id = house.create();
    let tokens: Vec<Token> = (0..50).map(|token| token % 40).collect();
    let place = house.ask(id, 0, &tokens, Ask::Prefill);
    house.answer(place).0.expect("there is room");
    let edit = Edit { n_kept: 50, ..Edit::default() };
    house.scheduler.apply(Operation::Evict { id, edit, start: 4, end: 14, positions: Positions::CloseUp });
    let place = house.ask(id, 40, &[1, 2, 3], Ask::Logits);
    let expected = house.answer(place).0.expect("there is room");

    let place = house.ask(id, 43, &[], Ask::Logits);
    let n_before = house.backend.n_rows_of_head;
    let (answer, n_tokens) = house.answer(place);
    assert_eq!(
        (answer.expect("there is room"), n_tokens),
        (expected.clone(), 0),
        "of the state that is kept"
    );
    assert_eq!(house.backend.n_rows_of_head - n_before, 1);

    let place = house.ask(id, 43, &[], Ask::Logits);
    let kv = &mut house.scheduler.contexts.get_mut(&id).expect("it is there").kv;
    kv.give_up_last_block(&mut house.scheduler.pages);
    assert_eq!(house.answer(place).0.expect("there is room"), expected);
    assert_eq!(house.backend.n_rows_of_head - n_before, 1, "its tokens were computed again");
}
