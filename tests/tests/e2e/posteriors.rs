//! Examples that draw whole texts from a distribution, against that distribution by arithmetic: all texts of a few tokens, of
//! which the model is asked one by one.

use std::collections::HashMap;
use std::f64::consts::PI;

use serde_json::Value;
use trellis_client::StartOptions;
use trellis_engine::{Answer, Ask, Context};
use trellis_tests::daemons::with;
use trellis_tests::engines::{encode, owner};

use crate::guests::{decode, is_stop, model, question, run, run_with};

/// What the model says in one place, of its most probable tokens.
#[derive(Clone, Debug)]
struct Candidates {
    tokens: Vec<u32>,
    /// Among these tokens alone.
    logprobs: Vec<f64>,
}

/// A text, and what the model says in the place of each of its tokens.
type Text = (Vec<u32>, Vec<Candidates>);

async fn place(tokens: &[u32], n: usize) -> Candidates {
    let mut context = Context::create(model(), owner(u32::MAX)).await.expect("created");
    context.append(tokens).await.expect("fits");
    let answer = context.ask(Ask::Top { n }).await.expect("asked").answer().await;
    let Ok(Answer::Top { candidates, .. }) = answer else { panic!("{answer:?}") };
    let logprobs: Vec<f64> = candidates.iter().map(|candidate| f64::from(candidate.logprob)).collect();
    let sum = logprobs.iter().map(|logprob| logprob.exp()).sum::<f64>().ln();
    Candidates {
        tokens: candidates.iter().map(|candidate| candidate.token).collect(),
        logprobs: logprobs.into_iter().map(|logprob| logprob - sum).collect(),
    }
}

/// All texts of the `n` most probable tokens in each place, up to a stop token or this length.
async fn texts(prompt: &[u32], n: usize, n_tokens: usize) -> Vec<Text> {
    let mut texts: Vec<Text> = vec![(Vec::new(), Vec::new())];
    for _ in 0..n_tokens {
        let mut longer = Vec::new();
        for (tokens, places) in texts {
            if tokens.last().is_some_and(|&token| is_stop(token)) {
                longer.push((tokens, places));
                continue;
            }
            let next = place(&[prompt, &tokens].concat(), n).await;
            for &token in &next.tokens {
                longer.push((
                    [&tokens[..], &[token]].concat(),
                    [&places[..], std::slice::from_ref(&next)].concat(),
                ));
            }
        }
        texts = longer;
    }
    texts
}

/// How probable each text is.
pub(crate) type Shares = HashMap<Vec<u32>, f64>;

/// A distribution over texts by a factor for each token: of its text, its position, and which it is of those in its place.
/// Beside it the sum of all products.
fn shares(texts: &[Text], factor: impl Fn(&Text, usize, usize) -> f64) -> (Shares, f64) {
    let weigh = |text: &Text| -> f64 {
        let positions = text.0.iter().zip(&text.1).enumerate();
        let factors = positions.map(|(position, (token, place))| {
            let idx = place.tokens.iter().position(|it| it == token).expect("it was taken from there");
            factor(text, position, idx)
        });
        factors.product()
    };
    let weights: Vec<f64> = texts.iter().map(weigh).collect();
    let sum: f64 = weights.iter().sum();
    (texts.iter().zip(weights).map(|(text, weight)| (text.0.clone(), weight / sum)).collect(), sum)
}

/// Half the sum of all differences.
pub(crate) fn total_variation(a: &Shares, b: &Shares) -> f64 {
    let of = |it: &Shares, text| it.get(text).copied().unwrap_or(0.0);
    let in_a: f64 = a.iter().map(|(text, share)| (share - of(b, text)).abs()).sum();
    let only_in_b: f64 = b.iter().filter(|(text, _)| !a.contains_key(*text)).map(|(_, share)| share).sum();
    0.5 * (in_a + only_in_b)
}

