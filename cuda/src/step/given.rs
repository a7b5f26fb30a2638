//! What rows are given and does not change from token to token: plans, masks and biases of programs, and what is added to
//! tokens. It stays on the device while there is room.
//!
//! - Comes in: what the rows of a step draw with, and are steered by.
//! - Goes out: where it lies in the memory of steps, and the words that have to be brought there before the step.
//! - Must not happen: words brought that are there; a place given away that the same step reads.
//!
//! Places are handed out one behind the other, and from the start again: what is in the way goes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use trellis_engine::Steering;
use trellis_engine::batch::Within;
use trellis_engine::sampling::program::{ProgramId, PutOn};
use trellis_engine::sampling::{Bias, TokenMask};

use super::slots::EditList;
use super::words::to_words;
use crate::ops::logits::{BiasPair, NOWHERE};
use crate::ops::program::ProgramBias;
use crate::ops::program_plan::{EncodedProgram, ProgramKind};
use crate::ops::steer;

/// Words that places are multiples of: the widest access.
const ALIGNMENT: usize = 4;
/// Rows of the vocabulary that are brought in one step at most.
const N_ROWS_BROUGHT: usize = 32;
/// Rows of the vocabulary that are kept.
const N_ROWS_KEPT: usize = 96;
/// Words besides, for plans and for what small vocabularies need.
const N_WORDS_BESIDES: usize = 1 << 17;
/// Programs that the device cannot run are remembered, so many.
const N_REFUSED_MAX: usize = 1024;

/// Words that one step brings at most, with what says where they go.
pub(crate) fn n_brought_words(vocab_size: usize) -> usize {
    N_ROWS_BROUGHT * vocab_size.next_multiple_of(ALIGNMENT) + N_WORDS_BESIDES
}

/// Bytes of masks, biases and vectors that one step brings at most; the rest of what it may bring is plans and tables.
pub(crate) fn given_bytes(vocab_size: usize) -> usize {
    N_ROWS_BROUGHT * vocab_size * 4
}

/// Words that are kept on the device.
pub(crate) fn n_kept_words(vocab_size: usize) -> usize {
    N_ROWS_KEPT * vocab_size.next_multiple_of(ALIGNMENT) + 2 * N_WORDS_BESIDES
}

/// Which things the device has, and where.
#[derive(Debug)]
pub(crate) struct Given {
    /// Where all of it lies in the memory of steps.
    words: Range<usize>,
    /// Where the next thing goes, if what is there may go.
    next: usize,
    /// By where they begin.
    kept: BTreeMap<usize, Kept>,
    places: HashMap<Thing, usize>,
    refused: HashSet<(ProgramId, Keeps)>,
    /// The number of the step that is being put together.
    step: u64,
    brought: Brought,
    n_brought_max: usize,
}

/// What a plan keeps to by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Keeps {
    ToNothing,
    /// The mask of its output row.
    ToMask,
}

impl Keeps {
    pub(super) fn to(within: Within<'_>) -> Self {
        match within {
            Within::All => Self::ToNothing,
            Within::Mask(_) | Within::Late => Self::ToMask,
        }
    }
}

/// What tells things apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Thing {
    Plan(ProgramId, Keeps),
    /// Its address: see [`Kept::_owner`].
    Mask(usize),
    Bias(usize),
    Steering([u8; 32]),
}

/// What is known of a thing besides its words.
#[derive(Clone, Copy, Debug)]
struct Facts {
    /// Planes of a plan, or pairs of a sparse bias.
    n: usize,
    /// Of a plan.
    kind: ProgramKind,
}

impl Facts {
    const NONE: Self = Self { n: 0, kind: ProgramKind::Any };
}

#[derive(Debug)]
struct Kept {
    thing: Thing,
    end: usize,
    facts: Facts,
    used_in: u64,
    /// While it is here, no other mask or bias has the address.
    _owner: Owner,
}

