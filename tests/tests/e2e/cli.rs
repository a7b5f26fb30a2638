//! The `trellis` command as people and scripts use it.

use std::fs;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::io::ioctl_fionread;
use rustix::pipe::fcntl_getpipe_size;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use trellis_tests::daemons::{self, Served, output, wait};
use trellis_tests::guests;

use crate::exe;

/// The command without a daemon, with a cache of the tests' own.
fn alone(arguments: &[&str]) -> Command {
    let mut command = daemons::trellis(exe());
    command.args(arguments).env("XDG_CACHE_HOME", cache());
    command
}

fn cache() -> std::path::PathBuf {
    let cache = std::path::Path::new(exe()).with_file_name("tests-cache-home");
    fs::create_dir_all(&cache).expect("the folder can be made");
    cache
}

/// Builds what the commands would build otherwise, in a time of its own.
fn build_examples() {
    assert!(!guests::example("chat").is_empty());
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("it is text")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("it is text")
}

/// Whether all lines fit a screen.
fn fits(text: &str) -> bool {
    text.lines().all(|line| line.chars().count() <= 80)
}

/// Asserts that a command did what it was asked to; its standard output.
fn done(command: &mut Command) -> String {
    let output = output(command);
    assert!(output.status.success(), "{:?}: {}", output.status, stderr(&output));
    stdout(&output)
}

/// Asserts that a command failed with this status; its standard error.
fn failed(command: &mut Command, status: i32) -> String {
    let output = output(command);
    assert_eq!(output.status.code(), Some(status), "{}{}", stdout(&output), stderr(&output));
    stderr(&output)
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a process")).expect("not 0");
    kill_process(pid, signal).expect("it runs");
}

/// Waits until a pipe without a reader is full. A piece that does not fit into the rest of a page goes to the next one,
/// so a full pipe may hold little more than half of its size; but it takes no more.
fn fills(pipe: impl AsFd) {
    let n_bytes_min = fcntl_getpipe_size(&pipe).expect("it is a pipe") as u64 / 2;
    let begun = Instant::now();
    let (mut n_bytes, mut n_still) = (0, 0);
    while n_still < 20 {
        assert!(begun.elapsed() < daemons::PATIENCE, "nothing fills the pipe");
        std::thread::sleep(Duration::from_millis(50));
        let now = ioctl_fionread(&pipe).expect("it is a pipe");
        n_still = if now > n_bytes || now < n_bytes_min { 0 } else { n_still + 1 };
        n_bytes = now;
    }
}

/// The component of the hostile guest in a file.
fn hostile() -> (TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("hostile.wasm");
    fs::write(&path, guests::hostile()).expect("written");
    let path = path.to_str().expect("UTF-8").to_owned();
    (folder, path)
}

/// The client of a guest that computes without end, once it is there.
fn computing(served: &Served) -> Child {
    let (_folder, path) = hostile();
    let mut client = served.trellis(&["run", "--no-stdin", &path, "loop"]);
    let client = client.stderr(Stdio::piped()).spawn().expect("it runs");
    let begun = Instant::now();
    while done(&mut served.trellis(&["ps", "--json"])).trim() == "[]" {
        assert!(begun.elapsed() < daemons::PATIENCE, "the guest does not come up");
    }
    client
}

#[test]
fn run_without_a_daemon_says_so_and_answers() {
    build_examples();
    let ran = output(&mut alone(&["run", "chat", "What is 37 + 48?"]));
    assert!(ran.status.success(), "{}", stderr(&ran));
    assert_eq!(stdout(&ran), "85\n");
    let said = stderr(&ran);
    assert!(said.contains("running inside this process (no daemon is running): tiny on "), "{said}");

    assert_eq!(done(&mut alone(&["chat", "What is 37 + 48?"])), "85\n");
    let text =
        done(&mut alone(&["run", "--model", "draft", "--seed", "3", "complete", "--max-tokens", "5", "One"]));
    assert!(!text.trim().is_empty());
}

