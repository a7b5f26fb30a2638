//! Transcripts of a shell, run again: lines that begin with `$ ` are commands, what follows is what they say.
//!
//! `...` in a line of its own stands for any lines, `[..]` within one for anything.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use snapbox::assert::Action;
use snapbox::{Assert, IntoData};
use trellis_tests::daemons;
use trellis_tests::guests;
use trellis_tests::pack::root;

use crate::exe;

/// A command and what it is to say, on either of its streams.
struct Step {
    command: String,
    expected: String,
}

/// Runs the transcripts of one chapter, one after the other in a folder of their own.
pub(super) fn run<'a>(chapter: &str, transcripts: impl Iterator<Item = Vec<&'a str>>, events: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let (bin, cache) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let exe = Path::new(exe()).canonicalize().expect("it is there");
    symlink(exe, bin.path().join("trellis")).expect("a link");
    fs::write(folder.path().join("events.wasm"), events).expect("written");
    let path = std::env::join_paths(
        std::iter::once(bin.path().to_owned())
            .chain(std::env::split_paths(&std::env::var_os("PATH").expect("there is one"))),
    )
    .expect("paths");
    for step in transcripts.flat_map(|lines| steps(&lines)) {
        let mut shell = guests::for_building(daemons::trellis("sh")).expect("there is a compiler");
        shell.current_dir(folder.path()).env("PATH", &path).env("CARGO_TERM_COLOR", "never");
        // What was compiled before shows no progress.
        shell.env("XDG_CACHE_HOME", cache.path());
        shell.arg("-c").arg(format!("exec 2>&1\n{}", step.command));
        let said = shell.stdout(Stdio::piped()).output().expect("it runs");
        let said_text = String::from_utf8(said.stdout).expect("it is text");
        assert!(said.status.success(), "{chapter}: $ {}\n{said_text}", step.command);
        // Backslashes are those of JSON, and no parts of paths.
        let assert = Assert::new().action(Action::Verify).normalize_paths(false);
        let (said, expected) = (said_text.into_data(), step.expected.into_data());
        if let Err(error) = assert.try_eq(Some(&step.command), said, expected) {
            panic!("{chapter}: {error}");
        }
        lock(folder.path());
    }
}

fn steps(lines: &[&str]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for line in lines {
        match (line.strip_prefix("$ "), steps.last_mut()) {
            (Some(command), _) => {
                steps.push(Step { command: command.to_owned(), expected: String::new() });
            }
            (None, Some(step)) => step.expected += &format!("{line}\n"),
            (None, None) => panic!("{line:?} is said by no command"),
        }
    }
    steps
}

/// Gives crates that were written the versions that the guide's own code has.
fn lock(folder: &Path) {
    let crates = fs::read_dir(folder).expect("it can be read").flatten().map(|entry| entry.path());
    let has_none = |path: &PathBuf| path.join("Cargo.toml").is_file() && !path.join("Cargo.lock").exists();
    for path in crates.filter(has_none) {
        fs::copy(root().join("sdk/guide/Cargo.lock"), path.join("Cargo.lock")).expect("copied");
    }
}
