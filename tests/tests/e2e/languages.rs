//! Guests in Python and in JavaScript: what `trellis new` writes, built with the tools of those languages, draws, streams, fails and is
//! bounded as any other guest.
//!
//! The tools lie where `.ci/run` installs them. Where they are missing the tests are skipped, unless `TRELLIS_REQUIRE_LANGS` is 1.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;
use trellis::config::Config;
use trellis::daemon::Daemon;
use trellis::guest::GuestLimits;
use trellis_client::{Event, Program};
use trellis_tests::daemons::{self, Ended, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;
use trellis_tests::pack::root;

use crate::exe;

const CPU_MS: u64 = 3_000;
const MEMORY_BYTES: usize = 128 << 20;
const N_CONTEXTS: u64 = 8;

const QUESTION: &str = "Tell me a story.";

/// The modes of the components under test; without one they are the example that `trellis new` writes.
const PYTHON_MODES: &str = r#"
import socket
import sys

import example
from wit_world.imports.contexts import Context
from wit_world.imports.models import Model


class WitWorld(example.WitWorld):
    def main(self, arguments):
        match arguments:
            case ["loop"]:
                while True:
                    pass
            case ["memory"]:
                held = []
                while True:
                    held.append(bytearray(1 << 20))
            case ["contexts"]:
                model = Model.open(None)
                held = [Context.create(model) for _ in range(100)]
            case ["raise"]:
                raise ValueError("so it is")
            case ["print"]:
                print("to the log")
                print("as a warning", file=sys.stderr)
            case ["network"]:
                socket.socket()
            case _:
                super().main(arguments)
"#;

const JAVASCRIPT_MODES: &str = r#"
import { Context } from "trellis:host/contexts@0.2.0";
import { Model } from "trellis:host/models@0.2.0";
import { arguments as args } from "trellis:host/session@0.2.0";
import { run as example } from "./example.js";
import { guest } from "./trellis-guest.js";

const modes = {
  loop() { for (;;); },
  memory() { for (const held = []; ; held.push(new Uint8Array(1 << 20).fill(1))); },
  contexts() {
    const model = Model.open();
    for (const held = []; held.length < 100; held.push(Context.create(model)));
  },
  raise() { throw new TypeError("so it is"); },
  print() { console.log("to the log"); console.error("as a warning"); },
};

export function run() {
  const mode = args().length === 1 && modes[args()[0]];
  return (mode ? guest(mode) : example)();
}
"#;

fn daemon() -> &'static Daemon {
    static DAEMON: OnceLock<Daemon> = OnceLock::new();
    DAEMON.get_or_init(|| {
        let limits = GuestLimits {
            cpu_ms: CPU_MS,
            memory_bytes: MEMORY_BYTES,
            n_contexts: N_CONTEXTS,
            ..daemons::limits()
        };
        daemons::start(&Config { limits, ..daemons::config(exe()) })
    })
}

/// A tool that `.ci/run` installs.
///
/// # Panics
/// It is not there, and has to be.
fn tool(path: &str) -> Option<PathBuf> {
    let path = root().join(".ci/cache").join(path);
    if path.exists() {
        return Some(path);
    }
    let is_required = std::env::var_os("TRELLIS_REQUIRE_LANGS").is_some_and(|value| value == "1");
    assert!(!is_required, "{} is missing; .ci/run installs it", path.display());
    eprintln!("skipped: {} is missing; .ci/run installs it", path.display());
    None
}

/// The folder that `trellis new` writes, with the example aside and modes in its place.
fn project(lang: &str, source: &str, example: &str, modes: &str) -> TempDir {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("modes");
    let new = daemons::output(daemons::trellis(exe()).args(["new", "--lang", lang]).arg(&folder));
    assert!(new.status.success(), "{new:?}");
    fs::rename(folder.join(source), folder.join(example)).expect("the guest is there");
    fs::write(folder.join(source), modes).expect("written");
    parent
}

/// The component that a tool makes there.
fn built(project: &TempDir, tool: &mut Command) -> Vec<u8> {
    let folder = project.path().join("modes");
    let output = guests::clean(tool.current_dir(&folder)).output().expect("the tool runs");
    assert!(output.status.success(), "{output:?}");
    fs::read(folder.join("modes.wasm")).expect("it is called as the folder is")
}

fn python() -> Option<&'static [u8]> {
    static BUILT: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let build = || {
        let tool = tool("python/bin/componentize-py")?;
        let project = project("python", "app.py", "example.py", PYTHON_MODES);
        // The command of its README.
        let arguments = ["-d", "wit", "-w", "guest", "componentize", "app", "-o", "modes.wasm"];
        Some(built(&project, Command::new(tool).args(arguments)))
    };
    BUILT.get_or_init(build).as_deref()
}

fn javascript() -> Option<&'static [u8]> {
    static BUILT: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let build = || {
        let modules = tool("javascript/node_modules")?;
        let project = project("javascript", "app.js", "example.js", JAVASCRIPT_MODES);
        symlink(modules, project.path().join("modes/node_modules")).expect("linked");
        // That of PyPI where there is one.
        let own = root().join(".ci/cache/python/bin/node");
        let node = if own.exists() { own.as_os_str() } else { OsStr::new("node") };
        Some(built(&project, Command::new(node).arg("build.js")))
    };
    BUILT.get_or_init(build).as_deref()
}

