//! Mistakes get errors that name the value and the limit, and harm no client but the one that made them.

use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use trellis::config::Config;
use trellis::daemon::Daemon;
use trellis::guest::GuestLimits;
use trellis::ipc::Listener;
use trellis_client::{Client, ErrorBody, Program, StartOptions};
use trellis_tests::daemons::{self, collect, nothing_is_held, run, started, with};
use trellis_tests::engines::{block_on, encode};
use trellis_tests::guests;
use trellis_wire::{
    Call, ClientMessage, FRAME_BYTES_MAX, FrameBuffer, FrameReader, Hello, Outcome, ServerMessage,
};

use crate::exe;

const COMPONENT_BYTES: usize = 1 << 20;
const ARGUMENT_BYTES: usize = 4_096;

fn config() -> Config {
    let limits =
        GuestLimits { component_bytes: COMPONENT_BYTES, argument_bytes: ARGUMENT_BYTES, ..daemons::limits() };
    Config { models: vec!["tiny".to_owned(), "draft".to_owned()], limits, ..daemons::config(exe()) }
}

/// Asserts that a guest does its work as ever.
async fn all_is_well(client: &Client) {
    let ended = run(client, &guests::example("chat"), with(&["What is 37 + 48?"])).await.well();
    assert_eq!(ended.text, "85\n");
}

/// Code, what the error is about, the value, the limit.
fn parts(body: &ErrorBody) -> (&str, Option<&str>, Option<&str>, Option<u64>) {
    (body.code.as_str(), body.name.as_deref(), body.value.as_deref(), body.limit)
}

