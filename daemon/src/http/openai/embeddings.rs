//! `/v1/embeddings`.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::exchange::Request;
use super::super::failure::Failure;
use super::super::fields::Fields;
use super::super::front::Front;
use super::super::run::{Asked, Policy, Run};
use super::super::whole::Whole;
use super::completions::prompts;
use super::errors::Refused;
use super::to_json;
use crate::session::Actor;

/// Inputs of one request, which is what the API takes.
const N_INPUTS_MAX: usize = 2048;

/// Makes vectors of texts.
pub(in crate::http) async fn answer(
    State(front): State<Arc<Front>>,
    Extension(actor): Extension<Actor>,
    body: Body,
) -> Result<Response, Refused> {
    let ((asked, form), share) = front.read(actor, body, read).await?;
    let (whole, share) = Whole::of(Run::start(&front, actor, asked, share).await?, 1).await?;
    Ok(share.answer(move || shown(&whole, form)).await)
}

/// How a vector is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Float,
    /// The bytes of its numbers, f32, little end first.
    Base64,
}

fn read(mut fields: Fields) -> Result<(Asked, Form), Failure> {
    let model: String = fields.need("model")?;
    let inputs = prompts(&mut fields, "input")?;
    if inputs.len() > N_INPUTS_MAX {
        let message = format!("input has {} texts, expected at most {N_INPUTS_MAX}", inputs.len());
        return Err(Failure::invalid("input", message));
    }
    let form = match fields.take::<String>("encoding_format")?.as_deref() {
        None | Some("float") => Form::Float,
        Some("base64") => Form::Base64,
        Some(other) => {
            let message = format!("encoding_format is {other:?}, expected float or base64");
            return Err(Failure::invalid("encoding_format", message));
        }
    };
    fields.only("dimensions", &[], "vectors have the length of the model's hidden states")?;
    fields.pass_over(&["user"]);
    fields.finish()?;
    let request = Request::Embed { inputs };
    let name_of = |part: &str| match part {
        "messages" | "prompt" => "input".to_owned(),
        part => part.to_owned(),
    };
    Ok((Asked { model: Some(model), seed: None, policy: Policy::Own, request, name_of }, form))
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Embedding<'a>>,
    model: &'a str,
    usage: Value,
}

#[derive(Serialize)]
struct Embedding<'a> {
    object: &'static str,
    index: usize,
    embedding: Vector<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector<'a> {
    Float(&'a [f32]),
    Base64(String),
}

fn shown(whole: &Whole, form: Form) -> String {
    let vector = |vector: &'_ [f32]| {
        let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
        base64::encode(bytes)
    };
    let data = whole.vectors.iter().enumerate().map(|(index, one)| Embedding {
        object: "embedding",
        index,
        embedding: match form {
            Form::Float => Vector::Float(one),
            Form::Base64 => Vector::Base64(vector(one)),
        },
    });
    let n_tokens = whole.usage.prompt_tokens;
    let usage = json!({ "prompt_tokens": n_tokens, "total_tokens": n_tokens });
    to_json(&List { object: "list", data: data.collect(), model: &whole.model, usage })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_come_as_numbers_or_as_their_bytes() {
        let whole = Whole { vectors: vec![vec![1.0, -2.0]], ..Whole::default() };
        let shown = |form| serde_json::from_str::<Value>(&shown(&whole, form)).expect("JSON");
        assert_eq!(shown(Form::Float)["data"][0]["embedding"], json!([1.0, -2.0]));
        assert_eq!(shown(Form::Base64)["data"][0]["embedding"], "AACAPwAAAMA=");
        let of = |value: Value| read(Fields::of(value, "").expect("an object"));
        let (asked, form) =
            of(json!({ "model": "tiny", "input": "a", "encoding_format": "base64" })).expect("all");
        assert_eq!((form, (asked.name_of)("prompt").as_str()), (Form::Base64, "input"));
        let error = of(json!({ "model": "tiny", "input": "a", "dimensions": 8 })).expect_err("not done");
        assert_eq!(error.param.as_deref(), Some("dimensions"));
    }
}
