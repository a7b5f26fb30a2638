//! Users of a class that has more or less of what sessions count than others have.

use tokio::io::AsyncWriteExt;
use trellis_client::{Client, Error, Program, StartOptions};
use trellis_wire::{Call, ClientMessage, ErrorCode, FRAME_BYTES_MAX, FrameBuffer, Hello, ServerMessage};

use super::{ALICE, Raw, World};
use crate::accounts::Accounts;
use crate::classes::Classes;
use crate::config::Budgets;
use crate::session::{Actor, SessionLimits};

const BOB: Actor = Actor { uid: 1001, gid: 1001 };
const CAROL: Actor = Actor { uid: 1002, gid: 1002 };

/// Where each user may have two of each, Alice's class one, and Carol's three.
fn world() -> World {
    let limits =
        SessionLimits { n_connections: 2, n_detached: 2, stop_ms: 3_000, ..SessionLimits::default() };
    let world = World::with(limits);
    let of_class = |name: &str, Actor { uid, .. }, most: u32| {
        format!("[{name}]\nusers = [{uid}]\n[{name}.limits]\nn_connections = {most}\nn_detached = {most}\n")
    };
    let settings = of_class("few", ALICE, 1) + &of_class("many", CAROL, 3);
    let classes = Classes::of(&toml::from_str(&settings).expect("valid")).expect("there are no names in it");
    let budgets = Budgets::default();
    let accounts = Accounts::with_classes(&budgets, budgets.host_bytes(1 << 50, u64::MAX), classes);
    world.fake.accounts.set(accounts).expect("set once");
    world
}

impl World {
    async fn client_of(&self, actor: Actor) -> Client {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        self.serve_as(actor, theirs);
        Client::over(ours).await.expect("the daemon answers")
    }

    /// How many of these connections of a user are served that begin before any has said hello.
    async fn n_served(&self, actor: Actor, n_connections: usize) -> (usize, Option<u64>) {
        let mut raws: Vec<Raw> = (0..n_connections).map(|_| self.raw_of(actor)).collect();
        // Each has come in.
        tokio::task::yield_now().await;
        let (mut n_served, mut limit) = (0, None);
        for raw in &mut raws {
            let mut asked = FrameBuffer::new(FRAME_BYTES_MAX);
            asked.push(&ClientMessage::Request { id: 1, call: Call::Models }).expect("it is small");
            // One that is refused may be gone.
            let _ = raw.writer.write_all(&Hello::ours().encode()).await;
            let _ = asked.write(&mut raw.writer).await;
            Hello::read(&mut raw.stream_reader()).await.expect("also of who is refused");
            match raw.next().await {
                Some(ServerMessage::End { .. }) => n_served += 1,
                Some(ServerMessage::Fault { error }) => {
                    assert_eq!(error.code, ErrorCode::LimitExceeded, "{error:?}");
                    limit = error.limit;
                }
                other => panic!("unexpected {other:?}"),
            }
        }
        (n_served, limit)
    }
}

#[tokio::test]
async fn a_user_of_a_class_has_as_many_connections_as_that_says() {
    let world = world();
    assert_eq!(world.n_served(ALICE, 2).await, (1, Some(1)));
    assert_eq!(world.n_served(BOB, 3).await, (2, Some(2)), "of no class");
    // Until a session has begun nobody knows that it may have more.
    let first = world.client_of(CAROL).await;
    first.models().await.expect("it is served");
    assert_eq!(world.n_served(CAROL, 3).await, (2, Some(3)));
}

#[tokio::test]
async fn a_user_of_a_class_has_as_many_detached_guests_as_that_says() {
    let world = world();
    for (actor, n_max) in [(ALICE, 1), (BOB, 2), (CAROL, 3)] {
        let client = world.client_of(actor).await;
        let detach = || client.start_detached(Program::named("forever"), StartOptions::default(), |_| {});
        for _ in 0..n_max {
            detach().await.expect("it may");
        }
        let Error::Daemon(refused) = detach().await.expect_err("it has all") else { panic!("of the daemon") };
        assert_eq!(
            (refused.code, refused.name.as_deref(), refused.limit),
            (ErrorCode::LimitExceeded, Some("n_detached"), Some(n_max))
        );
    }
}
