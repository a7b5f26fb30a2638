//! Examples that decode otherwise than by drawing from the model: what their papers say of them.

use std::collections::HashSet;

use serde_json::Value;
use trellis::config::Config;
use trellis_client::StartOptions;
use trellis_engine::{Answer, Ask, Context};
use trellis_tests::daemons::{self, with};
use trellis_tests::engines::{encode, owner};
use trellis_tests::guests;

use crate::exe;
use crate::guests::{model, port, question, run, run_with};
use crate::posteriors::{Shares, report, tokens_of, total_variation, variation_of_draws};

/// What the engine says after these tokens.
pub(crate) async fn after(tokens: &[u32], ask: Ask) -> Answer {
    let mut context = Context::create(model(), owner(u32::MAX)).await.expect("created");
    context.append(tokens).await.expect("fits");
    context.ask(ask).await.expect("asked").answer().await.expect("answered")
}

/// Each of these lines of arguments is refused with the usage line.
pub(crate) async fn refuses(name: &str, lines: &[&[&str]]) {
    for &line in lines {
        let ended = run(name, &[line, &["x"][..]].concat()).await;
        assert!(ended.reason().message.contains(&format!("usage: {name}")), "{line:?}: {ended:?}");
    }
}

/// A text as if it began.
fn beginning(text: &str) -> Vec<u32> {
    encode(model(), &format!("<|begin_of_text|>{text}"))
}

/// Draws are distributed as the formula says in f64, and nothing is drawn that it leaves out.
pub(crate) async fn my_sampler(name: &str) {
    const N_TEXTS: u64 = 256;
    const N_RUNS: u64 = 8;
    for (text, factor, temperature) in
        [("Once upon a time", 1.0f64, 1.0f64), ("Ownership is", 4.0, 2.0), ("The", 0.5, 2.0)]
    {
        let Answer::Full(logprobs) = after(&beginning(text), Ask::Full).await else { panic!("a row") };
        let mut order: Vec<(u32, f64)> = (0..).zip(logprobs.into_iter().map(f64::from)).collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1));
        let entropy: f64 = order.iter().map(|(_, logprob)| -logprob * logprob.exp()).sum();
        let n_kept = (factor * entropy.exp()).max(1.0) as usize;
        let power = |n: usize, temperature: f64| -> Shares {
            let powers =
                order[..n].iter().map(|(token, logprob)| (vec![*token], (logprob / temperature).exp()));
            let sum: f64 = powers.clone().map(|(_, power)| power).sum();
            powers.map(|(token, power)| (token, power / sum)).collect()
        };
        let (expected, of_model) = (power(n_kept, temperature), power(order.len(), 1.0));

        let mut found = Shares::new();
        for idx in 0..N_RUNS {
            let numbers = [factor, temperature].map(|number| number.to_string());
            let told = ["--factor", &numbers[0], "--temperature", &numbers[1], "--max-tokens", "1", "--json"];
            let n_texts = N_TEXTS.to_string();
            let told = [&told[..], &["--texts", &n_texts, text]].concat();
            // A text has the seed of the run, with its number in the lowest bits.
            for one in report(name, &told, idx * N_TEXTS).await.as_array().expect("a list") {
                *found.entry(tokens_of(one)).or_default() += 1.0 / (N_RUNS * N_TEXTS) as f64;
                assert_eq!(one["n_kept"].as_f64(), Some(n_kept as f64), "{one}");
            }
        }
        assert!(found.keys().all(|token| expected.contains_key(token)), "{found:?}");
        let most = variation_of_draws(&expected, (N_RUNS * N_TEXTS) as usize);
        let [distance, without] = [&found, &of_model].map(|shares| total_variation(&expected, shares));
        println!("{text}: {n_kept} kept; {distance:.4} of at most {most:.4}, without {without:.4}");
        assert!(distance <= most && without >= 1.5 * most, "{distance}, {without}, {most}");
    }
    refuses(name, &[&["--factor", "0"], &["--factor", "NaN"], &["--temperature", "-1"]]).await;
}

