//! How steps are shared.

use std::sync::Arc;

use super::N_POSITIONS;
use super::context_id;
use super::guest::Guests;
use super::hash_backend::{HashBackend, VOCAB};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::Limits;
use crate::batch::Token;
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
