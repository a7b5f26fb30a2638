//! The example guest of beam searches.

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
