//! The guest by itself.

use serde_json::{Value, json};
use trellis_client::Program;
use trellis_tests::daemons::{self, Ended, with};
use trellis_tests::guests;

use crate::guests::daemon;

async fn ask(name: &str, request: &Value) -> Ended {
    let client = daemon().connect().await.expect("connected");
    let guest = client.start(Program::wasm(guests::example(name)), with(&[])).await.expect("connected");
    let text = request.to_string();
    let (begin, end) = text.split_at(text.len() / 2);
    let sender = guest.sender();
    let talk = async {
        for piece in [begin, end] {
            sender.send(piece).await.expect("the guest listens");
        }
        sender.end_messages().await.expect("the guest listens");
    };
    let (ended, ()) = tokio::join!(daemons::collect(guest), talk);
    ended.well()
}

/// A request comes in pieces and is answered, or refused with the part that is wrong.
pub(crate) async fn http_chat(name: &str) {
    let chat = |more: Value| {
        let mut chat = json!({
            "messages": [{ "role": "user", "content": "What is 37 + 48?" }], "settings": { "temperature": 0.0 },
        });
        for (name, value) in more.as_object().expect("an object") {
            chat[name] = value.clone();
        }
        json!({ "chat": chat })
    };
    let told = ask(name, &chat(json!({}))).await.json;
    assert_eq!(told[0]["begun"]["model"], "tiny");
    let text: String = told.iter().filter_map(|reply| reply["piece"]["text"].as_str()).collect();
    assert_eq!(text, "85");
    assert_eq!(told.last().expect("it ends")["ended"]["completion_tokens"], 3);

    let thought =
        ask(name, &chat(json!({ "thinking_budget": 8, "settings": { "max_tokens": 12 } }))).await.json;
    let usage = &thought.last().expect("it ends")["ended"];
    assert!(usage["reasoning_tokens"].as_u64().is_some_and(|n| (1..=8).contains(&n)), "{usage}");
    assert!(usage["completion_tokens"].as_u64().is_some_and(|n| n <= 12), "{usage}");

    let refused = ask(name, &chat(json!({ "previous": "nothing of this name" }))).await.json;
    assert_eq!(
        (&refused[0]["refused"]["kind"], &refused[0]["refused"]["param"]),
        (&json!("not_found"), &json!("previous"))
    );
    let refused = ask(name, &json!({ "sing": {} })).await.json;
    assert_eq!(refused[0]["refused"]["param"], "request");
}