/// The further towards the expert and away from the anti-expert, the more a text is the one's and not the other's.
pub(crate) async fn dexperts(name: &str) {
    let text = "Once upon a time";
    let told = |alpha, expert| {
        let told = ["--alpha", alpha, "--expert", expert, "--anti", "A sad story. ", "--max-tokens", "40"];
        [&told[..], &["--json", text]].concat()
    };
    let mut gaps = Vec::new();
    for alpha in ["-1", "0", "1", "4"] {
        let (mut gap, mut n_tokens) = (0.0, 0);
        for seed in 0..8 {
            let one = report(name, &told(alpha, "A happy story. "), seed).await;
            let [expert, anti] = ["expert", "anti_expert"].map(|key| one[key].as_f64().expect("a number"));
            gap += expert - anti;
            n_tokens += tokens_of(&one).len();
        }
        gaps.push(gap / n_tokens as f64);
    }
    println!("a happy and no sad story, in nats a token: {gaps:.3?}");
    assert!(gaps.is_sorted_by(|a, b| a < b) && gaps[3] >= gaps[1] + 0.1, "{gaps:?}");

    // Where the experts agree, or count for nothing, it is the base alone.
    let base = ["--temperature", "1", "--top-p", "0.9", "--max-tokens", "40", text];
    let base = run_with("complete", StartOptions { seed: Some(3), ..with(&base) }).await.well().text;
    for (alpha, expert) in [("0", "A happy story. "), ("4", "A sad story. ")] {
        let one = report(name, &told(alpha, expert), 3).await;
        assert_eq!(format!("{}\n", one["text"].as_str().expect("a text")), base, "{alpha}");
    }
    refuses(name, &[&["--alpha", "inf"], &["--top-p", "0"], &["--temperature", "0"]]).await;
}

/// The product over n from 2 to 4 of the share of runs of n tokens that are not there already: Li and others, section 5.2.
fn diversity(tokens: &[u32]) -> f64 {
    let distinct = |n| tokens.windows(n).collect::<HashSet<_>>().len() as f64;
    (2..=4).map(|n| distinct(n) / (tokens.len() + 1 - n) as f64).product()
}

/// It repeats itself less than the expert alone, and never says what the expert does not find plausible.
pub(crate) async fn contrastive(name: &str) {
    let config = Config { models: vec!["tiny".to_owned(), "draft".to_owned()], ..daemons::config(exe()) };
    let daemon = daemons::start_over(port(), &config);
    let client = daemon.connect().await.expect("connected");
    let mut means = [0.0; 2];
    let prompts = ["Ownership is", "A trait", "Borrowing", "My name is", "There was a dog", "Memory"];
    for prompt in prompts {
        for (mean, beta) in means.iter_mut().zip(["0", "0.5"]) {
            let told = ["--amateur", "draft", "--beta", beta, "--max-tokens", "150", "--json", prompt];
            let ended = daemons::run(&client, &guests::example(name), with(&told)).await.well();
            let tokens = tokens_of(&ended.json[0]);
            *mean += diversity(&tokens) / prompts.len() as f64;

            let ask = Ask::Tops { continuation: tokens.clone(), n: 1 };
            let Answer::Tops(tops) = after(&beginning(prompt), ask).await else { panic!("places") };
            let ask = Ask::Continuation(tokens.clone());
            let Answer::Scores(logprobs) = after(&beginning(prompt), ask).await else { panic!("numbers") };
            // A tenth of what is most probable; all of it where there is no amateur.
            let least = if beta == "0" { 0.0 } else { 0.1f32.ln() };
            for (top, logprob) in tops.iter().zip(logprobs) {
                let behind = logprob - top.candidates[0].logprob;
                assert!(behind >= least - 1e-3, "{behind} in {tokens:?}");
            }
        }
    }
    println!("diversity: the expert alone {:.3}, and with an amateur {:.3}", means[0], means[1]);
    assert!(means[1] >= means[0] + 0.05, "{means:?}");
    // With one model the amateur is what that says without having seen the text; where it counts for nothing, all is greedy.
    let told = ["--max-tokens", "100", "Ownership is"];
    let greedy = format!("Ownership is{}", run("complete", &told).await.well().text);
    assert_ne!(run(name, &told).await.well().text, greedy);
    assert_eq!(run(name, &[&["--beta", "0"][..], &told].concat()).await.well().text, greedy);
    refuses(name, &[&["--alpha", "0"], &["--beta", "inf"], &["--amateur-temperature", "0"]]).await;
}

