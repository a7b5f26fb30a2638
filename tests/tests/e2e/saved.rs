//! Saved contexts that outlive their daemon.
#![cfg(unix)]

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use trellis::config::{Config, Device, Isolation, SavedContexts};
use trellis_client::{Client, Event, Guest, GuestUsage, Program, StartOptions};
use trellis_engine::model::SpecialTokens;
use trellis_tests::daemons::{self, Served, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::{guests, models};

use crate::exe;
use crate::on_demand::one_of_two;

/// Tokens of the context that is saved.
const N_TOKENS: usize = 1000;

/// Tokens that the guest has drawn after it.
const N_DRAWN: usize = 4;

/// A text of as many tokens.
pub(crate) fn text() -> String {
    let model = models::bundled("tiny");
    let n_tokens = |text: &str| model.tokenizer.encode(text, SpecialTokens::Parse).expect("it is text").len();
    let mut text = "<|begin_of_text|>".to_owned();
    for word in ["Once", " there", " was", " a", " bird", "."].iter().cycle() {
        if n_tokens(&text) >= N_TOKENS {
            break;
        }
        text.push_str(word);
    }
    text
}

/// The files of saved contexts, and what is not whole yet.
fn files(state: &Path) -> Vec<String> {
    let users = std::fs::read_dir(state.join("contexts")).into_iter().flatten().flatten();
    let files = users.flat_map(|user| std::fs::read_dir(user.path()).into_iter().flatten().flatten());
    files.map(|file| file.file_name().to_string_lossy().into_owned()).collect()
}

/// A guest that does with saved contexts what it is told.
pub(crate) struct Keeper(Guest);

impl Keeper {
    pub(crate) async fn begin(served: &Served) -> Self {
        Self::with_model(served, "tiny").await
    }

    async fn with_model(served: &Served, model: &str) -> Self {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let program = Program::wasm(guests::hostile());
        let options = StartOptions { model: Some(model.to_owned()), ..with(&["keep"]) };
        Self(client.start(program, options).await.expect("started"))
    }

    /// What it answers: the tokens before the word, and the word.
    pub(crate) async fn tell(&mut self, message: String) -> (Vec<u32>, String) {
        self.0.send(message).await.expect("it listens");
        let mut tokens = Vec::new();
        loop {
            match self.0.next().await.expect("it answers").expect("it goes on") {
                Event::Tokens { tokens: more } => tokens.extend(more),
                Event::Text { text } => return (tokens, text),
                _ => {}
            }
        }
    }

    pub(crate) async fn end(mut self) -> GuestUsage {
        self.0.end_messages().await.expect("it listens");
        self.0.wait().await.expect("it ends well");
        self.0.usage().expect("it has ended").clone()
    }
}

fn signal(served: &mut Served, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, signal).expect("it runs");
    served.wait();
}

fn reopened_after(end: Signal, isolation: Isolation) {
    let state = tempfile::tempdir().expect("a folder");
    let config = Config {
        device: Device::Cpu,
        isolation,
        saved_contexts: SavedContexts::Disk,
        state_dir: Some(state.path().to_owned()),
        ..daemons::config(exe())
    };
    let mut served = Served::start_with(exe(), &config, &[]);
    let wanted = block_on(async {
        let mut keeper = Keeper::begin(&served).await;
        let (_, word) = keeper.tell(format!("save story {}", text())).await;
        assert_eq!(word, "saved");
        let (tokens, _) = keeper.tell("open story".to_owned()).await;
        assert_eq!(keeper.end().await.n_tokens_reopened, 0, "it was in memory");
        if end == Signal::KILL {
            until("the file is there", async || {
                files(state.path()).iter().any(|name| name.ends_with(".context"))
            })
            .await;
        }
        tokens
    });
    assert_eq!(wanted.len(), N_TOKENS + N_DRAWN);
    signal(&mut served, end);
    let there = files(state.path());
    assert!(there.len() == 1 && there[0].ends_with(".context"), "{there:?}");

    served.start_again();
    block_on(async {
        let mut keeper = Keeper::begin(&served).await;
        let (tokens, word) = keeper.tell("open story".to_owned()).await;
        assert_eq!(word, "opened");
        assert_eq!(tokens, wanted, "token for token what the daemon before drew");
        let n_reopened = (N_TOKENS - 1).to_string();
        for (view, shown) in
            [("--wide", n_reopened.clone()), ("--json", format!("\"n_tokens_reopened\":{n_reopened}"))]
        {
            until("it is listed so", async || {
                let listed = daemons::output(&mut served.trellis(&["ps", view]));
                String::from_utf8_lossy(&listed.stdout).contains(&shown)
            })
            .await;
        }
        let usage = keeper.end().await;
        // The last token was never computed: whoever draws after it computes it.
        assert_eq!((usage.n_tokens_reopened, usage.n_tokens_cached), (N_TOKENS as u64 - 1, 0), "{usage:?}");
        assert!(usage.reopened_bytes > usage.n_tokens_reopened, "{usage:?}");
        assert!((1..usage.elapsed_us).contains(&usage.reopened_us), "it waited for the disk: {usage:?}");
        assert!(served.log().contains(&format!("n_bytes={}", usage.reopened_bytes)), "{}", served.log());
        assert_eq!(usage.n_tokens, N_DRAWN as u64, "the last token and those drawn, the last of them aside");

        let mut keeper = Keeper::begin(&served).await;
        assert_eq!(keeper.tell("forget story".to_owned()).await.1, "forgotten");
        assert_eq!(files(state.path()), [""; 0], "it is gone when that is said");
        assert_eq!(keeper.tell("open story".to_owned()).await.1, "none");
        keeper.end().await;
    });
}

