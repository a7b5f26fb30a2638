//! One guest that serves many conversations. `{"id": "a", "user": "Hello"}` asks in the conversation "a", `{"id": "a", "stop": true}`
//! stops its answer. Answers of several conversations come side by side, piece by piece: `{"id": "a", "text": "Hel"}`, and then how
//! each ended: `{"id": "a", "end": "done"}` or "stopped". What cannot be done comes back as `{"id": "a", "error": "..."}`.
//!
//! It follows no paper: that streams of one guest are decoded in one batch is what it shows. Each conversation keeps its context,
//! so that only what is new gets computed. While no answer is under way the guest waits for the next message. All that it sends is
//! JSON, with `--json` or without.
//!
//! ```text
//! trellis run chat-server      then type {"id": "a", "user": "What is 37 + 48?"}
//! trellis run chat-server --temperature 0.8 --max-tokens 200 "Answer briefly."
//! ```

mod conversation;

use std::collections::BTreeMap;
use std::time::Duration;

use conversation::{Conversation, Message, tell};
use trellis_guest::{Args, Chat, Inbox, Model, Result, Sampler, receive_within, seed};

trellis_guest::main!(run);

const USAGE: &str = "chat-server [--temperature T] [--max-tokens N] [--json] [SYSTEM]";

fn run() -> Result {
    let mut args = Args::of_session(USAGE);
    args.flag("--json");
    let sampler = Sampler::seeded(seed()).temperature(args.option("--temperature")?.unwrap_or(0.0));
    let max_tokens = args.option("--max-tokens")?.unwrap_or(256);
    let chat = args.optional_text()?.map_or(Chat::new(), |text| Chat::new().system(&text));
    let (model, sampler) = (Model::open_default()?, sampler.build()?);

    let mut conversations: BTreeMap<String, Conversation> = BTreeMap::new();
    loop {
        // While answers are under way messages are taken as they come; otherwise the next one is waited for.
        let is_idle = conversations.values().all(|conversation| conversation.answer.is_none());
        match receive_within(Duration::from_secs(if is_idle { 60 } else { 0 }))? {
            Inbox::Closed if is_idle => return Ok(()),
            Inbox::Message(text) => match serde_json::from_str::<Message>(&text) {
                Ok(message) => {
                    let new = || Conversation { chat: chat.clone(), context: None, answer: None };
                    let conversation = conversations.entry(message.id.clone()).or_insert_with(new);
                    let taken = conversation.take(&message, &model, &sampler, max_tokens);
                    taken.or_else(|error| tell(&message.id, "error", &error.to_string()))?;
                }
                Err(error) => tell("", "error", &error.to_string())?,
            },
            _ => conversations.iter_mut().try_for_each(|(id, conversation)| conversation.advance(id))?,
        }
    }
}
