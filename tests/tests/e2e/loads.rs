//! Models that come and go while others are used.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trellis::config::{Config, Device};
use trellis::daemon::{BackendWrap, Daemon, Seams};
use trellis::session::Actor;
use trellis_client::{Client, ErrorCode, Program, StartOptions};
use trellis_engine::sampling::Sampler;
use trellis_engine::{
    Ahead, Answer, Ask, Context, EngineError, MaskSource, ModelHandle, Pull, RunKey, RunSettings,
};
use trellis_tests::daemons::{self, Served, collect, nothing_is_held, run, until, with};
use trellis_tests::device::device;
use trellis_tests::engines::{block_on, encode, owner};
use trellis_tests::{guests, pack};

use crate::exe;

const PROMPT: &str = "Once upon a time";
const COMPLETE: [&str; 4] = ["--max-tokens", "40", "--temperature=0.8", PROMPT];
const DRAIN: Option<Duration> = Some(Duration::ZERO);

fn config() -> Config {
    Config { models: vec!["tiny".to_owned()], ..daemons::config(exe()) }
}

async fn load(client: &Client, model: &str) {
    let mut n_done = 0;
    client.load_model(model, None, |done, _| n_done = done).await.expect("it loads");
    assert!(n_done > 0, "progress is told");
}

async fn complete(client: &Client, model: Option<&str>) -> daemons::Ended {
    let options = StartOptions { model: model.map(str::to_owned), ..with(&COMPLETE) };
    run(client, &guests::example("complete"), options).await
}

fn settings(n_tokens: usize) -> RunSettings {
    RunSettings {
        sampler: Arc::new(Sampler { seed: 3, ..Sampler::default() }),
        stop_tokens: Arc::new([]),
        n_tokens_max: Some(n_tokens),
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    }
}

/// What one stream saw.
#[derive(Debug, Default)]
struct Seen {
    tokens: Vec<u32>,
    longest_gap: Duration,
    elapsed: Duration,
}

/// Decodes so many tokens, or until it is told to stop.
async fn stream(
    model: &ModelHandle,
    user: u32,
    n_tokens: usize,
    is_over: &AtomicBool,
) -> Result<Seen, EngineError> {
    let mut context = Context::create(model, owner(user)).await?;
    context.append(&encode(model, PROMPT)).await?;
    let (mut seen, begun) = (Seen::default(), Instant::now());
    let mut last = begun;
    while seen.tokens.len() < n_tokens && !is_over.load(Ordering::Relaxed) {
        let Pull::Token(trellis_engine::batch::Drawn { candidate, .. }) =
            context.pull(RunKey(1), || settings(n_tokens)).await?
        else {
            break;
        };
        seen.tokens.push(candidate.token);
        let now = Instant::now();
        if seen.tokens.len() > 1 {
            seen.longest_gap = seen.longest_gap.max(now - last);
        }
        last = now;
    }
    seen.elapsed = begun.elapsed();
    Ok(seen)
}

fn model(daemon: &Daemon, name: &str) -> ModelHandle {
    daemon.model(Some(name)).expect("it is loaded")
}

/// The longest stream that has room in a context of `tiny`.
const N_STREAM_TOKENS: usize = 400;

