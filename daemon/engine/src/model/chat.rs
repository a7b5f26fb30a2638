//! Chat templates: messages to the tokens that a model was trained to continue.

use std::str::FromStr;

use minijinja::{Environment, ErrorKind, Value};

use super::chat_engine::{Messages, compile, render};
use super::date::Date;
use super::error::ModelError;
use super::shield::{Shield, special_tokens_of};
use super::tokenizer::{EncodeError, SpecialTokens, Tokenizer};
use super::yield_point::{GivenUp, YieldPoint};
use crate::batch::Token;

/// What a template may add to the messages, in bytes for each message and once.
const MESSAGE_OVERHEAD_BYTES: usize = 4 << 10;
const OVERHEAD_BYTES: usize = 64 << 10;

/// The speaker of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions to the model.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// One turn of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its speaker.
    pub role: Role,
    /// What is said; never read as special tokens.
    pub content: String,
}

/// Whether the prompt ends with the opening of the assistant's next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// The model answers next.
    Add,
    /// The prompt ends after the last message.
    Omit,
}

/// Why a chat cannot become tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The role is none of those known.
    #[error("unknown role {found:?}; expected system, user, assistant or tool")]
    UnknownRole {
        /// The role.
        found: String,
    },
    /// The template refused the messages, or failed.
    #[error("the model's chat template: {reason}")]
    Template {
        /// What the template said.
        reason: String,
    },
    /// The template ran for too long.
    #[error("the model's chat template did not end within its instruction limit")]
    OutOfFuel,
    /// What the template does with a message would make a special token out of its text.
    #[error("the model's chat template turns message text into special tokens; expected it to stay text")]
    Injection,
    /// The messages use up the characters that keep them apart from the template.
    #[error("the messages use every private-use character of Unicode; expected at least one unused")]
    NoPrivateCharacter,
    /// The tokenizer failed.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// Nobody wants its tokens any more.
    #[error(transparent)]
    GivenUp(#[from] GivenUp),
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl FromStr for Role {
    type Err = ChatError;

    fn from_str(name: &str) -> Result<Self, ChatError> {
        [Self::System, Self::User, Self::Assistant, Self::Tool]
            .into_iter()
            .find(|role| role.name() == name)
            .ok_or_else(|| ChatError::UnknownRole { found: name.to_owned() })
    }
}

/// The function of this name for templates. A template may write the function itself, for which minijinja puts the name of its
/// type. Made outside of what is generic, it has the same one for each way to render the chat.
fn strftime_now(date: Date) -> Value {
    Value::from_function(move |format: &str| {
        date.format(format).map_err(|part| {
            let reason = format!("strftime_now: {part} is not supported; only the date is known");
            minijinja::Error::new(ErrorKind::InvalidOperation, reason)
        })
    })
}

impl ChatTemplate {
    /// Compiles a Jinja template; `file` is where it stands, for errors. The tokens are the texts that the
    /// template sees as `bos_token` and `eos_token`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Template`] when it does not compile.
    pub fn new(
        file: &str,
        source: &str,
        bos_token: Option<String>,
        eos_token: Option<String>,
    ) -> Result<Self, ModelError> {
        let env = compile(source.to_owned())
            .map_err(|error| ModelError::Template { file: file.to_owned(), reason: error.to_string() })?;
        Ok(Self { env, source: source.to_owned(), bos_token, eos_token })
    }

    /// The tokens of a chat.
    ///
    /// Special tokens come from the template alone: their text inside a message is encoded as text, whatever
    /// the template does with the message. `date` is what the template sees as today; without it a template
    /// that needs the date fails.
    ///
    /// # Errors
    ///
    /// [`ChatError`] when the template refuses the messages or runs away, or when it would build a special
    /// token from the text of messages.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        generation_prompt: GenerationPrompt,
        date: Option<Date>,
    ) -> Result<Vec<Token>, ChatError> {
        self.encode_in_parts(tokenizer, messages, generation_prompt, date, &YieldPoint::NONE)
    }

    /// As [`Self::encode`], in parts: of a template the work with one message, and of texts as
    /// [`Tokenizer::encode_in_parts`].
    ///
    /// # Errors
    ///
    /// As there, and when the work was given up.
    pub fn encode_in_parts(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        generation_prompt: GenerationPrompt,
        date: Option<Date>,
        yields: &YieldPoint,
    ) -> Result<Vec<Token>, ChatError> {
        let inputs = messages.iter().map(|message| message.content.as_str());
        let shield = Shield::new(tokenizer, inputs.chain([self.source.as_str()]), yields)?;

        let shielded = messages.iter().map(|message| shield.cover(tokenizer, &message.content, yields));
        let rendered = self.render_contents(messages, shielded, generation_prompt, date, yields)?;
        let found = tokenizer.added_tokens().find(&rendered, SpecialTokens::Parse, yields)?;

        // The same chat with messages that cannot be part of a special token must have the same ones.
        let blank = messages.iter().map(|message| shield.blank(&message.content, yields));
        let reference = self.render_contents(messages, blank, generation_prompt, date, yields)?;
        let expected = tokenizer.added_tokens().find(&reference, SpecialTokens::Parse, yields)?;
        if !special_tokens_of(&found).eq(special_tokens_of(&expected)) {
            return Err(ChatError::Injection);
        }

        let (text, found) = shield.uncover(&rendered, found, yields)?;
        Ok(tokenizer.encode_around(&text, &found, yields)?)
    }

    /// The text of a chat, for people to read. Special tokens and messages cannot be told apart in it.
    ///
    /// # Errors
    ///
    /// [`ChatError`] when the template refuses the messages or runs away.
    pub fn render(
        &self,
        messages: &[Message],
        generation_prompt: GenerationPrompt,
        date: Option<Date>,
    ) -> Result<String, ChatError> {
        let contents = messages.iter().map(|message| Ok(message.content.clone()));
        self.render_contents(messages, contents, generation_prompt, date, &YieldPoint::NONE)
    }

    fn render_contents(
        &self,
        messages: &[Message],
        contents: impl Iterator<Item = Result<String, GivenUp>>,
        generation_prompt: GenerationPrompt,
        date: Option<Date>,
        yields: &YieldPoint,
    ) -> Result<String, ChatError> {
        let mut n_bytes_max = OVERHEAD_BYTES;
        let messages = messages.iter().zip(contents).map(|(message, content)| {
            let content = content?;
            // A template may write a message twice, in JSON, with six bytes for one.
            n_bytes_max += MESSAGE_OVERHEAD_BYTES + 12 * content.len();
            Ok(Value::from_pairs([
                ("role", Value::from(message.role.name())),
                ("content", Value::from(content)),
            ]))
        });
        let messages = messages.collect::<Result<Vec<_>, GivenUp>>()?;
        let messages = Messages { messages, yields: yields.clone() };
        let mut context = vec![
            ("messages", Value::from_object(messages)),
            ("add_generation_prompt", Value::from(generation_prompt == GenerationPrompt::Add)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ];
        for (name, token) in [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)] {
            if let Some(token) = token {
                context.push((name, Value::from(token.as_str())));
            }
        }
        if let Some(date) = date {
            context.push(("strftime_now", strftime_now(date)));
        }
        render(&self.env, Value::from_pairs(context), n_bytes_max, yields).map_err(|error| {
            match (yields.reach(), error.kind()) {
                (Err(given_up), _) => given_up.into(),
                (Ok(()), ErrorKind::OutOfFuel) => ChatError::OutOfFuel,
                (Ok(()), _) => ChatError::Template { reason: error.to_string() },
            }
        })
    }
}
