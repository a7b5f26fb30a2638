//! Models that are loaded because a guest asks for them, and make room for each other.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use trellis::config::{CatalogModel, Config, Isolation};
use trellis::daemon::{BackendWrap, Daemon, Seams};
use trellis::session::Actor;
use trellis_client::{Client, ErrorCode, Event, Guest, ModelInfo, Program, Stage, StartOptions};
use trellis_engine::Context;
use trellis_tests::daemons::{self, Served, collect, nothing_is_held, run, started, until, with};
use trellis_tests::engines::{block_on, owner};
use trellis_tests::faulty::{Fault, Faults};
use trellis_tests::guests;

use crate::exe;

const COMPLETE: [&str; 4] = ["--max-tokens", "24", "--temperature=0.8", "Once upon a time"];

/// Longer than any load takes on a slow machine that does other things too.
const LONG_MS: u64 = 600_000;

fn on_demand(path: &str) -> CatalogModel {
    CatalogModel { path: path.to_owned(), ..CatalogModel::default() }
}

/// Both bundled models, loaded when somebody asks, in so many bytes.
fn config(model_bytes: Option<u64>) -> Config {
    let small = CatalogModel { aliases: vec!["small".to_owned()], ..on_demand("draft") };
    Config {
        models: Vec::new(),
        catalog: BTreeMap::from([("tiny".to_owned(), on_demand("tiny")), ("draft".to_owned(), small)]),
        model_bytes,
        model_resident_ms: 0,
        model_wait_ms: LONG_MS,
        ..daemons::config(exe())
    }
}

fn options(model: &str) -> StartOptions {
    StartOptions { model: Some(model.to_owned()), ..with(&COMPLETE) }
}

async fn complete(client: &Client, model: &str) -> daemons::Ended {
    run(client, &guests::example("complete"), options(model)).await
}

async fn start(client: &Client, model: &str) -> Guest {
    let program = Program::wasm(guests::example("complete"));
    client.start(program, options(model)).await.expect("the connection stands")
}

async fn listed(client: &Client, name: &str) -> ModelInfo {
    let models = client.models().await.expect("it answers");
    models.into_iter().find(|model| model.name == name).expect("it is in the catalog")
}

/// Bytes in which either of the two has room, and not both.
async fn room_for_one() -> u64 {
    let daemon = daemons::start(&config(None));
    let client = daemon.connect().await.expect("connected");
    let tiny = client.fit_model("tiny", None).await.expect("it answers");
    let draft = client.fit_model("small", None).await.expect("it answers");
    assert!(tiny.fits && draft.fits && draft.model == "draft", "{tiny:?} {draft:?}");
    assert_eq!(tiny.needed_bytes, tiny.weight_bytes + tiny.step_bytes + tiny.kv_bytes);
    assert_eq!(listed(&client, "tiny").await.state, "unloaded", "it was not tried");
    tiny.needed_bytes.max(draft.needed_bytes) + tiny.needed_bytes.min(draft.needed_bytes) / 2
}

/// As [`config`], where there is room for one of the two.
pub(crate) async fn one_of_two() -> Config {
    config(Some(room_for_one().await))
}

/// A client of another user.
async fn stranger(daemon: &Daemon) -> Client {
    let (near, far) = tokio::io::duplex(64 << 10);
    let actor = Actor { uid: 4711, ..Actor::this_process() };
    let (sessions, shutdown) = (daemon.sessions().clone(), daemon.shutdown().clone());
    tokio::spawn(async move { sessions.serve(far, actor, shutdown).await });
    Client::over(near).await.expect("connected")
}

/// What seeded guests of `tiny` and of `draft` send where both are loaded all the time.
async fn expected() -> [String; 2] {
    let both = Config { models: vec!["tiny".to_owned(), "draft".to_owned()], ..config(None) };
    let daemon = daemons::start(&both);
    let client = daemon.connect().await.expect("connected");
    [complete(&client, "tiny").await.well().text, complete(&client, "draft").await.well().text]
}

