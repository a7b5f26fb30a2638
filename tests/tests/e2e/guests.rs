//! Each example does what it says.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde_json::Value;
use tempfile::TempDir;
use trellis::config::Config;
use trellis::daemon::Daemon;
use trellis_client::StartOptions;
use trellis_engine::model::{ModelSource, SpecialText};
use trellis_engine::sampling::{Sampler, philox4x32};
use trellis_engine::{Ahead, Context, MaskSource, ModelHandle, Port, Pull, RunKey, RunSettings};
use trellis_tests::daemons::{self, Ended, with};
use trellis_tests::device::says_the_same;
use trellis_tests::engines::{block_on, encode, owner};
use trellis_tests::goldens::{self, Case};
use trellis_tests::guests;

use crate::exe;

tokio::task_local! {
    /// The port between the guests of a test and the engine; the direct one unless it is set.
    static PORT: Port;
}

pub(crate) fn port() -> Port {
    PORT.try_with(|port| *port).unwrap_or_default()
}

/// Two tests for each example, and the list of the examples that have them: the second with every operation and
/// completion turned into bytes and back.
macro_rules! examples {
    ($($name:literal => $test:ident,)*) => {
        const TESTED: &[&str] = &[$($name),*];
        $(
            #[test]
            fn $test() {
                block_on(check::$test($name));
            }
        )*

        mod over_bytes {
            use super::*;

            $(
                #[test]
                fn $test() {
                    block_on(PORT.scope(Port::Encoded, check::$test($name)));
                }
            )*
        }
    };
}

examples! {
    "asap" => asap,
    "awrs" => awrs,
    "beam" => beam,
    "best-of-n" => best_of_n,
    "calculator" => calculator,
    "chat" => chat,
    "chat-server" => chat_server,
    "complete" => complete,
    "constrained" => constrained,
    "constrained-beam" => constrained_beam,
    "contrastive" => contrastive,
    "cot-decoding" => cot_decoding,
    "dexperts" => dexperts,
    "early-vote" => early_vote,
    "entropy-cut" => entropy_cut,
    "guidance" => guidance,
    "h2o" => h2o,
    "json-fields" => json_fields,
    "lookahead" => lookahead,
    "mcts" => mcts,
    "my-sampler" => my_sampler,
    "power-sampling" => power_sampling,
    "probe" => probe,
    "react" => react,
    "samplers" => samplers,
    "self-consistency" => self_consistency,
    "skeleton-of-thought" => skeleton_of_thought,
    "smc" => smc,
    "snapkv" => snapkv,
    "speculate" => speculate,
    "steering" => steering,
    "streaming-llm" => streaming_llm,
    "thinking-budget" => thinking_budget,
    "tool-ahead" => tool_ahead,
    "tree-of-thought" => tree_of_thought,
    "watermark" => watermark,
}

#[test]
fn every_example_has_a_test() {
    assert_eq!(guests::example_names(), TESTED);
}

#[test]
fn every_example_explains_itself_when_it_is_asked_for_nonsense() {
    block_on(async {
        for name in guests::example_names() {
            let ended = run(&name, &["--no-such-option", "x"]).await;
            let reason = ended.reason();
            assert_eq!(reason.code.as_str(), "guest_failed", "{name}: {reason:?}");
            assert!(reason.message.contains(&format!("usage: {name}")), "{name}: {reason:?}");
        }
    });
}

pub(crate) fn daemon() -> &'static Daemon {
    static DIRECT: OnceLock<Daemon> = OnceLock::new();
    static ENCODED: OnceLock<Daemon> = OnceLock::new();
    let daemon = match port() {
        Port::Direct => &DIRECT,
        Port::Encoded => &ENCODED,
    };
    daemon.get_or_init(|| daemons::start_over(port(), &daemons::config(exe())))
}

pub(crate) fn model() -> &'static ModelHandle {
    static DIRECT: OnceLock<ModelHandle> = OnceLock::new();
    static ENCODED: OnceLock<ModelHandle> = OnceLock::new();
    let model = match port() {
        Port::Direct => &DIRECT,
        Port::Encoded => &ENCODED,
    };
    model.get_or_init(|| daemon().model(None).expect("a model is loaded"))
}

