//! The example guests that decode with guesses: what they save, and that it changes nothing.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;
use trellis::config::Config;
use trellis::daemon::Daemon;
use trellis_client::{Client, StartOptions};
use trellis_engine::model::ModelSource;
use trellis_engine::sampling::Sampler;
use trellis_tests::daemons::{self, with};
use trellis_tests::guests;

use crate::exe;
use crate::guests::{decode, draw, port, question};

const STORY: &str = "Tell me a short story.";

async fn with_models(names: &[&str]) -> (Daemon, Client) {
    let models = names.iter().map(|&name| name.to_owned()).collect();
    let daemon = daemons::start_over(port(), &Config { models, ..daemons::config(exe()) });
    let client = daemon.connect().await.expect("connected");
    (daemon, client)
}

async fn report(client: &Client, wasm: &[u8], seed: u64, arguments: &[&str]) -> Value {
    let options = StartOptions { seed: Some(seed), ..with(&[&["--json"][..], arguments].concat()) };
    daemons::run(client, wasm, options).await.well().json.remove(0)
}

fn number(report: &Value, key: &str) -> f64 {
    report[key].as_f64().expect("a number")
}

/// What was decoded in each of these ways is what would be without guesses.
async fn check_texts(client: &Client, wasm: &[u8], ways: &[&[&str]]) {
    for (seed, temperature) in [(7, "0"), (8, "0.7"), (9, "1.3")] {
        let arguments = ["--temperature", temperature, "--max-tokens", "60", STORY];
        let sampler =
            Sampler { temperature: temperature.parse().expect("a number"), seed, ..Sampler::greedy() };
        let expected = decode(&draw(&question(STORY), sampler, 60).await.0);
        for &how in ways {
            let options = StartOptions { seed: Some(seed), ..with(&[how, &arguments[..]].concat()) };
            let ended = daemons::run(client, wasm, options).await.well();
            assert_eq!(ended.text, format!("{expected}\n"), "{how:?} at {temperature}");
            assert!(ended.log[0].contains("saved"), "{ended:?}");
        }
    }
    let none = report(client, wasm, 7, &["--max-tokens", "0", STORY]).await;
    assert_eq!((&none["tokens"], &none["saved"]), (&0.into(), &0.0.into()));
}

pub(crate) async fn speculative(name: &str) {
    let wasm = guests::example(name);
    let (daemon, client) = with_models(&["tiny", "draft"]).await;
    let ways: [&[&str]; 5] = [
        &[],
        &["--guesses", "15"],
        &["--guesses", "15", "--width", "4"],
        &["--guesses", "5", "--width", "3"],
        &["--guesses", "0"],
    ];
    check_texts(&client, &wasm, &ways).await;

    let sums = ["468 + 275", "37 + 48", "915 + 86", "640 + 333", "78 + 77", "129 + 504"];
    let sums = sums.map(|sum| format!("Think step by step: what is {sum}?"));
    let sums: Vec<&str> = sums.iter().map(String::as_str).collect();
    let stories = [STORY; 6];
    let prose =
        ["Ownership is a set of rules", "The `Vec` type", "A program", "In this chapter", "The compiler"];
    let mut steps_of = HashMap::new();
    let cases: [(&str, &[&str], &[&str], f64); 7] = [
        ("sums, 0", &["--temperature", "0"], &sums, 0.75),
        ("sums, 1", &["--temperature", "1"], &sums, 0.75),
        ("stories, 0.7", &["--temperature", "0.7"], &stories, 0.70),
        ("prose, 0", &["--temperature", "0", "--raw", "--max-tokens", "100"], &prose, 0.20),
        ("prose, 0.7", &["--temperature", "0.7", "--raw", "--max-tokens", "100"], &prose, 0.20),
        ("prose, 0, tree", &["--width", "4", "--raw", "--max-tokens", "100"], &prose, 0.30),
        (
            "prose, 0.7, tree",
            &["--width", "4", "--temperature", "0.7", "--raw", "--max-tokens", "100"],
            &prose,
            0.30,
        ),
    ];
    for (what, how, prompts, least) in cases {
        let (mut tokens, mut steps) = (0.0, 0.0);
        for (seed, prompt) in (7..).zip(prompts) {
            let report = report(&client, &wasm, seed, &[how, &["--", prompt]].concat()).await;
            tokens += number(&report, "tokens");
            steps += number(&report, "steps");
        }
        let saved = 1.0 - steps / tokens;
        println!("{what}: {tokens} tokens in {steps} steps of the target, {saved:.3} saved by 4 guesses");
        assert!(saved >= least, "{what}: {saved}");
        steps_of.insert(what, steps);
    }
    // Of a tree that is as deep as the chain more is right, and the text is the same.
    for (tree, chain) in [("prose, 0, tree", "prose, 0"), ("prose, 0.7, tree", "prose, 0.7")] {
        let share = steps_of[tree] / steps_of[chain];
        println!("{tree}: {share:.3} of the steps of a chain");
        assert!(share <= 0.95, "{tree}: {share}");
    }
    let ended = daemons::run(&client, &wasm, with(&["--draft", "nobody", "x"])).await;
    assert!(ended.reason().message.contains("no model is called \"nobody\""), "{ended:?}");
    drop((client, daemon));

    // Where steps take less, more is refused, and less gives the same.
    let models = vec!["tiny".to_owned(), "draft".to_owned()];
    let narrow = Config { models, n_step_tokens: Some(4), ..daemons::config(exe()) };
    let daemon = daemons::start_over(port(), &narrow);
    let client = daemon.connect().await.expect("connected");
    for how in [&["--width", "4"][..], &["--width", "2"], &["--guesses", "15"]] {
        let ended = daemons::run(&client, &wasm, with(&[how, &[STORY]].concat())).await;
        assert!(ended.reason().message.contains("guess"), "{ended:?}");
    }
    let ended = daemons::run(&client, &wasm, with(&["--guesses", "2", "--max-tokens", "60", STORY])).await;
    let expected = decode(&draw(&question(STORY), Sampler::greedy(), 60).await.0);
    assert_eq!(ended.well().text, format!("{expected}\n"));
    drop((client, daemon));

    // A model that counts its tokens otherwise cannot guess for another.
    let folder = TempDir::new().expect("a folder");
    let other = folder.path().join("other");
    copy_with_two_tokens_swapped(&other);
    let (_daemon, client) = with_models(&["tiny", other.to_str().expect("UTF-8")]).await;
    let ended = daemons::run(&client, &wasm, with(&["--draft", "other", "x"])).await;
    let expected = "one argument belongs to the model \"tiny\", the other to \"other\"";
    assert!(ended.reason().message.contains(expected), "{ended:?}");
}

