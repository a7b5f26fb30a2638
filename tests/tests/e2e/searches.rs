//! Examples that search for an answer or write parts of it at once: what they gain, and for how much.

use serde_json::Value;
use trellis::daemon::Daemon;
use trellis_client::StartOptions;
use trellis_tests::daemons::{self, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;
use trellis_tests::policies::{self, MCTS, ONE_SAMPLE, SELF_CONSISTENCY, SMC, TREE_OF_THOUGHT};

use crate::exe;
use crate::guests::{port, run, run_with};

const SUM: &str = "Think step by step: what is 468 + 275?";

async fn report(name: &str, seed: u64, arguments: &[&str]) -> Value {
    let options = StartOptions { seed: Some(seed), ..with(&[&["--json"][..], arguments].concat()) };
    run_with(name, options).await.well().json.remove(0)
}

fn number(report: &Value, key: &str) -> f64 {
    report[key].as_f64().unwrap_or_else(|| panic!("no {key}: {report}"))
}

/// The answer at temperature 0, and its length.
async fn surest() -> Value {
    let told = ["--n", "1", "--temperature", "0", "--json", SUM];
    run("best-of-n", &told).await.well().json.remove(0)[0].take()
}

/// Of answers that are drawn hot most are wrong. What searches by lines is right far more often, and spends no more than the
/// majority over 8 of them.
#[test]
fn searches_answer_better_than_samples_and_spend_no_more_than_a_vote() {
    block_on(async {
        let daemon = daemons::start(&daemons::config(exe()));
        let sums = policies::sums(12);
        let mut scores = Vec::new();
        for policy in [ONE_SAMPLE, SELF_CONSISTENCY, TREE_OF_THOUGHT, SMC, MCTS] {
            let score = policies::measure(&daemon, policy, &sums).await;
            println!(
                "{}: {} of {} right, {:.0} tokens each, {:.1} s",
                score.policy,
                score.n_right,
                score.n_questions,
                score.tokens_each(),
                score.seconds
            );
            scores.push(score);
        }
        let [one, vote, searches @ ..] = &scores[..] else { panic!("{scores:?}") };
        assert!((0.25..0.6).contains(&one.accuracy()), "{one:?}");
        assert!(vote.accuracy() >= 0.8, "{vote:?}");
        for search in searches {
            assert!(search.accuracy() >= 0.9, "{search:?}");
            assert!(search.n_tokens <= vote.n_tokens, "{search:?} for {vote:?}");
        }
    });
}

pub(crate) async fn tree_of_thought(name: &str) {
    // What is drawn twice is one state: without chance the search is one answer.
    let cold = report(name, 7, &["--temperature", "0", SUM]).await;
    let surest = surest().await;
    assert_eq!(cold["text"], surest["text"]);
    assert!((number(&cold, "mean_logprob") - number(&surest, "mean_logprob")).abs() <= 1e-4, "{cold}");
    let n_lines = surest["text"].as_str().expect("a text").lines().count() as f64;
    assert_eq!((number(&cold, "depth"), number(&cold, "n_lines")), (n_lines, 4.0 * n_lines));

    // The more it looks at, the surer the model is of what it finds.
    let mut sure = [0.0; 2];
    for seed in 0..6 {
        for (sure, width) in sure.iter_mut().zip(["1", "4"]) {
            let told = ["--proposals", width, "--keep", width, "--temperature", "2.5", SUM];
            *sure += number(&report(name, seed, &told).await, "mean_logprob") / 6.0;
        }
    }
    println!(
        "{name}: log-probability of the average token {:.3} of one line each, {:.3} of four",
        sure[0], sure[1]
    );
    assert!(sure[1] >= -0.05 && sure[0] < sure[1] - 0.1, "{sure:?}");

    let text = run(name, &["--temperature", "2.5", SUM]).await.well().text;
    assert!(text.ends_with("Answer: 743\n"), "{text}");
    for option in ["--proposals", "--keep", "--line-tokens"] {
        let ended = run(name, &[option, "0", "x"]).await;
        assert!(ended.reason().message.contains("usage: tree-of-thought"), "{ended:?}");
    }
    // A line that is cut off goes on in the next one, and its text is what the model wrote.
    let cut = report(name, 7, &["--temperature", "0", "--line-tokens", "3", SUM]).await;
    assert_eq!(cut["text"], surest["text"]);
    assert_eq!(run(name, &["--max-tokens", "0", "x"]).await.well().text, "\n");
}

pub(crate) async fn mcts(name: &str) {
    let cold = report(name, 7, &["--temperature", "0", SUM]).await;
    assert_eq!(cold["text"], surest().await["text"]);

    // More rounds begin with the same ones, and come back to where lines were doubtful.
    let (mut first, mut last) = (0.0, 0.0);
    for seed in 0..6 {
        let mut before = 0.0;
        for (idx, rounds) in ["1", "3", "6"].into_iter().enumerate() {
            let told = ["--rounds", rounds, "--width", "1", "--temperature", "2.5", SUM];
            let reward = number(&report(name, seed, &told).await, "reward");
            assert!((before..=1.0).contains(&reward), "{reward} after {rounds} rounds, {before} before");
            before = reward;
            first += if idx == 0 { reward / 6.0 } else { 0.0 };
        }
        last += before / 6.0;
    }
    println!("{name}: mean reward {first:.3} after a round, {last:.3} after six");
    assert!(last >= 0.95 && last >= first + 0.05, "{first}, {last}");

    let text = run(name, &["--rounds", "8", "--temperature", "2.5", SUM]).await.well().text;
    assert!(text.ends_with("Answer: 743\n"), "{text}");
}

/// All particles keep to the rule. How probable that is, is the same whatever the temperature that they are drawn at: they stand
/// for the model's own distribution.
pub(crate) async fn smc(name: &str) {
    let told = ["--letters", "6", "--piece", "2", "--max-tokens", "24", "Tell me a short story."];
    let mut evidence = [0.0; 3];
    for (evidence, temperature) in evidence.iter_mut().zip(["1", "1.25", "0.8"]) {
        for seed in 0..6 {
            let told = [&["--particles", "64", "--temperature", temperature][..], &told].concat();
            let report = report(name, seed, &told).await;
            let texts = report["texts"].as_array().expect("a list");
            assert!(texts.iter().any(|it| it[0] == report["text"]), "{report}");
            for text in texts {
                let mut words = text[0].as_str().expect("a text").split(|c: char| !c.is_alphabetic());
                assert!(words.all(|word| word.chars().count() <= 6), "{text}");
            }
            assert!(number(&report, "n_resampled") > 0.0, "the rule was broken");
            *evidence += number(&report, "log_evidence").exp() / 6.0;
        }
    }
    println!(
        "{name}: {evidence:.3?} of the model's texts keep to the rule, by the temperature of their draws"
    );
    for one in &evidence[1..] {
        assert!((one / evidence[0] - 1.0).abs() <= 0.15, "{evidence:?}");
    }

    let told = ["--particles", "8", "--temperature", "2.5", SUM];
    let text = run(name, &told).await.well().text;
    assert!(text.ends_with("Answer: 743\n"), "{text}");
    for temperature in ["0", "-1", "inf", "NaN"] {
        let ended = run(name, &["--temperature", temperature, "x"]).await;
        assert!(ended.reason().message.contains("usage: smc"), "{temperature}: {ended:?}");
    }
    // A rule that nothing keeps to.
    let ended = run(name, &["--particles", "2", "--letters", "0", "Tell me a short story."]).await.well();
    assert!(ended.text.contains("no text was left"), "{}", ended.text);
}

/// Points that are written at once take the steps of the longest; one after another they take those of all.
pub(crate) async fn skeleton_of_thought(name: &str) {
    let daemon = daemons::start_over(port(), &daemons::config(exe()));
    let (four, n_steps) = counted(&daemon, name, &["--points", "4"]).await;
    let of = |key: &str| -> Vec<String> { serde_json::from_value(four[key].clone()).expect("texts") };
    let (points, texts) = (of("points"), of("texts"));
    assert_eq!((points.len(), texts.len()), (4, 4));
    for (point, text) in points.iter().zip(&texts) {
        assert!(point.starts_with("Once upon a time there was a") && point.ends_with('.'), "{point}");
        assert!(text.starts_with(point) && text.len() > 3 * point.len(), "{text}");
    }
    let mut n_steps_of_one = 0.0;
    for _ in 0..4 {
        n_steps_of_one += counted(&daemon, name, &["--points", "1"]).await.1;
    }
    let told = number(&four, "n_steps");
    println!(
        "{name}: {n_steps} steps for four points at once, {told} by its own count; {n_steps_of_one} for one after another, \
         {} tokens",
        four["n_expansions"]
    );
    assert!(n_steps <= 0.6 * n_steps_of_one, "{n_steps} of {n_steps_of_one}");
    assert!(told <= 0.55 * number(&four, "n_expansions"), "{four}");
    // Prompts take steps too, and so does a token whose mask is late.
    assert!((0.95..1.5).contains(&(n_steps / told)), "{n_steps} for {told}");
    // Nothing is written twice: what is computed beside the answer is the question, and each point once more.
    let n_drawn = number(&four, "n_skeleton") + number(&four, "n_expansions");
    assert!(number(&four, "n_computed") <= n_drawn + number(&four, "n_skeleton") + 40.0, "{four}");

    let ended = run(name, &["--points", "0", "x"]).await;
    assert!(ended.reason().message.contains("usage: skeleton-of-thought"), "{ended:?}");
    let ended = run(name, &["--point", "(", "x"]).await;
    assert!(ended.error.is_some(), "{ended:?}");
    // A point that may go on for ever.
    let ended = run(name, &["--point", "[a-z ]+", "--points", "1", "--max-tokens", "8", "x"]).await;
    assert!(ended.reason().message.contains("a form that ends 1 times in 8 tokens"), "{ended:?}");
}

/// What a guest reports that has a daemon to itself, and the steps of the model that went by.
async fn counted(daemon: &Daemon, name: &str, arguments: &[&str]) -> (Value, f64) {
    let model = daemon.model(None).expect("a model is loaded");
    let n_steps = async || model.stats().await.expect("it lives").n_steps as f64;
    let before = n_steps().await;
    let told = [arguments, &["--json", "Tell me a short story."]].concat();
    let client = daemon.connect().await.expect("connected");
    let mut ended = daemons::run(&client, &guests::example(name), with(&told)).await.well();
    (ended.json.remove(0), n_steps().await - before)
}
