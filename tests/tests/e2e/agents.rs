//! Examples of agents, and what the SDK does for guests that draw and think by themselves.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use trellis_client::{Event, Guest, Program};
use trellis_tests::daemons::{self, Ended, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;
use crate::guests::{daemon, model, port, run};

/// Starts an example; messages go to it while it runs.
async fn start(name: &str, arguments: &[&str]) -> Guest {
    let client = daemon().connect().await.expect("connected");
    client.start(Program::wasm(guests::example(name)), with(arguments)).await.expect("connected")
}

/// The next JSON that a guest sends; none once it has ended, and it has ended well.
pub(crate) async fn next_json(guest: &mut Guest) -> Option<Value> {
    while let Some(event) = guest.next().await {
        if let Event::Json { json } = event.expect("it ends well") {
            return Some(serde_json::from_str(&json).expect("it is JSON"));
        }
    }
    None
}

/// A field that is a text.
fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_else(|| panic!("{field} is no text: {value}"))
}

/// A field that is a count.
fn count(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} is no count: {value}"))
}

/// Two steps come to answers to which one call alone does not.
pub(crate) async fn react(name: &str) {
    for (sum, actions, answer) in [
        ("12 * 7 + 5", &["12 * 7", "84 + 5"][..], "89"),
        ("5 + 12 * 7", &["12 * 7", "5 + 84"], "89"),
        ("37 + 48 + 12", &["37 + 48", "85 + 12"], "97"),
        ("90 - 12 - 9", &["90 - 12", "78 - 9"], "69"),
        ("8 * 9 * 2", &["8 * 9", "72 * 2"], "144"),
        ("2 * 3 + 4 * 5", &["2 * 3", "4 * 5", "6 + 20"], "26"),
    ] {
        let question = format!("Use the calculator tool to work out {sum}.");
        let report = run(name, &["--json", &question]).await.well().json.remove(0);
        let steps = report["steps"].as_array().expect("a list");
        let taken: Vec<&str> = steps.iter().map(|step| text(step, "action")).collect();
        assert_eq!(taken, actions, "{report}");
        let observed = text(steps.last().expect("there are steps"), "observation");
        assert_eq!(observed, answer, "{report}");
        assert!(text(&report, "answer").ends_with(&format!("= {answer}.")), "{report}");
        let once = run("calculator", &[&question]).await.well().text;
        assert!(!once.contains(answer), "one call is enough for {sum}: {once}");
    }
    // What a client says is observed, and the next action follows from it.
    let question = "Use the calculator tool to work out 12 * 7 + 5.";
    let mut guest = start(name, &["--wait-ms", "600000", "--json", question]).await;
    for (expression, observation) in [("12 * 7", "30"), ("30 + 5", "35")] {
        let call = next_json(&mut guest).await.expect("a call");
        assert_eq!(call, json!({ "tool": "calculator", "expression": expression }));
        guest.send(observation).await.expect("it listens");
    }
    let report = next_json(&mut guest).await.expect("a report");
    assert_eq!(report["answer"], "30 + 5 = 35.");
    // One that has nothing to say does not hold it up, and a question without actions is answered.
    let guest = start(name, &["--wait-ms", "600000", question]).await;
    guest.end_messages().await.expect("it listens");
    assert_eq!(daemons::collect(guest).await.well().text, "84 + 5 = 89.\n");
    let text = run(name, &["What is the capital of France?"]).await.well().text;
    assert_eq!(text, "The capital of France is Paris.\n");
    // What cannot be replaced by its value is no action.
    let report = run(name, &["--json", "What is 12 *, 7?"]).await.well().json.remove(0);
    assert_eq!(report["steps"], json!([]), "{report}");
}

/// What the example reports where its tool answers this after this time.
async fn told(name: &str, options: &[&str], result: &str, after: Duration) -> Value {
    let prompt = "Use the calculator tool to work out 12 * 7.";
    let mut guest = start(name, &[options, &["--json", prompt]].concat()).await;
    let call = next_json(&mut guest).await.expect("a call");
    assert_eq!(call, json!({ "expression": "12 * 7" }));
    tokio::time::sleep(after).await;
    guest.send(result).await.expect("it listens");
    next_json(&mut guest).await.expect("a report")
}

