//! Says which engine served each request, and how sure that is.

use std::collections::{BTreeMap, VecDeque};

use tokio::time::Duration;

use super::{engines::EngineLog, writer::Written};

/// Share of the engines' answers below which the requests that were seen are too few for counters.
const FEW_SEEN: f64 = 0.95;

/// How an engine was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum How {
    /// The router in place named the engine with its answer.
    Answer,
    /// The engine stored the blocks of this prompt after the request arrived.
    Events,
    /// Only this engine began answers in that second, as many as requests waited.
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

/// Finds the engine of each request. `known` has those that were told.
///
/// An engine's counters say how many answers it began in each second. The requests that wait get these
/// places in the order of their arrival; within a second the engines take turns by their numbers. Where the
/// engines began more answers than requests were seen, counters are a guess, because others have some of
/// these places.
pub(super) fn assign(written: &[Written], known: &[Option<Assigned>], logs: &[EngineLog]) -> Vec<Assigned> {
    let has_others = has_other_answers(written, logs.iter().map(|log| log.total().first_tokens).sum());
    let mut begun = begun_by_second(logs);
    let mut found: Vec<Option<Assigned>> = vec![None; written.len()];
    for (place, told) in known.iter().enumerate().filter_map(|(place, told)| Some((place, (*told)?))) {
        for request in written.get(place).into_iter().flat_map(sequences) {
            take(&mut begun, request.at, told.engine);
        }
        if let Some(found) = found.get_mut(place) {
            *found = Some(told);
        }
    }
    let mut arrivals = written.iter().enumerate().peekable();
    let mut waiting = Waiting::new(logs);
    for Second { until, counts } in begun.into_values() {
        while let Some((place, request)) = arrivals.next_if(|(_, request)| request.at <= until) {
            if found.get(place).is_some_and(Option::is_none) {
                sequences(request).for_each(|request| waiting.add(place, request.at));
            }
        }
        waiting.give_up(until);
        let places = waiting.take(counts.values().sum());
        let is_sure = logs.len() == 1 || (counts.len() == 1 && waiting.took_all && !has_others);
        let how = if is_sure { How::Counters } else { How::Guessed };
        for (place, engine) in places.into_iter().zip(in_turns(&counts)) {
            if let Some(found) = found.get_mut(place) {
                *found = Some(Assigned { engine, how });
            }
        }
    }
    rest(found, logs)
}

/// Whether the engines began clearly more answers than these requests ask for.
pub(super) fn has_other_answers(written: &[Written], answers: f64) -> bool {
    let asked: f64 = written.iter().map(|request| f64::from(request.sequences)).sum();
    asked < FEW_SEEN * answers
}

/// Returns a request as often as an engine counts it.
fn sequences(request: &Written) -> impl Iterator<Item = &Written> {
    (0..request.sequences).map(move |_| request)
}

/// Requests whose answer no counter has yet, in the order of their arrival.
///
/// A request that is never answered takes the place of the next one, which takes that of the one after it.
/// The queue is then too long by one, and that for longer than any request waits: its oldest is given up.
struct Waiting {
    /// Positions of the requests, with their times of arrival.
    requests: VecDeque<(usize, Duration)>,
    /// When the queue last grew beyond each of its lengths.
    grown: VecDeque<Duration>,
    /// How long a request may wait for its first token.
    patience: Duration,
    /// Mean number of requests that wait for their first token.
    usual: usize,
    /// Whether some that wait should perhaps have been taken instead of others.
    is_mixed: bool,
    /// Whether the last counts were of all that waited, which were known.
    took_all: bool,
}

impl Waiting {
    fn new(logs: &[EngineLog]) -> Self {
        let totals = || logs.iter().map(EngineLog::total);
        let (ttft_s, answers) =
            totals().fold((0.0, 0.0), |sum, total| (sum.0 + total.ttft_s, sum.1 + total.first_tokens));
        let mean = if answers > 0.0 { ttft_s / answers } else { 0.0 };
        // Little's law, for each engine.
        let usual = totals().map(|total| total.ttft_s / total.seconds.max(1.0)).sum::<f64>();
        Self {
            requests: VecDeque::new(),
            grown: VecDeque::new(),
            patience: Duration::from_secs((2.0 * mean).ceil() as u64 + 2),
            usual: usual as usize,
            is_mixed: false,
            took_all: false,
        }
    }

    fn add(&mut self, place: usize, at: Duration) {
        self.requests.push_back((place, at));
        self.grown.push_back(at);
    }

    /// Gives up the requests that wait for too long at this time.
    fn give_up(&mut self, now: Duration) {
        while let (Some((_, at)), Some(grown)) = (self.requests.front(), self.grown.front()) {
            let is_too_long = self.requests.len() > self.usual && *grown + self.patience < now;
            if *at + self.patience >= now && !is_too_long {
                break;
            }
            self.requests.pop_front();
            self.grown.pop_front();
        }
        self.is_mixed &= !self.requests.is_empty();
    }

    /// Takes those that arrived first.
    fn take(&mut self, count: u64) -> Vec<usize> {
        let waited = self.requests.len();
        let taken = usize::try_from(count).unwrap_or(usize::MAX).min(waited);
        self.took_all = taken == waited && taken as u64 == count && !self.is_mixed;
        self.is_mixed = taken < waited && (taken > 0 || self.is_mixed);
        self.grown.truncate(waited - taken);
        self.requests.drain(..taken).map(|(place, _)| place).collect()
    }
}

