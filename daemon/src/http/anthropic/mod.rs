//! The form of Anthropic's API: <https://platform.claude.com/docs/en/api/messages>.
//!
//! A field that the API has and this front does not do is an error with its name; one that changes nothing of an answer (`metadata`,
//! `cache_control`) is taken. Beside the API's own fields there is `seed`, and `trellis`, which names the
//! guest that decodes.

mod asked;
mod errors;
mod events;
mod shape;
mod turns;

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

pub(super) use self::errors::Refused;
use super::exchange::Request;
use super::failure::Failure;
use super::fields::Fields;
use super::front::Front;
use super::openai::settings;
use super::run::{Asked, Policy, Run};
use super::sse;
use super::tokens::random_hex;
use super::whole::Whole;
use crate::session::Actor;

/// The header by which a client says which form it knows, and those that are known here: what is answered is the same in both.
const VERSION: &str = "anthropic-version";
const KNOWN_VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];

/// The field that asks for a conversation that the server holds.
const THREAD: &str = "thread";

/// The header by which an answer, or an error, can be found again.
const REQUEST_ID: &str = "request-id";

/// `POST /v1/messages`
pub(super) async fn answer(
    State(front): State<Arc<Front>>,
    Extension(actor): Extension<Actor>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    check_version(&headers)?;
    let read = |mut body: Fields| {
        let chat = asked::question(&mut body)?;
        let answer = shape::Answer::new(chat.settings.max_tokens.unwrap_or(u32::MAX));
        let is_stream = body.take::<bool>("stream")?.unwrap_or(false);
        Ok((asked(body, Request::Chat(chat))?, answer, is_stream))
    };
    let ((asked, answer, is_stream), share) = front.read(actor, body, read).await?;
    let run = Run::start(&front, actor, asked, share).await?;
    if is_stream {
        return Ok(with_id(sse::answer(run, events::MessageEvents::of(answer)).await?));
    }
    let (whole, share) = Whole::of(run, 1).await?;
    let response = share.try_answer(move || Ok(answer.whole(&whole)?.to_string())).await?;
    Ok(with_id(response))
}

/// `POST /v1/messages/count_tokens`
pub(super) async fn count(
    State(front): State<Arc<Front>>,
    Extension(actor): Extension<Actor>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    check_version(&headers)?;
    let read = |mut body: Fields| {
        let chat = asked::conversation(&mut body)?;
        asked(body, Request::Count(chat))
    };
    let (asked, share) = front.read(actor, body, read).await?;
    let (counted, _) = Whole::of(Run::start(&front, actor, asked, share).await?, 1).await?;
    Ok(with_id(json_response(&json!({ "input_tokens": counted.usage.prompt_tokens }))))
}

/// What a request runs; nothing may be left in its body.
fn asked(mut body: Fields, request: Request) -> Result<Asked, Failure> {
    let model = body.need("model")?;
    let (seed, policy) = (settings::seed(&mut body)?, settings::policy(&mut body)?);
    if matches!(policy, Policy::Text(..)) {
        let why = "this API has no form for a guest that is told all by its arguments";
        return Err(Failure::unsupported("trellis.args", why));
    }
    body.finish()?;
    Ok(Asked { model: Some(model), seed, policy, request, name_of })
}

/// What this API calls a part of the guest's request.
fn name_of(part: &str) -> String {
    match part {
        "format" => "output_config.format".to_owned(),
        "stop" => "stop_sequences".to_owned(),
        "thinking_budget" => "thinking.budget_tokens".to_owned(),
        part => part.to_owned(),
    }
}

/// Whether a request is of this API, for errors that are found before its path is.
pub(super) fn is_asked<B>(request: &axum::http::Request<B>) -> bool {
    request.headers().contains_key(VERSION) || request.uri().path().starts_with("/v1/messages")
}

fn check_version(headers: &HeaderMap) -> Result<(), Failure> {
    let [old, new] = KNOWN_VERSIONS;
    match headers.get(VERSION) {
        Some(version) if KNOWN_VERSIONS.iter().any(|known| version == known) => Ok(()),
        Some(version) => {
            let message = format!("{VERSION} is {version:?}, expected {old:?} or {new:?}");
            Err(Failure::invalid(VERSION, message))
        }
        None => {
            let message = format!("the header {VERSION} is missing, expected {old} or {new}");
            Err(Failure::invalid(VERSION, message))
        }
    }
}

fn json_response(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn with_id(mut response: Response) -> Response {
    if let Ok(id) = HeaderValue::from_str(&new_request_id()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

fn new_request_id() -> String {
    format!("req_{}", random_hex::<12>())
}