/// The text is the same as without a guess, whatever was guessed and whenever the result comes; and where the guess was right
/// there is nothing left to decode once a slow result is there.
pub(crate) async fn tool_ahead(name: &str) {
    const AT_ONCE: Duration = Duration::ZERO;
    const SLOW: Duration = Duration::from_secs(2);
    for temperature in ["0", "0.7"] {
        let options = ["--temperature", temperature];
        let plain = ["--no-guess", "--temperature", temperature];
        for (result, right) in [("84", true), ("85", false)] {
            let without = told(name, &plain, result, AT_ONCE).await;
            let n_whole = count(&without, "n_after");
            assert!(without["guess"].is_null() && count(&without, "n_ahead") == 0, "{without}");
            assert!(temperature != "0" || text(&without, "text").contains(result), "{without}");
            // Long enough for the whole text; that is asked where nothing is drawn by chance.
            let times = if temperature == "0" { &[AT_ONCE, SLOW][..] } else { &[AT_ONCE] };
            for &after in times {
                let with = told(name, &options, result, after).await;
                assert_eq!((text(&with, "guess"), &with["text"]), ("84", &without["text"]), "{with}");
                assert_eq!(count(&with, "n_ahead") + count(&with, "n_after"), n_whole, "{with}");
                assert_eq!(count(&with, "n_ahead") > 0, right, "{with}");
                let is_saved = right && after == SLOW;
                assert!(!is_saved || count(&with, "n_after") < n_whole / 2, "{with} of {n_whole}");
            }
        }
    }
    assert_eq!(run(name, &["What is 37 + 48?"]).await.well().text, "85\n");
    let report = run(name, &["--json", "What is 37 + 48?"]).await.well().json.remove(0);
    assert_eq!((text(&report, "text"), &report["result"]), ("85", &Value::Null), "{report}");

    // The messages end without a result.
    let guest = start(name, &["--json", "Use the calculator tool to work out 12 * 7."]).await;
    guest.end_messages().await.expect("it listens");
    let report = daemons::collect(guest).await.well().json.remove(1);
    assert_eq!(
        (&report["text"], &report["result"], text(&report, "guess")),
        (&Value::Null, &Value::Null, "84")
    );
}

/// Each thought keeps to its budgets, ends as it says, and is how the model begins without any.
pub(crate) async fn thinking_budget(name: &str) {
    let question = "Think step by step: what is 468 + 275?";
    let think = async |arguments: &[&str]| {
        run(name, &[arguments, &["--json", question]].concat()).await.well().json.remove(0)
    };
    for temperature in ["0", "1"] {
        let of_temperature = ["--temperature", temperature];
        let whole = think(&of_temperature).await;
        let (all, n_all) = (text(&whole, "thought"), count(&whole, "n_thought_tokens"));
        assert_eq!((text(&whole, "end"), &whole["answer"]), ("closed", &"743".into()), "{whole}");
        for (soft, hard) in [(0, 0), (5, 10), (5, 60), (20, 20), (20, 60), (30, 200), (45, 200), (200, 40)] {
            let budgets = ["--soft", &soft.to_string(), "--hard", &hard.to_string()];
            let report = think(&[&of_temperature[..], &budgets].concat()).await;
            let (thought, n) = (text(&report, "thought"), count(&report, "n_thought_tokens"));
            let rest = all.strip_prefix(thought).unwrap_or_else(|| panic!("{thought} of {all}"));
            assert!(n <= hard && !text(&report, "answer").is_empty(), "{report}");
            match text(&report, "end") {
                "closed" => assert!(rest.is_empty() && n == n_all, "{report}"),
                "sentence" => {
                    assert!((rest.is_empty() || rest.starts_with('\n')) && n >= soft, "{report} of {all}");
                }
                _ => assert_eq!(n, hard, "{report}"),
            }
            // No line has more than 40 tokens.
            assert!(hard < soft + 40 || text(&report, "end") != "cut", "{report}");
            assert!(hard > soft || text(&report, "end") == "cut", "{report}");
        }
    }
    let said = run(name, &["--soft", "5", "--hard", "60", question]).await.well().text;
    assert!(said.starts_with("ones: 8 + 5 = 13, write 3 carry 1\n[sentence after "), "{said}");
}