#[derive(Debug)]
#[expect(dead_code, reason = "what is held keeps an address from being used again")]
enum Owner {
    /// A plan is told by its program's contents, a steering by its own.
    None,
    Mask(Weak<TokenMask>),
    Bias(Weak<Bias>),
}

/// Words to bring.
#[derive(Debug, Default)]
pub(super) struct Brought {
    words: Vec<u32>,
    /// Words that bringing them takes.
    n_words: usize,
    /// Where each part of them goes.
    parts: Vec<(usize, Range<usize>)>,
}

/// Where the things of one draw lie, in the units in which the kernel counts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Places {
    /// Entries.
    pub(super) plan: u32,
    pub(super) n_planes: usize,
    /// Which kernels can run the program.
    pub(super) kind: ProgramKind,
    /// Words of 64 bits.
    pub(super) masks: SmallVec<[u32; 2]>,
    pub(super) biases: SmallVec<[ProgramBias; 2]>,
}

impl Given {
    /// In these words of the memory of steps, for a vocabulary.
    pub(crate) fn new(words: Range<usize>, vocab_size: usize) -> Self {
        assert!(words.start.is_multiple_of(ALIGNMENT), "{words:?}");
        Self {
            next: words.start,
            words,
            kept: BTreeMap::new(),
            places: HashMap::new(),
            refused: HashSet::new(),
            step: 0,
            brought: Brought::default(),
            n_brought_max: n_brought_words(vocab_size),
        }
    }

    /// Forgets all that the device has: it is not known any more.
    pub(crate) fn forget(&mut self) {
        self.kept.clear();
        self.places.clear();
        self.next = self.words.start;
    }

    /// Begins another step, which brings nothing yet.
    pub(super) fn begin_step(&mut self) {
        self.step += 1;
        self.brought.words.clear();
        self.brought.n_words = 0;
        self.brought.parts.clear();
    }

    /// What the step brings.
    pub(super) fn brought(&self) -> &Brought {
        &self.brought
    }

    /// Finds what a draw needs, or gives it a place and has it brought; `None` where the device cannot run the program or
    /// this step has no room for it.
    pub(super) fn place(&mut self, put_on: &PutOn, keeps: Keeps) -> Option<Places> {
        let program = &put_on.program;
        let which = (program.id(), keeps);
        let (plan, of_plan) = self.put(Thing::Plan(program.id(), keeps), |this| {
            if this.refused.contains(&which) {
                return None;
            }
            let planned = match keeps {
                Keeps::ToNothing => EncodedProgram::new(program),
                Keeps::ToMask => EncodedProgram::new(&program.constrained()),
            };
            let Ok(plan) = planned else {
                if this.refused.len() == N_REFUSED_MAX {
                    this.refused.clear();
                }
                this.refused.insert(which);
                return None;
            };
            this.brought.words.extend_from_slice(to_words(plan.entries()));
            let facts = Facts { n: plan.n_planes(), kind: plan.kind() };
            Some((facts, Owner::None))
        })?;
        let mask = |this: &mut Self, mask: &Arc<TokenMask>| {
            let (start, _) = this.put(Thing::Mask(Arc::as_ptr(mask) as usize), |this| {
                this.brought
                    .words
                    .extend(mask.words().iter().flat_map(|&word| [word as u32, (word >> 32) as u32]));
                Some((Facts::NONE, Owner::Mask(Arc::downgrade(mask))))
            })?;
            Some(start as u32 / 2)
        };
        let bias = |this: &mut Self, bias: &Arc<Bias>| {
            let (start, facts) = this.put(Thing::Bias(Arc::as_ptr(bias) as usize), |this| {
                let owner = Owner::Bias(Arc::downgrade(bias));
                match &**bias {
                    Bias::Dense(values) => {
                        this.brought.words.extend(values.iter().map(|value| value.to_bits()));
                        Some((Facts::NONE, owner))
                    }
                    Bias::Sparse(pairs) => {
                        let pairs = pairs.iter().map(|&(token, value)| BiasPair { token, value });
                        this.brought.words.extend(pairs.flat_map(|pair| [pair.token, pair.value.to_bits()]));
                        let n = bias.n_bytes() / size_of::<BiasPair>();
                        Some((Facts { n, ..Facts::NONE }, owner))
                    }
                }
            })?;
            Some(match &**bias {
                Bias::Dense(_) => ProgramBias { start: start as u32, n_pairs: NOWHERE },
                Bias::Sparse(_) => ProgramBias { start: start as u32 / 2, n_pairs: facts.n as u32 },
            })
        };
        Some(Places {
            plan: (plan / ALIGNMENT) as u32,
            n_planes: of_plan.n,
            kind: of_plan.kind,
            masks: put_on.masks.iter().map(|it| mask(self, it)).collect::<Option<_>>()?,
            biases: put_on.biases.iter().map(|it| bias(self, it)).collect::<Option<_>>()?,
        })
    }

