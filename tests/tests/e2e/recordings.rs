//! What was recorded runs again without a model, call by call the same; what is not the same is shown.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use trellis_tests::daemons::{self, Served, output};
use trellis_tests::guests;

use crate::exe;

/// Runs of every example: its name, its arguments, and the lines that its user types.
pub(crate) const RUNS: &[(&str, &[&str], &str)] = &[
    ("asap", &["--samples", "6", "--regex", "[1-7][0-9]|8[0-9]!", "What is 37 + 48?"], ""),
    ("awrs", &["--particles", "6", "--max-tokens", "12", "Once upon a time"], ""),
    ("beam", &["--beams", "4", "--max-tokens", "20", "Once upon a time"], ""),
    ("best-of-n", &["--n", "4", "--max-tokens", "16", "What is 37 + 48?"], ""),
    ("best-of-n", &["--n", "4", "--reject", "--max-tokens", "24", "Tell me a short story."], ""),
    ("calculator", &["What is 12 * 7 + 5?"], ""),
    ("cfg", &["--off", "A sad story.", "--max-tokens", "20", "Once upon a time"], ""),
    ("chat", &["What is 37 + 48?"], ""),
    ("chat", &[], "What is 37 + 48?\nWhat is 3 + 4?\n"),
    (
        "chat-server",
        &["--max-tokens", "8"],
        "{\"id\": \"a\", \"user\": \"What is 37 + 48?\"}\n{\"id\": \"b\", \"user\": \"Tell me a story.\"}\n",
    ),
    ("complete", &["--temperature", "1.2", "--max-tokens", "30", "Once upon a time"], ""),
    ("complete", &["--no-such-option"], ""),
    ("complete", &["--guess", "lookup", "--max-tokens", "30", "one two three one two three one two"], ""),
    ("constrained-beam", &["--word", "city", "--beams", "2", "What is the capital of France?"], ""),
    ("contrastive", &["--max-tokens", "20", "Once upon a time"], ""),
    (
        "conversation",
        &[],
        "{\"message\": {\"role\": \"user\", \"content\": \"What is 37 + 48?\"}}\n{\"answer\": {}}\n",
    ),
    ("cot-decoding", &["--branches", "4", "--max-tokens", "12", "What is 37 + 48?"], ""),
    ("dexperts", &["--max-tokens", "20", "Once upon a time"], ""),
    ("diverse-beam", &["--groups", "3", "--max-tokens", "12", "Once upon a time"], ""),
    ("early-vote", &["--samples", "4", "Think step by step: what is 468 + 275?"], ""),
    ("entropy-cut", &["--chains", "2", "--moves", "3", "--max-tokens", "24", "What is 37 + 48?"], ""),
    ("grammar", &["--choice", "yes|no", "Is 12 a prime number?"], ""),
    ("h2o", &["--budget", "12", "--max-tokens", "20", "Once upon a time"], ""),
    (
        "http-chat",
        &[],
        "{\"chat\": {\"messages\": [{\"role\": \"user\", \"content\": \"What is 37 + 48?\"}]}}\n",
    ),
    ("json-fields", &["Ada, a pilot from Oslo, is 36."], ""),
    ("json-schema", &["--temperature", "1.5", "Ada, a pilot from Oslo, is 36."], ""),
    ("json-schema", &["--schema", "{\"not\": {}}", "x"], ""),
    ("lookahead", &["--max-tokens", "20", "Think step by step: what is 468 + 275?"], ""),
    ("mcts", &["--rounds", "2", "--max-tokens", "40", "Think step by step: what is 468 + 275?"], ""),
    ("my-sampler", &["--texts", "3", "--max-tokens", "12", "Once upon a time"], ""),
    ("power-sampling", &["--chains", "2", "--moves", "3", "--max-tokens", "24", "What is 37 + 48?"], ""),
    ("probe", &["stream", "20", "Once upon a time"], ""),
    ("probe", &["tokens", "20", "0"], ""),
    ("prompt-lookup", &["--max-tokens", "30", "--raw", "1, 2, 3, 1, 2, 3, 1, 2"], ""),
    ("react", &["Use the calculator tool to work out 12 * 7 + 5."], ""),
    ("regex", &["--after", "Answer:", "--regex", " [0-9]{3}", "Think step by step: what is 468 + 275?"], ""),
    ("samplers", &["--json", "--max-tokens", "12", "Once upon a time"], ""),
    ("self-consistency", &["What is 37 + 48?"], ""),
    ("skeleton-of-thought", &["--points", "2", "--max-tokens", "12", "Tell me a short story."], ""),
    ("smc", &["--particles", "6", "--max-tokens", "12", "Tell me a short story."], ""),
    (
        "snapkv",
        &["--budget", "24", "--context", "One day Eva found a silver key.", "What is the capital of Kenya?"],
        "",
    ),
    ("speculative", &["--draft", "tiny", "--max-tokens", "30", "--width", "2", "What is 37 + 48?"], ""),
    ("steering", &["--max-tokens", "20", "--json", "The"], ""),
    ("streaming-llm", &["--window", "24", "--piece", "4", "--max-tokens", "40", "Once upon a time"], ""),
    ("thinking-budget", &["--soft", "20", "--hard", "40", "Think step by step: what is 468 + 275?"], ""),
    ("tool-ahead", &["Use the calculator tool to work out 12 * 7."], "84\n"),
    ("tree-of-thought", &["--max-tokens", "40", "Think step by step: what is 468 + 275?"], ""),
    ("watermarks", &["--max-tokens", "30", "Ownership is"], ""),
];