#[test]
fn a_model_is_loaded_and_unloaded_under_traffic_and_nobody_else_loses_anything() {
    block_on(async {
        let daemon = Arc::new(daemons::start(&config()));
        let (tiny, is_over) = (model(&daemon, "tiny"), Arc::new(AtomicBool::new(false)));
        let alone = stream(&tiny, 1, N_STREAM_TOKENS, &is_over).await.expect("it decodes");
        let operator = daemon.connect().await.expect("connected");
        load(&operator, "draft").await;
        let expected = complete(&operator, Some("draft")).await.well().text;
        operator.unload_model("draft", DRAIN).await.expect("it goes");
        let before = tiny.stats().await.expect("it answers").n_pages;

        // One client decodes all the time; another one loads, uses and unloads.
        let (witness, over) = (tiny.clone(), is_over.clone());
        let streams = tokio::spawn(async move {
            let mut all = Vec::new();
            while !over.load(Ordering::Relaxed) {
                all.push(
                    stream(&witness, 2, N_STREAM_TOKENS, &AtomicBool::new(false)).await.expect("undisturbed"),
                );
            }
            all
        });
        for _ in 0..6 {
            load(&operator, "draft").await;
            assert_eq!(complete(&operator, Some("draft")).await.well().text, expected);
            operator.unload_model("draft", DRAIN).await.expect("it goes");
            assert!(daemon.model(Some("draft")).is_none());
        }
        is_over.store(true, Ordering::Relaxed);
        let seen = streams.await.expect("no panic");
        for seen in &seen {
            assert_eq!(seen.tokens, alone.tokens, "undisturbed");
        }
        let longest = seen.iter().map(|seen| seen.longest_gap).max().unwrap_or_default();
        let pace: f64 =
            seen.iter().map(|seen| alone.elapsed.as_secs_f64() / seen.elapsed.as_secs_f64()).sum::<f64>()
                / seen.len() as f64;
        println!(
            "{} streams beside 6 loads and unloads: longest silence {longest:?} (alone {:?}), {:.0} % of their pace",
            seen.len(),
            alone.longest_gap,
            100.0 * pace
        );
        assert_eq!(tiny.stats().await.expect("it answers").n_pages, before, "every page is back");
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn guests_of_a_model_that_is_unloaded_end_with_a_reason_and_may_try_again() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        load(&client, "draft").await;
        let draft = model(&daemon, "draft");
        // One that decodes without end, and one that holds a context and waits for its client.
        let endless = ["--max-tokens", "100000", PROMPT];
        let mut ends = Vec::new();
        for _ in 0..4 {
            let options = StartOptions { model: Some("draft".to_owned()), ..with(&endless) };
            let program = Program::wasm(guests::example("complete"));
            let mut guest = client.start(program, options).await.expect("the connection stands");
            daemons::started(&mut guest).await;
            ends.push(guest);
        }
        let mut held = Context::create(&draft, owner(7)).await.expect("it is open");
        held.append(&encode(&draft, PROMPT)).await.expect("there is room");
        held.save("kept").await.expect("it is saved");
        until("all guests have contexts", async || draft.stats().await.expect("it lives").n_contexts >= 5)
            .await;

        client.unload_model("draft", Some(Duration::from_millis(50))).await.expect("it goes");
        for guest in ends {
            let ended = collect(guest).await;
            // Some may have come to their ends in time.
            if let Some(error) = &ended.error {
                assert_eq!(ended.reason().code, ErrorCode::ModelUnloaded, "{ended:?}");
                assert!(error.is_retryable(), "{error}");
            }
        }
        for _ in 0..2 {
            let error = held.ask(Ask::Top { n: 1 }).await.expect_err("it is gone");
            assert!(matches!(error, EngineError::Unloaded) && error.is_retryable(), "{error}");
        }
        let pulled = held.pull(RunKey(1), || settings(3)).await;
        assert!(matches!(pulled, Err(EngineError::Unloaded)), "{pulled:?}");
        assert!(matches!(held.fork().await, Err(EngineError::Unloaded)));
        assert!(matches!(Context::create(&draft, owner(7)).await, Err(EngineError::Unloaded)));
        assert!(matches!(draft.stats().await, Err(EngineError::Unloaded)));
        drop(held);

        // It is as if it had never been there; what was saved is forgotten.
        load(&client, "draft").await;
        let again = model(&daemon, "draft");
        let opened = Context::open(&again, owner(7), "kept").await;
        assert!(matches!(opened, Err(EngineError::NotSaved { .. })), "{opened:?}");
        let _ = complete(&client, Some("draft")).await.well();
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn questions_under_way_are_answered_when_their_model_goes() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        for round in 0..10 {
            load(&client, "draft").await;
            let draft = model(&daemon, "draft");
            let asking: Vec<_> = (0..8)
                .map(|user| {
                    let draft = draft.clone();
                    tokio::spawn(async move {
                        let mut context = Context::create(&draft, owner(user)).await?;
                        context.append(&encode(&draft, PROMPT)).await?;
                        let mut n_answers = 0;
                        loop {
                            match context.ask(Ask::Top { n: 2 }).await?.answer().await? {
                                Answer::Top { .. } => n_answers += 1,
                                other => panic!("{other:?}"),
                            }
                            if n_answers == usize::MAX {
                                return Ok::<(), EngineError>(());
                            }
                        }
                    })
                })
                .collect();
            tokio::time::sleep(Duration::from_millis(round * 3)).await;
            client.unload_model("draft", DRAIN).await.expect("it goes");
            for asked in asking {
                let ended = tokio::time::timeout(Duration::from_secs(60), asked)
                    .await
                    .expect("nobody waits for ever");
                assert!(matches!(ended.expect("no panic"), Err(EngineError::Unloaded)));
            }
        }
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn models_share_the_memory_and_one_that_does_not_fit_is_refused_with_the_numbers() {
    block_on(async {
        let kv_bytes = 48 << 20;
        let daemon = daemons::start(&Config { kv_bytes: Some(kv_bytes), ..config() });
        let client = daemon.connect().await.expect("connected");
        let tiny = model(&daemon, "tiny");
        let n_pages = async |model: &ModelHandle| model.stats().await.expect("it lives").n_pages;
        let all = n_pages(&tiny).await;
        let kept = complete(&client, None).await.well().text;
        // Contexts that hold pages everywhere, also where they will have to leave.
        let mut contexts = Vec::new();
        let prompt = encode(&tiny, PROMPT);
        let n_tokens = tiny.limits().n_positions_max / 2;
        for user in 0..8 {
            let mut context = Context::create(&tiny, owner(user)).await.expect("it is open");
            let tokens: Vec<u32> =
                (0..n_tokens).map(|idx| prompt[(idx + user as usize) % prompt.len()]).collect();
            context.append(&tokens).await.expect("there is room");
            context.ask(Ask::Prefill).await.expect("asked").answer().await.expect("computed");
            contexts.push(context);
        }
        let top = async |context: &mut Context| {
            context.ask(Ask::Top { n: 3 }).await.expect("asked").answer().await.expect("computed")
        };
        let mut before = Vec::new();
        for context in &mut contexts {
            before.push(top(context).await);
        }
        for _ in 0..3 {
            load(&client, "draft").await;
            let draft = model(&daemon, "draft");
            let (few, others) = (n_pages(&tiny).await, n_pages(&draft).await);
            let bytes = few * tiny.limits().page_bytes + others * draft.limits().page_bytes;
            assert!(few < all && others > 0 && bytes as u64 <= kv_bytes, "{few} of {all}, and {others}");
            for (context, before) in contexts.iter_mut().zip(&before) {
                assert_eq!(&top(context).await, before, "nothing is lost on the way");
            }
            assert_eq!(complete(&client, None).await.well().text, kept);
            let _ = complete(&client, Some("draft")).await.well();
            client.unload_model("draft", DRAIN).await.expect("it goes");
            assert_eq!(n_pages(&tiny).await, all, "it gets back what it gave");
            for (context, before) in contexts.iter_mut().zip(&before) {
                assert_eq!(&top(context).await, before);
            }
        }
        drop(contexts);
        nothing_is_held(&daemon).await;
    });
    block_on(async {
        let tight = daemons::start(&Config { kv_bytes: Some(9 << 20), ..config() });
        let client = tight.connect().await.expect("connected");
        let expected = complete(&client, None).await.well().text;
        let refused = client.load_model("draft", None, |_, _| {}).await.expect_err("there is no room");
        assert_eq!(refused.code(), Some(&ErrorCode::ModelDoesNotFit), "{refused}");
        let text = refused.to_string();
        assert!(text.contains("draft") && text.matches(|c: char| c.is_ascii_digit()).count() > 8, "{text}");
        assert_eq!(complete(&client, None).await.well().text, expected);
    });
}

#[test]
fn a_model_that_drains_is_shown_and_can_be_hurried() {
    block_on(async {
        let daemon = Arc::new(daemons::start(&config()));
        let client = daemon.connect().await.expect("connected");
        load(&client, "draft").await;
        let held = Context::create(&model(&daemon, "draft"), owner(7)).await.expect("it is open");
        let unload = |drain: Duration| {
            let client = client.clone();
            tokio::spawn(async move { client.unload_model("draft", Some(drain)).await })
        };
        let hour = Duration::from_secs(3600);
        let first = unload(hour);
        let state = async || {
            let models = client.models().await.expect("it answers");
            models.iter().find(|model| model.name == "draft").map(|model| model.state.clone())
        };
        until("it drains", async || state().await.as_deref() == Some("draining")).await;
        let refused = client.load_model("draft", None, |_, _| {}).await.expect_err("it is not gone");
        assert_eq!(refused.code(), Some(&ErrorCode::ModelLeaving), "{refused}");
        // A longer time changes nothing, a shorter one does, for all calls that wait.
        let longer = unload(2 * hour);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!first.is_finished() && !longer.is_finished());
        for unloading in [unload(Duration::ZERO), longer, first] {
            let default = unloading.await.expect("no panic").expect("it goes");
            assert_eq!(default.as_deref(), Some("tiny"));
        }
        assert_eq!(state().await, None);
        drop(held);
        assert_eq!(client.unload_model("tiny", DRAIN).await.expect("it goes"), None, "there is no default");
        load(&client, "draft").await;
        nothing_is_held(&daemon).await;
    });
}

/// Lets loads of `draft` wait, or panic.
fn start_with(wrap: impl Fn() + Send + Sync + 'static, config: &Config) -> Daemon {
    let wrap: BackendWrap = Arc::new(move |name, backend| {
        if name == "draft" {
            wrap();
        }
        backend
    });
    let seams = Seams { wrap: Some(wrap), ..Seams::default() };
    Daemon::start_with(config, seams, &|_| {}).expect("it starts")
}

#[test]
fn a_folder_is_opened_before_a_load_has_its_turn() {
    block_on(async {
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let wait = std::sync::Mutex::new(wait);
        let held_up = move || wait.lock().expect("no panic").recv().expect("it goes on");
        let daemon = start_with(held_up, &config());
        let client = daemon.connect().await.expect("connected");
        let other = client.clone();
        let loading = tokio::spawn(async move { other.load_model("draft", None, |_, _| {}).await });
        // What is wrong with it is found out beside the load that has its turn, whenever that begins.
        for _ in 0..20 {
            let refused =
                client.load_model("/no/such/folder", None, |_, _| {}).await.expect_err("it is not there");
            assert_eq!(refused.code(), Some(&ErrorCode::InvalidArgument), "{refused}");
            assert!(!loading.is_finished());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        go.send(()).expect("it waits");
        assert_eq!(loading.await.expect("no panic").expect("it loads"), "draft");
    });
}

#[test]
fn a_load_that_panics_gives_the_room_back() {
    block_on(async {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        let panics = move || assert!(over.load(Ordering::Relaxed), "an injected panic");
        let daemon = start_with(panics, &Config { kv_bytes: Some(48 << 20), ..config() });
        let client = daemon.connect().await.expect("connected");
        let tiny = model(&daemon, "tiny");
        let n_pages = async || tiny.stats().await.expect("it lives").n_pages;
        let before = n_pages().await;
        let refused = client.load_model("draft", None, |_, _| {}).await.expect_err("it panics");
        assert_eq!(refused.code(), Some(&ErrorCode::Internal), "{refused}");
        assert!(refused.to_string().contains("an injected panic"), "{refused}");
        assert_eq!(n_pages().await, before);
        is_over.store(true, Ordering::Relaxed);
        load(&client, "draft").await;
        assert!(n_pages().await < before, "it would have given room");
        let _ = complete(&client, None).await.well();
    });
}

#[test]
fn what_cannot_be_loaded_or_unloaded_is_said() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        let code = async |model: &str, device: Option<&str>| {
            let refused = client.load_model(model, device, |_, _| {}).await.expect_err(model);
            refused.code().cloned().expect("the daemon refused")
        };
        assert_eq!(code("tiny", None).await, ErrorCode::ModelLoaded);
        assert_eq!(code("/no/such/folder", None).await, ErrorCode::InvalidArgument);
        assert_eq!(code("draft", Some("tpu")).await, ErrorCode::InvalidArgument);
        if device() == Device::Cpu {
            assert_eq!(code("draft", Some("cuda:7")).await, ErrorCode::LoadFailed);
        }
        let refused = client.unload_model("draft", DRAIN).await.expect_err("it is not there");
        assert_eq!(refused.code(), Some(&ErrorCode::UnknownModel), "{refused}");
        let refused = complete(&client, Some("draft")).await;
        assert_eq!(refused.reason().code, ErrorCode::UnknownModel, "{refused:?}");
        assert!(refused.reason().message.contains("tiny"), "{refused:?}");

        // The last one may go, and come back.
        client.unload_model("tiny", DRAIN).await.expect("it goes");
        assert!(client.models().await.expect("it answers").is_empty());
        let alone = complete(&client, None).await;
        assert_eq!(alone.reason().code, ErrorCode::GuestFailed, "{alone:?}");
        assert!(alone.reason().message.contains("no model is loaded"), "{alone:?}");
        load(&client, "tiny").await;
        let _ = complete(&client, None).await.well();
        nothing_is_held(&daemon).await;

        // Another user may look and no more.
        let (near, far) = tokio::io::duplex(64 << 10);
        let actor = Actor { uid: 4711, ..Actor::this_process() };
        let (sessions, shutdown) = (daemon.sessions().clone(), daemon.shutdown().clone());
        tokio::spawn(async move { sessions.serve(far, actor, shutdown).await });
        let stranger = Client::over(near).await.expect("connected");
        let refused = stranger.load_model("draft", None, |_, _| {}).await.expect_err("it may not");
        assert_eq!(refused.code(), Some(&ErrorCode::PermissionDenied), "{refused}");
        let refused = stranger.unload_model("tiny", DRAIN).await.expect_err("it may not");
        assert_eq!(refused.code(), Some(&ErrorCode::PermissionDenied), "{refused}");
        assert_eq!(stranger.models().await.expect("it answers").len(), 1);
    });
}

