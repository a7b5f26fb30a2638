//! Policies of the operator: what nobody draws, what is marked, what reaches clients and guests, and what becomes of a policy that
//! does wrong.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;
use trellis::config::{Config, Isolation};
use trellis::daemon::Daemon;
use trellis::guest::PolicySettings;
use trellis_client::{Event, Program, StartOptions};
use trellis_programs::library::{KgwKey, z_of_green};
use trellis_tests::daemons::{self, Ended, Served, collect, nothing_is_held, output, run, started, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

/// Models of these tests, of which the second one guesses and is a member of mixtures.
const MODELS: [&str; 2] = ["tiny", "draft"];

/// A policy's file, and settings for it.
struct Policy {
    folder: TempDir,
    settings: PolicySettings,
    isolation: Isolation,
}

impl Policy {
    fn new(wasm: &[u8], settings: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path: PathBuf = folder.path().join("policy.wasm");
        std::fs::write(&path, wasm).expect("the component is written");
        let settings: BTreeMap<String, String> =
            settings.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect();
        // Slow machines take their time.
        let settings = PolicySettings {
            component: Some(path),
            settings,
            call_ms: 2_000,
            load_ms: 20_000,
            ..PolicySettings::default()
        };
        Self { folder, settings, isolation: daemons::isolation() }
    }

    fn faulty(fault: &str) -> Self {
        Self::new(&guests::faulty_policy(), &[("fault", fault)])
    }

    /// The same, of a daemon whose guests run so.
    fn in_mode(self, isolation: Isolation) -> Self {
        Self { isolation, ..self }
    }

    fn config(&self) -> Config {
        let (models, isolation) = (MODELS.map(str::to_owned).to_vec(), self.isolation);
        Config { models, isolation, policy: self.settings.clone(), ..daemons::config(exe()) }
    }

    fn start(&self) -> Daemon {
        assert!(self.folder.path().is_dir());
        daemons::start(&self.config())
    }

    /// Why a daemon does not start with it.
    fn refused(&self) -> String {
        match Daemon::start(&self.config(), &|_| {}) {
            Ok(_) => panic!("the daemon starts"),
            Err(error) => error.to_string(),
        }
    }
}

async fn hostile(daemon: &Daemon, options: StartOptions) -> Ended {
    let client = daemon.connect().await.expect("connected");
    run(&client, &guests::hostile(), options).await
}

/// A way to draw, what it drew, and its error.
fn ways(ended: &Ended) -> Vec<(String, Vec<u32>, Option<String>)> {
    let ways =
        ended.json.iter().map(|way| serde_json::from_value(way.clone()).expect("a way, tokens, an error"));
    ways.collect()
}

/// Which tokens of the model have a letter.
fn tokens_with(daemon: &Daemon, letter: char) -> Vec<bool> {
    let model = daemon.model(None).expect("a model");
    let tokenizer = &model.model().tokenizer;
    let has = |token: u32| {
        let bytes = tokenizer.token_bytes(token).filter(|_| !tokenizer.is_special(token));
        bytes.is_some_and(|bytes| bytes.contains(&(letter as u8)))
    };
    (0..model.limits().vocab_size as u32).map(has).collect()
}

fn rules(settings: &[(&str, &str)]) -> Policy {
    Policy::new(&guests::example("house-rules"), settings)
}

/// What can only give tokens that are wanted, and finds none.
const FORCED: [&str; 9] = [
    "a constraint that wants them",
    "beams by a mask",
    "a mask",
    "a bias of others",
    "a program of one token",
    "a program that names a token",
    "a program of a constant row",
    "a program with a bias",
    "a bias",
];

#[test]
fn no_way_to_draw_gives_a_forbidden_token() {
    block_on(async {
        let (mut n_tokens, mut by_set) = (0, Vec::new());
        for settings in [&[("forbidden", "e")][..], &[("forbidden", "e"), ("key", "77"), ("delta", "2")]] {
            let daemon = rules(settings).start();
            let forbidden = tokens_with(&daemon, 'e');
            assert!(forbidden.iter().filter(|is| **is).count() > 100);
            let ended = hostile(&daemon, with(&["every-draw", "e"])).await.well();
            let ways = ways(&ended);
            assert!(ways.len() > 50, "{}", ways.len());
            for (way, tokens, error) in &ways {
                let drawn = tokens.iter().find(|&&token| forbidden[token as usize]);
                assert_eq!(drawn, None, "{way} with {settings:?}: {tokens:?}");
                n_tokens += tokens.len();
                if tokens.is_empty() {
                    let name = way.split(',').next().expect("a name");
                    let error = error.as_deref().unwrap_or("no token, no error");
                    assert!(FORCED.contains(&name), "{way}: {error}");
                }
            }
            by_set.push(ways);
            nothing_is_held(&daemon).await;
        }
        println!("{n_tokens} tokens of {} ways, none of them forbidden", by_set[0].len());
        assert!(n_tokens > 1_000, "{n_tokens}");
        // The same ways do give such tokens where nothing forbids them.
        let free =
            daemons::start(&Config { models: MODELS.map(str::to_owned).to_vec(), ..daemons::config(exe()) });
        let forbidden = tokens_with(&free, 'e');
        let ended = hostile(&free, with(&["every-draw", "e"])).await.well();
        let gives = |(_, tokens, _): &(String, Vec<u32>, _)| tokens.iter().any(|&it| forbidden[it as usize]);
        let n_giving = ways(&ended).iter().filter(|way| gives(way)).count();
        assert!(n_giving > 45, "{n_giving}");
    });
}

#[test]
fn a_policy_that_puts_nothing_in_front_changes_no_draw() {
    block_on(async {
        let drawn = async |config: &Config| {
            ways(&hostile(&daemons::start(config), with(&["every-draw", "e"])).await.well())
        };
        let policy = rules(&[]);
        let with_policy = drawn(&policy.config()).await;
        let without = drawn(&Config { policy: PolicySettings::default(), ..policy.config() }).await;
        assert_eq!(with_policy, without);
        // A mark of no strength is a program in front of all, which changes nothing that is drawn of one model.
        let weak = rules(&[("key", "7"), ("delta", "0")]);
        assert_eq!(drawn(&weak.config()).await, without);
    });
}

#[test]
fn what_everybody_draws_is_marked() {
    block_on(async {
        // A mark that decides also where the model is all but sure: whatever has it shows it within few tokens.
        let daemon = rules(&[("key", "77"), ("delta", "20")]).start();
        let ended = hostile(&daemon, with(&["every-draw", "e"])).await.well();
        let key = |key| KgwKey { key, n_tokens: 1 };
        let (mut z_marked, mut z_other) = (Vec::new(), Vec::new());
        for (way, tokens, _) in ways(&ended) {
            // Where tokens follow one another, and the model decides what they are.
            let is_text = [
                "streams",
                "hot",
                "greedy",
                "a program",
                "truncated",
                "a program with state",
                "a program of a member that is not there",
                "a mixture",
                "a mixture, stepping",
            ];
            if !is_text.contains(&way.as_str()) {
                continue;
            }
            let z = z_of_green(&tokens, key(77), 0.5).expect("there are tokens");
            z_other.push(z_of_green(&tokens, key(78), 0.5).expect("there are tokens"));
            println!("{way}: z {z:.2} over {} tokens", tokens.len());
            z_marked.push(z);
        }
        assert_eq!(z_marked.len(), 9);
        assert!(z_marked.iter().all(|&z| z > 2.4), "{z_marked:?}");
        let mean = z_other.iter().sum::<f64>() / z_other.len() as f64;
        assert!(mean.abs() < 1.5, "{z_other:?}");
    });
}

#[test]
fn addresses_and_keys_are_kept_out_of_whatever_a_guest_sends_also_in_pieces() {
    redacted(daemons::isolation());
}

fn redacted(isolation: Isolation) {
    let policy = Policy::new(&guests::example("redact"), &[("key-prefixes", "sk-, AKIA")]).in_mode(isolation);
    let served = Served::start_with(exe(), &policy.config(), &[]);
    block_on(async {
        let client = trellis_client::Client::connect_to(&served.socket()).await.expect("it listens");
        let wasm = Program::wasm(guests::hostile());
        let mut guest = client.start(wasm.clone(), with(&["echo"])).await.expect("it starts");
        let number = started(&mut guest).await;
        for piece in [
            "write to ann@exam",
            "ple.org, not to b",
            "ob. The key: sk-12",
            "34",
            " and AK",
            "IA99\nbye c@d.e",
        ] {
            guest.send(piece).await.expect("it listens");
        }
        guest.end_messages().await.expect("it can be told");
        let ended = collect(guest).await.well();
        assert_eq!(
            ended.text,
            "write to [redacted], not to bob. The key: [redacted] and [redacted]\nbye [redacted]"
        );
        let secret = ["argue", "ann@example.org"];
        let ended = collect(client.start(wasm, with(&secret)).await.expect("it starts")).await;
        assert_eq!((ended.text.as_str(), ended.tokens.len()), ("[redacted]", 0));
        assert_eq!(ended.json, [serde_json::json!(["[redacted]"])]);
        assert!(ended.log.iter().any(|line| line == "[redacted]"), "{:?}", ended.log);
        assert_eq!(
            (ended.reason().code.as_str(), ended.reason().message.as_str()),
            ("guest_failed", "[redacted]")
        );
        let whole = format!("{ended:?}");
        assert!(!whole.contains("ann@"), "{whole}");
        let log = served.log();
        let line = log
            .lines()
            .find(|line| line.contains(&format!("guest {number} ")))
            .unwrap_or_else(|| panic!("{log}"));
        assert!(line.contains("4 redacted") && line.contains("Finished"), "{line}");
        assert!(log.contains("4 redacted, ") && log.contains("Failed(\"guest_failed\")"), "{log}");
    });
    let info = String::from_utf8(output(&mut served.trellis(&["info"])).stdout).expect("text");
    assert!(info.lines().any(|line| line.starts_with("policy") && line.contains("policy.wasm")), "{info}");
    let limits = String::from_utf8(output(&mut served.trellis(&["limits"])).stdout).expect("text");
    assert!(limits.contains("policy.call_ms") && limits.contains("policy.memory_bytes"), "{limits}");
}

#[test]
fn a_guest_is_capped_in_what_it_is_sent_and_sends() {
    capped(daemons::isolation());
}

fn capped(isolation: Isolation) {
    block_on(async {
        let daemon = rules(&[("sent-bytes", "10"), ("received-bytes", "20")]).in_mode(isolation).start();
        let client = daemon.connect().await.expect("connected");
        let ended = async |pieces: &[&str]| {
            let mut guest =
                client.start(Program::wasm(guests::hostile()), with(&["echo"])).await.expect("it starts");
            started(&mut guest).await;
            for piece in pieces {
                guest.send(*piece).await.expect("it listens");
            }
            let _ = guest.end_messages().await;
            collect(guest).await
        };
        let said = |ended: &Ended| (ended.reason().code.as_str().to_owned(), ended.reason().message.clone());
        assert_eq!(ended(&["12345", "1234"]).await.well().text, "123451234");
        let sent = ended(&["12345", "123456"]).await;
        let message = "the operator's policy ended the guest: it sent 11 bytes, at most 10 are allowed";
        assert_eq!(
            (sent.text.as_str(), said(&sent)),
            ("12345", ("policy_ended".to_owned(), message.to_owned()))
        );
        let received = ended(&["", "12345678901234567"]).await;
        let message = "the operator's policy ended the guest: it was sent 21 bytes, at most 20 are allowed";
        assert_eq!(said(&received), ("policy_ended".to_owned(), message.to_owned()));
        let arguments = hostile(&daemon, with(&["echo", "of too many bytes"])).await;
        assert_eq!(said(&arguments).1, message);
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_policy_that_fails_ends_its_guest_and_nobody_else() {
    failed(daemons::isolation());
}

fn failed(isolation: Isolation) {
    block_on(async {
        for (fault, said) in [
            ("panics", "its `emitted` trapped"),
            ("loops", "its `emitted` took longer than the limit of 300 ms"),
            ("sleeps", "its `emitted` took longer than the limit of 3000 ms"),
            ("eats", "its `emitted` wanted"),
            ("floods", "its `emitted` gave more than 4194304 bytes"),
            ("no-json", "its `emitted` gave a text that is no JSON"),
            ("error", "its `emitted` gave an error where there is none"),
            ("received", "its `received` trapped"),
            ("ended", "its `ended` trapped"),
        ] {
            let mut policy = Policy::faulty(fault).in_mode(isolation);
            policy.settings.call_ms = 300;
            let daemon = policy.start();
            let client = daemon.connect().await.expect("connected");
            let start = async || {
                let mut guest =
                    client.start(Program::wasm(guests::hostile()), with(&["echo"])).await.expect("it starts");
                started(&mut guest).await;
                guest
            };
            let (other, guest) = (start().await, start().await);
            for piece in ["before ", "now ", "after"] {
                let _ = guest.send(piece).await;
            }
            let _ = guest.end_messages().await;
            let ended = collect(guest).await;
            assert_eq!(ended.reason().code.as_str(), "policy_failed", "{fault}: {ended:?}");
            let message = &ended.reason().message;
            assert!(
                message.contains("the operator's policy failed") && message.contains(said),
                "{fault}: {message}"
            );
            assert!(!message.contains("as it was told"), "its own words are the operator's: {message}");
            if fault != "ended" {
                assert!(ended.text.is_empty() || ended.text == "before ", "{fault}: {}", ended.text);
                other.send("and still").await.expect("it listens");
                other.end_messages().await.expect("it can be told");
                assert_eq!(collect(other).await.well().text, "and still", "{fault}");
            } else {
                drop(other);
            }
            nothing_is_held(&daemon).await;
        }
    });
}

#[test]
fn a_policy_may_end_guests_change_messages_and_have_the_last_word() {
    changed_and_ended(daemons::isolation());
}

fn changed_and_ended(isolation: Isolation) {
    block_on(async {
        let echoed = async |fault: &str, piece: &str| {
            let daemon = Policy::faulty(fault).in_mode(isolation).start();
            let client = daemon.connect().await.expect("connected");
            let guest =
                client.start(Program::wasm(guests::hostile()), with(&["echo"])).await.expect("it is heard");
            // One that may not start hears nothing.
            let _ = guest.send(piece).await;
            let _ = guest.end_messages().await;
            collect(guest).await
        };
        assert_eq!(echoed("replaces", "once ").await.well().text, "ONCE twice");
        assert_eq!(echoed("last-words", "a, ").await.well().text, "a, it has ended: Outcome::Finished");
        let ended = echoed("ends", "now").await;
        let reason = ended.reason();
        assert_eq!(
            (ended.text.as_str(), reason.code.as_str(), reason.message.as_str()),
            ("", "policy_ended", "the operator's policy ended the guest: it said the word")
        );
        let refused = echoed("arguments", "x").await;
        assert_eq!(refused.reason().message, "the operator's policy ended the guest: it may not start");
    });
}

#[test]
fn a_broken_policy_stops_the_daemon_as_it_starts() {
    for (fault, said) in [
        ("begin", "its `begin` failed: it does not like its settings"),
        ("begin-panics", "its `begin` trapped: panicked at"),
        ("begin-loops", "its `begin` took longer than the limit of 500 ms"),
        ("front", "for model \"tiny\", its `put-in-front` failed: it does not know tiny"),
        ("front-of-draft", "for model \"draft\", its `put-in-front` failed: it does not know draft"),
        ("front-all", "the operator forbids all"),
        ("front-strange", "the operator forbids token 4294967295, and the vocabulary has"),
        ("front-parameter", "is parameter, which may not stand in front of samplers"),
        ("front-long", "the operator's program has 61 operations, at most 48 are allowed"),
    ] {
        let mut policy = Policy::faulty(fault);
        if fault == "begin-loops" {
            policy.settings.load_ms = 500;
        }
        let error = policy.refused();
        assert!(error.starts_with("the policy ") && error.contains(said), "{fault}: {error}");
    }
    let error = Policy::new(b"\0asm\x01\0\0\0", &[]).refused();
    assert!(error.contains("a core WebAssembly module, not a component"), "{error}");
    let error = Policy::new(b"nothing", &[]).refused();
    assert!(error.contains("not WebAssembly"), "{error}");
    let error = Policy::new(&guests::example("chat"), &[]).refused();
    assert!(error.contains("the component does not fit the host"), "{error}");
    let mut gone = Policy::faulty("");
    gone.settings.component = Some("/nonexistent/policy.wasm".into());
    assert!(
        gone.refused().starts_with("the policy /nonexistent/policy.wasm: No such file"),
        "{}",
        gone.refused()
    );
    let mut small = Policy::faulty("");
    small.settings.memory_bytes = 64 << 10;
    let error = small.refused();
    assert!(error.contains("the policy "), "{error}");
}

#[test]
fn recordings_are_made_where_the_policy_allows_them_and_replay_without_a_model() {
    recorded(daemons::isolation());
}

fn recorded(isolation: Isolation) {
    const TOKENS: [&str; 3] = ["tokens", "24", "<|begin_of_text|>Once upon a time"];
    let mut policy = rules(&[("forbidden", "e"), ("key", "77")]).in_mode(isolation);
    block_on(async {
        let options = StartOptions { is_recorded: true, ..with(&TOKENS) };
        let refused = hostile(&policy.start(), options).await;
        assert_eq!(refused.reason().code.as_str(), "permission_denied", "{refused:?}");
    });
    policy.settings.allows_recordings = true;
    let served = Served::start_with(exe(), &policy.config(), &[]);
    let path = |name: &str| policy.folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (wasm, file) = (path("hostile.wasm"), path("out.rec"));
    std::fs::write(&wasm, guests::hostile()).expect("it is written");
    let run = ["run", "--json", "--no-stdin", "--record", &file, &wasm];
    let first = output(&mut served.trellis(&[&run[..], &TOKENS].concat()));
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let tokens = sent_tokens(&first.stdout);
    assert_eq!(tokens.len(), 24, "{tokens:?}");
    drop(served);
    let mut replay = daemons::trellis(exe());
    let again = output(replay.env("XDG_CACHE_HOME", policy.folder.path()).args(["replay", "--json", &file]));
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    assert_eq!(sent_tokens(&again.stdout), tokens);
}

/// The tokens among events in lines of JSON.
fn sent_tokens(events: &[u8]) -> Vec<u64> {
    let events = String::from_utf8_lossy(events);
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).expect("it is JSON"));
    let tokens = |event: Value| match event["type"] == "tokens" {
        true => serde_json::from_value(event["tokens"].clone()).expect("numbers"),
        false => Vec::new(),
    };
    events.flat_map(tokens).collect()
}

#[test]
fn a_client_that_leaves_takes_its_guest_along() {
    block_on(async {
        let daemon = Policy::faulty("").start();
        let client = daemon.connect().await.expect("connected");
        let mut guest =
            client.start(Program::wasm(guests::hostile()), with(&["endless"])).await.expect("it starts");
        started(&mut guest).await;
        while !matches!(guest.next().await, Some(Ok(Event::Text { .. } | Event::Tokens { .. })) | None) {}
        drop(guest);
        nothing_is_held(&daemon).await;
    });
}

/// The same where what passes the policy comes from other processes.
#[cfg(target_os = "linux")]
mod by_process {
    use super::*;

    #[test]
    fn addresses_and_keys_are_kept_out_of_whatever_a_guest_sends_also_in_pieces() {
        redacted(Isolation::Process);
    }

    #[test]
    fn a_guest_is_capped_in_what_it_is_sent_and_sends() {
        capped(Isolation::Process);
    }

    #[test]
    fn a_policy_that_fails_ends_its_guest_and_nobody_else() {
        failed(Isolation::Process);
    }

    #[test]
    fn a_policy_may_end_guests_change_messages_and_have_the_last_word() {
        changed_and_ended(Isolation::Process);
    }

    #[test]
    fn recordings_are_made_where_the_policy_allows_them_and_replay_without_a_model() {
        recorded(Isolation::Process);
    }
}
