//! Axes: from values to pixels, and ticks at values that people read easily.

/// Beyond this no quantity of a report goes (a petabyte; thirty million years), and differences would lose their digits.
const FAR: f64 = 1e15;

/// Values along a stretch of pixels. Values outside are held at the ends, so nothing is ever drawn beside the plot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    scale: Scale,
    lo: f64,
    hi: f64,
    from: f64,
    to: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Linear,
    Log,
}

/// A place on an axis that has a label.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tick {
    pub value: f64,
    pub label: String,
}

impl Axis {
    /// Exactly from `lo` to `hi`; an empty stretch is widened.
    pub fn linear((lo, hi): (f64, f64), (from, to): (f64, f64)) -> Self {
        let lo = if lo.is_finite() { lo.clamp(-FAR, FAR) } else { 0.0 };
        let hi = if hi.is_finite() { hi.min(FAR) } else { lo };
        let hi = if hi > lo { hi } else { lo + 1.0_f64.max(lo.abs() / 1e6) };
        Self { scale: Scale::Linear, lo, hi, from, to }
    }

    /// From zero to the tick at or above `top`.
    pub fn from_zero(top: f64, pixels: (f64, f64)) -> Self {
        let top = if top.is_finite() && top > 0.0 { top.min(FAR) } else { 1.0 };
        let step = step(top / 4.0);
        Self::linear((0.0, (top / step).ceil() * step), pixels)
    }

    /// Logarithmic over whole decades that hold `lo` to `hi`; both must be above zero to count.
    pub fn log((lo, hi): (f64, f64), (from, to): (f64, f64)) -> Self {
        let lo = if lo.is_finite() { lo.clamp(1e-3, FAR) } else { 1.0 };
        let hi = if hi.is_finite() { hi.clamp(lo, FAR) } else { lo };
        let bottom = lo.log10().floor();
        let top = hi.log10().ceil().max(bottom + 1.0);
        Self { scale: Scale::Log, lo: 10f64.powf(bottom), hi: 10f64.powf(top), from, to }
    }

    /// The pixel of a value.
    pub fn at(&self, value: f64) -> f64 {
        let value = if value.is_finite() { value.clamp(self.lo, self.hi) } else { self.lo };
        let share = match self.scale {
            Scale::Linear => (value - self.lo) / (self.hi - self.lo),
            Scale::Log => (value / self.lo).log10() / (self.hi / self.lo).log10(),
        };
        self.from + share * (self.to - self.from)
    }

    /// Whether a value is on the axis.
    pub fn holds(&self, value: f64) -> bool {
        (self.lo..=self.hi).contains(&value)
    }

    /// The first and the last value.
    pub fn ends(&self) -> (f64, f64) {
        (self.lo, self.hi)
    }

    /// The first and the last pixel.
    pub fn pixels(&self) -> (f64, f64) {
        (self.from, self.to)
    }

    /// About `count` ticks; a logarithmic axis has one or three a decade.
    pub fn ticks(&self, count: usize) -> Vec<Tick> {
        match self.scale {
            Scale::Linear => self.linear_ticks(count),
            Scale::Log => {
                let decades = self.lo.log10().round() as i32..=self.hi.log10().round() as i32;
                // Few decades leave room for the 2 and the 5 of each.
                let factors: &[f64] = if decades.clone().count() <= 4 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let values = decades.flat_map(|d| factors.iter().map(move |f| f * 10f64.powi(d)));
                // The powers carry rounding; the last decade has its beginning only.
                let values = values.filter(|v| *v <= self.hi * 1.000_001);
                values.map(|value| Tick { value, label: label(value, value) }).collect()
            }
        }
    }

    fn linear_ticks(&self, count: usize) -> Vec<Tick> {
        let step = step((self.hi - self.lo) / count.max(1) as f64);
        // A millionth of a step absorbs the rounding of the division.
        let first = (self.lo / step - 1e-6).ceil();
        let last = (self.hi / step + 1e-6).floor();
        if last < first {
            return vec![];
        }
        let steps = (last - first).min(50.0) as usize;
        (0..=steps).map(|i| (first + i as f64) * step).map(|value| Tick { value, label: label(value, step) }).collect()
    }
}

