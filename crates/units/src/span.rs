//! Numbers that are not known exactly.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A number that is not known exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Span {
    /// At the least.
    pub lower: f64,
    /// Likely.
    pub likely: f64,
    /// At the most.
    pub upper: f64,
}

impl Span {
    /// A number that is known.
    #[must_use]
    pub const fn exactly(value: f64) -> Self {
        Self { lower: value, likely: value, upper: value }
    }

    /// In whatever order they come; the middle one is likely.
    #[must_use]
    pub fn of(mut three: [f64; 3]) -> Self {
        three.sort_by(f64::total_cmp);
        let [lower, likely, upper] = three;
        Self { lower, likely, upper }
    }

    /// What was measured: the median, and how far others lay from it. None of nothing.
    #[must_use]
    pub fn measured(values: &[f64]) -> Option<Self> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (lower, upper) = (*sorted.first()?, *sorted.last()?);
        Some(Self { lower, likely: median(&sorted), upper })
    }

    /// Wider by this share of what is likely, at both ends.
    #[must_use]
    pub fn wider(self, by: f64) -> Self {
        let more = self.likely * by;
        Self { lower: (self.lower - more).max(0.0), upper: self.upper + more, ..self }
    }

    /// This likely value, between these bounds or where it lies outside of them.
    #[must_use]
    pub fn holding(likely: f64, lower: f64, upper: f64) -> Self {
        Self { lower: lower.min(likely).max(0.0), likely, upper: upper.max(likely) }
    }

    /// How wide it is, of what is likely.
    #[must_use]
    pub fn width(&self) -> f64 {
        if self.likely > 0.0 { (self.upper - self.lower) / self.likely } else { 0.0 }
    }

    /// Whether a value lies in it.
    #[must_use]
    pub fn has(&self, value: f64) -> bool {
        (self.lower..=self.upper).contains(&value)
    }
}

fn median(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    if n % 2 == 1 { sorted[n / 2] } else { f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_spans_all_of_it_around_its_median_and_what_is_no_number_counts_for_nothing() {
        assert_eq!(Span::measured(&[]), None);
        assert_eq!(Span::measured(&[f64::NAN]), None);
        assert_eq!(Span::measured(&[3.0, 1.0, f64::INFINITY]), Some(Span { lower: 1.0, likely: 2.0, upper: 3.0 }));
        let span = Span::of([9.0, 1.0, 4.0]);
        assert_eq!(span, Span { lower: 1.0, likely: 4.0, upper: 9.0 });
        assert_eq!(span.wider(0.5), Span { lower: 0.0, likely: 4.0, upper: 11.0 });
        assert!(span.has(1.0) && span.has(9.0) && !span.has(9.1));
        assert!((span.width() - 2.0).abs() < 1e-12);
        assert_eq!(Span::holding(5.0, 6.0, 7.0), Span { lower: 5.0, likely: 5.0, upper: 7.0 });
    }
}
