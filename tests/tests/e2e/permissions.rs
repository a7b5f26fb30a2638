//! Who may do what, of users that the configuration names.

use std::sync::Arc;

use trellis::config::{Config, NameOrId, PermissionSettings, Who};
use trellis::daemon::Daemon;
use trellis::session::Actor;
use trellis_client::{Client, Error, Program, StartOptions};
use trellis_tests::daemons::{self, collect, nothing_is_held, run, started, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;
use trellis_wire::{Call, ErrorBody};

use crate::exe;
use crate::identity::{ask, by_hash, client, hash_of};

const ALICE: Actor = Actor { uid: 40_001, gid: 40_001 };
const BOB: Actor = Actor { uid: 40_002, gid: 40_002 };
const CAROL: Actor = Actor { uid: 40_003, gid: 40_003 };

fn users(actors: &[Actor]) -> Vec<Who> {
    actors.iter().map(|actor| Who::User(NameOrId::Id(actor.uid))).collect()
}

fn daemon(permissions: PermissionSettings) -> Arc<Daemon> {
    Arc::new(daemons::start(&Config { permissions, ..daemons::config(exe()) }))
}

/// The permission that was lacking.
fn lacking(error: &ErrorBody) -> &str {
    assert_eq!(error.code.as_str(), "permission_denied", "{error:?}");
    assert!(error.message.contains("its operator"), "{error:?}");
    error.name.as_deref().expect("it is named")
}

fn of_daemon(error: Error) -> ErrorBody {
    match error {
        Error::Daemon(body) => *body,
        error => panic!("no error of the daemon: {error:?}"),
    }
}

async fn permissions(client: &Client) -> Vec<String> {
    client.info().await.expect("it answers").permissions.expect("it says so")
}

#[test]
fn guests_are_run_by_who_may() {
    block_on(async {
        // The machine knows none of these users: a group is that of the connection then.
        let run = [users(&[ALICE]), vec![Who::Group(NameOrId::Id(CAROL.gid))]].concat();
        let daemon = daemon(PermissionSettings { run, ..PermissionSettings::default() });
        let wasm = guests::hostile();
        for (actor, may) in [(ALICE, true), (BOB, false), (CAROL, true), (Actor::this_process(), true)] {
            let client = client(&daemon, actor).await;
            let ended = run_well(&client, &wasm).await;
            assert_eq!(ended.as_ref().map_err(lacking), if may { Ok(&()) } else { Err("run") }, "{actor:?}");
            assert_eq!(permissions(&client).await.contains(&"run".to_owned()), may, "{actor:?}");
            assert!(!client.models().await.expect("anybody may look").is_empty());
        }
        nothing_is_held(&daemon).await;
    });
}

async fn run_well(client: &Client, wasm: &[u8]) -> Result<(), ErrorBody> {
    run(client, wasm, with(&["exit-well"])).await.error.map_or(Ok(()), |error| Err(of_daemon(error)))
}

#[test]
fn who_brings_no_components_runs_those_that_are_registered_and_no_others() {
    block_on(async {
        let folder = tempfile::tempdir().expect("a folder");
        let (wasm, other) = (guests::hostile(), guests::hostile_anew(40_002));
        std::fs::write(folder.path().join("hostile.wasm"), &wasm).expect("written");
        let permissions = PermissionSettings { upload: users(&[ALICE]), ..PermissionSettings::default() };
        let guests_dir = Some(folder.path().to_owned());
        let config = Config { permissions, guests_dir, ..daemons::config(exe()) };
        let daemon = Arc::new(daemons::start(&config));
        let (alice, bob) = (client(&daemon, ALICE).await, client(&daemon, BOB).await);
        run_well(&alice, &other).await.expect("it may");

        // By name, and by the hash of what is registered, whether or not it is recorded.
        for program in [Program::named("hostile"), Program::wasm(wasm.clone())] {
            let recorded = StartOptions { is_recorded: true, ..with(&["exit-well"]) };
            let guest = bob.start(program, recorded).await.expect("connected");
            assert!(!collect(guest).await.well().recorded.is_empty());
        }
        // Not what another user has brought, in no way, and no byte of it is taken.
        assert_eq!(lacking(&run_well(&bob, &other).await.expect_err("it may not")), "upload");
        assert_eq!(lacking(&by_hash(&daemon, BOB, &other).await.expect_err("it may not")), "upload");
        let upload = Call::Upload { hash: hash_of(&other), n_bytes: other.len() as u64 };
        assert_eq!(lacking(&ask(&daemon, BOB, upload).await.expect_err("it may not")), "upload");
        drop((alice, bob));
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn models_are_loaded_and_unloaded_by_who_may() {
    block_on(async {
        let load = users(&[ALICE]);
        let daemon = daemon(PermissionSettings { load, ..PermissionSettings::default() });
        let (alice, bob) = (client(&daemon, ALICE).await, client(&daemon, BOB).await);
        let refused = [
            bob.load_model("draft", None, |_, _| {}).await.expect_err("it may not"),
            bob.fit_model("draft", None).await.expect_err("it may not"),
            bob.unload_model("tiny", None).await.expect_err("it may not"),
        ];
        for error in refused {
            assert_eq!(lacking(&of_daemon(error)), "load");
        }
        assert!(alice.fit_model("draft", None).await.expect("it may").fits);
        assert_eq!(alice.load_model("draft", None, |_, _| {}).await.expect("it may"), "draft");
        alice.unload_model("draft", None).await.expect("it may");
        let error = of_daemon(alice.shutdown().await.expect_err("that is the operator's"));
        assert_eq!((error.code.as_str(), error.name.as_deref()), ("permission_denied", Some("operate")));
    });
}

#[test]
fn guests_of_others_are_seen_and_stopped_by_who_may() {
    block_on(async {
        let (see_others, stop_others) = (users(&[BOB]), users(&[CAROL]));
        let settings = PermissionSettings { see_others, stop_others, ..PermissionSettings::default() };
        let daemon = daemon(settings);
        let (alice, bob, carol) =
            (client(&daemon, ALICE).await, client(&daemon, BOB).await, client(&daemon, CAROL).await);
        let program = Program::wasm(guests::hostile());
        let mut guest = alice.start(program, with(&["wait-for-messages"])).await.expect("connected");
        let id = started(&mut guest).await;
        let seen = bob.ps().await.expect("it answers");
        assert_eq!(
            seen.iter().map(|guest| (guest.guest_id, guest.uid)).collect::<Vec<_>>(),
            [(id, ALICE.uid)]
        );
        assert!(carol.ps().await.expect("it answers").is_empty());
        for (client, sees) in [(&alice, false), (&bob, true), (&carol, false)] {
            let limits = client.limits().await.expect("it answers");
            assert_eq!(limits.iter().any(|limit| limit.used_by_all.is_some()), sees);
        }
        let error = of_daemon(bob.stop(id).await.expect_err("it sees them, and no more"));
        assert_eq!(error.code.as_str(), "unknown_guest");
        carol.stop(id).await.expect("it may");
        assert_eq!(collect(guest).await.reason().code.as_str(), "stopped");
        assert_eq!(permissions(&bob).await, ["run", "upload", "see_others"]);
        assert_eq!(permissions(&carol).await, ["run", "upload", "stop_others"]);
        drop((alice, bob, carol));
        nothing_is_held(&daemon).await;
    });
}