#[test]
fn mistakes_in_the_host_api() {
    // Each names the value and what was expected; n stands for the length of the context.
    let expected = [
        ("unknown model", "no model is called \"gpt-17\"; loaded: tiny, draft"),
        ("token out of range", "token 4096 does not exist; the vocabulary has 4096 entries"),
        ("too long", "the context would hold {n + 1024} tokens, and the model's limit is 1024"),
        ("text too long", "the context would hold {text} tokens, and the model's limit is 1024"),
        ("NaN temperature", "temperature is NaN, expected"),
        ("negative temperature", "temperature is -1, expected"),
        ("infinite temperature", "temperature is inf, expected"),
        ("top-p 0", "is 0, expected"),
        ("top-p above 1", "is 1.5, expected"),
        ("min-p NaN", "is NaN, expected"),
        ("top-k 0", "is 0, expected"),
        ("repetition penalty 0", "is 0, expected"),
        ("NaN frequency penalty", "is NaN, expected"),
        ("NaN bias", "is NaN, expected"),
        ("bias out of range", "token 4103 does not exist; the vocabulary has 4096 entries"),
        ("infinite parameter", "parameters is inf at 1, expected finite numbers"),
        (
            "groups of beams that do not come out even",
            "n-groups is 3, expected a divisor of n-beams, which is 4",
        ),
        ("mask out of range", "token 4096 does not exist; the vocabulary has 4096 entries"),
        ("mask of nothing", "no token can be drawn: "),
        ("mask of another model", "one argument belongs to the model \"tiny\", the other to \"draft\""),
        ("truncate past the end", "n-tokens is {n + 1}, expected at most {n}"),
        ("top of an empty context", "the context is empty; append at least one token first"),
        ("step of an empty context", "the context is empty; append at least one token first"),
        ("score after an empty context", "the context is empty; append at least one token first"),
        (
            "log-probabilities of an empty prompt",
            "continuation is empty in request 0, expected at least one token",
        ),
        (
            "log-probabilities of a prompt from its first token on",
            "the context is empty; append at least one token first",
        ),
        ("one empty context of two", "the context is empty; append at least one token first"),
        ("the same context twice", "context is number 1 of the list, expected each context once in a list"),
        (
            "generate twice on one context",
            "context is number 1 of the list, expected each context once in a list",
        ),
        ("too many candidates", "n is 1000000, expected"),
        ("empty continuation", "continuation is empty in request 0, expected at least one token"),
        ("guess too long", "guess is 16 tokens, expected at most 15"),
        ("guess out of range", "token 4096 does not exist; the vocabulary has 4096 entries"),
        ("tree of too many guesses", "guesses is 65, expected at most 64"),
        (
            "tree too deep",
            "guesses is number 15, 16 tokens behind the context, expected at most 15 tokens behind it",
        ),
        ("tree of a token that there is not", "token 4096 does not exist; the vocabulary has 4096 entries"),
        ("guess after an empty context", "the context is empty; append at least one token first"),
        (
            "guess twice after one context",
            "context is number 1 of the list, expected each context once in a list",
        ),
        ("guess after a full context", "the context would hold 1025 tokens, and the model's limit is 1024"),
        ("unknown saved name", "nothing is saved under the name \"nobody\""),
        ("forget an unknown name", "nothing is saved under the name \"nobody\""),
        ("empty name", "name is , expected 1 to 256 bytes"),
        ("unknown role", "role is wizard, expected system, user, assistant or tool"),
        ("decode out of range", "token 4294967295 does not exist; the vocabulary has 4096 entries"),
        ("broken JSON", "json is {\"a\":, expected JSON"),
    ];
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        let model = daemon.model(Some("tiny")).expect("it is loaded");
        let n = encode(&model, "<|begin_of_text|>Once upon a time").len();
        let n_text = n + encode(&model, &"word ".repeat(3000)).len();

        let ended = run(&client, &guests::hostile(), with(&["mistakes"])).await.well();
        assert_eq!(ended.json.len(), expected.len());
        let next = &ended.json[0]["next"];
        for (report, (mistake, part)) in ended.json.iter().zip(expected) {
            assert_eq!(report["mistake"], mistake);
            let part = part
                .replace("{n}", &n.to_string())
                .replace("{n + 1}", &(n + 1).to_string())
                .replace("{n + 1024}", &(n + 1024).to_string())
                .replace("{text}", &n_text.to_string());
            let error = report["error"].as_str().unwrap_or_else(|| panic!("{mistake}: it was let pass"));
            assert!(error.contains(&part), "{mistake}: {error:?} does not say {part:?}");
            // Nothing was appended, cut or lost.
            assert_eq!(report["length"], n, "{mistake}");
            assert_eq!(&report["next"], next, "{mistake}");
        }
        all_is_well(&client).await;
        drop(client);
        nothing_is_held(&daemon).await;
    });
}

/// A component whose `run` ends well, with these imports.
fn component(imports: &str) -> Vec<u8> {
    let text = format!(
        r#"(component
            {imports}
            (core module $main
                (memory (export "memory") 1)
                (func (export "run") (result i32) (i32.const 16)))
            (core instance $main (instantiate $main))
            (func (export "run") (result (result (error string)))
                (canon lift (core func $main "run") (memory (core memory $main "memory")))))"#
    );
    wat::parse_str(text).expect("it is a component")
}

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).expect("it is WebAssembly")
}

/// What is refused, the code, the value, and what the message says.
type Refusal = (Vec<u8>, &'static str, Option<&'static str>, &'static [&'static str]);

