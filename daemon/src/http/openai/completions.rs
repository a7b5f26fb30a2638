//! `/v1/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::exchange::{Complete, Prompt, Reply, Request, Usage};
use super::super::failure::Failure;
use super::super::fields::Fields;
use super::super::front::Front;
use super::super::run::{Asked, Policy, Run};
use super::super::sse::{self, Events, Frame};
use super::super::whole::Whole;
use super::errors::{self, Refused};
use super::settings::{self, N_TOP_MAX};
use super::stream::{self, Streaming};
use super::{Completed, fingerprint, finish_reason, logprobs, new_id, now, to_json};
use crate::session::Actor;

/// What the API draws where it is not said how much.
const N_TOKENS: u32 = 16;

/// Answers of one request, over all of its prompts: each is a context of its guest.
const N_ANSWERS_MAX: usize = 128;

/// Goes on with a text.
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
#[derive(Clone, Copy, Debug)]
struct Form {
    streaming: Streaming,
    has_logprobs: bool,
}

fn read(mut fields: Fields) -> Result<(Asked, Form), Failure> {
    let model: String = fields.need("model")?;
    let prompts = prompts(&mut fields, "prompt")?;
    let policy = settings::policy(&mut fields)?;
    let mut settings = settings::settings(&mut fields)?;
    let seed = settings::seed(&mut fields)?;
    let max_tokens = fields.count("max_tokens", (1, u32::MAX))?;
    settings.logprobs = fields.count("logprobs", (0, N_TOP_MAX))?;
    let echo = fields.take::<bool>("echo")?.unwrap_or_default();
    let n = settings.n.unwrap_or(1);
    fields.only("best_of", &[json!(n)], "a guest such as best-of-n chooses among answers")?;
    fields.only("suffix", &[json!("")], "models here write on from a prompt alone")?;
    let streaming = stream::read(&mut fields)?;
    fields.finish()?;
    if prompts.len() * n as usize > N_ANSWERS_MAX {
        let message = format!("{} prompts with n = {n} are more than {N_ANSWERS_MAX} answers", prompts.len());
        return Err(Failure::invalid("prompt", message));
    }
    if echo && settings.logprobs.is_some() {
        return Err(Failure::unsupported("echo", "those of a prompt are not told; logprobs go without it"));
    }
    let others = [("max_tokens", max_tokens.is_some()), ("echo", echo)];
    settings::check_text_policy(&policy, &settings, &others)?;
    let policy = with_prompt(policy, &prompts)?;
    settings.max_tokens = Some(max_tokens.unwrap_or(N_TOKENS));
    let form = Form { streaming, has_logprobs: settings.logprobs.is_some() };
    let request = Request::Complete(Complete { prompts, echo, settings });
    let name_of = |part: &str| if part == "messages" { "prompt".to_owned() } else { part.to_owned() };
    Ok((Asked { model: Some(model), seed, policy, request, name_of }, form))
}

/// A guest that takes arguments has the prompt as the last of them.
fn with_prompt(policy: Policy, prompts: &[Prompt]) -> Result<Policy, Failure> {
    match (policy, prompts) {
        (Policy::Text(name, args), [Prompt::Text(text)]) => {
            Ok(Policy::Text(name, settings::with_text(args, text)))
        }
        (Policy::Text(..), _) => {
            Err(Failure::unsupported("prompt", "a guest that trellis.args are for takes one text"))
        }
        (policy, _) => Ok(policy),
    }
}

/// A text, the tokens of one, or a list of either.
pub(super) fn prompts(fields: &mut Fields, name: &str) -> Result<Vec<Prompt>, Failure> {
    let place = fields.name_of(name);
    let read = match fields.need::<Value>(name)? {
        Value::String(text) => vec![Prompt::Text(text)],
        Value::Array(list) if list.first().is_some_and(Value::is_number) => {
            vec![Prompt::Tokens(of(Value::Array(list), &place)?)]
        }
        list => of(list, &place)?,
    };
    match read.is_empty() {
        true => Err(Failure::invalid(&place, format!("{place} is empty"))),
        false => Ok(read),
    }
}

fn of<T: serde::de::DeserializeOwned>(value: Value, place: &str) -> Result<T, Failure> {
    serde_json::from_value(value).map_err(|_| {
        Failure::invalid(place, format!("{place} is neither a text, nor tokens, nor a list of either"))
    })
}

#[derive(Serialize)]
struct CompletedChoice<'a> {
    text: &'a str,
    index: usize,
    logprobs: Option<logprobs::OfCompletion<'a>>,
    finish_reason: Option<&'static str>,
}

