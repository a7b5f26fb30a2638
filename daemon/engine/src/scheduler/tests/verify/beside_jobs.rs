//! Verifications beside jobs that fill each step.

use super::super::*;
use crate::Guess;
use crate::batch::Candidate;

/// Steps until a verification of 15 guesses is answered that is asked beside so many jobs of so many contexts, each of which is
/// asked again at once.
fn n_steps_until_verified(n_filled: usize, n_jobs: u64, n_members: u64) -> Option<usize> {
    const N_ROWS: usize = 1024;
    const N_STEPS_BEFORE: usize = 10;
    let limits =
        Limits { n_tokens_max: 2 * N_ROWS, n_steps_under_way: 1, ..Limits::of_nothing(N_ROWS, 4000) };
    let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(n_filled));
    let mut guests = Guests::default();
    let callers: Vec<_> = (0..=n_jobs)
        .map(|n| {
            let account = Account::new("guest", Budget::UNLIMITED, None);
            let (actor, session, guest) = (ActorId(n as u32), SessionId(n), GuestId(n));
            guests.enter(&mut scheduler, Owner { actor, session, guest, account })
        })
        .collect();
    let sampler = Arc::new(Sampler::greedy());
    let member = |job: u64, n: u64| context_id(1000 * job + n);
    let draw = |scheduler: &mut Scheduler, guests: &mut Guests, job: u64, edit: &dyn Fn(u64) -> Edit| {
        let answer = guests.ticket(callers[job as usize]);
        let members = (0..n_members).map(|n| (member(job, n), edit(n))).collect();
        let (sampler, tag) = (sampler.clone(), answer.tag());
        scheduler.apply(Operation::DrawTogether { members, sampler, tag });
        answer
    };
    let mut jobs: Vec<(u64, Ticket)> = Vec::new();
    for job in 1..=n_jobs {
        let caller = callers[job as usize];
        (0..n_members).for_each(|n| {
            scheduler.apply(Operation::Create { id: member(job, n), caller });
        });
        let begin = |n: u64| Edit { appended: vec![n as Token + 1], ..Edit::default() };
        jobs.push((job, draw(&mut scheduler, &mut guests, job, &begin)));
    }
    let mut verified: Option<Ticket> = None;
    for step in 0..200 {
        if step == N_STEPS_BEFORE {
            let (id, answer) = (context_id(1), guests.ticket(callers[0]));
            scheduler.apply(Operation::Create { id, caller: callers[0] });
            let ask = Ask::Verify { sampler: sampler.clone(), guess: Guess::Chain(vec![1; 15]) };
            let edit = Edit { appended: vec![1], ..Edit::default() };
            scheduler.apply(Operation::Ask { id, edit, ask, tag: answer.tag() });
            verified = Some(answer);
        }
        let plan = scheduler.plan();
        let n_drawn = plan.rows.iter().map(|row| row.n_outputs).sum();
        let drawn = Output::Sampled(Candidate { token: 2, logprob: -1.0 });
        scheduler.complete(plan, vec![drawn; n_drawn], 1_000_000);
        guests.deliver(&scheduler, Port::Direct);
        for (job, answer) in &mut jobs {
            if answer.try_take().is_some() {
                let again = |_| Edit { n_kept: 1, ..Edit::default() };
                *answer = draw(&mut scheduler, &mut guests, *job, &again);
            }
        }
        if verified.as_ref().is_some_and(|answer| answer.try_take().is_some()) {
            return Some(step - N_STEPS_BEFORE);
        }
    }
    None
}

#[test]
fn jobs_that_fill_each_step_keep_no_verification_waiting() {
    for n_filled in [256, 2048] {
        for (n_jobs, n_members) in [(1, 512), (2, 480), (3, 300), (8, 100), (3, 400), (4, 300), (9, 110)] {
            let n_steps = n_steps_until_verified(n_filled, n_jobs, n_members);
            assert!(
                n_steps.is_some_and(|n_steps| n_steps <= 2),
                "{n_steps:?} steps beside {n_jobs} jobs of {n_members}, where guesses fill {n_filled}"
            );
        }
    }
}
