//! Requests whose fields ask for much, or for what there is not.

use serde_json::{Value, json};

use super::{CHAT, COMPLETIONS, EMBEDDINGS, chat, with};
use crate::attacks::clients::clients;
use crate::attacks::{Ending, Site};

/// Tokens of a prompt that leaves little of a context.
const N_PROMPT_TOKENS: usize = 900;

/// A request of this body; how it is answered.
async fn post(site: &Site, path: &str, body: &Value) -> std::io::Result<Ending> {
    let front = site.front()?;
    front.ask(&front.post(path, body.to_string().as_bytes())).await
}

/// A chat with each of these in it; the last answer, or the first that is not 400.
async fn chats_with(site: &Site, all: impl IntoIterator<Item = Value> + Send) -> std::io::Result<Ending> {
    let all: Vec<Value> = all.into_iter().collect();
    let mut last = Ending::well();
    for more in all {
        last = post(site, CHAT, &with(&chat("Hello"), more.clone())).await?;
        if last.code != "400" {
            let text = more.to_string();
            return Ok(Ending { message: format!("{} of {text:.200}", last.message), ..last });
        }
    }
    Ok(last)
}

/// The form of an answer that this schema has.
fn answer_as(schema: &Value) -> Value {
    json!({ "max_tokens": 16, "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } } })
}

clients! {
    /// As many choices as there may be, each to the end of its context.
    most_choices(site) {
        let prompt = vec![9; N_PROMPT_TOKENS];
        let body = json!({ "model": "tiny", "prompt": prompt, "n": 32, "max_tokens": u32::MAX, "logprobs": 20 });
        post(&site, COMPLETIONS, &body).await
    }
    numbers_beyond(site) {
        let all = [
            json!({ "n": 33 }),
            json!({ "n": 0 }),
            json!({ "n": -1 }),
            json!({ "n": 1.5 }),
            json!({ "n": 1e99 }),
            json!({ "n": u64::MAX }),
            json!({ "max_tokens": 0 }),
            json!({ "max_tokens": 1_u64 << 32 }),
            json!({ "seed": u64::MAX }),
            json!({ "temperature": 1e30 }),
            json!({ "temperature": -0.1 }),
            json!({ "top_p": 2 }),
            json!({ "min_p": -1 }),
            json!({ "frequency_penalty": 1e300 }),
            json!({ "repetition_penalty": 0 }),
            json!({ "logprobs": true, "top_logprobs": 21 }),
            json!({ "logit_bias": { "x": 1 } }),
            json!({ "logit_bias": { "4294967296": 1 } }),
            json!({ "logit_bias": { "4294967295": 1 } }),
            json!({ "logit_bias": { "7": 1e30 } }),
            json!({ "stop": ["a", "b", "c", "d", "e"] }),
            json!({ "stop": [""] }),
            json!({ "stop": 7 }),
            json!({ "messages": [] }),
            json!({ "messages": [{ "role": "system\u{0}", "content": "x" }] }),
            json!({ "reasoning_effort": "x".repeat(100_000) }),
            json!({ "teapot": true }),
        ];
        chats_with(&site, all).await
    }
    stops_of_200_kb(site) {
        let stops: Vec<String> = ["a", "b", "c", "d"].map(|text| text.repeat(200_000)).to_vec();
        post(&site, CHAT, &with(&chat("Hello"), json!({ "stop": stops, "max_tokens": 64 }))).await
    }
    biases_of_all(site) {
        let biases: serde_json::Map<String, Value> = (0..4_096).map(|token| (token.to_string(), json!(-1))).collect();
        post(&site, CHAT, &with(&chat("Hello"), json!({ "logit_bias": biases }))).await
    }
    /// More states than a lexer may have.
    schema_of_patterns(site) {
        let patterns: serde_json::Map<String, Value> =
            (0..1_000).map(|i| (format!("^[a-z]*(a|b)[a-z]{{9}}{i}x$"), json!({}))).collect();
        chats_with(&site, [answer_as(&json!({ "type": "object", "patternProperties": patterns }))]).await
    }
    schemas_of_nothing(site) {
        let all = [
            json!({ "type": "teapot" }),
            json!({ "$ref": "#/nowhere" }),
            json!({ "$ref": "https://example.com/schema.json" }),
            json!({ "type": "string", "pattern": "(" }),
            json!({ "type": "string", "pattern": "(a{1000}){1000}" }),
            json!({ "type": "array", "minItems": 2, "maxItems": 1 }),
            json!({ "type": "integer", "minimum": 2, "maximum": 1 }),
            json!({ "enum": [] }),
            json!({ "unheardOf": true }),
        ];
        chats_with(&site, all.map(|schema| answer_as(&schema))).await
    }
    schema_deep(site) {
        let mut schema = json!({});
        for _ in 0..100 {
            schema = json!({ "type": "array", "items": schema });
        }
        post(&site, CHAT, &with(&chat("Hello"), answer_as(&schema))).await
    }
    /// A conversation far longer than a context.
    messages_of_20000(site) {
        let messages = vec![json!({ "role": "user", "content": "x" }); 20_000];
        post(&site, CHAT, &with(&chat("Hello"), json!({ "messages": messages }))).await
    }
    tools_of_1000(site) {
        let tool = |i: usize| {
            let parameters = json!({ "type": "object", "properties": { "a": { "type": "string" } } });
            json!({ "type": "function", "function": { "name": format!("f{i}"), "parameters": parameters } })
        };
        let tools: Vec<Value> = (0..1_000).map(tool).collect();
        post(&site, CHAT, &with(&chat("Hello"), json!({ "tools": tools }))).await
    }
    prompts_of_129(site) {
        let prompts = vec!["Hello"; 129];
        post(&site, COMPLETIONS, &json!({ "model": "tiny", "prompt": prompts })).await
    }
    /// As many answers at once as there may be.
    prompts_of_128(site) {
        let prompts = vec!["Once upon a time"; 128];
        post(&site, COMPLETIONS, &json!({ "model": "tiny", "prompt": prompts, "max_tokens": 16 })).await
    }
    embeddings_of_500(site) {
        let inputs = vec!["Once upon a time there was a fox."; 500];
        post(&site, EMBEDDINGS, &json!({ "model": "tiny", "input": inputs })).await
    }
    model_of_900_kb(site) {
        post(&site, CHAT, &with(&chat("Hello"), json!({ "model": "x".repeat(900_000) }))).await
    }
}