/// What the total variation of `n` independent draws from a distribution exceeds once in a million times: its mean, in the
/// normal approximation, and what one draw changes, at most 1/n, by the inequality of bounded differences.
pub(crate) fn variation_of_draws(shares: &Shares, n: usize) -> f64 {
    let n = n as f64;
    let deviations = shares.values().map(|p| (2.0 * p * (1.0 - p) / (PI * n)).sqrt());
    0.5 * deviations.sum::<f64>() + (1e6f64.ln() / (2.0 * n)).sqrt()
}

pub(crate) fn tokens_of(value: &Value) -> Vec<u32> {
    serde_json::from_value(value["tokens"].clone()).expect("tokens")
}

/// What an example reports with this seed.
pub(crate) async fn report(name: &str, arguments: &[&str], seed: u64) -> Value {
    let options = StartOptions { seed: Some(seed), ..with(arguments) };
    run_with(name, options).await.well().json.remove(0)
}

/// Particles stand for the model's texts that keep to the rule, as probable among them as the model says, and the evidence
/// for how probable they are together. Drawing what the rule leaves, token by token, is far from that.
pub(crate) async fn awrs(name: &str) {
    const N_LETTERS: usize = 4;
    const N_RUNS: u64 = 24;
    let keeps = |tokens: &[u32]| {
        decode(tokens).split(|c: char| !c.is_alphabetic()).all(|word| word.chars().count() <= N_LETTERS)
    };
    let all = texts(&encode(model(), "<|begin_of_text|>Ownership is"), 4, 4).await;
    let probability = |place: &Candidates, idx: usize| place.logprobs[idx].exp();
    let (expected, exact) = shares(&all, |(tokens, places), position, idx| {
        f64::from(keeps(&tokens[..=position]) as u8) * probability(&places[position], idx)
    });
    let (by_token, _) = shares(&all, |(tokens, places), position, idx| {
        let place = &places[position];
        let kept = |idx: &usize| keeps(&[&tokens[..position], &[place.tokens[*idx]]].concat());
        let left: f64 = (0..place.tokens.len()).filter(kept).map(|idx| probability(place, idx)).sum();
        if kept(&idx) { probability(place, idx) / left } else { 0.0 }
    });

    let (mut found, mut evidence) = (Shares::new(), 0.0);
    for seed in 0..N_RUNS {
        let arguments = ["--particles", "64", "--top-k", "4", "--letters", "4"];
        let arguments = [&arguments[..], &["--max-tokens", "4", "--json", "Ownership is"]].concat();
        let report = report(name, &arguments, seed).await;
        let of_run = report["log_evidence"].as_f64().expect("some are left").exp();
        evidence += of_run / N_RUNS as f64;
        for text in report["texts"].as_array().expect("a list") {
            let share = text["share"].as_f64().expect("a number");
            *found.entry(tokens_of(text)).or_default() += share * of_run;
        }
    }
    found.values_mut().for_each(|share| *share /= evidence * N_RUNS as f64);
    let [distance, of_tokens] = [&found, &by_token].map(|shares| total_variation(&expected, shares));
    println!(
        "{name}: total variation {distance:.4}, token by token {of_tokens:.4}; evidence {evidence:.4} of {exact:.4}"
    );
    // With eight times the runs it is a third of that.
    assert!(distance <= 0.1 && of_tokens >= 0.3, "{distance}, {of_tokens}");
    assert!((evidence / exact - 1.0).abs() <= 0.05, "{evidence} of {exact}");

    // Of hundreds of tokens a few are tested. The text keeps to the rule to its end.
    let ended = run(name, &["--json", "Once upon a time"]).await.well();
    let report = &ended.json[0];
    let [n_tokens, n_tested] = ["n_tokens", "n_tested"].map(|key| report[key].as_f64().expect("a number"));
    assert!(n_tokens > 16.0 * 20.0 && n_tested < 8.0 * n_tokens, "{n_tested} tested for {n_tokens}");
    for text in report["texts"].as_array().expect("a list") {
        let mut words = text["text"].as_str().expect("a text").split(|c: char| !c.is_alphabetic());
        assert!(words.all(|word| word.chars().count() <= 5), "{text}");
        assert!(tokens_of(text).len() <= 40, "{text}");
    }
    let ended = run(name, &["--particles", "2", "--letters", "0", "--top-k", "1", "Once upon a time"]).await;
    assert!(ended.well().text.contains("no text was left"));
}

