//! What was said, as it is kept.

use serde::{Deserialize, Serialize};

/// Who said something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    System,
    User,
    Assistant,
}

/// Something that was said; as the guest reads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) role: Role,
    pub(super) content: String,
}

/// A conversation. The guest has it too; this is what is shown, kept in a file, and told to the next guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Conversation {
    /// The model that it was held with.
    pub(super) model: String,
    /// What the model is told before all that is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) system: Option<String>,
    /// Of the user and the model in turns.
    pub(super) messages: Vec<Message>,
}

impl Conversation {
    /// Adds to it.
    pub(super) fn push(&mut self, role: Role, content: &str) {
        self.messages.push(Message { role, content: content.to_owned() });
    }

    /// All that the model is told.
    pub(super) fn told(&self) -> impl Iterator<Item = Message> {
        let system = self.system.iter().map(|text| Message { role: Role::System, content: text.clone() });
        system.chain(self.messages.iter().cloned())
    }

    /// As it stood on the screen, with this sign before what the user said.
    pub(super) fn shown(&self, sign: &str) -> String {
        let lines = self.messages.iter().map(|message| match message.role {
            Role::User => format!("{sign}{}\n", message.content.replace('\n', "\n    ")),
            Role::Assistant | Role::System => format!("{}\n", message.content.trim_end()),
        });
        lines.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_and_shown_in_order() {
        let mut conversation =
            Conversation { system: Some("Be brief.".to_owned()), ..Conversation::default() };
        conversation.push(Role::User, "a\nb");
        conversation.push(Role::Assistant, "c\n");
        let told: Vec<Role> = conversation.told().map(|message| message.role).collect();
        assert_eq!(told, [Role::System, Role::User, Role::Assistant]);
        assert_eq!(conversation.shown(">>> "), ">>> a\n    b\nc\n");
        let json = serde_json::to_string(&conversation).expect("JSON");
        assert_eq!(serde_json::from_str::<Conversation>(&json).expect("it is one"), conversation);
    }
}
