//! Who is let in, and what becomes of a guest whose client goes away.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use trellis_tests::daemons::{PATIENCE, output};

use super::client::Fronted;
use super::{question, with};

/// The guests that run.
fn guests(front: &Fronted) -> Vec<Value> {
    let told = output(&mut front.served.trellis(&["ps", "--json"]));
    let told: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    let listed = told.get("guests").cloned().unwrap_or(told);
    listed.as_array().expect("a list").clone()
}

#[test]
fn on_a_port_nobody_is_answered_without_a_token() {
    let front = Fronted::on_port();
    let path = "/v1/models";
    let error = front.request("GET", path, "", "").error(401);
    assert_eq!((&error["type"], &error["code"]), (&json!("authentication_error"), &json!("invalid_api_key")));
    let wrong = format!("Authorization: Bearer {}\r\n", "0".repeat(64));
    front.request("GET", path, &wrong, "").error(401);
    let right = format!("Authorization: Bearer {}\r\n", front.token());
    assert_eq!(front.request("GET", path, &right, "").json()["data"][0]["id"], "tiny");
    let other = format!("x-api-key: {}\r\n", front.token());
    assert_eq!(front.request("GET", path, &other, "").status, 200);
    let asked = question("What is 37 + 48?").to_string();
    let answer = front.request("POST", "/v1/chat/completions", &right, &asked).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "85");
}

#[test]
fn on_a_port_a_user_has_no_more_places_than_its_own() {
    let front = Fronted::on_port_with(|config| config.http.n_connections = 1);
    let token = format!("Authorization: Bearer {}\r\n", front.token());
    let mut kept = front.connect();
    write!(kept, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{token}\r\n").expect("it reads");
    let mut begun = [0; 16];
    kept.read_exact(&mut begun).expect("it answers");
    assert!(begun.starts_with(b"HTTP/1.1 200"), "{begun:?}");
    let refused = front.request("GET", "/v1/models", &token, "");
    assert_eq!(refused.error(429)["code"], "too_many_connections");
    front.request("GET", "/v1/models", "", "").error(401);
    drop(kept);
    let since = Instant::now();
    while front.request("GET", "/v1/models", &token, "").status != 200 {
        assert!(since.elapsed() < PATIENCE, "its place is not given back");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_a_body_comes_to_is_on_its_users_account() {
    let front = Fronted::on_socket_with(|config| config.budgets.user.host_bytes = Some(96 << 20));
    let many = format!("[{}0]", r#"{"":0},"#.repeat(140_000));
    let asked = with(question("Hello"), json!({ "max_tokens": 1 })).to_string();
    let body = asked.replacen('{', &format!(r#"{{"metadata":{many},"#), 1);
    let refused = front.request("POST", "/v1/chat/completions", "", &body);
    let error = refused.error(429);
    assert_eq!(error["code"], "budget_exceeded", "{error}");
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    assert_eq!(front.request("POST", "/v1/chat/completions", "", &asked).status, 200, "it is given back");
}

#[test]
fn a_client_that_goes_away_ends_its_guest() {
    let front = Fronted::on_socket();
    let endless = json!({ "stream": true, "temperature": 1, "max_tokens": 900, "logit_bias": {} });
    let asked = with(question("Tell me a long story."), endless).to_string();
    let mut stream = front.ask("POST", "/v1/chat/completions", "", &asked);
    let mut begun = [0; 16];
    stream.read_exact(&mut begun).expect("it answers");
    assert!(begun.starts_with(b"HTTP/1.1 200"), "{begun:?}");
    drop(stream);
    ends_unfinished(&front);
}

#[test]
fn a_client_that_goes_away_with_more_on_the_way_ends_its_guest() {
    for front in [Fronted::on_socket(), Fronted::on_port()] {
        let asked = with(question("Tell me a long story."), json!({ "temperature": 1, "max_tokens": 900 }));
        let (asked, token) = (asked.to_string(), front.token_header());
        let mut stream = front.connect();
        let n_bytes = asked.len();
        // Nobody reads the last byte before the answer is over.
        write!(
            stream,
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{token}Content-Length: {n_bytes}\r\n\r\n{asked}G"
        )
        .expect("it reads");
        until("it has a guest", || !guests(&front).is_empty());
        drop(stream);
        ends_unfinished(&front);
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// That the guest ends, and has not said all that was asked of it.
fn ends_unfinished(front: &Fronted) {
    until("its guest ends", || guests(front).is_empty());
    let metrics = output(&mut front.served.trellis(&["metrics"]));
    let metrics = String::from_utf8(metrics.stdout).expect("it is text");
    let finished =
        metrics.lines().find(|line| line.starts_with("trellis_guests_ended_total{reason=\"finished\"}"));
    assert!(finished.is_none_or(|line| line.ends_with(" 0")), "it was over before: {finished:?}");
}
