//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::exchange::{Chat, Format, Reply, Request, ToolChoice, Usage};
use super::super::failure::Failure;
use super::super::fields::Fields;
use super::super::front::Front;
use super::super::run::{Asked, Policy, Run};
use super::super::sse::{self, Events, Frame};
use super::super::whole::{Choice, Whole};
use super::errors::{self, Refused};
use super::settings::{self, N_TOP_MAX};
use super::stream::{self, Streaming};
use super::{Completed, content, fingerprint, finish_reason, logprobs, new_id, now, to_json, tools};
use crate::session::Actor;

/// Answers a conversation.
pub(in crate::http) async fn answer(
    State(front): State<Arc<Front>>,
    Extension(actor): Extension<Actor>,
    body: Body,
) -> Result<Response, Refused> {
    let ((asked, form), share) = front.read(actor, body, read).await?;
    let run = Run::start(&front, actor, asked, share).await?;
    Ok(match form.streaming {
        Streaming::No => {
            let (all, share) = Whole::of(run, 1).await?;
            share.answer(move || whole(&all, form)).await
        }
        _ => sse::answer(run, Chunks::new(form)).await?,
    })
}

/// In which form the answer comes.
#[derive(Clone, Copy, Debug, Default)]
struct Form {
    streaming: Streaming,
    has_logprobs: bool,
}

/// What is asked by the fields of a body.
fn read(mut fields: Fields) -> Result<(Asked, Form), Failure> {
    let model: String = fields.need("model")?;
    let messages = content::messages(fields.need("messages")?)?;
    let policy = settings::policy(&mut fields)?;
    let mut settings = settings::settings(&mut fields)?;
    let seed = settings::seed(&mut fields)?;
    let max_tokens = fields.count("max_tokens", (1, u32::MAX))?;
    settings.max_tokens = fields.count("max_completion_tokens", (1, u32::MAX))?.or(max_tokens);
    settings.logprobs = chat_logprobs(&mut fields)?;
    let effort = ("reasoning_effort", fields.take("reasoning_effort")?);
    let mut chat = Chat {
        tools: tools::tools(&mut fields)?,
        tool_choice: tools::choice(&mut fields)?,
        format: tools::response_format(&mut fields)?,
        thinking_budget: settings::thinking(&mut fields, effort)?,
        settings,
        messages,
        ..Chat::default()
    };
    // One tool is called at a time, whatever this says.
    fields.pass_over(&["parallel_tool_calls"]);
    fields.only("modalities", &[json!(["text"])], "answers are text")?;
    fields.only("verbosity", &[json!("medium")], "nothing here makes an answer longer or shorter")?;
    let form = Form { streaming: stream::read(&mut fields)?, has_logprobs: chat.settings.logprobs.is_some() };
    fields.finish()?;
    let others = [
        ("tools", !chat.tools.is_empty()),
        ("tool_choice", chat.tool_choice != ToolChoice::Auto),
        ("response_format", !matches!(chat.format, Format::Text)),
        ("thinking_budget", chat.thinking_budget.is_some()),
    ];
    settings::check_text_policy(&policy, &chat.settings, &others)?;
    let policy = with_question(policy, &mut chat);
    let asked = Asked { model: Some(model), seed, policy, request: Request::Chat(chat), name_of };
    Ok((asked, form))
}

/// A guest that takes arguments has the last message of the user as the last of them, as `trellis run NAME ARGS PROMPT` has.
fn with_question(policy: Policy, chat: &mut Chat) -> Policy {
    match policy {
        Policy::Text(name, args) => {
            let last = chat.messages.iter().rfind(|message| message.role == "user");
            match last {
                Some(message) => Policy::Text(name, settings::with_text(args, &message.content)),
                None => Policy::Text(name, args),
            }
        }
        policy => policy,
    }
}

/// How many of the most probable tokens come with each; none for no log-probabilities.
fn chat_logprobs(fields: &mut Fields) -> Result<Option<u32>, Failure> {
    let is_wanted = fields.take::<bool>("logprobs")?.unwrap_or_default();
    let n_top = fields.count("top_logprobs", (0, N_TOP_MAX))?;
    match (is_wanted, n_top) {
        (true, n_top) => Ok(Some(n_top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            Err(Failure::invalid("top_logprobs", "top_logprobs is for logprobs that are true"))
        }
    }
}

/// The field that stands for a part of the guest's request.
fn name_of(part: &str) -> String {
    match part {
        "format" => "response_format",
        "logprobs" => "top_logprobs",
        part => part,
    }
    .to_owned()
}

#[derive(Serialize)]
struct CompletedChoice<'a> {
    index: usize,
    message: Value,
    logprobs: Option<logprobs::OfChat<'a>>,
    finish_reason: Option<&'static str>,
}

