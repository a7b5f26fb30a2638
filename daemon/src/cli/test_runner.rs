//! `trellis test-runner`: what cargo runs a crate's test program with.
//!
//! The program is a WASI command around the standard test harness. A panic ends it, so that each test is started by itself,
//! as a guest; the harness says which tests there are.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use futures_util::stream::{self, StreamExt as _};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;
use trellis_client::{Client, Error, Event, Program, StartOptions};

use super::connect::{read_component, start};
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format, escaped_line};
use super::seconds::some_seconds;
use super::seed::seed;
use crate::config::{Config, Device};

/// Bytes of what a test prints that are kept.
const OUTPUT_BYTES_MAX: usize = 1 << 20;

/// Tests that run at a time.
const N_AT_ONCE: usize = 8;

/// What cargo runs a guest's test program with
#[derive(Debug, Args)]
pub(crate) struct TestRunnerArgs {
    /// The seed that each test sees
    #[arg(long, value_parser = seed, default_value_t = 1, allow_negative_numbers = true)]
    seed: u64,
    /// How long each may take
    #[arg(long, value_parser = some_seconds, default_value = "60", allow_negative_numbers = true)]
    timeout: Duration,
    /// The test program, then what it is to be told
    #[arg(value_name = "FILE [ARGS]", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// How a test went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Passed,
    Failed,
    Ignored,
}

/// A test that is done.
#[derive(Debug, Serialize)]
struct Done {
    name: String,
    outcome: Outcome,
    elapsed_ms: u64,
    /// What it printed, emitted and ended with.
    output: Vec<String>,
}

/// A program that is started as often as there are tests.
struct Runner {
    client: Client,
    program: Program,
    seed: u64,
    timeout: Duration,
}

/// What a run of the program printed, and why it failed if it did.
struct Ended {
    lines: Vec<String>,
    error: Option<String>,
}

pub(crate) async fn run(args: TestRunnerArgs, format: Format) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    // Cargo is between this process and the one that is told to stop.
    if let Err(error) = set_parent_process_death_signal(Some(Signal::TERM)) {
        output::remark(&format!("trellis: this goes on if cargo is killed: {error}"));
    }
    let mut words = args.words.into_iter();
    let path = PathBuf::from(words.next().expect("one at least"));
    let arguments: Vec<String> = words.collect();
    let all_passed = interrupts
        .stop(async {
            let program = Program::Wasm(read_component(&path).await?);
            let config = Config { device: Device::Cpu, ..Config::default() };
            let daemon = start(&config, format).await?;
            let runner =
                Runner { client: daemon.connect().await?, program, seed: args.seed, timeout: args.timeout };
            runner.run_all(&arguments, format).await
        })
        .await?;
    if all_passed { Ok(()) } else { Err(CliError::TestsFailed) }
}

impl Runner {
    /// Whether all passed.
    async fn run_all(&self, arguments: &[String], format: Format) -> Result<bool, CliError> {
        let has = |wanted: &[&str]| arguments.iter().any(|argument| wanted.contains(&argument.as_str()));
        if has(&["--list", "--help", "-h"]) {
            return self.run_whole(arguments).await;
        }
        let Some(names) = self.names(arguments, &[]).await? else {
            return self.run_whole(arguments).await;
        };
        let runs_ignored = has(&["--ignored", "--include-ignored"]);
        let ignored = match runs_ignored {
            true => Vec::new(),
            false => self.names(arguments, &["--ignored"]).await?.unwrap_or_default(),
        };
        let shows_all = has(&["--nocapture", "--no-capture", "--show-output"]);
        let began = Instant::now();
        if format == Format::Text {
            let s = if names.len() == 1 { "" } else { "s" };
            output::print_line(&format!("\nrunning {} test{s}", names.len()))?;
        }
        let mut running = stream::iter(names)
            .map(|name| {
                let is_ignored = ignored.contains(&name);
                async move { self.run_one(name, is_ignored).await }
            })
            .buffered(N_AT_ONCE);
        let mut all = Vec::new();
        while let Some(done) = running.next().await {
            let done = done?;
            show(&done, shows_all, format)?;
            all.push(done);
        }
        if format == Format::Text {
            output::print_line(&summary(&all, began.elapsed()))?;
        }
        Ok(all.iter().all(|done| done.outcome != Outcome::Failed))
    }

