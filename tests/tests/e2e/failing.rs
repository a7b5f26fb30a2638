//! Devices that fail: whose work ends, with what, and which guests go on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Barrier;
use trellis::config::{Config, Device, OnDeviceFailure};
use trellis::daemon::{Daemon, Seams};
use trellis::ipc::Listener;
use trellis_client::{Client, ErrorCode, Program, StartOptions};
use trellis_engine::account::{Account, Budget, Owner, Resource};
use trellis_engine::model::{Dtype, Model};
use trellis_engine::sampling::Sampler;
use trellis_engine::{
    Ahead, Ask, Context, EngineError, EngineFailure, EngineState, MaskSource, ModelHandle, OneModel, Pull,
    RunKey, RunSettings,
};
use trellis_tests::daemons::{self, Ended, Served, collect, nothing_is_held, run, until, with};
use trellis_tests::device::device;
use trellis_tests::engines::{Random, Sizes, backend, block_on, owner, start};
use trellis_tests::faulty::{ENVIRONMENT, Fault, Faults};
use trellis_tests::{guests, models, pack};

use crate::exe;

const N_CONTEXTS: u32 = 4;
const N_PROMPT: usize = 70;
const N_TOKENS: usize = 24;

/// Too few pages for the prompts of the four contexts, so that they move to host memory and back where all are there at
/// once; some come too late for that.
const SIZES: Sizes = Sizes { n_pages: 17, n_host_pages: 8, n_step_rows: 8, n_step_tokens: 48 };

fn model() -> Model {
    models::random("small", models::small(256), Dtype::F32)
}

fn faulty(faults: &Faults) -> OneModel {
    let model = model();
    let backend = faults.wrap(backend(&model, SIZES));
    start(model, backend, SIZES)
}

/// Decodes a seeded continuation of a prompt of its own, and asks again for what failed with its step. All that decode
/// `together` have their prompts and a token when one goes on to its second.
///
/// Returns the tokens and how many steps failed under it.
async fn decode(
    model: &ModelHandle,
    owner: Owner,
    together: &Barrier,
) -> Result<(Vec<u32>, usize), EngineError> {
    let number = u64::from(owner.actor.0);
    let mut context = Context::create(model, owner).await?;
    context.append(&Random(number).tokens(N_PROMPT, 4096)).await?;
    let (mut tokens, mut n_failed): (Vec<u32>, usize) = (Vec::new(), 0);
    while tokens.len() < N_TOKENS {
        let n_tokens_max = Some(N_TOKENS - tokens.len());
        let settings = || RunSettings {
            sampler: Arc::new(Sampler { temperature: 1.0, seed: number, ..Sampler::greedy() }),
            stop_tokens: Arc::new([]),
            n_tokens_max,
            ahead: Ahead::Adaptive,
            masks: MaskSource::Sampler,
        };
        match context.pull(RunKey(0), settings).await {
            Ok(Pull::Token(drawn)) => {
                tokens.push(drawn.candidate.token);
                if tokens.len() == 1 {
                    together.wait().await;
                }
            }
            Ok(Pull::Finished(finish)) => panic!("{finish:?} after {} tokens", tokens.len()),
            Err(error @ EngineError::Step(_)) => {
                assert!(error.is_retryable() && error.to_string().contains("injected"), "{error}");
                n_failed += 1;
            }
            Err(error) => return Err(error),
        }
    }
    Ok((tokens, n_failed))
}

/// For [`decode`] where one may have ended before another begins: a barrier at which none waits.
const APART: usize = 1;

/// All four continuations; so many of them are together.
async fn decode_all(model: &ModelHandle, n_together: usize) -> Vec<Result<(Vec<u32>, usize), EngineError>> {
    let together = Arc::new(Barrier::new(n_together));
    let tasks: Vec<_> = (1..=N_CONTEXTS)
        .map(|number| {
            let (model, together) = (model.clone(), together.clone());
            tokio::spawn(async move { decode(&model, owner(number), &together).await })
        })
        .collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.expect("no panic outside the engine"));
    }
    results
}

async fn tokens_of_all(model: &ModelHandle) -> (Vec<Vec<u32>>, usize) {
    let results = decode_all(model, N_CONTEXTS as usize).await;
    let results = results.into_iter().map(|result| result.expect("it goes on"));
    let (tokens, n_failed): (Vec<_>, Vec<_>) = results.unzip();
    (tokens, n_failed.iter().sum())
}

