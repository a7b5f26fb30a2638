//! Every request ends exactly once, whatever happens around it, in whatever order.

use std::collections::HashSet;

use proptest::prelude::*;
use trellis_wire::{Call, ClientMessage, ServerMessage};

use super::World;
use crate::guest::GuestLimits;
use crate::session::SessionLimits;

#[derive(Clone, Debug)]
enum Action {
    Start { name: &'static str, credit_bytes: u64 },
    Ask(Call),
    Cancel(prop::sample::Index),
    Credit(prop::sample::Index, u64),
    Message(prop::sample::Index),
    EndMessages(prop::sample::Index),
    Chunk(prop::sample::Index),
    Pause,
}

fn action() -> impl Strategy<Value = Action> {
    let name = prop::sample::select(vec![
        "count",
        "forever",
        "flood",
        "echo",
        "fail",
        "nowhere",
        "slow start",
        "panic",
    ]);
    let hash = trellis_wire::ComponentHash(*blake3::hash(b"a").as_bytes());
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (name, 0_u64..5000).prop_map(|(name, credit_bytes)| Action::Start { name, credit_bytes }),
        1 => prop::sample::select(vec![Call::Models, Call::Guests, Call::Stop { guest_id: 2 }, Call::Unknown])
            .prop_map(Action::Ask),
        1 => (1_u64..3).prop_map(move |n_bytes| Action::Ask(Call::Upload { hash, n_bytes })),
        2 => index().prop_map(Action::Cancel),
        2 => (index(), 0_u64..5000).prop_map(|(at, n_bytes)| Action::Credit(at, n_bytes)),
        2 => index().prop_map(Action::Message),
        1 => index().prop_map(Action::EndMessages),
        1 => index().prop_map(Action::Chunk),
        2 => Just(Action::Pause),
    ]
}

async fn play(actions: Vec<Action>) {
    let world = World::with_guests(
        SessionLimits { n_requests: 12, ..SessionLimits::default() },
        GuestLimits { n_messages: 2, ..GuestLimits::default() },
    );
    let mut raw = world.raw().await;
    let mut n_requests = 0;
    let pick = |at: prop::sample::Index, n_requests: u64| 1 + at.index(n_requests as usize + 2) as u64;
    for action in actions {
        let message = match action {
            Action::Start { name, credit_bytes } => {
                n_requests += 1;
                raw.start(n_requests, name, "50", credit_bytes).await;
                continue;
            }
            Action::Ask(call) => {
                n_requests += 1;
                ClientMessage::Request { id: n_requests, call }
            }
            Action::Message(at) => {
                let to = pick(at, n_requests);
                n_requests += 1;
                ClientMessage::Request { id: n_requests, call: Call::Message { to, text: "m".into() } }
            }
            Action::Cancel(at) => ClientMessage::Cancel { id: pick(at, n_requests) },
            Action::Credit(at, n_bytes) => ClientMessage::Credit { id: pick(at, n_requests), n_bytes },
            Action::EndMessages(at) => ClientMessage::EndMessages { id: pick(at, n_requests) },
            Action::Chunk(at) => ClientMessage::Chunk { id: pick(at, n_requests), bytes: b"a".to_vec() },
            Action::Pause => {
                tokio::task::yield_now().await;
                continue;
            }
        };
        raw.send(message).await;
    }
    for id in 1..=n_requests {
        raw.send(ClientMessage::Cancel { id }).await;
    }
    // The last request is answered after all others have been read.
    let mut ended = HashSet::new();
    while ended.len() < n_requests as usize {
        match raw.next().await.expect("still connected") {
            ServerMessage::Event { id, .. } => {
                assert!(!ended.contains(&id), "an event of request {id} after its end");
            }
            ServerMessage::End { id, .. } => assert!(ended.insert(id), "request {id} ended twice"),
            other => panic!("unexpected {other:?}"),
        }
    }
    assert!(raw.is_silent().await, "nothing comes after the last end");
    world.all_gone().await;
    drop((raw.reader, raw.frames, raw.writer));
    raw.session.await.unwrap().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_request_ends_exactly_once(actions in prop::collection::vec(action(), 1..40), n_threads in 1_usize..3) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(n_threads)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(play(actions));
    }
}