/// The answers are those of all samples, at a fraction of the tokens.
pub(crate) async fn early_vote(name: &str) {
    let (mut n_early, mut n_all) = (0, 0);
    for sum in ["468 + 275", "905 + 76", "777 + 888", "250 + 250", "639 + 184"] {
        let question = format!("Think step by step: what is {sum}?");
        let n_tokens = |ended: &Ended| ended.usage.as_ref().expect("the daemon tells").n_tokens;
        let early = run(name, &["--samples", "24", "--json", &question]).await.well();
        let all = run("self-consistency", &["--samples", "24", "--json", &question]).await.well();
        let (report, of_all) = (&early.json[0], &all.json[0]);
        assert_eq!(report["answer"], of_all["answer"], "{report} for {of_all}");
        let certainty = report["certainty"].as_f64().expect("a number");
        assert!(certainty >= 0.95 || count(report, "n_samples") == 24, "{report}");
        n_early += n_tokens(&early);
        n_all += n_tokens(&all);
    }
    println!("{name}: {n_early} tokens of {n_all}, {:.0} %", 100.0 * n_early as f64 / n_all as f64);
    assert!(n_early * 10 <= n_all * 7, "{n_early} of {n_all}");

    // With full certainty it goes on until the rest could change nothing, or all are there.
    let question = "Think step by step: what is 468 + 275?";
    let report = run(name, &["--samples", "10", "--wave", "3", "--certainty", "1", "--json", question]).await;
    let report = report.well().json.remove(0);
    let votes: Vec<(String, u64)> = serde_json::from_value(report["votes"].clone()).expect("votes");
    let votes_of = |idx: usize| votes.get(idx).map_or(0, |vote| vote.1);
    let n_samples = count(&report, "n_samples");
    assert!(votes_of(0) > votes_of(1) + (10 - n_samples) || n_samples == 10, "{report}");
    assert!(n_samples >= 6 && report["answer"] == "743", "{report}");
    for certainty in ["0", "2", "NaN"] {
        let ended = run(name, &["--certainty", certainty, "x"]).await;
        assert!(ended.reason().message.contains("usage: early-vote"), "{certainty}: {ended:?}");
    }
    let said = run(name, &["--samples", "2", "What is 37 + 48?"]).await.well().text;
    assert!(said.starts_with("no sample came to an answer (2 of 2 samples"), "{said}");
}

/// Conversations come side by side and keep what was said; a stop ends one at once, and the other goes on.
pub(crate) async fn chat_server(name: &str) {
    let story = run("chat", &["Tell me a short story."]).await.well().text;
    let mut guest = start(name, &[]).await;
    for message in [
        json!({ "id": "a", "user": "Tell me a short story." }),
        json!({ "id": "b", "user": "Tell me a short story." }),
        json!({ "id": "c", "user": "Tell me a short story." }),
        json!({ "id": "b", "user": "And another." }),
        json!({ "id": "nobody", "stop": true }),
        json!("no object"),
    ] {
        guest.send(message.to_string()).await.expect("it listens");
    }
    let (mut events, mut is_told) = (Vec::new(), false);
    while events.iter().filter(|event: &&Value| event["end"].is_string()).count() < 3 {
        let event = next_json(&mut guest).await.expect("answers are under way");
        let is_of_a = event["id"] == "a";
        events.push(event);
        if is_of_a && !is_told {
            guest.send(json!({ "id": "a", "stop": true }).to_string()).await.expect("it listens");
            is_told = true;
        }
    }
    let errors: Vec<&Value> = events.iter().filter(|event| event["error"].is_string()).collect();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors.iter().any(|error| error["id"] == "b" && text(error, "error").contains("under way")));
    let of = |id: &str| -> (String, &str) {
        let mine = || events.iter().filter(|event| event["id"] == id);
        let said = mine().filter_map(|event| event["text"].as_str()).collect();
        (said, mine().find_map(|event| event["end"].as_str()).expect("it ended"))
    };
    for id in ["b", "c"] {
        assert_eq!(of(id), (story.trim_end_matches('\n').to_owned(), "done"));
    }
    let (said, end) = of("a");
    assert_eq!(end, "stopped");
    assert!(story.starts_with(&said) && !said.is_empty() && said.len() < story.len() / 2, "{said}");
    // As long as both are under way they take turns.
    let ids: Vec<&Value> = events.iter().filter(|it| it["text"].is_string()).map(|it| &it["id"]).collect();
    let turns: Vec<&Value> = ids.into_iter().filter(|id| **id != "a").collect();
    let first = turns.iter().position(|id| **id == "c").expect("it said something");
    let last = turns.iter().rposition(|id| **id == "b").expect("it said something");
    assert!(turns[first..last].is_sorted_by(|one, next| one != next), "{turns:?}");
    assert!(last > first + 100, "{turns:?}");

    // A conversation that was stopped goes on with what was said, and the end of the messages ends the guest.
    let question = "What is 37 + 48?";
    guest.send(json!({ "id": "a", "user": question }).to_string()).await.expect("it listens");
    guest.end_messages().await.expect("it listens");
    let mut said = Vec::new();
    while let Some(event) = next_json(&mut guest).await {
        said.push(event);
    }
    assert!(said.iter().all(|event| event["id"] == "a") && said.len() > 1, "{said:?}");
    assert_eq!(said.last().expect("it was answered")["end"], "done");
}

