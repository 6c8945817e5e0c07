//! Figures of one run, and the table of a scenario.

use super::{Round, routers::Router, scenario::Scenario};
use crate::{sh, stats::median, table::columns};

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

/// Prints the medians of a scenario.
pub(super) fn print(scenario: &Scenario, routers: &[Router], rounds: &[Round]) {
    let head = "router|CPU s/1000|x nginx|us/event|TTFT p50|TTFT p99|hop p50|hop p99|ev/chunk|req/s|RSS MB";
    let mut rows = vec![head.split('|').map(str::to_owned).collect::<Vec<_>>()];
    for router in routers {
        let name = router.name();
        let of = |figure: fn(&Figures) -> f64, digits: usize| {
            format!("{:.digits$}", median(values(rounds, name, figure)))
        };
        let cpu: fn(&Figures) -> f64 = |figures| figures.cpu_per_1000_s;
        let nginx = values(rounds, "nginx", cpu).into_iter();
        let ratios = values(rounds, name, cpu).into_iter().zip(nginx).map(|(cpu, nginx)| cpu / nginx);
        rows.push(vec![
            name.to_owned(),
            of(cpu, 3),
            format!("{:.2}", median(ratios.collect())),
            of(|figures| figures.cpu_per_event_us, 2),
            of(|figures| figures.ttft_p50_ms, 3),
            of(|figures| figures.ttft_p99_ms, 3),
            of(|figures| figures.hop_p50_us, 0),
            of(|figures| figures.hop_p99_us, 0),
            of(|figures| figures.events_per_chunk, 2),
            of(|figures| figures.per_second, 0),
            of(|figures| figures.rss_mb, 1),
        ]);
    }
    sh::print(&format!("\n({}) {}", scenario.name, scenario.description));
    columns(&rows).iter().for_each(|row| sh::print(row));
}

/// Returns a figure for each round in which the router ran.
fn values(rounds: &[Round], router: &str, figure: fn(&Figures) -> f64) -> Vec<f64> {
    let of_router = rounds.iter().flatten().filter(|(name, _)| *name == router);
    of_router.map(|(_, figures)| figure(figures)).collect()
}
