//! Populations of contexts, against a distribution that is known by arithmetic.

use trellis_client::StartOptions;
use trellis_tests::{daemons, guests};

use crate::exe;

/// How far what particles stand for is from what it should be, after so many runs of 64: half the sum of all differences.
async fn total_variation(n_runs: u32) -> f64 {
    let daemon = daemons::start(&daemons::config(exe()));
    let client = daemon.connect().await.expect("connected");
    let options = StartOptions {
        arguments: vec!["posterior".to_owned(), n_runs.to_string()],
        ..StartOptions::default()
    };
    let ended = daemons::run(&client, &guests::hostile(), options).await.well();
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        value.as_array().expect("a list").iter().map(|it| it.as_f64().expect("a number")).collect()
    };
    let (expected, found) = (numbers(&ended.json[0][0]), numbers(&ended.json[0][1]));
    let [exact, evidence] = [2, 3].map(|idx| ended.json[0][idx].as_f64().expect("a number"));
    let distance = 0.5 * expected.iter().zip(&found).map(|(a, b)| (a - b).abs()).sum::<f64>();
    println!(
        "{n_runs} runs of 64 particles: total variation {distance:.4}; evidence {evidence:.5} of {exact:.5}"
    );
    assert!((evidence / exact - 1.0).abs() <= 0.05, "{evidence} of {exact}");
    distance
}

#[tokio::test(flavor = "multi_thread")]
async fn particles_stand_for_the_posterior() {
    let distance = total_variation(100).await;
    assert!(distance <= 0.05, "{distance}");
}

/// The number of runs that is promised.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes"]
async fn particles_stand_for_the_posterior_to_two_hundredths() {
    let distance = total_variation(10_000).await;
    assert!(distance <= 0.02, "{distance}");
}
