//! `/v1/responses`. The name of a response is that of a saved context: a response that goes on with another opens it, and computes no
//! token of it again. What a response was is not kept beside that: it can be gone on with and deleted, not read again.

mod events;
mod input;
mod items;

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value, json};

use self::events::ResponseEvents;
use super::super::exchange::{Chat, Request, Usage};
use super::super::failure::Failure;
use super::super::fields::Fields;
use super::super::front::Front;
use super::super::run::{Asked, Policy, Run};
use super::super::sse;
use super::super::whole::Whole;
use super::errors::Refused;
use super::settings::{self, N_TOP_MAX};
use super::{answer_json, new_id, now, to_json, tools};
use crate::session::Actor;

/// With what the names of responses begin.
const PREFIX: &str = "resp_";

/// How many times as much as text an answer takes here: its items are trees, which the events of a stream are made of.
const N_TREES: u64 = 4;

/// What a client may keep with a response: so many texts, and characters of their names and of each.
const N_METADATA_MAX: usize = 16;
const METADATA_NAME_CHARS: usize = 64;
const METADATA_CHARS: usize = 512;

/// Answers, and keeps the conversation.
pub(in crate::http) async fn answer(
    State(front): State<Arc<Front>>,
    Extension(actor): Extension<Actor>,
    body: Body,
) -> Result<Response, Refused> {
    let ((asked, form), share) = front.read(actor, body, read).await?;
    let run = Run::start(&front, actor, asked, share).await?;
    if form.is_streamed {
        return Ok(sse::answer(run, ResponseEvents::new(form)).await?);
    }
    let (whole, share) = Whole::of(run, N_TREES).await?;
    let write = move || {
        let choice = whole.choices.into_iter().next().unwrap_or_default();
        let ending = Ending::of(choice.reason, whole.usage);
        let output = items::of_choice(&choice, form.has_logprobs);
        to_json(&form.response(&whole.model, &output, &ending))
    };
    Ok(share.answer(write).await)
}

/// Keeps a conversation no longer.
pub(in crate::http) async fn delete(
    State(front): State<Arc<Front>>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
) -> Result<Response, Refused> {
    // No other saved context of the user is a response.
    if !id.starts_with(PREFIX) {
        let message = format!("no response is called {id:?}");
        return Err(Failure::new(StatusCode::NOT_FOUND, "not_found", message).about("response_id").into());
    }
    let request = Request::Forget(id.clone());
    let asked =
        Asked { model: None, seed: None, policy: Policy::Own, request, name_of: |_| "response_id".into() };
    let share = front.share(actor).await;
    Whole::of(Run::start(&front, actor, asked, share).await?, 1).await?;
    Ok(answer_json(&json!({ "id": id, "object": "response", "deleted": true })))
}

/// A response is not kept to be read.
pub(in crate::http) async fn get(Path(id): Path<String>) -> Refused {
    let message = format!(
        "{id} can be gone on with, by previous_response_id, and deleted: of a response its context is kept, and not what it was"
    );
    Failure::new(StatusCode::NOT_FOUND, "not_kept", message).about("response_id").into()
}

/// In which form the answer comes, and what of the request it repeats.
struct Form {
    id: String,
    created: u64,
    is_streamed: bool,
    has_logprobs: bool,
    said: Map<String, Value>,
}

/// What a response repeats of its request, with what it has where the request says nothing.
fn defaults() -> [(&'static str, Value); 15] {
    [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Value::Null),
        ("reasoning", json!({ "effort": null, "summary": null })),
        ("store", json!(true)),
        ("temperature", json!(1.0)),
        ("text", json!({ "format": { "type": "text" } })),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_logprobs", json!(0)),
        ("top_p", json!(1.0)),
        ("truncation", json!("disabled")),
        ("user", Value::Null),
    ]
}

