//! Steps that fail, among random operations.

use super::*;
use crate::backend::{BackendError, Damage};
use crate::batch::Drawn;
use crate::history::History;
use crate::scheduler::plan::PlannedRow;

/// What steps that failed did to the work that was in them.
#[derive(Debug, Default)]
struct Seen {
    n_steps: usize,
    n_answers: usize,
    n_streams: usize,
    n_moves_lost: usize,
}

impl World {
    /// Plans a step and lets it fail, in its moves or after them.
    fn fail_step(&mut self, seen: &mut Seen) {
        if !self.scheduler.has_work()
            || !self.lets_draw()
            || self.under_way.len() == self.scheduler.limits.n_steps_under_way
        {
            return;
        }
        let plan = self.scheduler.plan();
        if plan.is_empty() {
            // Planning may have found a budget at its end.
            return self.take_answers();
        }
        let n_moved = match self.random.below(2) {
            0 => self.random.below(plan.moves.len() + 1),
            _ => plan.moves.len(),
        };
        let batch = self.scheduler.batch(&plan, Vec::new());
        self.backend.fail(&plan.moves, n_moved, &batch);
        drop(batch);
        let device = "a device that fails".to_owned();
        let error = BackendError::Device {
            device,
            call: "forward",
            reason: "a test".to_owned(),
            damage: Damage::Call,
        };
        let jobs = self.jobs_in(&plan);
        self.scheduler.fail_step(&plan, n_moved, &EngineError::Step(error));
        self.check();
        self.guests.deliver(&self.scheduler, self.port);
        seen.n_steps += 1;
        seen.n_moves_lost += plan.moves.len() - n_moved;
        self.take_failed_jobs(&jobs);
        for row in &plan.rows {
            let Some((_, model)) = self.contexts.iter_mut().find(|(id, _)| *id == row.id) else { continue };
            if let Some(question) = model.question.take() {
                let answer = question.place.try_take().expect("whoever asked is told");
                assert!(
                    matches!(&answer, Done::Answer(Err(error @ EngineError::Step(_))) if error.is_retryable()),
                    "{answer:?}"
                );
                seen.n_answers += 1;
            }
            if let Some(stream) = model.stream.take_if(|stream| !stream.has_ended).as_mut() {
                // What was drawn before is still good; the error comes behind it.
                let error = loop {
                    match stream.queue.try_pull().expect("the stream is told") {
                        RunEvent::Token(Drawn { candidate, .. }) => {
                            assert_eq!(candidate, stream.expected(model.past.chain(&model.tokens).last));
                            model.tokens.push(candidate.token);
                            model.n_synced += 1;
                        }
                        RunEvent::Failed(error) => break error,
                        RunEvent::Finished(finish) => panic!("{finish:?}"),
                    }
                };
                assert!(matches!(error, EngineError::Step(_)), "{error}");
                seen.n_streams += 1;
            }
        }
        self.take_answers();
    }
}

impl World {
    /// Lets the step that waits for masks fail when it is let draw, if there is one.
    fn fail_to_supply(&mut self, n_failed: &mut usize) {
        if self.under_way.back().is_none_or(|(plan, _)| !plan.waits_for_masks()) {
            return;
        }
        let (plan, _) = self.under_way.pop_back().expect("it was there");
        self.backend.forget_late();
        let is_live = |row: &PlannedRow| {
            self.scheduler.contexts.get(&row.id).is_some_and(|context| context.epoch == row.epoch)
        };
        let live: Vec<ContextId> = plan.rows.iter().filter(|row| is_live(row)).map(|row| row.id).collect();
        let jobs = self.jobs_in(&plan);
        let (device, reason) = ("a device that fails".to_owned(), "a test".to_owned());
        let error = BackendError::Device { device, call: "supply", reason, damage: Damage::Call };
        self.scheduler.fail_step(&plan, plan.moves.len(), &EngineError::Step(error));
        self.check();
        self.guests.deliver(&self.scheduler, self.port);
        self.take_failed_jobs(&jobs);
        *n_failed += 1;
        for (_, model) in self.contexts.iter_mut().filter(|(id, _)| live.contains(id)) {
            if let Some(question) = model.question.take() {
                let answer = question.place.try_take();
                assert!(matches!(answer, Some(Done::Answer(Err(EngineError::Step(_))))), "{answer:?}");
            }
        }
        self.take_answers();
    }
}

