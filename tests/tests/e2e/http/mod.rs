//! Requests in the form of HTTP APIs, answered by guests.

mod chat;
mod client;
mod door;
pub(crate) mod guest;
mod responses;
mod upgrades;

use serde_json::{Value, json};

/// A conversation of one question, drawn without chance.
fn question(text: &str) -> Value {
    json!({ "model": "tiny", "temperature": 0, "messages": [{ "role": "user", "content": text }] })
}

/// A body with more in it.
fn with(mut body: Value, more: Value) -> Value {
    for (name, value) in more.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}