pub(crate) async fn power_sampling(name: &str) {
    check_powers(name).await;
}

pub(crate) async fn entropy_cut(name: &str) {
    check_powers(name).await;
    // The cuts are where the entropies rise.
    let report = report(name, &["--moves", "0", "--max-tokens", "24", "--json", "What is 37 + 48?"], 7).await;
    let (tokens, prompt) = (tokens_of(&report[0]), encode(model(), &question("What is 37 + 48?")));
    let mut context = Context::create(model(), owner(u32::MAX)).await.expect("created");
    context.append(&prompt).await.expect("fits");
    let ask = Ask::Tops { continuation: tokens.clone(), n: 1 };
    let answer = context.ask(ask).await.expect("asked").answer().await;
    let Ok(Answer::Tops(tops)) = answer else { panic!("{answer:?}") };
    let mut before = 0.0;
    let rises = tops.iter().map(|top| (top.entropy - std::mem::replace(&mut before, top.entropy)).max(0.0));
    let rises: Vec<f64> = rises.map(|rise| f64::from(rise).powi(4)).collect();
    let sum: f64 = rises.iter().sum();
    let cuts: Vec<f64> = serde_json::from_value(report[0]["cuts"].clone()).expect("numbers");
    assert_eq!(cuts.len(), tokens.len());
    for (cut, rise) in cuts.iter().zip(rises) {
        assert!((cut - rise / sum).abs() <= 1e-3, "{cuts:?}: {tops:?}");
    }
}

/// Chains stand for the power of the model's distribution over whole texts, long and short ones. Drawing at that temperature,
/// token by token, is far from it.
async fn check_powers(name: &str) {
    const ALPHA: f64 = 2.0;
    const N_RUNS: u64 = 12;
    const N_CHAINS: usize = 64;
    let all = texts(&encode(model(), &question("word")), 2, 5).await;
    let power = |logprob: &f64| (ALPHA * logprob).exp();
    let (expected, _) = shares(&all, |(_, places), position, idx| power(&places[position].logprobs[idx]));
    let (by_token, _) = shares(&all, |(_, places), position, idx| {
        let logprobs = &places[position].logprobs;
        power(&logprobs[idx]) / logprobs.iter().map(power).sum::<f64>()
    });
    let mut found = Shares::new();
    for seed in 0..N_RUNS {
        let arguments = ["--alpha", "2", "--chains", "64", "--top-k", "2", "--max-tokens", "5"];
        let arguments = [&arguments[..], &["--moves", "32", "--json", "word"]].concat();
        let report = report(name, &arguments, seed).await;
        let answers = report.as_array().expect("a list");
        assert_eq!(answers.len(), N_CHAINS);
        for answer in answers {
            let tokens = tokens_of(answer);
            assert_eq!(answer["text"], decode(&tokens));
            *found.entry(tokens).or_default() += 1.0 / (N_RUNS as usize * N_CHAINS) as f64;
        }
    }
    let most = variation_of_draws(&expected, N_RUNS as usize * N_CHAINS);
    let [distance, of_tokens] = [&found, &by_token].map(|shares| total_variation(&expected, shares));
    let n_whole =
        all.iter().filter(|(tokens, _)| tokens.len() < 5).map(|(tokens, _)| expected[tokens]).sum::<f64>();
    println!(
        "{name}: total variation {distance:.4} of at most {most:.4}, token by token {of_tokens:.4}; {n_whole:.2} end early"
    );
    assert!(distance <= most && of_tokens >= 2.0 * most, "{distance}, {of_tokens}, {most}");
    assert!((0.2..0.8).contains(&n_whole), "{n_whole}");

    let text = run(name, &["What is 37 + 48?"]).await.well().text;
    assert_eq!(text, "85\n");
    for bad in [["--alpha", "0"], ["--alpha", "inf"], ["--max-tokens", "0"], ["--top-k", "0"]] {
        let ended = run(name, &[&bad[..], &["x"]].concat()).await;
        assert!(ended.reason().message.contains(&format!("usage: {name}")), "{ended:?}");
    }
}