#[test]
fn a_load_that_is_given_up_is_taken_back() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        for wait_us in [0, 100, 1_000, 5_000, 20_000, 50_000] {
            let loading = client.load_model("draft", None, |_, _| {});
            let is_loaded = tokio::time::timeout(Duration::from_micros(wait_us), loading).await.is_ok();
            if is_loaded {
                client.unload_model("draft", DRAIN).await.expect("it goes");
            }
            // What comes after it waits for it. One that was done before it was given up stays.
            let gone = until("the model is gone", async || daemon.model(Some("draft")).is_none());
            if tokio::time::timeout(Duration::from_secs(5), gone).await.is_err() {
                assert!(wait_us > 1_000, "nothing is loaded as fast");
                client.unload_model("draft", DRAIN).await.expect("it goes");
            }
            // The daemon may hear that late, and have it only now.
            let again = async || {
                let is_loaded = client.load_model("draft", None, |_, _| {}).await.is_ok();
                if !is_loaded {
                    let _ = client.unload_model("draft", DRAIN).await;
                }
                is_loaded
            };
            until("it can be loaded again", again).await;
            client.unload_model("draft", DRAIN).await.expect("it goes");
        }
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn users_of_one_model_do_not_keep_those_of_another_waiting() {
    block_on(async {
        let models = vec!["tiny".to_owned(), "draft".to_owned()];
        let daemon = daemons::start(&Config { models, ..config() });
        let (tiny, draft, is_over) =
            (model(&daemon, "tiny"), model(&daemon, "draft"), Arc::new(AtomicBool::new(false)));
        let crowd: Vec<_> = (0..16)
            .map(|_| {
                let (tiny, is_over) = (tiny.clone(), is_over.clone());
                tokio::spawn(async move {
                    let mut n_tokens = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        n_tokens += stream(&tiny, 1, N_STREAM_TOKENS, &is_over)
                            .await
                            .expect("it decodes")
                            .tokens
                            .len();
                    }
                    n_tokens
                })
            })
            .collect();
        until("the crowd decodes", async || tiny.stats().await.expect("it lives").n_steps > 50).await;
        let before = tiny.stats().await.expect("it lives").n_steps;
        let seen = stream(&draft, 2, 200, &AtomicBool::new(false)).await.expect("it decodes");
        let n_steps = tiny.stats().await.expect("it lives").n_steps - before;
        is_over.store(true, Ordering::Relaxed);
        for streams in crowd {
            assert!(streams.await.expect("no panic") > 0);
        }
        assert_eq!(seen.tokens.len(), 200);
        // Both users have the device for as long, and a step of one row is the shorter one.
        assert!(n_steps < 300, "{n_steps} steps of the crowd while one stream had 200 tokens");
    });
}