#[test]
fn what_is_not_a_guest() {
    let seed = r#"(export "seed" (func (result u64)))"#;
    let import = |name: &str, what: &str| component(&format!(r#"(import "{name}" (instance {what}))"#));
    let invalid = "invalid_component";
    let foreign = "incompatible_host";
    let cases: Vec<Refusal> = vec![
        (Vec::new(), invalid, Some("0"), &["at least one byte"]),
        (b"#!/bin/sh\necho hello\n".to_vec(), invalid, None, &["not WebAssembly", "21 bytes"]),
        (wat("(module)"), invalid, None, &["core WebAssembly module", "wasm32-wasip2"]),
        (wat("(component)"), invalid, None, &["exports no `run", "it exports: nothing"]),
        (
            wat(r#"(component
                    (core module $m (func (export "walk")))
                    (core instance $i (instantiate $m))
                    (func (export "walk") (canon lift (core func $i "walk"))))"#),
            invalid,
            None,
            &["exports no `run", "it exports: walk"],
        ),
        (
            wat(r#"(component
                    (core module $m (func (export "run")))
                    (core instance $i (instantiate $m))
                    (func (export "run") (canon lift (core func $i "run"))))"#),
            invalid,
            None,
            &["does not fit the host"],
        ),
        (b"\0asm\x0d\0\x01\0 and then nonsense".to_vec(), invalid, None, &["not a valid component"]),
        (
            import("trellis:host/session@0.7.0", seed),
            foreign,
            Some("trellis:host/session@0.7.0"),
            &["the host has trellis:host/session@0.2.0 and trellis:host/session@0.1.1"],
        ),
        (
            import("trellis:host/oracle@0.1.0", seed),
            foreign,
            Some("trellis:host/oracle@0.1.0"),
            &["which the host does not have"],
        ),
        (
            import("wasi:http/outgoing-handler@0.2.0", ""),
            foreign,
            Some("wasi:http/outgoing-handler@0.2.0"),
            &["which the host does not have"],
        ),
        (
            import("trellis:host/session@0.1.0", r#"(export "seed" (func (result string)))"#),
            invalid,
            None,
            &["does not fit the host"],
        ),
    ];
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        for (wasm, code, value, parts) in cases {
            let ended = run(&client, &wasm, with(&[])).await;
            let body = ended.reason();
            assert_eq!((body.code.as_str(), body.value.as_deref()), (code, value), "{body:?}");
            for part in parts {
                assert!(body.message.contains(part), "{body:?} does not say {part:?}");
            }
        }
        // The same by hand with nothing wrong, to show that the cases fail for what they say.
        assert!(run(&client, &component(""), with(&[])).await.error.is_none());
        let import = import("trellis:host/session@0.1.0", seed);
        assert!(run(&client, &import, with(&[])).await.error.is_none());

        let huge = vec![0; COMPONENT_BYTES + 1];
        let ended = run(&client, &huge, with(&[])).await;
        let body = ended.reason();
        assert_eq!(
            (body.code.as_str(), body.limit),
            ("limit_exceeded", Some(COMPONENT_BYTES as u64)),
            "{body:?}"
        );
        assert_eq!(body.value.as_deref(), Some("1048577"), "{body:?}");
        all_is_well(&client).await;
        drop(client);
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn what_a_client_cannot_ask_for() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        let wasm = guests::hostile();

        let guest = client.start(Program::named("oracle"), with(&[])).await.expect("the connection stands");
        let ended = collect(guest).await;
        assert_eq!(parts(ended.reason()), ("unknown_program", Some("program"), Some("oracle"), None));

        let long = "x".repeat(ARGUMENT_BYTES);
        let ended = run(&client, &wasm, with(&["error", &long])).await;
        let expected = ("limit_exceeded", Some("argument_bytes"), Some("4101"), Some(4096));
        assert_eq!(parts(ended.reason()), expected);

        for ms in [0, 1] {
            let options = StartOptions { deadline: Some(Duration::from_millis(ms)), ..with(&["sleep"]) };
            let ended = run(&client, &wasm, options).await;
            let expected = ("deadline_exceeded", Some("deadline_ms"), None, Some(ms));
            assert_eq!(parts(ended.reason()), expected);
        }
        let options = StartOptions { deadline: Some(Duration::MAX), ..with(&["exit-well"]) };
        assert!(run(&client, &wasm, options).await.error.is_none());

        let options = StartOptions { window_bytes: 1 << 30, ..with(&["exit-well"]) };
        let ended = run(&client, &wasm, options).await;
        let body = ended.reason();
        assert_eq!(
            (body.code.as_str(), body.value.as_deref()),
            ("limit_exceeded", Some("1073741824")),
            "{body:?}"
        );
        assert!(body.limit.is_some(), "{body:?}");

        let error = client.stop(987_654).await.expect_err("there is no such guest");
        assert_eq!(error.code().expect("the daemon says so").as_str(), "unknown_guest");

        let mut guest = client.start(Program::wasm(wasm.clone()), with(&["echo"])).await.expect("connected");
        started(&mut guest).await;
        let error = guest.send("x".repeat(300 << 10)).await.expect_err("too long");
        assert_eq!(error.code().expect("the daemon says so").as_str(), "limit_exceeded");
        assert!(error.to_string().contains("307200") && error.to_string().contains("262144"), "{error}");
        guest.send("hello").await.expect("nothing is lost");
        let sender = guest.sender();
        guest.end_messages().await.expect("it runs");
        assert_eq!(collect(guest).await.well().text, "hello");
        assert!(sender.send("more").await.is_err(), "it has ended");

        all_is_well(&client).await;
        drop(client);
        nothing_is_held(&daemon).await;
    });
}

/// A daemon on a socket.
struct Socket {
    daemon: std::sync::Arc<Daemon>,
    path: PathBuf,
    _folder: TempDir,
}

impl Socket {
    fn open() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trellis.sock");
        let listener = Listener::bind(&path, 0o700).expect("the place is free");
        let daemon = std::sync::Arc::new(daemons::start(&config()));
        let serving = daemon.clone();
        tokio::spawn(async move { serving.serve(listener).await });
        Self { daemon, path, _folder: folder }
    }

    async fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).await.expect("the daemon listens")
    }

    /// A connection after both sides have said hello.
    async fn greeted(&self) -> UnixStream {
        let mut stream = self.connect().await;
        Hello::ours().write(&mut stream).await.expect("written");
        Hello::read(&mut stream).await.expect("the daemon says hello");
        stream
    }

    /// Sends bytes; what the daemon answers until it closes the connection.
    async fn send(&self, mut stream: UnixStream, bytes: &[u8]) -> Vec<ServerMessage> {
        // The daemon may close before it has read all.
        let _ = stream.write_all(bytes).await;
        let _ = stream.shutdown().await;
        let mut reader = FrameReader::new(stream, FRAME_BYTES_MAX);
        let mut messages = Vec::new();
        while let Ok(Some(message)) = reader.next::<ServerMessage>().await {
            messages.push(message);
        }
        messages
    }

    async fn is_well(&self) {
        all_is_well(&Client::connect_to(&self.path).await.expect("the daemon lives")).await;
    }
}

