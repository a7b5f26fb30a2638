//! Models that leave while something else happens: a device that fails, a load that has its turn, guests of their own
//! mind.

use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use trellis::config::{Config, Device, OnDeviceFailure};
use trellis::daemon::{BackendWrap, Daemon, Seams};
use trellis::ipc::Listener;
use trellis_client::{Client, ErrorCode, Event, Guest, Program, StartOptions};
use trellis_engine::model::{Model, ModelSource};
use trellis_engine::{Ask, Context, EngineError};
use trellis_tests::daemons::{self, Ended, Served, collect, nothing_is_held, run, until, with};
use trellis_tests::engines::{block_on, encode, owner};
use trellis_tests::faulty::{Fault, Faults};
use trellis_tests::{guests, pack};

use crate::exe;

const PROMPT: &str = "Once upon a time";
const HOUR: Option<Duration> = Some(Duration::from_secs(3600));
const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

fn config(models: &[&str]) -> Config {
    let models = models.iter().map(|&model| model.to_owned()).collect();
    Config { models, ..daemons::config(exe()) }
}

fn start_with(wrap: BackendWrap, config: &Config) -> Daemon {
    let seams = Seams { wrap: Some(wrap), ..Seams::default() };
    Daemon::start_with(config, seams, &|_| {}).expect("it starts")
}

/// Loads that are held up: each says that it has begun, and waits until it may go on.
struct Gate {
    begun: Receiver<String>,
    go: Sender<()>,
}

impl Gate {
    /// One for all loads after the first `n_free`.
    fn new(n_free: usize) -> (Self, BackendWrap) {
        let ((says, begun), (go, wait)) = (channel(), channel());
        let (says, wait, n_loads) = (Mutex::new(says), Mutex::new(wait), AtomicUsize::new(0));
        let wrap: BackendWrap = Arc::new(move |name, backend| {
            if n_loads.fetch_add(1, Ordering::Relaxed) >= n_free {
                // Where the test has ended there is no receiver, and nothing is held up.
                let _ = says.lock().expect("no panic").send(name.to_owned());
                let _ = wait.lock().expect("no panic").recv();
            }
            backend
        });
        (Self { begun, go }, wrap)
    }

    async fn begun(&self) -> String {
        let mut name = None;
        until("a load has begun", async || {
            name = self.begun.try_recv().ok();
            name.is_some()
        })
        .await;
        name.expect("it has begun")
    }

    fn go_on(&self) {
        self.go.send(()).expect("it waits");
    }
}

async fn complete(client: &Client, model: Option<&str>) -> Ended {
    let arguments = ["--max-tokens", "20", "--temperature=0.8", PROMPT];
    let options = StartOptions { model: model.map(str::to_owned), ..with(&arguments) };
    run(client, &guests::example("complete"), options).await
}

async fn names(client: &Client) -> Vec<(String, String)> {
    let models = client.models().await.expect("it answers");
    models.into_iter().map(|model| (model.name, model.state)).collect()
}

fn unload(client: &Client, model: &'static str, drain: Option<Duration>) -> Unloading {
    let client = client.clone();
    tokio::spawn(async move { client.unload_model(model, drain).await })
}

type Unloading = tokio::task::JoinHandle<Result<Option<String>, trellis_client::Error>>;

#[test]
fn a_device_that_fails_while_its_only_model_drains_is_seen() {
    block_on(async {
        let faults = Faults::default();
        let daemon = start_with(faults.of_model("tiny"), &config(&["tiny"]));
        let client = daemon.connect().await.expect("connected");
        let tiny = daemon.model(None).expect("it is loaded");
        let mut held = Context::create(&tiny, owner(7)).await.expect("it is open");
        held.append(&encode(&tiny, PROMPT)).await.expect("there is room");
        let unloading = unload(&client, "tiny", HOUR);
        until("it drains", async || daemon.model(None).is_none()).await;
        assert!(daemon.failure().is_none());
        faults.inject(0, 1, Fault::Device);
        let asked = async { held.ask(Ask::Prefill).await?.answer().await };
        assert!(matches!(asked.await, Err(EngineError::Failed(_))));
        let seen = daemon.failure().expect("it is seen");
        assert!(seen.to_string().contains("injected"), "{seen}");
        assert_eq!(daemon.failed().await.to_string(), seen.to_string());
        drop(held);
        let error = unloading.await.expect("no panic").expect_err("it cannot be taken off");
        assert!(error.is_retryable(), "{error}");
        assert!(names(&client).await.is_empty());
        // Also when the model is gone, for clients that ask and for clients that start something.
        assert_eq!(daemon.failure().expect("it stays so").to_string(), seen.to_string());
        assert_eq!(client.info().await.expect("it answers").failure, Some(seen.to_string()));
        let refused = complete(&client, None).await;
        assert_eq!(refused.reason().code, ErrorCode::DeviceFailed, "{refused:?}");
    });
}

