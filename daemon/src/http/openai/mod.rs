//! The form of OpenAI's API: <https://platform.openai.com/docs/api-reference>.
//!
//! A field that the API has and this front does not do is an error with its name; one that changes nothing of an answer (`user`,
//! `metadata`) is taken. Beside the API's own fields there are `top_k`, `min_p`, `repetition_penalty` and `thinking_budget`, and `trellis`,
//! which names the guest that decodes.

pub(super) mod chat;
pub(super) mod completions;
mod content;
pub(super) mod embeddings;
mod errors;
mod logprobs;
pub(super) mod models;
pub(super) mod responses;
pub(super) mod settings;
mod stream;
mod tools;

use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

pub(super) use self::errors::Refused;
use super::exchange::{Reason, Usage};
use super::failure::Failure;
use super::tokens::random_hex;
use super::whole::Whole;

/// A path that there is nothing at.
pub(super) async fn unknown_path(request: Request<Body>) -> Refused {
    let message = format!("there is nothing at {} {}", request.method(), request.uri().path());
    Failure::new(StatusCode::NOT_FOUND, "unknown_url", message).into()
}

/// A method that a path does not take.
pub(super) async fn unknown_method(request: Request<Body>) -> Refused {
    let message = format!("{} does not take {}", request.uri().path(), request.method());
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).into()
}

/// An answer in JSON.
fn answer_json(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// Text in JSON.
fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("answers serialise")
}

/// A whole answer of completions or chat completions.
#[derive(Serialize)]
struct Completed<'a, C> {
    id: String,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: String,
    choices: Vec<C>,
    usage: Value,
}

impl<'a, C> Completed<'a, C> {
    fn new(prefix: &str, object: &'static str, whole: &'a Whole, choices: Vec<C>) -> Self {
        Self {
            id: new_id(prefix),
            object,
            created: now(),
            model: &whole.model,
            system_fingerprint: fingerprint(),
            choices,
            usage: usage(whole.usage),
        }
    }
}

/// A name for an answer that none had before.
fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", random_hex::<16>())
}

/// The time, in seconds of Unix.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The version that answers.
fn fingerprint() -> String {
    format!("trellis-{}", env!("CARGO_PKG_VERSION"))
}

/// Why a choice is over, in the API's words.
fn finish_reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Stop => "stop",
        Reason::Length => "length",
        Reason::Calls => "tool_calls",
    }
}

/// What an answer took, in the form of completions and chat completions.
fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
        "completion_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
    })
}
