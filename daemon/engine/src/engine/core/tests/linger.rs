//! Guests that ask again some time after they were answered, beside streams, in a time that the test keeps.

use std::collections::VecDeque;

use super::*;
use crate::command::Ask;

const N_STEPS: usize = 400;

/// Guests, and a device with streams beside them.
struct World {
    core: Core,
    told: Arc<Told>,
    now: Instant,
    n_guests: u64,
    /// How long a guest takes to ask again, by the number of its token.
    return_time: fn(usize) -> Duration,
    /// When guests ask.
    questions: Vec<(Instant, u64)>,
    /// When the device is done with the steps under way.
    ends: VecDeque<Instant>,
    last_end: Option<Instant>,
    n_tokens: usize,
    idle: Duration,
}

/// What that came to.
#[derive(Debug)]
struct Seen {
    steps_a_token: f64,
    /// The share of the time in which the device stood still.
    idle: f64,
}

impl World {
    fn run(
        (n_guests, n_streams): (u64, u64),
        n_steps_under_way: usize,
        return_time: fn(usize) -> Duration,
    ) -> Seen {
        let (told, now) = (Arc::<Told>::default(), Instant::now());
        let n_rows = usize::try_from(n_guests + n_streams).expect("few");
        let mut inputs = vec![EngineInput::Add(newcomer(limits(2 * n_rows, n_steps_under_way), &told))];
        let account = Account::new("guest", Budget::UNLIMITED, None);
        for number in 0..n_guests + n_streams {
            let (caller, guest) = (CallerId(number), GuestId(number));
            let owner = Owner { actor: ActorId(1), session: SessionId(1), guest, account: account.clone() };
            let id = ContextId { model: MODEL, number };
            inputs.push(EngineInput::Enter(caller, owner));
            inputs.push(EngineInput::Operation(Operation::Create { id, caller }));
            if number >= n_guests {
                let edit = Edit { appended: vec![1], ..Edit::default() };
                let settings = run_settings(MaskSource::Sampler);
                inputs.push(EngineInput::Operation(Operation::Run { id, edit, settings, tag: tag(id) }));
            }
        }
        let mut world = Self {
            core: Core::default(),
            told,
            now,
            n_guests,
            return_time,
            questions: (0..n_guests).map(|number| (now, number)).collect(),
            ends: VecDeque::new(),
            last_end: None,
            n_tokens: 0,
            idle: Duration::ZERO,
        };
        let mut n_steps = 0;
        while n_steps < N_STEPS {
            let next = world.turn(std::mem::take(&mut inputs));
            let asks_next = world.questions.iter().map(|&(at, _)| at.max(world.now)).min();
            match next {
                Next::Turn => {}
                Next::Device => {
                    // Nothing that comes in meanwhile is seen.
                    let end = world.ends.pop_front().expect("a step is under way");
                    world.now = world.now.max(end);
                    world.core.wait();
                    n_steps += 1;
                }
                Next::InputBefore(until) => world.now = asks_next.map_or(until, |at| at.min(until)),
                Next::Input => world.now = asks_next.expect("somebody will ask"),
                Next::InputOrLayers | Next::Stop => panic!("{next:?}"),
            }
        }
        let steps = (N_STEPS as u64 * n_guests) as f64;
        let all = STEP.mul_f64(N_STEPS as f64) + world.idle;
        Seen {
            steps_a_token: steps / world.n_tokens as f64,
            idle: world.idle.as_secs_f64() / all.as_secs_f64(),
        }
    }

    fn turn(&mut self, mut inputs: Vec<EngineInput>) -> Next {
        let now = self.now;
        for (_, number) in self.questions.extract_if(.., |(at, _)| *at <= now) {
            let id = ContextId { model: MODEL, number };
            let ask = Ask::Sample(Arc::new(Sampler::greedy()));
            let edit = Edit { appended: vec![1], ..Edit::default() };
            inputs.push(EngineInput::Operation(Operation::Ask { id, edit, ask, tag: tag(id) }));
        }
        let mut completions = Vec::new();
        let next = self.core.turn(now, inputs.into_iter(), &mut completions).expect("the engine lives");
        for Completion { caller: CallerId(number), done, .. } in completions {
            let Done::Answer(answer) = done else { continue };
            answer.expect("nothing fails");
            assert!(number < self.n_guests, "streams ask nothing");
            self.questions.push((now + (self.return_time)(self.n_tokens), number));
            self.n_tokens += 1;
        }
        for call in std::mem::take(&mut *self.told.calls.lock().expect("nobody panicked")) {
            if matches!(call, Call::Submit { .. }) {
                let free = self.last_end.unwrap_or(now);
                self.idle += now.saturating_duration_since(free);
                self.last_end = Some(free.max(now) + STEP);
                self.ends.extend(self.last_end);
            }
        }
        next
    }
}

fn micros(n: u64) -> Duration {
    Duration::from_micros(n)
}

#[test]
fn who_asks_again_at_once_is_in_every_step() {
    for n_steps_under_way in [1, 2] {
        let seen = World::run((1, 15), n_steps_under_way, |_| micros(40));
        assert!(seen.steps_a_token < 1.03 && seen.idle < 0.021, "{n_steps_under_way} under way: {seen:?}");
    }
}

#[test]
fn who_asks_again_soon_is_in_every_second_step_and_the_device_works_on() {
    let seen = World::run((1, 15), 2, |_| micros(900));
    assert!(seen.steps_a_token < 2.1 && seen.idle < 0.002, "{seen:?}");
}

#[test]
fn who_takes_long_is_not_waited_for() {
    let seen = World::run((1, 15), 2, |_| micros(1900));
    assert!(seen.steps_a_token < 3.1 && seen.idle < 0.01, "{seen:?}");
    let seen = World::run((1, 15), 1, |_| micros(1900));
    assert!(seen.steps_a_token < 2.1 && seen.idle < 0.012, "{seen:?}");
}

#[test]
fn who_is_late_now_and_then_keeps_its_place() {
    let seen = World::run((1, 15), 2, |n| micros(if n % 10 == 9 { 600 } else { 40 }));
    // One token in ten takes two steps.
    assert!(seen.steps_a_token < 1.2 && seen.idle < 0.03, "{seen:?}");
}

#[test]
fn guests_alone_ride_together() {
    // Longer than a step may be held for the sake of one row among many.
    let seen = World::run((8, 0), 2, |n| micros(100 + 10 * (n % 8) as u64));
    assert!(seen.steps_a_token < 1.05 && seen.idle < 0.1, "{seen:?}");
}