/// A folder with the components of all examples and the recordings that are made of them.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for name in guests::example_names() {
            let path = folder.path().join(format!("{name}.wasm"));
            fs::write(path, guests::example(&name)).expect("written");
        }
        Self(folder)
    }

    fn component(&self, name: &str) -> String {
        self.path(&format!("{name}.wasm")).to_str().expect("UTF-8").to_owned()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Records a guest on a daemon.
    fn record(&self, served: &Served, file: &Path, name: &str, arguments: &[&str], lines: &str) -> Output {
        let (file, component) = (file.to_str().expect("UTF-8"), self.component(name));
        let words = ["run", "--json", "--seed", "7", "--record", file, &component];
        with_lines(&mut served.trellis(&[&words[..], arguments].concat()), lines)
    }

    /// Replays a recording where no daemon and no model is.
    fn replay(&self, file: &Path, guest: Option<&str>) -> Output {
        let mut command = Self::to_replay(file);
        output(command.arg("--json").args(guest.map(|name| self.component(name))))
    }

    /// As [`Self::replay`], for people.
    fn replay_for_people(file: &Path) -> Output {
        output(&mut Self::to_replay(file))
    }

    fn to_replay(file: &Path) -> Command {
        let mut command = daemons::trellis(exe());
        let cache = Path::new(exe()).with_file_name("tests-cache-home");
        fs::create_dir_all(&cache).expect("the folder can be made");
        command.env("XDG_CACHE_HOME", cache).arg("replay").arg(file);
        command
    }
}

pub(crate) fn with_lines(command: &mut Command, lines: &str) -> Output {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(lines.as_bytes()).expect("written");
    std::io::Seek::rewind(&mut file).expect("it can be read again");
    output(command.stdin(Stdio::from(file)))
}

/// What a guest sent and how it ended.
fn events(output: &Output) -> Vec<Value> {
    let text = String::from_utf8(output.stdout.clone()).expect("it is text");
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("it is JSON"));
    let of_guest = |event: &Value| !matches!(event["type"].as_str(), Some("started" | "progress"));
    let mut events: Vec<Value> = events.filter(of_guest).collect();
    let end = events.last_mut().and_then(Value::as_object_mut).expect("there is an end");
    end.remove("usage");
    events
}

/// What a replay sent, with the end of the recorded run as its own: it says that all was as recorded.
fn replayed(output: &Output) -> Vec<Value> {
    let mut events = events(output);
    let end = events.last_mut().and_then(Value::as_object_mut).expect("there is an end");
    assert_eq!(end["ok"], true, "{end:?}: {}", stderr(output));
    let recorded = end.remove("recorded").expect("how the recorded run ended");
    end.extend(recorded.as_object().expect("an end").clone());
    events
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("it is text")
}

#[test]
fn every_example_runs_again_without_a_model() {
    let mut recorded: Vec<&str> = RUNS.iter().map(|(name, _, _)| *name).collect();
    recorded.dedup();
    assert_eq!(recorded, guests::example_names());
    run_again(&Served::start(exe()), |_| true);
}

/// What is recorded by a process of guests is the same tape: all that they do with the daemon's engines, and with their clients.
#[cfg(target_os = "linux")]
#[test]
fn what_runs_in_a_process_of_its_user_runs_again_without_a_model() {
    use trellis::config::{Config, Isolation};

    const NAMES: [&str; 6] = ["beam", "chat", "complete", "conversation", "json-schema", "probe"];
    let config = Config { isolation: Isolation::Process, ..daemons::config(exe()) };
    run_again(&Served::start_with(exe(), &config, &[]), |name| NAMES.contains(&name));
}