#[test]
fn a_model_that_is_unloaded_while_its_device_is_opened_again_does_not_come_back() {
    block_on(async {
        // Both at the start, and tiny when the device is opened again.
        let (gate, held_up) = Gate::new(3);
        let faults = Faults::default();
        let faulty = faults.of_model("tiny");
        let wrap: BackendWrap = Arc::new(move |name, backend| held_up(name, faulty(name, backend)));
        // Never a card: to reset one takes it from every other test of this process.
        let config = Config {
            device: Device::Cpu,
            on_device_failure: OnDeviceFailure::Reopen,
            ..config(&["tiny", "draft"])
        };
        let daemon = Arc::new(start_with(wrap, &config));
        let folder = tempfile::tempdir().expect("a folder");
        let listener = Listener::bind(&folder.path().join("trellis.sock"), 0o700).expect("a free place");
        let serving = daemon.clone();
        tokio::spawn(async move { serving.serve(listener).await });
        let client = daemon.connect().await.expect("connected");
        let expected = complete(&client, Some("tiny")).await.well().text;
        faults.inject(3, 1, Fault::Device);
        assert_eq!(complete(&client, Some("tiny")).await.reason().code, ErrorCode::DeviceFailed);

        assert_eq!(gate.begun().await, "draft");
        let unloading = unload(&client, "draft", AT_ONCE);
        until("it is on its way out", async || daemon.model(Some("draft")).is_none()).await;
        gate.go_on();
        let default = unloading.await.expect("no panic").expect("it goes");
        assert_eq!(default.as_deref(), Some("tiny"));
        assert_eq!(names(&client).await, [("tiny".to_owned(), "loaded".to_owned())]);
        assert_eq!(complete(&client, None).await.well().text, expected);
        nothing_is_held(&daemon).await;
        // It is gone, and not only out of sight.
        gate.go_on();
        client.load_model("draft", None, |_, _| {}).await.expect("there is room for it");
    });
}

#[test]
fn guests_of_an_unloaded_model_end_in_time_whatever_else_is_being_loaded() {
    block_on(async {
        let (gate, wrap) = Gate::new(1);
        let daemon = start_with(wrap, &config(&["tiny"]));
        let client = daemon.connect().await.expect("connected");
        let mut guest = client
            .start(Program::wasm(guests::hostile()), with(&["endless"]))
            .await
            .expect("the connection stands");
        daemons::started(&mut guest).await;
        let tiny = daemon.model(None).expect("it is loaded");
        until("it has a context", async || tiny.stats().await.expect("it lives").n_contexts > 0).await;
        let other = client.clone();
        let loading = tokio::spawn(async move { other.load_model("draft", None, |_, _| {}).await });
        assert_eq!(gate.begun().await, "draft");
        let unloading = unload(&client, "tiny", AT_ONCE);
        let ended = tokio::time::timeout(Duration::from_secs(60), collect(guest)).await.expect("it ends");
        assert_eq!(ended.reason().code, ErrorCode::ModelUnloaded, "{ended:?}");
        let unloaded =
            tokio::time::timeout(daemons::PATIENCE, unloading).await.expect("it is held up by nobody");
        assert_eq!(unloaded.expect("no panic").expect("it goes"), None);
        assert!(!loading.is_finished());
        gate.go_on();
        assert_eq!(loading.await.expect("no panic").expect("it loads"), "draft");
        nothing_is_held(&daemon).await;
    });
}

