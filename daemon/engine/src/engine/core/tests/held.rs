//! Answers that wait for a step that is kept for a user, in a time that the test keeps.

use super::*;
use crate::command::{Answer, Ask};

/// Guests of the second user; the first has one.
const N_GUESTS: u64 = 6;
const N_STEPS: usize = 400;

/// How long steps seem to take that have one row, and those that have more: a lone row loses by each of them.
const ALONE: Duration = Duration::from_millis(2);
const TOGETHER: Duration = Duration::from_millis(12);

/// What a turn said, and to whom: the guests by their numbers, each with its token.
struct Turn {
    next: Next,
    told: Vec<(u64, Token)>,
}

fn turn(core: &mut Core, now: Instant, inputs: Vec<EngineInput>) -> Turn {
    let mut completions = Vec::new();
    let next = core.turn(now, inputs.into_iter(), &mut completions).expect("the engine lives");
    let token = |Completion { caller, done, .. }| match done {
        Done::Answer(Ok(Answer::Sampled(drawn))) => (caller.0, drawn.candidate.token),
        Done::Run { event: RunEvent::Token(drawn), .. } => (caller.0, drawn.candidate.token),
        other => panic!("{other:?}"),
    };
    Turn { next, told: completions.into_iter().map(token).collect() }
}

fn id(guest: u64) -> ContextId {
    ContextId { model: MODEL, number: guest }
}

/// A guest; the first user's has a stream that runs by itself.
fn enter(guest: u64) -> Vec<EngineInput> {
    let (caller, id) = (CallerId(guest), id(guest));
    let actor = ActorId(if guest == 0 { 1 } else { 2 });
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let owner = Owner { actor, session: SessionId(actor.0.into()), guest: GuestId(guest), account };
    let create = EngineInput::Operation(Operation::Create { id, caller });
    let begin = match guest {
        0 => {
            let settings = run_settings(MaskSource::Sampler);
            let edit = Edit { appended: vec![1], ..Edit::default() };
            EngineInput::Operation(Operation::Run { id, edit, settings, tag: tag(id) })
        }
        _ => ask(guest, 0),
    };
    vec![EngineInput::Enter(caller, owner), create, begin]
}

/// A guest that has so many tokens asks for its next one.
fn ask(guest: u64, n_kept: usize) -> EngineInput {
    let ask = Ask::Sample(Arc::new(Sampler::greedy()));
    let edit = Edit { n_kept, appended: vec![1], ..Edit::default() };
    EngineInput::Operation(Operation::Ask { id: id(guest), edit, ask, tag: tag(id(guest)) })
}

#[test]
fn beside_a_step_that_is_kept_for_a_user_one_guest_of_another_is_answered_and_the_rest_after_it() {
    let (told, mut core, mut now) = (Arc::<Told>::default(), Core::default(), Instant::now());
    let mut inputs = vec![EngineInput::Add(newcomer(limits(8, 1), &told))];
    inputs.extend(enter(0));
    let mut tokens = [0; 1 + N_GUESTS as usize];
    // Rows of the step under way, and tokens of the second user's that were held back.
    let (mut n_steps, mut n_rows, mut n_held, mut n_times_held) = (0, 0, 0, 0);
    while n_steps < N_STEPS {
        let Turn { next, told: to } = turn(&mut core, now, std::mem::take(&mut inputs));
        for &(guest, token) in &to {
            // Each has its own in their order, and none is lost.
            let last = &mut tokens[guest as usize];
            assert!(*last == 0 || token == *last + 1, "{guest}: {token} after {last}");
            *last = token;
            if guest > 0 {
                inputs.push(ask(guest, token as usize));
            }
        }
        let n_told = to.iter().filter(|&&(guest, _)| guest > 0).count();
        if n_rows == 0 {
            // Nothing was computed. Who was answered may have asked at once, and the step be kept for its user.
            assert!(n_told == 0 || n_told == n_held, "{n_told} of {n_held}");
            n_held -= n_told;
        } else {
            let n_computed =
                std::mem::take(&mut n_rows) - to.iter().filter(|&&(guest, _)| guest == 0).count();
            assert!(n_told >= n_held, "they wait for one step");
            n_held = n_held + n_computed - n_told;
            assert!(n_held == 0 || n_held == n_computed - 1, "{n_held} of {n_computed}: one is answered");
            n_times_held += usize::from(n_held > 0);
        }
        if next == Next::Device {
            let submitted =
                told.calls.lock().expect("nobody panicked").drain(..).rfind(|&call| call != Call::Collect);
            let Some(Call::Submit { n_rows: n_submitted, .. }) = submitted else { panic!("{submitted:?}") };
            n_rows = n_submitted;
            assert!(n_held == 0 || n_rows == 1, "what was held back waits for a step of another");
            now += if n_rows == 1 { ALONE } else { TOGETHER };
            core.wait();
            n_steps += 1;
            if n_steps == 40 {
                inputs = (1..=N_GUESTS).flat_map(enter).collect();
            }
        } else if let Next::InputBefore(until) = next {
            now = until;
        }
    }
    assert!(n_times_held > 20, "held back {n_times_held} times");
}