/// A sixth of a prompt is enough where it is what the last tokens look at, and is not where it is any.
pub(crate) async fn snapkv(name: &str) {
    const N_WINDOW: usize = 6;
    const N_BUDGET: usize = 24;
    let story = run("complete", &["--max-tokens", "120", "Once upon a time"]).await.well().text;
    let before = format!("Once upon a time{}", story.trim().replace('\n', " "));
    let told = ["--window", "6", "--json", "--context", &before];
    let questions = [
        (
            "Give me JSON: Ada, a pilot from Oslo, is 36.",
            r#"{"name": "Ada", "age": 36, "city": "Oslo", "job": "pilot"}"#,
        ),
        (
            "Give me JSON: Ben, a farmer from Rome, is 41.",
            r#"{"name": "Ben", "age": 41, "city": "Rome", "job": "farmer"}"#,
        ),
        (
            "Give me JSON: Eva, a baker from Paris, is 29.",
            r#"{"name": "Eva", "age": 29, "city": "Paris", "job": "baker"}"#,
        ),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is the capital of Kenya?", "The capital of Kenya is Nairobi."),
    ];
    let mut n_right_at_random = 0;
    for (question, answer) in questions {
        let all = report(name, &[&told[..], &["--budget", "1000", question]].concat(), 0).await;
        assert_eq!(all["text"], answer);
        let of_some = [&told[..], &["--budget", "24"]].concat();
        let some = report(name, &[&of_some[..], &[question]].concat(), 0).await;
        assert_eq!(some["text"], answer, "{some}");
        let n_prompt = some["n_prompt"].as_u64().expect("a number");
        assert!(n_prompt >= 5 * N_BUDGET as u64, "{some}");
        let n_pages: Vec<u64> = serde_json::from_value(some["n_pages"].clone()).expect("numbers");
        // Those of the answer are among them.
        assert!(n_pages[0] >= 8 && n_pages[1] <= 4, "{some}");
        for seed in 0..4 {
            let any = report(name, &[&of_some[..], &["--at-random", question]].concat(), seed).await;
            n_right_at_random += usize::from(any["text"] == answer);
        }
    }
    println!("right with any tokens: {n_right_at_random} of {}", 4 * questions.len());
    assert!(n_right_at_random <= questions.len(), "{n_right_at_random}");

    // What is kept is what comes of asking the engine for each place of the window.
    let prompt = encode(model(), &question(&format!("{before} {}", questions[0].0)));
    let mut masses = vec![0.0; prompt.len() - N_WINDOW];
    for n in masses.len() + 1..=prompt.len() {
        let layers = (0..model().model().config.n_layers).collect();
        let Answer::Attention(of_place) = after(&prompt[..n], Ask::Attention { layers }).await else {
            panic!("attention")
        };
        masses.iter_mut().zip(of_place).for_each(|(sum, mass)| *sum += f64::from(mass));
    }
    let around = |idx: usize| masses[idx.saturating_sub(2)..masses.len().min(idx + 3)].iter();
    let pooled = |idx: usize| around(idx).copied().fold(0.0, f64::max);
    let mut kept: Vec<usize> = (0..masses.len()).collect();
    kept.sort_by(|&a, &b| pooled(b).total_cmp(&pooled(a)));
    kept.truncate(N_BUDGET - N_WINDOW);
    kept.extend(masses.len()..prompt.len());
    kept.sort_unstable();
    let some = report(name, &[&told[..], &["--budget", "24", questions[0].0]].concat(), 0).await;
    assert_eq!(some["kept"], serde_json::json!(kept));
}

/// The text is the one without guesses, and takes fewer steps. It is the runs that save them: Jacobi iteration alone saves few.
pub(crate) async fn lookahead(name: &str) {
    for (question, most) in [
        ("Think step by step: what is 468 + 275?", 0.6),
        ("Give me JSON: Ada, a pilot from Oslo, is 36.", 0.65),
        ("Tell me a short story.", 0.8),
    ] {
        let plain = report("prompt-lookup", &["--guesses", "0", "--json", question], 7).await;
        let share = async |told: &[&str]| {
            let one = report(name, &[told, &["--json", question]].concat(), 7).await;
            assert_eq!(one["text"], plain["text"]);
            let n_tokens = tokens_of(&one).len();
            assert!(plain["tokens"].as_u64() <= Some(n_tokens as u64), "{one}, {plain}");
            one["n_steps"].as_f64().expect("a number") / n_tokens as f64
        };
        let [with_runs, jacobi] = [share(&[]).await, share(&["--runs", "0"]).await];
        println!("{question} steps for a token: {with_runs:.3}, by Jacobi iteration alone {jacobi:.3}");
        assert!(with_runs <= most && jacobi >= 0.85, "{with_runs}, {jacobi}");
    }
    let text = run(name, &["What is 37 + 48?"]).await.well().text;
    assert_eq!(text, "85\n");
    for n in ["0", "1", "5"] {
        let one: Value = report(name, &["--max-tokens", n, "--json", "Tell me a short story."], 7).await;
        assert_eq!(tokens_of(&one).len().to_string(), n);
    }
}
