//! The example guest of mixtures.

use serde_json::Value;

use crate::guests::run;

const TEXT: &str = "Once upon a time";

/// Its tokens, and what the model makes of them with the prompt and with the other.
async fn report(name: &str, arguments: &[&str]) -> (Vec<u64>, [f64; 2]) {
    let arguments = [&["--json", "--max-tokens", "40"], arguments, &[TEXT]].concat();
    let report = run(name, &arguments).await.well().json.remove(0);
    let tokens = report["tokens"].as_array().expect("tokens").iter().filter_map(Value::as_u64).collect();
    let logprobs = [0, 1].map(|idx| report["logprobs"][idx].as_f64().expect("a number"));
    (tokens, logprobs)
}

pub(crate) async fn cfg(name: &str) {
    // Without guidance it is what the other is not asked about.
    let off = ["--scale", "1", "--off", "What is 3 + 4?"];
    let (plain, _) = report(name, &["--scale", "1"]).await;
    assert_eq!(report(name, &off).await.0, plain);
    assert!(!plain.is_empty());
    // The further from the other, the more of its surprise there is for each of the prompt's.
    let mut gaps = Vec::new();
    for scale in ["0.5", "1", "4"] {
        let (tokens, [with, without]) =
            report(name, &["--scale", scale, "--temperature", "0", "--off", "There was a dog"]).await;
        assert!(!tokens.is_empty());
        gaps.push((with - without) / tokens.len() as f64);
    }
    assert!(gaps[2] > gaps[0], "{gaps:?}");
    let text = run(name, &["--max-tokens", "8", TEXT]).await.well().text;
    assert!(text.starts_with(TEXT) && text.len() > TEXT.len() + 1, "{text:?}");
    for (option, value, told) in [
        ("--temperature", "-1", "--temperature is -1, and has to be finite and at least 0"),
        ("--temperature", "NaN", "--temperature is NaN, and has to be finite and at least 0"),
        ("--scale", "inf", "--scale is inf, and has to be finite"),
    ] {
        let ended = run(name, &[option, value, TEXT]).await;
        let message = &ended.reason().message;
        assert!(message.contains(told) && message.contains("usage: cfg"), "{message}");
    }
}
