//! How steps are shared.

use std::sync::Arc;

use super::N_POSITIONS;
use super::context_id;
use super::guest::Guests;
use super::hash_backend::{HashBackend, VOCAB};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::Limits;
use crate::batch::{Candidate, Output, Token};
use crate::command::{Ahead, Ask, Edit, MaskSource, Operation, RunSettings};
use crate::port::Port;
use crate::sampling::Sampler;
use crate::scheduler::{Scheduler, SchedulerSettings};

#[test]
fn streams_of_one_user_do_not_keep_the_prompts_of_another_waiting() {
    for n_rows_max in [1, 2, 8, 40] {
        let limits = Limits {
            n_pages: 200,
            n_granule_pages: 1,
            n_host_pages: 0,
            page_bytes: 128,
            n_rows_max,
            n_tokens_max: n_rows_max + 8,
            n_tile_tokens: 1,
            n_block_tokens: 1,
            n_positions_max: N_POSITIONS,
            vocab_size: VOCAB as usize,
            hidden_size: 1,
            n_steps_under_way: 1,
            n_slots: 0,
            n_states: 0,
            logits_tokens: 1.0,
        };
        let settings = SchedulerSettings::alone(limits.n_tokens_max);
        let mut scheduler = Scheduler::alone(limits, settings);
        let mut backend = HashBackend::new(200, 0);
        let owner = |actor| Owner {
            actor: ActorId(actor),
            session: SessionId(u64::from(actor)),
            guest: GuestId(u64::from(actor)),
            account: Account::new("guest", Budget::UNLIMITED, None),
        };
        let mut guests = Guests::default();
        let [greedy, patient] = [1, 2].map(|actor| guests.enter(&mut scheduler, owner(actor)));
        for id in (0..2 * n_rows_max as u64).map(context_id) {
            scheduler.apply(Operation::Create { id, caller: greedy });
            let settings = RunSettings {
                sampler: Arc::new(Sampler::greedy()),
                stop_tokens: Arc::new([]),
                n_tokens_max: None,
                ahead: Ahead::Unbounded,
                masks: MaskSource::Sampler,
            };
            let edit = Edit { appended: vec![id.number as Token % VOCAB as Token], ..Edit::default() };
            let tag = guests.stand(greedy).tag();
            scheduler.apply(Operation::Run { id, edit, settings, tag });
        }
        let answer = guests.stand(patient);
        let id = context_id(1000);
        scheduler.apply(Operation::Create { id, caller: patient });
        let edit = Edit { appended: vec![1; 33], ..Edit::default() };
        scheduler.apply(Operation::Ask { id, edit, ask: Ask::Prefill, tag: answer.tag() });
        let n_steps = (1..).find(|_| {
            let plan = scheduler.plan();
            let outputs = backend.run(&plan.moves, &scheduler.batch(&plan, Vec::new()));
            scheduler.complete(plan, outputs, 1_000_000);
            guests.deliver(&scheduler, Port::Direct);
            answer.try_take().is_some()
        });
        assert!(n_steps <= Some(12), "{n_steps:?} steps for a prompt of 33 tokens, {n_rows_max} rows");
    }
}

#[test]
fn prompts_are_cut_where_the_device_takes_no_longer_than_for_less() {
    let limits = Limits { n_tokens_max: 70, n_tile_tokens: 32, ..Limits::of_nothing(8, 100) };
    let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(70));
    let mut guests = Guests::default();
    for number in 0..2 {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let (actor, session, guest) = (ActorId(1), SessionId(number), GuestId(number));
        let caller = guests.enter(&mut scheduler, Owner { actor, session, guest, account });
        let id = context_id(number);
        scheduler.apply(Operation::Create { id, caller });
        let edit = Edit { appended: vec![number as Token; 101], ..Edit::default() };
        let tag = guests.stand(caller).tag();
        scheduler.apply(Operation::Ask { id, edit, ask: Ask::Prefill, tag });
    }
    let mut chunks = Vec::new();
    while scheduler.has_work() {
        let plan = scheduler.plan();
        chunks.push(plan.rows.iter().map(|row| row.end - row.start).collect::<Vec<_>>());
        scheduler.complete(plan, Vec::new(), 1_000_000);
        guests.deliver(&scheduler, Port::Direct);
    }
    // At first nothing is known of how long steps take. The end of a prompt is as long as it is.
    assert_eq!(chunks, [vec![8], vec![8], vec![8], vec![8], vec![64], vec![64], vec![20, 20]]);
}

#[test]
fn a_step_with_prompts_fills_blocks_of_tokens() {
    let limits = Limits { n_tile_tokens: 32, n_block_tokens: 64, ..Limits::of_nothing(64, 10_000) };
    let settings = SchedulerSettings::alone(2048);
    let mut scheduler = Scheduler::alone(limits, settings);
    let mut guests = Guests::default();
    let n_streams = 37;
    for number in 0..=n_streams {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let (actor, session, guest) = (ActorId(1), SessionId(number), GuestId(number));
        let caller = guests.enter(&mut scheduler, Owner { actor, session, guest, account });
        let id = context_id(number);
        scheduler.apply(Operation::Create { id, caller });
        let tag = guests.stand(caller).tag();
        if number < n_streams {
            let settings = RunSettings {
                sampler: Arc::new(Sampler::greedy()),
                stop_tokens: Arc::new([]),
                n_tokens_max: None,
                ahead: Ahead::Unbounded,
                masks: MaskSource::Sampler,
            };
            let edit = Edit { appended: vec![number as Token], ..Edit::default() };
            scheduler.apply(Operation::Run { id, edit, settings, tag });
        } else {
            let edit = Edit { appended: (0..100_000).collect(), ..Edit::default() };
            scheduler.apply(Operation::Ask { id, edit, ask: Ask::Prefill, tag });
        }
    }
    let mut chunks = Vec::new();
    for _ in 0..300 {
        let plan = scheduler.plan();
        let n_tokens: usize = plan.rows.iter().map(|row| row.end - row.start).sum();
        let outputs = plan.rows.iter().filter(|row| row.n_outputs > 0);
        let drawn = Output::Sampled(Candidate { token: 1, logprob: -1.0 });
        let outputs = outputs.map(|_| drawn.clone()).collect();
        // 8 ms for the streams, 30 µs for a token beside them: 160 would be within the target.
        let n_prompt_tokens = n_tokens - n_streams as usize;
        scheduler.complete(plan, outputs, 8_000_000 + 30_000 * n_prompt_tokens as u64);
        guests.deliver(&scheduler, Port::Direct);
        chunks.push(n_prompt_tokens);
    }
    // 192 tokens less the streams are 155: four tiles, and most of a fifth.
    let usual = chunks.iter().filter(|&&n| n == 155).count();
    assert!(usual > 250, "{chunks:?}");
}
