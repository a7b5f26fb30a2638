//! Answers that come as they are made: server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;

use super::exchange::Reply;
use super::failure::Failure;
use super::run::Run;
use super::whole;

/// One event, as an API has it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) event: Option<&'static str>,
    pub(super) data: String,
}

impl Frame {
    /// An event without a name.
    pub(super) fn data(data: impl ToString) -> Self {
        Self { event: None, data: data.to_string() }
    }

    fn bytes(&self) -> Bytes {
        // JSON has no ends of lines outside its texts, and none inside them that are not escaped.
        let event = self.event.map(|event| format!("event: {event}\n")).unwrap_or_default();
        format!("{event}data: {}\n\n", self.data).into()
    }
}

/// Makes an API's events of what a guest replies.
pub(super) trait Events: Send + 'static {
    /// How many times what a reply takes in an answer as a whole is kept of it up to the last event.
    const N_KEPT: u64 = 0;

    /// Those that come first.
    fn begin(&mut self, model: &str, prompt_tokens: u32) -> Vec<Frame>;

    /// Those of a reply.
    fn take(&mut self, reply: Reply) -> Vec<Frame>;

    /// Those of a failure, which are the last.
    fn fail(&mut self, failure: &Failure) -> Vec<Frame>;
}

struct Streamed<E> {
    run: Run,
    events: E,
    ready: VecDeque<Frame>,
    is_over: bool,
}

impl<E: Events> Streamed<E> {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some((Ok(frame.bytes()), self));
            }
            if self.is_over {
                return None;
            }
            let paid = match self.run.next().await? {
                Ok(reply) => self.run.share.add(E::N_KEPT * whole::n_bytes(&reply)).map(|()| reply),
                Err(failure) => Err(failure),
            };
            let frames = match paid {
                Ok(reply) => self.events.take(reply),
                Err(failure) => {
                    self.is_over = true;
                    self.events.fail(&failure)
                }
            };
            self.ready.extend(frames);
        }
    }
}

/// Answers with events. What is wrong with the request is found before the first of them, and is a failure.
pub(super) async fn answer(mut run: Run, mut events: impl Events) -> Result<Response, Failure> {
    let (model, prompt_tokens) = run.begun().await?;
    let ready = events.begin(&model, prompt_tokens).into();
    let body = stream::unfold(Streamed { run, events, ready, is_over: false }, Streamed::next);
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(body)).into_response())
}
