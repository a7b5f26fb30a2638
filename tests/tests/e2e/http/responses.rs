//! Responses, whose names are those of saved contexts.

use serde_json::{Value, json};

use super::client::Fronted;
use super::with;

const RESPONSES: &str = "/v1/responses";

fn asked(text: &str) -> Value {
    json!({ "model": "tiny", "temperature": 0, "input": text })
}

#[test]
fn a_response_goes_on_with_another_and_computes_none_of_its_tokens() {
    let front = Fronted::on_socket();
    let first = front.post(RESPONSES, &asked("What is 37 + 48?")).json();
    assert_eq!((&first["object"], &first["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(first["output"][0]["content"][0]["text"], "85");
    let id = first["id"].as_str().expect("a name");
    let n_held = first["usage"]["total_tokens"].as_u64().expect("a number");

    let previous = json!({ "previous_response_id": id });
    let second = front.post(RESPONSES, &with(asked("What is 3 + 4?"), previous.clone())).json();
    assert_eq!(second["output"][0]["content"][0]["text"], "7");
    let usage = &second["usage"];
    assert_eq!(usage["input_tokens_details"]["cached_tokens"].as_u64(), Some(n_held), "{usage}");
    assert!(usage["input_tokens"].as_u64().is_some_and(|n| n > n_held), "{usage}");

    // What it says is what the whole conversation says.
    let conversation = json!([
        { "role": "user", "content": "What is 37 + 48?" },
        { "role": "assistant", "content": "85" },
        { "role": "user", "content": "What is 3 + 4?" },
    ]);
    let whole =
        front.post(RESPONSES, &with(asked(""), json!({ "input": conversation, "store": false }))).json();
    assert_eq!(whole["usage"]["input_tokens"], usage["input_tokens"]);

    let path = format!("{RESPONSES}/{id}");
    assert_eq!(front.request("GET", &path, "", "").error(404)["code"], "not_kept");
    assert_eq!(front.request("DELETE", &path, "", "").json()["deleted"], true);
    let error = front.post(RESPONSES, &with(asked("And 1 + 1?"), previous)).error(404);
    assert_eq!(error["param"], "previous_response_id");
    assert_eq!(front.request("DELETE", &path, "", "").error(404)["param"], "response_id");
    let unkept = whole["id"].as_str().expect("a name");
    let unkept = json!({ "previous_response_id": unkept });
    front.post(RESPONSES, &with(asked("And?"), unkept)).error(404);
}

#[test]
fn a_response_comes_as_events() {
    let front = Fronted::on_socket();
    let events = front.post(RESPONSES, &with(asked("What is 37 + 48?"), json!({ "stream": true }))).events();
    let events: Vec<Value> = events.iter().map(|data| serde_json::from_str(data).expect("JSON")).collect();
    let kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    assert_eq!((kinds[0], kinds[1]), ("response.created", "response.in_progress"));
    assert_eq!(kinds.last(), Some(&"response.completed"));
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let text: String = deltas.filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(text, "85");
    let last = &events.last().expect("it ends")["response"];
    assert_eq!(last["output"][0]["content"][0]["text"], "85");
    assert_eq!(last["usage"]["output_tokens"], 3);
}
