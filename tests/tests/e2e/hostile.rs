//! Guests that mean harm: each ends with the error that says what it did and what the limit was, while another
//! guest of the same daemon streams on as if it were alone.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use trellis::config::{Budgets, Config, SharedBudget};
use trellis::daemon::Daemon;
use trellis::guest::GuestLimits;
use trellis_client::{ErrorBody, Program, StartOptions};
use trellis_tests::daemons::{self, Ended, collect, is_listed, nothing_is_held, run, started, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

/// So much that no honest guest comes near it on a slow machine.
const CPU_MS: u64 = 5_000;
const MEMORY_BYTES: usize = 24 << 20;
const N_CONTEXTS: u64 = 8;
const N_HANDLES: usize = 100;
const N_PAGES: u64 = 150;
const N_TOKENS: u64 = 6_000;
const CALL_BYTES: usize = 1 << 20;
const LOG_BYTES: u64 = 4_000;
const COMPILE_MS: u64 = 1_000;

/// The daemon that all these tests share, so that many of the attacks go on at once.
fn daemon() -> &'static Daemon {
    static DAEMON: OnceLock<Daemon> = OnceLock::new();
    DAEMON.get_or_init(|| daemons::start(&limited()))
}

/// Limits that these guests reach soon.
fn limited() -> Config {
    let limits = GuestLimits {
        cpu_ms: CPU_MS,
        memory_bytes: MEMORY_BYTES,
        n_contexts: N_CONTEXTS,
        n_handles: N_HANDLES,
        n_pages: N_PAGES,
        n_tokens: N_TOKENS,
        call_bytes: CALL_BYTES,
        log_bytes: LOG_BYTES,
        constraint_compile_ms: COMPILE_MS,
        ..daemons::limits()
    };
    Config { limits, ..daemons::config(exe()) }
}

/// What is wrong with an ending: its code, what it is about, and the limit.
fn parts(body: &ErrorBody) -> (&str, Option<&str>, Option<u64>) {
    (body.code.as_str(), body.name.as_deref(), body.limit)
}

fn value(body: &ErrorBody) -> u64 {
    body.value.as_ref().expect("a value").parse().expect("a number")
}

fn stream() -> StartOptions {
    with(&["tokens", "48", "<|begin_of_text|>Once upon a time"])
}

/// What the neighbour streams from a daemon without attackers.
async fn alone() -> &'static [u32] {
    static ALONE: tokio::sync::OnceCell<Vec<u32>> = tokio::sync::OnceCell::const_new();
    ALONE
        .get_or_init(async || {
            let peace = daemons::start(&daemons::config(exe()));
            let client = peace.connect().await.expect("connected");
            let tokens = run(&client, &guests::hostile(), stream()).await.well().tokens;
            assert_eq!(tokens.len(), 48);
            tokens
        })
        .await
}

/// Lets an attack run while a neighbour streams, again and again, what it streams when it is alone.
async fn beside_a_neighbour<T>(attack: impl Future<Output = T>) -> T {
    let client = daemon().connect().await.expect("connected");
    let wasm = guests::hostile();
    let expected = alone().await;
    let is_over = AtomicBool::new(false);
    let neighbour = async {
        let mut n_rounds = 0;
        loop {
            let was_over = is_over.load(Ordering::Relaxed);
            let ended = run(&client, &wasm, stream()).await.well();
            assert_eq!(ended.tokens, expected, "round {n_rounds}");
            n_rounds += 1;
            if was_over {
                return n_rounds;
            }
        }
    };
    let attack = async {
        let outcome = attack.await;
        is_over.store(true, Ordering::Relaxed);
        outcome
    };
    let (outcome, n_rounds) = tokio::join!(attack, neighbour);
    assert!(n_rounds >= 2, "the neighbour ran during the attack and after it");
    outcome
}

async fn attack_with(options: StartOptions) -> Ended {
    let client = daemon().connect().await.expect("connected");
    run(&client, &guests::hostile(), options).await
}

