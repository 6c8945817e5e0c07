//! The report as one HTML page that needs no other file: tables, and plots as inline SVG.

use std::fmt::Write as _;

use crate::{
    report::{ArmReport, Comparison, Figure, PairDifference, Quantiles},
    study::Study,
    text::{bounds, change},
};

mod colours;
mod load;
mod plot;
mod workers;

use colours::colour;
use plot::{Axis, Line};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:88em;padding:0 1.2em;\
color:var(--text);background:var(--page)}table{border-collapse:collapse;margin:1em 0;font-size:14px}td,th{padding:.3em \
.6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}td:first-child,th:first-child,.ranking \
td{text-align:left}.best{font-weight:700}.lead{font-size:18px;background:var(--lead);padding:.8em 1em;border-left:5px \
solid var(--arm-0)}.warning{background:var(--warning);padding:.4em .8em;margin:.3em 0;border-left:4px solid \
#e69f00}svg{margin:.4em 1em .4em 0;max-width:100%;height:auto}small{color:var(--faint)}.wide{overflow-x:auto}h2{\
margin-top:2em;border-top:1px solid var(--line);padding-top:.6em}.rankings{display:grid;gap:0 \
2em;grid-template-columns:repeat(auto-fill,minmax(min(32em,100%),1fr));align-items:start}.rankings \
table{width:100%}caption{text-align:left;color:var(--faint)}.ranking td,.ranking th,.figures th,.pairs td,.pairs \
th{white-space:normal;overflow-wrap:anywhere;text-align:left}.ranking td:first-child{white-space:nowrap}.figures{font-size:13px}.figures td,.figures \
th{padding:.25em .4em}.figures small{display:block}.figures th{text-align:right;vertical-align:bottom}";

/// Rules of the plots.
const PLOT_STYLE: &str = "svg{font:11px system-ui,sans-serif;background:var(--page)}svg text{fill:var(--text)}svg \
.title{font-size:13px;font-weight:600}.grid{stroke:var(--line)}";

/// Returns a figure of an arm, if the arm has it.
type Pick = fn(&ArmReport) -> Option<&Figure>;

