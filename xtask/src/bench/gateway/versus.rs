//! Compares this build of the gateway with another build, and with rivals, that ran in the same rounds.

use super::{Round, figures::Figures, routers::Router};
use crate::{sh, stats::median};

/// Returns the row of a scenario: figures of this build divided by those of the other. Each ratio is of a
/// round, so that a disturbance affects both builds, and then comes the median over the rounds.
pub(super) fn row(scenario: &str, rounds: &[Round]) -> String {
    let ratios = |figure| ratios(rounds, "versus", figure);
    let cpu = ratios(|figures| figures.cpu_per_1000_s);
    let ([low, high], cpu) = (range(&cpu), median(cpu));
    let ttft = median(ratios(|figures| figures.ttft_p50_ms));
    let hop = median(ratios(|figures| figures.hop_p50_us));
    let memory = median(ratios(|figures| figures.rss_mb));
    format!("| {scenario} | {cpu:.3} | {low:.3} to {high:.3} | {ttft:.3} | {hop:.3} | {memory:.3} |")
}

/// Prints this build's CPU time divided by that of each rival.
pub(super) fn print_rivals(rounds: &[Round]) {
    rival_lines(rounds).iter().for_each(|line| sh::print(line));
}

fn rival_lines(rounds: &[Round]) -> Vec<String> {
    let line = |router: Router| {
        let cpu = ratios(rounds, router.name(), |figures| figures.cpu_per_1000_s);
        let [low, high] = range(&cpu);
        let median = median(cpu.clone());
        let engines = match router {
            Router::Dynamo => "; its engines are its own mockers, and its CPU is the frontend's",
            Router::VllmKvAware => "; it does not tokenize: the engines do, and their CPU is not counted",
            _ => "",
        };
        let name = router.name();
        (!cpu.is_empty())
            .then(|| format!("pointsman over {name}: CPU {median:.3} ({low:.3} to {high:.3}){engines}"))
    };
    Router::ALL.into_iter().filter(|router| router.is_rival()).filter_map(line).collect()
}

/// Returns this build's figure divided by that of another router, for each round in which both ran.
fn ratios(rounds: &[Round], router: &str, figure: fn(&Figures) -> f64) -> Vec<f64> {
    let of = |round: &Round, router: &str| {
        round.iter().find(|(name, _)| *name == router).map(|(_, figures)| figure(figures))
    };
    let pairs = rounds.iter().filter_map(|round| Some((of(round, "pointsman")?, of(round, router)?)));
    pairs.map(|(this, other)| this / other).collect()
}

/// Returns the lowest and the highest value.
fn range(values: &[f64]) -> [f64; 2] {
    [values.iter().copied().fold(f64::NAN, f64::min), values.iter().copied().fold(f64::NAN, f64::max)]
}

/// Prints the rows of the scenarios.
pub(super) fn print(rows: &[String]) {
    sh::print("\nThis build over the other build, medians of the rounds (below 1.00 this build is better)");
    sh::print("| scenario | CPU | CPU, lowest and highest round | TTFT p50 | hop p50 | RSS |");
    sh::print("| --- | ---: | ---: | ---: | ---: | ---: |");
    rows.iter().for_each(|row| sh::print(row));
}

#[cfg(test)]
mod tests {
    use super::{Figures, rival_lines, row};

    fn figures(cpu: f64) -> Figures {
        Figures {
            cpu_per_1000_s: cpu,
            cpu_per_event_us: 1.0,
            ttft_p50_ms: cpu * 2.0,
            ttft_p99_ms: 1.0,
            hop_p50_us: f64::NAN,
            hop_p99_us: f64::NAN,
            events_per_chunk: 1.0,
            per_second: 1.0,
            rss_mb: 10.0,
            idle_mb: 10.0,
        }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The second round was disturbed, and both builds took ten times as long.
        let rounds = [(1.1, 1.0), (11.0, 10.0), (0.9, 1.0)].map(|(this, other)| {
            vec![("nginx", figures(5.0)), ("pointsman", figures(this)), ("versus", figures(other))]
        });
        let line = row("a", &rounds);
        assert_eq!(line, "| a | 1.100 | 0.900 to 1.100 | 1.100 | NaN | 1.000 |");
    }

    #[test]
    fn a_rival_is_compared_when_it_ran() {
        let rounds = [(1.0, 4.0), (1.0, 5.0), (3.0, 10.0)]
            .map(|(this, rival)| vec![("pointsman", figures(this)), ("dynamo+mocker", figures(rival))]);
        let lines = rival_lines(&rounds);
        assert_eq!(lines.len(), 1);
        assert!(
            lines[0].starts_with("pointsman over dynamo+mocker: CPU 0.250 (0.200 to 0.300); its"),
            "{lines:?}"
        );
    }
}
