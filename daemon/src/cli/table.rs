//! Aligned columns.

use super::output::escaped_line;

/// Rows under a head, as wide as they need to be; numbers to the right.
pub(crate) struct Table<const N: usize> {
    head: [&'static str; N],
    alignment: [Align; N],
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
            rows: Vec::new(),
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
    fn a_cell_stays_in_its_row() {
        let mut table = Table::new([("NAME", Align::Left)]);
        table.push(["a\nb\u{1b}[2J".into()]);
        assert_eq!(table.render(), "NAME\na\\nb\\u{1b}[2J\n");
    }
}
