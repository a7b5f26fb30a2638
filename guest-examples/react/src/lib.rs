//! Thinks, acts and observes in turns until a question is answered: S. Yao and others, "ReAct: Synergizing Reasoning and Acting in
//! Language Models", 2023. Each action is a call of a tool, and what the tool says is in the context of the next thought.
//!
//! Of the paper, this is the loop, and that thoughts come where the model likes: a grammar has it say a line or none, and then one of
//! the actions that are open. Which those are, and what is left of the question after each, is worked out here, as the bundled
//! model has not learnt to plan; the prompts and tasks of the paper are not here.
//!
//! ```text
//! trellis run react "Use the calculator tool to work out 12 * 7 + 5."
//! trellis run react --wait-ms 60000 --json "Use the calculator tool to work out 12 * 7 + 5."     then answer the calls: 84, 89
//! ```
//!
//! With `--wait-ms` the client is the tool: it is sent `{"tool": "calculator", "expression": "12 * 7"}`, and its next message is
//! what is observed. Where none comes in time a calculator that is built in answers.

mod calculator;

use std::time::Duration;

use serde_json::{Value, json};
use trellis_guest::{
    Args, Chat, Constraint, Context, Error, Inbox, Model, Result, Sampler, emit, emit_json, receive_within,
};

trellis_guest::main!(run);

const USAGE: &str = "react [--wait-ms N] [--json] QUESTION";

/// So that a question which never comes to its end does.
const N_STEPS_MAX: usize = 8;

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let wait = Duration::from_millis(args.option("--wait-ms")?.unwrap_or(0));
    let mut left = format!(" {}", args.text()?);

    let context = Model::open_default()?.context()?;
    let (mut chat, mut steps) = (Chat::new().user(left.trim()), Vec::new());
    let mut actions = calculator::open_actions(&left);
    while !actions.is_empty() && steps.len() < N_STEPS_MAX {
        context.set_chat(&chat)?;
        let said = act(&context, &actions)?;
        let (thought, call) = said.rsplit_once('\n').unwrap_or(("", &said));
        let call: Value = serde_json::from_str(call).expect("the grammar ends with one");
        let action = call["expression"].as_str().expect("a call has one");
        let observation = observe(&call, action, wait)?;

        chat = chat.assistant(&said).with("tool", &observation);
        left = left.replacen(&format!(" {action}"), &format!(" {observation}"), 1);
        actions = calculator::open_actions(&left);
        if !actions.is_empty() {
            chat.push("user", left.trim());
        }
        steps.push(json!({ "thought": thought, "action": action, "observation": observation }));
    }
    context.set_chat(&chat)?;
    let answer = context.generate(&Sampler::greedy()).max_tokens(64).run()?.text;
    if json { emit_json(&json!({ "steps": steps, "answer": answer })) } else { emit!("{answer}\n") }
}

/// What the model says in its turn: a line of thought, if it likes, and the call of an open action.
fn act(context: &Context, actions: &[String]) -> Result<String> {
    let call_of = |action| format!(r#"{{"tool": "calculator", "expression": "{action}"}}"#);
    let calls: Vec<String> = actions.iter().map(|action| json!(call_of(action)).to_string()).collect();
    let grammar = format!("start: THOUGHT? ({})\nTHOUGHT: /[^\\n{{]{{1,200}}\\n/", calls.join(" | "));
    let turn = Constraint::lark(context.model(), &grammar)?;
    let sampler = Sampler::seeded(0).temperature(0.0).constraint(&turn).build()?;
    let said = context.generate(&sampler).run()?;
    // The grammar comes to its end, and what is cut off before it has met that of the context.
    if !said.is_finished() {
        return Err(Error::ContextFull { n_tokens: context.length() + 1, n_positions: context.capacity() });
    }
    Ok(said.text)
}

/// What the tool says: the client, if it answers in time.
fn observe(call: &Value, action: &str, wait: Duration) -> Result<String> {
    if !wait.is_zero() {
        emit_json(call)?;
        if let Inbox::Message(message) = receive_within(wait)? {
            return Ok(message.trim().to_owned());
        }
    }
    Ok(calculator::evaluate(action))
}
