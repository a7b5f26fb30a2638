//! The terminal, which is given back as it was, however the command ends.

use ratatui::DefaultTerminal;

use super::app::App;
use super::view::{self, Palette};
use crate::cli::error::CliError;

/// The alternate screen of a terminal, until it is dropped. A panic gives it back as well, before it says what it is.
pub(super) struct Screen {
    terminal: DefaultTerminal,
    palette: Palette,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// It is none, or refuses.
    pub(super) fn open() -> Result<Self, CliError> {
        let opened = ratatui::try_init().map_err(CliError::io("take the terminal"));
        // What was begun of it is undone as well.
        let terminal = opened.inspect_err(|_| ratatui::restore())?;
        Ok(Self { terminal, palette: Palette::of_environment() })
    }

    /// Draws a frame as large as the terminal is now.
    ///
    /// # Errors
    /// The terminal is gone.
    pub(super) fn draw(&mut self, app: &mut App) -> Result<(), CliError> {
        let palette = self.palette;
        let drawn = self.terminal.draw(|frame| view::draw(app, palette, frame.area(), frame.buffer_mut()));
        drawn.map(drop).map_err(CliError::io("write to the terminal"))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}
