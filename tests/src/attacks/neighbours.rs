//! Several honest users beside attackers, and what each has had.

use std::io;

use super::neighbour::{GO, MARK, PAUSE, Window};
use super::processes::{Daemon, Neighbour, User};

/// Neighbours that stream at the same times.
#[derive(Debug)]
pub struct Neighbours {
    all: Vec<Neighbour>,
    seen: Vec<Window>,
    complaints: Vec<String>,
}

impl Neighbours {
    /// Lets a neighbour of each of these users learn what it has alone, one after the other; then all pause.
    ///
    /// # Errors
    /// One is gone, or has no tokens.
    pub fn begin(daemon: &Daemon, users: impl IntoIterator<Item = User>) -> io::Result<Self> {
        let mut all = Vec::new();
        for user in users {
            let mut neighbour = daemon.neighbour(user)?;
            neighbour.learn()?;
            neighbour.tell(PAUSE)?;
            all.push(neighbour);
        }
        let seen = vec![Window::default(); all.len()];
        Ok(Self { all, seen, complaints: Vec::new() })
    }

    /// All begin to stream. It returns when each has tokens, so that whatever comes next is beside streams that are there.
    ///
    /// # Errors
    /// One is gone, or has no tokens.
    pub fn go(&mut self) -> io::Result<()> {
        for (neighbour, seen) in self.all.iter_mut().zip(&mut self.seen) {
            neighbour.tell(GO)?;
            *seen = std::mem::take(seen).and(&neighbour.first_tokens()?);
        }
        Ok(())
    }

    /// Looks at what each has had since it was last looked at: none goes without tokens in between.
    ///
    /// # Errors
    /// One is gone.
    pub fn look(&mut self) -> io::Result<()> {
        self.tell(MARK)
    }

    /// The last look; all pause.
    ///
    /// # Errors
    /// One is gone.
    pub fn pause(&mut self) -> io::Result<()> {
        self.tell(PAUSE)
    }

    fn tell(&mut self, word: &str) -> io::Result<()> {
        for (idx, (neighbour, seen)) in self.all.iter_mut().zip(&mut self.seen).enumerate() {
            let window = neighbour.tell(word)?;
            if let Some(nothing) = nothing(&window) {
                self.complaints
                    .push(format!("neighbour {idx} {nothing}, {:.0} s after it began", seen.seconds));
            }
            *seen = std::mem::take(seen).and(&window);
        }
        Ok(())
    }

    /// What each has had, and what is wrong with that.
    #[must_use]
    pub fn end(self) -> (Vec<Window>, Vec<String>) {
        let Self { seen, mut complaints, .. } = self;
        for (idx, window) in seen.iter().enumerate() {
            if window.n_wrong > 0 {
                complaints.push(format!("{} tokens of neighbour {idx} were wrong", window.n_wrong));
            }
            complaints.extend(window.errors.iter().map(|error| format!("neighbour {idx}: {error}")));
        }
        (seen, complaints)
    }
}

/// The shortest window in which an honest user has to have something.
const SECONDS_MIN: f64 = 1.0;

/// That a window has no tokens, in words, where it is long enough to have some.
fn nothing(window: &Window) -> Option<String> {
    let is_empty = window.n_tokens == 0 && window.seconds > SECONDS_MIN;
    is_empty.then(|| format!("had nothing for {:.0} s", window.seconds))
}
