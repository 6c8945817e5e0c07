//! Properties of rendezvous hashing, and effects of the limit.

use super::*;

const UNLIMITED: Settings = Settings { max_active_requests: 0 };

/// `workers` workers of two ranks each, idle.
fn fleet(workers: u64) -> Vec<Row> {
    let ranks = (1..=workers).flat_map(|worker| [(worker, 0), (worker, 1)]);
    ranks.map(|(worker, rank)| Row { requests: 0, bound: false, key: key(worker, rank) }).collect()
}

fn home(session: u64, rows: &[Row]) -> usize {
    let (row, why) = UNLIMITED.choose(session, rows, &mut Rng::new(0)).unwrap();
    assert_eq!(why, Why::Home);
    row
}

#[test]
fn keys_and_weights_are_pinned_because_sessions_move_when_they_change() {
    assert_eq!(key(11, 1), 0x42ca_ac90_2cc9_4cf3);
    assert_eq!(weight(1_001, key(11, 1)), 0x4184_434e_676d_cb87);
}

#[test]
fn ranks_and_workers_have_keys_of_their_own() {
    let mut keys: Vec<u64> = (0..100).flat_map(|worker| (0..8).map(move |rank| key(worker, rank))).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 800);
}

#[test]
fn sessions_spread_evenly() {
    let rows = fleet(4);
    let mut counts = [0_u32; 8];
    for session in 1..=16_000 {
        counts[home(session, &rows)] += 1;
    }
    assert!(counts.iter().all(|count| (1_840..2_160).contains(count)), "{counts:?}");
}

#[test]
fn a_row_that_leaves_moves_only_its_own_sessions() {
    let rows = fleet(4);
    let left: Vec<Row> = rows.iter().copied().filter(|row| row.key != rows[3].key).collect();
    for session in 1..=2_000 {
        let before = rows[home(session, &rows)].key;
        let after = left[home(session, &left)].key;
        assert!(before == after || before == rows[3].key, "session {session}");
    }
}

#[test]
fn a_row_that_comes_takes_sessions_and_swaps_none() {
    let (few, more) = (fleet(4), fleet(5));
    for session in 1..=2_000 {
        let row = home(session, &more);
        assert!(row >= few.len() || row == home(session, &few), "session {session}");
    }
}

#[test]
fn a_busy_row_moves_only_its_own_sessions() {
    let settings = Settings { max_active_requests: 10 };
    let idle = fleet(4);
    let mut rows = idle.clone();
    rows[3].requests = 11;
    for session in 1..=2_000 {
        let (row, _) = settings.choose(session, &rows, &mut Rng::new(0)).unwrap();
        let before = home(session, &idle);
        assert!(row != 3 && (row == before || before == 3), "session {session}");
    }
}

#[test]
fn two_bound_rows_are_chosen_between_whatever_their_order() {
    let mut rows = fleet(2);
    rows[1].bound = true;
    rows[2].bound = true;
    let bound =
        |rows: &[Row]| UNLIMITED.choose(77, rows, &mut Rng::new(0)).map(|(row, why)| (rows[row].key, why));
    let forward = bound(&rows).unwrap();
    rows.reverse();
    assert_eq!(bound(&rows), Some(forward));
    assert_eq!(forward.1, Why::Bound);
}

#[test]
fn without_a_session_ties_are_uniform() {
    let mut rows = fleet(2);
    rows[0].requests = 1;
    let mut counts = [0_u32; 4];
    for seed in 0..3_000 {
        let (row, why) = UNLIMITED.choose(0, &rows, &mut Rng::new(seed)).unwrap();
        assert_eq!(why, Why::LeastLoaded);
        counts[row] += 1;
    }
    assert_eq!(counts[0], 0);
    assert!(counts[1..].iter().all(|count| (900..1_100).contains(count)), "{counts:?}");
}

#[test]
fn costs_are_finite_and_never_less_than_the_chosen_rows() {
    for seed in 0..2_000 {
        let mut rng = Rng::new(seed);
        let rows: Vec<Row> = (0..6)
            .map(|_| Row {
                requests: (rng.bits() >> 32) as u32,
                bound: rng.below(8) == 0,
                key: key(rng.bits(), rng.bits() as u32),
            })
            .collect();
        let settings = Settings { max_active_requests: (rng.bits() >> 32) as u32 };
        let session = if rng.below(3) == 0 { 0 } else { rng.bits() };
        let (row, why) = settings.choose(session, &rows, &mut rng).unwrap();
        let costs = settings.costs(session, &rows, row, why);
        assert_eq!(costs.len(), rows.len());
        assert!(costs.iter().all(|cost| cost.is_finite() && *cost >= costs[row]), "{why:?}: {costs:?}");
    }
}

#[test]
fn no_rows_no_choice() {
    assert_eq!(UNLIMITED.choose(0, &[], &mut Rng::new(1)), None);
    assert_eq!(UNLIMITED.choose(5, &[], &mut Rng::new(1)), None);
}