/// Sends a request, and hears so many replies and the text before them.
pub(crate) async fn replies(guest: &mut Guest, request: Value, n: usize) -> (String, Vec<Value>) {
    guest.send(request.to_string()).await.expect("it listens");
    let (mut text, mut replies) = (String::new(), Vec::new());
    while replies.len() < n {
        match guest.next().await.expect("it goes on").expect("it is well") {
            Event::Text { text: piece } => text.push_str(&piece),
            Event::Json { json } => replies.push(serde_json::from_str(&json).expect("it is JSON")),
            _ => {}
        }
    }
    (text, replies)
}

/// An answer can be stopped, and what is computed is there for another guest.
pub(crate) async fn conversation(name: &str) {
    let of = |role: &str, text: &str| json!({ "message": { "role": role, "content": text } });
    let question = of("user", "What is 37 + 48?");
    let mut guest = start(name, &[]).await;
    assert_eq!(next_json(&mut guest).await, Some(json!({ "ready": "tiny" })));
    assert_eq!(replies(&mut guest, question.clone(), 1).await.1, [json!({ "done": 0 })]);
    let (said, told) = replies(&mut guest, json!({ "answer": {} }), 2).await;
    let answered = &told[0]["answered"];
    assert_eq!((said.as_str(), text(answered, "ending")), ("85", "complete"), "{told:?}");
    let n_prompt = count(answered, "n_prompt_tokens");
    let held = json!({ "done": n_prompt + count(answered, "n_tokens") });
    assert_eq!(told[1], held);

    let saved = format!("conversation over {:?}", port());
    assert_eq!(replies(&mut guest, json!({ "save": saved }), 1).await.1, std::slice::from_ref(&held));
    let mut other = start(name, &[]).await;
    next_json(&mut other).await;
    assert_eq!(replies(&mut other, json!({ "open": saved }), 1).await.1, [held]);
    for message in [question.clone(), of("assistant", "85"), of("user", "What is 3 + 4?")] {
        replies(&mut other, message, 1).await;
    }
    let (said, told) = replies(&mut other, json!({ "answer": { "max_tokens": 1 } }), 2).await;
    let answered = &told[0]["answered"];
    assert_eq!((said.as_str(), text(answered, "ending")), ("7", "full"), "{told:?}");
    assert!(count(answered, "n_cached_tokens") >= n_prompt, "{told:?}");

    replies(&mut guest, of("user", "Tell me a short story."), 1).await;
    guest.send(json!({ "answer": { "max_tokens": 200 } }).to_string()).await.expect("it listens");
    while !matches!(guest.next().await, Some(Ok(Event::Text { .. }))) {}
    let (_, told) = replies(&mut guest, json!("stop"), 2).await;
    assert_eq!(text(&told[0]["answered"], "ending"), "stopped", "{told:?}");
    // Where there is nothing to be stopped it goes on, and what it cannot do ends nothing.
    guest.send(json!("stop").to_string()).await.expect("it listens");
    let (_, told) = replies(&mut guest, json!({ "open": "no such name" }), 1).await;
    assert!(text(&told[0], "failed").contains("nothing is saved"), "{told:?}");
    replies(&mut guest, json!("clear"), 1).await;
    replies(&mut guest, question, 1).await;
    assert_eq!(replies(&mut guest, json!({ "answer": {} }), 2).await.0, "85");
    guest.end_messages().await.expect("it listens");
    guest.wait().await.expect("it ends well");
}

/// What one conversation cannot do is told there, and the others go on.
#[test]
fn a_conversation_that_does_not_fit_leaves_the_others_alone() {
    block_on(talk_past_the_context());
}

async fn talk_past_the_context() {
    let mut guest = start("chat-server", &[]).await;
    let long = "word ".repeat(2 * model().limits().n_positions_max);
    for (id, user) in [("a", &long[..]), ("b", "What is 37 + 48?"), ("a", "What is 37 + 48?")] {
        guest.send(json!({ "id": id, "user": user }).to_string()).await.expect("it listens");
    }
    guest.end_messages().await.expect("it listens");
    let (mut said, mut errors) = ([String::new(), String::new()], Vec::new());
    while let Some(event) = next_json(&mut guest).await {
        if let Some(piece) = event["text"].as_str() {
            said[usize::from(event["id"] == "b")].push_str(piece);
        }
        if event["error"].is_string() {
            errors.push(event);
        }
    }
    assert_eq!(said, ["85", "85"]);
    assert_eq!((errors.len(), &errors[0]["id"]), (1, &"a".into()), "{errors:?}");
    assert!(text(&errors[0], "error").contains("the model's limit is"), "{errors:?}");
}