#[test]
fn json_is_one_object_a_line() {
    build_examples();
    let text = done(&mut alone(&["--json", "run", "chat", "What is 37 + 48?"]));
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect();
    let of = |kind: &str| lines.iter().filter(|line| line["type"] == kind).collect::<Vec<_>>();
    let answer: String = of("text").iter().map(|line| line["text"].as_str().expect("text")).collect();
    assert_eq!(answer, "85\n");
    assert_eq!(of("started").len(), 1);
    let end = lines.last().expect("there are lines");
    assert_eq!((&end["type"], &end["ok"]), (&"end".into(), &true.into()));
    assert!(end["usage"]["n_tokens"].as_u64().expect("a number") > 0, "{end}");

    // A failure, too.
    let ran = output(&mut alone(&["--json", "run", "chat", "--no-such-option", "x"]));
    assert_eq!(ran.status.code(), Some(1));
    let last: Value = serde_json::from_str(stdout(&ran).lines().last().expect("a line")).expect("JSON");
    assert_eq!((&last["ok"], &last["error"]["code"]), (&false.into(), &"guest_failed".into()));
    assert!(!stderr(&ran).contains("guest_failed"), "it is said once: {}", stderr(&ran));
    let ran = output(&mut alone(&["--json", "run", "no-such-guest"]));
    let error: Value = serde_json::from_str(stderr(&ran).lines().last().expect("a line")).expect("JSON");
    assert_eq!(error["type"], "error", "{error}");
}

#[test]
fn check_says_what_a_guest_asks_for_and_what_is_refused() {
    build_examples();
    let text = done(&mut alone(&["--json", "check", "chat"]));
    let checked: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(checked["world"], "trellis:host@0.2.0", "{checked}");
    let imports = checked["imports"].as_array().expect("a list");
    assert!(
        imports.iter().any(|name| name.as_str().is_some_and(|name| name.contains("/streams@"))),
        "{checked}"
    );
    for part in ["bytes", "code_bytes", "memory_bytes"] {
        assert!(checked[part].as_u64().expect("a number") > 10_000, "{part}: {checked}");
    }
    assert!(done(&mut alone(&["check", "chat"])).contains("world        trellis:host@0.2.0"));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("guest.wasm");
    // An empty component.
    fs::write(&path, b"\0asm\x0d\0\x01\0").expect("written");
    let said = failed(&mut alone(&["check", path.to_str().expect("UTF-8")]), 2);
    assert!(said.contains("would be refused") && said.contains("trellis_guest::main!"), "{said}");
}

#[test]
fn build_says_where_the_component_is() {
    build_examples();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chat.wasm");
    let path = path.to_str().expect("UTF-8");
    let text = done(&mut alone(&["build", "chat", "-o", path]));
    assert!(text.contains(path), "{text}");
    assert_eq!(done(&mut alone(&["run", path, "What is 37 + 48?"])), "85\n");
    let built: Value = serde_json::from_str(&done(&mut alone(&["build", "--json", "chat"]))).expect("JSON");
    assert!(built["bytes"].as_u64().expect("a number") > 1000, "{built}");
}

