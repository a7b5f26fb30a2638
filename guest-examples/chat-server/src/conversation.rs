//! One conversation: what was said, its context, and the answer that is under way.

use serde::Deserialize;
use trellis_guest::{Chat, ChatEnd, Context, Model, Result, Sampler, TextStream, emit_json};

/// What the client says.
#[derive(Deserialize)]
pub(crate) struct Message {
    pub(crate) id: String,
    user: Option<String>,
    stop: Option<bool>,
}

/// Tells the client of a conversation.
pub(crate) fn tell(id: &str, what: &str, text: &str) -> Result {
    emit_json(&serde_json::json!({ "id": id, what: text }))
}

pub(crate) struct Conversation {
    pub(crate) chat: Chat,
    /// None until the first message is answered.
    pub(crate) context: Option<Context>,
    /// The rest of an answer, and its text so far.
    pub(crate) answer: Option<(TextStream, String)>,
}

impl Conversation {
    /// Begins an answer of at most `n` tokens, or stops it.
    pub(crate) fn take(&mut self, message: &Message, model: &Model, sampler: &Sampler, n: u32) -> Result {
        if message.stop == Some(true) {
            return self.end(&message.id, "end", "stopped");
        }
        if self.answer.is_some() {
            return tell(&message.id, "error", "an answer is under way");
        }
        let mut chat = self.chat.clone().user(message.user.as_deref().unwrap_or_default());
        // What outgrows the context loses its oldest turns.
        let context = self.context.take().map_or_else(|| model.context(), Ok)?;
        let context = self.context.insert(context);
        let room = context.capacity().saturating_sub(n) as usize;
        while model.encode_chat(&chat, ChatEnd::Assistant)?.len() > room && chat.forget_oldest_turn() {}
        context.set_chat(&chat)?;
        let stream = context.stream(sampler).max_tokens(n).text()?;
        (self.chat, self.answer) = (chat, Some((stream, String::new())));
        Ok(())
    }

    /// Sends the next piece of the answer that is under way.
    pub(crate) fn advance(&mut self, id: &str) -> Result {
        let Some((stream, text)) = &mut self.answer else { return Ok(()) };
        match stream.next() {
            Some(Ok(piece)) => tell(id, "text", &piece).inspect(|()| text.push_str(&piece)),
            Some(Err(error)) => self.end(id, "error", &error.to_string()),
            None => self.end(id, "end", "done"),
        }
    }

    /// Ends the answer that is under way; what the engine has decoded ahead of it is forgotten.
    fn end(&mut self, id: &str, what: &str, how: &str) -> Result {
        let Some((_, text)) = self.answer.take() else { return Ok(()) };
        self.chat.push("assistant", &text);
        tell(id, what, how)
    }
}
