//! From nothing to a guest whose tests run next to the real host.

use std::fs::{self, OpenOptions};
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;

use serde_json::Value;
use tempfile::TempDir;
use trellis::config::Config;
use trellis_tests::daemons::{self, Served, output};
use trellis_tests::guests;
use trellis_tests::pack::root;

use crate::exe;

/// What an author adds to see how it fails.
const MORE: &str = r#"
#[cfg(test)]
mod more {
    use super::*;

    #[test]
    fn falls() {
        println!("a word before");
        let answers: Vec<u32> = vec![85];
        assert_eq!(answers.len(), 2, "too few");
    }

    #[test]
    fn gives_up() -> Result {
        Model::open("no-such-model").map(drop)
    }

    #[test]
    fn leaves() {
        std::process::exit(0);
    }

    #[test]
    fn hears_nothing() -> Result {
        assert!(trellis_guest::receive()?.is_none());
        println!("nobody");
        eprintln!("is there");
        Ok(())
    }

    #[test]
    #[ignore = "slow"]
    fn sleeps() {}

    #[test]
    #[should_panic]
    fn is_meant_to_fall() {
        panic!("as it should");
    }
}
"#;

struct Desk {
    folder: TempDir,
}

impl Desk {
    fn trellis(&self, arguments: &[&str]) -> Command {
        let mut command = guests::for_building(daemons::trellis(exe())).expect("there is a compiler");
        command.args(arguments).current_dir(self.folder.path());
        command
    }

