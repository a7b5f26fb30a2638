//! The line at the prompt, edited, with what was written before.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{
    Cmd, ConditionalEventHandler, Context, Editor, Event, EventContext, EventHandler, Helper, KeyCode,
    KeyEvent, Modifiers, RepeatCount,
};
use tokio::sync::mpsc;

use super::command;
use super::settings::Settings;
use crate::cli::error::CliError;
use crate::cli::output::remark;

/// What stands before what the user writes.
pub(super) const SIGN: &str = ">>> ";
/// Messages that are kept from one conversation to the next.
const N_KEPT_MAX: usize = 1000;
/// A longer message is brought back in its own conversation alone.
const KEPT_BYTES_MAX: usize = 16 << 10;
/// How long a terminal takes to be as it was before.
const RESTORE_TIME: Duration = Duration::from_secs(1);
/// How often it is asked for meanwhile.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);

/// What comes of a prompt.
#[derive(Debug)]
pub(super) enum Line {
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or no terminal any more.
    End,
    Failed(ReadlineError),
}

/// A thread that reads lines from the terminal, one when it is asked for: a read can neither be awaited nor taken back.
#[derive(Debug)]
pub(super) struct Prompt {
    wanted: mpsc::Sender<()>,
    lines: mpsc::Receiver<Line>,
    /// Whether the terminal has been the editor's since the prompt was asked for.
    is_edited: Arc<AtomicBool>,
}

impl Prompt {
    /// Starts the thread. What is written is kept in this file, if there is one.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(super) fn start(history: Option<PathBuf>) -> Result<Self, CliError> {
        let (wanted, mut asked) = mpsc::channel(1);
        let (sender, lines) = mpsc::channel(1);
        let is_edited = Arc::<AtomicBool>::default();
        let keys = Keys { is_edited: is_edited.clone() };
        let read = move || {
            let mut editor = match editor(keys, history.as_deref()) {
                Ok(editor) => editor,
                Err(error) => return drop(sender.blocking_send(Line::Failed(error))),
            };
            let mut history = history;
            while let Some(()) = asked.blocking_recv() {
                let line = line(&mut editor, &mut history);
                if sender.blocking_send(line).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("prompt".to_owned())
            .spawn(read)
            .map_err(CliError::io("read lines"))?;
        Ok(Self { wanted, lines, is_edited })
    }

    /// Shows the prompt. [`Self::line`] has what comes of it.
    pub(super) async fn show(&self) {
        self.is_edited.store(false, Ordering::Relaxed);
        // Where the thread has ended, its last word is there to be read.
        let _ = self.wanted.send(()).await;
    }

    /// Whether an interrupt that comes now is about the line that was written: while it is, the terminal makes none, as Ctrl-C is a key
    /// then. One from before the prompt is about what was there before.
    pub(super) fn is_edited(&self) -> bool {
        self.is_edited.load(Ordering::Relaxed)
    }

    /// What comes of the prompt that was shown last.
    pub(super) async fn line(&mut self) -> Line {
        self.lines.recv().await.unwrap_or(Line::End)
    }

    /// Takes the prompt away and leaves the terminal as it was before.
    pub(super) async fn withdraw(&mut self) {
        // The editor takes an interrupt as Ctrl-C, by which it ends.
        let until = tokio::time::Instant::now() + RESTORE_TIME;
        // One that comes before the editor listens is lost.
        while tokio::time::Instant::now() < until {
            #[cfg(unix)]
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::INT);
            if tokio::time::timeout(INTERRUPT_INTERVAL, self.lines.recv()).await.is_ok() {
                return;
            }
        }
    }
}

