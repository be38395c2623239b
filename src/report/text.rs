//! Text for a terminal: the tables, lists and numbers of all reports.

use comfy_table::{Cell, CellAlignment, Row, Table, presets};

/// Columns of a line.
pub(crate) const WIDTH: usize = 100;

/// A table without lines: first left-aligned columns, then right-aligned ones.
pub(crate) struct TextTable {
    table: Table,
    left: usize,
    most: usize,
    rows: usize,
}

impl TextTable {
    /// A table whose first `left` columns are left-aligned.
    pub(crate) fn new<C: Into<Cell>>(left: usize, header: impl IntoIterator<Item = C>) -> Self {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(Row::from(header.into_iter().collect::<Vec<C>>()));
        TextTable { table, left, most: usize::MAX, rows: 0 }
    }

    /// Shows the first `most` rows only, and the number of the others.
    pub(crate) fn at_most(self, most: usize) -> Self {
        TextTable { most, ..self }
    }

    /// Appends a row.
    pub(crate) fn row<C: Into<Cell>>(&mut self, cells: impl IntoIterator<Item = C>) {
        self.rows += 1;
        if self.rows <= self.most {
            self.table.add_row(cells.into_iter().collect::<Vec<C>>());
        }
    }

    /// The lines of the table, each with its newline and without trailing blanks.
    pub(crate) fn render(mut self) -> String {
        for (index, column) in self.table.column_iter_mut().enumerate() {
            column.set_padding((if index == 0 { 0 } else { 2 }, 0));
            if index >= self.left {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let text = self.table.trim_fmt();
        match self.rows.saturating_sub(self.most) {
            0 => text + "\n",
            more => format!("{text}\n({more} more)\n"),
        }
    }
}

/// Lines of a name and a value, without a newline at the end. The values start in one column and wrap at [`WIDTH`].
pub(crate) fn fields<N: AsRef<str>>(rows: &[(N, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.as_ref().len()).max().unwrap_or(0);
    let lines = rows.iter().map(|(name, value)| {
        let lines = wrap(value, WIDTH - width - 2);
        format!("{:width$}  {}", name.as_ref(), lines.join(&format!("\n{:width$}  ", "")))
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Seconds as milliseconds.
pub(crate) fn ms(seconds: f64) -> String {
    format!("{:.3}", seconds * 1e3)
}

/// Bytes as MB (10^6).
pub(crate) fn mb(bytes: f64) -> String {
    format!("{:.3}", bytes / 1e6)
}

/// "1 token", "2 tokens".
pub(crate) fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Numbers separated by blanks.
pub(crate) fn list<T: ToString>(values: impl IntoIterator<Item = T>) -> String {
    join(values, " ")
}

/// Values with a separator between them.
pub(crate) fn join<T: ToString>(values: impl IntoIterator<Item = T>, separator: &str) -> String {
    values.into_iter().map(|value| value.to_string()).collect::<Vec<_>>().join(separator)
}

/// A number with this many decimals, or nothing.
pub(crate) fn or_blank(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(String::new, |value| format!("{value:.decimals$}"))
}

/// Ascending numbers as ranges: "0, 61-63".
pub(crate) fn ranges(numbers: impl Iterator<Item = u64>) -> String {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for x in numbers {
        match ranges.last_mut() {
            Some(last) if last.1.checked_add(1) == Some(x) => last.1 = x,
            _ => ranges.push((x, x)),
        }
    }
    let text = |(a, b): (u64, u64)| match b - a {
        0 => a.to_string(),
        1 => format!("{a}, {b}"),
        _ => format!("{a}-{b}"),
    };
    ranges.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

/// Cuts the beginning off a text that is too long: names and paths differ at their ends.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_string();
    }
    format!("...{}", text.chars().skip(length + 3 - width).collect::<String>())
}

/// Breaks a text between words into lines of at most `width` characters. A longer word stays whole.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("`lines` starts with one line and only grows");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_string());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_counts_rows_beyond_its_limit() {
        let mut table = TextTable::new(1, ["name", "n"]).at_most(2);
        for (name, n) in [("a", 1), ("bcdefg", 22), ("c", 3), ("d", 4)] {
            table.row([name.to_string(), n.to_string()]);
        }
        assert_eq!(table.render(), "name     n\na        1\nbcdefg  22\n(2 more)\n");
    }

    #[test]
    fn long_values_wrap_in_their_column() {
        let text = fields(&[("a", "1".to_string()), ("long", ["word"; 30].join(" "))]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (3, "a     1"));
        assert!(lines.iter().all(|line| line.len() <= WIDTH) && lines[2].starts_with("      word"), "{text}");
    }

    #[test]
    fn neighbouring_numbers_become_ranges() {
        assert_eq!(ranges([0, 2, 3, 61, 62, 63].into_iter()), "0, 2, 3, 61-63");
    }
}
