//! Compiled code is found by the user who had the component compiled and by nobody else, so that no start tells by its time what
//! others run; what the operator brings is there for all.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use trellis::config::Config;
use trellis::daemon::Daemon;
use trellis::guest::{BroughtBy, CompileProgress, ProgramSource};
use trellis::session::Actor;
use trellis_client::{Client, Program, StartOptions};
use trellis_engine::account::ActorId;
use trellis_tests::daemons::{self, collect};
use trellis_tests::engines::block_on;

use crate::exe;

const ALICE: Actor = Actor { uid: 70_001, gid: 70_001 };
const BOB: Actor = Actor { uid: 70_002, gid: 70_002 };

/// A guest that ends well at once, and is another for each number.
fn component(number: u32) -> Bytes {
    let text = format!(
        r#"(component
            (core module $main
                (memory (export "memory") 1)
                (func (export "run") (result i32) (drop (i32.const {number})) (i32.const 16)))
            (core instance $main (instantiate $main))
            (func (export "run") (result (result (error string)))
                (canon lift (core func $main "run") (memory (core memory $main "memory")))))"#
    );
    wat::parse_str(text).expect("it is a component").into()
}

fn config(folder: &Path) -> Config {
    let guests_dir = Some(folder.join("guests"));
    Config { cache_dir: Some(folder.join("cache")), guests_dir, ..daemons::config(exe()) }
}

/// Files of compiled code.
fn n_files(folder: &Path) -> usize {
    let files = std::fs::read_dir(folder.join("cache")).expect("it is made at the start");
    let names = files.map(|file| file.expect("it is there").path());
    names.filter(|path| path.extension().is_some_and(|extension| extension == "cwasm")).count()
}

/// Where the code came from as this user had a component made ready.
async fn source(daemon: &Daemon, actor: Actor, brought: BroughtBy, wasm: &Bytes) -> ProgramSource {
    let mut source = None;
    let told = |progress| {
        if let CompileProgress::Done { source: from } = progress {
            source = Some(from);
        }
    };
    let compiled = daemon.service().host().compile(ActorId(actor.uid), brought, wasm.clone(), told).await;
    compiled.expect("it compiles");
    source.expect("it is told")
}

async fn client(daemon: &Arc<Daemon>, actor: Actor) -> Client {
    let (near, far) = tokio::io::duplex(64 << 10);
    let daemon = daemon.clone();
    tokio::spawn(async move { daemon.sessions().serve(far, actor, daemon.shutdown().clone()).await });
    Client::over(near).await.expect("connected")
}

async fn run(client: &Client, program: Program) {
    let guest = client.start(program, StartOptions::default()).await.expect("the connection stands");
    let _ = collect(guest).await.well();
}

#[test]
fn what_a_user_had_compiled_is_compiled_anew_for_another_and_not_for_himself() {
    use BroughtBy::{Operator, User};
    use ProgramSource::{Compiler, Disk, Memory};

    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("guests")).expect("made");
    let wasm = component(1);
    block_on(async {
        let daemon = daemons::start(&config(folder.path()));
        for (actor, brought, from) in [
            (ALICE, User, Compiler),
            (ALICE, User, Memory),
            (BOB, User, Compiler),
            (BOB, User, Memory),
            (ALICE, Operator, Compiler),
            (BOB, Operator, Memory),
        ] {
            assert_eq!(source(&daemon, actor, brought, &wasm).await, from, "{actor:?} {brought:?}");
        }
        drop(daemon);
        let daemon = daemons::start(&config(folder.path()));
        for (actor, brought, from) in
            [(BOB, User, Disk), (ALICE, User, Disk), (BOB, Operator, Disk), (ALICE, Operator, Memory)]
        {
            assert_eq!(source(&daemon, actor, brought, &wasm).await, from, "{actor:?} {brought:?}");
        }
        let carol = Actor { uid: 70_003, gid: 70_003 };
        assert_eq!(source(&daemon, carol, User, &wasm).await, Compiler, "others have it on disk");
    });
    assert_eq!(n_files(folder.path()), 4);
}

#[test]
fn who_uploads_what_another_is_having_compiled_does_not_wait_for_that() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("guests")).expect("made");
    std::fs::write(folder.path().join("guests/small.wasm"), component(2)).expect("written");
    block_on(async {
        let daemon = Arc::new(daemons::start(&config(folder.path())));
        let (alice, bob) = (client(&daemon, ALICE).await, client(&daemon, BOB).await);
        let of = |number| Program::wasm(component(number));
        // At once: work that they shared would leave one file.
        tokio::join!(run(&alice, of(1)), run(&bob, of(1)), run(&alice, of(1)));
        assert_eq!(n_files(folder.path()), 2, "one of each user");
        tokio::join!(
            run(&alice, Program::named("small")),
            run(&bob, Program::named("small")),
            run(&bob, of(1))
        );
        assert_eq!(n_files(folder.path()), 3, "one of the operator's for both");
    });
}
