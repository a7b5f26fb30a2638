//! Operations that bytes say.

use super::{N_PAGES_MIN, Random, World};

/// Does to a scheduler what these bytes say, and compares all that comes of it with a model without pages, batches or
/// run-ahead.
///
/// # Panics
/// Something is not as in the model, an invariant of the page table does not hold, or something never comes to its end.
pub fn run(bytes: &[u8]) {
    let Some((seed, bytes)) = bytes.split_first_chunk() else { return };
    let seed = u64::from(u16::from_le_bytes(*seed));
    let mut world = World::by(Random::given(bytes, seed), seed, N_PAGES_MIN);
    world.n_evictions_in_100 = [0, 5, 20][world.random.below(3)];
    world.n_steers_in_100 = [0, 0, 5][world.random.below(3)];
    while world.random.is_given() {
        world.act();
        world.check_sequences();
        if world.random.below(3) == 0 {
            world.step();
        }
    }
    world.finish();
}