/// An answer as a whole.
fn whole(whole: &Whole, form: Form) -> String {
    let choices = whole.choices.iter().enumerate().map(|(index, choice)| CompletedChoice {
        index,
        message: message(choice),
        logprobs: form.has_logprobs.then(|| logprobs::of_chat(&choice.tokens)),
        finish_reason: choice.reason.map(finish_reason),
    });
    to_json(&Completed::new("chatcmpl-", "chat.completion", whole, choices.collect()))
}

fn message(choice: &Choice) -> Value {
    let is_called = !choice.calls.is_empty();
    let content = (!is_called || !choice.text.is_empty()).then_some(&choice.text);
    let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
    if is_called {
        let calls = choice.calls.iter().map(|(name, arguments)| call(name, arguments));
        message["tool_calls"] = calls.collect();
    }
    if let Some(thought) = &choice.thought {
        message["reasoning_content"] = thought.as_str().into();
    }
    message
}

fn call(name: &str, arguments: &str) -> Value {
    json!({ "id": new_id("call_"), "type": "function", "function": { "name": name, "arguments": arguments } })
}

/// An answer in chunks.
struct Chunks {
    form: Form,
    id: String,
    created: u64,
    model: String,
    /// Of each choice, whether its role was told.
    are_begun: Vec<bool>,
    n_calls: Vec<u32>,
}

impl Chunks {
    fn new(form: Form) -> Self {
        let (id, created, model) = (new_id("chatcmpl-"), now(), String::new());
        Self { form, id, created, model, are_begun: Vec::new(), n_calls: Vec::new() }
    }

    fn frame(&self, choices: Value, usage: Option<Usage>) -> Frame {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint(),
            "choices": choices,
        });
        // With usage in the last chunk, the others say that they have none.
        if self.form.streaming == Streaming::WithUsage {
            chunk["usage"] = usage.map(super::usage).unwrap_or_default();
        }
        Frame::data(chunk)
    }

    fn of_choice(
        &mut self,
        idx: usize,
        delta: Value,
        reason: Option<&str>,
        logprobs: Option<Value>,
    ) -> Vec<Frame> {
        let mut frames = Vec::new();
        let choice = |delta, logprobs, reason| json!([{ "index": idx, "delta": delta, "logprobs": logprobs, "finish_reason": reason }]);
        if idx >= self.are_begun.len() {
            self.are_begun.resize(idx.min(usize::from(u16::MAX)) + 1, false);
        }
        if self.are_begun.get_mut(idx).is_some_and(|begun| !std::mem::replace(begun, true)) {
            let role = json!({ "role": "assistant", "content": "", "refusal": null });
            frames.push(self.frame(choice(role, None, None), None));
        }
        frames.push(self.frame(choice(delta, logprobs, reason), None));
        frames
    }

    /// The number of a call of a choice.
    fn next_call(&mut self, idx: usize) -> u32 {
        if idx >= self.n_calls.len() {
            self.n_calls.resize(idx.min(usize::from(u16::MAX)) + 1, 0);
        }
        self.n_calls.get_mut(idx).map_or(0, |n| std::mem::replace(n, *n + 1))
    }
}

impl Events for Chunks {
    fn begin(&mut self, model: &str, _: u32) -> Vec<Frame> {
        model.clone_into(&mut self.model);
        Vec::new()
    }

