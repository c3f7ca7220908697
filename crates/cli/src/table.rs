//! Rows under titles, aligned, for a terminal.

/// A table.
pub struct Table {
    titles: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

/// Stands where there is nothing to say.
pub const NOTHING: &str = "-";

impl Table {
    /// An empty table. A title that begins with `>` has its column lean to the right.
    pub fn new(titles: &[&'static str]) -> Self {
        Self { titles: titles.to_vec(), rows: vec![] }
    }

    /// Adds a row: a cell for each title.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().map(|cell| printable(&cell)).collect();
        assert_eq!(cells.len(), self.titles.len(), "a row has a cell for each title");
        self.rows.push(cells);
    }

    /// The lines, each with its end.
    pub fn lines(&self) -> String {
        let titles: Vec<String> = self.titles.iter().map(|t| t.trim_start_matches('>').to_owned()).collect();
        let width = |i: usize| self.rows.iter().chain([&titles]).map(|r| r[i].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..titles.len()).map(width).collect();
        let mut out = String::new();
        for row in [&titles].into_iter().chain(&self.rows) {
            let mut line = String::new();
            for ((cell, width), title) in row.iter().zip(&widths).zip(&self.titles) {
                line += &if title.starts_with('>') { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
            }
            out += line.trim_end();
            out.push('\n');
        }
        out
    }
}

/// `text` without what would move a terminal's cursor or break a row; nothing becomes a dash.
pub fn printable(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.is_empty() { NOTHING.into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_under_their_titles_and_cells_cannot_break_a_row() {
        let mut table = Table::new(&["NAME", ">SIZE", "WHERE"]);
        table.row(["a".into(), "1".into(), String::new()]);
        table.row(["long\x1b\n".into(), "12345".into(), "x".into()]);
        assert_eq!(table.lines(), "NAME     SIZE  WHERE\na           1  -\nlong    12345  x\n");
    }
}