/// What the tests' guest sends of one of the SDK's helpers.
async fn helped(arguments: &[&str]) -> Ended {
    let daemon = daemons::start(&daemons::config(exe()));
    let client = daemon.connect().await.expect("connected");
    daemons::run(&client, &guests::hostile(), with(arguments)).await.well()
}

#[derive(Deserialize)]
struct Cut {
    text: String,
    more: String,
    is_whole: bool,
    with: (String, f32),
    without: (String, f32),
}

async fn cuts(temperature: &str) -> (String, Vec<Cut>) {
    let ended = helped(&["heal", temperature]).await;
    serde_json::from_value(ended.json[0].clone()).expect("a text and its cuts")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healed_prompt_goes_on_as_if_it_had_never_been_cut() {
    let (text, cuts) = cuts("0").await;
    let in_space = cuts.iter().filter(|cut| cut.text.ends_with(' ')).count();
    assert!(cuts.len() - in_space > 20 && in_space > 6, "{} cuts, {in_space} in spaces", cuts.len());
    for Cut { text: prompt, more, is_whole, with, without } in &cuts {
        assert!(is_whole, "{prompt:?} begins with other tokens");
        assert!(text[prompt.len()..].starts_with(more.as_str()) && !more.is_empty(), "{prompt:?} {more:?}");
        let n = with.0.len().min(text.len());
        assert_eq!(with.0[..n], text[..n], "what the model would write");
        assert!(with.1 > without.1, "{prompt:?}: {with:?} and {without:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healed_prompt_is_kept_at_any_temperature_and_goes_on_more_probably() {
    let (_, cuts) = cuts("0.8").await;
    for Cut { text, more, with, .. } in &cuts {
        assert!(with.0.starts_with(&format!("{text}{more}")), "{text:?} {more:?} {with:?}");
    }
    let mean = |of: fn(&Cut) -> f32| cuts.iter().map(of).sum::<f32>() / cuts.len() as f32;
    let (with, without) = (mean(|cut| cut.with.1), mean(|cut| cut.without.1));
    println!("{} cuts: {with:.1} nats healed, {without:.1} not", cuts.len());
    assert!(cuts.len() > 30 && with > without + 10.0, "{with} and {without}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bias_over_a_set_draws_what_the_list_of_its_tokens_draws() {
    let ended = helped(&["bias"]).await;
    let draws: Vec<Vec<u32>> = serde_json::from_value(ended.json[0].clone()).expect("draws");
    let [by_list, by_set, both_listed, both, without] = &draws[..] else { panic!("{draws:?}") };
    assert_eq!((by_list, both_listed), (by_set, both));
    assert!(by_list != without && by_list != both_listed, "it changes something");
    let masked: Vec<(Vec<u32>, String, Vec<u32>)> =
        serde_json::from_value(ended.json[1].clone()).expect("draws");
    for (by_mask, text, by_set) in masked {
        assert_eq!(by_mask, by_set);
        assert!(!text.contains('e') && text.len() > 20, "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_said_token_by_token_splits_no_character() {
    let text = "né 漢字 🙂 x";
    assert_eq!(helped(&["say", text]).await.text, format!("{text}\u{fffd}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_draws_by_itself_draws_as_the_model_says() {
    let ended = helped(&["draw"]).await;
    let (counts, shares): (Vec<f64>, Vec<f64>) =
        serde_json::from_value(ended.json[0].clone()).expect("shares");
    let distance = 0.5 * counts.iter().zip(&shares).map(|(a, b)| (a - b).abs()).sum::<f64>();
    assert!(shares.len() == 8 && distance < 0.02, "{distance}: {counts:?} for {shares:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thought_ends_at_a_special_token_and_leaves_the_message_where_a_budget_ends_it() {
    type Thought = (String, u32, Vec<u32>);
    let ended = helped(&["think"]).await;
    let (thoughts, answer, end): (Vec<Thought>, Vec<u32>, Vec<u32>) =
        serde_json::from_value(ended.json[0].clone()).expect("thoughts");
    let cut = [&answer[..1], &end].concat();
    let expected = [("85", 2, answer.clone()), ("8", 1, cut), ("", 0, answer)];
    assert_eq!(thoughts, expected.map(|(text, n_tokens, held)| (text.to_owned(), n_tokens, held)));
}
