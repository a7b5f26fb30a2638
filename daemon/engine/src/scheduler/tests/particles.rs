//! Resampling a population, as far as pages go.

use super::verify::{House, text};
use super::*;

/// Places in a population.
const N: usize = 48;

/// Each context gets a token of its own and is asked for the next one; pages that were copied for it.
fn draw_all(house: &mut House, contexts: &mut [(ContextId, Vec<Token>)]) -> usize {
    let mut asked = VecDeque::new();
    for (idx, (id, tokens)) in contexts.iter_mut().enumerate() {
        let n_kept = tokens.len();
        tokens.push((idx % VOCAB as usize) as Token);
        asked.push_back(house.ask(*id, n_kept, &tokens[n_kept..], Ask::Top { n: 1 }));
    }
    let mut n_copied = 0;
    while let Some(place) = asked.front() {
        if house.try_answer(place).is_some() {
            asked.pop_front();
            continue;
        }
        let (plan, outputs) = house.submit();
        n_copied += plan.copies.len();
        house.scheduler.complete(plan, outputs, 1_000_000);
    }
    n_copied
}

/// Pages that are full stay shared: a round of draws after resampling copies the last page of each place but one
/// where it is not full, and nothing else.
#[test]
fn resampling_copies_no_full_page() {
    const N_PROMPT_PAGES: usize = 4;
    let mut house = House::with_rows(256, u64::MAX, 64);
    let prompt = text(&mut Random::new(5), N_PROMPT_PAGES * PAGE_LEN);
    let first = house.create();
    let asked = house.ask(first, 0, &prompt, Ask::Top { n: 1 });
    house.answer(asked).0.expect("it fits");
    let mut contexts = vec![(first, prompt)];
    for n_drawn in 0..PAGE_LEN + 3 {
        // All go on from the place in the middle, the first copy of which is itself.
        let (survivor, tokens) = contexts.swap_remove(contexts.len() / 2);
        let copies = (1..N).map(|_| (house.fork(survivor, tokens.len()), tokens.clone()));
        let copies: Vec<_> = copies.collect();
        for (id, _) in std::mem::replace(&mut contexts, copies) {
            house.scheduler.apply(Operation::Release { id, n_pulled: 0 });
        }
        contexts.push((survivor, tokens));
        // There are 100 pages: full ones of each place by itself would not fit.
        let n_copied = draw_all(&mut house, &mut contexts);
        let is_last_full = n_drawn % PAGE_LEN == 0;
        assert_eq!(n_copied, if is_last_full { 0 } else { N - 1 }, "after {n_drawn} tokens");
    }
}
