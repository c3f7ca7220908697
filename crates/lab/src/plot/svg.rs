//! Writing SVG: a few shapes with CSS classes, numbers kept short, all text escaped.
//!
//! The output stands within an XHTML-compatible page, so it is well-formed by itself and names no namespace. Colours and
//! fonts are the style sheet's: the same drawing serves a light page, a dark one and paper.

pub(super) use godwit_predict::figure::escape;
use std::fmt::Write as _;

/// `text` cut to `most` characters, with an ellipsis where something was cut.
pub(super) fn shorten(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// A coordinate: a tenth of a pixel is finer than any screen shows.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// Where a text's position is.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// A drawing under way.
pub(super) struct Svg {
    out: String,
}

impl Svg {
    /// Begins a drawing of `width` by `height` user units that fills its container's width.
    pub fn new(label: &str, width: f64, height: f64) -> Self {
        let (width, height) = (number(width), number(height));
        let label = escape(label);
        Self { out: format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label}\">\n") }
    }

    /// Further shapes for the end of a drawing that is finished.
    pub fn more() -> Self {
        Self { out: String::new() }
    }

    /// Ends it.
    pub fn finish(mut self) -> String {
        self.out.push_str("</svg>\n");
        self.out
    }

    /// Writes a piece; writing to a String cannot fail.
    fn put(&mut self, piece: std::fmt::Arguments<'_>) {
        let _ = self.out.write_fmt(piece);
        self.out.push('\n');
    }

    /// A straight line.
    pub fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let [x1, y1, x2, y2] = [x1, y1, x2, y2].map(number);
        self.put(format_args!("<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>"));
    }

    /// A rectangle; `hint` shows when the pointer rests on it.
    pub fn rect(&mut self, class: &str, (x, y): (f64, f64), (width, height): (f64, f64), hint: &str) {
        let [x, y, width, height] = [x, y, width.max(0.0), height.max(0.0)].map(number);
        let shape = format!("<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"");
        if hint.is_empty() {
            self.put(format_args!("{shape}/>"));
        } else {
            self.put(format_args!("{shape}><title>{}</title></rect>", escape(hint)));
        }
    }

    /// A text; `y` is its baseline.
    pub fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let [x, y] = [x, y].map(number);
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        self.put(format_args!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    /// An open line through points.
    pub fn polyline(&mut self, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        let d = path_through(points);
        if !d.is_empty() {
            self.put(format_args!("<path class=\"{class}\" d=\"{d}\"/>"));
        }
    }

    /// A filled shape with these corners.
    pub fn polygon(&mut self, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        let d = path_through(points);
        if !d.is_empty() {
            self.put(format_args!("<path class=\"{class}\" d=\"{d}Z\"/>"));
        }
    }

    /// Dots as one path: lines of no length with round caps, a fraction of the size of as many circles.
    pub fn dots(&mut self, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        let mut d = String::new();
        for (x, y) in points {
            let _ = write!(d, "M{} {}h0", number(x), number(y));
        }
        if !d.is_empty() {
            self.put(format_args!("<path class=\"{class}\" d=\"{d}\"/>"));
        }
    }
}

fn path_through(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    let mut d = String::new();
    for (i, (x, y)) in points.into_iter().enumerate() {
        let command = if i == 0 { 'M' } else { 'L' };
        let _ = write!(d, "{command}{} {}", number(x), number(y));
    }
    d
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_element_or_attribute() {
        assert_eq!(escape("<b a=\"'&'\">\0\u{1b}"), "&lt;b a=&quot;&#39;&amp;&#39;&quot;&gt;\u{fffd}\u{fffd}");
        let mut svg = Svg::new("\" onload=\"x", 10.0, 10.0);
        svg.text("t", (0.0, 0.0), Anchor::Start, "</text><script>");
        let out = svg.finish();
        assert!(!out.contains("<script") && !out.contains("\" onload"), "{out}");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([12.0, 12.34, -0.01, 0.06].map(number), ["12", "12.3", "0", "0.1"]);
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(shorten("größe", 5), "größe");
        assert_eq!(shorten("größen", 5), "größ…");
    }
}