#[test]
fn a_step_that_fails_ends_its_own_work_and_what_is_asked_again_is_right() {
    block_on(async {
        let faults = Faults::default();
        let engine = faulty(&faults);
        let (expected, _) = tokens_of_all(engine.handle()).await;
        let stats = engine.handle().stats().await.expect("it lives");
        assert!(stats.n_swaps_out > 0, "pages move: {stats:?}");
        let (mut n_runs, mut n_failed_all) = (0, 0);
        // One engine for all: whatever a failed step left behind meets all that follow. No two runs need the same
        // calls; a run that ends before its fault is the last.
        for n_before in 0.. {
            let n_faults = faults.n_faults();
            faults.inject(n_before, 1 + n_before % 2, Fault::Call);
            let (tokens, n_failed) = tokens_of_all(engine.handle()).await;
            assert_eq!(tokens, expected, "call {n_before} failed");
            assert!(matches!(engine.handle().state(), EngineState::Running));
            if faults.n_faults() == n_faults {
                break;
            }
            n_runs += 1;
            n_failed_all += n_failed;
        }
        // A token takes a step, and a step is submitted and collected.
        assert!(n_runs >= 2 * N_TOKENS, "only {n_runs} calls failed");
        assert!(n_failed_all > n_runs, "{n_failed_all} pieces of work failed in {n_runs} runs");
        let stats = engine.handle().stats().await.expect("it lives");
        assert_eq!(stats.n_contexts, 0, "{stats:?}");
        assert_eq!(stats.n_pages_free + stats.n_pages_cached, stats.n_pages, "{stats:?}");
    });
}

#[test]
fn an_engine_whose_device_is_lost_says_so_to_everybody_and_keeps_nothing() {
    block_on(async {
        for (idx, n_before) in (0..40).step_by(3).enumerate() {
            let fault = if idx % 2 == 0 { Fault::Device } else { Fault::Panic };
            let faults = Faults::default();
            let engine = faulty(&faults);
            let handle = engine.handle().clone();
            let account = Account::new("user", Budget::UNLIMITED, None);
            let of_user = Owner { account: account.clone(), ..owner(9) };
            let mut idle = Context::create(&handle, of_user.clone()).await.expect("created");
            idle.append(&[1; 40]).await.expect("fits");
            idle.ask(Ask::Prefill).await.expect("asked").answer().await.expect("computed");
            idle.save("kept").await.expect("saved");
            faults.inject(n_before, 1, fault);
            let says_why = |error: &EngineError| {
                let is_right = matches!(
                    (fault, error),
                    (Fault::Device, EngineError::Failed(EngineFailure::Device(_)))
                        | (Fault::Panic, EngineError::Failed(EngineFailure::Panicked { .. }))
                );
                assert!(is_right && error.is_retryable(), "{error:?}");
                assert!(error.to_string().contains("injected"), "{error}");
            };
            let results = decode_all(&handle, APART).await;
            assert!(faults.n_faults() == 1 && results.iter().any(Result::is_err), "call {n_before}");
            results.iter().filter_map(|result| result.as_ref().err()).for_each(says_why);
            says_why(&EngineError::Failed(handle.failed().await));
            // Every later call says the same, whatever it is.
            let mut later: BTreeMap<&str, EngineError> = BTreeMap::new();
            later.insert("create", Context::create(&handle, of_user.clone()).await.expect_err("gone"));
            later.insert("open", Context::open(&handle, of_user.clone(), "kept").await.expect_err("gone"));
            later.insert("stats", handle.stats().await.expect_err("gone"));
            later.insert("forget", handle.forget(&of_user, "kept").await.expect_err("gone"));
            later.insert("fork", idle.fork().await.expect_err("gone"));
            later.insert("truncate", idle.truncate(3).await.expect_err("gone"));
            later.insert("save", idle.save("again").await.expect_err("gone"));
            later.insert("ask", idle.ask(Ask::Prefill).await.expect_err("gone"));
            later.values().for_each(says_why);
            drop(idle);
            drop(engine);
            assert!(matches!(handle.state(), EngineState::Failed(_)), "to be stopped is no other end");
            for resource in [Resource::Pages, Resource::Contexts] {
                assert_eq!(account.used(resource), 0, "{resource:?} after a {fault:?}");
            }
        }
    });
}

#[test]
fn steps_that_fail_one_after_the_other_are_a_lost_device() {
    block_on(async {
        let faults = Faults::default();
        let engine = faulty(&faults);
        faults.inject(5, usize::MAX, Fault::Call);
        let results = decode_all(engine.handle(), APART).await;
        assert_eq!(faults.n_faults(), 3);
        let failed = engine.handle().failed().await;
        assert!(matches!(failed, EngineFailure::Steps { n_steps: 3, .. }), "{failed}");
        assert!(results.iter().all(|result| matches!(result, Err(EngineError::Failed(_)))), "{results:?}");
    });
}

fn config() -> Config {
    Config { models: vec!["tiny".to_owned(), "draft".to_owned()], ..daemons::config(exe()) }
}