/// A daemon, and how often each model was loaded in it.
fn counting(config: &Config) -> (Daemon, Arc<Mutex<BTreeMap<String, usize>>>) {
    let loads = Arc::new(Mutex::new(BTreeMap::new()));
    let counted = loads.clone();
    let wrap: BackendWrap = Arc::new(move |name, backend| {
        *counted.lock().expect("no panic").entry(name.to_owned()).or_insert(0) += 1;
        backend
    });
    let seams = Seams { wrap: Some(wrap), ..Seams::default() };
    (Daemon::start_with(config, seams, &|_| {}).expect("it starts"), loads)
}

/// Eight clients use two models by turns where there is room for one.
fn two_models_by_turns(isolation: Isolation) {
    const N_CLIENTS: usize = 8;
    const N_GUESTS: usize = 4;
    block_on(async {
        let expected = expected().await;
        let (daemon, loads) = counting(&Config { isolation, ..config(Some(room_for_one().await)) });
        let clients = (0..N_CLIENTS).map(async |n_client| {
            let client = daemon.connect().await.expect("connected");
            for n_guest in 0..N_GUESTS {
                let which = (n_client + n_guest) % 2;
                let text = complete(&client, ["tiny", "small"][which]).await.well().text;
                assert_eq!(text, expected[which], "guest {n_guest} of client {n_client}");
            }
        });
        futures_util::future::join_all(clients).await;
        let loads = loads.lock().expect("no panic").clone();
        println!("{isolation:?}: {} guests, loads: {loads:?}", N_CLIENTS * N_GUESTS);
        assert!(loads["tiny"] > 1 || loads["draft"] > 1, "one was loaded again: {loads:?}");
        nothing_is_held(&daemon).await;
        assert_eq!(daemon.service().host().models().len(), 1, "there is room for one");
    });
}

#[test]
fn two_models_make_room_for_each_other_under_traffic_and_no_guest_notices() {
    two_models_by_turns(Isolation::Thread);
}

#[cfg(target_os = "linux")]
#[test]
fn models_make_room_for_guests_in_processes_of_their_own() {
    two_models_by_turns(Isolation::Process);
}

/// A guest that has opened `tiny`, and ends when it is told to.
async fn visitor(client: &Client) -> Guest {
    let program = Program::wasm(guests::hostile());
    let mut guest = client.start(program, with(&["visitor", "tiny"])).await.expect("the connection stands");
    while !matches!(guest.next().await.expect("it goes on").expect("it goes on"), Event::Text { .. }) {}
    guest
}

/// Guests of one user that hold `tiny` for as long as it takes until the next one does, and no longer than a third of a second.
async fn without_a_gap(client: &Client) {
    const SHORT: Duration = Duration::from_millis(300);
    let mut here = visitor(client).await;
    loop {
        let mut next = pin!(visitor(client));
        let there = tokio::time::timeout(SHORT, &mut next).await;
        here.end_messages().await.expect("it listens");
        let _ = collect(here).await.well();
        here = match there {
            Ok(there) => there,
            Err(_) => next.await,
        };
    }
}

