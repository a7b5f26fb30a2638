//! The screen on which a progress bar is drawn.
//!
//! A terminal shows Ctrl-C as `^C` where the cursor stands. Behind a bar that fills its line, that would be the line below, where the bar
//! would be drawn anew and taken away: what was drawn before would stay on the screen. So the cursor goes back to the beginning of the
//! bar's last line.

use std::fmt::{Debug, Write as _};
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossterm::cursor::{MoveDown, MoveLeft, MoveRight, MoveUp};
use crossterm::terminal::{Clear, ClearType};
use indicatif::TermLike;

use super::width::N_CELLS;

/// Lines where no terminal says.
const N_LINES: u16 = 24;

/// A screen, and what is to be written to it at once.
#[derive(Debug)]
pub(super) struct BarScreen<W> {
    to: Mutex<W>,
    unwritten: Mutex<String>,
    size: fn() -> (u16, u16),
}

impl BarScreen<io::Stderr> {
    /// The terminal that standard error goes to.
    pub(super) fn of_errors() -> Self {
        Self::over(io::stderr(), || {
            let (n_cells, n_lines) = crossterm::terminal::size().unwrap_or_default();
            // A terminal that does not know says 0.
            let n_cells = if n_cells == 0 { N_CELLS as u16 } else { n_cells };
            (n_cells, if n_lines == 0 { N_LINES } else { n_lines })
        })
    }
}

impl<W> BarScreen<W> {
    fn over(to: W, size: fn() -> (u16, u16)) -> Self {
        Self { to: Mutex::new(to), unwritten: Mutex::default(), size }
    }

    fn unwritten(&self) -> MutexGuard<'_, String> {
        self.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves by so many cells or lines; a terminal takes none for one.
    fn go<C: std::fmt::Display>(&self, n: usize, by: impl FnOnce(u16) -> C) -> io::Result<()> {
        if let Ok(n @ 1..) = u16::try_from(n) {
            write!(self.unwritten(), "{}", by(n)).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

impl<W: Write + Debug + Send> TermLike for BarScreen<W> {
    fn width(&self) -> u16 {
        (self.size)().0
    }

    fn height(&self) -> u16 {
        (self.size)().1
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.go(n, MoveUp)
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.go(n, MoveDown)
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.go(n, MoveRight)
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.go(n, MoveLeft)
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        writeln!(self.unwritten(), "{text}").map_err(io::Error::other)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.unwritten().push_str(text);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        write!(self.unwritten(), "\r{}", Clear(ClearType::CurrentLine)).map_err(io::Error::other)
    }

    fn flush(&self) -> io::Result<()> {
        let text = std::mem::take(&mut *self.unwritten());
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        // Without what fills the line: it was cleared.
        to.write_all(format!("{}\r", text.trim_end_matches(' ')).as_bytes())?;
        to.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

    use super::*;

    /// What was written, for who has given it away.
    #[derive(Clone, Debug, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Written {
        fn take(&self) -> String {
            let bytes = std::mem::take(&mut *self.0.lock().expect("nothing panicked"));
            String::from_utf8(bytes).expect("text")
        }
    }

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("nothing panicked").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_cursor_stands_at_the_beginning_of_a_bar_and_all_its_lines_are_taken_away() {
        let written = Written::default();
        let screen = BarScreen::over(written.clone(), || (20, 24));
        let target = ProgressDrawTarget::term_like(Box::new(screen));
        let bar = ProgressBar::with_draw_target(None, target);
        bar.set_style(ProgressStyle::with_template("{msg}").expect("valid"));
        bar.set_message("waiting");
        bar.tick();
        let drawn = written.take();
        assert!(drawn.ends_with("waiting\r"), "{drawn:?}");
        let long = "waiting for the daemon: loading tiny";
        bar.set_message(long);
        bar.tick();
        let drawn = written.take();
        assert!(drawn.starts_with("\r\u{1b}[2K") && drawn.ends_with(&format!("{long}\r")), "{drawn:?}");
        bar.finish_and_clear();
        let cleared = written.take();
        assert_eq!(cleared.matches("\u{1b}[2K").count(), 2, "{cleared:?}");
        assert!(cleared.starts_with("\u{1b}[1A") && cleared.ends_with("\u{1b}[1A\r"), "{cleared:?}");
    }
}
