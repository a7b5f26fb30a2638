//! Log-probabilities.

use serde_json::{Value, json};

use super::super::exchange::Token;

/// Those of a chat completion.
pub(super) fn of_chat(tokens: &[Token]) -> Value {
    let one = |bytes: &[u8], logprob: f32| json!({ "token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes });
    let content = tokens.iter().map(|token| {
        let mut content = one(&token.bytes, token.logprob);
        content["top_logprobs"] = token.top.iter().map(|other| one(&other.bytes, other.logprob)).collect();
        content
    });
    json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
}

/// Those of a completion, of which so many characters were told before.
pub(super) fn of_completion(tokens: &[Token], n_told: usize) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut offset = n_told;
    let offsets = tokens.iter().map(|token| {
        let at = offset;
        offset += text(&token.bytes).chars().count();
        at
    });
    let offsets: Vec<usize> = offsets.collect();
    let tops = tokens.iter().map(|token| {
        let others = token.top.iter().map(|other| (text(&other.bytes), json!(other.logprob)));
        Value::Object(others.collect())
    });
    json!({
        "tokens": tokens.iter().map(|token| text(&token.bytes)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
        "top_logprobs": tops.collect::<Vec<_>>(),
        "text_offset": offsets,
    })
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
        let chat = of_chat(&tokens);
        assert_eq!(chat["content"][1]["bytes"], json!([0xe2, 0x82]));
        assert_eq!(
            chat["content"][0]["top_logprobs"][0],
            json!({ "token": "4", "logprob": -2.0, "bytes": [52] })
        );
        let completion = of_completion(&tokens, 3);
        assert_eq!((&completion["tokens"][0], &completion["text_offset"]), (&json!("é"), &json!([3, 4])));
        assert_eq!(completion["top_logprobs"][1], json!({ "4": -2.0 }));
    }
}
