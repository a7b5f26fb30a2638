//! What a context tells the engine, and what it counts.

mod panics;

use std::path::PathBuf;
use std::pin::pin;
use std::task::{self, Poll, Waker};

use tokio::sync::watch;

use super::*;
use crate::account::{Account, ActorId, Budget, GuestId, N_OPERATIONS_MAX, SessionId, USER};
use crate::backend::{AskLimits, Backend, BackendError, Collected, Limits, SteeringTimes, WeightsInfo};
use crate::batch::{Batch, CellMove, HostPageId, LateMask, PageId};
use crate::command::{Ahead, MaskSource, ModelId, N_ATTENTION_TOKENS_MAX};
use crate::handle::{Link, Message, Served};
use crate::model::{Dtype, Model, ModelSource};
use crate::port::Port;
use crate::sampling::Sampler;

fn poll<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).poll(&mut task::Context::from_waker(Waker::noop()))
}

fn now<T>(future: impl Future<Output = Result<T, EngineError>>) -> T {
    let Poll::Ready(result) = poll(future) else { panic!("there is room") };
    result.expect("nothing is wrong")
}

fn engine() -> (ModelHandle, Served) {
    engine_of(100)
}

fn engine_of(n_positions_max: usize) -> (ModelHandle, Served) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let model = Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens");
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
        n_positions_max,
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
    let (link, served) = Link::new(Port::Encoded);
    let backend = Idle { limits, weights };
    (
        ModelHandle::new(link, ModelId::default(), Arc::new(model), &backend, None, watch::channel(None).1),
        served,
    )
}

/// A backend that nothing is asked of.
struct Idle {
    limits: Limits,
    weights: WeightsInfo,
}

impl Backend for Idle {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn weights(&self) -> WeightsInfo {
        self.weights
    }

    fn device(&self) -> &str {
        "idle"
    }

    fn submit(&mut self, _: &Batch<'_>) -> Result<(), BackendError> {
        unreachable!("there is no engine")
    }

    fn supply(&mut self, _: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        unreachable!("there is no engine")
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        unreachable!("there is no engine")
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        unreachable!("there is no engine")
    }

    fn n_pages(&self) -> usize {
        self.limits.n_pages
    }

    fn resize(&mut self, _: usize) -> Result<(), BackendError> {
        unreachable!("there is no engine")
    }

    fn move_pages(&mut self, _: &[(PageId, PageId)]) -> Result<(), BackendError> {
        unreachable!("there is no engine")
    }

    fn move_cells(&mut self, _: &[CellMove]) -> Result<(), BackendError> {
        unreachable!("there is no engine")
    }

    fn swap_out(&mut self, _: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        unreachable!("there is no engine")
    }

    fn swap_in(&mut self, _: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        unreachable!("there is no engine")
    }
}

fn owner(budget: Budget) -> Owner {
    Owner {
        actor: ActorId(0),
        session: SessionId(0),
        guest: GuestId(0),
        account: Account::new("guest", budget, None),
    }
}

#[test]
fn token_lists_are_charged_while_they_are_there() {
    let (engine, _served) = engine();
    let owner = owner(Budget { host_bytes: 5_120, ..Budget::UNLIMITED });
    let mut context = now(Context::create(&engine, owner.clone()));
    now(context.append(&[1; 90]));
    let fork = now(context.fork());
    let mut third = now(Context::create(&engine, owner.clone()));
    let Poll::Ready(Err(EngineError::Budget(exceeded))) = poll(third.append(&[1])) else {
        panic!("two lists of up to 256 tokens are all there is room for")
    };
    assert_eq!((exceeded.what, exceeded.used, exceeded.limit), ("bytes of host memory", 5_120, 5_120));
    assert!(third.tokens().is_empty());
    drop(fork);
    now(third.append(&[1]));
    now(third.truncate(0));
    drop(context);
    assert_eq!(owner.account.used(Resource::HostBytes), 0);
}

