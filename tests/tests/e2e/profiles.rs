//! Where a guest's time went: the parts are the whole, and what stops a guest loses nothing of it.

use std::fs::{self, File};
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;
use trellis_tests::daemons::{Served, output};
use trellis_tests::guests;

use crate::exe;
use crate::recordings::RUNS;

struct Desk {
    served: Served,
    folder: TempDir,
}

/// What a run said of its time, and its timeline.
struct Profiled {
    summary: Value,
    end: Value,
    timeline: Value,
}

impl Desk {
    fn new() -> Self {
        Self { served: Served::start(exe()), folder: tempfile::tempdir().expect("a folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a component under a profile.
    fn profile(&self, component: &[u8], options: &[&str], arguments: &[&str]) -> Profiled {
        let (wasm, file) = (self.path("guest.wasm"), self.path("profile.json"));
        fs::write(&wasm, component).expect("written");
        let paths = [&file, &wasm].map(|path| path.to_str().expect("UTF-8"));
        let words =
            [&["run", "--json", "--no-stdin"], options, &["--profile", paths[0], paths[1]], arguments];
        let ran = output(&mut self.served.trellis(&words.concat()));
        let lines = String::from_utf8_lossy(&ran.stdout).into_owned();
        let events: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let [.., summary, end] = &events[..] else { panic!("{lines}") };
        assert_eq!((&summary["type"], &end["type"]), (&"profile".into(), &"end".into()), "{lines}");
        let timeline = serde_json::from_reader(File::open(file).expect("written")).expect("JSON");
        Profiled { summary: summary.clone(), end: end.clone(), timeline }
    }
}

fn ns(of: &Value, name: &str) -> f64 {
    of[name].as_f64().unwrap_or_else(|| panic!("no {name} in {of}"))
}

/// A track of the timeline.
fn track<'a>(timeline: &'a Value, name: &str) -> &'a Value {
    let mut tracks = timeline["threads"].as_array().expect("tracks").iter();
    tracks.find(|track| track["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn the_parts_of_a_guests_time_are_the_time_by_the_clock() {
    let desk = Desk::new();
    let arguments = ["--rounds", "3", "Think step by step: what is 468 + 275?"];
    let Profiled { summary, end, timeline } = desk.profile(&guests::example("mcts"), &[], &arguments);
    assert_eq!(end["ok"], true, "{end}");
    let by_the_clock = 1e3 * end["usage"]["elapsed_us"].as_f64().expect("the daemon tells");
    let parts = ["starting_ns", "guest_ns", "host_ns", "device_ns", "waiting_ns", "turns_ns"];
    let sum: f64 = parts.iter().map(|part| ns(&summary, part)).sum();
    assert!((sum / by_the_clock - 1.0).abs() < 0.03, "{sum} of {by_the_clock}: {summary}");
    // It is the device that it waits for.
    assert!(ns(&summary, "device_ns") > 0.5 * sum && ns(&summary, "device_ns") <= ns(&summary, "steps_ns"));
    // On a GPU steps also have rows for what would have come after an end.
    assert!(ns(&summary, "n_tokens") >= ns(&end["usage"], "n_tokens"), "{summary} {end}");
    let calls = summary["calls"].as_array().expect("a list");
    let n_calls: u64 = calls.iter().map(|calls| calls["n"].as_u64().expect("a number")).sum();
    assert_eq!(summary["n_calls"], n_calls);

    // All of it is in the timeline.
    let [guest, device] = ["guest", "device"].map(|name| track(&timeline, name));
    assert_eq!(guest["markers"]["length"], n_calls);
    assert_eq!(device["markers"]["length"], summary["n_steps"]);
}

#[test]
fn a_guest_that_only_computes_is_seen_where_it_does_and_its_end_loses_nothing() {
    let desk = Desk::new();
    let Profiled { summary, end, timeline } =
        desk.profile(&guests::hostile(), &["--timeout", "1"], &["loop"]);
    assert_eq!(end["error"]["code"], "deadline_exceeded", "{end}");
    let (guest, wall) = (ns(&summary, "guest_ns"), ns(&summary, "wall_ns"));
    assert!(wall > 9e8 && guest > 0.5 * wall, "{summary}");
    let samples = track(&timeline, "guest")["samples"]["length"].as_u64().expect("a number");
    assert!(samples > 50, "one a millisecond that it computed: {samples}");
    assert!(timeline.to_string().contains("hostile::"), "functions have their names");
}

#[test]
fn what_cannot_be_written_is_refused_before_anything_runs() {
    let desk = Desk::new();
    let wasm = desk.path("guest.wasm");
    fs::write(&wasm, guests::example("chat")).expect("written");
    let (none, wasm) = (desk.path("none/profile.json"), wasm.to_str().expect("UTF-8").to_owned());
    let words = ["run", "--no-stdin", "--profile", none.to_str().expect("UTF-8"), &wasm, "What is 37 + 48?"];
    let ran = output(&mut desk.served.trellis(&words));
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(!ran.status.success() && ran.stdout.is_empty() && said.contains("cannot write"), "{said}");
}

/// Examples that look at each token, or at each of a text that is given: a crossing for each at most. All others leave that to the
/// engine.
const STEPPING: &[&str] = &[
    "asap",
    "awrs",
    "calculator",
    "chat",
    "chat-server",
    "constrained-beam",
    "conversation",
    "h2o",
    "http-chat",
    "lookahead",
    "prompt-lookup",
    "speculative",
    "thinking-budget",
    "tool-ahead",
];

/// Times that the others may look at the distribution, whatever the length of the text.
const N_LOOKS_MAX: u64 = 2;

/// Calls that draw, or look at a place.
const DRAWING: &[&str] = &[
    "decoding.step",
    "stream.next",
    "beam_search.step",
    "decoding.speculate",
    "decoding.top",
    "decoding.tops",
];

#[test]
fn no_example_crosses_more_than_once_a_token_and_most_never() {
    let desk = Desk::new();
    let mut wrong = Vec::new();
    for (name, arguments, _) in RUNS.iter().filter(|(name, ..)| *name != "probe") {
        let Profiled { summary, .. } = desk.profile(&guests::example(name), &[], arguments);
        let calls = summary["calls"].as_array().expect("a list").iter();
        let calls: Vec<&Value> = calls.collect();
        let n_of = |names: &[&str]| -> u64 {
            let called = calls.iter().filter(|calls| names.iter().any(|name| calls["name"] == *name));
            called.map(|calls| calls["n"].as_u64().expect("a number")).sum()
        };
        // A stream also says that it has ended.
        let (n_crossings, n_ends) = (n_of(DRAWING), n_of(&["stream.open"]));
        let n_tokens = summary["n_tokens"].as_u64().expect("a number");
        println!("{name}: {n_crossings} crossings for {n_tokens} tokens");
        if n_crossings > n_tokens + n_ends || n_crossings > N_LOOKS_MAX && !STEPPING.contains(name) {
            wrong.push((name, n_crossings, n_tokens));
        }
    }
    assert!(wrong.is_empty(), "crossings and tokens of {wrong:?}");
}