    /// The names of the tests that such arguments mean; none if the program has another harness.
    async fn names(&self, arguments: &[String], more: &[&str]) -> Result<Option<Vec<String>>, CliError> {
        let more = more.iter().chain(&["--list", "--format=terse"]).map(|&word| word.to_owned());
        // What it prints otherwise, and how, is not for a list.
        let is_of_form = |argument: &&String| {
            !["-q", "--quiet"].contains(&argument.as_str()) && !argument.starts_with("--format=")
        };
        let asked = arguments.iter().filter(is_of_form).cloned();
        let ended = self.start(asked.chain(more).collect()).await?;
        Ok(if ended.error.is_some() { None } else { listed(&ended.lines) })
    }

    /// Runs the program once, as it is.
    async fn run_whole(&self, arguments: &[String]) -> Result<bool, CliError> {
        let Ended { lines, error } = self.start(arguments.to_vec()).await?;
        lines.iter().try_for_each(|line| output::print_line(&escaped_line(line)))?;
        if let Some(error) = &error {
            output::remark(&format!("error: {error}"));
        }
        Ok(error.is_none())
    }

    async fn run_one(&self, name: String, is_ignored: bool) -> Result<Done, CliError> {
        if is_ignored {
            return Ok(Done { name, outcome: Outcome::Ignored, elapsed_ms: 0, output: Vec::new() });
        }
        let began = Instant::now();
        let arguments = [&name, "--exact", "--include-ignored", "--nocapture"].map(str::to_owned);
        let Ended { lines, error } = self.start(arguments.to_vec()).await?;
        let (mut output, n_run) = without_harness(lines, &name);
        let outcome = match (&error, n_run) {
            (None, Some(0)) => {
                output = vec!["a test that should panic: a panic ends a guest".to_owned()];
                Outcome::Ignored
            }
            (None, Some(_)) => Outcome::Passed,
            (None, None) => {
                output.push("it ended the program".to_owned());
                Outcome::Failed
            }
            (Some(_), _) => Outcome::Failed,
        };
        let has_said = output.iter().any(|line| line.contains("panicked at ") || line.starts_with("Error: "));
        output.extend(error.filter(|_| !has_said));
        let elapsed_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(Done { name, outcome, elapsed_ms, output })
    }

    async fn start(&self, arguments: Vec<String>) -> Result<Ended, CliError> {
        let (seed, deadline) = (Some(self.seed), Some(self.timeout));
        let options = StartOptions { arguments, seed, deadline, ..StartOptions::default() };
        let mut guest = self.client.start(self.program.clone(), options).await?;
        // Nobody talks to a test. One that has ended already does not mind.
        let _ = guest.end_messages().await;
        let (mut lines, mut has_started) = (Vec::new(), false);
        // What is emitted may stop within a line.
        let mut emitted = String::new();
        let mut n_bytes = 0;
        let error = loop {
            let event = guest.next().await;
            if let Some(Ok(event)) = &event {
                n_bytes += event.output_bytes().unwrap_or(0);
            }
            match event {
                Some(Ok(Event::Started { .. })) => has_started = true,
                Some(Ok(_)) if n_bytes > OUTPUT_BYTES_MAX => {}
                Some(Ok(Event::Text { text })) => emitted.push_str(&text),
                Some(Ok(Event::Json { json: line } | Event::Log { line, .. })) => {
                    lines.extend(emitted.lines().map(str::to_owned));
                    emitted.clear();
                    lines.push(line);
                }
                Some(Ok(_)) => {}
                Some(Err(Error::Daemon(body))) if has_started => break Some(body.message),
                Some(Err(error)) => return Err(error.into()),
                None => break None,
            }
        };
        lines.extend(emitted.lines().map(str::to_owned));
        if n_bytes > OUTPUT_BYTES_MAX {
            lines.push(format!("{} bytes more were printed", n_bytes - OUTPUT_BYTES_MAX));
        }
        Ok(Ended { lines, error })
    }
}

/// The tests in a list of the standard harness; none if it is not one, or not whole.
fn listed(lines: &[String]) -> Option<Vec<String>> {
    let name = |line: &String| Some(line.strip_suffix(": test")?.to_owned());
    let is_other = |line: &&String| !line.is_empty() && !line.ends_with(": benchmark");
    lines.iter().filter(is_other).map(name).collect()
}

