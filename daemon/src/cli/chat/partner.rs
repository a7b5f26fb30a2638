//! The guest that answers, and what it is asked and replies: JSON that the `conversation` example reads and writes.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trellis_client::{Client, Error, ErrorBody, ErrorCode, Event, Guest, GuestSender, Program, StartOptions};

use super::conversation::{Conversation, Message};
use super::settings::Settings;
use crate::cli::error::CliError;
use crate::cli::interrupt::{Press, Presses};
use crate::cli::screen::Screen;

/// An answer that came in less says nothing about how fast tokens come.
const RATED_TIME: Duration = Duration::from_millis(1);

/// What a guest is asked.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request<'a> {
    /// To forget what was said.
    Clear,
    /// To add to it.
    Message(Message),
    /// To answer it.
    Answer(&'a Settings),
    /// To end the answer that is under way.
    Stop,
    /// To keep what is computed under a name.
    Save(&'a str),
    /// To take it from there.
    Open(&'a str),
}

/// What it replies.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// The name of its model.
    Ready(String),
    /// An answer has ended; that it is done comes next.
    Answered(Answered),
    /// Tokens that its context holds.
    Done(u64),
    /// Why it could not.
    Failed(String),
    /// Under which name it has kept what is computed, since the daemon is about to end. It says no more.
    Kept(String),
}

/// An answer in numbers.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Answered {
    pub(super) ending: Ending,
    n_prompt_tokens: u64,
    n_cached_tokens: u64,
    pub(super) n_tokens: u64,
    /// Messages that no longer fit in the context.
    pub(super) n_forgotten: u64,
    /// Until its first piece came.
    #[serde(skip)]
    prompt_time: Duration,
    /// From then on.
    #[serde(skip)]
    answer_time: Duration,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ending {
    #[default]
    Complete,
    /// It has as many tokens as it may have.
    Full,
    Stopped,
}

impl Answered {
    /// What it cost, in a line.
    pub(super) fn cost(&self) -> String {
        let Self { n_prompt_tokens, n_cached_tokens, n_tokens, .. } = *self;
        // The first token comes with the prompt.
        let n_after_first = n_tokens.saturating_sub(1);
        let rate = match self.answer_time.as_secs_f64() {
            seconds if self.answer_time >= RATED_TIME && n_after_first > 0 => {
                format!(", {:.1} tokens/s", n_after_first as f64 / seconds)
            }
            _ => String::new(),
        };
        let prompt_ms = self.prompt_time.as_millis();
        format!(
            "{n_tokens} tokens{rate}; prompt {n_prompt_tokens} tokens, {n_cached_tokens} cached, {prompt_ms} ms"
        )
    }
}

/// Why a guest does not reply.
#[derive(Debug)]
pub(super) enum Silence {
    /// The user wants to hear no more of it; it is not to be used any further.
    Dismissed,
    /// The conversation is to end.
    End,
    /// It does not do what it was asked to, for this reason.
    Refused(String),
    /// The guest has ended, or the output has no reader.
    Lost(CliError),
}

impl From<CliError> for Silence {
    fn from(error: CliError) -> Self {
        Self::Lost(error)
    }
}

/// A guest that takes requests.
#[derive(Debug)]
pub(super) struct Partner {
    guest: Guest,
    sender: GuestSender,
    /// The name of its model.
    pub(super) model: String,
    /// Whether the user has interrupted something that is no answer, and is short: the answer after it is not begun then.
    is_pressed: bool,
}

impl Partner {
    /// Starts a guest, and waits until it is ready.
    ///
    /// # Errors
    /// The guest does not start, or replies something else than that it is ready.
    pub(super) async fn start(
        client: &Client,
        program: Program,
        options: StartOptions,
        screen: &mut Screen,
        presses: &mut Presses,
    ) -> Result<Self, Silence> {
        let guest = client.start(program, options).await.map_err(CliError::from)?;
        let sender = guest.sender();
        let mut partner = Self { guest, sender, model: String::new(), is_pressed: false };
        match partner.reply_short(screen, presses).await? {
            Reply::Ready(model) => partner.model = model,
            other => return Err(out_of_turn(&other).into()),
        }
        Ok(partner)
    }

    /// Tells the guest the whole conversation, in the place of what it was told before.
    ///
    /// # Errors
    /// [`Silence`].
    pub(super) async fn tell(
        &mut self,
        conversation: &Conversation,
        screen: &mut Screen,
        presses: &mut Presses,
    ) -> Result<(), Silence> {
        self.done(&Request::Clear, screen, presses).await?;
        for message in conversation.told() {
            self.done(&Request::Message(message), screen, presses).await?;
        }
        Ok(())
    }

    /// What was interrupted until now was not the answer that comes.
    pub(super) fn forget_press(&mut self) {
        self.is_pressed = false;
    }

    /// Has the guest answer what it was told; the text is shown and added to `text`.
    ///
    /// # Errors
    /// [`Silence`]; then `text` has what had come.
    pub(super) async fn answer(
        &mut self,
        settings: &Settings,
        screen: &mut Screen,
        presses: &mut Presses,
        text: &mut String,
    ) -> Result<Answered, Silence> {
        if self.is_pressed {
            return Err(Silence::Dismissed);
        }
        self.send(&Request::Answer(settings), presses).await?;
        let (begun, mut heard) = (Instant::now(), Heard::default());
        let reply = self.reply(screen, presses, &mut heard).await;
        *text = heard.text;
        match reply? {
            Reply::Answered(mut answered) => {
                let first = heard.first.unwrap_or_else(Instant::now);
                (answered.prompt_time, answered.answer_time) = (first - begun, first.elapsed());
                self.reply(screen, presses, &mut Heard::default()).await?;
                Ok(answered)
            }
            Reply::Failed(why) => Err(Silence::Refused(why)),
            other => Err(out_of_turn(&other).into()),
        }
    }

    /// Has the guest do something; the tokens that its context holds then.
    ///
    /// # Errors
    /// [`Silence`].
    pub(super) async fn done(
        &mut self,
        request: &Request<'_>,
        screen: &mut Screen,
        presses: &mut Presses,
    ) -> Result<u64, Silence> {
        self.send(request, presses).await?;
        match self.reply_short(screen, presses).await? {
            Reply::Done(n_tokens) => Ok(n_tokens),
            Reply::Failed(why) => Err(Silence::Refused(why)),
            other => Err(out_of_turn(&other).into()),
        }
    }

    async fn send(&self, request: &Request<'_>, presses: &mut Presses) -> Result<(), Silence> {
        tokio::select! {
            biased;
            press = presses.next() => Err(match press {
                Press::Interrupt => Silence::Dismissed,
                Press::End => Silence::End,
            }),
            sent = self.sender.send(json(request)) => Ok(sent.map_err(CliError::from)?),
        }
    }

    /// The next reply to what is no answer. The first interrupt is kept for the answer that comes next, the second dismisses the guest.
    async fn reply_short(&mut self, screen: &mut Screen, presses: &mut Presses) -> Result<Reply, Silence> {
        let mut heard = Heard::default();
        loop {
            let press = tokio::select! {
                biased;
                press = presses.next() => press,
                reply = self.event(screen, &mut heard) => match reply? {
                    Some(reply) => return Ok(reply),
                    None => continue,
                },
            };
            match press {
                Press::Interrupt if !self.is_pressed => self.is_pressed = true,
                Press::Interrupt => return Err(Silence::Dismissed),
                Press::End => return Err(Silence::End),
            }
        }
    }

    /// The next reply; the text before it is shown. The first interrupt has the guest stop an answer, the second dismisses it.
    async fn reply(
        &mut self,
        screen: &mut Screen,
        presses: &mut Presses,
        heard: &mut Heard,
    ) -> Result<Reply, Silence> {
        let mut is_stopping = false;
        loop {
            tokio::select! {
                biased;
                press = presses.next() => match press {
                    Press::Interrupt if is_stopping => return Err(Silence::Dismissed),
                    Press::Interrupt => {
                        is_stopping = true;
                        let sender = self.sender.clone();
                        // A guest that is busy takes it later, and is heard meanwhile.
                        tokio::spawn(async move { sender.send(json(&Request::Stop)).await });
                    }
                    Press::End => return Err(Silence::End),
                },
                reply = self.event(screen, heard) => if let Some(reply) = reply? {
                    return Ok(reply);
                },
            }
        }
    }

    /// The next thing that comes of the guest, or of time, if it is a reply. Dropping the future loses nothing.
    async fn event(&mut self, screen: &mut Screen, heard: &mut Heard) -> Result<Option<Reply>, Silence> {
        let event = tokio::select! {
            biased;
            event = self.guest.next() => event,
            () = screen.progress_due() => return Ok(None),
        };
        match event {
            Some(Ok(Event::Json { json })) => {
                match serde_json::from_str(&json).map_err(|_| out_of_turn(&json))? {
                    // What it is asked for will be asked of another one.
                    Reply::Kept(_) => Ok(None),
                    reply => Ok(Some(reply)),
                }
            }
            Some(Ok(event)) => {
                screen.show(&event)?;
                if let Event::Text { text } = event {
                    heard.text.push_str(&text);
                    heard.first.get_or_insert_with(Instant::now);
                }
                Ok(None)
            }
            Some(Err(error)) => Err(ended(error).into()),
            None => Err(CliError::Client(Error::GuestEnded).into()),
        }
    }
}

/// The text of an answer.
#[derive(Default)]
struct Heard {
    text: String,
    /// When its first piece came.
    first: Option<Instant>,
}

/// What ended a guest is an error of the guest.
fn ended(error: Error) -> CliError {
    match error {
        Error::Daemon(body) => CliError::Guest(body),
        error => error.into(),
    }
}

fn out_of_turn(reply: &impl std::fmt::Debug) -> CliError {
    let message = format!("the guest is no chat of this version: it replied {reply:?}");
    CliError::Guest(Box::new(ErrorBody::new(ErrorCode::GuestFailed, message)))
}

fn json(request: &Request<'_>) -> String {
    serde_json::to_string(request).expect("it has string keys")
}

#[cfg(test)]
mod tests {
    use super::super::conversation::Role;
    use super::*;

    #[test]
    fn requests_are_as_the_guest_reads_them() {
        let mut settings = Settings::default();
        settings.set("seed", "7").expect("a seed");
        let message = Message { role: Role::User, content: "Hello".to_owned() };
        for (request, expected) in [
            (Request::Clear, r#""clear""#),
            (Request::Stop, r#""stop""#),
            (Request::Message(message), r#"{"message":{"role":"user","content":"Hello"}}"#),
            (Request::Answer(&settings), r#"{"answer":{"seed":7}}"#),
            (Request::Save("x"), r#"{"save":"x"}"#),
            (Request::Open("x"), r#"{"open":"x"}"#),
        ] {
            assert_eq!(json(&request), expected);
        }
    }

    #[test]
    fn an_answer_says_what_it_cost() {
        let reply = r#"{"answered": {"ending": "stopped", "n_tokens": 5, "n_prompt_tokens": 30, "n_cached_tokens": 12,
                        "later": 1}}"#;
        let Ok(Reply::Answered(mut answered)) = serde_json::from_str(reply) else { panic!("{reply}") };
        assert_eq!(answered.ending, Ending::Stopped);
        assert_eq!(answered.cost(), "5 tokens; prompt 30 tokens, 12 cached, 0 ms");
        answered.prompt_time = Duration::from_millis(40);
        answered.answer_time = Duration::from_millis(100);
        assert_eq!(answered.cost(), "5 tokens, 40.0 tokens/s; prompt 30 tokens, 12 cached, 40 ms");
    }

    #[test]
    fn replies_are_as_the_guest_writes_them() {
        for (json, reply) in [
            (r#"{"ready":"tiny"}"#, Reply::Ready("tiny".to_owned())),
            (r#"{"done":57}"#, Reply::Done(57)),
            (r#"{"failed":"no"}"#, Reply::Failed("no".to_owned())),
            (r#"{"kept":"chat/sums"}"#, Reply::Kept("chat/sums".to_owned())),
        ] {
            assert_eq!(serde_json::from_str::<Reply>(json).expect("it is one"), reply);
        }
    }
}
