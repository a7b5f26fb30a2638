//! Every function of the host API, called by one guest that checks what its answers have to do with each other.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;

use serde_json::{Value, json};
use trellis::config::Config;
use trellis_tests::daemons::{self, Served};
use trellis_tests::{guests, pack};

use crate::exe;

/// What it sends, by the lines of the command.
fn sent(lines: &str) -> Vec<Value> {
    let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("it is JSON"));
    events.filter(|event| matches!(event["type"].as_str(), Some("text" | "tokens" | "json"))).collect()
}

/// All functions of the package, by the names that they have in recordings.
fn functions() -> Vec<String> {
    let mut names = Vec::new();
    for file in fs::read_dir(pack::root().join("wit")).expect("the package") {
        let path = file.expect("an entry").path();
        // What policies of the operator have, no guest can call.
        if path.is_dir() || path.ends_with("policy.wit") {
            continue;
        }
        let (mut interface, mut resource) = (String::new(), None);
        for line in fs::read_to_string(path).expect("text").lines() {
            let word =
                |start: &str| Some(line.trim().strip_prefix(start)?.strip_suffix(" {")?.replace('%', ""));
            if let Some(name) = word("interface ").or_else(|| word("world ")) {
                interface = name;
            } else if let Some(name) = word("resource ") {
                resource = Some(name);
            } else if line == "    }" {
                resource = None;
            }
            if line.trim().starts_with("export ") {
                continue;
            }
            let function = match line.trim().split_once(": ") {
                Some((name, rest)) if rest.starts_with("func(") || rest.starts_with("static func(") => name,
                _ if line.trim().starts_with("constructor(") => "new",
                _ => continue,
            };
            let place = resource.as_ref().unwrap_or(&interface);
            names.push(format!("{place}.{function}").replace('-', "_"));
        }
    }
    names
}

#[test]
fn every_function_is_called_its_answers_fit_and_a_recording_holds_them() {
    let models = vec!["tiny".to_owned(), "draft".to_owned()];
    let served = Served::start_with(exe(), &Config { models, ..daemons::config(exe()) }, &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let [component, file] = ["tour.wasm", "tour.rec"].map(|name| folder.path().join(name));
    fs::write(&component, guests::hostile()).expect("written");
    let [component, record] = [&component, &file].map(|path| path.to_str().expect("UTF-8"));

    let mut command =
        served.trellis(&["run", "--json", "--seed", "7", "--record", record, component, "tour"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut messages = child.stdin.take().expect("piped");
    let mut events = BufReader::new(child.stdout.take().expect("piped"));
    let mut lines = String::new();
    // By then it has looked for messages, and found none.
    while !lines.contains("well\\n") {
        let n_bytes = events.read_line(&mut lines).expect("it sends text");
        assert!(n_bytes > 0, "it has ended: {lines}");
    }
    write!(messages, "one\n[1, 2]\nthree\n").expect("it reads");
    drop(messages);
    events.read_to_string(&mut lines).expect("it sends text");
    assert!(daemons::wait(&mut child).success(), "{lines}");
    let first = sent(&lines);
    assert!(first.iter().any(|event| event["tokens"] == json!([1, 2, 3])), "{first:?}");
    assert_eq!(first.last().expect("some")["type"], "json", "{first:?}");

    let again = daemons::output(daemons::trellis(exe()).args(["replay", record, "--json"]));
    let lines = String::from_utf8(again.stdout).expect("text");
    assert!(again.status.success(), "{lines}");
    assert_eq!(sent(&lines), first);

    let functions = functions();
    assert!(functions.len() > 55, "{functions:?}");
    let recorded = fs::read(&file).expect("it is there");
    for name in functions {
        // A short text as MessagePack has it.
        let mut bytes = vec![0xa0 | u8::try_from(name.len()).expect("short")];
        assert!(name.len() < 32, "{name}");
        bytes.extend(name.as_bytes());
        assert!(recorded.windows(bytes.len()).any(|window| window == bytes), "{name} is not called");
    }
}
