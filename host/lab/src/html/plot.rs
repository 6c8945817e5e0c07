//! Line plots as inline SVG: axes with units, a grid, and a legend.
//!
//! `plotters` writes fixed colours and whole pixels, but the page has a light and a dark set of colours as
//! CSS variables. `charming` needs a script (decision record 54).

use std::fmt::Write as _;

use super::{colours::colour, escape};

/// Size of the plot area, pixels.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 210.0;
/// Space for the title, the axes' labels and the legend.
const LEFT: f64 = 58.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 44.0;
const LEGEND: f64 = 150.0;
/// Maximum length of a name in a legend, characters.
const MAX_NAME: usize = 18;
/// Dash patterns of the arms, so that arms differ in more than their colour.
const DASHES: [&str; 5] = ["", "7 3", "2 2", "9 3 2 3", "4 2"];

/// One axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis<'a> {
    /// Name with the unit.
    pub(super) label: &'a str,
    pub(super) logarithmic: bool,
    /// Fixed ends. Without them the axis ends at the smallest and largest value, and a linear axis includes
    /// 0.
    pub(super) range: Option<(f64, f64)>,
}

/// Line of one arm. The arm's position decides the colour and the dashes.
#[derive(Clone, Debug)]
pub(super) struct Line<'a> {
    pub(super) name: &'a str,
    pub(super) place: usize,
    pub(super) points: Vec<(f64, f64)>,
    pub(super) with_dots: bool,
}

/// An axis with its ends.
struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
}

impl Scale {
    fn of(axis: Axis<'_>, values: impl Iterator<Item = f64>) -> Option<Self> {
        let logarithmic = axis.logarithmic;
        let usable = values.filter(|value| value.is_finite() && (!logarithmic || *value > 0.0));
        let (low, high) = usable
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if let Some((low, high)) = axis.range {
            return Some(Self { low, high, logarithmic });
        }
        if !low.is_finite() {
            return None;
        }
        Some(if logarithmic {
            // Whole thirds of a decade: 1, 2, 5, 10.
            Self { low: round_down(low), high: round_up(high.max(low * 1.01)), logarithmic }
        } else {
            Self { low: low.min(0.0), high: if high > 0.0 { high * 1.05 } else { 1.0 }, logarithmic }
        })
    }

    /// Returns the position of a value on the axis, 0 to 1.
    fn at(&self, value: f64) -> f64 {
        let at = if self.logarithmic {
            (value.max(1e-12) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        at.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let all: Vec<f64> = steps(self.low, self.high).collect();
            let decades = (self.high / self.low).log10();
            let is_decade = |tick: &f64| (tick.log10() - tick.log10().round()).abs() < 1e-9;
            return all.into_iter().filter(|tick| decades < 2.5 || is_decade(tick)).collect();
        }
        let step = round_up((self.high - self.low) / 6.0);
        let first = (self.low / step).ceil() * step;
        (0..12).map(|number| first + step * f64::from(number)).take_while(|tick| *tick <= self.high).collect()
    }
}

/// Returns the numbers between two others that are 1, 2 or 5 times a power of ten.
fn steps(low: f64, high: f64) -> impl Iterator<Item = f64> {
    let first = low.log10().floor() as i32;
    let powers = (first..first + 14).map(|power| 10_f64.powi(power));
    powers
        .flat_map(|power| [power, 2.0 * power, 5.0 * power])
        .filter(move |step| *step >= low * 0.999 && *step <= high * 1.001)
}

fn round_down(value: f64) -> f64 {
    steps(value / 10.0, value).last().unwrap_or(value)
}

fn round_up(value: f64) -> f64 {
    steps(value, value * 10.0).next().unwrap_or(value)
}

/// Draws the lines. Draws nothing if there is no value.
pub(super) fn lines(title: &str, x: Axis<'_>, y: Axis<'_>, lines: &[Line<'_>]) -> String {
    // A latency without a value is infinite.
    let finite = |line: &Line<'_>| {
        let points = line.points.iter().copied();
        points.filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
    };
    let drawn: Vec<Vec<(f64, f64)>> = lines.iter().map(finite).collect();
    let points = || drawn.iter().flatten().copied();
    let scales = Scale::of(x, points().map(|(x, _)| x)).zip(Scale::of(y, points().map(|(_, y)| y)));
    let Some((horizontal, vertical)) = scales else { return String::new() };
    let at_x = |value: f64| LEFT + horizontal.at(value) * WIDTH;
    let at_y = |value: f64| TOP + HEIGHT - vertical.at(value) * HEIGHT;
    let mut svg = open(title, lines.len());
    for tick in vertical.ticks() {
        let at = at_y(tick);
        let (right, text) = (LEFT + WIDTH, number(tick));
        let _ = write!(svg, "<path d=\"M{LEFT} {at:.1}H{right}\" class=\"grid\"/>");
        let _ = write!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            LEFT - 6.0,
            at + 4.0
        );
    }
    for tick in horizontal.ticks() {
        let at = at_x(tick);
        let (bottom, text) = (TOP + HEIGHT, number(tick));
        let _ = write!(svg, "<path d=\"M{at:.1} {TOP}V{bottom}\" class=\"grid\"/>");
        let _ = write!(
            svg,
            "<text x=\"{at:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{text}</text>",
            bottom + 15.0
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>\
         <text transform=\"translate(12 {:.0}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        LEFT + WIDTH / 2.0,
        TOP + HEIGHT + 34.0,
        escape(x.label),
        TOP + HEIGHT / 2.0,
        escape(y.label),
    );
    for (line, points) in lines.iter().zip(&drawn) {
        let _ = write!(svg, "<path fill=\"none\" {} d=\"", stroke(line.place));
        for (number, (x, y)) in points.iter().enumerate() {
            let letter = if number == 0 { 'M' } else { 'L' };
            let _ = write!(svg, "{letter}{:.1} {:.1}", at_x(*x), at_y(*y));
        }
        svg.push_str("\"/>");
        if line.with_dots {
            for (x, y) in points {
                let (x, y, fill) = (at_x(*x), at_y(*y), colour(line.place));
                let _ = write!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" style=\"fill:{fill}\"/>");
            }
        }
    }
    legend(&mut svg, lines);
    svg.push_str("</svg>");
    svg
}

