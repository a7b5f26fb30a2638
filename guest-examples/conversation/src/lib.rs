//! A conversation led by a program that shows it, keeps it, and may tell it to another guest: `trellis chat` on a terminal. Each
//! message is a request in JSON:
//!
//! - `{"message": {"role": "user", "content": "Hello"}}` adds to the conversation, `"clear"` forgets it.
//! - `{"answer": {"temperature": 0.8, "max_tokens": 100}}` has the model answer, under settings for this answer alone. Its text comes
//!   piece by piece before the reply; it has half of the context at most.
//! - `"stop"` ends the answer that is under way, as any message does then; what was said so far stays said. It has no reply, and
//!   does nothing where the answer has just ended.
//! - `{"save": "NAME"}` keeps what is computed under a name, `{"open": "NAME"}` takes it from there: what that has in common with the
//!   conversation is not computed again.
//!
//! Where the daemon is about to end, a conversation that was saved or opened under a name is saved under it once more, with the answer
//! that was under way: `{"kept": "NAME"}` is the last word. A guest of the next daemon opens it.
//!
//! The first reply is `{"ready": "tiny"}` with the model, then there is one for each request: `{"done": 57}`, with the tokens that the
//! context holds, or `{"failed": "why"}`. Before that of an answer comes the answer in numbers, `{"answered": {"ending": "complete", …}}`.
//! It follows no paper: that a client may change its mind is what it shows.
//!
//! ```text
//! trellis run conversation      then type {"message": {"role": "user", "content": "What is 37 + 48?"}} and {"answer": {}}
//! ```

use std::iter::zip;

use serde::Deserialize;
use serde_json::json;
use trellis_guest::{
    Args, Chat, ChatEnd, Context, Error, FinishReason, Inbox, Model, Result, Sampler, emit, emit_json,
    leaving, receive_json_until_leaving, seed, try_receive, usage,
};

trellis_guest::main!(run);

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Clear,
    Message { role: String, content: String },
    Answer(Settings),
    Stop,
    Save(String),
    Open(String),
}

#[derive(Deserialize)]
struct Settings {
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    seed: Option<u64>,
    max_tokens: Option<u32>,
}

fn run() -> Result {
    Args::of_session("conversation").optional_text()?;
    let model = Model::open_default()?;
    let (mut chat, mut context, mut kept) = (Chat::new(), model.context()?, None);
    emit_json(&json!({ "ready": model.info().name }))?;
    let failed = |why: Error| json!({ "failed": why.to_string() });
    while let Some(request) = receive_json_until_leaving()? {
        let mut done = Ok(());
        match request {
            Request::Clear => (chat, kept) = (Chat::new(), None),
            Request::Message { role, content } => chat.push(&role, &content),
            Request::Answer(settings) => done = answer(&settings, &mut chat, &context),
            Request::Stop => continue,
            Request::Save(name) => done = context.save(&name).map(|()| kept = Some(name)),
            Request::Open(name) => {
                done = model.saved_context(&name).map(|saved| (context, kept) = (saved, Some(name)));
            }
        }
        emit_json(&done.map_or_else(failed, |()| json!({ "done": context.length() })))?;
    }
    let Some(name) = kept.filter(|_| leaving().is_some()) else { return Ok(()) };
    context.save(&name)?;
    emit_json(&json!({ "kept": name }))
}

fn answer(settings: &Settings, chat: &mut Chat, context: &Context) -> Result {
    let sampler = Sampler::seeded(settings.seed.unwrap_or_else(seed));
    let sampler = sampler.temperature(settings.temperature.unwrap_or(0.0)).build()?;
    sampler.set_top_k(settings.top_k)?;
    sampler.set_top_p(settings.top_p)?;
    // An answer has half of the context at most, so that there is always room for what it answers.
    let max_tokens = settings.max_tokens.unwrap_or(256).min(context.capacity() / 2);
    let (held, n_found, n_said) = (context.tokens(), usage().tokens_cached, chat.messages().len());
    // A conversation that outgrows the context loses its oldest turns.
    let room = context.capacity().saturating_sub(max_tokens) as usize;
    while context.model().encode_chat(chat, ChatEnd::Assistant)?.len() > room && chat.forget_oldest_turn() {}
    context.set_chat(chat)?;
    let prompt = context.tokens();
    let n_kept = zip(held, &prompt).take_while(|(held, wanted)| held == *wanted).count() as u64;

    let mut stream = context.stream(&sampler).max_tokens(max_tokens).text()?;
    let (mut said, mut is_stopped) = (String::new(), false);
    while !is_stopped && let Some(piece) = stream.next().transpose()? {
        emit(&piece)?;
        said.push_str(&piece);
        // The rest of the daemon's time is for saving it.
        let is_late = leaving().is_some_and(|left| left.as_secs() < 2);
        is_stopped = is_late || matches!(try_receive()?, Inbox::Message(_));
    }
    let is_full = stream.tokens().finish() == Some(FinishReason::MaxTokens);
    chat.push("assistant", &said);
    emit_json(&json!({ "answered": {
        "ending": if is_stopped { "stopped" } else if is_full { "full" } else { "complete" },
        "n_tokens": context.length() as usize - prompt.len(),
        "n_prompt_tokens": prompt.len(),
        "n_cached_tokens": n_kept + usage().tokens_cached - n_found,
        "n_forgotten": n_said + 1 - chat.messages().len(),
    } }))
}
