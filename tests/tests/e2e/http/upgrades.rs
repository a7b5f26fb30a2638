//! Another program in the place of a daemon with the front.

use std::io::Read as _;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::json;
use trellis::session::SessionLimits;
use trellis_tests::daemons::output;

use super::client::{Answer, Fronted, Kept, Place};
use super::{question, with};

const CHAT: &str = "/v1/chat/completions";

/// Has the same program take the place of itself.
fn upgrade(front: &Fronted) {
    let ended = output(&mut front.served.trellis(&["upgrade"]));
    assert!(ended.status.success(), "{ended:?}\n{}", front.served.log());
}

#[test]
fn a_port_is_nobody_elses_while_another_program_takes_the_daemons_place() {
    let front = Fronted::on_port();
    let address = front.place().to_owned();
    let token = front.token_header();
    let is_over = AtomicBool::new(false);
    let n_taken = thread::scope(|scope| {
        let stranger = scope.spawn(|| {
            let mut n_taken = 0;
            while !is_over.load(Ordering::Relaxed) {
                n_taken += usize::from(TcpListener::bind(&address).is_ok());
                thread::sleep(Duration::from_millis(1));
            }
            n_taken
        });
        let ended = output(&mut front.served.trellis(&["upgrade"]));
        is_over.store(true, Ordering::Relaxed);
        assert!(ended.status.success(), "{ended:?}\n{}", front.served.log());
        stranger.join().expect("no panic")
    });
    assert_eq!(n_taken, 0, "the port was free for a moment");
    let models = front.request("GET", "/v1/models", &token, "").json();
    assert_eq!(models["data"][0]["id"], "tiny");
}

#[test]
fn a_socket_stays_the_same_while_another_program_takes_the_daemons_place() {
    let front = Fronted::on_socket();
    let inode = || std::fs::symlink_metadata(front.place()).expect("it is there").ino();
    let made = inode();
    for _ in 0..2 {
        upgrade(&front);
        assert_eq!(inode(), made);
        assert_eq!(front.request("GET", "/v1/models", "", "").json()["data"][0]["id"], "tiny");
    }
}

/// Asks one thing again and again; how often.
fn asked_on(is_over: &AtomicBool, mut one: impl FnMut()) -> usize {
    let mut n = 0;
    while !is_over.load(Ordering::Relaxed) {
        one();
        n += 1;
    }
    n
}

/// Asks again and again while something is done, in each of three ways: on connections of their own, as streams, and on one connection
/// for as long as that lasts. Panics where a request fails. How many were answered.
pub(super) fn ask_while(place: &Place, token: &str, what: impl FnOnce()) -> usize {
    let drawn = json!({ "temperature": 1.2, "seed": 7, "max_tokens": 24 });
    let whole = with(question("Tell me a short story."), drawn);
    let stream = with(whole.clone(), json!({ "stream": true }));
    let ask = |body: &str| place.request("POST", CHAT, token, body);
    let (whole, stream) = (whole.to_string(), stream.to_string());
    let text = ask(&whole).json()["choices"][0]["message"]["content"].clone();
    let n_events = ask(&stream).events().len();
    let is_whole = |answer: Answer| {
        assert_eq!(answer.json()["choices"][0]["message"]["content"], text, "{answer:?}");
    };
    let is_over = AtomicBool::new(false);
    let on_its_own = || asked_on(&is_over, || is_whole(ask(&whole)));
    let as_stream = || {
        asked_on(&is_over, || {
            let events = ask(&stream).events();
            assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{events:?}");
            assert_eq!(events.len(), n_events, "{events:?}");
        })
    };
    let on_one_connection = || {
        let mut kept = Kept::new(place);
        asked_on(&is_over, || is_whole(kept.ask("POST", CHAT, token, &whole)))
    };
    thread::scope(|scope| {
        let mut clients = Vec::new();
        for _ in 0..2 {
            clients.push(scope.spawn(on_its_own));
            clients.push(scope.spawn(as_stream));
            clients.push(scope.spawn(on_one_connection));
        }
        let done = catch_unwind(AssertUnwindSafe(what));
        // Whatever has failed, the clients end.
        is_over.store(true, Ordering::Relaxed);
        let n_answered = clients.into_iter().map(|client| client.join().expect("no request fails")).sum();
        done.unwrap_or_else(|panic| resume_unwind(panic));
        n_answered
    })
}

#[test]
fn upgrades_under_load_refuse_no_request() {
    for front in [
        Fronted::on_socket_with(|config| config.sessions.drain_ms = 120_000),
        Fronted::on_port_with(|config| config.sessions.drain_ms = 120_000),
    ] {
        let n_answered = ask_while(&front, &front.token_header(), || {
            for _ in 0..3 {
                thread::sleep(Duration::from_millis(300));
                upgrade(&front);
            }
        });
        assert!(n_answered >= 6, "{n_answered}");
        assert_eq!(front.served.log().matches("takes the place of this program").count(), 3);
    }
}

#[test]
fn a_stream_that_goes_on_past_the_drain_ends_with_a_reason_and_the_next_program_answers() {
    let front = Fronted::on_socket_with(|config| {
        config.sessions = SessionLimits { drain_ms: 500, ..config.sessions };
    });
    // Longer than any drain here.
    let endless = json!({ "trellis": { "guest": "hostile", "args": ["endless"] }, "stream": true });
    let asked = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "?" }] });
    let asked = with(asked, endless).to_string();
    let mut stream = front.ask("POST", CHAT, "", &asked);
    let mut said = vec![0; 15];
    stream.read_exact(&mut said).expect("it answers");
    assert!(said.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&said));
    upgrade(&front);
    stream.read_to_end(&mut said).expect("it ends");
    let said = String::from_utf8_lossy(&said);
    let last = said.lines().rev().find(|line| line.starts_with("data: ")).unwrap_or_default();
    assert!(said.contains("\"shutting_down\""), "its end: {last}");
    assert_eq!(front.request("GET", "/v1/models", "", "").json()["data"][0]["id"], "tiny");
}
