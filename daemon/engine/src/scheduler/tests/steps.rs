//! How steps are shared.

use std::sync::Arc;

use super::N_POSITIONS;
use super::context_id;
use super::guest::Guests;
use super::hash_backend::{HashBackend, VOCAB};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::{AskLimits, Limits, SteeringTimes};
use crate::batch::{Candidate, Output, OutputKind, Token};
use crate::command::{Ahead, Ask, Edit, MaskSource, Operation, RunSettings};
use crate::guess::Guess;
use crate::mailbox::Ticket;
use crate::port::Port;
use crate::sampling::Sampler;
use crate::scheduler::{Privilege, Scheduler, SchedulerSettings};

/// A run that is decoded as far ahead as there is room.
pub(super) fn endless() -> RunSettings {
    RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead: Ahead::Unbounded,
        masks: MaskSource::Sampler,
    }
}

/// Computes a step whose rows draw tokens, and which lasts as long as `ns` says for its tokens of prompts. Returns those.
fn step(scheduler: &mut Scheduler, guests: &mut Guests, ns: impl Fn(u64) -> u64) -> usize {
    let plan = scheduler.plan();
    let drawn = Output::Sampled(Candidate { token: 1, logprob: -1.0 });
    let outputs = plan.rows.iter().filter(|row| row.n_outputs > 0).map(|_| drawn.clone()).collect();
    let prompts = plan.rows.iter().filter(|row| !row.draws);
    let n_tokens: usize = prompts.map(|row| row.end - row.start).sum();
    scheduler.complete(plan, outputs, ns(n_tokens as u64));
    guests.deliver(scheduler, Port::Direct);
    n_tokens
}

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
            n_queries_per_key: 1,
            n_positions_max: N_POSITIONS,
            vocab_size: VOCAB as usize,
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
            let settings = endless();
            let edit = Edit { appended: vec![id.number as Token % VOCAB as Token], ..Edit::default() };
            let tag = guests.ticket(greedy).tag();
            scheduler.apply(Operation::Run { id, edit, settings, tag });
        }
        let answer = guests.ticket(patient);
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
fn a_question_after_a_prompt_is_answered_beside_as_many_as_steps_carry() {
    let nothing = Limits::of_nothing(64, 1000);
    let asks = AskLimits { whole_bytes: 2 * 4 * nothing.vocab_size, ..AskLimits::NONE };
    let mut scheduler = Scheduler::alone(Limits { asks, ..nothing }, SchedulerSettings::alone(64));
    let mut guests = Guests::default();
    let [asking, other] = [1, 2].map(|number| {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let (actor, session, guest) = (ActorId(1), SessionId(number), GuestId(number));
        guests.enter(&mut scheduler, Owner { actor, session, guest, account })
    });
    let ask = |scheduler: &mut Scheduler, guests: &mut Guests, caller, number: u64, edit: Edit| {
        let answer = guests.ticket(caller);
        let (id, ask) = (context_id(number), Ask::Full);
        scheduler.apply(Operation::Ask { id, edit, ask, tag: answer.tag() });
        answer
    };
    let mut asked = Vec::new();
    for number in 0..20 {
        scheduler.apply(Operation::Create { id: context_id(number), caller: asking });
        let edit = Edit { appended: vec![number as Token], ..Edit::default() };
        asked.push(ask(&mut scheduler, &mut guests, asking, number, edit));
    }
    scheduler.apply(Operation::Create { id: context_id(100), caller: other });
    let edit = Edit { appended: vec![1; 30], ..Edit::default() };
    let answer = ask(&mut scheduler, &mut guests, other, 100, edit);
    let n_steps = (1..=100).find(|_| {
        let plan = scheduler.plan();
        let n_rows = plan.rows.iter().map(|row| row.n_outputs).sum();
        assert!(n_rows <= 2, "{n_rows}");
        scheduler.complete(plan, vec![Output::Full(vec![]); n_rows], 1_000_000);
        guests.deliver(&scheduler, Port::Direct);
        for (number, answer) in asked.iter_mut().enumerate() {
            if answer.try_take().is_some() {
                let edit = Edit { n_kept: 1, ..Edit::default() };
                *answer = ask(&mut scheduler, &mut guests, asking, number as u64, edit);
            }
        }
        answer.try_take().is_some()
    });
    assert!(n_steps.expect("it is answered") <= 30, "{n_steps:?} steps");
}