#[test]
fn a_daemon_is_used_listed_and_stopped() {
    build_examples();
    let mut served = Served::start(exe());
    let ran = output(&mut served.trellis(&["run", "chat", "What is 37 + 48?"]));
    assert!(ran.status.success(), "{}", stderr(&ran));
    assert_eq!(stdout(&ran), "85\n");
    assert!(!stderr(&ran).contains("inside this process"), "{}", stderr(&ran));

    let models: Value =
        serde_json::from_str(&done(&mut served.trellis(&["models", "--json"]))).expect("JSON");
    assert_eq!((&models[0]["name"], &models[0]["is_default"]), (&"tiny".into(), &true.into()));
    let models = done(&mut served.trellis(&["models"]));
    assert!(models.contains("tiny") && fits(&models), "{models}");
    assert!(done(&mut served.trellis(&["models", "--wide"])).contains("ARCHITECTURE"));
    let (narrow, wide) =
        (done(&mut served.trellis(&["info"])), done(&mut served.trellis(&["info", "--wide"])));
    assert!(fits(&narrow) && wide.lines().count() <= narrow.lines().count(), "{narrow}");
    let info: Value = serde_json::from_str(&done(&mut served.trellis(&["info", "--json"]))).expect("JSON");
    assert_eq!(info["pid"], served.pid());
    assert_eq!(info["models"], serde_json::json!(["tiny"]));
    assert!(info["resident_bytes"].as_u64().expect("a number") > 1 << 20, "{info}");

    // One guest that stays until it is stopped.
    let (_folder, path) = hostile();
    let mut sleeper = served.trellis(&["run", "--no-stdin", &path, "sleep"]).spawn().expect("it runs");
    let ps =
        || -> Value { serde_json::from_str(&done(&mut served.trellis(&["ps", "--json"]))).expect("JSON") };
    let begun = Instant::now();
    while ps().as_array().expect("a list").is_empty() {
        assert!(begun.elapsed() < daemons::PATIENCE, "the guest does not come up");
    }
    let listed = ps();
    let id = listed[0]["guest_id"].as_u64().expect("a number").to_string();
    assert_eq!(listed.as_array().expect("a list").len(), 1);
    let stem = Path::new(&path).file_stem().expect("a name").to_string_lossy();
    assert!(listed[0]["program"].as_str().expect("a text").starts_with(&format!("{stem}@")), "{listed}");
    let table = done(&mut served.trellis(&["ps"]));
    assert!(table.contains("GUEST") && table.lines().nth(1).expect("a row").contains(&id), "{table}");
    let said = done(&mut served.trellis(&["stop", &id]));
    // A machine that is busy may take longer than `stop` waits.
    assert!(said.contains(&format!("stopped guest {id}")) || said.contains("was told to stop"), "{said}");
    assert_eq!(wait(&mut sleeper).code(), Some(1));
    assert_eq!(ps(), serde_json::json!([]));
    let said = failed(&mut served.trellis(&["stop", &id]), 2);
    assert!(said.contains("no guest") && said.contains("`trellis ps`"), "{said}");
    let said = failed(&mut served.trellis(&["stop", "abc"]), 2);
    assert!(said.contains("expected the number of a guest, which `trellis ps` lists"), "{said}");
    let said = failed(&mut served.trellis(&["run", "no-such-guest"]), 2);
    assert!(said.contains("no guest is named \"no-such-guest\"") && said.contains("best-of-n"), "{said}");

    assert!(served.socket().exists());
    done(&mut served.trellis(&["stop", "--daemon"]));
    assert_eq!(served.wait().code(), Some(0));
    assert!(!served.socket().exists());
    let said = failed(&mut served.trellis(&["ps"]), 2);
    assert!(said.contains("no daemon is running") && said.contains("`trellis serve`"), "{said}");
}

#[test]
fn a_second_daemon_is_refused_and_a_terminated_one_leaves_nothing() {
    let mut served = Served::start(exe());
    let said = failed(&mut served.trellis(&["serve"]), 2);
    assert!(said.contains(&format!("process {}", served.pid())), "{said}");
    assert!(said.contains("trellis stop --daemon") && said.contains("--socket"), "{said}");
    done(&mut served.trellis(&["info"]));

    // A guest that computes does not hold the daemon up, and its client hears why it ended.
    let mut client = computing(&served);
    signal(served.pid(), Signal::TERM);
    assert_eq!(served.wait().code(), Some(0));
    assert!(!served.socket().exists());
    assert_eq!(wait(&mut client).code(), Some(75), "it may be tried again");
    let mut said = String::new();
    client.stderr.take().expect("piped").read_to_string(&mut said).expect("it is text");
    assert!(said.starts_with("error: ") && said.contains("going down"), "{said}");
}