async fn attack(mode: &str) -> Ended {
    attack_with(with(&[mode])).await
}

#[test]
fn a_loop_without_end() {
    let ended = block_on(beside_a_neighbour(attack("loop")));
    let body = ended.reason();
    assert_eq!(parts(body), ("budget_exceeded", Some("cpu_ms"), Some(CPU_MS)), "{body:?}");
    // In whole milliseconds.
    assert!(value(body) >= CPU_MS, "{body:?}");
    let limit = CPU_MS.to_string();
    assert!(body.message.contains("processor time") && body.message.contains(&limit), "{body:?}");
}

#[test]
fn memory_without_end() {
    for mode in ["memory", "huge-allocation"] {
        let ended = block_on(beside_a_neighbour(attack(mode)));
        let body = ended.reason();
        let limit = Some(MEMORY_BYTES as u64);
        assert_eq!(parts(body), ("budget_exceeded", Some("memory_bytes"), limit), "{mode}: {body:?}");
        assert!(value(body) > MEMORY_BYTES as u64, "{mode}: {body:?}");
    }
}

#[test]
fn output_that_nobody_reads() {
    block_on(beside_a_neighbour(async {
        for mode in ["flood-text", "flood-tokens"] {
            let window_bytes = StartOptions::default().window_bytes;
            let mut n_bytes = 0;
            // On a slow machine it takes more time to fill the window.
            for deadline_ms in [1_500, 15_000, 150_000] {
                n_bytes = send_until(deadline_ms, mode).await;
                assert!(n_bytes <= window_bytes, "{mode}: {n_bytes} bytes, the window has {window_bytes}");
                if n_bytes > window_bytes / 2 {
                    break;
                }
            }
            assert!(n_bytes > window_bytes / 2, "{mode}: {n_bytes} bytes before it had to wait");
        }
    }));
}

/// What a guest sends to a client that does not read. The guest waits for it, which is not computing, until its time is
/// up.
async fn send_until(deadline_ms: u64, mode: &str) -> usize {
    let client = daemon().connect().await.expect("connected");
    let options = StartOptions { deadline: Some(Duration::from_millis(deadline_ms)), ..with(&[mode]) };
    let program = Program::wasm(guests::hostile());
    let mut guest = client.start(program, options).await.expect("the connection stands");
    let id = started(&mut guest).await;
    until("the guest is gone", async || !is_listed(&client, id).await).await;
    let ended = collect(guest).await;
    let body = ended.reason();
    let expected = ("deadline_exceeded", Some("deadline_ms"), Some(deadline_ms));
    assert_eq!(parts(body), expected, "{mode}: {body:?}");
    ended.text.len() + 4 * ended.tokens.len()
}

#[test]
fn logs_without_end() {
    let modes = ["flood-log", "flood-stderr", "flood-stderr-without-lines"];
    block_on(beside_a_neighbour(async {
        let (a, b, c) = tokio::join!(attack(modes[0]), attack(modes[1]), attack(modes[2]));
        for (mode, ended) in modes.into_iter().zip([a, b, c]) {
            let body = ended.reason();
            assert_eq!(parts(body), ("budget_exceeded", Some("cpu_ms"), Some(CPU_MS)), "{mode}: {body:?}");
            let n_bytes: usize = ended.log.iter().map(String::len).sum();
            // The last line says how much was dropped.
            assert!(n_bytes as u64 <= LOG_BYTES + 200, "{mode}: {n_bytes} bytes of log");
            assert!(!ended.log.is_empty(), "{mode}");
            let last = ended.log.last().expect("a line");
            assert!(last.contains("dropped"), "{mode}: {last}");
        }
    }));
}

