//! A page of tables and drawings that are not one report's: the papers' figures.

use super::svg::escape;
use super::{Cell, Kind, Page, style};

/// The page. Drawings are whole `<svg>` elements.
pub(crate) fn document<'a>(
    title: &str,
    tables: impl Iterator<Item = (&'a str, &'a [String], usize, &'a [Vec<String>])>,
    drawings: impl Iterator<Item = String>,
    remarks: &[String],
) -> String {
    let mut page = Page::default();
    page.put(format_args!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<title>{0}</title>\n<style>{1}</style>\n</head>\n\
         <body>\n<h1>{0}</h1>\n",
        escape(title),
        style::CSS
    ));
    for (title, columns, words, rows) in tables {
        page.put(format_args!("<h2>{}</h2>\n", escape(title)));
        let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
        let rows: Vec<Vec<Cell>> = rows
            .iter()
            .map(|row| row.iter().map(|text| Cell { text: text.clone(), kind: Kind::Plain }).collect())
            .collect();
        page.table(&columns, words, &rows);
    }
    for drawing in drawings {
        page.put(format_args!("<figure>\n{drawing}</figure>\n"));
    }
    page.list(remarks);
    page.put(format_args!("</body>\n</html>\n"));
    page.out
}
