//! Where a guest's time went: the parts are the whole, and what stops a guest loses nothing of it.

use std::fs::{self, File};
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;
use trellis_tests::daemons::{Served, output};
use trellis_tests::guests;

use crate::exe;

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

#[test]
fn the_parts_of_a_guests_time_are_the_time_by_the_clock() {
    let desk = Desk::new();
    let arguments = ["--particles", "8", "--max-tokens", "30", "Once upon a time"];
    let Profiled { summary, end, timeline } = desk.profile(&guests::example("smc"), &[], &arguments);
    assert_eq!(end["ok"], true, "{end}");
    let by_the_clock = 1e3 * end["usage"]["elapsed_us"].as_f64().expect("the daemon tells");
    let parts = ["starting_ns", "guest_ns", "host_ns", "device_ns", "waiting_ns", "turns_ns"];
    let sum: f64 = parts.iter().map(|part| ns(&summary, part)).sum();
    assert!((sum / by_the_clock - 1.0).abs() < 0.03, "{sum} of {by_the_clock}: {summary}");
    // It is the device that it waits for.
    assert!(ns(&summary, "device_ns") > 0.5 * sum && ns(&summary, "device_ns") <= ns(&summary, "steps_ns"));
    assert_eq!(summary["n_tokens"], end["usage"]["n_tokens"], "{summary} {end}");
    let calls = summary["calls"].as_array().expect("a list");
    let steps = calls.iter().find(|calls| calls["name"] == "decoding.step").expect("it steps");
    assert!(steps["n"].as_u64() <= Some(30), "one crossing for all particles: {steps}");
    let n_calls: u64 = calls.iter().map(|calls| calls["n"].as_u64().expect("a number")).sum();
    assert_eq!(summary["n_calls"], n_calls);

    // All of it is in the timeline.
    let threads = timeline["threads"].as_array().expect("two tracks");
    assert_eq!((&threads[0]["name"], &threads[1]["name"]), (&"guest".into(), &"device".into()));
    assert_eq!(threads[0]["markers"]["length"], n_calls);
    assert_eq!(threads[1]["markers"]["length"], summary["n_steps"]);
}

#[test]
fn a_guest_that_only_computes_is_seen_where_it_does_and_its_end_loses_nothing() {
    let desk = Desk::new();
    let Profiled { summary, end, timeline } =
        desk.profile(&guests::hostile(), &["--timeout", "1"], &["loop"]);
    assert_eq!(end["error"]["code"], "deadline_exceeded", "{end}");
    let (guest, wall) = (ns(&summary, "guest_ns"), ns(&summary, "wall_ns"));
    assert!(wall > 9e8 && guest > 0.5 * wall, "{summary}");
    let samples = timeline["threads"][0]["samples"]["length"].as_u64().expect("a number");
    assert!(samples > 50, "one a millisecond that it computed: {samples}");
    let names = timeline.to_string();
    assert!(
        names.contains("hostile::attacks::attack") || names.contains("hostile::run"),
        "functions by name"
    );
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