/// An answer as a whole.
fn whole(whole: &Whole, form: Form) -> String {
    let choices = whole.choices.iter().enumerate().map(|(index, choice)| CompletedChoice {
        text: &choice.text,
        index,
        logprobs: form.has_logprobs.then(|| logprobs::of_completion(&choice.tokens, 0)),
        finish_reason: choice.reason.map(finish_reason),
    });
    to_json(&Completed::new("cmpl-", "text_completion", whole, choices.collect()))
}

/// An answer in chunks.
struct Chunks {
    form: Form,
    id: String,
    created: u64,
    model: String,
    /// Characters of each choice that were told.
    n_told: Vec<usize>,
}

impl Chunks {
    fn new(form: Form) -> Self {
        let (id, created, model) = (new_id("cmpl-"), now(), String::new());
        Self { form, id, created, model, n_told: vec![0; N_ANSWERS_MAX] }
    }

    fn frame(&self, choices: &Value, usage: Option<Usage>) -> Frame {
        let mut chunk = json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint(),
            "choices": choices,
        });
        if self.form.streaming == Streaming::WithUsage {
            chunk["usage"] = usage.map(super::usage).unwrap_or_default();
        }
        Frame::data(chunk)
    }
}

impl Events for Chunks {
    fn begin(&mut self, model: &str, _: u32) -> Vec<Frame> {
        model.clone_into(&mut self.model);
        Vec::new()
    }

    fn take(&mut self, reply: Reply) -> Vec<Frame> {
        match reply {
            Reply::Piece { choice, text, tokens } => {
                let begin = self.n_told.get(choice).copied().unwrap_or(0);
                if let Some(n) = self.n_told.get_mut(choice) {
                    *n += text.chars().count();
                }
                let logprobs = self.form.has_logprobs.then(|| logprobs::of_completion(&tokens, begin));
                let choices =
                    json!([{ "text": text, "index": choice, "logprobs": logprobs, "finish_reason": null }]);
                vec![self.frame(&choices, None)]
            }
            Reply::Finished { choice, reason, .. } => {
                let reason = finish_reason(reason);
                let choices =
                    json!([{ "text": "", "index": choice, "logprobs": null, "finish_reason": reason }]);
                vec![self.frame(&choices, None)]
            }
            Reply::Ended(usage) => {
                let with_usage = self.form.streaming == Streaming::WithUsage;
                let last = with_usage.then(|| self.frame(&json!([]), Some(usage)));
                last.into_iter().chain([Frame::data(stream::DONE)]).collect()
            }
            _ => Vec::new(),
        }
    }

    fn fail(&mut self, failure: &Failure) -> Vec<Frame> {
        vec![Frame::data(errors::body(failure))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::of(value, "").expect("an object")
    }

    #[test]
    fn prompts_are_texts_or_tokens() {
        for (value, n) in
            [(json!("a"), 1), (json!(["a", "b"]), 2), (json!([1, 2]), 1), (json!([[1], [2, 3]]), 2)]
        {
            let read = prompts(&mut fields(json!({ "prompt": value })), "prompt").expect("prompts");
            assert_eq!(read.len(), n, "{value}");
        }
        for value in [json!([]), json!(7), json!([1, "a"])] {
            let error = prompts(&mut fields(json!({ "prompt": value })), "prompt").expect_err("none");
            assert_eq!(error.param.as_deref(), Some("prompt"));
        }
    }

    #[test]
    fn a_prompt_is_no_option_of_a_guest_with_arguments() {
        for (args, expected) in [
            (json!(["--n", "4"]), vec!["--n", "4", "--", "--n=9"]),
            (json!(["--", "Say:"]), vec!["--", "Say:", "--n=9"]),
        ] {
            let guest = json!({ "guest": "best-of-n", "args": args });
            let body = json!({ "model": "tiny", "prompt": "--n=9", "trellis": guest });
            let (asked, _) = read(fields(body)).expect("in order");
            let expected = expected.into_iter().map(str::to_owned).collect();
            assert_eq!(asked.policy, Policy::Text("best-of-n".to_owned(), expected));
        }
    }

    #[test]
    fn what_is_not_done_is_named() {
        let body = |name: &str, value: Value| {
            let mut body = json!({ "model": "tiny", "prompt": "a" });
            body[name] = value;
            fields(body)
        };
        for (name, value) in
            [("suffix", json!("x")), ("best_of", json!(3)), ("n", json!(33)), ("tools", json!([{}]))]
        {
            let error = read(body(name, value)).expect_err(name);
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(name)));
        }
        let (asked, form) = read(body("seed", json!(-1))).expect("in order");
        assert_eq!((asked.seed, form.streaming), (Some(u64::MAX), Streaming::No));
    }
}