/// The files of `draft`, in a folder, with a tokenizer in which two tokens change places.
fn copy_with_two_tokens_swapped(folder: &Path) {
    let Some(ModelSource::Embedded(files)) = trellis::bundled::source("draft") else {
        panic!("the bundled models are embedded");
    };
    fs::create_dir(folder).expect("made");
    for (name, bytes) in files {
        let mut bytes = bytes.to_vec();
        if *name == "tokenizer.json" {
            let mut tokenizer: Value = serde_json::from_slice(&bytes).expect("JSON");
            let vocab = tokenizer["model"]["vocab"].as_object_mut().expect("a map");
            for id in vocab.values_mut() {
                match id.as_u64() {
                    Some(2013) => *id = 2014.into(),
                    Some(2014) => *id = 2013.into(),
                    _ => {}
                }
            }
            bytes = serde_json::to_vec(&tokenizer).expect("JSON");
        }
        fs::write(folder.join(name), bytes).expect("written");
    }
}

/// What followed before is guessed. Little is in vain where nothing repeats.
pub(crate) async fn prompt_lookup(name: &str) {
    let wasm = guests::example(name);
    let (daemon, client) = with_models(&["tiny"]).await;
    check_texts(&client, &wasm, &[&[], &["--guesses", "4"], &["--guesses", "0"]]).await;
    let (mut computed, mut in_vain) = (0.0, 0.0);
    for (seed, prompt) in (7..).zip([&[STORY; 6][..], &["Ownership is a set of rules", "A program"]].concat())
    {
        let arguments = ["--temperature", "0.7", "--max-tokens", "150", "--", prompt];
        let report = report(&client, &wasm, seed, &arguments).await;
        in_vain += number(&report, "guessed") - number(&report, "accepted");
        computed += number(&report, "steps") + number(&report, "guessed");
    }
    println!("nothing repeats: {in_vain} of {computed} tokens computed in vain");
    assert!(in_vain <= 0.05 * computed, "{in_vain} of {computed}");
    drop((client, daemon));

    // The small model copies itself before long when it always takes the likeliest token.
    let (_daemon, client) = with_models(&["draft"]).await;
    for prompt in ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15", &"a b c ".repeat(8)] {
        let prompt = format!("<|begin_of_text|>{prompt}");
        let report = report(&client, &wasm, 7, &["--raw", "--max-tokens", "400", "--", &prompt]).await;
        println!("copied: {} of {} steps saved by look-ups", report["saved"], report["tokens"]);
        assert!(number(&report, "saved") >= 0.6, "{report}");
    }
}