#[test]
fn the_command_line_loads_lists_uses_and_unloads() {
    let served = Served::start_with(exe(), &config(), &[]);
    let trellis = |words: &[&str]| {
        let output = daemons::output(&mut served.trellis(words));
        let text = [output.stdout, output.stderr].concat();
        (String::from_utf8(text).expect("UTF-8"), output.status.success())
    };
    let (loaded, ok) = trellis(&["load", "draft"]);
    assert!(ok && loaded.contains("loaded draft"), "{loaded}");
    let (models, ok) = trellis(&["models"]);
    assert!(ok && models.contains("draft") && models.contains("tiny"), "{models}");
    let (again, ok) = trellis(&["load", "draft"]);
    assert!(!ok && again.contains("draft"), "{again}");
    let (unloaded, ok) = trellis(&["unload", "draft", "--drain", "0"]);
    assert!(ok && unloaded.contains("unloaded draft"), "{unloaded}");
    assert!(unloaded.contains("the default model is tiny"), "{unloaded}");
    let (missing, ok) = trellis(&["unload", "draft"]);
    assert!(!ok && missing.contains("tiny"), "{missing}");
}

/// A copy of a bundled model, under a name that would clear a terminal.
fn folder_of_draft(below: &Path) -> PathBuf {
    let folder = below.join("my\u{1b}[2Jdraft");
    std::fs::create_dir(&folder).expect("made");
    for file in std::fs::read_dir(pack::root().join("daemon/models/draft")).expect("it is there") {
        let file = file.expect("it can be read").path();
        std::fs::copy(&file, folder.join(file.file_name().expect("a name"))).expect("copied");
    }
    folder
}