#[test]
fn a_guest_whose_contexts_come_and_go_is_held_up_like_any_other() {
    let (engine, _served) = engine();
    let owner = owner(Budget::UNLIMITED);
    let comes_and_goes = || match poll(Context::create(&engine, owner.clone())) {
        Poll::Ready(context) => {
            drop(context.expect("nothing is wrong"));
            true
        }
        Poll::Pending => false,
    };
    let n = (0..10_000).take_while(|_| comes_and_goes()).count();
    assert_eq!(n, N_OPERATIONS_MAX, "the engine reads nothing");
}

#[test]
fn guests_of_a_user_that_come_and_go_leave_no_more_behind_than_a_few_do() {
    let (engine, _served) = engine();
    let user = Account::new(USER, Budget::UNLIMITED, None);
    let guest = |number: u64| {
        let account = Account::new("guest", Budget::UNLIMITED, Some(user.clone()));
        let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(number), account };
        (0..N_OPERATIONS_MAX).take_while(|_| poll(Context::create(&engine, owner.clone())).is_ready()).count()
    };
    let n_operations: Vec<usize> = (0..10).map(guest).collect();
    assert_eq!(n_operations.iter().sum::<usize>(), 4 * N_OPERATIONS_MAX, "{n_operations:?}");
}

#[test]
fn tokens_that_are_on_their_way_take_room_as_operations_do() {
    const N_TOKENS: usize = 40_960;
    let (engine, _served) = engine_of(N_TOKENS);
    let mut context = now(Context::create(&engine, owner(Budget::UNLIMITED)));
    let mut comes_and_goes = || {
        now(context.append(&[1; N_TOKENS]));
        poll(context.truncate(N_TOKENS - 1)).is_ready() && poll(context.truncate(0)).is_ready()
    };
    let n = (0..N_OPERATIONS_MAX).take_while(|_| comes_and_goes()).count();
    // Five for each edit that brings tokens, and one for each that takes them away.
    assert_eq!(n, (N_OPERATIONS_MAX - 1) / 6, "the engine reads nothing");
}

#[test]
fn tokens_that_are_on_their_way_count_with_the_user() {
    const N_TOKENS: usize = 400_000;
    let (engine, _served) = engine_of(N_TOKENS);
    let user = Account::new(USER, Budget::UNLIMITED, None);
    let account = Account::new("guest", Budget::UNLIMITED, Some(user));
    let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
    let mut context = now(Context::create(&engine, owner));
    let mut comes_and_goes = || {
        now(context.append(&[1; N_TOKENS]));
        poll(context.truncate(N_TOKENS - 1)).is_ready() && poll(context.truncate(0)).is_ready()
    };
    let n = (0..N_OPERATIONS_MAX).take_while(|_| comes_and_goes()).count();
    assert_eq!(n, (4 * N_OPERATIONS_MAX - 1) / (2 + N_TOKENS / 8192), "the engine reads nothing");
}

#[test]
fn who_gives_up_waiting_for_room_has_told_the_engine_nothing_and_noted_nothing() {
    let (engine, mut served) = engine();
    let owner = owner(Budget::UNLIMITED);
    let settings = || RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    for given_up in 0..6 {
        let mut context = now(Context::create(&engine, owner.clone()));
        now(context.append(&[1, 2, 3]));
        if given_up >= 4 {
            assert!(poll(context.pull(RunKey(1), settings)).is_pending(), "the run has begun");
        }
        let rooms: Vec<Room> = std::iter::from_fn(|| match poll(engine.room(&context.caller, 0)) {
            Poll::Ready(room) => room.ok(),
            Poll::Pending => None,
        })
        .collect();
        let is_pending = match given_up {
            0 => poll(context.pull(RunKey(1), settings)).is_pending(),
            1 => poll(context.ask(Ask::Prefill)).is_pending(),
            2 => poll(context.fork()).is_pending(),
            3 => poll(context.save("name")).is_pending(),
            4 => poll(context.append(&[4])).is_pending(),
            _ => poll(context.truncate(2)).is_pending(),
        };
        assert!(is_pending, "{given_up}");
        drop(rooms);
        // The next command brings the engine to what the context holds.
        drop(now(context.ask(Ask::Prefill)));
        let mut told = Vec::new();
        while let Ok(posted) = served.messages.try_recv() {
            if let Message::Operation(Operation::Run { edit, .. } | Operation::Ask { edit, .. }) =
                posted.message
            {
                told.truncate(edit.n_kept);
                told.extend(edit.appended);
            }
        }
        assert_eq!(told, context.tokens().to_vec(), "{given_up}");
        assert_eq!(told, [1, 2, 3], "{given_up}");
    }
}