    fn new_guest(&self, name: &str, template: &str) -> PathBuf {
        let made = output(&mut self.trellis(&["new", name, "--template", template]));
        assert!(made.status.success(), "{}", text(&made.stderr));
        assert!(text(&made.stdout).contains(&format!("trellis test {name}")), "{}", text(&made.stdout));
        let folder = self.folder.path().join(name);
        // The versions that the examples have.
        let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-examples/Cargo.lock");
        fs::copy(lock, folder.join("Cargo.lock")).expect("copied");
        folder
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn assert_passed(ran: &Output, tests: &[&str]) {
    let said = text(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", text(&ran.stderr));
    for test in tests {
        assert!(said.contains(&format!("test tests::{test} ... ok")), "{said}");
    }
}

#[test]
fn a_new_guest_passes_its_tests_and_says_what_fails() {
    if guests::for_building(Command::new("cargo")).is_none() {
        return;
    }
    let desk = Desk { folder: tempfile::tempdir().expect("a folder") };
    desk.new_guest("looks", "stream");
    let ran = output(&mut desk.trellis(&["test", "looks"]));
    assert_passed(&ran, &["it_says_what_it_knows", "it_says_nothing_where_it_has_to_be_sure_of_everything"]);
    desk.new_guest("draws", "sampler");
    let ran = output(&mut desk.trellis(&["test", "draws"]));
    assert_passed(&ran, &["without_width_it_is_greedy", "with_width_the_seed_decides"]);

    let folder = desk.new_guest("asks", "generate");
    let mut source = OpenOptions::new().append(true).open(folder.join("src/lib.rs")).expect("it is there");
    source.write_all(MORE.as_bytes()).expect("written");
    let ran = output(&mut desk.trellis(&["test", "asks"]));
    let said = text(&ran.stdout);
    assert_eq!(ran.status.code(), Some(101), "{said}{}", text(&ran.stderr));
    for line in [
        "test tests::it_knows_its_sums ... ok",
        "test more::falls ... FAILED",
        "test more::gives_up ... FAILED",
        "test more::sleeps ... ignored",
        "test more::is_meant_to_fall ... ignored (a test that should panic: a panic ends a guest)",
        "test more::hears_nothing ... ok",
        "---- more::leaves ----\nit ended the program\n",
        "---- more::falls ----\na word before\n",
        "panicked at src/lib.rs:",
        "too few",
        "Error: UnknownModel",
        "2 passed; 3 failed; 2 ignored",
    ] {
        assert!(said.contains(line), "no {line:?} in {said}");
    }

    let ran = output(&mut desk.trellis(&[
        "--json",
        "test",
        "asks",
        "--",
        "nothing",
        "--exact",
        "more::hears_nothing",
    ]));
    let done: Vec<Value> =
        text(&ran.stdout).lines().map(|line| serde_json::from_str(line).expect("JSON alone")).collect();
    assert_eq!(done[0]["output"], serde_json::json!(["nobody", "is there"]), "{done:?}");

    // Of a part of them, as data.
    let ran = output(&mut desk.trellis(&["--json", "test", "asks", "--", "more::falls"]));
    let first = text(&ran.stdout);
    let done: Value = serde_json::from_str(first.lines().next().expect("a line")).expect("JSON");
    assert_eq!((&done["name"], &done["outcome"]), (&"more::falls".into(), &"failed".into()), "{first}");
}

#[test]
fn a_guest_is_built_and_run_again_when_its_source_changes() {
    if guests::for_building(Command::new("cargo")).is_none() {
        return;
    }
    let desk = Desk { folder: tempfile::tempdir().expect("a folder") };
    let source = desk.new_guest("asks", "generate").join("src/lib.rs");
    let mut command = desk.trellis(&["run", "--local", "--watch", "asks", "What is 37 + 48?"]);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let lines_of = |stream: Box<dyn Read + Send>| {
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            BufReader::new(stream).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        move |part: &str| {
            let is_it = |line: &String| line.contains(part);
            let found = std::iter::from_fn(|| lines.recv_timeout(daemons::PATIENCE).ok()).find(is_it);
            assert!(found.is_some(), "nothing said {part:?}");
        }
    };
    let said = lines_of(Box::new(child.stdout.take().expect("piped")));
    let noted = lines_of(Box::new(child.stderr.take().expect("piped")));
    said("85");
    noted("waiting for a change");
    let good = fs::read_to_string(&source).expect("it is there");
    fs::write(&source, good.replace("fn run", "fn ran")).expect("written");
    noted("error");
    noted("waiting for a change");
    fs::write(&source, format!("{good}\n// more\n")).expect("written");
    said("85");
    noted("waiting for a change");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it is there");
    assert_eq!(daemons::wait(&mut child).code(), Some(130));
}

#[test]
fn what_the_operator_has_put_there_comes_before_an_example_of_its_name() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("chat.wasm"), guests::hostile()).expect("written");
    let config = Config { guests_dir: Some(folder.path().to_owned()), ..daemons::config(exe()) };
    let served = Served::start_with(exe(), &config, &[]);
    let ran = output(&mut served.trellis(&["run", "--no-stdin", "chat", "error"]));
    let said = String::from_utf8(ran.stderr).expect("it is text");
    assert!(ran.status.code() == Some(1) && said.contains("the guest is not content"), "{said}");
    if guests::for_building(Command::new("cargo")).is_none() {
        return;
    }
    // Whoever means the example says so.
    let example = root().join("guest-examples/chat");
    let question = ["run", "--no-stdin", example.to_str().expect("UTF-8"), "What is 37 + 48?"];
    let ran = output(&mut served.trellis(&question));
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "85\n", "{ran:?}");
}

#[test]
fn where_no_toolchain_works_one_error_says_what_to_do() {
    if guests::for_building(Command::new("cargo")).is_none() {
        return;
    }
    let tools = tempfile::tempdir().expect("a folder");
    let rustc = tools.path().join("rustc");
    let lines = "info: syncing channel updates for '1.97-x86_64-unknown-linux-gnu'\n".repeat(30);
    let script = format!(
        "#!/bin/sh\necho \"{lines}error: could not download file\nCaused by:\n  0: no network\" >&2\nexit 1\n"
    );
    fs::write(&rustc, script).expect("written");
    fs::set_permissions(&rustc, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let mut build = daemons::trellis(exe());
    let ran = output(build.args(["build", "chat"]).env("PATH", tools.path()));
    let said = String::from_utf8(ran.stderr).expect("it is text");
    assert_eq!(ran.status.code(), Some(2), "{said}");
    let lines: Vec<&str> = said.lines().collect();
    let [error, hint] = lines[..] else { panic!("{said}") };
    assert!(
        error.starts_with("error: no Rust toolchain works in ") && error.ends_with("could not download file"),
        "{said}"
    );
    assert!(hint.contains("https://rustup.rs") && hint.contains("a .wasm file"), "{said}");
}
