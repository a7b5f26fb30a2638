//! How wide a screen is, and text that fits it.

use std::io::IsTerminal;

use clap::Args;
use unicode_width::UnicodeWidthStr;

/// Cells of a line where no terminal says.
pub(super) const N_CELLS: usize = 80;

/// Whether lines fit a screen.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct WidthArgs {
    /// Show all, however long lines come to be
    #[arg(long)]
    wide: bool,
}

impl WidthArgs {
    /// Whether all is wanted, however long lines come to be.
    pub(super) fn is_wide(self) -> bool {
        self.wide
    }

    /// The most cells of a line.
    pub(super) fn n_cells(self) -> usize {
        if self.wide { usize::MAX } else { screen_width() }
    }
}

/// Cells of a line on the terminal of the standard output.
pub(super) fn screen_width() -> usize {
    let size = std::io::stdout().is_terminal().then(crossterm::terminal::size);
    // A terminal that does not know says 0.
    size.and_then(Result::ok)
        .map_or(N_CELLS, |(n_cells, _)| if n_cells == 0 { N_CELLS } else { n_cells.into() })
}

/// A title and a text after it, in lines of so many cells that end in a line break; further lines begin with so many spaces. A word that
/// is longer than a line stays whole.
pub(super) fn wrapped(title: &str, text: &str, n_indent: usize, n_cells: usize) -> String {
    let mut lines = title.to_owned();
    let mut n_used = title.width();
    let mut is_first = true;
    for word in text.split(' ') {
        let n_wanted = word.width() + usize::from(!is_first);
        if !is_first && n_used.saturating_add(n_wanted) > n_cells {
            lines.push('\n');
            lines.push_str(&" ".repeat(n_indent));
            n_used = n_indent + word.width();
        } else {
            lines.push_str(if is_first { "" } else { " " });
            n_used += n_wanted;
        }
        lines.push_str(word);
        is_first = false;
    }
    lines.push('\n');
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_and_nothing_is_lost() {
        let text = "120 in 60 steps, 9 in vain (4 given up)";
        let shown = wrapped("rows  ", text, 6, 24);
        assert_eq!(shown, "rows  120 in 60 steps, 9\n      in vain (4 given\n      up)\n");
        assert_eq!(wrapped("rows  ", text, 6, usize::MAX), format!("rows  {text}\n"));
        assert_eq!(wrapped("", "/a/very/long/path: it is", 2, 10), "/a/very/long/path:\n  it is\n");
        assert_eq!(wrapped("", "", 2, 10), "\n");
    }
}