/// A row: the figure's name with its unit, its decimals, how to find it, and whether less is better.
type Row = (&'static str, usize, Pick, bool);

const ROWS: [Row; 26] = [
    ("TTFT mean, ms", 1, |arm| Some(&arm.figures.ttft_mean), true),
    ("share of what is possible, %", 1, |arm| Some(&arm.percent_of_relaxation), false),
    ("of the clairvoyant search, %", 1, |arm| arm.percent_of_clairvoyant.as_ref(), false),
    ("TTFT p50", 1, |arm| Some(&arm.figures.ttft_p50), true),
    ("TTFT p90", 1, |arm| Some(&arm.figures.ttft_p90), true),
    ("TTFT p99", 1, |arm| Some(&arm.figures.ttft_p99), true),
    ("ITL mean, ms", 2, |arm| Some(&arm.figures.itl_mean), true),
    ("ITL p50", 2, |arm| Some(&arm.figures.itl_p50), true),
    ("ITL p90", 2, |arm| Some(&arm.figures.itl_p90), true),
    ("ITL p99", 2, |arm| Some(&arm.figures.itl_p99), true),
    ("E2E mean, ms", 0, |arm| Some(&arm.figures.e2e_mean), true),
    ("E2E p50", 0, |arm| Some(&arm.figures.e2e_p50), true),
    ("E2E p90", 0, |arm| Some(&arm.figures.e2e_p90), true),
    ("E2E p99", 0, |arm| Some(&arm.figures.e2e_p99), true),
    ("requests, 1/s", 3, |arm| Some(&arm.figures.requests_per_s), false),
    ("goodput, 1/s", 3, |arm| Some(&arm.figures.goodput), false),
    ("within SLO, share", 4, |arm| Some(&arm.figures.slo_share), false),
    ("hit rate", 4, |arm| Some(&arm.figures.hit_rate), false),
    ("served, share", 4, |arm| Some(&arm.figures.served_share), false),
    ("imbalance", 2, |arm| Some(&arm.figures.imbalance), true),
    ("preemptions", 0, |arm| Some(&arm.figures.preemptions), true),
    ("refused", 0, |arm| Some(&arm.figures.shed), true),
    ("failed", 0, |arm| Some(&arm.figures.failed), true),
    ("retries", 0, |arm| Some(&arm.figures.retries), true),
    ("stranded handoffs", 0, |arm| Some(&arm.figures.stranded), true),
    ("fallbacks", 0, |arm| Some(&arm.figures.fell_back), true),
];

/// Returns the page.
#[must_use]
pub fn page(study: &Study) -> String {
    page_after(study, "Comparison of routing policies", "")
}

/// Returns the page with a title of its own, and with HTML between the title and the comparison.
#[must_use]
pub fn page_after(study: &Study, title: &str, before: &str) -> String {
    let mut html = String::from("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">");
    html.push_str("<meta name=\"viewport\" content=\"width=device-width\">");
    let title = escape(title);
    let _ = write!(
        html,
        "<title>{title}</title><style>{}{STYLE}{PLOT_STYLE}</style></head><body>",
        colours::rules()
    );
    let _ = write!(html, "<h1>{title}</h1>{before}");
    let summary: Vec<String> = study.summary.iter().map(|sentence| escape(sentence)).collect();
    let _ = write!(html, "<p class=\"lead\">{}</p>", summary.join(" "));
    warnings(&mut html, &study.warnings);
    load::rankings(&mut html, study);
    load::plots(&mut html, study);
    load::highest(&mut html, study);
    for report in &study.comparisons {
        section(&mut html, report);
    }
    html.push_str(
        "<h2>How to read this</h2><p>The router, the policies and the prefix index are those of the gateway, in virtual \
         time; engines and links are models. Means and ITL are those of complete requests. In quantiles of TTFT and E2E a \
         request without an answer counts as slower than any other, and \u{2013} stands for no value: too many requests had none. \
         Requests that fit into no engine are left out. TTFT is the time from arrival to \
         the first token. ITL is (E2E − TTFT) / (OSL − 1) of each request, with OSL its output tokens. E2E is the time to \
         the last token. Goodput is the number of requests that keep both limits of the SLO, divided by the time from the first to the last \
         arrival, or, when this is less than a second, until the last token. ± is half of the 95 % \
         confidence interval of the mean over the seeds (Student's t): it covers the randomness of a run, not another \
         hour of traffic. No difference is found when this interval of the difference to the best arm includes 0; runs with \
         equal seeds are compared in pairs, and each arm by itself. A bold figure is better than that of every other arm by \
         this test. The share of a worker counts complete requests that computed their prompt or generated their answer \
         there; workers are numbered by their position in the fleet, from 0. The hit rate is the share of prompt tokens that \
         were cached. The share of what is possible is the mean TTFT that no policy can beat (one unlimited cache of all \
         engines, even load) divided by the arm's: 100 % cannot be exceeded, and may be out of reach. The clairvoyant search knows \
         all arrivals and lengths; its assignment of requests to engines can be reached. Imbalance is the busiest engine's number of requests divided by the mean of all \
         engines.</p></body></html>\n",
    );
    html
}

/// Returns the plot of goodput over load as an SVG file; `None` if the study has no two loads.
#[must_use]
pub(crate) fn goodput_svg(study: &Study) -> Option<String> {
    let plot = load::goodput(study)?;
    let (opening, rest) = plot.split_once('>')?;
    let rules = colours::rules();
    Some(format!("{opening} xmlns=\"http://www.w3.org/2000/svg\"><style>{rules}{PLOT_STYLE}</style>{rest}\n"))
}

fn warnings(html: &mut String, warnings: &[String]) {
    for warning in warnings {
        let _ = write!(html, "<div class=\"warning\">{}</div>", escape(warning));
    }
}

fn section(html: &mut String, report: &Comparison) {
    let _ = write!(
        html,
        "<h2>{}: {} requests on {}</h2><p>{} engines, {} seeds. SLO: TTFT of at most {} ms and ITL of at most {} ms. One \
         unlimited cache for all engines would have {:.1} % of the prompt tokens. {}.</p>",
        escape(&report.trace),
        report.requests,
        escape(&report.setting()),
        report.engines,
        report.seeds,
        report.slo.ttft_ms,
        report.slo.itl_ms,
        report.endless_cache_hit_rate * 100.0,
        escape(&bounds(&report.possible)),
    );
    warnings(html, &report.warnings);
    figures(html, report);
    type Values = fn(&Quantiles) -> &Vec<f64>;
    let plots: [(&str, &str, Values); 3] = [
        ("Time to first token", "TTFT, ms", |quantiles| &quantiles.ttft),
        ("Inter-token latency", "ITL of a request, ms", |quantiles| &quantiles.itl),
        ("Time to last token", "E2E, ms", |quantiles| &quantiles.e2e),
    ];
    for (title, unit, pick) in plots {
        let x = Axis { label: unit, logarithmic: true, range: None };
        let y = Axis { label: "share of requests, %", logarithmic: false, range: Some((0.0, 100.0)) };
        let lines = report.arms.iter().enumerate().map(|(place, arm)| {
            let points =
                (0_u32..).zip(pick(&arm.quantiles)).map(|(percent, value)| (*value, f64::from(percent)));
            Line { name: &arm.label, place, points: points.collect(), with_dots: false }
        });
        html.push_str(&plot::lines(title, x, y, &lines.collect::<Vec<_>>()));
    }
    imbalance(html, report);
    hit_rates(html, report);
    workers::shares(html, report);
    pairs(html, report);
}

fn imbalance(html: &mut String, report: &Comparison) {
    let x = Axis { label: "time in the simulation, s", logarithmic: false, range: None };
    let y = Axis { label: "busiest engine / mean", logarithmic: false, range: None };
    let lines = report.arms.iter().enumerate().map(|(place, arm)| {
        let points = arm.events.imbalance_over_time.clone();
        Line { name: &arm.label, place, points, with_dots: false }
    });
    html.push_str(&plot::lines("Imbalance over time", x, y, &lines.collect::<Vec<_>>()));
}

/// Shows one row for each figure and one column for each arm. Ten arms fit into 1,280 pixels.
fn figures(html: &mut String, report: &Comparison) {
    html.push_str("<div class=\"wide\"><table class=\"figures\"><tr><th></th>");
    for (place, arm) in report.arms.iter().enumerate() {
        let _ = write!(html, "<th>{}</th>", name(place, &arm.label));
    }
    html.push_str("</tr>");
    for (title, decimals, of, less) in ROWS {
        if report.arms.iter().all(|arm| of(arm).is_none()) {
            continue;
        }
        let _ = write!(html, "<tr><td>{title}</td>");
        for arm in &report.arms {
            let Some(figure) = of(arm) else {
                html.push_str("<td></td>");
                continue;
            };
            if !figure.has_value() {
                html.push_str("<td>\u{2013}</td>");
                continue;
            }
            let class = if is_best(report, arm, of, less) { " class=\"best\"" } else { "" };
            let _ = write!(html, "<td{class}>{:.decimals$}", figure.mean);
            if let Some(half) = figure.plus_minus {
                let _ = write!(html, " <small>±{half:.decimals$}</small>");
            }
            html.push_str("</td>");
        }
        html.push_str("</tr>");
    }
    html.push_str("</table></div>");
}

/// Draws each arm's hit rate as a bar, beside the ceiling.
fn hit_rates(html: &mut String, report: &Comparison) {
    let ceiling = report.endless_cache_hit_rate * 100.0;
    let most = report.arms.iter().map(|arm| arm.figures.hit_rate.mean * 100.0).fold(ceiling, f64::max);
    if most <= 0.0 {
        return;
    }
    let (left, width, row) = (170.0, 400.0, 20.0);
    let count = f64::from(u32::try_from(report.arms.len()).unwrap_or(u32::MAX));
    let height = 30.0 + row * count + 24.0;
    let _ = write!(
        html,
        "<svg viewBox=\"0 0 660 {height}\" width=\"660\" height=\"{height}\" role=\"img\" aria-label=\"Hit rate\">\
         <text x=\"{left}\" y=\"15\" class=\"title\">Cached share of prompt tokens, %, and with an unlimited cache</text>"
    );
    let mut at = 30.0;
    for (place, arm) in report.arms.iter().enumerate() {
        let percent = arm.figures.hit_rate.mean * 100.0;
        let length = percent / most * width;
        let _ = write!(
            html,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text><rect x=\"{left}\" y=\"{at}\" width=\"{length:.1}\" \
             height=\"14\" style=\"fill:{}\"/><text x=\"{:.1}\" y=\"{:.0}\">{percent:.1}</text>",
            left - 8.0,
            at + 11.0,
            escape(&plot::short(&arm.label)),
            colour(place),
            left + length + 6.0,
            at + 11.0,
        );
        at += row;
    }
    let x = left + ceiling / most * width;
    let _ = write!(
        html,
        "<path d=\"M{x:.1} 24V{at}\" style=\"stroke:var(--text)\" stroke-dasharray=\"4 3\"/><text x=\"{x:.1}\" y=\"{:.0}\" \
         text-anchor=\"middle\">unlimited cache {ceiling:.1}</text></svg>",
        at + 14.0
    );
}

/// Shows for each pair of arms how many requests they routed differently and what that cost.
fn pairs(html: &mut String, report: &Comparison) {
    if report.pairs.is_empty() {
        return;
    }
    html.push_str(
        "<h3>Decisions that differ</h3><p>Requests that the two arms sent to different engines, and what these requests \
         gained or lost: the second arm's time minus the first's, so that a negative number means that the second is \
         faster.</p><table class=\"pairs\"><tr><th>first arm</th><th>second arm</th><th>requests a run</th><th>share, %</th><th>TTFT, \
         ms</th><th>E2E, ms</th></tr>",
    );
    for pair in &report.pairs {
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{}</td><td>{:.0}</td><td>{:.1}</td><td>{}</td><td>{}</td></tr>",
            escape(&pair.first),
            escape(&pair.second),
            pair.requests.mean,
            pair.share * 100.0,
            change(&pair.ttft_ms),
            change(&pair.e2e_ms),
        );
    }
    html.push_str("</table>");
    let first = report.arms.first().map_or("", |arm| arm.label.as_str());
    report.pairs.iter().filter(|pair| pair.first == first).for_each(|pair| examples(html, pair));
}

fn examples(html: &mut String, pair: &PairDifference) {
    if pair.examples.is_empty() {
        return;
    }
    let (first, second) = (escape(&pair.first), escape(&pair.second));
    let _ = write!(
        html,
        "<details><summary>The decisions of {second} that cost and saved most beside {first}</summary><table class=\"pairs\"><tr><th>request</th>\
         <th>arrival, s</th><th>prompt tokens</th><th>engine: {first}</th><th>{second}</th><th>cached tokens: {first}</th>\
         <th>{second}</th><th>TTFT, ms: {first}</th><th>{second}</th></tr>"
    );
    for one in &pair.examples {
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{:.1}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.0}</td><td>{:.0}</td>\
             </tr>",
            one.request,
            one.at_s,
            one.prompt_tokens,
            one.engines[0],
            one.engines[1],
            one.cached_tokens[0],
            one.cached_tokens[1],
            one.ttft_ms[0],
            one.ttft_ms[1],
        );
    }
    html.push_str("</table></details>");
}

/// Whether an arm's figure is better than that of every other arm, by the intervals of the differences. An
/// arm that answers fewer requests than another is not better because it has less of something.
fn is_best(report: &Comparison, arm: &ArmReport, of: Pick, less: bool) -> bool {
    let Some(figure) = of(arm) else { return false };
    let others = || report.arms.iter().filter(|other| !std::ptr::eq(*other, arm));
    let served = |arm: &ArmReport| arm.figures.served_share.mean;
    let is_better = |other: &ArmReport| {
        let Some(value) = of(other).filter(|value| value.has_value()) else { return true };
        let gained = if less { value.less(figure) } else { figure.less(value) };
        gained.mean > 0.0 && gained.excludes_zero() == Some(true)
    };
    report.arms.len() > 1 && others().all(|other| is_better(other) && (!less || served(other) <= served(arm)))
}

/// An arm's name with the square of its colour.
fn name(place: usize, label: &str) -> String {
    format!("<span class=\"arm\" style=\"color:{}\">&#9632;</span> {}", colour(place), escape(label))
}

/// Escapes text for HTML.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_bring_markup_into_the_page() {
        assert_eq!(escape("<b a=\"&\">"), "&lt;b a=&quot;&amp;&quot;&gt;");
    }
}
