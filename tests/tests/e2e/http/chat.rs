//! Chat completions, completions, embeddings and models.

use serde_json::{Value, json};

use super::client::Fronted;
use super::{question, with};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn a_conversation_is_answered_as_a_whole_and_in_chunks() {
    let front = Fronted::on_socket();
    let sum = question("What is 37 + 48?");
    let whole = front.post(CHAT, &sum).json();
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!("tiny")));
    let choice = &whole["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("85"), &json!("stop")));
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 3, "{usage}");
    assert_eq!(usage["total_tokens"], usage["prompt_tokens"].as_u64().expect("a number") + 3);

    let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let events = front.post(CHAT, &with(sum.clone(), options)).events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|data| serde_json::from_str(data).expect("JSON")).collect();
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "85");
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let last = chunks.last().expect("the usage");
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(3)));

    let two = front.post(CHAT, &with(sum.clone(), json!({ "n": 2, "stop": "5" }))).json();
    let texts: Vec<&Value> =
        two["choices"].as_array().expect("a list").iter().map(|one| &one["message"]["content"]).collect();
    assert_eq!(texts, ["8", "8"]);
    let cut = front.post(CHAT, &with(sum, json!({ "max_tokens": 1 }))).json();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
}

#[test]
fn a_seed_says_what_is_drawn_and_log_probabilities_how_sure_it_was() {
    let front = Fronted::on_socket();
    let story = |seed: i64| {
        let drawn = json!({ "temperature": 1.5, "seed": seed, "max_tokens": 24 });
        let answer = front.post(CHAT, &with(question("Tell me a short story."), drawn)).json();
        answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned()
    };
    assert_eq!(story(7), story(7));
    assert_ne!(story(7), story(-8));

    let told = json!({ "logprobs": true, "top_logprobs": 2 });
    let answer = front.post(CHAT, &with(question("What is 37 + 48?"), told)).json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().expect("a list");
    let tokens: Vec<&Value> = content.iter().map(|one| &one["token"]).collect();
    assert_eq!(tokens, ["8", "5"]);
    for one in content {
        assert!(one["logprob"].as_f64().is_some_and(|logprob| (-1.0..=0.0).contains(&logprob)), "{one}");
        assert_eq!(one["top_logprobs"].as_array().map(Vec::len), Some(2), "{one}");
        assert_eq!(one["top_logprobs"][0]["token"], one["token"], "it was the most probable");
    }
}

#[test]
fn an_answer_keeps_to_a_schema_and_calls_a_tool() {
    let front = Fronted::on_socket();
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age"],
        "properties": { "name": { "type": "string", "maxLength": 20 }, "age": { "type": "integer", "minimum": 0, "maximum": 120 } },
    });
    let format = |schema: &Value| {
        let named = json!({ "name": "person", "strict": true, "schema": schema });
        json!({ "response_format": { "type": "json_schema", "json_schema": named } })
    };
    let asked = question("Give me JSON: Ada, a pilot from Oslo, is 36.");
    let hot = json!({ "temperature": 1.5, "seed": 1 });
    let answer = front.post(CHAT, &with(with(asked.clone(), format(&schema)), hot)).json();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    let person: Value = serde_json::from_str(text).expect("JSON");
    assert!(person["name"].is_string() && person["age"].is_i64(), "{person}");
    assert_eq!(person.as_object().map(serde_json::Map::len), Some(2));

    let error = front.post(CHAT, &with(asked, format(&json!({ "not": {} })))).error(400);
    assert_eq!(
        (&error["param"], &error["type"]),
        (&json!("response_format"), &json!("invalid_request_error"))
    );
    assert!(error["message"].as_str().is_some_and(|why| why.contains("/not")), "{error}");

    let tools = json!({
        "tools": [{ "type": "function", "function": { "name": "calculator", "strict": true, "parameters": {
            "type": "object", "properties": { "expression": { "type": "string", "maxLength": 12 } },
            "required": ["expression"], "additionalProperties": false,
        } } }],
        "tool_choice": "required",
    });
    let asked = with(question("Use the calculator tool to work out 12 * 7."), tools);
    let answer = front.post(CHAT, &asked).json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("calculator")));
    let arguments = call["function"]["arguments"].as_str().expect("a text");
    let arguments: Value = serde_json::from_str(arguments).expect("JSON");
    assert!(arguments["expression"].is_string(), "{arguments}");
}