#[test]
fn traps() {
    block_on(beside_a_neighbour(async {
        let reasons = [
            ("abort", "unreachable"),
            ("panic", "panicked at "),
            ("stack", "call stack exhausted"),
            ("stack-in-memory", "out of bounds memory access"),
        ];
        for (mode, reason) in reasons {
            let ended = attack(mode).await;
            let body = ended.reason();
            assert_eq!(body.code.as_str(), "guest_trapped", "{mode}: {body:?}");
            assert!(body.message.contains(reason), "{mode}: {body:?}");
            if mode == "panic" {
                assert!(ended.log.iter().any(|line| line.contains("the guest gives up at 7")), "{ended:?}");
            }
        }
        // The daemon goes on to run the same component.
        assert_eq!(attack("error").await.reason().message, "the guest is not content");
    }));
}

#[test]
fn exits() {
    block_on(async {
        let ended = attack("exit").await;
        let body = ended.reason();
        // The standard library knows two statuses; it makes 1 of all but 0.
        assert_eq!(parts(body), ("guest_failed", Some("status"), None), "{body:?}");
        assert!(value(body) != 0, "{body:?}");
        assert!(attack("exit-well").await.error.is_none());
        let ended = attack("long-error").await;
        assert_eq!(ended.reason().code.as_str(), "guest_failed");
        assert!(ended.reason().message.len() <= 16 << 10, "a message is no way around the client's credit");
        let ended = attack("no-such-mode").await;
        assert_eq!(ended.reason().message, "there is no mode \"no-such-mode\"");
    });
}

#[test]
fn sleep_without_end() {
    block_on(beside_a_neighbour(async {
        for mode in ["sleep", "wait-for-messages"] {
            let deadline = Some(Duration::from_millis(400));
            let ended = attack_with(StartOptions { deadline, ..with(&[mode]) }).await;
            let body = ended.reason();
            assert_eq!(
                parts(body),
                ("deadline_exceeded", Some("deadline_ms"), Some(400)),
                "{mode}: {body:?}"
            );
        }
    }));
}

#[test]
fn a_guest_that_ignores_its_client_is_stopped() {
    block_on(async {
        for mode in ["loop", "sleep", "flood-text"] {
            let client = daemon().connect().await.expect("connected");
            let program = Program::wasm(guests::hostile());
            let mut guest = client.start(program, with(&[mode])).await.expect("the connection stands");
            started(&mut guest).await;
            guest.cancel();
            let ended = collect(guest).await;
            let code = ended.reason().code.as_str();
            assert_eq!(code, "cancelled", "{mode}");
        }
    });
}

#[test]
fn more_objects_than_there_may_be() {
    block_on(beside_a_neighbour(async {
        for mode in ["contexts", "fork-bomb"] {
            let ended = attack(mode).await;
            let body = ended.reason();
            assert_eq!(body.code.as_str(), "guest_failed", "{mode}: {body:?}");
            let expected = "the budget of contexts of the guest is used up: \
                            8 in use, 1 more asked for, the limit is 8";
            assert_eq!(body.message, expected, "{mode}");
        }
        // Where the host API has an error for it, the guest gets that.
        for mode in ["models", "streams"] {
            let ended = attack(mode).await;
            let body = ended.reason();
            assert_eq!(body.code.as_str(), "guest_failed", "{mode}: {body:?}");
            assert!(body.message.contains("host objects of the guest"), "{mode}: {body:?}");
            assert!(body.message.contains("the limit is 100"), "{mode}: {body:?}");
        }
        for mode in ["samplers", "decoders"] {
            let ended = attack(mode).await;
            let body = ended.reason();
            let limit = Some(N_HANDLES as u64);
            assert_eq!(parts(body), ("budget_exceeded", Some("n_handles"), limit), "{mode}: {body:?}");
        }
    }));
}

