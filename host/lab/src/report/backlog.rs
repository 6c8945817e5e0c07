//! Whether a fleet keeps up with the arrivals: whether requests wait longer and longer for their first token.

use std::time::Duration;

use crate::{
    ceiling::Ways,
    fleet::Fleet,
    outcome::{Ended, Outcome},
    run::RunResult,
    stats::mean,
};

/// Number of requests below which nothing is judged.
const LEAST_REQUESTS: usize = 16;
/// Least growth of waits that counts, seconds for each second of arrivals. Waits grow by 0.02 s a second when
/// 2 % more requests arrive than are served.
const LEAST_GROWTH: f64 = 0.02;
/// Least wait that counts in the last quarter of the requests, as a share of the time that they take without
/// it.
const LEAST_WAIT: f64 = 0.25;

/// A request that was answered. Times are in seconds.
struct Answered {
    at: f64,
    /// Time to first token beyond that of the request alone on the fleet.
    wait: f64,
    /// Time to last token without the wait.
    service: f64,
}

/// Whether the requests of a run wait longer in each quarter of their arrivals than in the one before, by
/// more than chance and their own time explain.
pub(super) fn grows(result: &RunResult, fleet: &Fleet) -> bool {
    let ways = Ways::of(fleet);
    let complete = result.outcomes.iter().filter(|outcome| outcome.ended == Ended::Complete);
    let mut answered: Vec<Answered> = complete.map(|outcome| Answered::of(outcome, &ways)).collect();
    answered.sort_by(|a, b| a.at.total_cmp(&b.at));
    is_growing(&answered)
}

/// Whether the waits of requests, which are in the order of their arrival, grow.
fn is_growing(answered: &[Answered]) -> bool {
    let count = answered.len();
    let mean_of = |of: fn(&Answered) -> f64| -> [f64; 4] {
        std::array::from_fn(|quarter| {
            let some = answered.iter().skip(quarter * count / 4).take(count / 4);
            mean(&some.map(of).collect::<Vec<_>>())
        })
    };
    let [_, early_at, _, late_at] = mean_of(|one| one.at);
    let [.., service] = mean_of(|one| one.service);
    let waits @ [_, early, _, late] = mean_of(|one| one.wait);
    count >= LEAST_REQUESTS
        && waits.is_sorted_by(|before, after| before < after)
        && late >= service * LEAST_WAIT
        && late - early >= (late_at - early_at) * LEAST_GROWTH
}

impl Answered {
    fn of(outcome: &Outcome, ways: &Ways<'_>) -> Self {
        let least = ways.least_ms(outcome.cached, outcome.isl) / 1e3;
        let seconds = |time: Duration| time.as_secs_f64();
        let wait = (seconds(outcome.ttft) - least).max(0.0);
        Self { at: seconds(outcome.at), wait, service: seconds(outcome.e2e) - wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Judges requests that arrive every `every` seconds, by their waits and their time without it.
    fn judge(every: f64, service: f64, wait: impl Fn(f64) -> f64) -> bool {
        let one = |at: f64| Answered { at, wait: wait(at), service };
        is_growing(&(0..100).map(|number| one(f64::from(number) * every)).collect::<Vec<_>>())
    }

    #[test]
    fn waits_that_grow_with_the_arrivals_are_a_backlog_and_others_are_not() {
        // A fifth more requests arrive than are served.
        assert!(judge(0.1, 0.3, |at| at * 0.2) && judge(60.0, 20.0, |at| at * 0.2));
        for (name, grows) in [
            ("a queue that stays", judge(0.1, 0.3, |_| 5.0)),
            ("a queue that is worked off", judge(0.1, 0.3, |at| 10.0 - at)),
            (
                "a burst in the middle",
                judge(0.1, 0.3, |at| if (4.0..6.0).contains(&at) { 9.0 } else { at * 0.1 }),
            ),
            ("long answers", judge(0.1, 30.0, |at| at * 0.2)),
            ("growth within chance", judge(60.0, 20.0, |at| at * 0.01)),
        ] {
            assert!(!grows, "{name}");
        }
        let few: Vec<Answered> =
            (0..15_u32).map(f64::from).map(|at| Answered { at, wait: at, service: 0.1 }).collect();
        assert!(!is_growing(&few));
    }
}