#[test]
fn a_mistake_has_the_field_that_it_is_about() {
    let front = Fronted::on_socket();
    let sum = question("What is 37 + 48?");
    for (more, param) in [
        (json!({ "temperature": 3 }), "temperature"),
        (json!({ "frobnicate": true }), "frobnicate"),
        (json!({ "audio": {} }), "audio"),
        (json!({ "logit_bias": { "99999999": 1 } }), "logit_bias"),
        (json!({ "messages": [] }), "messages"),
    ] {
        let error = front.post(CHAT, &with(sum.clone(), more)).error(400);
        assert_eq!(
            (&error["param"], &error["type"]),
            (&json!(param), &json!("invalid_request_error")),
            "{error}"
        );
    }
    let error = front.post(CHAT, &with(sum.clone(), json!({ "model": "gpt-4o" }))).error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    let long = "word ".repeat(2000);
    let error = front.post(CHAT, &question(&long)).error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    let guest = json!({ "trellis": { "guest": "no-such-guest" } });
    assert_eq!(front.post(CHAT, &with(sum, guest)).error(404)["param"], "trellis.guest");
    front.request("POST", CHAT, "", "{").error(400);
    front.request("GET", CHAT, "", "").error(405);
    front.request("GET", "/v1/nothing", "", "").error(404);
    front.request("POST", CHAT, "", &" ".repeat((1 << 20) + 1)).error(413);
}

#[test]
fn a_request_names_the_guest_that_decodes() {
    let front = Fronted::on_socket();
    let sum = question("What is 37 + 48?");
    let own = json!({ "trellis": { "guest": "http-chat" } });
    let answer = front.post(CHAT, &with(sum, own)).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "85");
    let started = json!({
        "model": "tiny", "messages": [{ "role": "user", "content": "What is 37 + 48?" }],
        "trellis": { "guest": "chat", "args": ["--max-tokens", "20"] },
    });
    let answer = front.post(CHAT, &started).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "85\n");
    let error = front.post(CHAT, &with(started, json!({ "top_p": 0.5 }))).error(400);
    assert_eq!(error["param"], "top_p");
}

#[test]
fn texts_are_gone_on_with_and_become_vectors_and_models_are_listed() {
    let front = Fronted::on_socket();
    let prompt = json!({ "model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6, "logprobs": 1 });
    let whole = front.post("/v1/completions", &prompt).json();
    let choice = &whole["choices"][0];
    assert_eq!((&whole["object"], &choice["finish_reason"]), (&json!("text_completion"), &json!("length")));
    let text = choice["text"].as_str().expect("a text");
    let tokens: String =
        choice["logprobs"]["tokens"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert_eq!((text, choice["logprobs"]["text_offset"][0].as_u64()), (tokens.as_str(), Some(0)));
    let echoed = with(prompt.clone(), json!({ "echo": true, "logprobs": null, "stream": true }));
    let events = front.post("/v1/completions", &echoed).events();
    let told =
        events[..events.len() - 1].iter().map(|data| serde_json::from_str::<Value>(data).expect("JSON"));
    let told: String =
        told.filter_map(|chunk| Some(chunk["choices"][0]["text"].as_str()?.to_owned())).collect();
    assert_eq!(told, format!("Once upon a time{text}"));

    let texts = ["a cat", "a dog", "a cat"];
    let answer = front.post("/v1/embeddings", &json!({ "model": "tiny", "input": texts })).json();
    let vectors: Vec<Vec<f64>> = (0..3)
        .map(|idx| serde_json::from_value(answer["data"][idx]["embedding"].clone()).expect("numbers"))
        .collect();
    let length = vectors[0].iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!((length - 1.0).abs() < 1e-3, "{length}");
    assert!(vectors[0] == vectors[2] && vectors[0] != vectors[1]);

    let models = front.request("GET", "/v1/models", "", "").json();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(front.request("GET", "/v1/models/tiny", "", "").json()["object"], "model");
    assert_eq!(front.request("GET", "/v1/models/none", "", "").error(404)["code"], "model_not_found");
}