fn read(mut fields: Fields) -> Result<(Asked, Form), Failure> {
    check_metadata(&fields)?;
    let said =
        defaults().map(|(name, default)| (name.to_owned(), fields.look(name).cloned().unwrap_or(default)));
    let model: String = fields.need("model")?;
    let mut messages = input::messages(fields.need("input")?)?;
    if let Some(instructions) = fields.take::<String>("instructions")? {
        messages.insert(0, input::system(instructions));
    }
    let policy = settings::policy(&mut fields)?;
    if matches!(policy, Policy::Text(..)) {
        let why = "a guest that takes arguments keeps no conversation; chat completions take it";
        return Err(Failure::unsupported("trellis.args", why));
    }
    let is_kept = fields.take::<bool>("store")?.unwrap_or(true);
    let mut settings = settings::settings(&mut fields)?;
    settings.max_tokens = fields.count("max_output_tokens", (1, u32::MAX))?;
    let n_top = fields.count("top_logprobs", (0, N_TOP_MAX))?;
    let includes_logprobs = include(&mut fields)?;
    settings.logprobs = (includes_logprobs || n_top.is_some_and(|n| n > 0)).then(|| n_top.unwrap_or(0));
    for (name, is_said) in [("n", settings.n.is_some()), ("stop", !settings.stop.is_empty())] {
        if is_said {
            return Err(Failure::unsupported(name, "responses do not have it"));
        }
    }
    let id = new_id(PREFIX);
    let effort = effort(&mut fields)?;
    let chat = Chat {
        tools: input::tools(&mut fields)?,
        tool_choice: tools::choice(&mut fields)?,
        format: format(&mut fields)?,
        thinking_budget: settings::thinking(&mut fields, ("reasoning.effort", effort))?,
        previous: previous(&mut fields)?,
        save: is_kept.then(|| id.clone()),
        messages,
        settings,
    };
    fields.pass_over(&["parallel_tool_calls", "max_tool_calls"]);
    fields.only("background", &[json!(false)], "a response is answered while its client waits")?;
    fields.only("truncation", &[json!("disabled")], "a conversation that does not fit is refused")?;
    let seed = settings::seed(&mut fields)?;
    let is_streamed = fields.take::<bool>("stream")?.unwrap_or_default();
    if let Some(mut options) = fields.object("stream_options")? {
        options.pass_over(&["include_obfuscation"]);
        options.finish()?;
    }
    fields.finish()?;
    let has_logprobs = chat.settings.logprobs.is_some();
    let form = Form { id, created: now(), is_streamed, has_logprobs, said: said.into_iter().collect() };
    let request = Request::Chat(chat);
    Ok((Asked { model: Some(model), seed, policy, request, name_of }, form))
}

fn check_metadata(fields: &Fields) -> Result<(), Failure> {
    let fits = |(name, text): (&String, &Value)| {
        name.chars().count() <= METADATA_NAME_CHARS
            && text.as_str().is_some_and(|text| text.chars().count() <= METADATA_CHARS)
    };
    match fields.look("metadata") {
        None => Ok(()),
        Some(Value::Object(all)) if all.len() <= N_METADATA_MAX && all.iter().all(fits) => Ok(()),
        Some(_) => {
            let message = format!(
                "metadata is not at most {N_METADATA_MAX} texts of {METADATA_CHARS} characters, with names of {METADATA_NAME_CHARS}"
            );
            Err(Failure::invalid("metadata", message))
        }
    }
}

/// Whether log-probabilities come with the text. Thoughts are not encrypted: they come as they are.
fn include(fields: &mut Fields) -> Result<bool, Failure> {
    let included = fields.take::<Vec<String>>("include")?.unwrap_or_default();
    for name in &included {
        if !["message.output_text.logprobs", "reasoning.encrypted_content"].contains(&name.as_str()) {
            return Err(Failure::unsupported("include", &format!("there is no {name} here")));
        }
    }
    Ok(included.iter().any(|name| name == "message.output_text.logprobs"))
}

fn effort(fields: &mut Fields) -> Result<Option<String>, Failure> {
    let Some(mut reasoning) = fields.object("reasoning")? else { return Ok(None) };
    let effort = reasoning.take("effort")?;
    // Thoughts come whole, which says more than any summary.
    reasoning.pass_over(&["summary", "generate_summary"]);
    reasoning.finish()?;
    Ok(effort)
}

fn format(fields: &mut Fields) -> Result<super::super::exchange::Format, Failure> {
    let Some(mut text) = fields.object("text")? else { return Ok(Default::default()) };
    text.only("verbosity", &[json!("medium")], "nothing here makes an answer longer or shorter")?;
    let format = text.object("format")?;
    text.finish()?;
    let Some(mut format) = format else { return Ok(Default::default()) };
    let kind: String = format.need("type")?;
    let read = match kind.as_str() {
        "json_schema" => tools::named_schema(&mut format)?,
        kind => tools::plain_format(kind, &format.name_of("type"))?,
    };
    format.finish()?;
    Ok(read)
}