/// A copy of a bundled model, under another name.
fn folder_of(model: &str, below: &Path, name: &str) -> String {
    let folder = below.join(name);
    std::fs::create_dir(&folder).expect("made");
    for file in std::fs::read_dir(pack::root().join("daemon/models").join(model)).expect("it is there") {
        let file = file.expect("it can be read").path();
        std::fs::copy(&file, folder.join(file.file_name().expect("a name"))).expect("copied");
    }
    folder.to_str().expect("UTF-8").to_owned()
}

#[test]
fn a_load_that_was_given_up_is_found_by_no_guest_while_another_has_its_turn() {
    block_on(async {
        let folder = tempfile::tempdir().expect("a folder");
        let other_path = folder_of("draft", folder.path(), "other");
        let (gate, wrap) = Gate::new(1);
        let daemon = start_with(wrap, &config(&["tiny"]));
        let client = daemon.connect().await.expect("connected");
        let load = |path: &str| {
            let (client, path) = (client.clone(), path.to_owned());
            tokio::spawn(async move { client.load_model(&path, None, |_, _| {}).await })
        };
        let given_up = load("draft");
        assert_eq!(gate.begun().await, "draft");
        let second = load(&other_path);
        // That the second is opened and stands behind the first cannot be seen; here it is opened several times meanwhile.
        for _ in 0..5 {
            let source = ModelSource::Folder(other_path.clone().into());
            let _ = Model::open("other", &source).expect("a whole model");
        }
        given_up.abort();
        let _ = given_up.await;
        // What is asked later on the same connection is answered later.
        let _ = names(&client).await;
        gate.go_on();
        assert_eq!(gate.begun().await, "other");
        let found = names(&client).await;
        assert!(!found.contains(&("draft".to_owned(), "loaded".to_owned())), "{found:?}");
        assert!(daemon.model(Some("draft")).is_none());
        gate.go_on();
        assert_eq!(second.await.expect("no panic").expect("it loads"), "other");
        until("it is gone", async || names(&client).await.len() == 2).await;
    });
}

#[test]
fn a_model_on_its_way_out_says_so_and_may_be_asked_for_again() {
    block_on(async {
        let daemon = daemons::start(&config(&["tiny", "draft"]));
        let client = daemon.connect().await.expect("connected");
        let draft = daemon.model(Some("draft")).expect("it is loaded");
        let held = Context::create(&draft, owner(7)).await.expect("it is open");
        let unloading = unload(&client, "draft", HOUR);
        until("it drains", async || daemon.model(Some("draft")).is_none()).await;
        let refused = client.load_model("draft", None, |_, _| {}).await.expect_err("it is not gone");
        assert_eq!(refused.code(), Some(&ErrorCode::ModelLeaving), "{refused}");
        assert!(refused.is_retryable());
        let refused = complete(&client, Some("draft")).await;
        assert_eq!(refused.reason().code, ErrorCode::ModelLeaving, "{refused:?}");
        assert!(refused.reason().message.contains("is being unloaded"), "{refused:?}");
        drop(held);
        unloading.await.expect("no panic").expect("it goes");
        assert_eq!(complete(&client, Some("draft")).await.reason().code, ErrorCode::UnknownModel);
        client.load_model("draft", None, |_, _| {}).await.expect("it loads");
        let _ = complete(&client, Some("draft")).await.well();
    });
}

/// A guest that has opened `draft` and does what it is told.
async fn puppet(client: &Client) -> Guest {
    let mut guest = client
        .start(Program::wasm(guests::hostile()), with(&["puppet", "draft"]))
        .await
        .expect("the connection stands");
    daemons::started(&mut guest).await;
    guest
}