/// Answers that began in a second.
#[derive(Default)]
struct Second {
    /// Time of the last reading in this second.
    until: Duration,
    /// Answers by engine.
    counts: BTreeMap<u32, u64>,
}

fn begun_by_second(logs: &[EngineLog]) -> BTreeMap<u64, Second> {
    let mut begun = BTreeMap::<u64, Second>::new();
    for (engine, log) in (0_u32..).zip(logs) {
        for (at, window) in log.windows.iter().filter(|(_, window)| window.first_tokens >= 1.0) {
            let second = begun.entry(at.as_secs()).or_default();
            second.until = second.until.max(*at);
            *second.counts.entry(engine).or_default() += window.first_tokens as u64;
        }
    }
    begun
}

/// Takes a place of an engine, the first at or after a time.
fn take(begun: &mut BTreeMap<u64, Second>, from: Duration, engine: u32) {
    for (_, second) in begun.range_mut(from.as_secs()..).filter(|(_, second)| second.until >= from) {
        let Some(count) = second.counts.get_mut(&engine) else { continue };
        *count -= 1;
        if *count == 0 {
            second.counts.remove(&engine);
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
            sequences: 1,
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
    fn a_request_that_is_never_answered_shifts_the_others_for_seconds_only() {
        // From second 5 on, the engines take turns with a request each. The one of 3.9 s is never answered.
        let at = |engine: u64| (5..30).filter(|at| at % 2 == engine).map(|at| (at, 1.0)).collect::<Vec<_>>();
        let logs = [log(&at(0)), log(&at(1))];
        let arrivals: Vec<u64> = std::iter::once(3_900).chain((5..30).map(|at| at * 1_000 - 500)).collect();
        let found = assign(&written(&arrivals), &[], &logs);
        // The patience is 2 s for requests that are answered at once.
        for (second, found) in (5_u32..).zip(&found[1..]).skip(3) {
            assert_eq!(*found, Assigned { engine: second % 2, how: How::Counters }, "{second}");
        }
        assert!(found[..3].iter().all(|found| found.how == How::Guessed), "{found:?}");
    }

    #[test]
    fn a_request_that_waits_for_longer_than_any_other_is_given_up() {
        let logs = [log(&[(20, 1.0), (22, 1.0)]), log(&[(21, 1.0)])];
        let found = assign(&written(&[1_000, 19_500, 20_500, 21_500]), &[], &logs);
        let engines: Vec<u32> = found[1..].iter().map(|found| found.engine).collect();
        assert_eq!(engines, [0, 1, 0]);
        assert!(found[1..].iter().all(|found| found.how == How::Counters), "{found:?}");
    }

    #[test]
    fn a_second_with_fewer_answers_than_requests_that_wait_is_a_guess() {
        let logs = [log(&[(1, 1.0)]), log(&[(2, 1.0)])];
        let found = assign(&written(&[100, 200]), &[], &logs);
        assert!(found.iter().all(|found| found.how == How::Guessed), "{found:?}");
        let one = [log(&[(1, 1.0), (2, 1.0)])];
        let found = assign(&written(&[100, 200]), &[], &one);
        assert!(found.iter().all(|found| found.how == How::Counters), "one engine served all: {found:?}");
    }

    #[test]
    fn a_request_for_several_answers_takes_as_many_places() {
        let logs = [log(&[(1, 4.0)]), log(&[(2, 1.0)])];
        let mut requests = written(&[100, 1_500]);
        requests[0].sequences = 4;
        // S5.14
        for known in [vec![], vec![Some(Assigned { engine: 0, how: How::Events }), None]] {
            let found = assign(&requests, &known, &logs);
            assert_eq!(found.iter().map(|found| found.engine).collect::<Vec<_>>(), [0, 1]);
            assert!(found.iter().all(|found| found.how != How::Guessed), "{found:?}");
        }
    }

    #[test]
    fn counters_tell_no_engine_when_others_send_to_the_engines_too() {
        let times = |from: u64| (from..from + 40).map(|at| (at, 1.0)).collect::<Vec<_>>();
        let arrivals: Vec<u64> = (1..=40).map(|at| at * 1_000 - 100).collect();
        let how = |logs: &[EngineLog]| {
            let found = assign(&written(&arrivals), &[], logs);
            found.iter().filter(|found| found.how == How::Guessed).count()
        };
        // Another router's request is the only answer in every second after the last of these.
        let others = [log(&times(1)), log(&times(41))];
        // S5.23
        assert_eq!((how(&[log(&times(1)), log(&[])]), how(&others)), (0, 40));
        assert_eq!(how(&[log(&[times(1), times(41)].concat())]), 0, "there is one engine");
    }

    #[test]
    fn what_events_tell_takes_the_place_of_its_engine() {
        let logs = [log(&[(1, 1.0)]), log(&[(1, 1.0)])];
        let told = Assigned { engine: 0, how: How::Events };
        let found = assign(&written(&[100, 200]), &[None, Some(told)], &logs);
        assert_eq!(found[1], Assigned { engine: 0, how: How::Events });
        assert_eq!(found[0], Assigned { engine: 1, how: How::Counters });
    }
}