fn previous(fields: &mut Fields) -> Result<Option<String>, Failure> {
    match fields.take::<String>("previous_response_id")? {
        Some(id) if !id.starts_with(PREFIX) => {
            let message = format!("no response is called {id:?}");
            Err(Failure::new(StatusCode::NOT_FOUND, "not_found", message).about("previous_response_id"))
        }
        id => Ok(id),
    }
}

/// The field that stands for a part of the guest's request.
fn name_of(part: &str) -> String {
    match part {
        "format" => "text.format",
        "messages" => "input",
        "previous" => "previous_response_id",
        "logprobs" => "top_logprobs",
        part => part,
    }
    .to_owned()
}

/// How a response is over, or that it is not.
struct Ending {
    status: &'static str,
    usage: Option<Usage>,
}

impl Ending {
    fn of(reason: Option<super::super::exchange::Reason>, usage: Usage) -> Self {
        let status = match reason {
            Some(super::super::exchange::Reason::Length) => "incomplete",
            _ => "completed",
        };
        Self { status, usage: Some(usage) }
    }
}

/// A response, as far as it is.
#[derive(Serialize)]
struct Shown<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    error: (),
    incomplete_details: Option<Value>,
    model: &'a str,
    output: &'a [Value],
    usage: Option<Value>,
    #[serde(flatten)]
    said: &'a Map<String, Value>,
}

impl Form {
    fn response<'a>(&'a self, model: &'a str, output: &'a [Value], ending: &Ending) -> Shown<'a> {
        let is_cut = ending.status == "incomplete";
        let usage = |usage: Usage| {
            json!({
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": { "cached_tokens": usage.cached_tokens },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
                "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
            })
        };
        Shown {
            id: &self.id,
            object: "response",
            created_at: self.created,
            status: ending.status,
            error: (),
            incomplete_details: is_cut.then(|| json!({ "reason": "max_output_tokens" })),
            model,
            output,
            usage: ending.usage.map(usage),
            said: &self.said,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(extra: Value) -> Result<(Asked, Form), Failure> {
        let mut body = json!({ "model": "tiny", "input": "Hello" });
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        read(Fields::of(body, "").expect("an object"))
    }

    #[test]
    fn a_response_is_kept_under_its_name_and_goes_on_with_another() {
        let (asked, form) =
            asked(json!({ "previous_response_id": "resp_1", "temperature": 0, "instructions": "Be brief." }))
                .expect("all is in order");
        let Request::Chat(chat) = asked.request else { panic!("{asked:?}") };
        assert_eq!((chat.previous.as_deref(), chat.save.as_ref()), (Some("resp_1"), Some(&form.id)));
        assert_eq!(chat.messages.iter().map(|one| one.role).collect::<Vec<_>>(), ["system", "user"]);
        let ending = Ending::of(Some(super::super::super::exchange::Reason::Length), Usage::default());
        let response = json!(form.response("tiny", &[], &ending));
        assert_eq!((&response["temperature"], &response["tools"]), (&json!(0), &json!([])));
        assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!((asked.name_of)("format"), "text.format");
    }

    #[test]
    fn what_is_not_done_is_named() {
        for (extra, param) in [
            (json!({ "background": true }), "background"),
            (json!({ "truncation": "auto" }), "truncation"),
            (json!({ "conversation": "conv_1" }), "conversation"),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "include": ["file_search_call.results"] }), "include"),
            (json!({ "previous_response_id": "notes" }), "previous_response_id"),
            (json!({ "text": { "format": { "type": "xml" } } }), "text.format.type"),
            (json!({ "stop": "x" }), "stop"),
            (json!({ "metadata": [{}] }), "metadata"),
            (json!({ "metadata": { "a": 1 } }), "metadata"),
            (json!({ "metadata": { "a": "x".repeat(513) } }), "metadata"),
            (
                json!({ "metadata": (0..17).map(|n| (n.to_string(), json!(""))).collect::<Map<_, _>>() }),
                "metadata",
            ),
        ] {
            assert_eq!(asked(extra).err().expect(param).param.as_deref(), Some(param));
        }
        let (asked, _) = asked(json!({ "store": false })).expect("in order");
        let Request::Chat(chat) = asked.request else { panic!("{asked:?}") };
        assert_eq!(chat.save, None);
    }
}
