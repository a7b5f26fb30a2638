//! A draw of one model with a row that a step of another keeps.

use std::sync::LazyLock;

use super::*;
use crate::command::{Answer, Ask};
use crate::kept::RowName;
use crate::sampling::program::{Definition, Program, PutOn, RowShape};

const OTHER: ModelId = ModelId { place: 1, generation: 0 };
const DRAWS: ContextId = ContextId { model: MODEL, number: 1 };
const KEEPS: ContextId = ContextId { model: OTHER, number: 2 };
const NAME: RowName = RowName { caller: CALLER, tag: Tag::new(2, 0) };

/// No time passes.
static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);

fn sampler() -> Arc<Sampler> {
    let definition = Definition::build(|b| (b.logits() + b.member(0)).argmax());
    let shape = RowShape { vocab_size: VOCAB, n_positions: 1000 };
    let put_on = PutOn::new(Arc::new(Program::new(definition, shape).expect("it is in order")));
    Arc::new(Sampler { program: Some(Box::new(put_on)), ..Sampler::greedy() })
}

fn ask(id: ContextId, ask: Ask) -> EngineInput {
    let edit = Edit { appended: vec![1, 2, 3], ..Edit::default() };
    EngineInput::Operation(Operation::Ask { id, edit, ask, tag: tag(id) })
}

/// Two models, each with a context.
fn house() -> (Core, Arc<Told>, Vec<EngineInput>) {
    let told = Arc::<Told>::default();
    let first = newcomer(limits(8, 2), &told);
    let settings = SchedulerSettings { place: 1, ..SchedulerSettings::alone(64) };
    let second = Newcomer { id: OTHER, settings, ..newcomer(limits(8, 2), &told) };
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
    let mut inputs =
        vec![EngineInput::Add(first), EngineInput::Add(second), EngineInput::Enter(CALLER, owner)];
    for id in [DRAWS, KEEPS] {
        inputs.push(EngineInput::Operation(Operation::Create { id, caller: CALLER }));
    }
    (Core::default(), told, inputs)
}

/// Turns until the device would be waited for, or something to come in; what came back.
fn run(core: &mut Core, inputs: Vec<EngineInput>) -> (Next, Vec<(Tag, Answer)>) {
    let (mut inputs, mut answers) = (inputs, Vec::new());
    loop {
        let mut completions = Vec::new();
        let next = core.turn(*NOW, std::mem::take(&mut inputs).into_iter(), &mut completions);
        answers.extend(completions.into_iter().map(|it| match it.done {
            Done::Answer(Ok(answer)) => (it.tag, answer),
            other => panic!("{other:?}"),
        }));
        match next.expect("the engine lives") {
            Next::Turn => {}
            next => return (next, answers),
        }
    }
}

#[test]
fn a_draw_rides_behind_the_step_that_keeps_its_row_and_does_not_wait_for_its_end() {
    let (mut core, told, mut inputs) = house();
    inputs.push(ask(KEEPS, Ask::Keep));
    inputs.push(ask(DRAWS, Ask::Mix { sampler: sampler(), rows: vec![NAME] }));
    assert_eq!(run(&mut core, inputs), (Next::Device, Vec::new()));
    let submit = Call::Submit { n_rows: 1, n_late: 0 };
    assert_eq!(*told.calls.lock().expect("nobody panicked"), [submit, submit]);
    core.wait();
    assert_eq!(run(&mut core, Vec::new()), (Next::Device, vec![(tag(KEEPS), Answer::Kept)]));
    core.wait();
    let (next, answers) = run(&mut core, Vec::new());
    assert!(matches!(answers[..], [(of, Answer::Sampled(_))] if of == tag(DRAWS)), "{answers:?}");
    assert_eq!(next, Next::Input);
}

#[test]
fn a_draw_whose_row_is_not_there_is_told_and_one_that_is_given_up_is_not_made() {
    let (mut core, told, mut inputs) = house();
    inputs.push(ask(DRAWS, Ask::Mix { sampler: sampler(), rows: vec![NAME] }));
    assert_eq!(run(&mut core, inputs), (Next::Input, vec![(tag(DRAWS), Answer::NotKept)]));
    let cancel = |id| EngineInput::Operation(Operation::Cancel { id, tag: tag(id) });
    let inputs = vec![
        ask(KEEPS, Ask::Keep),
        ask(DRAWS, Ask::Mix { sampler: sampler(), rows: vec![NAME] }),
        cancel(DRAWS),
        cancel(KEEPS),
        EngineInput::Operation(Operation::LetGo { row: NAME }),
    ];
    assert_eq!(run(&mut core, inputs), (Next::Input, Vec::new()));
    assert!(told.calls.lock().expect("nobody panicked").is_empty(), "nothing was computed");
}

