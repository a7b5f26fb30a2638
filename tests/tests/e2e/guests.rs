//! Each example does what it says.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use trellis::config::Config;
use trellis::daemon::Daemon;
use trellis_client::StartOptions;
use trellis_engine::model::SpecialText;
use trellis_engine::sampling::Sampler;
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

/// A test for each example, and the list of the examples that have one. Each has a second, with every operation and completion
/// turned into bytes and back, but those that compute most and ask for nothing that others do not ask for: they are run once.
macro_rules! examples {
    ($($name:literal => $test:ident $($kind:ident)?,)*) => {
        const TESTED: &[&str] = &[$($name),*];
        $(
            #[test]
            fn $test() {
                block_on(check::$test($name));
            }
        )*

        mod over_bytes {
            use super::*;

            $(over_bytes!($name => $test $($kind)?);)*
        }
    };
}

macro_rules! over_bytes {
    ($name:literal => $test:ident) => {
        #[test]
        fn $test() {
            block_on(PORT.scope(Port::Encoded, check::$test($name)));
        }
    };
    ($name:literal => $test:ident once) => {};
}

examples! {
    "asap" => asap,
    "awrs" => awrs once,
    "beam" => beam,
    "best-of-n" => best_of_n once,
    "calculator" => calculator,
    "cfg" => cfg,
    "chat" => chat,
    "chat-server" => chat_server,
    "complete" => complete,
    "constrained-beam" => constrained_beam,
    "contrastive" => contrastive once,
    "conversation" => conversation,
    "cot-decoding" => cot_decoding,
    "dexperts" => dexperts,
    "diverse-beam" => diverse_beam,
    "early-vote" => early_vote once,
    "entropy-cut" => entropy_cut once,
    "grammar" => grammar,
    "h2o" => h2o,
    "http-chat" => http_chat,
    "json-fields" => json_fields,
    "json-schema" => json_schema,
    "lookahead" => lookahead once,
    "mcts" => mcts,
    "my-sampler" => my_sampler once,
    "power-sampling" => power_sampling once,
    "probe" => probe,
    "prompt-lookup" => prompt_lookup,
    "react" => react,
    "regex" => regex,
    "samplers" => samplers,
    "self-consistency" => self_consistency once,
    "skeleton-of-thought" => skeleton_of_thought,
    "smc" => smc once,
    "snapkv" => snapkv,
    "speculative" => speculative once,
    "steering" => steering,
    "streaming-llm" => streaming_llm,
    "thinking-budget" => thinking_budget,
    "tool-ahead" => tool_ahead,
    "tree-of-thought" => tree_of_thought once,
    "watermarks" => watermarks,
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
pub(crate) async fn draw(prompt: &str, sampler: Sampler, n_max: usize) -> (Vec<u32>, f32) {
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
    pub(crate) use crate::agents::{
        chat_server, conversation, early_vote, react, thinking_budget, tool_ahead,
    };
    pub(crate) use crate::aligned::{asap, constrained_beam};
    pub(crate) use crate::beams::guest::{beam, diverse_beam};
    pub(crate) use crate::constraints::guest::{grammar, json_schema, regex};
    pub(crate) use crate::evictions::{h2o, streaming_llm};
    pub(crate) use crate::guesses::{prompt_lookup, speculative};
    pub(crate) use crate::http::guest::http_chat;
    pub(crate) use crate::looks::cot_decoding;
    pub(crate) use crate::mixtures::guest::cfg;
    pub(crate) use crate::policies::{contrastive, dexperts, lookahead, my_sampler, snapkv};
    pub(crate) use crate::posteriors::{awrs, entropy_cut, power_sampling};
    pub(crate) use crate::searches::{mcts, skeleton_of_thought, smc, tree_of_thought};
    pub(crate) use crate::steering::steering;
    pub(crate) use crate::watermarks::watermarks;

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
        // The numbers of SplitMix64 for the seed, after itself.
        let (mut seed, mut state) = (7u64, 7u64);
        for _ in 0..n {
            let sampler = Sampler { temperature, seed, ..Sampler::greedy() };
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            seed = z ^ (z >> 31);
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
        // Those that fall behind are given up: the answer is as sure, for fewer tokens.
        let question = "Think step by step: what is 468 + 275?";
        let (mut surest, mut n_tokens) = ([0f64; 2], [0; 2]);
        for seed in 0..4 {
            for (idx, how) in [&[][..], &["--reject"]].into_iter().enumerate() {
                let arguments = [&["--n", "16", "--temperature", "2", "--json"], how, &[question]].concat();
                let options = StartOptions { seed: Some(seed << 8), ..with(&arguments) };
                let ended = run_with(name, options).await.well();
                surest[idx] += ended.json[0][0]["mean_logprob"].as_f64().expect("a number") / 4.0;
                n_tokens[idx] += ended.usage.expect("the daemon tells").n_tokens;
            }
        }
        println!("best of 16: {surest:?} nats a token for {n_tokens:?} tokens, all and with --reject");
        assert!(n_tokens[1] * 10 < n_tokens[0] * 6, "{n_tokens:?}");
        assert!(surest[1] > surest[0] - 0.1, "{surest:?}");
        let most = ["--reject", "--max-tokens", "4294967295", "What is 37 + 48?"];
        assert_eq!(run(name, &most).await.well().text, "85\n");
        let text = run(name, &["--n", "6", "--temperature", "2", "--max-tokens", "24", "What is 37 + 48?"]);
        assert_eq!(text.await.well().text, format!("{}\n", answers[0].0));
    }

    pub(crate) async fn self_consistency(name: &str) {
        let question = "Think step by step: what is 468 + 275?";
        let report = run(name, &["--temperature", "2.3", "--json", question]).await.well().json.remove(0);
        let votes: Vec<(String, u64)> = serde_json::from_value(report["votes"].clone()).expect("votes");
        assert_eq!(report["n_samples"], 12);
        assert_eq!(report["answer"], "743", "{report}");
        assert_eq!(votes[0].0, "743");
        assert!(votes.is_sorted_by(|a, b| a.1 >= b.1), "{votes:?}");
        assert!(votes.iter().map(|vote| vote.1).sum::<u64>() <= 12, "{votes:?}");
        // At this temperature single samples go astray: the majority is what makes it right.
        assert!(votes[0].1 < 12, "{votes:?}");
        let text = run(name, &["--temperature", "2.3", question]).await.well().text;
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
        assert_eq!(ended.json.len(), 17);

        // The chain of settings draws what its program draws.
        let plain = Sampler { temperature: 0.8, top_p: Some(0.95), seed: 7, ..Sampler::greedy() };
        let prompt = "<|begin_of_text|>Once upon a time";
        assert_eq!(of("chain"), draw(prompt, plain, 120).await.0);
        assert_eq!(of("greedy"), draw(prompt, Sampler::greedy(), 120).await.0);

        // No run of three comes twice, in the prompt neither.
        let all = [encode(model(), prompt), of("no-repeat-3")].concat();
        let runs: HashSet<&[u32]> = all.windows(3).collect();
        assert_eq!(runs.len(), all.len() - 2);

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
