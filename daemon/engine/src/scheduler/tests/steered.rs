//! Contexts whose tokens are steered, among random operations.

use std::collections::HashMap;
use std::sync::Arc;

use super::evict::Past;
use super::hash_backend::digest;
use super::verify::House;
use super::{N_PAGES_MIN, World};
use crate::backend::SteeringTimes;
use crate::command::{Ask, ContextId, Edit, Operation};
use crate::sampling::Sampler;
use crate::steering::Steering;

impl Past {
    /// Tokens from the first on, there may be fewer, to which the same is added as to those of another.
    pub(super) fn n_steered_as(&self, other: &Self) -> usize {
        let starts = [self.steered, other.steered].into_iter().flatten().map(|(_, from)| from);
        if self.steered == other.steered { usize::MAX } else { starts.min().unwrap_or(usize::MAX) }
    }
}

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

/// The first of them brings the vectors, and so does one that comes back to them later; rows that are steered in one step bear
/// together what that makes it longer.
#[test]
fn steered_rows_bear_what_they_take() {
    const STEP_NS: u64 = 60_000;
    let mut house = House::new(64, u64::MAX);
    house.scheduler.limits.hidden_size = 1024;
    house.scheduler.limits.steering = SteeringTimes { step_ns: STEP_NS, kib_ns: 100 };
    let steering = Steering::new(vec![(2, vec![1.0; 1024])], 6, 1024).expect("it fits").map(Arc::new);
    let [plain, one, other] = [None, steering.clone(), steering].map(|steering| {
        let id = house.create();
        let edit = Edit { appended: vec![1], ..Edit::default() };
        house.scheduler.apply(Operation::Steer { id, edit, steering, from: 0 });
        id
    });
    let vtime = |house: &House| house.scheduler.commons.queue.vtimes([1, 1, 1])[2];
    let mut n_asked = HashMap::from([plain, one, other].map(|id| (id, 0)));
    // What a step with a token of each takes beside the additions, and what their guest pays for all of it.
    let mut step = |house: &mut House, ids: &[ContextId]| {
        let asked: Vec<_> = ids
            .iter()
            .map(|id| {
                let n_asked = n_asked.get_mut(id).expect("it was made");
                let (n_tokens, appended) = if *n_asked == 0 { (1, &[][..]) } else { (*n_asked, &[1][..]) };
                *n_asked += 1;
                house.ask(*id, n_tokens, appended, Ask::Sample(Arc::new(Sampler::greedy())))
            })
            .collect();
        let before = vtime(house);
        let (plan, outputs) = house.submit();
        let (steering_ns, paid) = (plan.work.steering_ns, vtime(house) - before);
        assert_eq!((plan.work.n_decode_rows, plan.work.n_prompt_tokens), (ids.len(), 0));
        house.scheduler.complete(plan, outputs, 1_000_000);
        assert!(asked.iter().all(|reply| house.try_answer(reply).is_some_and(|answer| answer.is_ok())));
        (steering_ns, paid)
    };
    step(&mut house, &[plain]);
    let (of_plain, row) = step(&mut house, &[plain]);
    assert_eq!(of_plain, 0);
    // 4,096 bytes take 400 ns.
    let (of_first, first) = step(&mut house, &[one]);
    assert_eq!(of_first, STEP_NS + 400);
    assert!((first - row).abs_diff(STEP_NS + 400) < 20, "{first}, and {row} for a row that is not steered");
    assert_eq!(step(&mut house, &[one]).0, STEP_NS, "they are there");
    (0..4).for_each(|_| assert_eq!(step(&mut house, &[plain]).0, 0));
    assert_eq!(step(&mut house, &[one]).0, STEP_NS + 400, "they may have gone");
    assert_eq!(house.scheduler.costs.steered_row_ns(STEP_NS), STEP_NS);
    assert_eq!(
        step(&mut house, &[one, plain, other]).0,
        STEP_NS + 400,
        "one has them, the other brings them"
    );
    assert_eq!(house.scheduler.costs.steered_row_ns(STEP_NS), STEP_NS / 2);
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
