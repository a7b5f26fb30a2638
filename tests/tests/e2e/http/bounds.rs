//! What requests are held to: places, time, memory, and the end of the daemon.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use trellis_tests::daemons::PATIENCE;

use super::client::{Answer, Connection, Fronted};
use super::door::{ends_unfinished, guests, until};
use super::{question, with};

const CHAT: &str = "/v1/chat/completions";

/// Longer than anything here takes.
const LONG_MS: u64 = 600_000;

/// A request that is answered by the guest of the tests, which does what its arguments say.
fn by_hostile(args: &[&str], more: Value) -> Value {
    let trellis = json!({ "trellis": { "guest": "hostile", "args": args } });
    with(
        with(json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hello" }] }), trellis),
        more,
    )
}

/// Has a guest wait for ever, until the connection is dropped.
fn occupied(front: &Fronted) -> Box<dyn std::io::Read> {
    let asked = by_hostile(&["receive-and-sleep"], json!({ "stream": true })).to_string();
    let stream = front.ask("POST", CHAT, &front.token_header(), &asked);
    until("it has a guest", || !guests(front).is_empty());
    stream
}

/// That a client may ask again soon.
fn may_retry(answer: &Answer) -> bool {
    answer.head.contains("retry-after: 1")
}

/// That the daemon closes a connection on which nothing was asked.
fn is_closed(connection: &mut Box<dyn Connection>) -> bool {
    let mut byte = [0];
    matches!(connection.read(&mut byte), Ok(0) | Err(_))
}

#[test]
fn who_has_no_token_keeps_nobody_out_that_has_one() {
    let front = Fronted::on_port_with(|config| {
        config.http.n_connections = 1;
        config.http.read_ms = LONG_MS;
    });
    let token = front.token_header();
    let begun = Instant::now();
    // More than there are places for whom nobody knows, and half a head on each.
    let mut silent: Vec<_> = (0..16).map(|_| front.connect()).collect();
    for connection in &mut silent {
        // The first of them have gone by now.
        let _ = write!(connection, "GET /v1/models HTTP/1.1\r\nHost: ");
    }
    assert_eq!(front.request("GET", "/v1/models", &token, "").status, 200);
    assert!(is_closed(&mut silent[0]), "the oldest makes room");
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    let mut last = silent.pop().expect("there are some");
    assert!(is_closed(&mut last), "who asks for nothing does not stay for read_ms");
    assert!(begun.elapsed() < Duration::from_millis(LONG_MS), "{:?}", begun.elapsed());
}

#[test]
fn a_client_that_reads_nothing_of_its_answer_loses_it_and_its_guest() {
    for stream in [true, false] {
        let front = Fronted::on_socket_with(|config| config.http.write_ms = 500);
        // Of a whole answer the end has to come, and to be more than the system takes.
        let asked = match stream {
            true => by_hostile(&["emit-of", "65536"], json!({ "stream": true })),
            false => {
                let many = json!({ "n": 32, "temperature": 1.5, "max_tokens": 48, "logprobs": true, "top_logprobs": 20 });
                with(question("Tell me a long story."), many)
            }
        };
        let mut unread = front.ask("POST", CHAT, "", &asked.to_string());
        until("it has a guest", || !guests(&front).is_empty());
        if stream {
            ends_unfinished(&front);
        } else {
            until("its guest ends", || guests(&front).is_empty());
            // It is written from here on, and given up after half a second.
            std::thread::sleep(Duration::from_secs(5));
        }
        let (mut begun, since) = (Vec::new(), Instant::now());
        let _ = unread.read_to_end(&mut begun);
        assert!(since.elapsed() < PATIENCE, "the connection is closed");
        assert!(
            begun.starts_with(b"HTTP/1.1 200"),
            "{}",
            String::from_utf8_lossy(&begun[..begun.len().min(99)])
        );
        let text = String::from_utf8_lossy(&begun);
        let length = text.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
        match length.map(|length| length.parse::<usize>().expect("a number")) {
            Some(n_bytes) => assert!(begun.len() < n_bytes, "it came in whole: {n_bytes}"),
            None => assert!(!text.ends_with("0\r\n\r\n"), "it came to its end"),
        }
    }
}

#[test]
fn an_answer_that_grows_beyond_its_users_memory_is_refused() {
    let front = Fronted::on_socket_with(|config| config.budgets.user.host_bytes = Some(96 << 20));
    let endless = ["emit-of", "65536"];
    let refused = front.post(CHAT, &by_hostile(&endless, json!({})));
    let error = refused.error(429);
    assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("budget_exceeded")));
    assert!(error["message"].as_str().is_some_and(|said| said.contains("host_bytes")), "{error}");
    assert!(may_retry(&refused), "{}", refused.head);
    ends_unfinished(&front);
    // A chunk at a time is no more than a chunk.
    let mut stream =
        front.ask("POST", CHAT, "", &by_hostile(&endless, json!({ "stream": true })).to_string());
    let mut read = vec![0; 12 << 20];
    stream.read_exact(&mut read).expect("it goes on");
    assert!(read.starts_with(b"HTTP/1.1 200") && !read.windows(15).any(|part| part == b"budget_exceeded"));
}

#[test]
fn a_user_with_all_its_guests_may_try_again() {
    let front = Fronted::on_socket_with(|config| config.limits.n_guests_per_user = 1);
    let busy = occupied(&front);
    for (path, form) in [(CHAT, "type"), ("/v1/messages", "message")] {
        let version = "anthropic-version: 2023-06-01\r\n";
        let asked = with(question("Hello"), json!({ "max_tokens": 1 })).to_string();
        let refused = front.request("POST", path, version, &asked);
        assert!(refused.error(429)[form].is_string() && may_retry(&refused), "{refused:?}");
    }
    drop(busy);
    until("its guest ends", || guests(&front).is_empty());
    let asked = with(question("Hello"), json!({ "max_tokens": 1 }));
    assert_eq!(front.post(CHAT, &asked).status, 200);
}

#[test]
fn who_asks_as_the_daemon_goes_is_told_to_come_again() {
    let front = Fronted::on_socket_with(|config| config.sessions.drain_ms = LONG_MS);
    let busy = occupied(&front);
    let pid = Pid::from_raw(i32::try_from(front.served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::TERM).expect("it runs");
    let since = Instant::now();
    let refused = loop {
        let answer = front.post(CHAT, &with(question("Hello"), json!({ "max_tokens": 1 })));
        if answer.status != 200 {
            break answer;
        }
        assert!(since.elapsed() < PATIENCE, "it does not go");
    };
    let error = refused.error(503);
    assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &json!("shutting_down")));
    assert!(may_retry(&refused), "{}", refused.head);
    let anthropics = "anthropic-version: 2023-06-01\r\n";
    let asked = with(question("Hello"), json!({ "max_tokens": 1 })).to_string();
    let refused = front.request("POST", "/v1/messages", anthropics, &asked);
    assert_eq!(refused.error(503)["type"], "overloaded_error");
    drop(busy);
}
