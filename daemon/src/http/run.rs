//! One request as the run of a guest, in a session of whoever asks.

use std::sync::Arc;
use std::time::Duration;

use trellis_client::{Client, Event, Guest, Program, StartOptions};

use super::GUEST;
use super::exchange::{Reason, Refusal, RefusalKind, Reply, Request, Usage};
use super::failure::Failure;
use super::front::Front;
use super::share::Share;
use crate::session::Actor;

/// How long a guest may take to end that has said all.
const END_TIME: Duration = Duration::from_secs(1);

/// What a request runs.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) model: Option<String>,
    pub(super) seed: Option<u64>,
    pub(super) policy: Policy,
    pub(super) request: Request,
    /// The field of the API that stands for a part of the guest's request.
    pub(super) name_of: fn(&str) -> String,
}

/// Which guest decodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Policy {
    /// The example that comes with the daemon.
    #[default]
    Own,
    /// Another that is asked in the same way.
    Named(String),
    /// One that is started as by `trellis run`, with these arguments, and sends text.
    Text(String, Vec<String>),
}

/// A guest that answers a request. Dropping it ends the guest.
pub(super) struct Run {
    /// What it takes of the daemon beside its guest.
    pub(super) share: Share,
    // The session lives as long as this.
    _client: Client,
    guest: Guest,
    policy: Policy,
    /// The model that is asked for.
    model: String,
    state: State,
    name_of: fn(&str) -> String,
    /// What is replied before the guest says more.
    next: Vec<Reply>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Over,
}

impl Run {
    /// Starts the guest, and gives it the request.
    pub(super) async fn start(
        front: &Arc<Front>,
        actor: Actor,
        asked: Asked,
        share: Share,
    ) -> Result<Self, Failure> {
        let client = front.connect(actor).await?;
        let (name, arguments) = match &asked.policy {
            Policy::Own => (GUEST, Vec::new()),
            Policy::Named(name) => (name.as_str(), Vec::new()),
            Policy::Text(name, arguments) => (name.as_str(), arguments.clone()),
        };
        let options = StartOptions {
            arguments,
            model: asked.model.clone(),
            seed: asked.seed,
            label: Some(name.to_owned()),
            ..StartOptions::default()
        };
        let guest = client.start(Program::named(name), options).await?;
        let request = asked.request;
        let text = share.work(move || serde_json::to_string(&request).expect("requests serialise")).await;
        for piece in pieces(&text, front.message_bytes()) {
            // Why it takes no more is its last event.
            if guest.send(piece).await.is_err() {
                break;
            }
        }
        let _ = guest.end_messages().await;
        let (state, next) = (State::Running, Vec::new());
        let (policy, name_of, model) = (asked.policy, asked.name_of, asked.model.unwrap_or_default());
        Ok(Self { share, _client: client, guest, policy, model, state, name_of, next })
    }

    /// Waits until the guest has found the request to be in order: the model, and the tokens of the prompt where they are known.
    pub(super) async fn begun(&mut self) -> Result<(String, u32), Failure> {
        match self.next().await {
            Some(Ok(Reply::Begun { model, prompt_tokens })) => Ok((model, prompt_tokens)),
            // A guest that sends text says nothing of the kind, and one that only counts has said all.
            Some(Ok(first)) => {
                self.next.push(first);
                Ok((self.model.clone(), 0))
            }
            Some(Err(failure)) => Err(failure),
            None => Err(self.silent()),
        }
    }

    /// The next reply; none after the last. A failure is the last.
    pub(super) async fn next(&mut self) -> Option<Result<Reply, Failure>> {
        if let Some(reply) = self.next.pop() {
            return Some(Ok(reply));
        }
        while self.state == State::Running {
            let reply = match self.guest.next().await {
                Some(Ok(Event::Json { json })) => self.read(&json),
                Some(Ok(Event::Text { text })) => {
                    Some(Ok(Reply::Piece { choice: 0, text, tokens: Vec::new() }))
                }
                Some(Ok(_)) => None,
                Some(Err(error)) => Some(Err(self.named(error.into()))),
                None => Some(self.ended()),
            };
            if let Some(reply) = reply {
                if matches!(reply, Err(_) | Ok(Reply::Ended(_))) {
                    self.state = State::Over;
                    // It has nothing more to say, and ends by itself: that it was given up would not be so.
                    let end = async { while self.guest.next().await.is_some() {} };
                    let _ = tokio::time::timeout(END_TIME, end).await;
                }
                return Some(reply);
            }
        }
        None
    }

    fn read(&self, json: &str) -> Option<Result<Reply, Failure>> {
        Some(match (serde_json::from_str(json), &self.policy) {
            (Ok(Reply::Refused(refusal)), _) => Err(Failure::refused(refusal, self.name_of)),
            (Ok(reply), _) => Ok(reply),
            // It is the text of a guest that was written for other clients.
            (Err(_), Policy::Text(..)) => {
                Ok(Reply::Piece { choice: 0, text: json.to_owned(), tokens: Vec::new() })
            }
            (Err(error), _) => {
                let message = format!("the guest's reply is not understood: {error}");
                let refusal = Refusal { kind: RefusalKind::Internal, param: None, message };
                Err(Failure::refused(refusal, self.name_of))
            }
        })
    }

    /// The guest has ended well without saying that all is said.
    fn ended(&mut self) -> Result<Reply, Failure> {
        if !matches!(self.policy, Policy::Text(..)) {
            return Err(self.silent());
        }
        let n_tokens = self.guest.usage().map_or(0, |usage| usage.n_tokens);
        let completion_tokens = u32::try_from(n_tokens).unwrap_or(u32::MAX);
        self.next.push(Reply::Ended(Usage { completion_tokens, ..Usage::default() }));
        self.state = State::Over;
        Ok(Reply::Finished { choice: 0, reason: Reason::Stop, stop: None })
    }

    fn silent(&self) -> Failure {
        let message = "the guest ended without an answer".to_owned();
        Failure::refused(Refusal { kind: RefusalKind::Internal, param: None, message }, self.name_of)
    }

    /// A guest that the request does not name is nothing that whoever asks has to do with.
    fn named(&self, failure: Failure) -> Failure {
        match self.policy {
            Policy::Own if failure.param.as_deref() == Some("trellis.guest") => {
                Failure { status: axum::http::StatusCode::NOT_IMPLEMENTED, param: None, ..failure }
            }
            _ => failure,
        }
    }
}

/// A text in pieces that are no longer than a message may be.
fn pieces(text: &str, n_bytes_max: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        // No character has more bytes.
        let (piece, after) = rest.split_at(rest.floor_char_boundary(n_bytes_max.max(4)));
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn long_requests_come_in_messages_that_may_be_sent() {
        let text = "é".repeat(10) + "x";
        let all: Vec<&str> = pieces(&text, 5).collect();
        assert!(all.iter().all(|piece| piece.len() <= 5) && all.concat() == text, "{all:?}");
        assert_eq!(pieces("", 5).count(), 0);
    }
}