fn fault(messages: &[ServerMessage]) -> &ErrorBody {
    match messages {
        [.., ServerMessage::Fault { error }] => error,
        other => panic!("the last word is no fault: {other:?}"),
    }
}

fn frame(message: &ClientMessage) -> Vec<u8> {
    let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
    frames.push(message).expect("it fits");
    let mut bytes = Vec::new();
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(frames.poll_write(&mut cx, &mut bytes).is_ready());
    bytes
}

fn framed(bytes: &[u8]) -> Vec<u8> {
    [&u32::try_from(bytes.len()).expect("small").to_le_bytes(), bytes].concat()
}

/// A frame with some text in it replaced by bytes that are no text.
fn spoilt(message: &ClientMessage, text: &str) -> Vec<u8> {
    let mut bytes = frame(message);
    let at =
        bytes.windows(text.len()).position(|window| window == text.as_bytes()).expect("the text is there");
    bytes[at..at + text.len()].fill(0xff);
    bytes
}

#[test]
fn connections_that_do_not_speak_the_protocol() {
    block_on(async {
        let socket = Socket::open();
        let bad_hellos: [(Vec<u8>, &str); 4] = [
            (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), "does not speak the Trellis protocol"),
            (Hello { version_min: 7, version_max: 9, ..Hello::ours() }.encode(), "7..=9"),
            (Hello { version_min: 3, version_max: 2, ..Hello::ours() }.encode(), "oldest version 3"),
            (Hello { frame_bytes_max: 100, ..Hello::ours() }.encode(), "frames of at most 100 bytes"),
        ];
        for (bytes, part) in bad_hellos {
            let mut stream = socket.connect().await;
            stream.write_all(&bytes).await.expect("written");
            Hello::read(&mut stream).await.expect("even who is turned away learns the versions");
            let messages = socket.send(stream, &[]).await;
            let body = fault(&messages);
            assert_eq!(body.code.as_str(), "protocol", "{body:?}");
            assert!(body.message.contains(part), "{body:?}");
        }
        // A client that hangs up in the middle of its hello is no trouble.
        for n in [0, 1, 8, 16] {
            let mut stream = socket.connect().await;
            stream.write_all(&Hello::ours().encode()[..n]).await.expect("written");
            drop(stream);
        }
        socket.is_well().await;
    });
}