    /// Gives steerings a place and has them brought if they are not there, for a model of so many layers. What a step is given
    /// before all else has room: where what is left of other steps lies in the way, all of that goes.
    ///
    /// # Panics
    /// They are more than [`given_bytes`].
    pub(super) fn place_steerings<'a>(
        &mut self,
        steerings: impl Iterator<Item = &'a Steering> + Clone,
        n_layers: usize,
    ) {
        let place_all = |this: &mut Self| {
            steerings.clone().all(|steering| this.place_steering(steering, n_layers).is_some())
        };
        if place_all(self) {
            return;
        }
        self.forget();
        self.begin_step();
        assert!(place_all(self), "the engine gives a step no more than it brings");
    }

    fn place_steering(&mut self, steering: &Steering, n_layers: usize) -> Option<(usize, Facts)> {
        self.put(Thing::Steering(*steering.fingerprint()), |this| {
            steer::write(steering, n_layers, &mut this.brought.words);
            Some((Facts::NONE, Owner::None))
        })
    }

    /// Where a steering lies that the step was given, in words.
    pub(super) fn steering(&self, steering: &Steering) -> Option<u32> {
        self.places.get(&Thing::Steering(*steering.fingerprint())).map(|&start| start as u32)
    }

    /// Where a thing begins, which `write` appends to what is brought if it is not there.
    fn put(
        &mut self,
        thing: Thing,
        write: impl FnOnce(&mut Self) -> Option<(Facts, Owner)>,
    ) -> Option<(usize, Facts)> {
        if let Some(&start) = self.places.get(&thing) {
            let kept = self.kept.get_mut(&start).expect("what has a place is kept");
            kept.used_in = self.step;
            return Some((start, kept.facts));
        }
        let first = self.brought.words.len();
        let written = write(self);
        let n_words = (self.brought.words.len() - first).max(1);
        let n_brought = self.brought.n_words + EditList::n_brought_words(n_words);
        let is_room = n_brought <= self.n_brought_max;
        let start = written.as_ref().filter(|_| is_room).and_then(|_| self.make_room(n_words));
        let (Some((facts, owner)), Some(start)) = (written, start) else {
            self.brought.words.truncate(first);
            return None;
        };
        self.brought.n_words = n_brought;
        let end = start + n_words;
        self.brought.parts.push((start, first..self.brought.words.len()));
        self.next = end.next_multiple_of(ALIGNMENT);
        self.kept.insert(start, Kept { thing, end, facts, used_in: self.step, _owner: owner });
        self.places.insert(thing, start);
        Some((start, facts))
    }

    /// So many words that this step does not read; what was there goes.
    fn make_room(&mut self, n_words: usize) -> Option<usize> {
        let mut start = self.next;
        let mut has_begun_anew = false;
        loop {
            if start + n_words > self.words.end {
                if std::mem::replace(&mut has_begun_anew, true) {
                    return None;
                }
                start = self.words.start;
            }
            let end = start + n_words;
            let before = self.kept.range(..end).rev();
            // Places do not overlap: the last that begins before the end and is in use is in the way, or none is.
            let in_the_way = before.take_while(|(_, kept)| kept.end > start);
            let used =
                in_the_way.filter(|(_, kept)| kept.used_in == self.step).map(|(_, kept)| kept.end).next();
            match used {
                Some(used_until) => start = used_until.next_multiple_of(ALIGNMENT),
                None => {
                    let gone: SmallVec<[usize; 8]> = self
                        .kept
                        .range(..end)
                        .rev()
                        .take_while(|(_, kept)| kept.end > start)
                        .map(|(&start, _)| start)
                        .collect();
                    for start in gone {
                        let kept = self.kept.remove(&start).expect("it was found");
                        self.places.remove(&kept.thing);
                    }
                    return Some(start);
                }
            }
        }
    }
}

