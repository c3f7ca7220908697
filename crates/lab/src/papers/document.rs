//! Tables and drawings, as text, Markdown, JSON, SVG and one page of HTML.

use crate::plot::lines::{Line, chart};
use crate::plot::page;
use crate::table::{Column, Grid};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// What was made of a set of runs.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// Its title.
    pub title: String,
    /// The tables.
    pub tables: Vec<Table>,
    /// The drawings.
    pub drawings: Vec<Drawing>,
    /// Whether the bounds are kept: what was asked, what was found, and `None` where there are no figures for it.
    pub bounds: Vec<(String, Option<bool>)>,
    /// What one has to know to read it right.
    pub remarks: Vec<String>,
}

/// One table. Cells are figures as people read them; an empty one was not run.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Its title.
    pub title: String,
    /// Titles of the columns; the first so many are words.
    pub columns: Vec<String>,
    /// How many columns are words.
    pub words: usize,
    /// The rows.
    pub rows: Vec<Vec<String>>,
}

/// One drawing: lines over a number.
#[derive(Clone, Debug, Default)]
pub struct Drawing {
    /// Its file's name, without the ending.
    pub name: String,
    /// Its title.
    pub title: String,
    /// What is along the bottom.
    pub x: String,
    /// What is upwards.
    pub y: String,
    /// A name and its points for each line.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
    /// The drawing itself, where another hand has made it: an SVG.
    pub drawn: Option<String>,
}

impl Drawing {
    /// As a file of its own.
    #[must_use]
    pub fn svg(&self) -> String {
        if let Some(drawn) = &self.drawn {
            return drawn.clone();
        }
        let lines: Vec<Line<'_>> = self.lines.iter().map(|(name, points)| Line { name, points }).collect();
        chart(&self.title, &self.x, &self.y, &lines)
    }
}

impl Table {
    fn grid(&self) -> Grid {
        let column = |(i, title): (usize, &String)| {
            if i < self.words { Column::left(title) } else { Column::right(title) }
        };
        let mut grid = Grid::new(self.columns.iter().enumerate().map(column).collect());
        self.rows.iter().for_each(|row| grid.row(row.clone()));
        grid
    }
}

fn verdict(kept: Option<bool>) -> &'static str {
    match kept {
        Some(true) => "kept",
        Some(false) => "NOT KEPT",
        None => "no figures yet",
    }
}

impl Document {
    /// For a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = format!("{}\n", self.title);
        for table in &self.tables {
            let _ = write!(out, "\n{}\n{}", table.title, table.grid().terminal());
        }
        self.below(&mut out, "");
        out
    }

    /// For a document.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut out = format!("# {}\n", self.title);
        for table in &self.tables {
            let _ = write!(out, "\n## {}\n\n{}", table.title, table.grid().markdown());
        }
        for drawing in &self.drawings {
            let _ = write!(out, "\n![{}]({}.svg)\n", drawing.title, drawing.name);
        }
        self.below(&mut out, "- ");
        out
    }

    fn below(&self, out: &mut String, bullet: &str) {
        out.push('\n');
        for (bound, kept) in &self.bounds {
            let _ = writeln!(out, "{bullet}{bound}: {}", verdict(*kept));
        }
        for remark in &self.remarks {
            let _ = writeln!(out, "{bullet}{remark}");
        }
    }

    /// For a program.
    #[must_use]
    pub fn json(&self) -> Value {
        let table = |t: &Table| {
            let row = |row: &Vec<String>| -> Value {
                t.columns
                    .iter()
                    .cloned()
                    .zip(row.iter().map(|cell| cell.parse::<f64>().map_or(json!(cell), |n| json!(n))))
                    .collect::<serde_json::Map<_, _>>()
                    .into()
            };
            json!({"title": t.title, "rows": t.rows.iter().map(row).collect::<Vec<_>>()})
        };
        let bounds = self.bounds.iter().map(|(bound, kept)| json!({"bound": bound, "kept": kept}));
        let drawing = |d: &Drawing| {
            let lines = d.lines.iter().map(|(name, points)| json!({"name": name, "points": points}));
            json!({"title": d.title, "x": d.x, "y": d.y, "lines": lines.collect::<Vec<_>>()})
        };
        json!({
            "title": self.title,
            "tables": self.tables.iter().map(table).collect::<Vec<_>>(),
            "figures": self.drawings.iter().map(drawing).collect::<Vec<_>>(),
            "bounds": bounds.collect::<Vec<_>>(),
            "remarks": self.remarks,
        })
    }

    /// One page with everything in it.
    #[must_use]
    pub fn html(&self) -> String {
        let mut remarks: Vec<String> =
            self.bounds.iter().map(|(bound, kept)| format!("{bound}: {}", verdict(*kept))).collect();
        remarks.extend(self.remarks.iter().cloned());
        page::document(
            &self.title,
            self.tables.iter().map(|t| (t.title.as_str(), t.columns.as_slice(), t.words, t.rows.as_slice())),
            self.drawings.iter().map(Drawing::svg),
            &remarks,
        )
    }
}