#[test]
fn a_stream_does_not_keep_the_prompts_of_its_own_user_waiting_beside_those_of_others() {
    let mut scheduler = Scheduler::alone(Limits::of_nothing(64, 100_000), SchedulerSettings::alone(256));
    let mut guests = Guests::default();
    let mut number = 0;
    let mut enter = |scheduler: &mut Scheduler, guests: &mut Guests, actor: u32| {
        number += 1;
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let (actor, session, guest) = (ActorId(actor), SessionId(number), GuestId(number));
        let caller = guests.enter(scheduler, Owner { actor, session, guest, account });
        let id = context_id(number);
        scheduler.apply(Operation::Create { id, caller });
        (id, guests.ticket(caller))
    };
    let (id, stream) = enter(&mut scheduler, &mut guests, 1);
    let edit = Edit { appended: vec![1], ..Edit::default() };
    scheduler.apply(Operation::Run { id, edit, settings: endless(), tag: stream.tag() });
    let mut prompt = |scheduler: &mut Scheduler, guests: &mut Guests, actor: u32, n_tokens: usize| {
        let (id, answer) = enter(scheduler, guests, actor);
        let edit = Edit { appended: vec![id.number as Token; n_tokens], ..Edit::default() };
        scheduler.apply(Operation::Ask { id, edit, ask: Ask::Prefill, tag: answer.tag() });
        answer
    };
    // A step lasts a millisecond, and 0.1 more for each token of a prompt.
    let step = |scheduler: &mut Scheduler, guests: &mut Guests| {
        step(scheduler, guests, |n_tokens| 1_000_000 + 100_000 * n_tokens)
    };
    // Another user has prompts without end.
    let mut others: Vec<_> = (0..4).map(|_| prompt(&mut scheduler, &mut guests, 2, 2_000)).collect();
    let go_on = |scheduler: &mut Scheduler,
                 guests: &mut Guests,
                 others: &mut Vec<Ticket>,
                 prompt: &mut dyn FnMut(&mut Scheduler, &mut Guests, u32, usize) -> Ticket| {
        step(scheduler, guests);
        for other in others.iter_mut() {
            if other.try_take().is_some() {
                *other = prompt(scheduler, guests, 2, 2_000);
            }
        }
    };
    for _ in 0..500 {
        go_on(&mut scheduler, &mut guests, &mut others, &mut prompt);
    }
    let own = prompt(&mut scheduler, &mut guests, 1, 33);
    let n_steps = (1..=1000).find(|_| {
        go_on(&mut scheduler, &mut guests, &mut others, &mut prompt);
        own.try_take().is_some()
    });
    assert!(n_steps.expect("it is computed") <= 80, "{n_steps:?} steps");
}