fn start_faulty(config: &Config, model: &str) -> (Daemon, Faults) {
    let faults = Faults::default();
    let seams = Seams { wrap: Some(faults.of_model(model)), ..Seams::default() };
    let daemon = Daemon::start_with(config, seams, &|_| {}).expect("it starts");
    (daemon, faults)
}

const COMPLETE: [&str; 4] = ["--max-tokens", "40", "--temperature=0.8", "Once upon a time"];

async fn complete(client: &Client) -> Ended {
    run(client, &guests::example("complete"), with(&COMPLETE)).await
}

/// Asserts that a guest was ended because the device failed.
fn has_failed_with_device(ended: &Ended) {
    assert_eq!(ended.reason().code, ErrorCode::DeviceFailed, "{ended:?}");
    let error = ended.error.as_ref().expect("it has a reason");
    assert!(error.is_retryable() && error.to_string().contains("injected"), "{error}");
    assert!(ended.usage.is_some(), "what it used is told all the same");
}

#[test]
fn a_model_whose_steps_fail_leaves_the_other_alone() {
    block_on(async {
        let (daemon, faults) = start_faulty(&config(), "draft");
        let client = daemon.connect().await.expect("connected");
        let expected = complete(&client).await.well().text;
        let other = daemon.model(Some("draft")).expect("it is loaded");
        let others = tokio::spawn(async move {
            let mut n_failed = 0;
            for round in 0..30 {
                faults.inject(round % 7, 1 + round % 2, Fault::Call);
                n_failed +=
                    decode(&other, owner(round as u32), &Barrier::new(APART)).await.expect("it goes on").1;
            }
            n_failed
        });
        let mut n_completed = 0;
        while !others.is_finished() || n_completed == 0 {
            assert_eq!(complete(&client).await.well().text, expected, "undisturbed");
            n_completed += 1;
        }
        assert!(others.await.expect("no panic") >= 30);
        assert!(daemon.failure().is_none());
        assert!(client.info().await.expect("it answers").failure.is_none());
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_model_whose_steps_keep_failing_ends_alone_and_comes_back_when_it_is_loaded_again() {
    block_on(async {
        let (daemon, faults) = start_faulty(&config(), "draft");
        let client = daemon.connect().await.expect("connected");
        let of_draft = || StartOptions { model: Some("draft".to_owned()), ..with(&COMPLETE) };
        let on_draft = async || run(&client, &guests::example("complete"), of_draft()).await;
        let (expected, expected_of_draft) =
            (complete(&client).await.well().text, on_draft().await.well().text);
        let draft = daemon.model(Some("draft")).expect("it is loaded");
        let idle = Context::create(&draft, owner(9)).await.expect("created");
        faults.inject(3, usize::MAX, Fault::Call);
        // Steps of the other succeed all the time, and change nothing.
        let (is_over, witness) = (Arc::new(AtomicBool::new(false)), client.clone());
        let over = is_over.clone();
        let others = tokio::spawn(async move {
            let mut n_completed = 0;
            while !over.load(Ordering::Relaxed) || n_completed == 0 {
                assert_eq!(complete(&witness).await.well().text, expected, "undisturbed");
                n_completed += 1;
            }
        });
        let failed = decode(&draft, owner(1), &Barrier::new(APART)).await.expect_err("it never succeeds");
        assert!(matches!(&failed, EngineError::Failed(EngineFailure::Steps { n_steps: 3, .. })), "{failed}");
        assert_eq!(faults.n_faults(), 3, "nothing more is asked of it");
        for _ in 0..2 {
            let ended = on_draft().await;
            assert_eq!(ended.reason().code, ErrorCode::EngineFailed, "{ended:?}");
            assert!(ended.reason().message.contains("\"draft\" failed"), "{ended:?}");
        }
        let mut idle = idle;
        idle.append(&[1; 3]).await.expect("it goes nowhere");
        let asked = async { idle.ask(Ask::Prefill).await?.answer().await };
        assert!(matches!(asked.await, Err(EngineError::Failed(_))));
        assert!(draft.device_failure().is_none() && daemon.failure().is_none(), "the device works");
        let models = client.models().await.expect("it answers");
        let states: Vec<_> = models.iter().map(|model| (model.name.as_str(), model.state.as_str())).collect();
        assert_eq!(states, [("tiny", "loaded"), ("draft", "failed")]);
        drop(idle);

        client.unload_model("draft", None).await.expect("it goes");
        faults.inject(0, 0, Fault::Call);
        client.load_model("draft", None, |_, _| {}).await.expect("it loads");
        assert_eq!(on_draft().await.well().text, expected_of_draft);
        is_over.store(true, Ordering::Relaxed);
        others.await.expect("no panic");
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_guest_whose_step_fails_hears_so_and_the_next_is_served() {
    block_on(async {
        let (daemon, faults) = start_faulty(&config(), "tiny");
        let client = daemon.connect().await.expect("connected");
        let expected = complete(&client).await.well().text;
        faults.inject(3, 1, Fault::Call);
        let ended = complete(&client).await;
        assert_eq!(ended.reason().code, ErrorCode::GuestFailed, "{ended:?}");
        assert!(ended.reason().message.contains("may be tried again"), "{ended:?}");
        assert_eq!(complete(&client).await.well().text, expected);
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn an_embedded_daemon_shows_that_its_device_failed() {
    for fault in [Fault::Device, Fault::Panic] {
        block_on(async {
            let (daemon, faults) = start_faulty(&config(), "tiny");
            let client = daemon.connect().await.expect("connected");
            // It waits for its client all the time and is ended as well.
            let echo = client.start(Program::wasm(guests::hostile()), with(&["echo"])).await;
            let mut idle = echo.expect("the connection stands");
            daemons::started(&mut idle).await;
            assert!(daemon.failure().is_none());
            faults.inject(3, 1, fault);
            has_failed_with_device(&complete(&client).await);
            has_failed_with_device(&collect(idle).await);
            let failure = daemon.failed().await;
            assert_eq!(failure.device, String::from(device()));
            assert_eq!(daemon.failure().expect("it stays so").to_string(), failure.to_string());
            // Later starts hear it at once, and clients that ask how the daemon is can see it.
            let refused = complete(&client).await;
            assert_eq!(refused.reason().code, ErrorCode::DeviceFailed, "{refused:?}");
            let info = client.info().await.expect("it answers");
            assert_eq!(info.failure, Some(failure.to_string()));
            let models = client.models().await.expect("it answers");
            let failed = |name: &str| {
                let model = models.iter().find(|model| model.name == name).expect("it is listed");
                model.failure.clone()
            };
            assert!(failed("tiny").expect("it has failed").contains("injected"));
            assert!(failed("draft").expect("it computes on the same device").contains("injected"));
            until("no guest runs", async || daemon.service().host().guests().is_empty()).await;
        });
    }
}

/// The packed program is the released one, which has no faults.
fn has_faults() -> bool {
    let has_faults = pack::folder().is_none();
    if !has_faults {
        eprintln!("skipped: the packed program cannot be told to fail");
    }
    has_faults
}

#[test]
fn a_daemon_whose_device_fails_ends_with_its_own_status() {
    if !has_faults() {
        return;
    }
    block_on(async {
        for fault in ["device", "panic"] {
            let value = format!("tiny 5 {fault}");
            let mut served = Served::start_with(exe(), &daemons::config(exe()), &[(ENVIRONMENT, &value)]);
            let client = Client::connect_to(&served.socket()).await.expect("it listens");
            has_failed_with_device(&complete(&client).await);
            assert_eq!(served.wait().code(), Some(i32::from(trellis::cli::TRY_AGAIN)), "{fault}");
        }
    });
}

#[test]
fn a_command_with_a_daemon_inside_ends_with_the_same_status() {
    if !has_faults() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("complete.wasm");
    std::fs::write(&path, guests::example("complete")).expect("written");
    let mut command = daemons::trellis(exe());
    command.args(["run", "--local", "--device", "cpu"]).arg(&path).args(COMPLETE);
    command.env(ENVIRONMENT, "tiny 5 device");
    let output = daemons::output(&mut command);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(i32::from(trellis::cli::TRY_AGAIN)), "{errors}");
    assert!(errors.contains("the device failed") && errors.contains("injected"), "{errors}");
}

#[test]
fn a_device_that_fails_is_opened_again_where_that_is_wanted_and_given_up_when_it_fails_at_once() {
    block_on(async {
        // Never a card: to reset one takes it from every other test of this process.
        let config = Config { device: Device::Cpu, on_device_failure: OnDeviceFailure::Reopen, ..config() };
        let (daemon, faults) = start_faulty(&config, "tiny");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trellis.sock");
        let listener = Listener::bind(&path, 0o700).expect("the place is free");
        let daemon = Arc::new(daemon);
        let serving = daemon.clone();
        let serving = tokio::spawn(async move { serving.serve(listener).await });

        let client = Client::connect_to(&path).await.expect("it listens");
        let expected = complete(&client).await.well().text;
        faults.inject(5, 1, Fault::Device);
        has_failed_with_device(&complete(&client).await);
        until("the device is open again", async || {
            client.info().await.expect("it answers").failure.is_none()
        })
        .await;
        assert_eq!(complete(&client).await.well().text, expected, "on the same connection");
        nothing_is_held(&daemon).await;

        faults.inject(5, 1, Fault::Device);
        has_failed_with_device(&complete(&client).await);
        let failure = serving.await.expect("no panic").expect_err("it is given up");
        assert!(failure.to_string().contains("injected"), "{failure}");
        assert!(Client::connect_to(&path).await.is_err(), "nobody listens any more");
    });
}