pub(crate) async fn run_with(name: &str, options: StartOptions) -> Ended {
    let client = daemon().connect().await.expect("connected");
    daemons::run(&client, &guests::example(name), options).await
}

pub(crate) async fn run(name: &str, arguments: &[&str]) -> Ended {
    run_with(name, with(arguments)).await
}

pub(crate) fn decode(tokens: &[u32]) -> String {
    model().model().tokenizer.decode(tokens, SpecialText::Skip)
}

pub(crate) fn is_stop(token: u32) -> bool {
    model().model().stop_tokens.contains(&token)
}

/// The golden whose prompt contains a text.
fn golden(part: &str) -> Case {
    let mut cases = goldens::load("tiny").cases;
    let idx = cases.iter().position(|case| case.prompt.contains(part)).expect("there is such a golden");
    cases.swap_remove(idx)
}

/// The prompt of a question, in the model's chat template.
pub(crate) fn question(text: &str) -> String {
    format!("<|begin_of_text|><|user|>\n{text}<|end|>\n<|assistant|>\n")
}

/// What the engine draws by itself: the tokens, and the log-probability of the average one.
async fn draw(prompt: &str, sampler: Sampler, n_max: usize) -> (Vec<u32>, f32) {
    let mut context = Context::create(model(), owner(u32::MAX)).await.expect("created");
    context.append(&encode(model(), prompt)).await.expect("fits");
    let sampler = Arc::new(sampler);
    let settings = || RunSettings {
        sampler: sampler.clone(),
        stop_tokens: model().model().stop_tokens.clone().into(),
        n_tokens_max: Some(n_max),
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    let (mut tokens, mut logprob) = (Vec::new(), 0f32);
    while let Pull::Token(drawn) = context.pull(RunKey(0), settings).await.expect("pulled") {
        tokens.push(drawn.candidate.token);
        logprob += drawn.candidate.logprob;
    }
    let mean = logprob / tokens.len() as f32;
    (tokens, mean)
}

mod check {
    use super::*;
    pub(crate) use crate::agents::{chat_server, early_vote, react, thinking_budget, tool_ahead};
    pub(crate) use crate::aligned::{asap, constrained_beam};
    pub(crate) use crate::beams::guest::beam;
    pub(crate) use crate::constraints::guest::constrained;
    pub(crate) use crate::evictions::{h2o, streaming_llm};
    pub(crate) use crate::looks::cot_decoding;
    pub(crate) use crate::mixtures::guest::guidance;
    pub(crate) use crate::policies::{contrastive, dexperts, lookahead, my_sampler, snapkv};
    pub(crate) use crate::posteriors::{awrs, entropy_cut, power_sampling};
    pub(crate) use crate::searches::{mcts, skeleton_of_thought, smc, tree_of_thought};
    pub(crate) use crate::steering::steering;

    pub(crate) async fn chat(name: &str) {
        let answer = run(name, &["What is 37 + 48?"]).await.well();
        assert_eq!(answer.text, "85\n");
        let usage = answer.usage.expect("the daemon tells");
        assert!(usage.n_tokens > 0, "{usage:?}");

        // A conversation: each message that says something gets its answer, and the end of the messages ends the guest.
        let client = daemon().connect().await.expect("connected");
        let program = trellis_client::Program::wasm(guests::example(name));
        let guest = client.start(program, with(&[])).await.expect("connected");
        let sender = guest.sender();
        let talk = async {
            for text in ["", "What is 37 + 48?", "  ", "What is 3 + 4?"] {
                sender.send(text).await.expect("the guest listens");
            }
            sender.end_messages().await.expect("the guest listens");
        };
        let (ended, ()) = tokio::join!(daemons::collect(guest), talk);
        let lines: Vec<String> = ended.well().text.lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert_eq!(lines[0], "85");
    }

    pub(crate) async fn complete(name: &str) {
        let case = golden("Once upon a time");
        let ended = run(name, &["--max-tokens", "40", "Once upon a time"]).await.well();
        assert_eq!(ended.text, format!("{}\n", decode(&case.greedy_ids)));

        let whole = decode(&case.greedy_ids);
        let (before, _) = whole.split_once('.').expect("the story has a sentence");
        let ended = run(name, &["--max-tokens", "40", "--stop", ".", "Once upon a time"]).await.well();
        assert_eq!(ended.text, format!("{before}\n"));

        // The seed decides, and nothing else.
        let arguments = ["--temperature", "1.2", "--top-p", "0.9", "--max-tokens", "30", "Once upon a time"];
        let texts = [run(name, &arguments).await.well().text, run(name, &arguments).await.well().text];
        assert_eq!(texts[0], texts[1]);
        let sampler = Sampler { temperature: 1.2, top_p: Some(0.9), seed: 7, ..Sampler::greedy() };
        let (tokens, _) = draw("<|begin_of_text|>Once upon a time", sampler, 30).await;
        assert_eq!(texts[0], format!("{}\n", decode(&tokens)));
        let other = run_with(name, StartOptions { seed: Some(8), ..with(&arguments) }).await.well().text;
        assert_ne!(texts[0], other);

        // Guesses save steps, and change nothing.
        let config = Config { models: vec!["tiny".to_owned(), "draft".to_owned()], ..daemons::config(exe()) };
        let daemon = daemons::start_over(port(), &config);
        let client = daemon.connect().await.expect("connected");
        for guess in ["draft", "lookup"] {
            let arguments = [&["--guess", guess][..], &arguments].concat();
            let options = StartOptions { seed: Some(7), ..with(&arguments) };
            let ended = daemons::run(&client, &guests::example(name), options).await.well();
            assert_eq!(ended.text, texts[0], "{guess}");
            assert!(ended.log[0].contains("guesses were right"), "{ended:?}");
        }
        let ended = run(name, &["--guess", "nobody", "x"]).await;
        assert!(ended.reason().message.contains("nobody"), "{ended:?}");
    }

    pub(crate) async fn best_of_n(name: &str) {
        let (n, temperature) = (6u64, 2.0);
        let arguments =
            ["--n", "6", "--temperature", "2", "--max-tokens", "24", "--json", "What is 37 + 48?"];
        let report = run(name, &arguments).await.well().json.remove(0);
        let answers: Vec<(String, f32)> = report
            .as_array()
            .expect("a list")
            .iter()
            .map(|answer| {
                let logprob = answer["mean_logprob"].as_f64().expect("a number") as f32;
                (answer["text"].as_str().expect("a text").to_owned(), logprob)
            })
            .collect();

        let mut expected = Vec::new();
        for i in 0..n {
            let sampler = Sampler { temperature, seed: 7 ^ i, ..Sampler::greedy() };
            let (tokens, mean) = draw(&question("What is 37 + 48?"), sampler, 24).await;
            expected.push((decode(&tokens), mean));
        }
        expected.sort_by(|a, b| b.1.total_cmp(&a.1));
        assert_eq!(answers.len(), expected.len());
        for (found, expected) in answers.iter().zip(&expected) {
            assert!((found.1 - expected.1).abs() <= 1e-4, "{answers:?} for {expected:?}");
        }
        let texts = |answers: &[(String, f32)]| {
            let mut texts: Vec<String> = answers.iter().map(|(text, _)| text.clone()).collect();
            texts.sort();
            texts
        };
        assert_eq!(texts(&answers), texts(&expected));
        let text = run(name, &["--n", "6", "--temperature", "2", "--max-tokens", "24", "What is 37 + 48?"]);
        assert_eq!(text.await.well().text, format!("{}\n", answers[0].0));
    }

    pub(crate) async fn self_consistency(name: &str) {
        let question = "Think step by step: what is 468 + 275?";
        let report = run(name, &["--json", question]).await.well().json.remove(0);
        let votes: Vec<(String, u64)> = serde_json::from_value(report["votes"].clone()).expect("votes");
        assert_eq!(report["n_samples"], 12);
        assert_eq!(report["answer"], "743", "{report}");
        assert_eq!(votes[0].0, "743");
        assert!(votes.is_sorted_by(|a, b| a.1 >= b.1), "{votes:?}");
        assert!(votes.iter().map(|vote| vote.1).sum::<u64>() <= 12, "{votes:?}");
        // At this temperature single samples go astray: the majority is what makes it right.
        assert!(votes[0].1 < 12, "{votes:?}");
        let text = run(name, &[question]).await.well().text;
        assert_eq!(text, format!("743 ({} of 12 samples)\n", votes[0].1));
    }

    pub(crate) async fn json_fields(name: &str) {
        let ended = run(name, &["Ada, a pilot from Oslo, is 36."]).await.well();
        let expected = serde_json::json!({ "name": "Ada", "age": 36, "city": "Oslo", "job": "pilot" });
        assert_eq!(ended.json, [expected]);
        // Whatever the text, the form holds.
        for text in ["Nothing is known.", "{\"name\": 3}", "\"\"\" , , ,", "<|end|>"] {
            let ended = run(name, &[text]).await.well();
            let object = ended.json[0].as_object().expect("an object");
            let mut keys: Vec<&String> = object.keys().collect();
            keys.sort();
            assert_eq!(keys, ["age", "city", "job", "name"], "{text}");
            assert!(object["age"].is_u64(), "{object:?}");
            assert!(object["name"].is_string() && object["city"].is_string() && object["job"].is_string());
        }
    }

    pub(crate) async fn calculator(name: &str) {
        for (prompt, call, result) in [
            ("Use the calculator tool to work out 12 * 7.", "12 * 7", "84"),
            ("Use the calculator tool to work out 81 * 6.", "81 * 6", "486"),
        ] {
            let ended = run(name, &[prompt]).await.well();
            assert_eq!(ended.log, [format!("calculator: {call} = {result}")], "{ended:?}");
            assert!(ended.text.contains(result), "{ended:?}");
        }
        // A question without a call is answered without one.
        let ended = run(name, &["What is 37 + 48?"]).await.well();
        assert_eq!((ended.text.as_str(), ended.log.len()), ("85\n", 0));
    }

    pub(crate) async fn samplers(name: &str) {
        let ended = run(name, &["--json", "--max-tokens", "120", "Once upon a time"]).await.well();
        let of = |sampler: &str| {
            let found = ended.json.iter().find(|one| one["sampler"] == sampler);
            let tokens = found.expect("it is among them")["tokens"].as_array().expect("a list").iter();
            tokens.map(|token| token.as_u64().expect("a token") as u32).collect::<Vec<u32>>()
        };
        assert_eq!(ended.json.len(), 21);

        // The chain of settings draws what its program draws.
        let plain = Sampler { temperature: 0.8, top_p: Some(0.95), seed: 7, ..Sampler::greedy() };
        let prompt = "<|begin_of_text|>Once upon a time";
        assert_eq!(of("chain"), draw(prompt, plain, 120).await.0);
        assert_eq!(of("greedy"), draw(prompt, Sampler::greedy(), 120).await.0);

        // No run of three comes twice, in the prompt neither.
        let all = [encode(model(), prompt), of("no-repeat-3")].concat();
        let runs: HashSet<&[u32]> = all.windows(3).collect();
        assert_eq!(runs.len(), all.len() - 2);

        // Kirchenbauer et al., equation 3, over the noise that the definition writes down.
        let z_of_green = |tokens: &[u32], n_before: usize| {
            let is_green = |run: &[u32]| {
                let hash = run[..n_before].iter().fold([0, 0], |hash, &token| {
                    let [low, high, ..] = philox4x32([token, 0, hash[0], hash[1]], [0, 0]);
                    [low, high]
                });
                let token = run[n_before];
                let words = philox4x32([token / 4, 0, hash[0], hash[1]], [15_485_863, 0]);
                (f64::from(words[token as usize % 4] >> 9) + 0.5) / f64::from(1 << 23) < 0.25
            };
            let n = (tokens.len() - n_before) as f64;
            let n_green = tokens.windows(n_before + 1).filter(|run| is_green(run)).count() as f64;
            (n_green - 0.25 * n) / (n * 0.25 * 0.75).sqrt()
        };
        let (kgw, unigram, without) =
            (z_of_green(&of("kgw"), 1), z_of_green(&of("unigram"), 0), z_of_green(&of("temperature"), 1));
        assert!(kgw > 3.0 && unigram > 3.0 && without < 3.0, "{kgw}, {unigram}, {without}");

        let stops = &model().model().stop_tokens;
        let n_before_stop = of("at-least-20").iter().take_while(|token| !stops.contains(token)).count();
        assert!(n_before_stop >= 20, "{n_before_stop}");
        let short = of("at-most-10");
        assert!(short.len() <= 10 && short.last().is_some_and(|token| stops.contains(token)), "{short:?}");

        // Alone it draws what it draws beside the others, and says what it costs.
        let alone = run(name, &["--json", "--only", "mirostat", "--max-tokens", "120", "Once upon a time"]);
        let alone = alone.await.well().json.remove(0);
        let beside = ended.json.iter().find(|one| one["sampler"] == "mirostat").expect("it is among them");
        assert!(says_the_same(&alone, beside), "{alone} for {beside}");
        assert!(alone["cost"].as_f64().is_some_and(|cost| cost > 2.0 && cost < 16.0), "{alone}");
    }

    pub(crate) async fn watermark(name: &str) {
        let z = |ended: &Ended| ended.json[0]["z"].as_f64().expect("a number");
        let base = ["--max-tokens", "160", "--temperature", "1.5"];
        let marked = run(name, &[&base[..], &["Ownership is"]].concat()).await.well();
        assert!(z(&marked) > 5.0, "{:?}", marked.json);
        assert!(marked.json[0]["n_tokens"].as_u64().expect("a number") >= 50, "{:?}", marked.json);
        let plain = run(name, &[&base[..], &["--delta", "0", "Ownership is"]].concat()).await.well();
        assert!(z(&plain).abs() < 4.0, "{:?}", plain.json);

        // The detector sees the text alone. It need not cut it into the same tokens.
        let detected = run(name, &["--detect", "--", &marked.text]).await.well();
        assert!(z(&detected) > 4.0, "{:?}", detected.json);
        let other_key = run(name, &["--key", "3", "--detect", "--", &marked.text]).await.well();
        assert!(z(&other_key).abs() < 4.0, "{:?}", other_key.json);
        let detected = run(name, &["--detect", "--", &plain.text]).await.well();
        assert!(z(&detected).abs() < 4.0, "{:?}", detected.json);
        for bad in [["--gamma", "1"], ["--temperature", "NaN"], ["--delta", "inf"]] {
            let ended = run(name, &[&bad[..], &["x"]].concat()).await;
            assert!(ended.reason().message.contains("usage: watermark"), "{ended:?}");
        }
    }

    pub(crate) async fn speculate(name: &str) {
        let config = Config { models: vec!["tiny".to_owned(), "draft".to_owned()], ..daemons::config(exe()) };
        let daemon = daemons::start_over(port(), &config);
        let client = daemon.connect().await.expect("connected");
        let wasm = guests::example(name);
        let told = |words: &'static [&'static str]| daemons::run(&client, &wasm, with(words));
        let refused = told(&["--width", "2", "Tell me"]).await;
        assert!(refused.reason().message.contains("--width is for the guesses of a --draft"), "{refused:?}");
        let none = told(&["--json", "--max-tokens", "0", "Tell me"]).await.well();
        assert_eq!((&none.json[0]["tokens"], &none.json[0]["saved"]), (&0.into(), &0.0.into()));
        // What was decoded is what would be without guesses.
        for (seed, temperature) in [(7, "0"), (8, "0.7"), (9, "1.3")] {
            let arguments = ["--temperature", temperature, "--max-tokens", "60", "Tell me a short story."];
            let sampler =
                Sampler { temperature: temperature.parse().expect("a number"), seed, ..Sampler::greedy() };
            let expected = decode(&draw(&question("Tell me a short story."), sampler, 60).await.0);
            for how in [
                &["--draft", "draft"][..],
                &["--draft", "draft", "--guesses", "15"],
                &["--draft", "draft", "--guesses", "15", "--width", "4"],
                &["--draft", "draft", "--guesses", "5", "--width", "3"],
                &["--guesses", "0"],
                &[],
            ] {
                let options = StartOptions { seed: Some(seed), ..with(&[how, &arguments].concat()) };
                let ended = daemons::run(&client, &wasm, options).await.well();
                assert_eq!(ended.text, format!("{expected}\n"), "{how:?} at {temperature}");
                assert!(ended.log[0].contains("saved"), "{ended:?}");
            }
        }
        // It guesses less where steps take less.
        let narrow = Config { n_step_tokens: Some(4), ..config.clone() };
        let daemon = daemons::start_over(port(), &narrow);
        let asking = daemon.connect().await.expect("connected");
        let expected = decode(&draw(&question("Tell me a short story."), Sampler::greedy(), 60).await.0);
        for how in [&["--width", "4"][..], &["--width", "2"], &["--guesses", "15"]] {
            let words = [&["--draft", "draft", "--max-tokens", "60"], how, &["Tell me a short story."]];
            let ended = daemons::run(&asking, &wasm, with(&words.concat())).await.well();
            assert_eq!(ended.text, format!("{expected}\n"), "{how:?}");
        }
        drop((asking, daemon));
        let sums = ["468 + 275", "37 + 48", "915 + 86", "640 + 333", "78 + 77", "129 + 504"];
        let sums = sums.map(|sum| format!("Think step by step: what is {sum}?"));
        let sums: Vec<&str> = sums.iter().map(String::as_str).collect();
        let stories = ["Tell me a short story."; 6];
        let prose =
            ["Ownership is a set of rules", "The `Vec` type", "A program", "In this chapter", "The compiler"];
        let draft = ["--draft", "draft"];
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
                let arguments = [&draft[..], how, &["--json", "--", prompt]].concat();
                let options = StartOptions { seed: Some(seed), ..with(&arguments) };
                let report = daemons::run(&client, &wasm, options).await.well().json.remove(0);
                let number = |key: &str| report[key].as_f64().expect("a number");
                tokens += number("tokens");
                steps += number("steps");
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

        // What followed before is guessed. Little is in vain where nothing repeats.
        let (mut computed, mut in_vain) = (0.0, 0.0);
        for (seed, prompt) in
            (7..).zip([&stories[..], &["Ownership is a set of rules", "A program"]].concat())
        {
            let arguments = ["--temperature", "0.7", "--max-tokens", "150", "--json", "--", prompt];
            let options = StartOptions { seed: Some(seed), ..with(&arguments) };
            let report = daemons::run(&client, &wasm, options).await.well().json.remove(0);
            let number = |key: &str| report[key].as_f64().expect("a number");
            in_vain += number("guessed") - number("accepted");
            computed += number("steps") + number("guessed");
        }
        println!("nothing repeats: {in_vain} of {computed} tokens computed in vain");
        assert!(in_vain <= 0.05 * computed, "{in_vain} of {computed}");
        drop(client);
        // The small model copies itself before long when it always takes the likeliest token.
        let daemon = daemons::start(&Config { models: vec!["draft".to_owned()], ..daemons::config(exe()) });
        let client = daemon.connect().await.expect("connected");
        for prompt in ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15", &"a b c ".repeat(8)] {
            let prompt = format!("<|begin_of_text|>{prompt}");
            let arguments = ["--raw", "--max-tokens", "400", "--json", "--", &prompt];
            let report = daemons::run(&client, &wasm, with(&arguments)).await.well().json.remove(0);
            println!("copied: {} of {} steps saved by look-ups", report["saved"], report["tokens"]);
            assert!(report["saved"].as_f64() >= Some(0.6), "{report}");
        }
        let ended = daemons::run(&client, &wasm, with(&["--draft", "tiny", "x"])).await;
        assert!(ended.reason().message.contains("no model is called \"tiny\""), "{ended:?}");
        drop(client);

        // A model that counts its tokens otherwise cannot guess for another.
        let folder = TempDir::new().expect("a folder");
        let other = folder.path().join("other");
        copy_with_two_tokens_swapped(&other);
        let models = vec!["tiny".to_owned(), other.to_str().expect("UTF-8").to_owned()];
        let daemon = daemons::start(&Config { models, ..daemons::config(exe()) });
        let client = daemon.connect().await.expect("connected");
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

    pub(crate) async fn probe(name: &str) {
        assert_eq!(run(name, &["first"]).await.well().text, ".");
        assert_eq!(run(name, &["idle", "1000"]).await.well().text, ".");
        let case = golden("Once upon a time");
        let ended = run(name, &["stream", "40", "Once upon a time"]).await.well();
        assert_eq!(ended.tokens, case.greedy_ids);
        assert_eq!(ended.text, decode(&case.greedy_ids));
        let ended = run(name, &["tokens", "20", "0"]).await;
        assert!(ended.reason().message.contains("length of a prompt"), "{ended:?}");
    }
}
