//! `trellis status`, `trellis ps` and `trellis top` beside guests that decode; the live screen is driven by
//! `tests/terminal/top.sh`.

use std::process::{Child, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use trellis_client::Program;
use trellis_tests::daemons::{self, PATIENCE, Served, output, wait, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;
use crate::signals::draining;

/// What a command says, and its exit status.
fn says(served: &Served, arguments: &[&str]) -> (String, Option<i32>) {
    let said = output(&mut served.trellis(arguments));
    (String::from_utf8(said.stdout).expect("it is text"), said.status.code())
}

fn json(served: &Served, arguments: &[&str]) -> Value {
    serde_json::from_str(&says(served, arguments).0).expect("JSON")
}

/// The hostile guest in a file.
fn hostile() -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().suffix(".wasm").tempfile().expect("a file");
    std::fs::write(file.path(), guests::hostile()).expect("written");
    file
}

/// The client of a guest.
fn client(served: &Served, wasm: &tempfile::NamedTempFile, attack: &str) -> Child {
    let path = wasm.path().to_str().expect("UTF-8");
    let mut client = served.trellis(&["run", "--no-stdin", path, attack]);
    client.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs")
}

/// Waits until the list of guests is as said.
fn listed(served: &Served, what: &str, is_so: impl Fn(&[Value]) -> bool) {
    let begun = Instant::now();
    while !json(served, &["ps", "--json"]).as_array().is_some_and(|guests| is_so(guests)) {
        assert!(begun.elapsed() < PATIENCE, "never came: {what}");
    }
}

#[test]
fn whether_a_daemon_serves_is_said_in_words_and_by_the_exit_status() {
    let mut served = Served::start(exe());
    let (said, status) = says(&served, &["status"]);
    assert_eq!(status, Some(0), "{said}");
    let socket = served.socket().display().to_string();
    for part in
        ["state        ready\n", &format!("socket       {socket}\n"), "model        tiny, loaded, f32 on cpu"]
    {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    let shown = json(&served, &["status", "--json"]);
    assert_eq!(
        (&shown["state"], &shown["daemon"]["pid"], &shown["models"][0]["name"]),
        (&"ready".into(), &served.pid().into(), &"tiny".into()),
        "{shown}"
    );
    // What went wrong last is shown to the user who runs the daemon.
    assert_eq!(says(&served, &["load", "/nowhere/at-all"]).1, Some(2));
    let (said, _) = says(&served, &["status"]);
    assert!(said.contains("ago: at-all was not loaded: "), "{said}");

    assert_eq!(says(&served, &["stop", "--daemon"]).1, Some(0));
    served.wait();
    let (said, status) = says(&served, &["status"]);
    assert!(said.contains("state        not running") && said.contains(&socket), "{said}");
    assert_eq!(status, Some(3));
    assert_eq!(json(&served, &["status", "--json"])["state"], "stopped");
}

#[test]
fn a_daemon_that_drains_says_so_and_serves() {
    let mut served = draining(600_000);
    let wasm = hostile();
    let mut client = client(&served, &wasm, "sleep");
    listed(&served, "a guest", |guests| guests.len() == 1);
    let begun = Instant::now();
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::TERM).expect("it runs");
    while json(&served, &["status", "--json"])["state"] != "draining" {
        assert!(begun.elapsed() < PATIENCE, "it does not say that it drains");
    }
    // A second time, and nothing more is waited for.
    kill_process(pid, Signal::TERM).expect("it runs");
    assert_eq!(served.wait().code(), Some(0));
    assert_eq!(wait(&mut client).code(), Some(75));
}

#[test]
fn a_frame_shows_devices_and_guests_that_decode() {
    let mut served = Served::start(exe());
    let wasm = hostile();
    let mut clients = [client(&served, &wasm, "endless"), client(&served, &wasm, "endless")];
    listed(&served, "two that decode", |guests| {
        let n_tokens = |guest: &Value| guest["usage"]["n_tokens"].as_u64();
        guests.len() == 2 && guests.iter().all(|guest| n_tokens(guest) > Some(0))
    });
    let info = json(&served, &["info", "--json"]);
    let of_device =
        |name: &str| info["devices"][0][name].as_u64().unwrap_or_else(|| panic!("{name} in {info}"));
    assert!(of_device("n_steps") > 0 && of_device("n_rows") > 0 && of_device("n_tokens") > 0, "{info}");
    assert_eq!(of_device("n_contexts_waiting"), 0, "a step has room for both");
    let memory = ["memory_bytes_used", "memory_bytes"].map(of_device);
    assert!(0 < memory[0] && memory[0] < memory[1], "{info}");

    let (frame, status) = says(&served, &["top", "--once", "--interval", "0.5"]);
    assert_eq!(status, Some(0));
    assert!(frame.lines().all(|line| line.chars().count() <= 80), "{frame}");
    let row = |start: &str| {
        let line = frame.lines().find(|line| line.trim_start().starts_with(start));
        line.unwrap_or_else(|| panic!("{start} in\n{frame}")).split_whitespace().collect::<Vec<_>>()
    };
    assert!(row("DEVICE").contains(&"QUEUE") && row("cpu").contains(&"tiny"), "{frame}");
    let place = row("GUEST").iter().position(|&head| head == "TOK/S").expect("a column");
    for guest in json(&served, &["ps", "--json"]).as_array().expect("a list") {
        let tokens_per_s: f64 = row(&guest["guest_id"].to_string())[place].parse().expect("a rate");
        assert!(tokens_per_s > 0.0, "{frame}");
    }
    let shown = json(&served, &["top", "--once", "--json"]);
    assert_eq!(shown["guests"].as_array().map(Vec::len), Some(2), "{shown}");
    assert!(shown["daemon"]["devices"][0]["n_rows"].as_u64() > Some(0), "{shown}");

    let (narrow, _) = says(&served, &["ps"]);
    assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
    assert!(narrow.contains("TOKENS") && !narrow.contains("CACHED"), "{narrow}");
    let (wide, _) = says(&served, &["ps", "--wide"]);
    assert!(wide.contains("CACHED") && wide.contains("GUESSES"), "{wide}");
    let said = output(&mut served.trellis(&["top"]));
    let error = String::from_utf8_lossy(&said.stderr).into_owned();
    assert_eq!(said.status.code(), Some(2));
    assert!(error.contains("there is none") && error.contains("`trellis ps --json`"), "{error}");

    assert_eq!(says(&served, &["stop", "--daemon"]).1, Some(0));
    served.wait();
    for client in &mut clients {
        assert_eq!(wait(client).code(), Some(75));
    }
}

#[test]
fn how_far_a_prompt_is_computed_is_listed() {
    block_on(async {
        let daemon = daemons::start(&daemons::config(exe()));
        let client = daemon.connect().await.expect("connected");
        let prompt = "Once upon a time there was a fox. ".repeat(45);
        let guest = client
            .start(Program::wasm(guests::example("complete")), with(&["--max-tokens", "1", &prompt]))
            .await
            .expect("started");
        let mut seen = None;
        daemons::until("a prompt is on its way", async || {
            let guests = client.ps().await.expect("it answers");
            seen = guests.first().map(|guest| (guest.n_prompt_tokens, guest.n_prompt_tokens_left));
            seen.is_some_and(|(n_tokens, _)| n_tokens > 0)
        })
        .await;
        let (n_tokens, n_left) = seen.expect("it was seen");
        assert!(n_tokens > 300 && (1..=n_tokens).contains(&n_left), "{n_left} of {n_tokens}");
        drop(guest);
    });
}
