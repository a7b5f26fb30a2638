//! What a step costs the scheduler. Times are printed, not asserted: the machine decides them.

use std::time::{Duration, Instant};

use super::context_id;
use super::*;
use crate::batch::Candidate;
use crate::guess::Guess;

/// `cargo test --release -p trellis-engine --lib -- --ignored --nocapture scheduler::tests::cost`
#[test]
#[ignore = "prints times, which mean something on a quiet machine alone"]
fn of_planning_and_taking_in() {
    for n_under_way in [1, 2] {
        for (n_rows, n_tokens) in [(1, 1_000), (32, 1_000), (256, 1_000), (1024, 1_000), (256, 100_000)] {
            let (plan, batch, complete) = cost(n_rows, n_tokens, n_under_way);
            let us = |total: Duration| total.as_secs_f64() * 1e6 / N_STEPS as f64;
            println!(
                "{n_under_way} under way, {n_rows} rows of {n_tokens}: plan {:.1} µs, batch {:.1}, complete {:.1}",
                us(plan),
                us(batch),
                us(complete)
            );
        }
    }
}

/// `cargo test --release -p trellis-engine --lib -- --ignored --nocapture scheduler::tests::cost`
#[test]
#[ignore = "prints times, which mean something on a quiet machine alone"]
fn of_verifications() {
    for n_rows in [1, 8, 32] {
        let limits = Limits::of_nothing(n_rows, n_rows * 100);
        let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(usize::MAX));
        let mut guests = Guests::default();
        let mut contexts = Vec::new();
        for idx in 0..n_rows as u64 {
            let account = Account::new("guest", Budget::UNLIMITED, None);
            let owner = Owner { actor: ActorId(0), session: SessionId(idx), guest: GuestId(idx), account };
            let caller = guests.enter(&mut scheduler, owner);
            let id = context_id(idx);
            scheduler.apply(Operation::Create { id, caller });
            contexts.push((id, caller, (0..130).collect::<Vec<Token>>()));
        }
        let (mut asking, mut planning, mut batching, mut completing) = <[Duration; 4]>::default().into();
        let mut rows = Vec::new();
        for step in 0..N_STEPS + 20 {
            if step == 20 {
                (asking, planning, batching, completing) = <[Duration; 4]>::default().into();
            }
            let asks = contexts.iter_mut().map(|(id, caller, appended)| {
                let edit = Edit { appended: std::mem::take(appended), ..Edit::default() };
                *appended = vec![step as Token];
                let guess = Guess::Chain(vec![5; 8]);
                let ask = Ask::Verify { sampler: Arc::new(Sampler::greedy()), guess };
                Operation::Ask { id: *id, edit, ask, tag: guests.ticket(*caller).tag() }
            });
            let asks: Vec<_> = asks.collect();
            let begun = Instant::now();
            for ask in asks {
                scheduler.apply(ask);
            }
            asking += begun.elapsed();
            let begun = Instant::now();
            let plan = scheduler.plan();
            planning += begun.elapsed();
            let begun = Instant::now();
            let planned = scheduler.batch(&plan, rows).rows;
            assert!(planned.len() == n_rows);
            rows = crate::batch::reused(planned);
            batching += begun.elapsed();
            let n_outputs = plan.rows.iter().map(|row| row.n_outputs).sum();
            let outputs = vec![Output::Sampled(Candidate { token: 1, logprob: -1.0 }); n_outputs];
            let begun = Instant::now();
            scheduler.complete(plan, outputs, 1_000_000);
            completing += begun.elapsed();
            guests.deliver(&scheduler, Port::Direct);
        }
        let us = |total: Duration| total.as_secs_f64() * 1e6 / N_STEPS as f64;
        let (asking, planning, batching, completing) =
            (us(asking), us(planning), us(batching), us(completing));
        println!(
            "{n_rows} verifications of 8: asked {asking:.1} µs, plan {planning:.1}, batch {batching:.1}, complete {completing:.1}"
        );
    }
}

const N_STEPS: usize = 500;

fn cost(n_rows: usize, n_tokens: usize, n_under_way: usize) -> (Duration, Duration, Duration) {
    let limits = Limits {
        n_steps_under_way: n_under_way,
        ..Limits::of_nothing(n_rows, n_rows * (n_tokens / PAGE_LEN + 100))
    };
    let settings = SchedulerSettings::alone(usize::MAX);
    let mut scheduler = Scheduler::alone(limits, settings);
    let user = Account::new("user", Budget::UNLIMITED, None);
    let mut guests = Guests::default();
    let mut runs = Vec::new();
    for idx in 0..n_rows as u64 {
        let account = Account::new("guest", Budget::UNLIMITED, Some(user.clone()));
        let owner = Owner { actor: ActorId(0), session: SessionId(idx), guest: GuestId(idx), account };
        let id = context_id(idx);
        let caller = guests.enter(&mut scheduler, owner);
        scheduler.apply(Operation::Create { id, caller });
        let n_tokens = n_tokens + idx as usize % PAGE_LEN;
        let appended = (0..n_tokens as u64).map(|n| (mix(idx << 32 | n) % 1000) as Token).collect();
        let run = guests.queue(caller);
        let settings = RunSettings {
            sampler: Arc::new(Sampler::greedy()),
            stop_tokens: Arc::new([]),
            n_tokens_max: None,
            ahead: Ahead::Adaptive,
            masks: MaskSource::Sampler,
        };
        let edit = Edit { appended, ..Edit::default() };
        scheduler.apply(Operation::Run { id, edit, settings, tag: run.tag() });
        runs.push((id, run));
    }
    let (mut planning, mut batching, mut completing) = Default::default();
    let mut under_way = VecDeque::new();
    let mut rows = Vec::new();
    for step in 0..N_STEPS + 20 {
        if step == 20 {
            (planning, batching, completing) = Default::default();
        }
        while under_way.len() < n_under_way {
            let begun = Instant::now();
            let plan = scheduler.plan();
            planning += begun.elapsed();
            let begun = Instant::now();
            let planned = scheduler.batch(&plan, rows).rows;
            assert!(step < 20 || planned.len() == n_rows);
            rows = crate::batch::reused(planned);
            batching += begun.elapsed();
            under_way.push_back(plan);
        }
        let plan = under_way.pop_front().expect("a step is under way");
        let n_outputs = plan.rows.iter().map(|row| row.n_outputs).sum();
        let outputs = vec![Output::Sampled(Candidate { token: 1, logprob: -1.0 }); n_outputs];
        let begun = Instant::now();
        scheduler.complete(plan, outputs, 1_000_000);
        completing += begun.elapsed();
        guests.deliver(&scheduler, Port::Direct);
        for (id, run) in &mut runs {
            while run.try_pull().is_some() {}
            let progress = run.progress();
            if let Some(PullReport { n_tokens, is_waiting }) = progress {
                scheduler.apply(Operation::Pulled { id: *id, tag: run.tag(), n_tokens, is_waiting });
            }
        }
    }
    (planning, batching, completing)
}
