//! Examples that look for texts of a kind: those of a grammar, as the model has them, and the best that has all of some words.

use std::collections::HashMap;

use serde_json::Value;
use trellis_client::StartOptions;
use trellis_engine::{Answer, Ask};
use trellis_tests::daemons::with;
use trellis_tests::engines::encode;

use crate::guests::{decode, is_stop, model, question, run, run_with};
use crate::policies::{after, refuses};
use crate::posteriors::{report, tokens_of};

/// How probable each of these texts is as an answer among all of them, in whatever tokens it comes.
async fn among_themselves(prompt: &[u32], texts: &[String]) -> HashMap<String, f64> {
    let tokenizer = &model().model().tokenizer;
    let ordinary = (0..tokenizer.vocab_size() as u32).filter(|&token| !tokenizer.is_special(token));
    let bytes_of = |token| tokenizer.token_bytes(token).unwrap_or_default();
    let ordinary: Vec<u32> = ordinary.filter(|&token| !bytes_of(token).is_empty()).collect();
    let mut found = HashMap::new();
    let mut open = vec![(prompt.to_vec(), Vec::new(), 0.0)];
    while let Some((tokens, bytes, logprob)) = open.pop() {
        if tokens.len() > prompt.len() && is_stop(tokens[tokens.len() - 1]) {
            *found.entry(String::from_utf8(bytes).expect("it is a text")).or_default() += f64::exp(logprob);
            continue;
        }
        let begins = |bytes: &[u8]| texts.iter().any(|text| text.as_bytes().starts_with(bytes));
        let longer = |token: u32| [&bytes[..], bytes_of(token)].concat();
        let mut next: Vec<(u32, Vec<u8>)> =
            ordinary.iter().map(|&token| (token, longer(token))).filter(|(_, it)| begins(it)).collect();
        if texts.iter().any(|text| text.as_bytes() == bytes) {
            next.extend(model().model().stop_tokens.iter().map(|&token| (token, bytes.clone())));
        }
        let ask = Ask::Scores(next.iter().map(|(token, _)| *token).collect());
        let Answer::Scores(logprobs) = after(&tokens, ask).await else { panic!("numbers") };
        open.extend(next.into_iter().zip(logprobs).map(|((token, bytes), of_token)| {
            ([&tokens[..], &[token]].concat(), bytes, logprob + f64::from(of_token))
        }));
    }
    let sum: f64 = found.values().sum();
    found.into_iter().map(|(text, share)| (text, share / sum)).collect()
}

/// The more texts were drawn, the nearer they are to the model's own among those of the grammar. The constraint alone stays
/// where it is, far from it.
pub(crate) async fn asap(name: &str) {
    const N_RUNS: u64 = 6;
    let texts = (10..80).map(|n| n.to_string()).chain((80..90).map(|n| format!("{n}!")));
    let texts: Vec<String> = texts.collect();
    let expected = among_themselves(&encode(model(), &question("How many?")), &texts).await;
    let told = ["--regex", "[1-7][0-9]|8[0-9]!", "--samples", "120", "--json", "How many?"];
    let mut runs = Vec::new();
    for seed in 0..N_RUNS {
        runs.push(samples(name, &told, seed).await);
    }
    let plain = [samples(name, &[&["--plain"][..], &told].concat(), 0).await];
    let distance = |runs: &[Vec<Value>], range: std::ops::Range<usize>| {
        let mut found: HashMap<String, f64> = HashMap::new();
        for one in runs.iter().flat_map(|run| &run[range.clone()]) {
            let text = one["text"].as_str().expect("a text").to_owned();
            *found.entry(text).or_default() += 1.0 / (runs.len() * range.len()) as f64;
        }
        assert!(found.keys().all(|text| texts.contains(text)), "{found:?}");
        let difference = |text: &String| expected[text] - found.get(text).copied().unwrap_or_default();
        0.5 * texts.iter().map(|text| difference(text).abs()).sum::<f64>()
    };
    let of_runs = [0..5, 5..20, 20..120].map(|range| distance(&runs, range));
    let of_plain = [0..60, 60..120].map(|range| distance(&plain, range));
    println!("{name}: total variation {of_runs:.3?}, by the constraint alone {of_plain:.3?}");
    assert!(of_runs.is_sorted_by(|a, b| a > b), "{of_runs:?}");
    assert!(of_runs[2] <= 0.15 && of_plain.iter().all(|it| *it >= 0.5), "{of_runs:?}, {of_plain:?}");
    refuses(name, &[&["--samples", "many"]]).await;
}