#[test]
fn while_a_model_drains_guests_end_by_their_own_doing_or_by_what_they_are_refused() {
    block_on(async {
        let daemon = daemons::start(&config(&["tiny", "draft"]));
        let client = daemon.connect().await.expect("connected");
        let draft = daemon.model(Some("draft")).expect("it is loaded");
        let orders = [
            ("panic", ErrorCode::GuestTrapped),
            ("fail", ErrorCode::GuestFailed),
            ("context", ErrorCode::ModelUnloaded),
            ("model", ErrorCode::ModelUnloaded),
        ];
        let mut puppets = Vec::new();
        for _ in 0..=orders.len() {
            puppets.push(puppet(&client).await);
        }
        until("all have it", async || draft.stats().await.expect("it lives").n_contexts == puppets.len())
            .await;
        let unloading = unload(&client, "draft", HOUR);
        until("it drains", async || daemon.model(Some("draft")).is_none()).await;
        let stopped = puppets.pop().expect("one more than orders");
        for (guest, (order, code)) in puppets.into_iter().zip(orders) {
            guest.send(order).await.expect("it reads");
            let ended = collect(guest).await;
            assert_eq!(ended.reason().code, code, "{order}: {ended:?}");
        }
        stopped.cancel();
        let ended = collect(stopped).await;
        assert_ne!(ended.reason().code, ErrorCode::ModelUnloaded, "{ended:?}");
        unloading.await.expect("no panic").expect("it goes");
    });
}

#[test]
fn whoever_has_only_looked_at_a_model_neither_holds_it_up_nor_goes_with_it() {
    block_on(async {
        let daemon = daemons::start(&config(&["tiny", "draft"]));
        let client = daemon.connect().await.expect("connected");
        // One by its name, one by default; a third never looks at what was chosen for it.
        let starts = [(vec!["visitor", "draft"], None), (vec!["visitor", "draft"], Some("draft"))];
        let mut guests = Vec::new();
        for (arguments, model) in starts {
            let options = StartOptions { model: model.map(str::to_owned), ..with(&arguments) };
            let mut guest =
                client.start(Program::wasm(guests::hostile()), options).await.expect("the connection stands");
            let looked = async {
                loop {
                    if let Some(Ok(Event::Text { text })) = guest.next().await {
                        return text;
                    }
                }
            };
            assert_eq!(tokio::time::timeout(daemons::PATIENCE, looked).await.expect("it looks"), "draft");
            guests.push(guest);
        }
        let options = StartOptions { model: Some("draft".to_owned()), ..with(&["echo"]) };
        let mut echo =
            client.start(Program::wasm(guests::hostile()), options).await.expect("the connection stands");
        daemons::started(&mut echo).await;
        guests.push(echo);
        let gone = unload(&client, "draft", HOUR);
        let default = tokio::time::timeout(daemons::PATIENCE, gone).await.expect("it is not waited for");
        assert_eq!(default.expect("no panic").expect("it goes").as_deref(), Some("tiny"));
        for guest in guests {
            guest.send("still here").await.expect("it reads");
            // A visitor may have gone by then.
            let _ = guest.end_messages().await;
            assert_eq!(collect(guest).await.well().text, "still here");
        }
    });
}

#[test]
fn a_default_model_that_has_failed_makes_way_for_one_that_works() {
    block_on(async {
        let faults = Faults::default();
        let daemon = start_with(faults.of_model("tiny"), &config(&["tiny", "draft"]));
        let client = daemon.connect().await.expect("connected");
        let of_draft = complete(&client, Some("draft")).await.well().text;
        let tiny = daemon.model(None).expect("it is loaded");
        assert_eq!(tiny.model().name, "tiny");
        faults.inject(0, usize::MAX, Fault::Call);
        let ended = complete(&client, None).await;
        assert!(ended.error.is_some(), "{ended:?}");
        until("it has failed", async || {
            // Each asks for one step more.
            let _ = complete(&client, Some("tiny")).await;
            tiny.failure().is_some()
        })
        .await;
        assert!(tiny.device_failure().is_none());
        assert_eq!(complete(&client, None).await.well().text, of_draft);
        let models = client.models().await.expect("it answers");
        let defaults: Vec<_> =
            models.iter().filter(|model| model.is_default).map(|model| model.name.as_str()).collect();
        assert_eq!(defaults, ["draft"]);
        // A start that names it hears what is the matter, as does one that finds no other.
        assert_eq!(complete(&client, Some("tiny")).await.reason().code, ErrorCode::EngineFailed);
        client.unload_model("draft", AT_ONCE).await.expect("it goes");
        let ended = complete(&client, None).await;
        assert_eq!(ended.reason().code, ErrorCode::EngineFailed, "{ended:?}");
        assert!(ended.reason().message.contains("\"tiny\" failed"), "{ended:?}");
    });
}