#[test]
fn a_saved_context_is_there_after_a_restart_and_nothing_of_it_is_computed_again() {
    reopened_after(Signal::TERM, Isolation::Thread);
}

#[cfg(target_os = "linux")]
#[test]
fn a_saved_context_is_there_after_a_kill_and_nothing_of_it_is_computed_again() {
    reopened_after(Signal::KILL, Isolation::Process);
}

#[test]
fn a_saved_context_is_there_after_its_model_has_made_room_for_another() {
    let state = tempfile::tempdir().expect("a folder");
    let config = Config {
        saved_contexts: SavedContexts::Disk,
        state_dir: Some(state.path().to_owned()),
        ..block_on(one_of_two())
    };
    let served = Served::start_with(exe(), &config, &[]);
    block_on(async {
        let mut keeper = Keeper::with_model(&served, "tiny").await;
        let (_, word) = keeper.tell(format!("save story {}", text())).await;
        assert_eq!(word, "saved");
        let (wanted, _) = keeper.tell("open story".to_owned()).await;
        keeper.end().await;

        let mut other = Keeper::with_model(&served, "draft").await;
        assert_eq!(other.tell("open story".to_owned()).await.1, "none", "it is of another model");
        other.end().await;

        let mut keeper = Keeper::with_model(&served, "tiny").await;
        let (tokens, word) = keeper.tell("open story".to_owned()).await;
        assert_eq!((tokens, word.as_str()), (wanted, "opened"));
        assert_eq!(keeper.end().await.n_tokens_reopened, N_TOKENS as u64 - 1);
    });
}

/// Forgets what was saved of a model that is not loaded, where none is.
fn forgotten_without_a_model(isolation: Isolation) {
    let state = tempfile::tempdir().expect("a folder");
    let config = Config {
        isolation,
        saved_contexts: SavedContexts::Disk,
        state_dir: Some(state.path().to_owned()),
        ..daemons::config(exe())
    };
    let served = Served::start_with(exe(), &config, &[]);
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let mut keeper = Keeper::begin(&served).await;
        assert_eq!(keeper.tell("save story Once".to_owned()).await.1, "saved");
        keeper.end().await;
        for model in client.models().await.expect("it answers") {
            client.unload_model(&model.name, Some(Duration::ZERO)).await.expect("it goes");
        }
        assert_eq!(files(state.path()).len(), 1, "it is kept");
        let forget =
            async || daemons::run(&client, &guests::hostile(), with(&["forget-saved", "story"])).await;
        let _ = forget().await.well();
        assert_eq!(files(state.path()), [""; 0]);
        let again = forget().await;
        assert!(again.reason().message.contains("story"), "there is none any more: {again:?}");
    });
}

#[test]
fn what_is_saved_is_forgotten_where_no_model_is_loaded() {
    forgotten_without_a_model(Isolation::Thread);
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_saved_is_forgotten_by_a_process_where_no_model_is_loaded() {
    forgotten_without_a_model(Isolation::Process);
}