#[test]
fn clients_of_a_daemon_that_is_killed_may_try_again() {
    let mut served = Served::start(exe());
    let mut client = computing(&served);
    signal(served.pid(), Signal::KILL);
    served.wait();
    assert_eq!(wait(&mut client).code(), Some(75), "as where the daemon goes down");
    let mut said = String::new();
    client.stderr.take().expect("piped").read_to_string(&mut said).expect("it is text");
    assert!(said.starts_with("error: ") && said.contains("the connection to the daemon is lost"), "{said}");
}

#[test]
fn an_interrupt_cancels_cleanly() {
    let served = Served::start(exe());
    let (_folder, path) = hostile();
    for mode in ["sleep", "loop", "endless"] {
        let mut client = served.trellis(&["run", "--no-stdin", &path, mode]).spawn().expect("it runs");
        let begun = Instant::now();
        while done(&mut served.trellis(&["ps", "--json"])).trim() == "[]" {
            assert!(begun.elapsed() < daemons::PATIENCE, "{mode}: the guest does not come up");
        }
        signal(client.id(), Signal::INT);
        assert_eq!(wait(&mut client).code(), Some(130), "{mode}");
        // The client left when its guest had ended.
        assert_eq!(done(&mut served.trellis(&["ps", "--json"])).trim(), "[]", "{mode}");
    }
    let info: Value = serde_json::from_str(&done(&mut served.trellis(&["info", "--json"]))).expect("JSON");
    assert_eq!(info["n_pages_free"], info["n_pages"], "{info}");

    // The same without a daemon, where the guest is inside the process that is interrupted.
    let mut client = alone(&["--json", "run", "--no-stdin", &path, "endless"]);
    let mut client = client.stdout(Stdio::piped()).spawn().expect("it runs");
    let mut first = [0; 16];
    let mut out = client.stdout.take().expect("piped");
    out.read_exact(&mut first).expect("it sends something");
    let reader = std::thread::spawn(move || {
        let mut rest = String::new();
        out.read_to_string(&mut rest).expect("it is text");
        rest
    });
    signal(client.id(), Signal::INT);
    assert_eq!(wait(&mut client).code(), Some(130));
    let rest = reader.join().expect("no panic");
    assert!(rest.lines().last().expect("a last line").contains("\"end\""), "{rest}");
}

#[test]
fn an_interrupt_is_heard_though_nobody_reads() {
    let served = Served::start(exe());
    let (_folder, path) = hostile();
    let listed = || done(&mut served.trellis(&["ps", "--json"])).trim() != "[]";
    for (mode, blocked) in [("flood-text", "output"), ("flood-log", "errors")] {
        let mut command = served.trellis(&["run", "--no-stdin", &path, mode]);
        match blocked {
            "output" => command.stdout(Stdio::piped()),
            _ => command.stderr(Stdio::piped()),
        };
        let mut client = command.spawn().expect("it runs");
        let begun = Instant::now();
        while !listed() {
            assert!(begun.elapsed() < daemons::PATIENCE, "{mode}: the guest does not come up");
        }
        // The guest sends on: far more than fits is on its way.
        match blocked {
            "output" => fills(client.stdout.as_ref().expect("piped")),
            _ => fills(client.stderr.as_ref().expect("piped")),
        }
        signal(client.id(), Signal::INT);
        let begun = Instant::now();
        while listed() {
            assert!(begun.elapsed() < daemons::PATIENCE, "{mode}: the interrupt is lost");
        }
        assert!(client.try_wait().expect("asked").is_none(), "{mode}: it still wants to write what came");
        signal(client.id(), Signal::INT);
        assert_eq!(wait(&mut client).code(), Some(130), "{mode}: the second one ends it");
    }

    // An error stream that is closed ends nothing and keeps nothing from being said elsewhere.
    for mode in ["sleep", "flood-log"] {
        let mut client = served.trellis(&["run", "--no-stdin", &path, mode]);
        let mut client = client.stderr(Stdio::piped()).spawn().expect("it runs");
        drop(client.stderr.take());
        let begun = Instant::now();
        while !listed() {
            assert!(begun.elapsed() < daemons::PATIENCE, "{mode}: the guest does not come up");
        }
        signal(client.id(), Signal::INT);
        assert_eq!(wait(&mut client).code(), Some(130), "{mode}");
        assert!(!listed(), "{mode}");
    }
}