async fn run(wasm: &[u8], arguments: &[&str]) -> Ended {
    let client = daemon().connect().await.expect("connected");
    daemons::run(&client, wasm, with(arguments)).await
}

/// What it says, each piece as it came.
async fn pieces(wasm: &[u8], seed: u64, arguments: &[&str]) -> Vec<String> {
    let client = daemon().connect().await.expect("connected");
    let mut options = with(arguments);
    options.seed = Some(seed);
    let mut guest = client.start(Program::wasm(wasm.to_vec()), options).await.expect("connected");
    let mut pieces = Vec::new();
    while let Some(event) = guest.next().await {
        if let Event::Text { text } = event.expect("it ends well") {
            pieces.push(text);
        }
    }
    pieces
}

async fn draws_and_streams(wasm: &[u8]) {
    assert_eq!(pieces(wasm, 7, &["What is 37 + 48?"]).await.concat().trim(), "85");

    // Nearly without temperature it says what is most probable, token by token.
    let cold = pieces(wasm, 1, &["--temperature", "0.001", QUESTION]).await;
    assert!(cold.len() > 20, "{cold:?}");
    let client = daemon().connect().await.expect("connected");
    let greedy = with(&["--max-tokens", "64", QUESTION]);
    let greedy = daemons::run(&client, &guests::example("chat"), greedy).await.well();
    assert_eq!(cold.concat().trim(), greedy.text.trim());

    // With it, the seed decides.
    let warm = ["--temperature", "2", QUESTION];
    let first = pieces(wasm, 1, &warm).await;
    assert_eq!(first, pieces(wasm, 1, &warm).await);
    assert_ne!(first, pieces(wasm, 2, &warm).await);
    assert_ne!(first, cold);
}

async fn is_bounded_as_any_other(wasm: &[u8], out_of_memory: &str) {
    let ended = run(wasm, &["loop"]).await;
    let body = ended.reason();
    let parts = (body.code.as_str(), body.name.as_deref(), body.limit);
    assert_eq!(parts, ("budget_exceeded", Some("cpu_ms"), Some(CPU_MS)), "{body:?}");
    // Memory that is denied is an exception that the guest may catch; where even that has no room, it is ended.
    let ended = run(wasm, &["memory"]).await;
    let body = ended.reason();
    let says_so = body.code.as_str() == "guest_failed" && body.message.contains(out_of_memory);
    let limit = (body.name.as_deref(), body.limit);
    assert!(says_so || limit == (Some("memory_bytes"), Some(MEMORY_BYTES as u64)), "{body:?}");
    // A budget of calls is an exception as well.
    let ended = run(wasm, &["contexts"]).await;
    let body = ended.reason();
    assert_eq!(body.code.as_str(), "guest_failed", "{body:?}");
    assert!(body.message.contains("contexts of the guest"), "{body:?}");
}

/// An exception says where it comes from; a text alone is the guest's own words.
async fn fails_with_words(wasm: &[u8], exception: &str, place: &str) {
    let ended = run(wasm, &["raise"]).await;
    let body = ended.reason();
    assert_eq!(body.code.as_str(), "guest_failed", "{body:?}");
    assert!(body.message.contains(exception) && body.message.contains(place), "{body:?}");
    let ended = run(wasm, &[]).await;
    let message = &ended.reason().message;
    assert!(message.contains("usage: [--temperature T] QUESTION") && !message.contains(place), "{message}");
}

async fn logs(wasm: &[u8]) {
    let ended = run(wasm, &["print"]).await.well();
    assert_eq!(ended.log, ["to the log", "as a warning"]);
}

#[test]
fn python_draws_by_a_policy_of_its_own_and_streams() {
    let Some(wasm) = python() else { return };
    block_on(draws_and_streams(wasm));
}

#[test]
fn python_is_bounded_as_any_other_guest() {
    let Some(wasm) = python() else { return };
    block_on(is_bounded_as_any_other(wasm, "MemoryError"));
}

#[test]
fn python_fails_with_its_traceback_and_prints_to_the_log() {
    let Some(wasm) = python() else { return };
    block_on(async {
        fails_with_words(wasm, "ValueError: so it is", "in main").await;
        logs(wasm).await;
    });
}

#[test]
fn python_has_the_module_of_sockets_and_no_network() {
    let Some(wasm) = python() else { return };
    let ended = block_on(run(wasm, &["network"]));
    let body = ended.reason();
    assert_eq!(body.code.as_str(), "guest_failed", "{body:?}");
    assert!(body.message.contains("PermissionError"), "{body:?}");
}

#[test]
fn javascript_draws_by_a_policy_of_its_own_and_streams() {
    let Some(wasm) = javascript() else { return };
    block_on(draws_and_streams(wasm));
}

#[test]
fn javascript_is_bounded_as_any_other_guest() {
    let Some(wasm) = javascript() else { return };
    block_on(is_bounded_as_any_other(wasm, "out of memory"));
}

#[test]
fn javascript_fails_with_its_stack_and_prints_to_the_log() {
    let Some(wasm) = javascript() else { return };
    block_on(async {
        fails_with_words(wasm, "TypeError: so it is", "raise@").await;
        logs(wasm).await;
    });
}
