//! One conversation: what was said, its context, and the answer that is under way.

use std::collections::BTreeMap;

use serde::Deserialize;
use trellis_guest::{Chat, ChatEnd, Context, Result, Sampler, TextStream, emit_json};

/// What the client says.
#[derive(Deserialize)]
pub(crate) struct Message {
    pub(crate) id: String,
    user: Option<String>,
    stop: Option<bool>,
}

/// Tells the client of a conversation.
pub(crate) fn tell(id: &str, what: &str, text: &str) -> Result {
    emit_json(&BTreeMap::from([("id", id), (what, text)]))
}

pub(crate) struct Conversation {
    pub(crate) chat: Chat,
    pub(crate) context: Context,
    /// The rest of an answer, and its text so far.
    pub(crate) answer: Option<(TextStream, String)>,
}

impl Conversation {
    /// Begins an answer, or stops it.
    pub(crate) fn take(&mut self, message: &Message, sampler: &Sampler, max_tokens: u32) -> Result {
        if message.stop == Some(true) {
            return self.end(&message.id, "stopped");
        }
        if self.answer.is_some() {
            return tell(&message.id, "error", "an answer is under way");
        }
        let mut chat = self.chat.clone().user(message.user.as_deref().unwrap_or_default());
        // What outgrows the context loses its oldest turns.
        let room = self.context.capacity().saturating_sub(max_tokens) as usize;
        let model = self.context.model();
        while model.encode_chat(&chat, ChatEnd::Assistant)?.len() > room && chat.forget_oldest_turn() {}
        self.context.set_chat(&chat)?;
        let stream = self.context.stream(sampler).max_tokens(max_tokens).text()?;
        (self.chat, self.answer) = (chat, Some((stream, String::new())));
        Ok(())
    }

    /// Sends the next piece of the answer that is under way.
    pub(crate) fn advance(&mut self, id: &str) -> Result {
        let Some((stream, text)) = &mut self.answer else { return Ok(()) };
        let Some(piece) = stream.next().transpose()? else { return self.end(id, "done") };
        text.push_str(&piece);
        tell(id, "text", &piece)
    }

    /// Ends the answer that is under way; what the engine has decoded ahead of it is forgotten.
    fn end(&mut self, id: &str, how: &str) -> Result {
        let Some((_, text)) = self.answer.take() else { return Ok(()) };
        self.chat.push("assistant", &text);
        tell(id, "end", how)
    }
}
