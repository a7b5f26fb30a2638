//! What an engine is brought of a process, and what waits.

use std::cell::Cell;

use super::*;
use crate::account::{Account, ActorId, Budget, SessionId, USER};
use crate::backend::{AskLimits, Limits, SteeringTimes, WeightsInfo};
use crate::command::ContextId;
use crate::handle::{Link, Served};
use crate::model::Dtype;
use crate::port::Port;

const FIRST: u64 = 1 << 40;
const CALLER: CallerId = CallerId(FIRST);
/// More than the room of any operation.
const HUGE: usize = 1 << 30;

#[derive(Debug)]
struct Nowhere;

impl Outward for Nowhere {
    fn put(&self, _: Answered) -> Waker {
        Waker::noop().clone()
    }
}

/// A process with one guest, which is over once it was asked so often.
struct Process {
    owner: Owner,
    n_looks: Cell<usize>,
    /// Of its model.
    generation: u32,
}

impl Registry for Process {
    fn owner_of(&self, guest: GuestId) -> Option<Owner> {
        (guest == self.owner.guest).then(|| self.owner.clone())
    }

    fn models(&self) -> Vec<ModelFacts> {
        let limits = Limits {
            n_pages: 1,
            n_granule_pages: 1,
            n_host_pages: 0,
            page_bytes: 1,
            n_rows_max: 1,
            n_tokens_max: 1,
            n_tile_tokens: 1,
            n_block_tokens: 1,
            n_queries_per_key: 1,
            n_positions_max: 100,
            vocab_size: 100,
            hidden_size: 1,
            n_layers: 6,
            n_steps_under_way: 1,
            n_slots: 0,
            n_states: 0,
            n_stretches_max: 0,
            logits_tokens: 1.0,
            steering: SteeringTimes::NONE,
            asks: AskLimits::NONE,
        };
        let weights = WeightsInfo { dtype: Dtype::F32, n_bytes: 0 };
        let (id, device) = (ModelId { place: 0, generation: self.generation }, "none".to_owned());
        vec![ModelFacts { id, limits, weights, device, operator: None }]
    }

    fn is_over(&self) -> bool {
        self.n_looks.set(self.n_looks.get() + 1);
        self.n_looks.get() > 3
    }
}

fn near() -> (NearEngine, Process, Served) {
    let (link, served) = Link::new(Port::Direct);
    let engine = EngineWatch::new(link);
    let near = NearEngine::new(&engine, Numbers::of(0), 1 << 20, u64::MAX, Arc::new(Nowhere));
    let user = Account::new(USER, Budget::UNLIMITED, None);
    let account = Account::new("guest", Budget::UNLIMITED, Some(user));
    let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
    (near, Process { owner, n_looks: Cell::new(0), generation: 0 }, served)
}

fn enter(near: &mut NearEngine, process: &Process) {
    let asked = Asked(Question::Enter { caller: CALLER, guest: process.owner.guest });
    near.take(asked, 10, process).expect("it may");
}

/// Makes one context more, in a frame of so many bytes.
fn create(near: &mut NearEngine, process: &Process, n: u64, n_bytes: usize) {
    let id = ContextId { model: ModelId::default(), number: FIRST + n };
    let operation = Operation::Create { id, caller: CALLER };
    let asked = Asked(Question::Operation { caller: CALLER, operation });
    near.take(asked, n_bytes, process).expect("it may");
}

fn n_posted(served: &mut Served) -> usize {
    std::iter::from_fn(|| served.messages.try_recv().ok()).count()
}

#[test]
fn whatever_makes_a_frame_long_takes_room_of_its_user() {
    let (mut near, process, mut served) = near();
    enter(&mut near, &process);
    (0..4).for_each(|n| create(&mut near, &process, n, HUGE));
    assert_eq!(process.n_looks.get(), 4, "the fourth waits until the process is over");
    assert_eq!(n_posted(&mut served), 1 + 3, "each takes a quarter, and the guest's coming takes a little");
    // The engine has read them.
    create(&mut near, &process, 4, HUGE);
    assert_eq!(n_posted(&mut served), 1);
}

#[test]
fn short_ones_take_the_room_of_their_guest_alone() {
    let (mut near, process, mut served) = near();
    enter(&mut near, &process);
    (0..2000).for_each(|n| create(&mut near, &process, n, 100));
    assert_eq!(n_posted(&mut served), crate::account::N_OPERATIONS_MAX);
}

#[test]
fn who_comes_when_its_process_is_over_has_never_been_there() {
    let (mut near, process, mut served) = near();
    enter(&mut near, &process);
    (0..4).for_each(|n| create(&mut near, &process, n, HUGE));
    // What is left of the user's room are fewer than a thousand short ones.
    (4..2000).for_each(|n| create(&mut near, &process, n, 10));
    let late = CallerId(FIRST + 1);
    near.take(Asked(Question::Enter { caller: late, guest: process.owner.guest }), 10, &process)
        .expect("it may");
    assert!(!near.customs.has(late));
    n_posted(&mut served);
    drop(near);
    let mut leaving = 0;
    while let Ok(posted) = served.messages.try_recv() {
        assert_ne!(posted.from, late);
        leaving += usize::from(matches!(posted.message, Message::Leave { .. }));
    }
    assert_eq!(leaving, 1);
}

#[test]
fn a_model_that_was_loaded_again_and_again_leaves_nothing_and_its_guests_may_still_speak_of_it() {
    let (mut near, mut process, mut served) = near();
    enter(&mut near, &process);
    let context = |generation| ContextId {
        model: ModelId { place: 0, generation },
        number: FIRST + u64::from(generation),
    };
    let say = |near: &mut NearEngine, process: &Process, operation| {
        near.take(Asked(Question::Operation { caller: CALLER, operation }), 100, process).expect("it may");
    };
    for generation in 0..100 {
        process.generation = generation;
        say(&mut near, &process, Operation::Create { id: context(generation), caller: CALLER });
    }
    assert_eq!((near.models.len(), near.customs.n_contexts()), (1, 100));
    for generation in 0..100 {
        say(&mut near, &process, Operation::Release { id: context(generation), n_pulled: 0 });
    }
    // One that it had asked for before it heard of the end of the model.
    let late = ContextId { number: FIRST + 1000, ..context(7) };
    say(&mut near, &process, Operation::Create { id: late, caller: CALLER });
    say(&mut near, &process, Operation::Release { id: late, n_pulled: 0 });
    assert_eq!((near.models.len(), near.customs.n_contexts()), (1, 0));
    assert_eq!(n_posted(&mut served), 1 + 202, "the engine answers all");
    let unknown = ContextId { model: ModelId { place: 0, generation: 100 }, number: FIRST };
    let operation = Operation::Create { id: unknown, caller: CALLER };
    near.take(Asked(Question::Operation { caller: CALLER, operation }), 100, &process)
        .expect_err("it was not told of that one");
}