/// One user's clients run short guests of `tiny` so that one is always there; another user gets `draft` within a bound all the same.
fn a_user_who_leaves_no_gap(isolation: Isolation) {
    const N_TIMES: usize = 2;
    const BOUND: Duration = Duration::from_secs(120);
    block_on(async {
        let expected = expected().await;
        let daemon = daemons::start(&Config { isolation, ..config(Some(room_for_one().await)) });
        let (client, stranger) = (daemon.connect().await.expect("connected"), stranger(&daemon).await);
        let is_over = AtomicBool::new(false);
        let completing = async {
            let mut n_guests = 0;
            while !is_over.load(Ordering::Relaxed) {
                assert_eq!(complete(&client, "tiny").await.well().text, expected[0]);
                n_guests += 1;
            }
            n_guests
        };
        let visiting = async {
            for _ in 0..N_TIMES {
                until("tiny is loaded", async || listed(&client, "tiny").await.state == "loaded").await;
                let begun = Instant::now();
                let ended = tokio::time::timeout(BOUND, complete(&stranger, "draft")).await;
                assert_eq!(ended.expect("it has its turn").well().text, expected[1]);
                println!("{isolation:?}: the other user's guest took {:?}", begun.elapsed());
            }
            is_over.store(true, Ordering::Relaxed);
        };
        let n_guests = tokio::select! {
            (n_guests, ()) = async { tokio::join!(completing, visiting) } => n_guests,
            () = without_a_gap(&client) => unreachable!("it has no end"),
        };
        println!("{isolation:?}: {n_guests} guests meanwhile");
        assert!(n_guests > N_TIMES, "nobody is kept out");
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_user_who_leaves_no_gap_keeps_no_other_out() {
    a_user_who_leaves_no_gap(Isolation::Thread);
}

#[cfg(target_os = "linux")]
#[test]
fn a_user_whose_process_leaves_no_gap_keeps_no_other_out() {
    a_user_who_leaves_no_gap(Isolation::Process);
}

/// A daemon in which loads of `draft` wait until they are told to go on, and how many there were.
fn held_up() -> (Daemon, mpsc::Sender<()>, Arc<AtomicUsize>) {
    let (go, wait) = mpsc::channel::<()>();
    let (wait, n_loads) = (Mutex::new(wait), Arc::new(AtomicUsize::new(0)));
    let counted = n_loads.clone();
    let wrap: BackendWrap = Arc::new(move |name, backend| {
        if name == "draft" {
            counted.fetch_add(1, Ordering::Relaxed);
            // Without anybody to tell them they do not wait.
            let _ = wait.lock().expect("no panic").recv();
        }
        backend
    });
    let seams = Seams { wrap: Some(wrap), ..Seams::default() };
    (Daemon::start_with(&config(None), seams, &|_| {}).expect("it starts"), go, n_loads)
}

/// Waits until the client is told that the model is being loaded.
async fn is_told(guest: &mut Guest) {
    loop {
        match guest.next().await {
            Some(Ok(Event::Progress { stage: Stage::Load, name, done, total })) if done > 0 => {
                assert_eq!((name.as_deref(), done <= total), (Some("draft"), true));
                return;
            }
            Some(Ok(Event::Progress { .. })) => {}
            other => panic!("it waits: {other:?}"),
        }
    }
}

#[test]
fn all_that_wait_for_a_model_see_one_load() {
    block_on(async {
        let (daemon, go, n_loads) = held_up();
        let client = daemon.connect().await.expect("connected");
        let mut waiting = Vec::new();
        for _ in 0..3 {
            let mut guest = start(&client, "draft").await;
            started(&mut guest).await;
            is_told(&mut guest).await;
            waiting.push(guest);
        }
        let shown = listed(&client, "draft").await;
        assert_eq!(shown.state, "loading");
        assert!(shown.loading_bytes.is_some_and(|(done, total)| done > 0 && done <= total), "{shown:?}");
        assert_eq!(shown.aliases, ["small"]);
        // One gives up, and the others do not notice.
        let left = waiting.remove(0);
        left.cancel();
        let ended = collect(left).await;
        assert_eq!(ended.reason().code, ErrorCode::Cancelled, "{ended:?}");
        drop(go);
        for guest in waiting {
            let ended = collect(guest).await.well();
            assert!(!ended.text.is_empty());
        }
        assert_eq!(n_loads.load(Ordering::Relaxed), 1);
        let shown = listed(&client, "draft").await;
        assert!(shown.state == "loaded" && shown.unused_ms.is_some() && !shown.is_pinned, "{shown:?}");
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_load_of_the_operator_is_shown_while_it_lasts() {
    block_on(async {
        let (daemon, go, _) = held_up();
        let client = daemon.connect().await.expect("connected");
        let loads = client.clone();
        let loading = tokio::spawn(async move { loads.load_model("small", None, |_, _| {}).await });
        until("it is loading", async || {
            let shown = listed(&client, "draft").await;
            shown.state == "loading" && shown.loading_bytes.is_some()
        })
        .await;
        drop(go);
        assert_eq!(loading.await.expect("no panic").expect("it is loaded"), "draft");
        assert_eq!(listed(&client, "draft").await.state, "loaded");
    });
}

#[test]
fn a_load_that_nobody_waits_for_is_taken_back() {
    block_on(async {
        let (daemon, go, _) = held_up();
        let client = daemon.connect().await.expect("connected");
        let mut guest = start(&client, "small").await;
        started(&mut guest).await;
        is_told(&mut guest).await;
        drop(guest);
        until("nobody waits", async || listed(&client, "draft").await.state == "unloaded").await;
        drop(go);
        let _ = complete(&client, "draft").await.well();
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn what_cannot_be_loaded_unloads_nothing_and_says_no_more_than_anybody_may_know() {
    block_on(async {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("config.json"), "{}").expect("written");
        let path = folder.path().to_str().expect("UTF-8").to_owned();
        let mut config = config(Some(room_for_one().await));
        config.catalog.insert("broken".to_owned(), on_demand(&path));
        let (daemon, loads) = counting(&config);
        let client = daemon.connect().await.expect("connected");
        let text = complete(&client, "tiny").await.well().text;
        let broken = complete(&client, "broken").await;
        let reason = broken.reason();
        assert_eq!(reason.code, ErrorCode::LoadFailed, "{broken:?}");
        assert!(!reason.message.contains(&path) && reason.message.contains("broken"), "{reason:?}");
        assert_eq!(complete(&client, "tiny").await.well().text, text);
        assert_eq!(loads.lock().expect("no panic").get("tiny"), Some(&1), "it has stayed");
        let unknown = complete(&client, "llama").await;
        assert_eq!(unknown.reason().code, ErrorCode::UnknownModel, "{unknown:?}");

        // A stranger may ask for what is in the catalog, and for nothing else.
        let stranger = stranger(&daemon).await;
        let fit = stranger.fit_model("small", None).await.expect("it may ask");
        assert!(fit.fits && fit.evicts == ["tiny"], "{fit:?}");
        let refused = stranger.fit_model(&path, None).await.expect_err("it may not");
        assert_eq!(refused.code(), Some(&ErrorCode::PermissionDenied), "{refused}");
        let refused = stranger.fit_model("broken", None).await.expect_err("it is broken");
        assert!(!refused.to_string().contains(&path), "{refused}");
        let _ = complete(&stranger, "small").await.well();
        assert_eq!(listed(&client, "tiny").await.state, "unloaded");
    });
}

#[test]
fn a_model_that_is_used_stays_and_who_waits_for_its_room_may_try_again() {
    block_on(async {
        let config = Config { model_wait_ms: 50, ..config(Some(room_for_one().await)) };
        let daemon = daemons::start(&config);
        let client = daemon.connect().await.expect("connected");
        let text = complete(&client, "tiny").await.well().text;
        let tiny = daemon.model(Some("tiny")).expect("it is loaded");
        let held = Context::create(&tiny, owner(7)).await.expect("it is open");
        let fit = client.fit_model("draft", None).await.expect("it answers");
        assert!(!fit.fits && fit.fits_later && fit.used == ["tiny"], "{fit:?}");
        let refused = complete(&client, "draft").await;
        let reason = refused.reason();
        assert_eq!(reason.code, ErrorCode::NoRoomNow, "{refused:?}");
        assert!(reason.code.is_retryable() && reason.message.contains("guests use tiny"), "{reason:?}");
        assert_eq!(complete(&client, "tiny").await.well().text, text);
        drop(held);
        let _ = complete(&client, "draft").await.well();
        assert!(tiny.is_unloaded());
    });
}

#[test]
fn a_pinned_model_and_one_that_was_just_loaded_stay() {
    block_on(async {
        let mut config = Config { model_wait_ms: 50, ..config(Some(room_for_one().await)) };
        config.model_resident_ms = LONG_MS;
        let daemon = daemons::start(&config);
        let client = daemon.connect().await.expect("connected");
        let _ = complete(&client, "tiny").await.well();
        // For the user for whom it was loaded it may go; for another one not yet.
        let stranger = stranger(&daemon).await;
        let refused = complete(&stranger, "draft").await;
        assert_eq!(refused.reason().code, ErrorCode::NoRoomNow, "{refused:?}");
        let _ = complete(&client, "draft").await.well();

        config.catalog.get_mut("tiny").expect("it is there").is_pinned = true;
        let daemon = daemons::start(&config);
        let client = daemon.connect().await.expect("connected");
        let _ = complete(&client, "tiny").await.well();
        let refused = complete(&client, "draft").await;
        assert_eq!(refused.reason().code, ErrorCode::LoadFailed, "{refused:?}");
        assert!(listed(&client, "tiny").await.is_pinned);
    });
}

#[test]
fn a_model_that_has_failed_by_itself_is_loaded_again() {
    block_on(async {
        let faults = Faults::default();
        let seams = Seams { wrap: Some(faults.of_model("tiny")), ..Seams::default() };
        let daemon = Daemon::start_with(&config(None), seams, &|_| {}).expect("it starts");
        let client = daemon.connect().await.expect("connected");
        let text = complete(&client, "tiny").await.well().text;
        // Another on the device works.
        let _ = complete(&client, "draft").await.well();
        let first = daemon.model(Some("tiny")).expect("it is loaded");
        faults.inject(0, usize::MAX, Fault::Call);
        until("it fails", async || {
            let _ = complete(&client, "tiny").await;
            first.failure().is_some()
        })
        .await;
        assert!(daemon.failure().is_none(), "its device works");
        let failed = complete(&client, "tiny").await;
        assert!(failed.error.is_some(), "what is wrong with it still is: {failed:?}");
        faults.inject(0, 0, Fault::Call);
        assert_eq!(complete(&client, "tiny").await.well().text, text);
        assert!(first.is_unloaded() && !daemon.model(Some("tiny")).expect("it is there").is_same(&first));
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_model_goes_when_nobody_has_used_it_for_a_while_and_comes_back() {
    block_on(async {
        let mut config = config(None);
        config.catalog.get_mut("draft").expect("it is there").idle_unload_ms = Some(50);
        config.catalog.get_mut("tiny").expect("it is there").aliases = vec!["t".to_owned()];
        let daemon = daemons::start(&config);
        let client = daemon.connect().await.expect("connected");
        for _ in 0..3 {
            let _ = complete(&client, "draft").await.well();
            until("it goes", async || listed(&client, "draft").await.state == "unloaded").await;
        }
        // The operator may load and unload such a model as any other, by any of its names.
        assert_eq!(client.load_model("t", None, |_, _| {}).await.expect("it loads"), "tiny");
        client.unload_model("t", Some(Duration::ZERO)).await.expect("it goes");
        let _ = complete(&client, "t").await.well();
        assert_eq!(listed(&client, "tiny").await.state, "loaded", "nothing unloads this one");
    });
}

#[test]
fn the_command_line_says_what_would_fit_and_runs_by_an_alias() {
    let config = Config { models: vec!["tiny".to_owned()], ..config(None) };
    let served = Served::start_with(exe(), &config, &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let component = folder.path().join("complete.wasm");
    std::fs::write(&component, guests::example("complete")).expect("written");
    let component = component.to_str().expect("UTF-8");
    let trellis = |words: &[&str]| {
        let output = daemons::output(&mut served.trellis(words));
        let text = [output.stdout, output.stderr].concat();
        (String::from_utf8(text).expect("UTF-8"), output.status.code())
    };
    let (models, _) = trellis(&["models"]);
    assert!(models.contains("unloaded, alias small") && models.contains("default"), "{models}");
    let (fit, status) = trellis(&["load", "--fit", "small"]);
    assert!(fit.starts_with("draft fits\n") && fit.contains("of weights") && status == Some(0), "{fit}");
    let (fit, status) = trellis(&["load", "--fit", "tiny"]);
    assert!(fit.starts_with("tiny is loaded\n") && status == Some(0), "{fit}");
    let (ran, status) = trellis(&["run", "--no-stdin", "--model", "small", component, "Once upon a time"]);
    assert_eq!(status, Some(0), "{ran}");
    let (models, _) = trellis(&["models"]);
    assert!(!models.contains("unloaded"), "{models}");

    let narrow = Served::start_with(exe(), &self::config(Some(1 << 20)), &[]);
    let output = daemons::output(&mut narrow.trellis(&["load", "--fit", "small"]));
    let fit = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(fit.starts_with("draft does not fit\n") && output.status.code() == Some(1), "{fit}");
}
