use super::*;
use crate::trace::TraceRequest;

fn turn(session: &str, delay: Option<u64>) -> TraceRequest {
    let (session, delay) = (Some(session.to_owned()), delay.map(Duration::from_millis));
    TraceRequest { session, delay, ..TraceRequest::default() }
}

fn fork(session: &str, parent: &str) -> TraceRequest {
    TraceRequest { parent: Some(parent.to_owned()), ..turn(session, None) }
}

fn join(session: &str, delay: Option<u64>) -> TraceRequest {
    TraceRequest { join: true, ..turn(session, delay) }
}

/// Ends the requests in the order of the trace. Returns the requests that each end releases.
fn released(requests: Vec<TraceRequest>) -> Vec<Vec<usize>> {
    let trace = Trace { requests, ..Trace::default() };
    let mut order = Order::of(&trace);
    let first = (0..trace.requests.len()).filter(|number| !order.waits(*number)).collect();
    std::iter::once(first).chain((0..trace.requests.len()).map(|number| order.end(number))).collect()
}

/// A case: its name, the requests, and the requests that may start at once and after the end of each.
type Case = (&'static str, Vec<TraceRequest>, Vec<Vec<usize>>);

#[test]
fn turns_forks_and_joins_wait_for_what_the_trace_says() {
    let table: [Case; 9] = [
        ("no session", vec![TraceRequest::default(); 2], vec![vec![0, 1], vec![], vec![]]),
        ("a turn", vec![turn("a", None), turn("a", Some(5))], vec![vec![0], vec![1], vec![]]),
        ("a turn without a delay", vec![turn("a", None), turn("a", None)], vec![vec![0, 1], vec![], vec![]]),
        ("a first turn with a delay", vec![turn("a", Some(5))], vec![vec![0], vec![]]),
        (
            "a fork",
            vec![turn("a", None), fork("b", "a"), turn("a", Some(5))],
            vec![vec![0], vec![1, 2], vec![], vec![]],
        ),
        (
            "a join of two forks",
            vec![turn("a", None), fork("b", "a"), fork("c", "a"), turn("b", Some(1)), join("a", Some(5))],
            vec![vec![0], vec![1, 2], vec![3], vec![], vec![4], vec![]],
        ),
        (
            "a join without a delay, and no second one",
            vec![turn("a", None), fork("b", "a"), join("a", None), join("a", None)],
            vec![vec![0], vec![1], vec![2], vec![3], vec![]],
        ),
        (
            "a fork that an earlier turn left alone",
            vec![turn("a", None), fork("b", "a"), turn("a", Some(5)), join("a", Some(5))],
            vec![vec![0], vec![1, 2], vec![], vec![3], vec![]],
        ),
        ("no parent, or itself", vec![fork("b", "a"), fork("c", "c")], vec![vec![0, 1], vec![], vec![]]),
    ];
    for (name, requests, expected) in table {
        assert_eq!(released(requests), expected, "{name}");
    }
}

#[test]
fn a_rate_counts_the_arrivals_that_wait_for_nothing() {
    let at = |mut request: TraceRequest, at: u64| {
        request.at = Duration::from_secs(at);
        request
    };
    let requests = vec![at(turn("a", None), 0), at(turn("b", None), 10), at(turn("a", Some(5)), 100)];
    let trace = Trace { requests, ..Trace::default() };
    let of = |unit: ArrivalUnit, count: usize, seconds: f64| Arrivals { unit, count, seconds };
    assert_eq!(trace.arrivals(false), of(ArrivalUnit::SessionStarts, 2, 10.0));
    assert_eq!(trace.arrivals(true), of(ArrivalUnit::ScheduledRequests, 3, 100.0));
    assert!((trace.arrivals(false).per_s(3.0) - 0.6).abs() < 1e-9);
    // A turn without a pause arrives at its time.
    let requests = vec![at(turn("a", None), 0), at(turn("a", None), 20)];
    let open = Trace { requests, ..Trace::default() };
    assert_eq!(open.arrivals(false), of(ArrivalUnit::Requests, 2, 20.0));
    assert_eq!(open.arrivals(true), open.arrivals(false));
}

#[test]
fn new_starts_move_sessions_as_a_whole_and_are_equal_for_equal_seeds() {
    let at = |mut request: TraceRequest, at: u64| {
        request.at = Duration::from_secs(at);
        request
    };
    let mut requests = Vec::new();
    for number in 0..200 {
        let (name, child) = (format!("s{number}"), format!("c{number}"));
        requests.push(at(turn(&name, None), 5));
        requests.push(at(fork(&child, &name), 8));
        requests.push(at(join(&name, Some(1)), 20));
    }
    let trace = Trace { requests, ..Trace::default() };
    let spread = trace.clone().with_starts(0.5, 3);
    assert_eq!(spread, trace.clone().with_starts(0.5, 3));
    assert_ne!(spread, trace.with_starts(0.5, 4));
    let of = |name: &str, place: usize| {
        let mut turns = spread.requests.iter().filter(|one| one.session.as_deref() == Some(name));
        turns.nth(place).unwrap().at
    };
    for number in 0..200 {
        let (name, child) = (format!("s{number}"), format!("c{number}"));
        assert_eq!(of(&child, 0) - of(&name, 0), Duration::from_secs(3));
        assert_eq!(of(&name, 1) - of(&name, 0), Duration::from_secs(15));
    }
    let seconds = spread.arrivals(false).seconds;
    assert!((300.0..500.0).contains(&seconds), "{seconds}");
}

#[test]
fn new_starts_keep_the_distances_of_turns_that_arrive_at_their_times() {
    let at = |mut request: TraceRequest, at: u64| {
        request.at = Duration::from_secs(at);
        request
    };
    let mut requests = Vec::new();
    for number in 0..20 {
        let (name, child) = (format!("s{number}"), format!("c{number}"));
        requests.extend((0..5).map(|turn_number| at(turn(&name, None), 20 * turn_number)));
        // A fork, whose own later turn arrives at its time as well.
        requests.push(at(fork(&child, &name), 85));
        requests.push(at(turn(&child, None), 90));
    }
    let mut trace = Trace { requests, ..Trace::default() };
    trace.sort();
    let spread = trace.with_starts(0.1, 3);
    let of = |name: &str| -> Vec<u64> {
        let turns = spread.requests.iter().filter(|one| one.session.as_deref() == Some(name));
        turns.map(|one| one.at.as_secs()).collect()
    };
    let mut starts = Vec::new();
    for number in 0..20 {
        let turns = of(&format!("s{number}"));
        let start = turns[0];
        // O10.2
        assert_eq!(turns, [0, 20, 40, 60, 80].map(|second| start + second));
        assert_eq!(of(&format!("c{number}")), [start + 85, start + 90]);
        starts.push(start);
    }
    let last = starts.iter().max().unwrap();
    assert!((100..400).contains(last), "20 sessions start within {last} s");
}