    fn take(&mut self, reply: Reply) -> Vec<Frame> {
        match reply {
            Reply::Thought { choice, text } => {
                self.of_choice(choice, json!({ "reasoning_content": text }), None, None)
            }
            Reply::Piece { choice, text, tokens } => {
                let logprobs = self.form.has_logprobs.then(|| json!(logprobs::of_chat(&tokens)));
                self.of_choice(choice, json!({ "content": text }), None, logprobs)
            }
            Reply::Call { choice, name, arguments } => {
                let mut call = call(&name, &arguments);
                call["index"] = self.next_call(choice).into();
                self.of_choice(choice, json!({ "tool_calls": [call] }), None, None)
            }
            Reply::Finished { choice, reason, .. } => {
                self.of_choice(choice, json!({}), Some(finish_reason(reason)), None)
            }
            Reply::Ended(usage) => {
                let mut frames = Vec::new();
                if self.form.streaming == Streaming::WithUsage {
                    frames.push(self.frame(json!([]), Some(usage)));
                }
                frames.push(Frame::data(stream::DONE));
                frames
            }
            Reply::Begun { .. } | Reply::Embedding { .. } | Reply::Refused(_) => Vec::new(),
        }
    }

    fn fail(&mut self, failure: &Failure) -> Vec<Frame> {
        vec![Frame::data(errors::body(failure))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(extra: Value) -> Result<(Asked, Form), Failure> {
        let mut body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hello" }] });
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        read(Fields::of(body, "").expect("an object"))
    }

    #[test]
    fn a_body_is_a_conversation_with_its_settings() {
        let (asked, form) = asked(json!({
            "max_tokens": 9, "max_completion_tokens": 7, "logprobs": true, "top_logprobs": 3, "seed": 5, "stream": true,
            "reasoning_effort": "low", "user": "ada", "parallel_tool_calls": false,
        }))
        .expect("all is in order");
        assert_eq!((asked.seed, form.streaming, form.has_logprobs), (Some(5), Streaming::Yes, true));
        let Request::Chat(chat) = asked.request else { panic!("{asked:?}") };
        assert_eq!((chat.settings.max_tokens, chat.settings.logprobs), (Some(7), Some(3)));
        assert_eq!(chat.thinking_budget, Some(256));
    }

    #[test]
    fn what_is_not_done_is_named() {
        for (extra, param) in [
            (json!({ "functions": [] }), "functions"),
            (json!({ "modalities": ["audio"] }), "modalities"),
            (json!({ "top_logprobs": 2 }), "top_logprobs"),
            (json!({ "frobnicate": 1 }), "frobnicate"),
            (json!({ "verbosity": "low" }), "verbosity"),
            (
                json!({ "trellis": { "guest": "best-of-n", "args": [] }, "tools": [{ "function": { "name": "f" } }] }),
                "tools",
            ),
        ] {
            let failure = asked(extra).expect_err(param);
            assert_eq!(
                (failure.status.as_u16(), failure.param.as_deref()),
                (400, Some(param)),
                "{failure:?}"
            );
        }
    }

    #[test]
    fn a_guest_with_arguments_gets_the_question_as_the_last() {
        let (asked, _) =
            asked(json!({ "trellis": { "guest": "best-of-n", "args": ["--n", "4"] } })).expect("a guest");
        let args = ["--n", "4", "--", "Hello"].map(str::to_owned).to_vec();
        assert_eq!(asked.policy, Policy::Text("best-of-n".to_owned(), args));
    }

    #[test]
    fn chunks_begin_with_the_role_and_end_with_what_it_took() {
        let mut chunks = Chunks::new(Form { streaming: Streaming::WithUsage, has_logprobs: false });
        assert!(chunks.begin("tiny", 3).is_empty());
        let read = |frames: Vec<Frame>| -> Vec<Value> {
            frames.iter().map(|frame| serde_json::from_str(&frame.data).unwrap_or(Value::Null)).collect()
        };
        let first = read(chunks.take(Reply::Piece { choice: 0, text: "8".to_owned(), tokens: Vec::new() }));
        assert_eq!(first[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(first[1]["choices"][0]["delta"], json!({ "content": "8" }));
        assert_eq!((&first[1]["model"], &first[1]["usage"]), (&json!("tiny"), &Value::Null));
        let call = Reply::Call { choice: 0, name: "f".to_owned(), arguments: "{}".to_owned() };
        let call = read(chunks.take(call));
        assert_eq!(call[0]["choices"][0]["delta"]["tool_calls"][0]["index"], 0);
        let last = chunks.take(Reply::Ended(Usage { completion_tokens: 2, ..Usage::default() }));
        assert_eq!((last.len(), last[1].data.as_str()), (2, "[DONE]"));
        assert_eq!(read(last)[0]["usage"]["completion_tokens"], 2);
    }
}
