//! A terminal with a command in it, by tmux: keys go in, and what is on the screen comes out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::daemons::{self, PATIENCE};

/// Time between two looks at the screen.
const PAUSE: Duration = Duration::from_millis(20);

/// Runs a command, which interrupts are for, and writes down its exit status: a tmux on a busy machine may not hear that a child of its
/// own has ended.
const AND_SAY_HOW_IT_ENDED: &str =
    r#"trap : INT; ended=$0; "$@"; echo $? >"$ended.new"; mv "$ended.new" "$ended"; exec tail -f /dev/null"#;

/// A terminal of 80 columns and 24 lines. What runs in it is ended when this is dropped.
#[derive(Debug)]
pub struct Terminal(TempDir);

impl Terminal {
    /// Runs a command in a terminal, with this in its environment. None, and a word about it, where there is no tmux.
    ///
    /// # Panics
    /// tmux does not start.
    #[must_use]
    pub fn run(exe: &str, arguments: &[&str], environment: &[(&str, &Path)]) -> Option<Self> {
        let terminal = Self(tempfile::tempdir().expect("a folder"));
        if Command::new("tmux").arg("-V").output().is_err() {
            println!("skipped: tmux is not installed");
            return None;
        }
        let mut start = terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24"]);
        start.envs(environment.iter().copied()).env("LC_ALL", "C.UTF-8");
        // What is left on the screen stays when the command has ended.
        start.args(["sh", "-c", AND_SAY_HOW_IT_ENDED]).arg(terminal.ended()).arg(exe).args(arguments);
        start.args([";", "set-option", "history-limit", "10000"]);
        done(&mut start);
        Some(terminal)
    }

    fn tmux(&self, arguments: &[&str]) -> Command {
        let mut command = daemons::trellis("tmux");
        command.arg("-S").arg(self.0.path().join("tmux")).args(arguments);
        command
    }

    fn does(&self, arguments: &[&str]) -> String {
        done(&mut self.tmux(arguments))
    }

    /// Types a text and presses Enter.
    ///
    /// # Panics
    /// The terminal is gone.
    pub fn line(&self, text: &str) {
        self.types(text);
        self.press(&["Enter"]);
    }

    /// Types a text.
    ///
    /// # Panics
    /// As [`Self::line`].
    pub fn types(&self, text: &str) {
        self.does(&["send-keys", "-l", "--", text]);
    }

    /// Presses keys, as tmux names them: `Up`, `C-c`.
    ///
    /// # Panics
    /// As [`Self::line`].
    pub fn press(&self, keys: &[&str]) {
        self.does(&[&["send-keys"], keys].concat());
    }

    /// Pastes a text, marked as pasted if the command has asked for that.
    ///
    /// # Panics
    /// As [`Self::line`].
    pub fn paste(&self, text: &str) {
        self.does(&["set-buffer", "--", text]);
        self.does(&["paste-buffer", "-p"]);
    }

    /// What is on the screen, without what is empty below.
    ///
    /// # Panics
    /// As [`Self::line`].
    #[must_use]
    pub fn screen(&self) -> String {
        self.does(&["capture-pane", "-p"]).trim_end().to_owned()
    }

    /// Waits until the screen is as it should be; the screen.
    ///
    /// # Panics
    /// It does not become so within [`PATIENCE`].
    pub fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let screen = self.screen();
            if is_so(&screen) {
                return screen;
            }
            assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}\n{screen}");
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until the screen ends with these lines, the last of which may go on.
    ///
    /// # Panics
    /// As [`Self::until`].
    pub fn ends_with(&self, lines: &[&str]) -> String {
        let end = lines.join("\n");
        self.until(&end, |screen| screen.ends_with(end.trim_end()))
    }

    /// Waits until the command has ended; its exit status.
    ///
    /// # Panics
    /// It does not end within [`PATIENCE`].
    #[must_use]
    pub fn status(&self) -> i32 {
        self.until("the command ends", |_| self.ended().exists());
        let status = fs::read_to_string(self.ended()).expect("it was just there");
        status.trim().parse().expect("a number")
    }

    /// The file with the exit status.
    fn ended(&self) -> PathBuf {
        self.0.path().join("ended")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]).output();
    }
}

fn done(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = daemons::output(command);
    assert!(status.success(), "{command:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8_lossy(&stdout).into_owned()
}
