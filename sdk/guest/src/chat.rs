//! Conversations.

pub use crate::bindings::trellis::host::models::ChatMessage;

/// The messages of a conversation, oldest first.
///
/// ```
/// let chat = trellis_guest::Chat::new().system("Answer briefly.").user("What is 37 + 48?");
/// assert_eq!(chat.messages().len(), 2);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Chat {
    messages: Vec<ChatMessage>,
}

impl Chat {
    /// No messages yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// With the operator's instructions added.
    pub fn system(self, text: &str) -> Self {
        self.with("system", text)
    }

    /// With a question added.
    pub fn user(self, text: &str) -> Self {
        self.with("user", text)
    }

    /// With an answer added.
    pub fn assistant(self, text: &str) -> Self {
        self.with("assistant", text)
    }

    /// With a message of any role added that the template knows.
    pub fn with(mut self, role: &str, text: &str) -> Self {
        self.push(role, text);
        self
    }

    /// Adds a message.
    pub fn push(&mut self, role: &str, text: &str) {
        self.messages.push(ChatMessage { role: role.to_owned(), content: text.to_owned() });
    }

    /// Removes the oldest question and what was said up to the next one. The system message stays. False, and
    /// nothing removed, when the last question is all that is left.
    pub fn forget_oldest_turn(&mut self) -> bool {
        let mut questions = self
            .messages
            .iter()
            .enumerate()
            .filter(|(_, message)| message.role == "user")
            .map(|(idx, _)| idx);
        let (Some(oldest), Some(next)) = (questions.next(), questions.next()) else { return false };
        self.messages.drain(oldest..next);
        true
    }

    /// The messages, oldest first.
    pub fn messages(&self) -> &[ChatMessage] {
        &self.messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_turn_goes_first_and_the_last_question_stays() {
        let mut chat = Chat::new().system("s").user("1").assistant("one").with("tool", "t").user("2");
        assert!(chat.forget_oldest_turn());
        let left: Vec<_> = chat.messages().iter().map(|message| message.content.as_str()).collect();
        assert_eq!(left, ["s", "2"]);
        assert!(!chat.forget_oldest_turn());
        assert_eq!(chat.messages().len(), 2);
    }
}