#[test]
fn where_one_context_cannot_take_what_was_drawn_none_does() {
    let (model, _served) = engine();
    // The tokens of one, and once as many again: the third is one too many.
    for (host_bytes, fits) in [(3 * 2_560, true), (2 * 2_560, false)] {
        let account = Account::new("guest", Budget { host_bytes, ..Budget::UNLIMITED }, None);
        let owner =
            Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account: account.clone() };
        let mut contexts: Vec<Context> =
            (0..3).map(|_| now(Context::create(&model, owner.clone()))).collect();
        now(contexts[1].append(&[7]));
        let used = account.used(Resource::HostBytes);
        let drawn: Vec<Vec<Drawn>> =
            (0..3).map(|token| vec![Drawn::from(crate::batch::Candidate { token, logprob: -1.0 })]).collect();
        let samplers = [(); 3].map(|()| Arc::new(Sampler::greedy()));
        let mut all: Vec<&mut Context> = contexts.iter_mut().collect();
        let Poll::Ready(appended) = poll(Context::append_drawn_to_all(&mut all, &drawn, &samplers)) else {
            panic!("there is room")
        };
        let tokens: Vec<Vec<Token>> = contexts.iter().map(|context| context.tokens().to_vec()).collect();
        match appended {
            Ok(()) => assert_eq!((tokens, fits), (vec![vec![0], vec![7, 1], vec![2]], true)),
            Err(EngineError::Budget(_)) => {
                assert_eq!((tokens, fits), (vec![vec![], vec![7], vec![]], false));
                assert_eq!(account.used(Resource::HostBytes), used);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn attention_is_asked_for_in_layers_that_are_there_each_once() {
    let (engine, _served) = engine();
    let mut context = now(Context::create(&engine, owner(Budget::UNLIMITED)));
    let n_layers = engine.model().config.n_layers;
    let mut ask = |tokens: &[Token], layers: &[usize]| {
        now(context.append(tokens));
        match poll(context.ask(Ask::Attention { layers: layers.to_vec() })) {
            Poll::Ready(Err(error)) => error.to_string(),
            other => panic!("{layers:?}: {:?}", other.is_ready()),
        }
    };
    assert_eq!(ask(&[], &[0]), EngineError::EmptyContext.to_string());
    assert_eq!(ask(&[1, 2, 3], &[]), EngineError::NoLayers.to_string());
    let layer = n_layers;
    assert_eq!(ask(&[], &[0, layer]), EngineError::NoAttentionIn { layer, n_layers }.to_string());
    assert_eq!(
        ask(&[], &[usize::MAX]),
        EngineError::NoAttentionIn { layer: usize::MAX, n_layers }.to_string()
    );
    assert_eq!(ask(&[], &[1, 0, 1]), EngineError::LayerTwice { layer: 1 }.to_string());
    assert_eq!(ask(&[], &vec![0; 1 << 20]), EngineError::LayerTwice { layer: 0 }.to_string());

    let n_tokens_max = N_ATTENTION_TOKENS_MAX;
    let all: Vec<usize> = (0..n_layers).rev().collect();
    engine.check_attention(&all, n_tokens_max).expect("as many as there may be");
    let n_tokens = n_tokens_max + 1;
    let too_long = EngineError::AttentionTooLong { n_tokens, n_tokens_max };
    let refused = engine.check_attention(&all, n_tokens).map_err(|error| error.to_string());
    assert_eq!(refused, Err(too_long.to_string()));
}