fn run_again(served: &Served, is_run: impl Fn(&str) -> bool) {
    let folder = Folder::new();
    for (idx, (name, arguments, lines)) in RUNS.iter().enumerate().filter(|(_, (name, ..))| is_run(name)) {
        let file = folder.path(&format!("{idx}.rec"));
        let first = folder.record(served, &file, name, arguments, lines);
        assert!(!events(&first).is_empty(), "{name}: {}", stderr(&first));
        let mode = fs::metadata(&file).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "prompts are in it");
        let again = folder.replay(&file, None);
        assert_eq!(replayed(&again), events(&first), "{name} {arguments:?}: {}", stderr(&again));
        assert_eq!(again.status.code(), Some(0), "{name} {arguments:?}");
        let built_again = folder.replay(&file, Some(name));
        assert_eq!(replayed(&built_again), events(&first), "{name} {arguments:?}");
    }
}

#[test]
fn a_guest_that_was_stopped_is_replayed_up_to_there() {
    let (folder, served) = (Folder::new(), Served::start(exe()));
    let file = folder.path("stopped.rec");
    let (path, component) = (file.to_str().expect("UTF-8"), folder.component("chat"));
    // It waits for a line that never comes.
    let words = ["run", "--json", "--timeout", "1", "--record", path, &component];
    let mut child =
        served.trellis(&words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("runs");
    let input = child.stdin.take();
    let first = child.wait_with_output().expect("it ends");
    drop(input);
    let end = events(&first).pop().expect("an end");
    assert_eq!(end["error"]["code"], "deadline_exceeded", "{end}");
    let again = folder.replay(&file, None);
    assert_eq!(replayed(&again), events(&first), "{}", stderr(&again));
    assert_eq!(again.status.code(), Some(0), "all was as recorded");
}

#[test]
fn a_guest_that_panicked_is_replayed_up_to_there_with_its_words() {
    let (folder, served) = (Folder::new(), Served::start(exe()));
    let (file, wasm) = (folder.path("panicked.rec"), folder.path("hostile.wasm"));
    fs::write(&wasm, guests::hostile()).expect("written");
    let (path, wasm) = (file.to_str().expect("UTF-8"), wasm.to_str().expect("UTF-8"));
    let first =
        output(&mut served.trellis(&["run", "--json", "--no-stdin", "--record", path, wasm, "panic"]));
    let end = events(&first).pop().expect("an end");
    let message = end["error"]["message"].as_str().expect("a text");
    assert!(message.contains("panicked at hostile/src/") && !message.contains("unreachable"), "{end}");
    let again = Folder::replay_for_people(&file);
    assert_eq!(again.status.code(), Some(0), "{}", stderr(&again));
    assert!(
        stderr(&again).contains("ended so: the guest trapped: panicked at hostile/src/"),
        "{}",
        stderr(&again)
    );
}

#[test]
fn a_run_whose_output_nobody_reads_any_more_is_stopped_and_its_recording_is_whole() {
    let (folder, served) = (Folder::new(), Served::start(exe()));
    let file = folder.path("closed.rec");
    let (path, component) = (file.to_str().expect("UTF-8"), folder.component("chat"));
    let mut command = served.trellis(&["run", "--record", path, &component]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("runs");
    let (mut input, mut shown) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
    writeln!(input, "What is 37 + 48?").expect("it reads");
    std::io::Read::read_exact(&mut shown, &mut [0]).expect("it answers");
    drop(shown);
    // Its answer finds no reader.
    writeln!(input, "What is 3 + 4?").expect("it reads");
    assert_eq!(daemons::wait(&mut child).code(), Some(0));
    let again = folder.replay(&file, None);
    assert_eq!(again.status.code(), Some(0), "{}", stderr(&again));
    let end = events(&again).pop().expect("an end");
    assert_eq!(end["recorded"]["error"]["code"], "stopped", "{end}");
}

#[test]
fn a_recording_that_outgrew_its_room_says_that_it_lacks_the_end() {
    let mut config = daemons::config(exe());
    config.limits.recording_bytes = 1_000;
    let (folder, served) = (Folder::new(), Served::start_with(exe(), &config, &[]));
    let file = folder.path("small.rec");
    let first = folder.record(&served, &file, "chat", &["What is 37 + 48?"], "");
    let end = events(&first).pop().expect("an end");
    assert_eq!(end["error"]["name"], "recording_bytes", "{end}");
    let end = events(&folder.replay(&file, None)).pop().expect("an end");
    assert_eq!((&end["ok"], &end["recorded"]["cut"]), (&Value::Bool(true), &Value::Bool(true)), "{end}");
    let shown = stderr(&Folder::replay_for_people(&file));
    assert!(shown.contains("up to where the recording ends, which lacks the end of that run"), "{shown}");
}

#[test]
fn the_first_call_that_differs_is_shown_with_both_sides() {
    let (folder, served) = (Folder::new(), Served::start(exe()));
    let file = folder.path("chat.rec");
    let first = folder.record(&served, &file, "chat", &["What is 37 + 48?"], "");
    assert!(first.status.success(), "{}", stderr(&first));
    let other = folder.replay(&file, Some("complete"));
    assert_eq!(other.status.code(), Some(3), "{}", stderr(&other));
    let end = events(&other).pop().expect("an end");
    assert_eq!(end["ok"], false, "{end}");
    let message = end["error"]["message"].as_str().expect("a message");
    assert!(message.contains("\n  recorded: ") && message.contains("\n  replayed: "), "{message}");
    assert!(message.contains("at entry "), "{message}");
    assert_eq!(stderr(&other), "", "it is said once");
}

#[test]
fn a_recording_that_was_cut_or_changed_says_where() {
    let (folder, served) = (Folder::new(), Served::start(exe()));
    let file = folder.path("whole.rec");
    let first = folder.record(&served, &file, "complete", &["--max-tokens", "8", "Once"], "");
    assert!(first.status.success(), "{}", stderr(&first));
    let whole = fs::read(&file).expect("it is there");
    let broken = folder.path("broken.rec");

    fs::write(&broken, &whole[..whole.len() - 20]).expect("written");
    let cut = folder.replay(&broken, None);
    assert_eq!(cut.status.code(), Some(2));
    assert!(stderr(&cut).contains("it was cut short after entry "), "{}", stderr(&cut));

    let mut bytes = whole.clone();
    let place = bytes.len() - 200;
    bytes[place] ^= 1;
    fs::write(&broken, &bytes).expect("written");
    let changed = folder.replay(&broken, None);
    assert_eq!(changed.status.code(), Some(2));
    let message = stderr(&changed);
    assert!(message.contains("is not what was written there") || message.contains("cut short"), "{message}");
    assert!(message.contains("at byte "), "{message}");

    fs::write(&broken, b"no recording").expect("written");
    let none = folder.replay(&broken, None);
    assert_eq!(none.status.code(), Some(2));
    assert!(stderr(&none).contains("does not begin like a recording"), "{}", stderr(&none));
}

#[test]
fn a_guest_whose_model_was_unloaded_is_replayed_with_that_end() {
    let (folder, served) = (Folder::new(), Served::start(exe()));
    let file = folder.path("unloaded.rec");
    let (path, component) = (file.to_str().expect("UTF-8"), folder.component("chat"));
    // It has a context, and waits for its second line.
    let words = ["run", "--json", "--record", path, &component];
    let mut child =
        served.trellis(&words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("runs");
    let mut input = child.stdin.take().expect("piped");
    writeln!(input, "What is 37 + 48?").expect("it reads");
    let contexts = || output(&mut served.trellis(&["models", "--json"])).stdout;
    let begun = std::time::Instant::now();
    while !String::from_utf8_lossy(&contexts()).contains("\"n_contexts\":1") {
        assert!(begun.elapsed() < daemons::PATIENCE, "it opens a context");
    }
    assert!(output(&mut served.trellis(&["unload", "tiny", "--drain", "0"])).status.success());
    let first = child.wait_with_output().expect("it ends");
    drop(input);
    let end = events(&first).pop().expect("an end");
    assert_eq!(end["error"]["code"], "model_unloaded", "{end}");
    assert_eq!(first.status.code(), Some(i32::from(trellis::cli::TRY_AGAIN)));
    let again = folder.replay(&file, None);
    assert_eq!(replayed(&again), events(&first), "{}", stderr(&again));
    assert_eq!(again.status.code(), Some(0), "all was as recorded");
    // To replay it once more would change nothing.
    let shown = Folder::replay_for_people(&file);
    assert_eq!(shown.status.code(), Some(0));
    assert!(
        stderr(&shown).contains("all as recorded; that run ended so: model \"tiny\" was unloaded"),
        "{}",
        stderr(&shown)
    );
}
