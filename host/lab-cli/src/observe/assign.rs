//! Says which engine served each request, and how sure that is.

use std::collections::{BTreeMap, VecDeque};

use super::{engines::EngineLog, writer::Written};

/// How an engine was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum How {
    /// The engine stored the blocks of this prompt after the request came.
    Events,
    /// No other engine began an answer in that second.
    Counters,
    /// Only the shares of the engines in that second are known.
    Guessed,
}

/// The engine of a request, by its position in `--workers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Assigned {
    pub(super) engine: u32,
    pub(super) how: How,
}

/// Finds the engine of each request. `known` has the engines that KV events told.
///
/// An engine's counters say how many answers it began in each second. The requests that wait get these
/// places in the order of their arrival; within a second the engines take turns by their numbers.
pub(super) fn assign(written: &[Written], known: &[Option<u32>], logs: &[EngineLog]) -> Vec<Assigned> {
    let mut begun = begun_by_second(logs);
    let mut found: Vec<Option<Assigned>> = vec![None; written.len()];
    for (place, engine) in known.iter().enumerate().filter_map(|(place, engine)| Some((place, (*engine)?))) {
        let at = written.get(place).map_or(0, |request| request.at.as_secs());
        take(&mut begun, at, engine);
        if let Some(found) = found.get_mut(place) {
            *found = Some(Assigned { engine, how: How::Events });
        }
    }
    let mut arrivals = written.iter().enumerate().peekable();
    let mut waiting: VecDeque<usize> = VecDeque::new();
    for (second, counts) in begun {
        while let Some((place, _)) = arrivals.next_if(|(_, request)| request.at.as_secs() <= second) {
            if found.get(place).is_some_and(Option::is_none) {
                waiting.push_back(place);
            }
        }
        let how = if counts.len() == 1 { How::Counters } else { How::Guessed };
        for engine in in_turns(&counts) {
            let Some(place) = waiting.pop_front() else { break };
            if let Some(found) = found.get_mut(place) {
                *found = Some(Assigned { engine, how });
            }
        }
    }
    rest(found, logs)
}

/// Answers that each engine began, by second and engine.
type Begun = BTreeMap<u64, BTreeMap<u32, u64>>;

fn begun_by_second(logs: &[EngineLog]) -> Begun {
    let mut begun = Begun::new();
    for (engine, log) in (0_u32..).zip(logs) {
        for (at, window) in log.windows.iter().filter(|(_, window)| window.first_tokens >= 1.0) {
            *begun.entry(at.as_secs()).or_default().entry(engine).or_default() += window.first_tokens as u64;
        }
    }
    begun
}

/// Takes a place of an engine, the first at or after a second.
fn take(begun: &mut Begun, from: u64, engine: u32) {
    for (_, counts) in begun.range_mut(from..) {
        let Some(count) = counts.get_mut(&engine) else { continue };
        *count -= 1;
        if *count == 0 {
            counts.remove(&engine);
        }
        return;
    }
}

/// Returns the engines as often as they are counted, mixed evenly.
fn in_turns(counts: &BTreeMap<u32, u64>) -> Vec<u32> {
    let mut turns: Vec<(f64, u32)> = counts
        .iter()
        .flat_map(|(engine, count)| {
            let count = u32::try_from(*count).unwrap_or(u32::MAX);
            (0..count).map(move |turn| ((f64::from(turn) + 0.5) / f64::from(count), *engine))
        })
        .collect();
    turns.sort_by(|left, right| left.0.total_cmp(&right.0));
    turns.into_iter().map(|(_, engine)| engine).collect()
}

/// Gives the requests without an engine to the engines by their shares of all answers.
fn rest(found: Vec<Option<Assigned>>, logs: &[EngineLog]) -> Vec<Assigned> {
    let shares: Vec<f64> = logs.iter().map(|log| log.total().first_tokens.max(1e-9)).collect();
    let mut given = vec![0.0; shares.len()];
    found
        .into_iter()
        .map(|found| {
            let of = |engine: usize| {
                let share = shares.get(engine).copied().unwrap_or(1.0);
                (given.get(engine).copied().unwrap_or(0.0) + 1.0) / share
            };
            let least = (0..shares.len()).min_by(|left, right| of(*left).total_cmp(&of(*right)));
            let least = u32::try_from(least.unwrap_or(0)).unwrap_or(0);
            let assigned = found.unwrap_or(Assigned { engine: least, how: How::Guessed });
            if let Some(given) = given.get_mut(assigned.engine as usize) {
                *given += 1.0;
            }
            assigned
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use pointsman_lab::Window;
    use tokio::time::Duration;

    use super::*;

    fn log(begun: &[(u64, f64)]) -> EngineLog {
        let window = |first_tokens: f64| Window { first_tokens, ..Window::default() };
        let windows = begun.iter().map(|(at, count)| (Duration::from_secs(*at), window(*count))).collect();
        EngineLog { windows, ..EngineLog::default() }
    }

    fn written(millis: &[u64]) -> Vec<Written> {
        let of = |at: &u64| Written {
            number: 0,
            at: Duration::from_millis(*at),
            input_tokens: 1,
            max_tokens: None,
            is_estimated: false,
        };
        millis.iter().map(of).collect()
    }

    #[test]
    fn a_second_with_one_engine_is_sure_and_one_with_several_is_guessed_by_shares() {
        let logs = [log(&[(1, 2.0), (3, 2.0)]), log(&[(3, 4.0)])];
        let requests = written(&[100, 200, 2_100, 2_200, 2_300, 2_400, 2_500, 2_600, 9_000]);
        let found = assign(&requests, &[], &logs);
        let engines: Vec<u32> = found.iter().map(|found| found.engine).collect();
        assert_eq!(engines[..2], [0, 0]);
        assert!(found[..2].iter().all(|found| found.how == How::Counters));
        assert!(found[2..].iter().all(|found| found.how == How::Guessed));
        assert_eq!(engines[2..8].iter().filter(|engine| **engine == 1).count(), 4, "{engines:?}");
        assert_eq!(found.len(), 9, "also the last, which no counter saw");
    }

    #[test]
    fn what_events_tell_takes_the_place_of_its_engine() {
        let logs = [log(&[(1, 1.0)]), log(&[(1, 1.0)])];
        let found = assign(&written(&[100, 200]), &[None, Some(0)], &logs);
        assert_eq!(found[1], Assigned { engine: 0, how: How::Events });
        assert_eq!(found[0], Assigned { engine: 1, how: How::Counters });
    }
}