#[test]
fn verifications_that_fill_each_step_do_not_keep_prompts_waiting() {
    const N_GUESSED: usize = 15;
    for n_step_tokens in [20, 64] {
        let limits = Limits { n_tokens_max: n_step_tokens, ..Limits::of_nothing(64, 1000) };
        let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(n_step_tokens));
        let mut guests = Guests::default();
        // Of one user, so that neither is ahead of the other.
        let callers = [1, 2].map(|number| {
            let account = Account::new("guest", Budget::UNLIMITED, None);
            let (actor, session, guest) = (ActorId(1), SessionId(number), GuestId(number));
            guests.enter(&mut scheduler, Owner { actor, session, guest, account })
        });
        let [verifying, prompting] = callers;
        let sampler = Arc::new(Sampler::greedy());
        let verify = |scheduler: &mut Scheduler, guests: &mut Guests, number: u64, n_kept: usize| {
            let (id, answer) = (context_id(number), guests.ticket(verifying));
            let appended = if n_kept == 0 { vec![number as Token] } else { Vec::new() };
            let ask = Ask::Verify { sampler: sampler.clone(), guess: Guess::Chain(vec![1; N_GUESSED]) };
            let edit = Edit { n_kept, appended, n_pulled: 0 };
            scheduler.apply(Operation::Ask { id, edit, ask, tag: answer.tag() });
            answer
        };
        let mut verified = Vec::new();
        for number in 0..8 {
            scheduler.apply(Operation::Create { id: context_id(number), caller: verifying });
            verified.push(verify(&mut scheduler, &mut guests, number, 0));
        }
        let (id, answer) = (context_id(100), guests.ticket(prompting));
        scheduler.apply(Operation::Create { id, caller: prompting });
        let edit = Edit { appended: vec![1; 41], ..Edit::default() };
        scheduler.apply(Operation::Ask { id, edit, ask: Ask::Prefill, tag: answer.tag() });
        let mut n_verified = 0;
        let n_steps = (1..=200).find(|_| {
            let plan = scheduler.plan();
            let n_drawn = plan.rows.iter().map(|row| row.n_outputs).sum();
            let drawn = Output::Sampled(Candidate { token: 2, logprob: -1.0 });
            scheduler.complete(plan, vec![drawn; n_drawn], 1_000_000);
            guests.deliver(&scheduler, Port::Direct);
            for (number, answer) in verified.iter_mut().enumerate() {
                if answer.try_take().is_some() {
                    n_verified += 1;
                    *answer = verify(&mut scheduler, &mut guests, number as u64, 1);
                }
            }
            answer.try_take().is_some()
        });
        let n_steps = n_steps.expect("the prompt is computed");
        assert!(n_steps <= 100, "{n_steps} steps of {n_step_tokens} tokens");
        assert!(n_verified >= n_steps / 2 - 1, "{n_verified} verified in {n_steps} steps");
    }
}

#[test]
fn contexts_decode_beyond_what_prompts_and_guesses_fill() {
    const N_FILLED: usize = 16;
    let limits = Limits { n_tokens_max: 80, n_steps_under_way: 1, ..Limits::of_nothing(40, 1000) };
    let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(N_FILLED));
    let mut guests = Guests::default();
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let (actor, session, guest) = (ActorId(1), SessionId(1), GuestId(1));
    let caller = guests.enter(&mut scheduler, Owner { actor, session, guest, account });
    let ask = |scheduler: &mut Scheduler, guests: &mut Guests, number: u64, n_tokens: usize, ask: Ask| {
        let (id, answer) = (context_id(number), guests.ticket(caller));
        scheduler.apply(Operation::Create { id, caller });
        let edit = Edit { appended: vec![1; n_tokens], ..Edit::default() };
        scheduler.apply(Operation::Ask { id, edit, ask, tag: answer.tag() });
        answer
    };
    let sizes = |scheduler: &mut Scheduler, guests: &mut Guests| {
        let plan = scheduler.plan();
        let sizes: Vec<usize> = plan.rows.iter().map(|row| row.end - row.start).collect();
        let n_drawn = plan.rows.iter().map(|row| row.n_outputs).sum();
        let drawn = Output::Sampled(Candidate { token: 2, logprob: -1.0 });
        scheduler.complete(plan, vec![drawn; n_drawn], 1_000_000);
        guests.deliver(scheduler, Port::Direct);
        sizes
    };
    // A prompt, alone on the device, where nothing has decoded lately.
    (0..5).for_each(|_| assert!(!scheduler.plan().has_rows()));
    let prompt = ask(&mut scheduler, &mut guests, 0, 3 * N_FILLED + 1, Ask::Prefill);
    for _ in 0..3 {
        assert_eq!(sizes(&mut scheduler, &mut guests), [N_FILLED]);
    }
    prompt.try_take().expect("it is computed");
    // More contexts than that many tokens draw their next ones.
    let sampler = Arc::new(Sampler::greedy());
    let drawing: Vec<Ticket> =
        (1..=35).map(|n| ask(&mut scheduler, &mut guests, n, 1, Ask::Sample(sampler.clone()))).collect();
    assert_eq!(sizes(&mut scheduler, &mut guests), [1; 35]);
    drawing.iter().for_each(|answer| assert!(answer.try_take().is_some()));
    // Guesses fill a step as prompts do, also beside those.
    let verify = Ask::Verify { sampler: sampler.clone(), guess: Guess::Chain(vec![1; 5]) };
    let verified: Vec<Ticket> =
        (36..=40).map(|n| ask(&mut scheduler, &mut guests, n, 1, verify.clone())).collect();
    let drawing: Vec<Ticket> =
        (41..=70).map(|n| ask(&mut scheduler, &mut guests, n, 1, Ask::Sample(sampler.clone()))).collect();
    let rows = sizes(&mut scheduler, &mut guests);
    let n_of_guesses: usize = rows.iter().filter(|&&n_tokens| n_tokens > 1).sum();
    assert_eq!((n_of_guesses, rows.len()), (3 * 6, 33), "{rows:?}");
    let mut waiting: Vec<Ticket> = verified.into_iter().chain(drawing).collect();
    waiting.retain(|answer| answer.try_take().is_none());
    assert_eq!(sizes(&mut scheduler, &mut guests), [6, 6]);
    assert!(waiting.iter().all(|answer| answer.try_take().is_some()));
}

