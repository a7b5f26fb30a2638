//! Answers one question, or holds a conversation. Shows the scripted speed: a stream, piece by piece.
//!
//! ```text
//! trellis run chat "What is 37 + 48?"
//! trellis run chat --system "Answer briefly."       then type, one message a line
//! trellis run chat --verbose "What is 37 + 48?"     says as well what it took
//! ```
//!
//! The engine decodes a few tokens ahead while the guest sends the last one out, so the loop below costs
//! nothing. Between two answers the context keeps its tokens: only what is new gets computed.

use std::{iter, time::Instant};

use trellis_guest::{
    Args, Chat, ChatEnd, LogLevel, Model, Result, Sampler, emit, log, messages, seed, usage,
};

trellis_guest::main!(run);

const USAGE: &str = "chat [--system TEXT] [--temperature T] [--max-tokens N] [--verbose] [PROMPT]";

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    let mut chat = Chat::new();
    if let Some(system) = args.option::<String>("--system")? {
        chat.push("system", &system);
    }
    let sampler =
        Sampler::seeded(seed()).temperature(args.option("--temperature")?.unwrap_or(0.0)).build()?;
    let max_tokens: u32 = args.option("--max-tokens")?.unwrap_or(256);
    let is_verbose = args.flag("--verbose");
    let questions: Box<dyn Iterator<Item = Result<String>>> = match args.optional_text()? {
        Some(prompt) => Box::new(iter::once(Ok(prompt))),
        None => Box::new(messages()),
    };

    let model = Model::open_default()?;
    let context = model.context()?;
    for question in questions {
        let question = question?;
        if question.trim().is_empty() {
            continue;
        }
        chat.push("user", &question);
        // A conversation that outgrows the context loses its oldest turns.
        let n_prompt_max = context.capacity().saturating_sub(max_tokens) as usize;
        while model.encode_chat(&chat, ChatEnd::Assistant)?.len() > n_prompt_max && chat.forget_oldest_turn()
        {
        }
        context.set_chat(&chat)?;
        let (begun, n_before, n_prompt) = (Instant::now(), usage().tokens_cached, context.length());

        let mut answer = String::new();
        for piece in context.stream(&sampler).max_tokens(max_tokens).text()? {
            let piece = piece?;
            emit(&piece)?;
            answer.push_str(&piece);
        }
        emit("\n")?;
        chat.push("assistant", &answer);
        if is_verbose {
            let (n, seconds) = (context.length() - n_prompt, begun.elapsed().as_secs_f64());
            let (rate, n_cached) = (f64::from(n) / seconds, usage().tokens_cached - n_before);
            let cost = format!("{n} tokens, {rate:.1} tokens/s; prompt {n_prompt} tokens, {n_cached} cached");
            log(LogLevel::Info, &cost);
        }
    }
    Ok(())
}
