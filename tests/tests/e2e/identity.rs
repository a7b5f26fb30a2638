//! What is one user's is not to be used, ended or even seen by another.

use std::sync::Arc;

use tokio::io::DuplexStream;
use trellis::daemon::Daemon;
use trellis::session::Actor;
use trellis_client::{Client, Event, Program, Stage};
use trellis_engine::{Context, EngineError};
use trellis_tests::daemons::{self, collect, nothing_is_held, run, started, with};
use trellis_tests::engines::{block_on, owner};
use trellis_tests::guests;
use trellis_wire::{
    Call, ClientMessage, ComponentHash, ErrorBody, FRAME_BYTES_MAX, FrameBuffer, FrameReader, Hello, Outcome,
    ServerMessage, Start, negotiate,
};

use crate::exe;

const ALICE: Actor = Actor { uid: 40_001, gid: 40_001 };
const BOB: Actor = Actor { uid: 40_002, gid: 40_002 };

fn connection(daemon: &Arc<Daemon>, actor: Actor) -> DuplexStream {
    let (near, far) = tokio::io::duplex(64 << 10);
    let daemon = daemon.clone();
    tokio::spawn(async move { daemon.sessions().serve(far, actor, daemon.shutdown().clone()).await });
    near
}

pub(crate) async fn client(daemon: &Arc<Daemon>, actor: Actor) -> Client {
    Client::over(connection(daemon, actor)).await.expect("connected")
}

/// Asks for a component by its hash alone, and runs it to its end.
pub(crate) async fn by_hash(daemon: &Arc<Daemon>, actor: Actor, wasm: &[u8]) -> Result<(), ErrorBody> {
    let program = trellis_wire::Program::Component { hash: hash_of(wasm) };
    let start = Start {
        program,
        arguments: vec!["exit-well".to_owned()],
        model: None,
        seed: None,
        credit_bytes: 1 << 20,
        deadline_ms: None,
        label: None,
        is_recorded: false,
        is_profiled: false,
    };
    ask(daemon, actor, Call::Start(start)).await
}

pub(crate) fn hash_of(wasm: &[u8]) -> ComponentHash {
    ComponentHash(*blake3::hash(wasm).as_bytes())
}

/// Asks for one thing, and waits for its end.
pub(crate) async fn ask(daemon: &Arc<Daemon>, actor: Actor, call: Call) -> Result<(), ErrorBody> {
    let mut stream = connection(daemon, actor);
    Hello::ours().write(&mut stream).await.expect("written");
    let theirs = Hello::read(&mut stream).await.expect("the daemon says hello");
    negotiate(&Hello::ours(), &theirs).expect("of one build");
    let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
    frames.push(&ClientMessage::Request { id: 1, call }).expect("it fits");
    frames.write(&mut stream).await.expect("written");
    let mut reader = FrameReader::new(stream, FRAME_BYTES_MAX);
    loop {
        match reader.next().await.expect("a whole frame").expect("an end") {
            ServerMessage::End { outcome: Outcome::Ok { .. }, .. } => return Ok(()),
            ServerMessage::End { outcome: Outcome::Error { error }, .. } => return Err(error),
            _ => {}
        }
    }
}

#[test]
fn a_component_is_started_by_its_hash_only_by_who_has_shown_to_have_it() {
    block_on(async {
        let daemon = Arc::new(daemons::start(&daemons::config(exe())));
        let wasm = guests::hostile();
        assert!(run(&client(&daemon, ALICE).await, &wasm, with(&["exit-well"])).await.error.is_none());
        by_hash(&daemon, ALICE, &wasm).await.expect("its own");

        // It is compiled, and nobody can tell: the answer is that for a component that is nowhere.
        let refused = by_hash(&daemon, BOB, &wasm).await.expect_err("another user's");
        let unknown = by_hash(&daemon, BOB, b"nowhere").await.expect_err("nobody's");
        for (error, wasm) in [(&refused, &wasm[..]), (&unknown, b"nowhere")] {
            let hash = blake3::hash(wasm).to_string();
            assert_eq!(
                (error.code.as_str(), error.message.as_str(), error.value.as_deref()),
                ("unknown_component", &*format!("component {hash} has to be uploaded"), Some(&*hash))
            );
        }

        // Who has it is asked for all of it.
        let bob = client(&daemon, BOB).await;
        let mut guest =
            bob.start(Program::wasm(wasm.clone()), with(&["exit-well"])).await.expect("connected");
        let mut n_uploaded = 0;
        while let Some(event) = guest.next().await {
            if let Event::Progress { stage: Stage::Upload, done, .. } = event.expect("it ends well") {
                n_uploaded = done;
            }
        }
        assert_eq!(n_uploaded, wasm.len() as u64);
        by_hash(&daemon, BOB, &wasm).await.expect("its own from then on");
        drop(bob);
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn guests_of_others_are_neither_seen_nor_stopped() {
    block_on(async {
        let daemon = Arc::new(daemons::start(&daemons::config(exe())));
        let (alice, bob) = (client(&daemon, ALICE).await, client(&daemon, BOB).await);
        let program = Program::wasm(guests::hostile());
        let mut guest = alice.start(program, with(&["wait-for-messages"])).await.expect("connected");
        let id = started(&mut guest).await;
        assert_eq!(alice.ps().await.expect("it answers").len(), 1);
        assert!(bob.ps().await.expect("it answers").is_empty());
        let said = |error: trellis_client::Error| error.to_string();
        let refused = said(bob.stop(id).await.expect_err("another user's"));
        let unknown = said(bob.stop(id + 1).await.expect_err("nobody's"));
        assert_eq!(refused.replace(&id.to_string(), "N"), unknown.replace(&(id + 1).to_string(), "N"));
        bob.shutdown().await.expect_err("not the operator");
        alice.stop(id).await.expect("its own");
        assert_eq!(collect(guest).await.reason().code.as_str(), "stopped");
        drop((alice, bob));
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn what_one_user_saves_is_nothing_to_another() {
    block_on(async {
        let daemon = daemons::start(&daemons::config(exe()));
        let model = daemon.model(Some("tiny")).expect("it is loaded");
        let mut context = Context::create(&model, owner(ALICE.uid)).await.expect("it is open");
        context.append(&[1, 2, 3]).await.expect("there is room");
        context.save("plans").await.expect("saved");
        let opened = Context::open(&model, owner(BOB.uid), "plans").await.map(drop);
        assert!(matches!(&opened, Err(EngineError::NotSaved { name }) if name == "plans"), "{opened:?}");
        let forgotten = model.forget(&owner(BOB.uid), "plans").await;
        assert!(matches!(&forgotten, Err(EngineError::NotSaved { .. })), "{forgotten:?}");
        drop(Context::open(&model, owner(ALICE.uid), "plans").await.expect("its own"));
        model.forget(&owner(ALICE.uid), "plans").await.expect("its own");
        drop(context);
        nothing_is_held(&daemon).await;
    });
}
