//! Aligned columns.

use super::output::escaped_line;

/// Rows under a head, as wide as they need to be; numbers to the right.
pub(crate) struct Table<const N: usize> {
    head: [&'static str; N],
    alignment: [Align; N],
    is_shown: [bool; N],
    rows: Vec<[String; N]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

impl<const N: usize> Table<N> {
    pub(crate) fn new(columns: [(&'static str, Align); N]) -> Self {
        Self {
            head: columns.map(|(name, _)| name),
            alignment: columns.map(|(_, align)| align),
            is_shown: [true; N],
            rows: Vec::new(),
        }
    }

    /// Leaves out the column of this name.
    pub(crate) fn leave_out(&mut self, name: &str) {
        for (is_shown, head) in self.is_shown.iter_mut().zip(self.head) {
            *is_shown &= head != name;
        }
    }

    pub(crate) fn push(&mut self, row: [String; N]) {
        // A cell with a line break would pass for a row.
        self.rows.push(row.map(|cell| escaped_line(&cell).into_owned()));
    }

    pub(crate) fn render(&self) -> String {
        let head = self.head.map(str::to_owned);
        let lines: Vec<&[String; N]> = std::iter::once(&head).chain(&self.rows).collect();
        let widths: [usize; N] =
            std::array::from_fn(|i| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0));
        let mut text = String::new();
        for line in lines {
            let cells: Vec<String> = (0..N)
                .filter(|&i| self.is_shown[i])
                .map(|i| match self.alignment[i] {
                    Align::Left => format!("{:<width$}", line[i], width = widths[i]),
                    Align::Right => format!("{:>width$}", line[i], width = widths[i]),
                })
                .collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }
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
}