fn open(title: &str, lines: usize) -> String {
    let (width, height) = (LEFT + WIDTH + LEGEND, TOP + HEIGHT + BOTTOM);
    let height = height.max(TOP + 18.0 * f64::from(u32::try_from(lines).unwrap_or(u32::MAX)) + 8.0);
    let title = escape(title);
    format!(
        "<svg viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" \
         aria-label=\"{title}\"><text x=\"{LEFT}\" y=\"15\" class=\"title\">{title}</text>"
    )
}

fn legend(svg: &mut String, lines: &[Line<'_>]) {
    let left = LEFT + WIDTH + 12.0;
    let mut at = TOP + 8.0;
    for line in lines {
        let _ = write!(
            svg,
            "<path {} d=\"M{left} {at}h26\"/><text x=\"{}\" y=\"{}\">{}</text>",
            stroke(line.place),
            left + 32.0,
            at + 4.0,
            escape(&short(line.name))
        );
        at += 18.0;
    }
}

/// Returns a name, shortened to the space that a plot has for it.
pub(super) fn short(name: &str) -> String {
    let mut short: String = name.chars().take(MAX_NAME).collect();
    if name.chars().count() > MAX_NAME {
        short.push('…');
    }
    short
}

fn stroke(place: usize) -> String {
    // When the colours repeat, the dashes are other ones.
    let dash = DASHES.get((place + place / 10) % DASHES.len()).copied().unwrap_or("");
    format!("style=\"stroke:{}\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"", colour(place))
}

/// Formats a tick's number without trailing zeros.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let short = text.trim_end_matches('0').trim_end_matches('.');
    if short == "-0" { "0".to_owned() } else { short.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: Axis<'_> = Axis { label: "time, ms", logarithmic: true, range: None };
    const Y: Axis<'_> = Axis { label: "share", logarithmic: false, range: Some((0.0, 1.0)) };

    fn line(points: &[(f64, f64)]) -> Line<'static> {
        Line { name: "an <arm>", place: 0, points: points.to_vec(), with_dots: false }
    }

    #[test]
    fn a_plot_has_axes_with_units_a_legend_and_a_line_for_each_arm() {
        let svg =
            lines("Latency", X, Y, &[line(&[(3.0, 0.0), (90.0, 1.0)]), line(&[(4.0, 0.0), (50.0, 1.0)])]);
        for part in ["time, ms", "share", "Latency", "an &lt;arm&gt;", ">2<", ">100<"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert_eq!(svg.matches("fill=\"none\"").count(), 2);
    }

    #[test]
    fn a_point_without_a_value_is_left_out() {
        let svg = lines("t", X, Y, &[line(&[(3.0, 0.0), (90.0, 0.5), (f64::INFINITY, 1.0)])]);
        assert!(svg.contains("d=\"M99.5 236.0L447.2 131.0\"/>"), "{svg}");
        assert!(!svg.contains("inf") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn a_plot_without_values_is_left_out() {
        assert!(lines("t", X, Y, &[line(&[])]).is_empty());
        assert!(lines("t", X, Axis { range: None, ..Y }, &[]).is_empty());
    }
}
