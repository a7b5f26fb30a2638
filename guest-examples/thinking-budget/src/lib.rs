//! Thinks within a budget: past the soft one the thought ends with its sentence, at the hard one it is cut off, a message is put
//! in, and the answer follows (N. Muennighoff and others, "s1: Simple test-time scaling", 2025).
//!
//! Of the paper's budget forcing, this is the end of a thought; to have the model think on where it would end is not here. The
//! message is as in A. Yang and others, "Qwen3 Technical Report", 2025; the soft budget is this library's own. The marks are arguments, as models differ:
//! the bundled one thinks in lines and closes its thought with "Answer:".
//!
//! ```text
//! trellis run thinking-budget --soft 30 --hard 60 "Think step by step: what is 468 + 275?"
//! trellis run thinking-budget --open "<think>\n" --close "</think>" --message "Time is up." --json "How many primes are below 50?"
//! ```

use serde::Serialize;
use trellis_guest::{Args, Chat, Model, Result, Sampler, Thinking, ThoughtEnd, emit, emit_json, seed};

trellis_guest::main!(run);

const USAGE: &str = "thinking-budget [--open TEXT] [--close TEXT] [--soft N] [--hard N] [--message TEXT] \
                     [--temperature T] [--max-tokens N] [--json] QUESTION";

#[derive(Serialize)]
struct Report<'a> {
    thought: &'a str,
    n_thought_tokens: u32,
    /// "closed" by the model, at the end of a "sentence", or "cut".
    end: &'static str,
    answer: &'a str,
}

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let json = args.flag("--json");
    let open: String = args.option("--open")?.unwrap_or_default();
    let close = args.option("--close")?.unwrap_or_else(|| "Answer:".to_owned());
    let soft = args.option("--soft")?.unwrap_or(200);
    let hard = args.option("--hard")?.unwrap_or(256);
    let message: String = args.option("--message")?.unwrap_or_default();
    let temperature = args.option("--temperature")?.unwrap_or(0.0);
    let max_tokens = args.option("--max-tokens")?.unwrap_or(64);
    let question = args.text()?;

    let context = Model::open_default()?.context()?;
    context.set_chat(&Chat::new().user(&question))?;
    let sampler = Sampler::seeded(seed()).temperature(temperature).build()?;

    let thinking = Thinking::between(&open, &close).soft_budget(soft).hard_budget(hard).message(&message);
    let thought = thinking.run(&context, &sampler)?;
    let answer = context.generate(&sampler).max_tokens(max_tokens).run()?.text;

    let (text, answer) = (thought.text.trim(), answer.trim());
    let end = match thought.end {
        ThoughtEnd::Closed => "closed",
        ThoughtEnd::Sentence => "sentence",
        ThoughtEnd::Cut => "cut",
    };
    if json {
        return emit_json(&Report { thought: text, n_thought_tokens: thought.n_tokens, end, answer });
    }
    emit!("{text}\n[{end} after {} tokens]\n{answer}\n", thought.n_tokens)
}