#[test]
fn a_guest_that_drops_a_fork_for_each_token_is_waited_for_all_the_same() {
    let mut scheduler = Scheduler::alone(Limits::of_nothing(8, 100), SchedulerSettings::alone(64));
    let mut guests = Guests::default();
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let (actor, session, guest) = (ActorId(1), SessionId(1), GuestId(1));
    let caller = guests.enter(&mut scheduler, Owner { actor, session, guest, account });
    let id = context_id(0);
    scheduler.apply(Operation::Create { id, caller });
    for round in 1..=3 {
        let child = context_id(round);
        let (n_tokens, answer) = (round as usize, guests.ticket(caller));
        let edit = Edit { n_kept: n_tokens - 1, appended: vec![1], n_pulled: 0 };
        scheduler.apply(Operation::Fork { id, edit, child });
        let edit = Edit { n_kept: n_tokens, ..Edit::default() };
        scheduler.apply(Operation::Ask { id, edit, ask: Ask::Top { n: 1 }, tag: answer.tag() });
        scheduler.apply(Operation::Release { id: child, n_pulled: 0 });
        let plan = scheduler.plan();
        let outputs = vec![Output::Top { candidates: vec![], entropy: 0.0 }];
        scheduler.complete(plan, outputs, 1_000_000);
        guests.deliver(&scheduler, Port::Direct);
        assert!(answer.try_take().is_some());
        let n_awaited = scheduler.n_guests_awaited(Privilege::AtOnce);
        assert_eq!(n_awaited, usize::from(round == 3), "round {round}");
    }
    scheduler.forget_guest(guest);
    assert_eq!(scheduler.n_guests_awaited(Privilege::AtOnce), 0);
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
        let tag = guests.ticket(caller).tag();
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
fn whole_rows_that_a_step_does_not_carry_wait_for_the_next_and_nobody_else_does() {
    const N_PER_STEP: usize = 3;
    let nothing = Limits::of_nothing(64, 1000);
    let whole_bytes = N_PER_STEP * 4 * nothing.vocab_size;
    let limits = Limits { asks: AskLimits { whole_bytes, n_top_max: 100, ..AskLimits::NONE }, ..nothing };
    let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(2048));
    let mut guests = Guests::default();
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
    let caller = guests.enter(&mut scheduler, owner);
    let mut answers = Vec::new();
    for number in 0..10 {
        let id = context_id(number);
        scheduler.apply(Operation::Create { id, caller });
        let edit = Edit { appended: vec![number as Token; 3], ..Edit::default() };
        let answer = guests.ticket(caller);
        // Lists that are too long count as rows.
        let ask = if number % 2 == 0 { Ask::Full } else { Ask::Top { n: 101 } };
        scheduler.apply(Operation::Ask { id, edit, ask, tag: answer.tag() });
        answers.push(answer);
    }
    let (stream, tag) = (context_id(10), guests.ticket(caller).tag());
    scheduler.apply(Operation::Create { id: stream, caller });
    let edit = Edit { appended: vec![1], ..Edit::default() };
    scheduler.apply(Operation::Run { id: stream, edit, settings: endless(), tag });
    let mut n_answered = Vec::new();
    let mut n_left = answers.len();
    while n_left > 0 {
        let plan = scheduler.plan();
        assert!(plan.rows.iter().any(|row| row.id == stream), "it is in each step");
        n_answered.push(plan.rows.iter().map(|row| row.n_outputs).sum::<usize>() - 1);
        let batch = scheduler.batch(&plan, Vec::new());
        let outputs = batch.rows.iter().flat_map(|row| {
            row.outputs.iter().map(|asked| match asked.kind {
                OutputKind::Full => Output::Full(vec![]),
                OutputKind::Top { .. } => Output::Top { candidates: vec![], entropy: 0.0 },
                _ => Output::Sampled(Candidate { token: 1, logprob: -1.0 }),
            })
        });
        let outputs = outputs.collect();
        drop(batch);
        scheduler.complete(plan, outputs, 1_000_000);
        guests.deliver(&scheduler, Port::Direct);
        n_left -= answers.iter().filter(|answer| answer.try_take().is_some()).count();
    }
    // At first nothing is known of how long steps take, and the stream decodes alone.
    assert_eq!(n_answered, [0, 3, 3, 3, 1]);
}