#[test]
fn broken_frames() {
    let cancel = ClientMessage::Cancel { id: 3 };
    let info = |id| frame(&ClientMessage::Request { id, call: Call::Info });
    let message =
        ClientMessage::Request { id: 1, call: Call::Message { to: 7, text: "innocent".to_owned() } };
    let start = trellis_wire::Start {
        program: trellis_wire::Program::Named { name: "chat".to_owned() },
        arguments: vec!["argument".to_owned()],
        model: None,
        seed: None,
        credit_bytes: 1,
        deadline_ms: None,
        label: None,
        is_recorded: false,
        is_profiled: false,
    };
    let start = ClientMessage::Request { id: 1, call: Call::Start(start) };
    let deep = [vec![0x91; 5000], vec![0xc0]].concat();
    let mut extra = frame(&cancel)[4..].to_vec();
    extra.push(0xc0);
    let cases: Vec<(&str, Vec<u8>, Option<u64>)> = vec![
        ("a frame over the limit", u32::MAX.to_le_bytes().to_vec(), Some(u64::from(FRAME_BYTES_MAX))),
        ("an empty frame", framed(&[]), None),
        ("bytes that mean nothing", framed(&[0xc1; 40]), None),
        ("a frame that is cut", framed(&frame(&cancel)[4..10]), None),
        ("a frame with more than a message", framed(&extra), None),
        ("a message nested too deep", framed(&deep), None),
        ("a list that claims to be huge", framed(&[0xdd, 0xff, 0xff, 0xff, 0xff]), None),
        ("a message without its fields", framed(b"\x81\xa4type\xa7request"), None),
        ("a text that is not UTF-8", spoilt(&message, "innocent"), None),
        ("an argument that is not UTF-8", spoilt(&start, "argument"), None),
        ("an id twice", [info(5), info(5)].concat(), None),
        ("an id that goes back", [info(5), info(4)].concat(), None),
    ];
    block_on(async {
        let socket = Socket::open();
        for (what, bytes, limit) in cases {
            let messages = socket.send(socket.greeted().await, &bytes).await;
            let body = fault(&messages);
            assert_eq!(body.code.as_str(), "protocol", "{what}: {body:?}");
            assert_eq!(body.limit, limit, "{what}: {body:?}");
            assert!(!body.message.is_empty(), "{what}");
        }
        // A connection that ends inside a frame is not answered.
        let bytes = info(1);
        for n in 1..bytes.len() {
            let mut stream = socket.greeted().await;
            stream.write_all(&bytes[..n]).await.expect("written");
        }
        // What is new is skipped, and the connection goes on.
        let unknown = framed(b"\x82\xa4type\xa8teleport\xa2id\x09");
        let unknown_call = framed(b"\x83\xa4type\xa7request\xa2id\x01\xa4call\x81\xa4type\xa8teleport");
        let bytes = [unknown, unknown_call, info(2)].concat();
        let mut stream = socket.greeted().await;
        stream.write_all(&bytes).await.expect("written");
        let mut reader = FrameReader::new(&mut stream, FRAME_BYTES_MAX);
        let mut ends = Vec::new();
        while ends.len() < 2 {
            let message = reader.next::<ServerMessage>().await.expect("a message").expect("it goes on");
            if let ServerMessage::End { id, outcome, .. } = message {
                ends.push((id, outcome));
            }
        }
        ends.sort_by_key(|(id, _)| *id);
        let Outcome::Error { error } = &ends[0].1 else { panic!("{ends:?}") };
        assert_eq!(error.code.as_str(), "unsupported");
        assert!(matches!(ends[1], (2, Outcome::Ok { .. })), "{ends:?}");
        socket.is_well().await;
    });
}