#[test]
fn grammars_that_cost_too_much() {
    block_on(beside_a_neighbour(async {
        for (kind, said) in [
            ("optional", "alternatives for a byte: at most 1000000 are taken"),
            ("doubled", "alternatives for a byte: at most 1000000 are taken"),
            ("patterns", "to compile it takes more than 1000 ms of a processor"),
        ] {
            let ended = attack_with(with(&["grammar", kind])).await;
            let body = ended.reason();
            assert_eq!(body.code.as_str(), "guest_failed", "{kind}: {body:?}");
            assert!(body.message.contains("refused") && body.message.contains(said), "{kind}: {body:?}");
        }
        // What it took is its guest's, whether or not anything comes of it.
        let ended = attack_with(with(&["refused-grammar", "patterns"])).await;
        assert_eq!(parts(ended.reason()), ("budget_exceeded", Some("cpu_ms"), Some(CPU_MS)));
    }));
}

/// What of a processor it takes is counted, and what another process has of it is not.
#[test]
fn a_component_that_takes_too_long_to_compile() {
    block_on(async {
        let limits = GuestLimits { compile_ms: 1, ..daemons::limits() };
        let daemon = daemons::start(&Config { limits, ..daemons::config(exe()) });
        let client = daemon.connect().await.expect("connected");
        let sums = "(local.set 0 (i64.add (i64.mul (local.get 0) (local.get 0)) (i64.const 7)))".repeat(200);
        let functions = format!("(func (param i64) {sums})").repeat(4_000);
        let wasm = wat::parse_str(format!("(component (core module {functions}))")).expect("a component");
        let body = run(&client, &wasm, with(&[])).await.reason().clone();
        assert_eq!(parts(&body), ("compile_failed", Some("compile_ms"), Some(1)), "{body:?}");
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn more_pages_and_tokens_than_there_may_be() {
    block_on(beside_a_neighbour(async {
        let ended = attack("pages").await;
        let message = &ended.reason().message;
        assert!(message.contains("pages of the guest") && message.contains("the limit is 150"), "{message}");
        for mode in ["tokens-budget", "full-rows"] {
            let ended = attack(mode).await;
            let message = &ended.reason().message;
            assert!(
                message.contains("tokens of the guest") && message.contains("the limit is 6000"),
                "{mode}: {message}"
            );
            let usage = ended.usage.expect("the daemon tells");
            assert!(usage.n_tokens <= N_TOKENS, "{mode}: {usage:?}");
        }
    }));
}

#[test]
fn more_bytes_in_a_call_than_there_may_be() {
    block_on(beside_a_neighbour(async {
        let ended = attack("long-call").await.well();
        assert_eq!(ended.json, [serde_json::json!([2 << 20, CALL_BYTES])]);
        let (sent, refused) = ended.text.split_at(2 << 20);
        assert!(sent.bytes().all(|byte| byte == b'x'));
        let expected = format!("{} more asked for, the limit is {CALL_BYTES}", 17 << 20);
        assert!(refused.contains("bytes of one call") && refused.contains(&expected), "{refused}");
        let ended = attack("longest-call").await;
        let body = ended.reason();
        let limit = Some(CALL_BYTES as u64);
        assert_eq!(parts(body), ("budget_exceeded", Some("call_bytes"), limit), "{body:?}");
        // Ten thousand messages are no reason to fail; they are just long.
        let ended = attack("deep-template").await.well();
        assert!(ended.text.parse::<usize>().expect("a number") > 10_000);
    }));
}

#[test]
fn nothing_of_the_world_is_to_be_seen() {
    block_on(async {
        let seen = attack("world").await.well().json.remove(0);
        assert_eq!(seen["n_arguments"], 0, "{seen}");
        assert_eq!(seen["n_variables"], 0, "{seen}");
        assert_eq!(seen["n_stdin_bytes"], 0, "{seen}");
        assert_eq!(seen["files"], serde_json::json!([]), "{seen}");
        assert_eq!(seen["wall_ns_below_10ms"], 0, "{seen}");
        for step in seen["monotonic_steps_ns"].as_array().expect("a list") {
            assert_eq!(step.as_u64().expect("a number") % 1_000_000, 0, "{seen}");
        }
        assert!(!std::path::Path::new("/tmp/trellis-hostile").exists());
        // Randomness is the seed's.
        let again = attack("world").await.well().json.remove(0);
        assert_eq!(again["random"], seen["random"]);
        let other = attack_with(StartOptions { seed: Some(8), ..with(&["world"]) }).await.well();
        assert_ne!(other.json[0]["random"], seen["random"]);
    });
}

/// One connection's guests, and one user's, are bounded together.
#[test]
fn many_guests_share_the_budgets_around_them() {
    block_on(async {
        let host_bytes = Some(64 << 20);
        let session = SharedBudget { n_tokens: 3_000, n_pages: 1_000, n_contexts: 5, host_bytes };
        // The code of the guests is on the account of the user.
        let host_bytes = Some(96 << 20);
        let user = SharedBudget { n_tokens: 100_000, n_pages: 2_000, n_contexts: 8, host_bytes };
        let budgets = Budgets { session, user, ..Budgets::default() };
        let limits = GuestLimits { n_guests: 6, n_guests_per_user: 4, ..daemons::limits() };
        let config = Config { limits, budgets, ..daemons::config(exe()) };
        let daemon = daemons::start(&config);
        let wasm = guests::hostile();
        let client = daemon.connect().await.expect("connected");

        // The engine answers in order: by then it has released what a guest held that has ended.
        let model = daemon.model(None).expect("a model is loaded");
        let released = async || model.stats().await.expect("the engine lives");

        let ended = run(&client, &wasm, with(&["contexts"])).await;
        released().await;
        let expected = "the budget of contexts of the session is used up: \
                        5 in use, 1 more asked for, the limit is 5";
        assert_eq!(ended.reason().message, expected);
        // The guest's own limit is four times as much.
        let ended = run(&client, &wasm, with(&["memory"])).await;
        let body = ended.reason();
        assert_eq!(parts(body), ("budget_exceeded", Some("host_bytes"), Some(64 << 20)), "{body:?}");
        assert!(body.message.contains("host memory of the session"), "{body:?}");
        let ended = run(&client, &wasm, with(&["save"])).await;
        released().await;
        let message = ended.reason().message.clone();
        assert!(message.contains("contexts of the user") && message.contains("the limit is 8"), "{message}");
        let ended = run(&client, &wasm, with(&["tokens-budget"])).await;
        released().await;
        let message = ended.reason().message.clone();
        assert!(
            message.contains("tokens of the session") && message.contains("the limit is 3000"),
            "{message}"
        );
        // Another connection of the same user has a budget of its own.
        let client = daemon.connect().await.expect("connected");
        let tokens = run(&client, &wasm, with(&["tokens", "5", "<|begin_of_text|>"])).await.well().tokens;
        assert_eq!(tokens.len(), 5);

        let mut sleepers = Vec::new();
        for _ in 0..4 {
            let program = Program::wasm(wasm.clone());
            sleepers.push(client.start(program, with(&["sleep"])).await.expect("the connection stands"));
        }
        until("four guests run", async || client.ps().await.expect("it answers").len() == 4).await;
        let ended = run(&client, &wasm, with(&["exit-well"])).await;
        assert_eq!(parts(ended.reason()), ("limit_exceeded", Some("n_guests"), Some(4)));
        drop(sleepers);
        until("nobody runs", async || client.ps().await.expect("it answers").is_empty()).await;
        assert!(run(&client, &wasm, with(&["exit-well"])).await.error.is_none());
    });
}

#[test]
fn nothing_is_left_of_an_attack() {
    block_on(async {
        let config = Config {
            limits: GuestLimits {
                cpu_ms: 300,
                memory_bytes: MEMORY_BYTES,
                n_contexts: 8,
                ..daemons::limits()
            },
            ..daemons::config(exe())
        };
        let daemon = daemons::start(&config);
        let client = daemon.connect().await.expect("connected");
        for mode in ["loop", "memory", "panic", "fork-bomb", "exit", "samplers", "long-error"] {
            let ended = run(&client, &guests::hostile(), with(&[mode])).await;
            assert!(ended.error.is_some(), "{mode}");
            nothing_is_held(&daemon).await;
        }
    });
}

/// Who talks to a model may think for longer than a guest may run.
#[test]
fn a_guest_that_waits_for_its_user_is_not_out_of_time_and_does_not_wait_for_ever() {
    block_on(async {
        let limits = GuestLimits { deadline_ms: 2_000, idle_ms: 5_000, ..daemons::limits() };
        let daemon = daemons::start(&Config { limits, ..daemons::config(exe()) });
        let client = daemon.connect().await.expect("connected");
        let program = Program::wasm(guests::example("chat"));
        let guest = client.start(program, with(&[])).await.expect("started");
        let sender = guest.sender();
        let talk = async {
            tokio::time::sleep(Duration::from_millis(2_500)).await;
            sender.send("What is 37 + 48?").await.expect("the guest listens");
        };
        let (ended, ()) = tokio::join!(collect(guest), talk);
        assert_eq!(ended.text, "85\n");
        let body = ended.reason();
        let end = (body.code.as_str(), body.name.as_deref(), body.limit);
        assert_eq!(end, ("deadline_exceeded", Some("idle_ms"), Some(5_000)), "{body:?}");
    });
}

/// Limits that a process of guests looks at on its own side are told to clients in the words of the daemon.
#[cfg(target_os = "linux")]
#[test]
fn limits_are_told_by_processes_as_by_threads() {
    block_on(async {
        let daemon = daemons::start(&Config { isolation: trellis::config::Isolation::Process, ..limited() });
        let client = daemon.connect().await.expect("connected");
        let attack = async |mode: &str| run(&client, &guests::hostile(), with(&[mode])).await;
        for (mode, name, limit) in [
            ("memory", "memory_bytes", MEMORY_BYTES as u64),
            ("huge-allocation", "memory_bytes", MEMORY_BYTES as u64),
            ("samplers", "n_handles", N_HANDLES as u64),
            ("decoders", "n_handles", N_HANDLES as u64),
            ("longest-call", "call_bytes", CALL_BYTES as u64),
            ("flood-log", "cpu_ms", CPU_MS),
        ] {
            let ended = attack(mode).await;
            let body = ended.reason();
            assert_eq!(parts(body), ("budget_exceeded", Some(name), Some(limit)), "{mode}: {body:?}");
            let n_bytes: usize = ended.log.iter().map(String::len).sum();
            assert!(n_bytes as u64 <= LOG_BYTES + 200, "{mode}: {n_bytes} bytes of log");
        }
        for (mode, said) in [
            ("contexts", "contexts of the guest is used up: 8 in use, 1 more asked for, the limit is 8"),
            ("models", "host objects of the guest"),
            ("streams", "host objects of the guest"),
            ("pages", "pages of the guest"),
            ("tokens-budget", "tokens of the guest"),
            ("full-rows", "tokens of the guest"),
        ] {
            let ended = attack(mode).await;
            let message = &ended.reason().message;
            assert!(message.contains(said), "{mode}: {message}");
            assert!(
                ended.usage.as_ref().is_some_and(|usage| usage.n_tokens <= N_TOKENS),
                "{mode}: {ended:?}"
            );
        }
        let deadline = Some(Duration::from_millis(400));
        let options = StartOptions { deadline, ..with(&["sleep"]) };
        let ended = run(&client, &guests::hostile(), options).await;
        assert_eq!(parts(ended.reason()), ("deadline_exceeded", Some("deadline_ms"), Some(400)));
        assert_eq!(attack("error").await.reason().message, "the guest is not content");
        nothing_is_held(&daemon).await;
    });
}