fn editor(keys: Keys, history: Option<&std::path::Path>) -> rustyline::Result<Editor<Keys, FileHistory>> {
    let config = rustyline::Config::builder()
        .max_history_size(N_KEPT_MAX)?
        .history_ignore_dups(true)?
        .history_ignore_space(true)
        .bracketed_paste(true)
        .completion_type(rustyline::CompletionType::List)
        .build();
    let mut editor = Editor::with_config(config)?;
    editor.set_helper(Some(keys));
    editor.bind_sequence(
        KeyEvent(KeyCode::Enter, Modifiers::NONE),
        EventHandler::Conditional(Box::new(Continuation)),
    );
    editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), EventHandler::Simple(Cmd::Newline));
    if let Some(path) = history
        && let Err(error) = editor.load_history(path)
    {
        remark(&format!("trellis: what was written before cannot be read: {error}"));
    }
    Ok(editor)
}

fn line(editor: &mut Editor<Keys, FileHistory>, history: &mut Option<PathBuf>) -> Line {
    match editor.readline(SIGN) {
        Ok(text) => {
            if text.len() <= KEPT_BYTES_MAX {
                keep(editor, &text, history);
            }
            Line::Text(text)
        }
        Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => Line::Interrupted,
        Err(ReadlineError::Eof) => Line::End,
        // The terminal is gone.
        #[cfg(unix)]
        Err(ReadlineError::Errno(error)) if error as i32 == rustix::io::Errno::IO.raw_os_error() => Line::End,
        Err(error) => Line::Failed(error),
    }
}

/// Keeps a message at once: the conversation may end in any way. That it cannot be is said once.
fn keep(editor: &mut Editor<Keys, FileHistory>, text: &str, history: &mut Option<PathBuf>) {
    let is_new = editor.add_history_entry(text).unwrap_or(false);
    if let Some(path) = history.as_deref()
        && is_new
        && let Err(error) = editor.append_history(path)
    {
        remark(&format!("trellis: what is written cannot be kept: {error}"));
        *history = None;
    }
}

/// What keys do beyond what they do in a shell.
struct Keys {
    /// Set whenever the line is drawn, which it is once the terminal is the editor's.
    is_edited: Arc<AtomicBool>,
}

impl Helper for Keys {}
impl Highlighter for Keys {}
impl Hinter for Keys {
    type Hint = String;

    fn hint(&self, _line: &str, _pos: usize, _context: &Context<'_>) -> Option<String> {
        self.is_edited.store(true, Ordering::Relaxed);
        None
    }
}

impl Validator for Keys {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        Ok(match command::is_open(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for Keys {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _context: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(completions(&line[..pos]))
    }
}

/// Where the word begins that is being written, and what it may become: a command, or a setting. A backslash becomes a new line.
fn completions(written: &str) -> (usize, Vec<String>) {
    let of = |start: usize, names: &mut dyn Iterator<Item = &'static str>| {
        let word = &written[start..];
        (start, names.filter(|name| name.starts_with(word)).map(|name| format!("{name} ")).collect())
    };
    if let Some(before) = written.strip_suffix('\\') {
        return (before.len(), vec!["\n".to_owned()]);
    }
    if let Some(rest) = written.strip_prefix("/set ") {
        let start = written.len() - rest.trim_start().len();
        return of(start, &mut Settings::names());
    }
    if written.starts_with('/') { of(1, &mut command::names()) } else { (0, Vec::new()) }
}

/// Enter behind a backslash begins a new line in its place, as its completion. What is pasted is not asked.
struct Continuation;

impl ConditionalEventHandler for Continuation {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        let is_at_end = context.pos() == context.line().len();
        (is_at_end && context.line().ends_with('\\')).then_some(Cmd::Complete)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_settings_are_completed_and_words_of_a_message_are_not() {
        assert_eq!(completions("/sy"), (1, vec!["system ".to_owned()]));
        assert_eq!(completions("/s").1, ["system ", "set ", "save "]);
        assert_eq!(completions("/set top"), (5, vec!["top_k ".to_owned(), "top_p ".to_owned()]));
        assert_eq!(completions("/system he").1, [""; 0]);
        assert_eq!(completions("he").1, [""; 0]);
        assert_eq!(completions("six\\"), (3, vec!["\n".to_owned()]));
    }
}
