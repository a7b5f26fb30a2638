//! Log-probabilities. They are written from what the guest has said of its tokens: a tree of them would take many times as much.

use std::borrow::Cow;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::super::exchange::Token;

/// A list of what is made of each token as it is written.
struct Each<'a, T>(&'a [Token], fn(&'a Token) -> T);

impl<T: Serialize> Serialize for Each<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(self.1))
    }
}

/// Those of a choice of a chat completion.
#[derive(Serialize)]
pub(super) struct OfChat<'a> {
    content: Each<'a, OfToken<'a>>,
    refusal: (),
}

#[derive(Serialize)]
struct OfToken<'a> {
    #[serde(flatten)]
    one: One<'a>,
    top_logprobs: Vec<One<'a>>,
}

#[derive(Serialize)]
struct One<'a> {
    token: Cow<'a, str>,
    logprob: f32,
    bytes: &'a [u8],
}

impl<'a> One<'a> {
    fn new(bytes: &'a [u8], logprob: f32) -> Self {
        Self { token: text(bytes), logprob, bytes }
    }
}

fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

fn of_token(token: &Token) -> OfToken<'_> {
    let top = token.top.iter().map(|other| One::new(&other.bytes, other.logprob));
    OfToken { one: One::new(&token.bytes, token.logprob), top_logprobs: top.collect() }
}

/// Those of a chat completion.
pub(super) fn of_chat(tokens: &[Token]) -> OfChat<'_> {
    OfChat { content: Each(tokens, of_token), refusal: () }
}

/// Those of a response.
pub(super) fn of_response(tokens: &[Token]) -> Value {
    json!(Each(tokens, of_token))
}

/// Those of a choice of a completion.
#[derive(Serialize)]
pub(super) struct OfCompletion<'a> {
    tokens: Each<'a, Cow<'a, str>>,
    token_logprobs: Each<'a, f32>,
    top_logprobs: Each<'a, Map<String, Value>>,
    text_offset: Vec<usize>,
}

/// Those of a completion, of which so many characters were told before.
pub(super) fn of_completion(tokens: &[Token], n_told: usize) -> OfCompletion<'_> {
    let mut offset = n_told;
    let offsets = tokens.iter().map(|token| {
        let at = offset;
        offset += text(&token.bytes).chars().count();
        at
    });
    let text_offset = offsets.collect();
    let top = |token: &Token| {
        let others = token.top.iter().map(|other| (text(&other.bytes).into_owned(), json!(other.logprob)));
        others.collect()
    };
    OfCompletion {
        tokens: Each(tokens, |token| text(&token.bytes)),
        token_logprobs: Each(tokens, |token| token.logprob),
        top_logprobs: Each(tokens, top),
        text_offset,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::exchange::Other;
    use super::*;

    #[test]
    fn each_api_has_its_own_form_of_them() {
        let other = Other { bytes: b"4".to_vec(), logprob: -2.0 };
        let token = |bytes: &[u8]| Token { bytes: bytes.to_vec(), logprob: -0.5, top: vec![other.clone()] };
        let tokens = [token("é".as_bytes()), token(&[0xe2, 0x82])];
        let chat = json!(of_chat(&tokens));
        assert_eq!((&chat["refusal"], of_response(&tokens)), (&Value::Null, chat["content"].clone()));
        assert_eq!(chat["content"][1]["bytes"], json!([0xe2, 0x82]));
        assert_eq!(
            chat["content"][0]["top_logprobs"][0],
            json!({ "token": "4", "logprob": -2.0, "bytes": [52] })
        );
        let completion = json!(of_completion(&tokens, 3));
        assert_eq!((&completion["tokens"][0], &completion["text_offset"]), (&json!("é"), &json!([3, 4])));
        assert_eq!(completion["top_logprobs"][1], json!({ "4": -2.0 }));
    }
}