/// What a test printed, without what the harness says of it; and how many tests the harness ran, if it came to say so.
fn without_harness(lines: Vec<String>, name: &str) -> (Vec<String>, Option<usize>) {
    let begins = format!("test {name} ... ");
    let mut n_run = None;
    let mut printed = Vec::new();
    for line in lines {
        if line == "failures:" {
            // A test that returned an error: what follows is about what stands here already.
            break;
        }
        if let Some(counts) = line.strip_prefix("test result: ") {
            n_run = counts.split_once(". ").and_then(|(_, counts)| counts.split(' ').next()?.parse().ok());
            continue;
        }
        // The first line that is printed stands behind the name.
        let line = line.strip_prefix(&begins).map(str::to_owned).unwrap_or(line);
        if !line.starts_with("note: run with `RUST_BACKTRACE") {
            printed.push(line);
        }
    }
    let is_of_harness =
        |line: &String| line.is_empty() || ["running 1 test", "ok", "FAILED"].contains(&line.as_str());
    let n_begun = printed.iter().take_while(|line| is_of_harness(line)).count();
    printed.drain(..n_begun);
    if n_run == Some(1)
        && let Some(at) = printed.iter().rposition(|line| line == "ok")
    {
        // What was printed to the other stream may stand behind it.
        printed.remove(at);
    }
    while printed.last().is_some_and(is_of_harness) {
        printed.pop();
    }
    (printed, n_run)
}

fn show(done: &Done, shows_all: bool, format: Format) -> Result<(), CliError> {
    if format == Format::Json {
        return output::print(format, done, |_| String::new());
    }
    let outcome = match done.outcome {
        Outcome::Passed => "ok",
        Outcome::Failed => "FAILED",
        Outcome::Ignored => "ignored",
    };
    let why = if done.outcome == Outcome::Ignored { done.output.first() } else { None };
    let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
    output::print_line(&format!("test {} ... {outcome}{why}", escaped_line(&done.name)))?;
    if shows_all && done.outcome == Outcome::Passed {
        done.output.iter().try_for_each(|line| output::print_line(&format!("    {}", escaped_line(line))))?;
    }
    Ok(())
}

/// What failed, with what it said, and how many did.
fn summary(all: &[Done], elapsed: Duration) -> String {
    let of = |outcome| all.iter().filter(move |done| done.outcome == outcome);
    let mut text = String::new();
    let mut add = |line: &str| text.extend([line, "\n"]);
    if of(Outcome::Failed).next().is_some() {
        add("\nfailures:");
        for done in of(Outcome::Failed) {
            add(&format!("\n---- {} ----", escaped_line(&done.name)));
            done.output.iter().for_each(|line| add(&escaped_line(line)));
        }
        add("\nfailures:");
        of(Outcome::Failed).for_each(|done| add(&format!("    {}", escaped_line(&done.name))));
    }
    let [n_passed, n_failed, n_ignored] =
        [Outcome::Passed, Outcome::Failed, Outcome::Ignored].map(|outcome| of(outcome).count());
    let word = if n_failed == 0 { "ok" } else { "FAILED" };
    let seconds = elapsed.as_secs_f64();
    add(&format!(
        "\ntest result: {word}. {n_passed} passed; {n_failed} failed; {n_ignored} ignored; finished in {seconds:.2}s"
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn what_is_no_list_of_tests_is_told() {
        assert_eq!(listed(&lines("a::b: test\nc: benchmark\nd: test")), Some(lines("a::b\nd")));
        assert_eq!(listed(&[]), Some(Vec::new()));
        assert_eq!(listed(&lines("a::b: test\nhello")), None);
    }

    #[test]
    fn what_a_test_printed_is_told_from_what_the_harness_says() {
        let ok = "\nrunning 1 test\ntest a ... first\n\nsecond\nok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored";
        assert_eq!(without_harness(lines(ok), "a"), (lines("first\n\nsecond"), Some(1)));
        let silent = "\nrunning 1 test\ntest a ... ok\n\ntest result: ok. 1 passed; 0 failed";
        assert_eq!(without_harness(lines(silent), "a"), (Vec::new(), Some(1)));
        let panicked = "\nrunning 1 test\nthread 'main' panicked at src/lib.rs:8:5:\noh\ntest a ... ";
        let said = lines("thread 'main' panicked at src/lib.rs:8:5:\noh");
        assert_eq!(without_harness(lines(panicked), "a"), (said, None));
        let failed = "\nrunning 1 test\ntest a ... Error: no\nFAILED\n\nfailures:\n\nfailures:\n    a\n";
        assert_eq!(without_harness(lines(failed), "a"), (lines("Error: no"), None));
        let ignored = "\nrunning 1 test\ntest a - should panic ... ignored\n\ntest result: ok. 0 passed; 0 failed; 1 ignored";
        assert_eq!(without_harness(lines(ignored), "a").1, Some(0));
    }
}
