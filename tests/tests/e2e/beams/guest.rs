//! The example guests of beam searches.

use std::collections::HashSet;

use serde_json::Value;
use trellis::config::Config;
use trellis_tests::daemons::{self, with};
use trellis_tests::device::says_the_same;
use trellis_tests::engines::block_on;
use trellis_tests::goldens::{self, Beams, Case};
use trellis_tests::guests;

use crate::exe;
use crate::guests::{daemon, is_stop, port, run};

/// A beam search through the guest, compared with Hugging Face.
async fn compare_beams(client: &trellis_client::Client, case: &Case, beams: &Beams) {
    let early_stopping = match &beams.early_stopping {
        Value::Bool(value) => value.to_string(),
        Value::String(value) => value.clone(),
        other => panic!("early_stopping is {other}"),
    };
    let (n, penalty) = (beams.num_beams.to_string(), beams.length_penalty.to_string());
    let arguments = [
        ["--beams", &n, "--length-penalty", &penalty, "--early-stopping", &early_stopping].as_slice(),
        &["--max-tokens", "40", "--raw", "--json", "--", &case.prompt],
    ]
    .concat();
    let ended = daemons::run(client, &guests::example("beam"), with(&arguments)).await.well();
    let report = &ended.json[0];
    let sequences: Vec<Vec<u32>> = serde_json::from_value(report["sequences"].clone()).expect("tokens");
    let scores: Vec<f64> = serde_json::from_value(report["scores"].clone()).expect("numbers");

    // Hugging Face pads to the longest hypothesis; a hypothesis ends with its stop token.
    let expected: Vec<Vec<u32>> = beams
        .sequences
        .iter()
        .map(|sequence| {
            let n = sequence.iter().position(|&token| is_stop(token)).map_or(sequence.len(), |idx| idx + 1);
            sequence[..n].to_vec()
        })
        .collect();
    assert_eq!(sequences, expected, "{arguments:?}");
    assert_eq!(scores.len(), beams.scores.len());
    for (found, expected) in scores.iter().zip(&beams.scores) {
        assert!((found - expected).abs() <= 1e-3, "{found} for {expected}: {arguments:?}");
    }
}

pub(crate) async fn beam(name: &str) {
    let client = daemon().connect().await.expect("connected");
    let mut n_main = 0;
    for case in &goldens::load("tiny").cases {
        for beams in &case.beams {
            compare_beams(&client, case, beams).await;
            n_main += usize::from((beams.num_beams, beams.length_penalty) == (4, 1.0));
        }
    }
    assert_eq!(n_main, 8, "the four-beam golden of each case");

    // Of what is far behind, nothing is pruned; what is settled is shown.
    let told = ["--json", "--raw", "--max-tokens", "20", "Once upon a time"];
    let pruned = run(name, &[&["--prune", "1e9"], &told[..]].concat()).await.well();
    let whole = run(name, &told).await.well();
    assert!(says_the_same(&pruned.json[0], &whole.json[0]), "{:?} for {:?}", pruned.json, whole.json);
    let shown = run(name, &["--prune", "3", "What is 37 + 48?"]).await.well().text;
    assert!(shown.starts_with("85"), "{shown}");

    let answer = run(name, &["--n-best", "1", "What is 37 + 48?"]).await.well().text;
    let (score, text) = answer.trim().split_once(' ').expect("a score and a text");
    assert!(score.parse::<f32>().expect("a number") <= 0.0);
    assert_eq!(text.trim(), "85");
}

/// The texts of groups, and of all their words the share that is there once: the paper's measure of diversity.
async fn groups(name: &str, diversity: &str) -> (Vec<Vec<u32>>, f64) {
    let arguments = ["--groups", "4", "--diversity", diversity, "--json", "Tell me a short story."];
    let report = run(name, &arguments).await.well().json.remove(0);
    let texts = report.as_array().expect("a list");
    assert_eq!(texts.len(), 4);
    let tokens: Vec<Vec<u32>> =
        texts.iter().map(|text| serde_json::from_value(text["tokens"].clone()).expect("tokens")).collect();
    let all: Vec<u32> = tokens.concat();
    let distinct: HashSet<&u32> = all.iter().collect();
    (tokens, distinct.len() as f64 / all.len() as f64)
}

pub(crate) async fn diverse_beam(name: &str) {
    // Nothing keeps groups apart without a penalty, and the first one is never kept from anything.
    let plain =
        run("beam", &["--beams", "1", "--json", "Tell me a short story."]).await.well().json.remove(0);
    let plain: Vec<Vec<u32>> = serde_json::from_value(plain["sequences"].clone()).expect("tokens");
    let (alike, least) = groups(name, "0").await;
    assert!(alike.iter().all(|tokens| *tokens == plain[0]), "{alike:?}");
    let (apart, more) = groups(name, "0.5").await;
    assert!(apart.contains(&plain[0]), "{apart:?}");
    let distinct: HashSet<&Vec<u32>> = apart.iter().collect();
    println!("{} texts; of all words {more:.3} are distinct, without a penalty {least:.3}", distinct.len());
    assert!(distinct.len() == 4 && more > 1.3 * least, "{more} for {least}");
    let ended = run(name, &["--groups", "3", "--beams", "4", "x"]).await;
    assert!(ended.reason().message.contains("group"), "{ended:?}");
}

#[test]
fn beam_of_the_other_model() {
    block_on(async {
        let config = Config { models: vec!["draft".to_owned()], ..daemons::config(exe()) };
        let daemon = daemons::start_over(port(), &config);
        let client = daemon.connect().await.expect("connected");
        for case in &goldens::load("draft").cases {
            let main = |beams: &&Beams| beams.num_beams == 4 && beams.length_penalty == 1.0;
            compare_beams(&client, case, case.beams.iter().find(main).expect("the four-beam golden")).await;
        }
        drop(client);
        daemons::nothing_is_held(&daemon).await;
    });
}