impl Brought {
    /// Each part, with where it goes.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, &[u32])> {
        self.parts.iter().map(|(to, words)| (*to, &self.words[words.clone()]))
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::sampling::program::{Definition, Program, RowShape};
    use trellis_programs::{Source, library};

    use super::*;

    const VOCAB_SIZE: usize = 1000;

    fn put_on(temperature: f32) -> PutOn {
        let definition =
            Definition::build(|b| library::temperature(b.logits(), temperature).draw(Source::SEED));
        let shape = RowShape { vocab_size: VOCAB_SIZE, n_positions: 64 };
        PutOn::new(Arc::new(Program::new(definition, shape).expect("it is in order")))
    }

    fn dense(value: f32) -> Arc<Bias> {
        Arc::new(Bias::Dense(vec![value; VOCAB_SIZE]))
    }

    fn given(n_words: usize) -> Given {
        Given::new(4..4 + n_words, VOCAB_SIZE)
    }

    #[test]
    fn what_is_there_is_not_brought_again() {
        let mut given = given(10_000);
        let mask = Arc::new(TokenMask::all(VOCAB_SIZE));
        let sparse = Arc::new(Bias::Sparse(vec![(3, 1.0), (8, -1.0)]));
        let first =
            PutOn { masks: vec![mask.clone(), mask], biases: vec![dense(1.0), sparse], ..put_on(0.5) };
        given.begin_step();
        let places = given.place(&first, Keeps::ToNothing).expect("there is room");
        assert_eq!(places.masks[0], places.masks[1]);
        assert_eq!((places.biases[0].n_pairs, places.biases[1].n_pairs), (NOWHERE, 2));
        assert_eq!(given.brought().parts().count(), 4);
        let (to, words) = given.brought().parts().last().expect("a part");
        assert_eq!(to, 2 * places.biases[1].start as usize);
        assert_eq!(words, [3, 1f32.to_bits(), 8, (-1f32).to_bits()]);
        given.begin_step();
        assert_eq!(given.place(&first, Keeps::ToNothing), Some(places));
        assert_eq!(given.brought().parts().count(), 0);
        // Another program, and what it shares with the first.
        let second = PutOn { biases: first.biases.clone(), ..put_on(0.6) };
        given.place(&second, Keeps::ToNothing).expect("there is room");
        assert_eq!(given.brought().parts().count(), 1);
        given.forget();
        given.begin_step();
        given.place(&second, Keeps::ToNothing).expect("there is room");
        assert_eq!(given.brought().parts().count(), 3);
    }

