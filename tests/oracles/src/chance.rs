//! Inputs by chance: the same for the same seed.

/// SplitMix64.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// The most changes between an input and what is made of it.
const N_CHANGES_MAX: usize = 8;

/// Bytes by chance: of this length at most.
#[must_use]
pub fn random_input(seed: u64, n_bytes_max: usize) -> Vec<u8> {
    let mut chance = Chance(seed);
    let n_bytes = chance.below(n_bytes_max + 1);
    let mut bytes: Vec<u8> = (0..n_bytes.div_ceil(8)).flat_map(|_| chance.next().to_le_bytes()).collect();
    bytes.truncate(n_bytes);
    bytes
}

/// One of these inputs with a few changes, or bytes by chance: of this length at most.
#[must_use]
pub fn mutated_input(kept: &[Vec<u8>], seed: u64, n_bytes_max: usize) -> Vec<u8> {
    let mut chance = Chance(seed);
    if kept.is_empty() || chance.below(8) == 0 {
        return random_input(chance.next(), n_bytes_max);
    }
    let mut input = kept[chance.below(kept.len())].clone();
    for _ in 0..=chance.below(N_CHANGES_MAX) {
        let place = chance.below(input.len() + 1);
        let end = (place + 1 + chance.below(8)).min(input.len());
        match chance.below(6) {
            0 if place < input.len() => input[place] ^= 1 << chance.below(8),
            1 if place < input.len() => input[place] = chance.next() as u8,
            2 => drop(input.drain(place..end)),
            3 => {
                let again = input[place..end].to_vec();
                input.splice(place..place, again);
            }
            4 => {
                // Goes on as another one does.
                let other = &kept[chance.below(kept.len())];
                input.truncate(place);
                input.extend(&other[place.min(other.len())..]);
            }
            _ => input.insert(place, chance.next() as u8),
        }
    }
    input.truncate(n_bytes_max);
    input
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn what_is_made_of_inputs_is_mostly_new_near_them_and_the_same_for_a_seed() {
        let kept = vec![vec![7; 100], (0..100).collect(), Vec::new()];
        let made: Vec<Vec<u8>> = (0..500).map(|seed| mutated_input(&kept, seed, 104)).collect();
        assert!(made.iter().all(|input| input.len() <= 104));
        let is_near = |input: &&Vec<u8>| input.iter().filter(|byte| **byte == 7).count() > 80;
        assert!(made.iter().filter(is_near).count() > 80);
        assert!(made.iter().collect::<BTreeSet<_>>().len() > 400);
        assert_eq!(made[3], mutated_input(&kept, 3, 104));
    }
}
