//! The example guest of watermarks: what its tests find in its texts, and what they are by the formulas of the papers.

use serde_json::Value;
use trellis_engine::sampling::philox4x32;
use trellis_tests::engines::encode;

use crate::guests::{decode, model, run};

const KEY: u32 = 15_485_863;

/// The uniform number of the last of these tokens, over the noise that the definition writes down.
fn uniform(run: &[u32]) -> f64 {
    let (token, before) = run.split_last().expect("a token");
    let hash = before.iter().enumerate().fold([0, 0], |hash, (idx, &token)| {
        let [low, high, ..] = philox4x32([token, idx as u32, hash[0], hash[1]], [0, 0]);
        [low, high]
    });
    let words = philox4x32([token / 4, 0, hash[0], hash[1]], [KEY, 0]);
    (f64::from(words[*token as usize % 4] >> 9) + 0.5) / f64::from(1 << 23)
}

/// Each run of so many tokens and one more, once.
fn runs(tokens: &[u32], n_before: usize) -> Vec<&[u32]> {
    let mut runs: Vec<&[u32]> = tokens.windows(n_before + 1).collect();
    runs.sort_unstable();
    runs.dedup();
    runs
}

/// Kirchenbauer et al., equation 3, of half the vocabulary.
fn z_of_green(tokens: &[u32], n_before: usize) -> f64 {
    let runs = runs(tokens, n_before);
    let n = runs.len() as f64;
    let n_green = runs.iter().filter(|run| uniform(run) < 0.5).count() as f64;
    (n_green - 0.5 * n) / (0.25 * n).sqrt()
}

/// Aaronson's score, which is 1 on average by chance, with a deviation of 1.
fn z_of_gumbel(tokens: &[u32]) -> f64 {
    let runs = runs(tokens, 4);
    let n = runs.len() as f64;
    (runs.iter().map(|run| -(1.0 - uniform(run)).ln()).sum::<f64>() - n) / n.sqrt()
}

fn scores(value: &Value) -> [f64; 3] {
    ["kgw", "unigram", "gumbel"].map(|mark| value[mark].as_f64().expect("a number"))
}

pub(crate) async fn watermarks(name: &str) {
    let arguments = ["--max-tokens", "160", "--temperature", "1.5", "--json", "Ownership is"];
    let ended = run(name, &arguments).await.well();
    let marks: Vec<&str> = ended.json.iter().filter_map(|marked| marked["mark"].as_str()).collect();
    assert_eq!(marks, ["kgw", "unigram", "gumbel", "none"]);
    for (idx, marked) in ended.json.iter().enumerate() {
        let tokens: Vec<u32> = serde_json::from_value(marked["tokens"].clone()).expect("tokens");
        assert!(tokens.len() >= 50 && marked["text"] == decode(&tokens), "{marked}");
        let z = scores(&marked["z"]);
        println!("{}: z {z:?}", marks[idx]);
        for (mark, z) in z.into_iter().enumerate() {
            assert!(if mark == idx { z > 5.0 } else { z.abs() < 4.0 }, "{marked}");
        }
        let expected = [z_of_green(&tokens, 1), z_of_green(&tokens, 0), z_of_gumbel(&tokens)];
        assert!(
            z.iter().zip(expected).all(|(z, expected)| (z - expected).abs() < 1e-6),
            "{z:?}: {expected:?}"
        );

        // A test sees the text alone. It need not cut it into the same tokens.
        let text = marked["text"].as_str().expect("a text");
        let detected = run(name, &["--detect", "--", text]).await.well().json.remove(0);
        for (mark, z) in scores(&detected).into_iter().enumerate() {
            assert!(if mark == idx { z > 4.0 } else { z.abs() < 4.0 }, "{detected} of {marked}");
        }
        let other_key = run(name, &["--key", "3", "--detect", "--", text]).await.well().json.remove(0);
        assert!(scores(&other_key).iter().all(|z| z.abs() < 4.0), "{other_key} of {marked}");
    }
    // Of nothing nothing is said.
    let short = run(name, &["--detect", "--", &decode(&encode(model(), "Once")[..1])]).await.well();
    assert!(short.json[0]["kgw"].is_null() && short.json[0]["unigram"].is_number(), "{:?}", short.json);
    for bad in [["--gamma", "1"], ["--temperature", "NaN"], ["--delta", "inf"]] {
        let ended = run(name, &[&bad[..], &["x"]].concat()).await;
        assert!(ended.reason().message.contains("usage: watermarks"), "{ended:?}");
    }
}