/// The smallest 1, 2 or 5 times a power of ten that is not below `rough`.
fn step(rough: f64) -> f64 {
    let rough = if rough.is_finite() && rough > 0.0 { rough } else { 1.0 };
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|f| f * power >= rough * 0.999_999).unwrap_or(10.0);
    factor * power
}

/// A tick's label: the decimals that its step needs, thousands as `k` and `M`.
fn label(value: f64, step: f64) -> String {
    let (value, step, suffix) = match value.abs() {
        v if v >= 1e7 => (value / 1e6, step / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, step / 1e3, "k"),
        _ => (value, step, ""),
    };
    let decimals = if step >= 1.0 { 0 } else { (-step.log10() - 1e-9).ceil().clamp(0.0, 6.0) as usize };
    let text = format!("{value:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let text = if text == "-0" { "0" } else { text };
    // The minus sign, not the hyphen: it is as wide as the digits are.
    format!("{}{suffix}", text.replace('-', "\u{2212}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(axis: Axis, count: usize) -> Vec<String> {
        axis.ticks(count).into_iter().map(|t| t.label).collect()
    }

    #[test]
    fn ticks_stand_at_round_values() {
        let px = (0.0, 100.0);
        assert_eq!(labels(Axis::linear((-5.0, 131.0), px), 7), ["0", "20", "40", "60", "80", "100", "120"]);
        assert_eq!(labels(Axis::linear((-21.0, 22.0), px), 4), ["\u{2212}20", "0", "20"]);
        assert_eq!(labels(Axis::from_zero(0.83, px), 4), ["0", "0.5", "1"]);
        assert_eq!(labels(Axis::from_zero(31_000.0, px), 4), ["0", "10k", "20k", "30k", "40k"]);
        assert_eq!(labels(Axis::log((26.9, 812.0), px), 9), ["10", "20", "50", "100", "200", "500", "1000"]);
        assert_eq!(labels(Axis::log((0.2, 0.3), px), 9), ["0.1", "0.2", "0.5", "1"]);
        assert_eq!(labels(Axis::log((1.0, 1e5), px), 9), ["1", "10", "100", "1000", "10k", "100k"]);
        assert_eq!(labels(Axis::from_zero(0.0, px), 4), ["0", "0.5", "1"]);
    }

    #[test]
    fn values_outside_are_held_at_the_ends() {
        let axis = Axis::linear((0.0, 10.0), (50.0, 150.0));
        assert_eq!([-5.0, 0.0, 5.0, 99.0, f64::NAN].map(|v| axis.at(v)), [50.0, 50.0, 100.0, 150.0, 50.0]);
        let up = Axis::log((1.0, 100.0), (200.0, 0.0));
        assert_eq!([0.0, 1.0, 10.0, 100.0].map(|v| up.at(v)), [200.0, 200.0, 100.0, 0.0]);
    }

    proptest! {
        #[test]
        fn ticks_lie_on_their_axis_and_are_few(lo in -1e9..1e9f64, width in 0.0..1e9f64, count in 1..20usize) {
            let axis = Axis::linear((lo, lo + width), (0.0, 1.0));
            let ticks = axis.ticks(count);
            prop_assert!(ticks.len() <= count + 1);
            let (lo, hi) = axis.ends();
            let slack = (hi - lo) * 1e-5;
            prop_assert!(ticks.iter().all(|t| (lo - slack..=hi + slack).contains(&t.value)));
        }

        #[test]
        fn any_value_has_a_pixel_within_the_plot(lo: f64, hi: f64, value: f64) {
            for axis in [Axis::linear((lo, hi), (10.0, 20.0)), Axis::log((lo, hi), (20.0, 10.0)), Axis::from_zero(hi, (10.0, 20.0))] {
                let at = axis.at(value);
                prop_assert!((9.999..=20.001).contains(&at), "{axis:?} {value} {at}");
            }
        }
    }
}