async fn samples(name: &str, told: &[&str], seed: u64) -> Vec<Value> {
    let options = StartOptions { seed: Some(seed), ..with(told) };
    run_with(name, options).await.well().json
}

/// All answers have all words, score what the engine says, and the best no less than the plain search's with the words put behind.
pub(crate) async fn constrained_beam(name: &str) {
    let cases: [(&str, &[&str]); 5] = [
        ("What is the capital of France?", &[]),
        ("What is the capital of France?", &["city"]),
        ("What is the capital of Kenya?", &["is", "town"]),
        ("What is the opposite of short?", &["word"]),
        ("Tell me a short story.", &["owl"]),
    ];
    for (text, words) in cases {
        let rest = ["--beams", "4", "--max-tokens", "24", "--json", text];
        let told: Vec<&str> = words.iter().flat_map(|&word| ["--word", word]).chain(rest).collect();
        let answers = report(name, &told, 7).await;
        let answers = answers.as_array().expect("a list");
        assert!(answers.len() >= 4, "{answers:?}");
        let prompt = encode(model(), &question(text));
        let mut scores = Vec::new();
        for answer in answers {
            let tokens = tokens_of(answer);
            assert_eq!(answer["text"], decode(&tokens));
            let found = format!(" {}", decode(&tokens));
            assert!(words.iter().all(|word| found.contains(&format!(" {word}"))), "{words:?} in {found}");
            let score = answer["score"].as_f64().expect("a number");
            let expected = mean_logprob(&prompt, tokens).await;
            assert!((score - expected).abs() <= 1e-3, "{score} for {expected}: {found}");
            scores.push(score);
        }
        assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");

        let plain = report("beam", &rest, 7).await;
        let mut plain: Vec<u32> = serde_json::from_value(plain["sequences"][0].clone()).expect("tokens");
        if words.is_empty() {
            assert_eq!(tokens_of(&answers[0]), plain);
        }
        let stop = plain.pop_if(|token| is_stop(*token));
        plain.extend(words.iter().flat_map(|word| encode(model(), &format!(" {word}"))));
        plain.extend(stop);
        let behind = mean_logprob(&prompt, plain).await;
        println!("{words:?}: {:.3}, put behind {behind:.3}: {}", scores[0], answers[0]["text"]);
        assert!(scores[0] >= behind - 1e-3, "{} for {behind}", scores[0]);
    }
    let ended = run(name, &["--beams", "4", "--word", "city", "What is the capital of France?"]).await.well();
    assert!(ended.text.contains("The capital city of France is Paris.\n"), "{}", ended.text);
    // A word that is named twice is one.
    let told = ["--word", "city", "--json", "What is the capital of France?"];
    let twice = report(name, &[&["--word", "city"][..], &told].concat(), 7).await;
    assert_eq!(twice, report(name, &told, 7).await);
    refuses(name, &[&["--beams", "many"], &["--max-tokens", "0"]]).await;
}

async fn mean_logprob(prompt: &[u32], tokens: Vec<u32>) -> f64 {
    let n = tokens.len() as f64;
    let Answer::Scores(logprobs) = after(prompt, Ask::Continuation(tokens)).await else { panic!("numbers") };
    logprobs.into_iter().map(f64::from).sum::<f64>() / n
}
