//! A plot of the readings as an SVG file.

use std::fmt::Write as _;

use super::readings::{Reading, Readings};

const WIDTH: f64 = 860.0;
/// Height of one panel, and of the space between two.
const PANEL: f64 = 120.0;
const GAP: f64 = 44.0;
const LEFT: f64 = 60.0;

/// A figure of a reading.
type Figure = fn(&Reading) -> f64;

/// Draws one panel for each figure, one above the other, over the same time.
pub(super) fn svg(readings: &Readings) -> String {
    let panels: [(&str, Figure); 3] = [
        ("anonymous memory, MB", |reading| reading.memory),
        ("file descriptors without connections of clients", |reading| reading.descriptors),
        ("threads", |reading| reading.threads),
    ];
    let height = 3.0 * (PANEL + GAP) + 20.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (place, (title, figure)) in panels.into_iter().enumerate() {
        let top = GAP + f64::from(u32::try_from(place).unwrap_or_default()) * (PANEL + GAP);
        panel(&mut svg, title, top, &readings.points(figure));
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, title: &str, top: f64, points: &[(f64, f64)]) {
    let end = points.last().map_or(1.0, |(at, _)| at.max(0.1));
    let most = points.iter().map(|(_, value)| *value).fold(1.0, f64::max) * 1.1;
    let x = |at: f64| LEFT + at / end * (WIDTH - LEFT - 20.0);
    let y = |value: f64| top + PANEL - value / most * PANEL;
    let mut line = String::new();
    for (at, value) in points {
        let _ = write!(line, "{:.1},{:.1} ", x(*at), y(*value));
    }
    let bottom = top + PANEL;
    let _ = write!(
        svg,
        "<text x=\"{LEFT}\" y=\"{:.0}\">{title}</text>\n\
         <path d=\"M{LEFT} {top}V{bottom}H{:.0}\" fill=\"none\" stroke=\"#888\"/>\n\
         <text x=\"{:.0}\" y=\"{bottom}\" text-anchor=\"end\">0</text>\n\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{most:.0}</text>\n\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{end:.0} min</text>\n\
         <polyline points=\"{}\" fill=\"none\" stroke=\"#1f5fa8\" stroke-width=\"1.5\"/>\n",
        top - 8.0,
        WIDTH - 20.0,
        LEFT - 6.0,
        LEFT - 6.0,
        top + 10.0,
        WIDTH - 20.0,
        bottom + 16.0,
        line.trim_end(),
    );
}