#[test]
fn noise() {
    block_on(async {
        let socket = Socket::open();
        let mut state = 7u64;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let whole: Vec<Vec<u8>> = vec![
            frame(&ClientMessage::Request { id: 1, call: Call::Info }),
            frame(&ClientMessage::Request { id: 1, call: Call::Message { to: 9, text: "x".repeat(50) } }),
            frame(&ClientMessage::Chunk { id: 1, bytes: vec![1; 100] }),
            frame(&ClientMessage::Credit { id: 1, n_bytes: u64::MAX }),
        ];
        for round in 0..200 {
            let mut bytes: Vec<u8> =
                (0..1 + next() % 3).flat_map(|_| whole[next() % whole.len()].clone()).collect();
            for _ in 0..1 + next() % 4 {
                let at = next() % bytes.len();
                bytes[at] = next() as u8;
            }
            let stream = socket.greeted().await;
            // Whatever it is, the daemon answers something and closes once it is told that no more comes.
            let answered = tokio::time::timeout(daemons::PATIENCE, socket.send(stream, &bytes)).await;
            assert!(answered.is_ok(), "round {round}: {bytes:02x?}");
        }
        socket.is_well().await;
        nothing_is_held(&socket.daemon).await;
    });
}

#[test]
fn a_client_that_says_nothing_is_not_waited_for() {
    block_on(async {
        let socket = Socket::open();
        let mut silent = socket.connect().await;
        socket.is_well().await;
        let mut bytes = Vec::new();
        let read = tokio::time::timeout(daemons::PATIENCE, silent.read_to_end(&mut bytes)).await;
        read.expect("the daemon hangs up").expect("in good order");
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("no hello within"), "{text}");
    });
}

#[test]
fn settings_that_make_no_sense() {
    let start = |config: &Config| Daemon::start(config, &|_| {}).err().expect("refused").to_string();
    let models = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let error = start(&Config { models: models(&["gpt-17"]), ..config() });
    assert!(error.contains("\"gpt-17\"") && error.contains("tiny, draft"), "{error}");
    let error = start(&Config { models: models(&["tiny", "tiny"]), ..config() });
    assert!(error.contains("model \"tiny\" is given twice"), "{error}");
    let error = start(&Config { kv_bytes: Some(1000), ..config() });
    assert!(error.contains("1000") && error.contains("8388608"), "{error}");

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trellis.toml");
    for (text, parts) in [
        ("models = []", ["models", "0"]),
        ("n_step_tokens = 0", ["n_step_tokens", "0"]),
        ("n_step_tokens = -1", ["n_step_tokens", "-1"]),
        ("kv_byte = 7", ["unknown field `kv_byte`", "did you mean \"kv_bytes\"?"]),
        ("[limits]\nn_context = 7", ["unknown field `n_context`", "did you mean \"n_contexts\"?"]),
        ("device = \"abacus\"", ["abacus", "device"]),
        ("models = \"tiny", ["trellis.toml", "1"]),
    ] {
        std::fs::write(&path, text).expect("written");
        let error = Config::load(&path).expect_err(text).to_string();
        for part in parts {
            assert!(error.contains(part), "{text}: {error:?} does not say {part:?}");
        }
    }
    let error = Config::load(&folder.path().join("nowhere.toml")).expect_err("it is not there").to_string();
    assert!(error.contains("nowhere.toml"), "{error}");
}
