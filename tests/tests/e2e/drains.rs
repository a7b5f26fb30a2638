//! Guests that are told that their daemon is on its way out: what they save then is there for the next one.
#![cfg(unix)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use trellis::config::{Config, Device, Isolation, SavedContexts};
use trellis::session::SessionLimits;
use trellis_client::{Client, Guest, Program};
use trellis_tests::daemons::{self, PATIENCE, Served, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::agents::{next_json, replies};
use crate::exe;

/// Longer than anything here takes: what ends within it ends by itself.
const DRAIN: Duration = Duration::from_secs(600);

/// A daemon that keeps contexts in this folder, and whose guests have so long to end.
fn serve(state: &Path, isolation: Isolation) -> Served {
    let config = daemons::config(exe());
    let sessions = SessionLimits { drain_ms: DRAIN.as_millis() as u64, ..config.sessions };
    let config = Config {
        device: Device::Cpu,
        isolation,
        saved_contexts: SavedContexts::Disk,
        state_dir: Some(state.to_owned()),
        sessions,
        ..config
    };
    Served::start_with(exe(), &config, &[])
}

fn terminate(served: &Served) {
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::TERM).expect("it runs");
}

async fn converse(served: &Served) -> Guest {
    let client = Client::connect_to(&served.socket()).await.expect("connected");
    let program = Program::wasm(guests::example("conversation"));
    let mut guest = client.start(program, with(&[])).await.expect("started");
    assert_eq!(next_json(&mut guest).await, Some(json!({ "ready": "tiny" })));
    guest
}

/// Asks something, and has it answered; tokens that the context holds then.
async fn ask(guest: &mut Guest, question: &str) -> u64 {
    let message = json!({ "message": { "role": "user", "content": question } });
    replies(guest, message, 1).await;
    let (_, told) = replies(guest, json!({ "answer": {} }), 2).await;
    told[1]["done"].as_u64().unwrap_or_else(|| panic!("{told:?}"))
}

fn what_is_saved_in_a_drain_is_kept(isolation: Isolation) {
    let state = tempfile::tempdir().expect("a folder");
    let mut served = serve(state.path(), isolation);
    let begun = Instant::now();
    let (n_first, n_held) = block_on(async {
        let mut guest = converse(&served).await;
        let n_first = ask(&mut guest, "What is 37 + 48?").await;
        replies(&mut guest, json!({ "save": "sums" }), 1).await;
        let n_held = ask(&mut guest, "What is 3 + 4?").await;
        // It waits for a message, and hears of the daemon's end instead.
        terminate(&served);
        let last = tokio::time::timeout(PATIENCE, next_json(&mut guest)).await.expect("it is told");
        assert_eq!(last, Some(json!({ "kept": "sums" })));
        guest.wait().await.expect("it ends well");
        (n_first, n_held)
    });
    assert_eq!(served.wait().code(), Some(0));
    assert!(begun.elapsed() < DRAIN, "nobody was waited for to the end of the time");
    assert!(n_held > n_first);

    served.start_again();
    block_on(async {
        let mut guest = converse(&served).await;
        let (_, told) = replies(&mut guest, json!({ "open": "sums" }), 1).await;
        assert_eq!(told, [json!({ "done": n_held })], "all that was there, and not what was saved before");
        ask(&mut guest, "What is 37 + 48?").await;
        guest.end_messages().await.expect("it listens");
        guest.wait().await.expect("it ends well");
        let usage = guest.usage().expect("it has ended");
        assert!(usage.n_tokens_reopened > n_first, "{usage:?}");
    });
}

#[test]
fn what_a_guest_saves_when_it_is_told_of_the_daemons_end_is_there_for_the_next_daemon() {
    what_is_saved_in_a_drain_is_kept(Isolation::Thread);
}

#[cfg(target_os = "linux")]
#[test]
fn what_a_guest_in_a_process_saves_when_it_is_told_of_the_daemons_end_is_there_for_the_next_daemon() {
    what_is_saved_in_a_drain_is_kept(Isolation::Process);
}

/// Whether a line of `--json` is a value that a guest has sent.
fn is_json(line: &str) -> bool {
    serde_json::from_str::<Value>(line).expect("it is JSON")["type"] == "json"
}

#[test]
fn a_recording_holds_that_the_guest_was_told_of_the_daemons_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (component, recording) = (at("conversation.wasm"), at("told.rec"));
    std::fs::write(&component, guests::example("conversation")).expect("written");
    let mut served = serve(folder.path(), Isolation::Thread);
    let mut command = served.trellis(&["run", "--json", "--record", &recording, &component]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut messages = child.stdin.take().expect("piped");
    let mut events = BufReader::new(child.stdout.take().expect("piped"));
    let mut lines = String::new();
    let mut hear = |lines: &mut String| loop {
        let begin = lines.len();
        assert!(events.read_line(lines).expect("it sends text") > 0, "it has ended: {lines}");
        if is_json(&lines[begin..]) {
            return lines[begin..].to_owned();
        }
    };
    assert!(hear(&mut lines).contains("ready"));
    let message = json!({ "message": { "role": "user", "content": "What is 37 + 48?" } });
    // What is sent while it answers would end the answer.
    let asked = [(message, 1), (json!({ "answer": {} }), 2), (json!({ "save": "sums" }), 1)];
    for (request, n_replies) in asked {
        writeln!(messages, "{request}").expect("it reads");
        let replies: Vec<String> = (0..n_replies).map(|_| hear(&mut lines)).collect();
        assert!(replies.last().is_some_and(|last| last.contains("done")), "{request}: {replies:?}");
    }
    terminate(&served);
    assert!(hear(&mut lines).contains("kept"), "{lines}");
    drop(messages);
    events.read_to_string(&mut lines).expect("it sends text");
    assert!(daemons::wait(&mut child).success(), "{lines}");
    assert_eq!(served.wait().code(), Some(0));

    let again = daemons::output(daemons::trellis(exe()).args(["replay", &recording, &component, "--json"]));
    let replayed = String::from_utf8(again.stdout).expect("text");
    assert!(again.status.success(), "{replayed}");
    let sent =
        |lines: &str| lines.lines().filter(|line| is_json(line)).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(sent(&replayed), sent(&lines));
}