#[test]
fn what_follows_a_step_that_failed_is_as_if_it_had_never_been() {
    let (mut seen, mut n_jobs, mut n_not_supplied) = (Seen::default(), joint::Seen::default(), 0);
    for seed in (1_000..1_200).chain(11_950..11_970) {
        let mut world = World::new(seed);
        for _ in 0..600 {
            world.act();
            match world.random.below(12) {
                0 => world.fail_step(&mut seen),
                1 => world.fail_to_supply(&mut n_not_supplied),
                2..5 => world.step(),
                _ => {}
            }
        }
        n_jobs.add(&world.finish().n_jobs);
    }
    // The test is worth nothing if the schedules never reach these paths.
    assert!(seen.n_steps > 2_000 && seen.n_answers > 500 && seen.n_streams > 500, "{seen:?}");
    assert!(seen.n_moves_lost > 50, "{seen:?}");
    assert!(n_jobs.n_failed > 20 && n_not_supplied > 50, "{n_jobs:?} {n_not_supplied}");
}

#[test]
fn accounts_get_everything_back_from_a_scheduler_that_goes() {
    for seed in 2_000..2_020 {
        let mut world = World::new(seed);
        for _ in 0..300 {
            world.act();
            if world.random.below(3) == 0 {
                world.step();
            }
        }
        let used =
            |world: &World, resource| -> u64 { world.users.iter().map(|user| user.used(resource)).sum() };
        assert_eq!(used(&world, Resource::Contexts), world.saved.len() as u64);
        let users = std::mem::take(&mut world.users);
        world.scheduler.dissolve();
        for user in users {
            assert_eq!((user.used(Resource::Pages), user.used(Resource::Contexts)), (0, 0));
        }
    }
}

#[test]
fn what_shares_a_page_that_a_step_is_to_copy_does_without_when_the_step_fails() {
    let limits = Limits { n_steps_under_way: 2, vocab_size: VOCAB as usize, ..Limits::of_nothing(4, 32) };
    let mut scheduler = Scheduler::new(limits, 0, SchedulerSettings::alone(64), Outbox::default());
    let (mut backend, mut guests) = (HashBackend::new(32, 0), Guests::default());
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
    let caller = guests.enter(&mut scheduler, owner);
    let [parent, sibling, fork, opened] = [1, 2, 3, 4].map(context_id);
    let tokens: Vec<Token> = (0..20).collect();
    let ask = |id, place: &Ticket, n_kept, appended: &[Token]| {
        let edit = Edit { n_kept, appended: appended.to_vec(), n_pulled: 0 };
        Operation::Ask { id, edit, ask: Ask::Top { n: 1 }, tag: place.tag() }
    };
    let unchanged = || Edit { n_kept: tokens.len(), ..Edit::default() };
    let place = guests.ticket(caller);
    scheduler.apply(Operation::Create { id: parent, caller });
    scheduler.apply(ask(parent, &place, 0, &tokens));
    let plan = scheduler.plan();
    let outputs = backend.run(&plan.moves, &scheduler.batch(&plan, Vec::new()));
    scheduler.complete(plan, outputs, 1);

    // The last page is shared, and is copied for what is appended.
    scheduler.apply(Operation::Fork { id: parent, edit: unchanged(), child: sibling });
    scheduler.apply(ask(parent, &place, tokens.len(), &[20]));
    let plan = scheduler.plan();
    assert_eq!((plan.copies.len(), plan.n_rows()), (1, 1));
    backend.fail(&plan.moves, plan.moves.len(), &scheduler.batch(&plan, Vec::new()));

    // Meanwhile others come to hold the copy.
    scheduler.apply(Operation::Fork { id: parent, edit: unchanged(), child: fork });
    let (name, saved) = ("a name".to_owned(), Arc::new(History::from(tokens.clone())));
    let save = |place: &Ticket| Operation::Save {
        id: parent,
        edit: unchanged(),
        name: name.clone(),
        tokens: saved,
        tag: place.tag(),
    };
    let done = guests.ask_at_once(&mut scheduler, caller, save);
    assert!(matches!(done, Done::Kept(Ok(()))), "{done:?}");
    let error = BackendError::OutOfMemory { device: String::new(), needed_bytes: 2, free_bytes: 1 };
    scheduler.fail_step(&plan, plan.moves.len(), &EngineError::Step(error));
    scheduler.check();

    let open = |place: &Ticket| Operation::Open { id: opened, caller, name: name.clone(), tag: place.tag() };
    let done = guests.ask_at_once(&mut scheduler, caller, open);
    assert!(matches!(done, Done::Opened(Ok(_))), "{done:?}");
    for id in [fork, opened, sibling, parent] {
        let place = guests.ticket(caller);
        scheduler.apply(ask(id, &place, tokens.len(), &[]));
        while scheduler.has_work() {
            let plan = scheduler.plan();
            // The backend looks at the KV of all tokens.
            let outputs = backend.run(&plan.moves, &scheduler.batch(&plan, Vec::new()));
            scheduler.complete(plan, outputs, 1);
        }
        guests.deliver(&scheduler, Port::Direct);
        let done = place.try_take();
        let Some(Done::Answer(Ok(Answer::Top { candidates, .. }))) = done else { panic!("{done:?}") };
        assert_eq!(candidates, ranked(hash_backend::hash(&tokens), 1));
    }
    scheduler.check();
}
