//! `trellis chat` as it is on a terminal.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use snapbox::assert::Action;
use snapbox::{Assert, IntoData};
use tempfile::TempDir;
use trellis::config::{Config, Device};
use trellis_tests::daemons::{self, Served, output};
use trellis_tests::guests;
use trellis_tests::pack::{self, root};
use trellis_tests::terminal::Terminal;

use crate::exe;

/// What the models say is the same wherever they run on the processor.
fn config() -> Config {
    let models = vec!["tiny".to_owned(), "draft".to_owned()];
    Config { device: Device::Cpu, models, ..daemons::config(exe()) }
}

/// A daemon, and a user's folder beside it.
struct Desk {
    served: Served,
    state: TempDir,
}

impl Desk {
    /// None where there are no sources to build the guest from.
    fn new() -> Option<Self> {
        if pack::folder().is_some() {
            println!("skipped: the guest is built from source");
            return None;
        }
        // Built in a time of its own.
        assert!(!guests::example("conversation").is_empty());
        let served = Served::start_with(exe(), &config(), &[]);
        Some(Self { served, state: tempfile::tempdir().expect("a folder") })
    }

    /// A conversation in a terminal, up to its first prompt.
    fn chat(&self, options: &[&str]) -> Option<Terminal> {
        let socket = self.served.socket();
        let arguments = [&["chat", "--socket", socket.to_str().expect("UTF-8")], options].concat();
        let terminal = Terminal::run(exe(), &arguments, &[("XDG_STATE_HOME", self.state.path())])?;
        terminal.ends_with(&[">>>"]);
        Some(terminal)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.state.path().join("trellis").join(name)
    }