/// Streams, and a long prompt that comes beside them after some short ones; what the prompt gets in each step. A step takes
/// 7 ms, half a millisecond more with prompts, and 30 µs for each of their tokens.
fn chunks_beside(n_streams: u64, n_short_prompts: u64, n_block_tokens: usize) -> Vec<usize> {
    let limits = Limits { n_tile_tokens: 32, n_block_tokens, ..Limits::of_nothing(256, 20_000) };
    let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(2048));
    let mut guests = Guests::default();
    let enter = |scheduler: &mut Scheduler, guests: &mut Guests, number: u64| {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let (actor, session, guest) = (ActorId(1), SessionId(number), GuestId(number));
        let caller = guests.enter(scheduler, Owner { actor, session, guest, account });
        let id = context_id(number);
        scheduler.apply(Operation::Create { id, caller });
        (id, guests.ticket(caller).tag())
    };
    for number in 0..n_streams {
        let (id, tag) = enter(&mut scheduler, &mut guests, number);
        let settings = endless();
        let edit = Edit { appended: vec![number as Token], ..Edit::default() };
        scheduler.apply(Operation::Run { id, edit, settings, tag });
    }
    let step = |scheduler: &mut Scheduler, guests: &mut Guests| {
        step(scheduler, guests, |n_tokens| match n_tokens {
            0 => 7_000_000,
            _ => 7_500_000 + 30_000 * n_tokens,
        })
    };
    let ask = |scheduler: &mut Scheduler, guests: &mut Guests, number: u64, tokens: Vec<Token>| {
        let (id, tag) = enter(scheduler, guests, number);
        let edit = Edit { appended: tokens, ..Edit::default() };
        scheduler.apply(Operation::Ask { id, edit, ask: Ask::Prefill, tag });
    };
    for number in 0..n_short_prompts {
        ask(&mut scheduler, &mut guests, 1000 + number, vec![number as Token; 3]);
        for _ in 0..3 {
            step(&mut scheduler, &mut guests);
        }
    }
    ask(&mut scheduler, &mut guests, 5000, (0..4001).collect());
    let mut chunks = Vec::new();
    while chunks.iter().sum::<usize>() < 4000 {
        chunks.push(step(&mut scheduler, &mut guests));
        assert!(chunks.len() < 6_000, "{n_streams} streams: {:?}", &chunks[..100]);
    }
    chunks
}

#[test]
fn a_step_with_prompts_fills_blocks_of_tokens() {
    let chunks = chunks_beside(37, 0, 64);
    // 4.2 ms are left for prompts, which is less than 140 tokens; 128 tokens with the streams are 91, 192 are 155.
    let usual = chunks.iter().filter(|&&n| [91, 155].contains(&n)).count();
    assert!(usual + 8 > chunks.len(), "{chunks:?}");
}

#[test]
fn filling_blocks_leaves_no_prompt_with_next_to_nothing() {
    for n_streams in [1, 37, 56, 60, 63, 64, 127] {
        for n_short_prompts in [0, 8, 40] {
            let [without, with] =
                [1, 64].map(|n_block| chunks_beside(n_streams, n_short_prompts, n_block).len());
            assert!(with <= 2 * without, "{n_streams} streams: {with} steps, {without} without blocks");
        }
    }
}