#[test]
fn a_model_from_a_folder_is_named_found_again_and_harmless_to_look_at() {
    const SHOWN: &str = "my\\u{1b}[2Jdraft";
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder_of_draft(folder.path());
    let path = path.to_str().expect("UTF-8");
    let served = Served::start_with(exe(), &config(), &[]);
    let trellis = |words: &[&str]| {
        let output = daemons::output(&mut served.trellis(words));
        let text = String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8");
        assert!(!text.contains('\u{1b}'), "{text:?}");
        (text, output.status.code())
    };
    let (loaded, _) = trellis(&["load", path]);
    assert!(loaded.contains(&format!("loaded {SHOWN} from ")), "{loaded}");
    assert!(trellis(&["models", "--wide"]).0.contains(SHOWN));
    assert!(trellis(&["info"]).0.contains(SHOWN));
    let (again, status) = trellis(&["load", path]);
    assert!(again.contains("is loaded already, from ") && status == Some(2), "{again}");

    // By its folder as by its name.
    let component = folder.path().join("complete.wasm");
    std::fs::write(&component, guests::example("complete")).expect("written");
    let component = component.to_str().expect("UTF-8");
    let run = |models: &[&str]| {
        let models = models.iter().flat_map(|model| ["--model", model]);
        let words: Vec<&str> =
            ["run", "--no-stdin"].into_iter().chain(models).chain([component, "Once upon a time"]).collect();
        trellis(&words)
    };
    let (of_folder, status) = run(&[path]);
    assert_eq!(status, Some(0), "{of_folder}");
    assert_eq!(run(&["my\u{1b}[2Jdraft"]).0, of_folder);
    let (lacking, status) = run(&["draft"]);
    assert_eq!(status, Some(2), "{lacking}");
    let socket = served.socket().display().to_string();
    assert!(lacking.contains(&socket) && lacking.contains("(it has tiny, my"), "{lacking}");
    let (several, status) = run(&["tiny", "draft"]);
    assert!(several.contains("several --model") && status == Some(2), "{several}");
}
