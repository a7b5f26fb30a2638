//! Answers that come as they are made: server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use trellis_engine::model::YieldPoint;

use super::exchange::Reply;
use super::failure::Failure;
use super::run::Run;
use super::share::Share;
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
    /// None while it is at work.
    events: Option<E>,
    ready: VecDeque<Frame>,
    /// What of the account is not for events.
    n_bytes_before: u64,
    /// What is kept up to the last event.
    n_bytes_kept: u64,
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
            let frames = match self.run.next().await? {
                Ok(reply) => self.frames(reply).await,
                Err(failure) => Err(failure),
            };
            let frames = frames.unwrap_or_else(|failure| {
                self.is_over = true;
                self.events.as_mut().map(|events| events.fail(&failure)).unwrap_or_default()
            });
            self.ready.extend(frames);
        }
    }

    /// The events of a reply, which are on the account until those of the next.
    async fn frames(&mut self, reply: Reply) -> Result<Vec<Frame>, Failure> {
        let n_bytes = whole::n_bytes(&reply);
        self.n_bytes_kept += E::N_KEPT * n_bytes;
        self.run.share.set(self.n_bytes_before + self.n_bytes_kept + n_bytes)?;
        // What comes after a text has all of it again.
        let n_bytes = match &reply {
            Reply::Piece { .. } | Reply::Thought { .. } => n_bytes,
            _ => n_bytes + self.n_bytes_kept,
        };
        let share = &self.run.share;
        work(share, n_bytes, &mut self.events, |events| events.take(reply)).await
    }
}

/// Has events made where it holds up nobody.
async fn work<E: Events>(
    share: &Share,
    n_bytes: u64,
    events: &mut Option<E>,
    make: impl FnOnce(&mut E) -> Vec<Frame> + Send + 'static,
) -> Result<Vec<Frame>, Failure> {
    // Else they could not say why there are no more.
    share.has_time()?;
    let mut taken = events.take().expect("nothing else is at work");
    let work = move |_: &YieldPoint| (make(&mut taken), taken);
    let (frames, given_back) = share.work(n_bytes, work).await?;
    *events = Some(given_back);
    Ok(frames)
}

/// Answers with events. What is wrong with the request is found before the first of them, and is a failure.
pub(super) async fn answer(mut run: Run, events: impl Events) -> Result<Response, Failure> {
    let (model, prompt_tokens) = run.begun().await?;
    let n_bytes_before = run.share.n_bytes();
    let mut events = Some(events);
    let begin = move |events: &mut _| Events::begin(events, &model, prompt_tokens);
    // They may repeat what was asked.
    let ready = work(&run.share, run.share.n_bytes_worked_on(), &mut events, begin).await?.into();
    let streamed = Streamed { run, events, ready, n_bytes_before, n_bytes_kept: 0, is_over: false };
    let body = stream::unfold(streamed, Streamed::next);
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(body)).into_response())
}