    /// What was said in a conversation that was saved, the user's and the model's in turns.
    fn said(&self, name: &str) -> Vec<String> {
        let json = fs::read(self.path(&format!("chats/{name}.json"))).expect("it was saved");
        let json: Value = serde_json::from_slice(&json).expect("JSON");
        let messages = json["messages"].as_array().expect("a list").iter();
        messages.map(|message| message["content"].as_str().expect("a text").to_owned()).collect()
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("it is there").permissions().mode() & 0o777
}

/// Waits for an answer, or what a command says, and the next prompt.
fn says(terminal: &Terminal, lines: &[&str]) -> String {
    terminal.ends_with(&[lines, &[">>>"]].concat())
}

/// The screens in a chapter of the guide.
fn screens(text: &str) -> Vec<String> {
    let blocks = text.split("```screen\n").skip(1);
    blocks.map(|block| block.split("```").next().expect("it ends").trim_end().to_owned()).collect()
}

#[test]
fn the_guide_shows_what_is_on_the_screen() {
    let Some(desk) = Desk::new() else { return };
    let chapter = fs::read_to_string(root().join("sdk/guide/src/chat.md")).expect("the chapter is there");
    let assert = Assert::new().action(Action::Verify).normalize_paths(false);
    for expected in screens(&chapter) {
        // A line that the user writes is one that begins with the sign, or the options of the command.
        let mut lines = expected.lines();
        let command = lines.next().and_then(|line| line.strip_prefix("$ trellis chat")).expect("a command");
        let options: Vec<&str> = command.split_whitespace().collect();
        let Some(terminal) = desk.chat(&options) else { return };
        // What a conversation has that is loaded was written before.
        let mut is_loaded = false;
        let written = lines.filter_map(|line| {
            is_loaded &= !line.starts_with("trellis: ");
            let line = line.strip_prefix(">>> ")?;
            let is_written = !is_loaded;
            is_loaded |= line.starts_with("/load ");
            is_written.then_some(line)
        });
        for line in written.take_while(|line| *line != "/bye") {
            terminal.until("a prompt", |screen| screen.ends_with(">>>"));
            let n_prompts = |screen: &str| screen.lines().filter(|line| line.starts_with(">>>")).count();
            let n_before = n_prompts(&terminal.screen());
            terminal.line(line);
            terminal.until("the next prompt", |screen| {
                // A conversation that is loaded has prompts in it.
                n_prompts(screen) > n_before && screen.ends_with(">>>")
            });
        }
        // Which other builds are at their work on this machine is not of the conversation.
        let is_of_chat = |line: &&str| !line.trim_start().starts_with("Blocking waiting for file lock");
        let screen = terminal.screen();
        let screen = screen.lines().filter(is_of_chat).collect::<Vec<_>>().join("\n");
        let said = format!("$ trellis chat{command}\n{screen} /bye\n");
        terminal.line("/bye");
        assert_eq!(terminal.status(), 0);
        if let Err(error) = assert.try_eq(Some(&"chat.md"), said.into_data(), (expected + "\n").into_data()) {
            panic!("{error}");
        }
    }
}

#[test]
fn what_is_written_is_edited_kept_and_pasted() {
    let Some(desk) = Desk::new() else { return };
    let Some(terminal) = desk.chat(&[]) else { return };
    terminal.types("What is 37 + 49?");
    terminal.press(&["Left", "Left", "DC", "8", "Enter"]);
    says(&terminal, &[">>> What is 37 + 48?", "85"]);
    // Ctrl-C clears the line and leaves the conversation.
    terminal.types("What is");
    terminal.press(&["C-c"]);
    terminal.until("an empty line", |screen| {
        screen.ends_with(">>> What is^C\n>>>") || screen.ends_with(">>> What is\n>>>")
    });
    terminal.press(&["Up", "Enter"]);
    says(&terminal, &[">>> What is 37 + 48?", "85"]);

    // Each is one message: what is pasted, a block, and lines that end in backslashes.
    terminal.paste("one\\\n  two\nthree");
    terminal.until("the paste", |screen| screen.ends_with("three"));
    terminal.press(&["Enter"]);
    terminal.until("an answer", |screen| screen.ends_with("\n>>>"));
    terminal.line("\"\"\"four");
    terminal.line("");
    terminal.line("  five\"\"\"");
    terminal.until("an answer", |screen| screen.contains("five") && screen.ends_with("\n>>>"));
    terminal.line("six\\");
    terminal.line("//seven");
    terminal.until("an answer", |screen| screen.contains("//seven") && screen.ends_with("\n>>>"));
    terminal.line("/save lines");
    terminal
        .until("it is saved", |screen| screen.contains("10 messages as lines") && screen.ends_with("\n>>>"));
    let said = desk.said("lines");
    let asked: Vec<&str> = said.iter().step_by(2).map(String::as_str).collect();
    let question = "What is 37 + 48?";
    assert_eq!(asked, [question, question, "one\\\n  two\nthree", "four\n\n  five", "six\n//seven"]);

    // Ctrl-D ends, and what was written is there the next time, for this user alone.
    terminal.line(" /sytem");
    says(&terminal, &["error: there is no command /sytem; did you mean \"system\"?"]);
    terminal.press(&["C-d"]);
    assert_eq!(terminal.status(), 0);
    let (history, chat) = (desk.path("chat_history"), desk.path("chats/lines.json"));
    assert_eq!((mode(&history), mode(&chat)), (0o600, 0o600));
    let again = desk.chat(&[]).expect("there is a terminal");
    again.press(&["Up"]);
    again.until("the last line", |screen| screen.ends_with(">>> /save lines"));
}

#[test]
fn an_interrupt_stops_the_answer_and_not_the_conversation() {
    let Some(desk) = Desk::new() else { return };
    let Some(terminal) = desk.chat(&["--verbose"]) else { return };
    // So hot that it seldom finds an end.
    for line in ["/set temperature 5", "/set max_tokens 500"] {
        terminal.line(line);
        says(&terminal, &[&format!(">>> {line}")]);
    }
    let is_stopped = |screen: &str| screen.contains("stopped; what was said so far stays said");
    while !is_stopped(&terminal.screen()) {
        // On a machine that stands still for a while an answer may be over before it is interrupted.
        terminal.types("Tell me a long story.");
        terminal.ends_with(&[">>> Tell me a long story."]);
        terminal.press(&["Enter"]);
        let last = |screen: &str| screen.lines().last().unwrap_or_default().to_owned();
        terminal.until("the answer begins", |screen| !last(screen).starts_with(">>> "));
        terminal.press(&["C-c"]);
        terminal.until("it has ended", |screen| screen.ends_with("\n>>>"));
    }
    terminal.until("it says what it cost", |screen| screen.contains(" cached, ") && screen.ends_with(">>>"));
    terminal.line("/set temperature 0");
    says(&terminal, &[">>> /set temperature 0"]);
    terminal.line("What is 37 + 48?");
    terminal.until("an answer", |screen| screen.contains("What is 37") && screen.ends_with(" ms\n>>>"));
    terminal.line("/save story");
    terminal.until("it is saved", |screen| screen.contains(" messages as story"));
    let said = desk.said("story");
    let asked: Vec<&String> = said.iter().step_by(2).collect();
    assert_eq!(asked[asked.len() - 2..], ["Tell me a long story.", "What is 37 + 48?"]);
    assert!(!said[said.len() - 3].is_empty(), "{said:?}");
}

#[test]
fn a_conversation_outlives_its_guest_its_model_and_its_terminal() {
    let Some(desk) = Desk::new() else { return };
    let Some(terminal) = desk.chat(&[]) else { return };
    terminal.line("What is 37 + 48?");
    says(&terminal, &["85"]);
    // The guest ends, as it does by its time.
    let guests: Value =
        serde_json::from_slice(&output(&mut desk.served.trellis(&["ps", "--json"])).stdout).expect("JSON");
    let id = guests[0]["guest_id"].to_string();
    assert!(output(&mut desk.served.trellis(&["stop", &id])).status.success());
    terminal.line("What is 3 + 4?");
    terminal.until("a new guest answers", |screen| {
        screen.contains("a new guest goes on with the conversation") && screen.ends_with("\n7\n>>>")
    });
    terminal.line("/model");
    says(&terminal, &["* tiny", "  draft"]);
    terminal.line("/model drift");
    terminal.until("it is refused", |screen| screen.contains("error: ") && screen.ends_with("\n>>>"));
    terminal.line("/model draft");
    says(&terminal, &["trellis: draft answers from now on"]);
    terminal.line("/model tiny");
    says(&terminal, &["trellis: tiny answers from now on"]);
    terminal.line("/save sums");
    terminal.until("it is saved", |screen| screen.contains("4 messages as sums"));
    terminal.line("/bye");
    assert_eq!(terminal.status(), 0);

    let again = desk.chat(&["--verbose"]).expect("there is a terminal");
    again.line("/load sms");
    again.until("it is told the right name", |screen| screen.contains("did you mean \"sums\"?"));
    again.line("/load sums");
    again.until("it is there again", |screen| {
        let said = ["What is 37 + 48?", "85", ">>> What is 3 + 4?", "7", "trellis: 4 messages; "];
        screen.contains(&said.join("\n"))
    });
    again.line("/clear");
    again.until("it is cleared", |screen| screen.ends_with(">>> /clear\n>>>"));
    again.line("/save nothing");
    again.until("it is empty", |screen| screen.contains("0 messages as nothing"));
}
