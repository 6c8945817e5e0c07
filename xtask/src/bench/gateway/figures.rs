//! Figures of one run, and the table of a scenario.

use serde_json::{Value, json};

use super::{Round, routers::Router, scenario::Scenario};
use crate::{sh, stats::median};

/// Figures of one run. NaN marks a figure that the scenario does not have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) cpu_per_1000_s: f64,
    pub(super) cpu_per_event_us: f64,
    pub(super) ttft_p50_ms: f64,
    pub(super) ttft_p99_ms: f64,
    pub(super) hop_p50_us: f64,
    pub(super) hop_p99_us: f64,
    pub(super) events_per_chunk: f64,
    pub(super) per_second: f64,
    /// Largest sample of resident memory in the second half of the run, megabytes.
    pub(super) rss_mb: f64,
    /// Resident memory before the first request, megabytes.
    pub(super) idle_mb: f64,
}

impl Figures {
    /// Returns the most important figures in one line.
    pub(super) fn short(&self) -> String {
        format!(
            "CPU {:.3} s/1000, TTFT p50 {:.3} ms, hop p50 {:.0} us, {:.0}/s, RSS {:.1} MB (idle {:.1})",
            self.cpu_per_1000_s,
            self.ttft_p50_ms,
            self.hop_p50_us,
            self.per_second,
            self.rss_mb,
            self.idle_mb
        )
    }
}

/// Prints the medians of a scenario, and returns them as JSON by router.
pub(super) fn table(scenario: &Scenario, routers: &[Router], rounds: &[Round]) -> Vec<(&'static str, Value)> {
    sh::print(&format!(
        "\n({}) {}\n{:<13} {:>12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9}",
        scenario.name,
        scenario.description,
        "router",
        "CPU s/1000",
        "x nginx",
        "us/event",
        "TTFT p50",
        "TTFT p99",
        "hop p50",
        "hop p99",
        "ev/chunk",
        "req/s",
        "RSS MB"
    ));
    routers.iter().map(|router| (router.name(), line(router.name(), rounds))).collect()
}

fn line(router: &'static str, rounds: &[Round]) -> Value {
    let of = |figure: fn(&Figures) -> f64| median(values(rounds, router, figure));
    let cpu: fn(&Figures) -> f64 = |figures| figures.cpu_per_1000_s;
    let nginx = values(rounds, "nginx", cpu);
    let ratio =
        median(values(rounds, router, cpu).iter().zip(&nginx).map(|(cpu, nginx)| cpu / nginx).collect());
    let per_1000 = of(cpu);
    let per_event = of(|figures| figures.cpu_per_event_us);
    let [p50, p99] = [of(|figures| figures.ttft_p50_ms), of(|figures| figures.ttft_p99_ms)];
    let [hop50, hop99] = [of(|figures| figures.hop_p50_us), of(|figures| figures.hop_p99_us)];
    let chunk = of(|figures| figures.events_per_chunk);
    let [rate, rss] = [of(|figures| figures.per_second), of(|figures| figures.rss_mb)];
    sh::print(&format!(
        "{router:<13} {per_1000:>12.3} {ratio:>9.2} {per_event:>9.2} {p50:>9.3} {p99:>9.3} {hop50:>9.0} \
         {hop99:>9.0} {chunk:>8.2} {rate:>9.0} {rss:>9.1}"
    ));
    json!({
        "cpu_s_per_1000": per_1000, "ratio_to_nginx": ratio, "cpu_us_per_event": per_event,
        "ttft_ms": [p50, p99], "hop_us": [hop50, hop99], "events_per_chunk": chunk,
        "requests_per_s": rate, "rss_mb": rss,
    })
}

/// Returns a figure for each round in which the router ran.
pub(super) fn values(rounds: &[Round], router: &str, figure: fn(&Figures) -> f64) -> Vec<f64> {
    let of_router = rounds.iter().flatten().filter(|(name, _)| *name == router);
    of_router.map(|(_, figures)| figure(figures)).collect()
}
