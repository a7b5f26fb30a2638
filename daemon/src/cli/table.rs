//! Aligned columns, as wide as they need to be or as a screen is.

use std::borrow::Cow;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::output::escaped_line;

/// Cells of a line between two columns.
const N_CELLS_BETWEEN: usize = 2;

/// Stands for what was cut off.
const CUT: char = '…';

/// Rows under a head; numbers to the right.
pub(crate) struct Table<const N: usize> {
    head: [&'static str; N],
    alignment: [Align; N],
    is_shown: [bool; N],
    /// Cells below which a column is not cut; none where it is never cut.
    n_cells_min: [Option<usize>; N],
    /// Columns that a narrow screen does without, the first to go first.
    spare: Vec<&'static str>,
    rows: Vec<[String; N]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Where a column stands in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    column: usize,
    /// Cells before it.
    pub(crate) start: usize,
    /// Its cells.
    pub(crate) n_cells: usize,
}

impl<const N: usize> Table<N> {
    pub(crate) fn new(columns: [(&'static str, Align); N]) -> Self {
        Self {
            head: columns.map(|(name, _)| name),
            alignment: columns.map(|(_, align)| align),
            is_shown: [true; N],
            n_cells_min: [None; N],
            spare: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// Leaves out the column of this name.
    pub(crate) fn leave_out(&mut self, name: &str) {
        for (is_shown, head) in self.is_shown.iter_mut().zip(self.head) {
            *is_shown &= head != name;
        }
    }

    /// Lets the column of this name be cut to so many cells where room is short.
    pub(crate) fn squeeze(&mut self, name: &str, n_cells_min: usize) {
        for (min, head) in self.n_cells_min.iter_mut().zip(self.head) {
            if head == name {
                *min = Some(n_cells_min.max(head.len()));
            }
        }
    }

    /// Names columns that are left out where room is short, the first to go first.
    pub(crate) fn spare(&mut self, names: &[&'static str]) {
        self.spare.extend(names);
    }

    pub(crate) fn push(&mut self, row: [String; N]) {
        // A cell with a line break would pass for a row.
        self.rows.push(row.map(|cell| escaped_line(&cell).into_owned()));
    }

    /// As text, as wide as it needs to be.
    pub(crate) fn render(&self) -> String {
        self.render_in(usize::MAX)
    }

    /// As text, of which no line has more cells than that.
    pub(crate) fn render_in(&self, n_cells: usize) -> String {
        let places = self.places(n_cells);
        let mut text = String::new();
        for row in std::iter::once(None).chain((0..self.rows.len()).map(Some)) {
            let cells: Vec<String> = places.iter().map(|&place| self.cell(row, place)).collect();
            text.push_str(cells.join(&" ".repeat(N_CELLS_BETWEEN)).trim_end());
            text.push('\n');
        }
        text
    }

    /// Where columns stand in lines of so many cells.
    pub(crate) fn places(&self, n_cells: usize) -> Vec<Place> {
        let most: [usize; N] = std::array::from_fn(|i| {
            self.rows.iter().map(|row| row[i].width()).fold(self.head[i].width(), usize::max)
        });
        let least = |i: usize| self.n_cells_min[i].map_or(most[i], |min| min.min(most[i]));
        let together = |columns: &[usize], width: &dyn Fn(usize) -> usize| {
            columns.iter().map(|&i| width(i)).sum::<usize>()
                + columns.len().saturating_sub(1) * N_CELLS_BETWEEN
        };
        let mut columns: Vec<usize> = (0..N).filter(|&i| self.is_shown[i]).collect();
        for &spare in &self.spare {
            if together(&columns, &least) <= n_cells {
                break;
            }
            columns.retain(|&i| self.head[i] != spare);
        }
        // What is too wide still is cut at the end of the line.
        let mut n_over = together(&columns, &|i| most[i]).saturating_sub(n_cells);
        let mut start = 0;
        let mut places = Vec::new();
        for column in columns {
            let n_cut = n_over.min(most[column] - least(column));
            n_over -= n_cut;
            let n_cells_left = n_cells.saturating_sub(start);
            if n_cells_left == 0 {
                break;
            }
            let place = Place { column, start, n_cells: (most[column] - n_cut).min(n_cells_left) };
            start += place.n_cells + N_CELLS_BETWEEN;
            places.push(place);
        }
        places
    }

    /// What stands there in a row, or in the head where none is given, in as many cells as there are.
    pub(crate) fn cell(&self, row: Option<usize>, place: Place) -> String {
        let text = match row {
            Some(row) => self.rows[row][place.column].as_str(),
            None => self.head[place.column],
        };
        let text = cut(text, place.n_cells);
        let padding = " ".repeat(place.n_cells.saturating_sub(text.width()));
        match self.alignment[place.column] {
            Align::Left => format!("{text}{padding}"),
            Align::Right => format!("{padding}{text}"),
        }
    }
}

/// The beginning of a text that takes no more cells than that, with a sign where something is missing.
pub(crate) fn cut(text: &str, n_cells: usize) -> Cow<'_, str> {
    if text.width() <= n_cells {
        return Cow::Borrowed(text);
    }
    let mut n_left = n_cells.saturating_sub(1);
    let is_in = |c: &char| {
        let n = c.width().unwrap_or(0);
        let fits = n <= n_left;
        n_left = if fits { n_left - n } else { 0 };
        fits
    };
    let mut cut: String = text.chars().take_while(is_in).collect();
    if n_cells > 0 {
        cut.push(CUT);
    }
    Cow::Owned(cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new([("NAME", Align::Left), ("PAGES", Align::Right), ("STATE", Align::Left)]);
        table.push(["best-of-n".into(), "12".into(), "running".into()]);
        table.push(["é".into(), "123456".into(), String::new()]);
        assert_eq!(
            table.render(),
            "NAME        PAGES  STATE\nbest-of-n      12  running\né          123456\n"
        );
    }

    #[test]
    fn a_column_that_is_left_out_takes_no_room() {
        let mut table = Table::new([("NAME", Align::Left), ("USER", Align::Left), ("PAGES", Align::Right)]);
        table.push(["a".into(), "ada".into(), "7".into()]);
        table.leave_out("USER");
        assert_eq!(table.render(), "NAME  PAGES\na         7\n");
    }

    #[test]
    fn a_cell_stays_in_its_row() {
        let mut table = Table::new([("NAME", Align::Left)]);
        table.push(["a\nb\u{1b}[2J".into()]);
        assert_eq!(table.render(), "NAME\na\\nb\\u{1b}[2J\n");
    }

    fn places(n_cells: usize) -> String {
        let columns = ["NAME", "USER", "PAGES"];
        let mut table = Table::new(columns.map(|name| (name, Align::Left)));
        table.squeeze("NAME", 5);
        table.spare(&["PAGES", "USER"]);
        table.push(["一二三四五".into(), "ada".into(), "12".into()]);
        table.render_in(n_cells)
    }

    #[test]
    fn a_narrow_screen_gets_less_of_names_and_then_fewer_columns() {
        assert_eq!(places(24), "NAME        USER  PAGES\n一二三四五  ada   12\n");
        assert_eq!(places(19), "NAME    USER  PAGES\n一二…   ada   12\n");
        assert_eq!(places(17), "NAME        USER\n一二三四五  ada\n");
        assert_eq!(places(12), "NAME    USER\n一二…   ada\n");
        assert_eq!(places(8), "NAME\n一二三…\n");
        assert_eq!(places(2), "N…\n…\n");
        for n_cells in 0..40 {
            assert!(places(n_cells).lines().all(|line| line.width() <= n_cells), "{n_cells}");
        }
    }
}