#[test]
fn what_a_device_has_computed_is_told_also_for_models_that_are_gone() {
    block_on(async {
        let daemon = daemons::start(&config(&["tiny", "draft"]));
        let client = daemon.connect().await.expect("connected");
        let _ = complete(&client, Some("draft")).await.well();
        let models = client.models().await.expect("it answers");
        let draft = models.iter().find(|model| model.name == "draft").expect("it is loaded");
        assert!(
            draft.computed.n_steps > 0 && draft.busy_ms > 0 && draft.computed.n_tokens >= 20,
            "{draft:?}"
        );
        let device = async || {
            let mut info = client.info().await.expect("it answers");
            assert_eq!(info.devices.len(), 1, "{info:?}");
            info.devices.remove(0)
        };
        let before = device().await;
        assert_eq!(before.models, ["tiny", "draft"]);
        assert!(before.busy_ms >= draft.busy_ms && before.open_ms >= before.busy_ms, "{before:?}");
        client.unload_model("draft", AT_ONCE).await.expect("it goes");
        let after = device().await;
        assert_eq!(after.models, ["tiny"]);
        assert!(after.busy_ms >= draft.busy_ms && after.open_ms >= before.open_ms, "{after:?}");
    });
}

/// A process that is killed when its test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_command_line_shows_what_leaves_and_what_may_be_tried_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let component = |name: &str, wasm: Vec<u8>| {
        let path = folder.path().join(name);
        std::fs::write(&path, wasm).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let hostile = component("hostile.wasm", guests::hostile());
    let complete = component("complete.wasm", guests::example("complete"));
    let served = Served::start_with(exe(), &config(&["tiny", "draft"]), &[]);
    let trellis = |words: &[&str]| {
        let output = daemons::output(&mut served.trellis(words));
        let text = String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8");
        (text, output.status.code())
    };
    let shows = |what: &str, words: &[&str], text: &str| {
        let begun = Instant::now();
        while !trellis(words).0.contains(text) {
            assert!(begun.elapsed() < daemons::PATIENCE, "{what}");
        }
    };
    let mut puppet = served.trellis(&["run", &hostile, "puppet", "draft"]);
    let mut puppet = Running(puppet.stdin(Stdio::piped()).spawn().expect("it runs"));
    shows("it has a context", &["models", "--json"], "\"n_contexts\":1");
    let mut unload = served.trellis(&["unload", "draft", "--drain", "3600"]);
    let mut unload = Running(unload.spawn().expect("it runs"));
    shows("it drains", &["info"], "draft (f32, draining)");
    let again = Some(i32::from(trellis::cli::TRY_AGAIN));
    let (text, status) = trellis(&["load", "draft"]);
    assert!(text.contains("is being unloaded") && status == again, "{text}");
    let (text, status) = trellis(&["run", "--no-stdin", "--model", "draft", &complete, PROMPT]);
    assert!(text.contains("is unloading its model \"draft\"") && status == again, "{text}");
    // The same of the user's own daemon, which is found without being named.
    let runtime = folder.path().join("runtime");
    std::fs::create_dir_all(runtime.join("trellis")).expect("made");
    std::os::unix::fs::symlink(served.socket(), runtime.join("trellis/trellis.sock")).expect("made");
    let mut found = daemons::trellis(exe());
    found.env("XDG_RUNTIME_DIR", &runtime);
    let output = daemons::output(found.args(["run", "--no-stdin", "--model", "draft", &complete, PROMPT]));
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(text.contains("is unloading its model \"draft\"") && output.status.code() == again, "{text}");
    // It is told nothing, and ends.
    drop(puppet.0.stdin.take());
    assert!(daemons::wait(&mut puppet.0).success());
    assert!(daemons::wait(&mut unload.0).success());
    let (text, _) = trellis(&["info"]);
    assert!(text.contains("models    tiny (f32, default)\n") && text.contains(" busy for "), "{text}");
}