#[test]
fn a_file_of_settings_is_looked_at_before_a_daemon_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trellis.toml");
    let file = path.to_str().expect("UTF-8");
    let check = |text: &str| {
        fs::write(&path, text).expect("written");
        alone(&["config", "check", file])
    };
    let example = done(&mut alone(&["config", "example"]));
    // Its lines fit a screen.
    let one_line = |told: &str| told.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(
        one_line(&done(&mut check(&example))),
        format!("{file}: a daemon would start with it; models: tiny; it sets nothing")
    );
    let told = done(&mut check("models = ['draft']\n[limits]\ncpu_ms = 7"));
    assert!(one_line(&told).ends_with("models: draft; it sets 2 (limits.cpu_ms, models)"), "{told}");
    assert!(
        fits(&done(&mut alone(&["config", "show"])))
            && fits(&done(&mut alone(&["config", "show", "models"])))
    );
    let classes =
        "[classes.research-and-development]\nusers = [1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008]";
    fs::write(&path, classes).expect("written");
    let show = |more: &[&str]| done(alone(&["config", "show", "--config", file]).args(more));
    assert!(fits(&show(&[])) && !show(&[]).contains("1008") && show(&["--wide"]).contains("1008"));
    for (text, complaint) in [
        ("[limits]\ncpu_mss = 7", "did you mean \"cpu_ms\"?"),
        ("models = ['/no/such/model']", "/no/such/model"),
        ("[classes.live]\nusers = ['nobody-of-this-name']", "nobody-of-this-name"),
        ("[permissions]\nload = ['@nobody-of-this-name']", "permissions.load: this machine has no group"),
        ("[permissions]\nload = ['@']", "names nobody"),
        ("log = 'loud'", "expected error, warn, info"),
        ("[policy]\ncomponent = '/no/such/policy.wasm'", "/no/such/policy.wasm"),
        ("guests_dir = '/no/such/folder'", "/no/such/folder"),
    ] {
        let said = failed(&mut check(text), 2);
        assert!(said.contains(complaint), "{text}: {said}");
    }

    fs::write(&path, "[limits]\ncpu_ms = 7").expect("written");
    let shown = done(&mut alone(&["--json", "config", "show", "--config", file]));
    let shown: Vec<Value> = serde_json::from_str(&shown).expect("JSON");
    let of = |name: &str| shown.iter().find(|setting| setting["name"] == name).expect("it is there");
    assert_eq!((&of("limits.cpu_ms")["value"], &of("limits.cpu_ms")["source"]), (&7.into(), &"file".into()));
    assert_eq!(of("models")["source"], "default");
    let named = done(alone(&["config", "show", "socket"]).env("TRELLIS_SOCKET", "/run/elsewhere.sock"));
    assert!(named.contains("/run/elsewhere.sock  environment"), "{named}");
    assert!(named.contains("socket: Where the daemon listens"), "{named}");
    let said = failed(&mut alone(&["config", "show", "abacus"]), 2);
    assert!(said.contains("`trellis config show` lists all"), "{said}");
}