    /// Things come and go at random, and the device's memory is followed: what a step reads is there as it should be.
    #[test]
    fn a_place_is_not_given_away_while_a_step_reads_it() {
        let mut given = given(7 * VOCAB_SIZE);
        let mut memory = vec![0u32; 4 + 7 * VOCAB_SIZE];
        let base = put_on(1.0);
        let mut random = 12345u32;
        let mut biases: Vec<Arc<Bias>> = (0..10).map(|i| dense(i as f32)).collect();
        let (mut n_placed, mut n_full) = (0, 0);
        for step in 0..2000 {
            given.begin_step();
            let mut read = Vec::new();
            for _ in 0..1 + step % 6 {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let bias = &mut biases[(random >> 20) as usize % 10];
                if random >> 13 & 15 == 0 {
                    *bias = dense(step as f32);
                }
                match given.place(&PutOn { biases: vec![bias.clone()], ..base.clone() }, Keeps::ToNothing) {
                    Some(places) => read.push((bias.clone(), places)),
                    None => n_full += 1,
                }
            }
            for (to, words) in given.brought().parts() {
                memory[to..to + words.len()].copy_from_slice(words);
            }
            for (bias, places) in &read {
                let Bias::Dense(values) = &**bias else { unreachable!("all are dense") };
                let start = places.biases[0].start as usize;
                assert_eq!(memory[start..start + VOCAB_SIZE], to_words(values)[..], "step {step}");
            }
            n_placed += read.len();
        }
        assert!(n_placed > 5000, "{n_placed}");
        assert!(n_full < 700, "{n_full} of {n_placed}");
    }

    /// A step is full of small things; what it is steered by finds room all the same.
    #[test]
    fn what_tokens_are_steered_by_goes_before_what_lies_in_the_way() {
        const N_LAYERS: usize = 3;
        let steering = |n: usize, value: f32| {
            Steering::new(vec![(1, vec![value; n])], N_LAYERS, n).expect("it fits").expect("it is some")
        };
        let mut given = given(3 * VOCAB_SIZE);
        let small: Vec<Steering> = (0..20).map(|i| steering(50, 1.0 + i as f32)).collect();
        given.begin_step();
        given.place_steerings(small.iter(), N_LAYERS);
        let known: Vec<Option<u32>> = small.iter().map(|steering| given.steering(steering)).collect();
        assert!(known.iter().all(Option::is_some));
        // Beside every second of them there is no place for it.
        let large = steering(2 * VOCAB_SIZE, 0.5);
        given.begin_step();
        let all = || small.iter().step_by(2).chain([&large]);
        given.place_steerings(all(), N_LAYERS);
        let mut memory = vec![u32::MAX; 4 + 3 * VOCAB_SIZE];
        given.brought().parts().for_each(|(to, words)| memory[to..to + words.len()].copy_from_slice(words));
        for steering in all() {
            let start = given.steering(steering).expect("it has a place") as usize;
            let vector = steering.after(1).expect("it has a vector");
            assert_eq!(memory[start..start + 4], [0, 4, 0, 0]);
            assert_eq!(memory[start + 4..start + 4 + vector.len()], to_words(vector)[..]);
        }
        given.begin_step();
        given.place_steerings(all(), N_LAYERS);
        assert_eq!(given.brought().parts().count(), 0, "it is there");
    }

    #[test]
    fn no_more_is_brought_than_a_step_takes() {
        let mut given = Given::new(0..n_kept_words(VOCAB_SIZE), VOCAB_SIZE);
        given.begin_step();
        let base = put_on(1.0);
        let many: Vec<PutOn> =
            (0..300).map(|i| PutOn { biases: vec![dense(i as f32)], ..base.clone() }).collect();
        let n_placed = many.iter().filter(|put_on| given.place(put_on, Keeps::ToNothing).is_some()).count();
        assert!((N_ROWS_BROUGHT..300).contains(&n_placed), "{n_placed}");
        let n_words: usize = given.brought().parts().map(|(_, words)| words.len()).sum();
        assert!(n_words <= n_brought_words(VOCAB_SIZE));
        given.begin_step();
        assert!(given.place(&many[n_placed], Keeps::ToNothing).is_some(), "the next step has room");
    }
}
