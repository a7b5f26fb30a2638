//! Components that were built against an earlier host API do what they did, recorded and replayed as well.

use std::path::PathBuf;

use serde_json::Value;
use trellis::config::Config;
use trellis_tests::daemons::{self, Served, output, run, with};
use trellis_tests::device::says_the_same;
use trellis_tests::engines::block_on;
use trellis_tests::{guests, pack};

use crate::exe;
use crate::recordings::with_lines;

/// An old component, the example of today that does the same, and what both are asked. Between them they generate one text and many, rank
/// and draw under a mask, pull a stream piece by piece, and make mistakes.
const RUNS: [(&str, &str, &[&str]); 12] = [
    ("beam", "beam", &["--max-tokens", "20", "--json", "What is 37 + 48?"]),
    (
        "best-of-n",
        "best-of-n",
        &["--n", "4", "--temperature", "2", "--max-tokens", "20", "--json", "What is 37 + 48?"],
    ),
    ("chat", "chat", &["What is 37 + 48?"]),
    (
        "complete",
        "complete",
        &["--max-tokens", "40", "--temperature=0.8", "--top-p", "0.9", "Once upon a time"],
    ),
    ("complete", "complete", &["--max-tokens", "60", "--stop", ".", "Ownership is"]),
    ("complete", "complete", &["--no-such-option", "x"]),
    ("json-fields", "json-fields", &["Ada, a pilot from Oslo, is 36."]),
    ("json-fields", "json-fields", &["\"\"\" , , ,"]),
    ("probe", "probe", &["stream", "40", "Once upon a time"]),
    ("probe", "probe", &["idle", "1000"]),
    (
        "speculate",
        "prompt-lookup",
        &["--max-tokens", "30", "--json", "Write the days of the week three times."],
    ),
    (
        "speculate",
        "speculative",
        &["--draft", "draft", "--temperature", "0.7", "--max-tokens", "30", "Tell me a short story."],
    ),
];

/// The lines that are typed to a component that is recorded; only a conversation takes them.
const LINES: &str = "What is 37 + 48?\nWhat is 3 + 4?\n";

fn config() -> Config {
    Config { models: vec!["tiny".to_owned(), "draft".to_owned()], ..daemons::config(exe()) }
}

fn path(name: &str) -> PathBuf {
    pack::root().join(format!("tests/old/{name}.wasm"))
}

#[test]
fn a_component_of_host_api_0_1_emits_what_the_example_of_today_does() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        for (name, example, arguments) in RUNS {
            let old = std::fs::read(path(name)).expect("it is kept");
            assert!(old.windows(13).any(|bytes| bytes == b"contexts@0.1."), "nobody has built {name} again");
            let (old, new) = (
                run(&client, &old, with(arguments)).await,
                run(&client, &guests::example(example), with(arguments)).await,
            );
            assert_eq!((&old.text, &old.tokens), (&new.text, &new.tokens), "{name} {arguments:?}");
            let is_same = old.json.len() == new.json.len()
                && old.json.iter().zip(&new.json).all(|(old, new)| says_the_same(old, new));
            assert!(is_same, "{name} {arguments:?}: {:?} for {:?}", old.json, new.json);
            assert_eq!(old.error.is_some(), new.error.is_some(), "{old:?}");
            assert!(old.error.is_some() || !old.text.is_empty() || !old.json.is_empty(), "{old:?}");
        }
    });
}

#[test]
fn a_component_of_host_api_0_1_is_recorded_and_replayed() {
    let served = Served::start_with(exe(), &config(), &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("old.rec");
    let record = file.to_str().expect("UTF-8");
    for (name, _, arguments) in [RUNS.as_slice(), &[("chat", "chat", &[])]].concat() {
        let path = path(name);
        let words = ["run", "--json", "--seed", "7", "--record", record, path.to_str().expect("UTF-8")];
        let first = with_lines(&mut served.trellis(&[&words[..], arguments].concat()), LINES);
        let again = output(daemons::trellis(exe()).args(["replay", record, "--json"]));
        let end = String::from_utf8_lossy(&again.stdout).lines().last().map(str::to_owned);
        let end: Value = serde_json::from_str(&end.expect("an end")).expect("JSON");
        assert_eq!(end["ok"], true, "{name} {arguments:?}: {end}");
        assert_eq!(again.status.code(), Some(0), "{name} {arguments:?}");
        let sent = |out: &[u8]| {
            let text = String::from_utf8(out.to_vec()).expect("text");
            let is_sent = |line: &&str| {
                ["text", "tokens", "json"].iter().any(|kind| line.contains(&format!("\"type\":\"{kind}\"")))
            };
            text.lines().filter(is_sent).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(sent(&again.stdout), sent(&first.stdout), "{name} {arguments:?}");
    }
}