/// A guest with a context of each model: one draws, the other keeps rows.
type Pair = (CallerId, [ContextId; 2]);

/// Three of them, which come in.
fn pairs(inputs: &mut Vec<EngineInput>) -> Vec<Pair> {
    let of = |model, number| ContextId { model, number };
    let pair = |idx: u64| (CallerId(10 + idx), [of(MODEL, 10 + idx), of(OTHER, 20 + idx)]);
    let pairs: Vec<Pair> = (0..3).map(pair).collect();
    for &(caller, ids) in &pairs {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        // Each is of another user.
        let owner = Owner {
            actor: ActorId(caller.0 as u32),
            session: SessionId(caller.0),
            guest: GuestId(caller.0),
            account,
        };
        inputs.push(EngineInput::Enter(caller, owner));
        inputs.extend(ids.map(|id| EngineInput::Operation(Operation::Create { id, caller })));
    }
    pairs
}

/// What a guest asks for a token behind so many.
fn draw(sampler: &Arc<Sampler>, n_kept: usize, (caller, [draws, keeps]): Pair) -> [EngineInput; 3] {
    let edit = Edit { n_kept, appended: vec![1], ..Edit::default() };
    let row = RowName { caller, tag: tag(keeps) };
    let mix = Ask::Mix { sampler: sampler.clone(), rows: vec![row] };
    let ask = |id, ask| EngineInput::Operation(Operation::Ask { id, edit: edit.clone(), ask, tag: tag(id) });
    [EngineInput::Operation(Operation::LetGo { row }), ask(keeps, Ask::Keep), ask(draws, mix)]
}

/// Guests that began apart come together: rows of one are not written while the draw of another is under way that will be
/// back.
#[test]
fn guests_that_began_apart_come_together() {
    let (mut core, told, mut inputs) = house();
    let guests = pairs(&mut inputs);
    let sampler = sampler();
    let mut n_drawn = [0; 3];
    let mut asks: Vec<usize> = vec![0];
    let mut n_rows = Vec::new();
    for round in 0..40 {
        if round == 1 || round == 2 {
            asks.push(round);
        }
        for idx in asks.drain(..) {
            inputs.extend(draw(&sampler, n_drawn[idx], guests[idx]));
            n_drawn[idx] += 1;
        }
        let (next, mut answers) = run(&mut core, std::mem::take(&mut inputs));
        if next == Next::Device {
            core.wait();
            answers.extend(run(&mut core, Vec::new()).1);
        }
        let drew = |ids: &[ContextId; 2]| answers.iter().any(|(of, _)| *of == tag(ids[0]));
        asks.extend((0..3).filter(|&idx| drew(&guests[idx].1)));
        for call in told.calls.lock().expect("nobody panicked").drain(..) {
            if let Call::Submit { n_rows: n, .. } = call {
                n_rows.push(n);
            }
        }
    }
    let last = &n_rows[n_rows.len() - 8..];
    assert!(last.iter().all(|&n| n == 3), "{n_rows:?}");
}

/// Guests that draw again as soon as they have their token ride together, in the steps of both models.
#[test]
fn guests_that_draw_again_at_once_are_waited_for_by_both_models() {
    let (mut core, told, mut inputs) = house();
    let guests = pairs(&mut inputs);
    let sampler = sampler();
    for round in 0..8 {
        told.calls.lock().expect("nobody panicked").clear();
        for (idx, &guest) in guests.iter().enumerate() {
            inputs.extend(draw(&sampler, round, guest));
            let is_last = idx + 1 == guests.len();
            if is_last || round >= 4 {
                let (next, answers) = run(&mut core, std::mem::take(&mut inputs));
                assert_eq!((next == Next::Device, answers.len()), (is_last, 0), "round {round}: {next:?}");
            }
        }
        let submit = Call::Submit { n_rows: 3, n_late: 0 };
        assert_eq!(*told.calls.lock().expect("nobody panicked"), [submit, submit], "round {round}");
        for _ in 0..2 {
            core.wait();
            let (_, answers) = run(&mut core, Vec::new());
            assert_eq!(answers.len(), 3);
        }
    }
}