#[test]
fn the_exit_status_and_the_message_say_whose_fault_it_is() {
    let (folder, path) = hostile();
    assert_eq!(done(&mut alone(&["run", "--no-stdin", &path, "exit-well"])), "");
    let said = failed(&mut alone(&["run", "--no-stdin", &path, "error"]), 1);
    assert!(said.contains("error: the guest is not content"), "{said}");
    let said = failed(&mut alone(&["run", "--no-stdin", "chat", "--seed", "7", "x"]), 1);
    assert!(said.contains("there is no option --seed") && said.contains("before the guest"), "{said}");
    let elsewhere = folder.path().join("no-socket").display().to_string();
    let said = failed(alone(&["ps"]).env("TRELLIS_SOCKET", &elsewhere), 2);
    assert!(said.contains(&elsewhere), "{said}");
    let said = failed(&mut alone(&["run", "--no-stdin", "--timeout", "0.3", &path, "sleep"]), 1);
    assert!(said.contains("ran for its 300 ms"), "{said}");

    let said = failed(&mut alone(&["run", "./nowhere"]), 2);
    assert!(said.contains("./nowhere does not exist"), "{said}");
    let empty = folder.path().to_str().expect("UTF-8");
    let said = failed(&mut alone(&["run", empty]), 2);
    assert!(said.contains("has no Cargo.toml") && said.contains("hint: "), "{said}");
    let said = failed(&mut alone(&["run", "no-such-guest"]), 2);
    assert!(said.contains("known here: asap, awrs, beam, best-of-n"), "{said}");
    let said = failed(&mut alone(&["run", "--model", "gpt-17", &path]), 2);
    assert!(said.contains("\"gpt-17\"") && said.contains("tiny, draft") && said.contains("hint: "), "{said}");
    let said = failed(alone(&["run", "--device", "cuda", &path]).env("CUDA_VISIBLE_DEVICES", ""), 2);
    assert!(said.contains("CUDA cannot be used: ") && said.contains("--device cpu"), "{said}");
    let said = failed(&mut alone(&["run", "--device", "cpu", "--dtype", "bf16", &path]), 2);
    assert!(said.contains("dtype bf16 needs a GPU"), "{said}");
    let text = folder.path().join("text.wasm");
    fs::write(&text, "hello").expect("written");
    let said = failed(&mut alone(&["run", "--no-stdin", text.to_str().expect("UTF-8")]), 2);
    assert!(said.contains("not WebAssembly"), "{said}");
    // A file that has no end is read no further than that is seen.
    let said = failed(&mut alone(&["serve", "--config", "/dev/zero"]), 2);
    assert!(said.contains("/dev/zero: it has more than "), "{said}");
    let mut input = tempfile::tempfile().expect("a file");
    input.write_all(b"a message\n\xff\n").expect("written");
    input.rewind().expect("at its beginning");
    let said = failed(alone(&["run", &path, "wait-for-messages"]).stdin(input), 2);
    assert!(
        said.contains("line 2 is not UTF-8") && said.contains("not all of standard input was sent"),
        "{said}"
    );
    for command in [&["ps"][..], &["models"], &["info"], &["stop", "--daemon"]] {
        let said = failed(&mut alone(command), 2);
        assert!(
            said.contains("no daemon is running") && said.contains("`trellis serve`"),
            "{command:?}: {said}"
        );
    }
    let said = failed(&mut alone(&["ps", "--json"]), 2);
    let error: Value = serde_json::from_str(said.trim()).expect("JSON");
    assert!(error["error"]["message"].as_str().expect("a text").contains("no daemon is running"), "{error}");
    failed(&mut alone(&["no-such-command"]), 2);
    failed(&mut alone(&["stop"]), 2);

    // A reader that goes away is no error.
    let mut ran = alone(&["run", "--no-stdin", &path, "flood-text"]);
    let mut ran = ran.stdout(Stdio::piped()).spawn().expect("it runs");
    let mut out = ran.stdout.take().expect("piped");
    out.read_exact(&mut [0; 100]).expect("it sends something");
    drop(out);
    assert_eq!(wait(&mut ran).code(), Some(0));
}
