//! Contexts whose tokens are steered, among random operations.

use std::sync::Arc;

use super::hash_backend::digest;
use super::{N_PAGES_MIN, World};
use crate::command::Operation;
use crate::steering::Steering;

impl World {
    /// Steers a context from some token on, or no more.
    pub(super) fn steer(&mut self, idx: usize) {
        let model = &self.contexts[idx].1;
        if !model.past.evictions.is_empty() {
            return;
        }
        let n_tokens = model.tokens.len();
        // Few steerings, so that they coincide, and mostly for what is to come.
        let (n_layers, value) = (self.random.below(2), self.random.below(3) as f32);
        let from = match self.random.below(3) {
            0 => self.random.below(n_tokens + 1),
            1 => 0,
            _ => n_tokens,
        };
        let steering = Steering::new(vec![(n_layers, vec![value])], 6, 1).expect("it fits the model");
        let (id, model) = &mut self.contexts[idx];
        let id = *id;
        model.past.steered = steering.as_ref().map(|steering| (digest(steering), from));
        let edit = Self::edit(model, &mut self.n_mixed);
        self.n_steered += usize::from(steering.is_some());
        self.apply(Operation::Steer { id, edit, steering: steering.map(Arc::new), from });
    }
}

#[test]
fn steering_is_what_a_model_without_pages_makes_of_it() {
    let (mut n_steered, mut n_evicted, mut n_answers, mut n_pulled) = (0, 0, 0, 0);
    let (mut n_verified, mut n_cached, mut n_again, mut n_swaps, mut n_in_vain) = (0, 0, 0, 0, 0);
    for seed in 40_000..40_120 {
        let mut world = World::with_pages(seed, N_PAGES_MIN + super::evict::N_PAGES_OF_HOLES);
        world.n_steers_in_100 = 12;
        world.n_evictions_in_100 = if seed % 3 == 0 { 4 } else { 0 };
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
        n_steered += world.n_steered;
        n_evicted += world.n_evicted;
        n_answers += world.n_answers;
        n_pulled += world.n_tokens_pulled;
        n_verified += world.n_verified;
        let stats = world.scheduler.stats();
        n_cached += stats.n_tokens_cached;
        n_again += stats.n_tokens_again;
        n_swaps += stats.n_swaps_out;
        n_in_vain += stats.causes.n_rows_in_vain();
    }
    assert!(n_steered > 2_000 && n_evicted > 2_000, "{n_steered} {n_evicted}");
    assert!(n_answers > 3_000 && n_pulled > 2_000 && n_verified > 200, "{n_answers} {n_pulled} {n_verified}");
    assert!(n_cached > 2_000 && n_again > 50 && n_swaps > 50, "{n_cached} {n_again} {n_swaps}");
    assert!(n_in_vain > 50, "{n_in_vain}");
}
