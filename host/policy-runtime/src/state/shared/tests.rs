//! Gateways that share a state, without a network: changes are handed over in any order and repeatedly.

use proptest::prelude::*;

use super::*;
use crate::StateQuota;

const NOW: u64 = 1_000_000;

fn gateway(writer: u64) -> State {
    started(writer, 1)
}

fn started(writer: u64, incarnation: u64) -> State {
    let state = State::default();
    state.set_shared(true);
    state.share(writer, incarnation);
    state
}

/// Writes use the system's time, reads the call's.
fn now() -> u64 {
    unix_us() / 1_000
}

fn hand_over(from: &State, to: &[&State]) {
    for change in from.take_changes(usize::MAX) {
        for state in to {
            state.apply(change.clone(), now()).unwrap();
        }
    }
}

fn read(state: &State, key: &str) -> Option<i64> {
    let value = state.get(key, now())?;
    Some(i64::from_le_bytes(value.try_into().unwrap()))
}

#[test]
fn q7_additions_of_all_gateways_add_up() {
    let (a, b, c) = (gateway(1), gateway(2), gateway(3));
    let now = now();
    for (state, delta) in [(&a, 5), (&b, 7), (&c, -1), (&a, 1)] {
        state.increment("n", delta, 60_000, now).unwrap();
    }
    hand_over(&a, &[&b, &c]);
    hand_over(&b, &[&a, &c]);
    hand_over(&c, &[&a, &b]);
    // Q7.1
    assert_eq!([&a, &b, &c].map(|state| read(state, "n")), [Some(12); 3]);
    assert_eq!(b.increment("n", 1, 60_000, now), Ok(13));
    assert_eq!(a.take_changes(9).len(), 0, "what others wrote is not told on");
}

#[test]
fn q7_what_was_counted_before_a_slot_is_shared_becomes_a_part() {
    let (a, b, c) = (gateway(1), gateway(2), gateway(3));
    let now = now();
    b.set_shared(false);
    b.increment("n", 4, 60_000, now).unwrap();
    b.increment("m", 1, 60_000, now).unwrap();
    b.set("v", b"alone", 0, now).unwrap();
    assert_eq!(b.take_changes(9).len(), 0);
    a.increment("n", 5, 60_000, now).unwrap();
    a.set("v", b"shared", 0, now).unwrap();
    b.set_shared(true);
    b.note_all();
    hand_over(&a, &[&b, &c]);
    // Q7.12
    assert_eq!((read(&b, "n"), b.get("v", now)), (Some(9), Some(b"shared".to_vec())));
    assert_eq!(b.increment("m", 1, 60_000, now), Ok(2));
    hand_over(&b, &[&a, &c]);
    // Q7.12
    assert_eq!([&a, &c].map(|state| (read(state, "n"), read(state, "m"))), [(Some(9), Some(2)); 2]);
    assert_eq!(b.increment("n", 1, 60_000, now), Ok(10));
    hand_over(&b, &[&a, &c]);
    assert_eq!([&a, &c].map(|state| read(state, "n")), [Some(10); 2]);
}

#[test]
fn q7_the_last_write_and_the_last_removal_win_in_any_order() {
    let (a, b, c) = (gateway(1), gateway(2), gateway(3));
    let now = now();
    a.set("v", b"old", 0, now).unwrap();
    let old = a.take_changes(9);
    std::thread::sleep(std::time::Duration::from_millis(2));
    b.set("v", b"new", 0, now).unwrap();
    let new = b.take_changes(9);
    for (state, order) in [(&a, [&new, &old]), (&b, [&old, &new]), (&c, [&new, &old])] {
        order.into_iter().flatten().for_each(|change| state.apply(change.clone(), now).unwrap());
        // Q7.2
        assert_eq!(state.get("v", now).as_deref(), Some(&b"new"[..]));
    }
    assert_eq!(b.take_changes(9), new, "the bucket held the older one last: the later one is told again");
    std::thread::sleep(std::time::Duration::from_millis(2));
    c.delete("v");
    hand_over(&c, &[&a, &b]);
    old.iter().chain(&new).for_each(|change| a.apply(change.clone(), now).unwrap());
    // Q7.2
    assert_eq!([&a, &b, &c].map(|state| state.get("v", now)), [None, None, None]);
}

#[test]
fn q7_a_removed_number_begins_anew_everywhere() {
    let (a, b) = (gateway(1), gateway(2));
    let now = now();
    a.increment("n", 5, 0, now).unwrap();
    b.increment("n", 6, 0, now).unwrap();
    let late = b.take_changes(9);
    hand_over(&a, &[&b]);
    a.delete("n");
    a.increment("n", 1, 0, now).unwrap();
    late.iter().for_each(|change| a.apply(change.clone(), now).unwrap());
    hand_over(&a, &[&b]);
    // Q7.2
    assert_eq!([&a, &b].map(|state| read(state, "n")), [Some(1); 2]);
    b.increment("n", 2, 0, now).unwrap();
    hand_over(&b, &[&a]);
    assert_eq!([&a, &b].map(|state| read(state, "n")), [Some(3); 2]);
}

#[test]
fn q7_a_restarted_gateway_takes_up_its_own_additions_once() {
    let (old, b) = (started(1, 10), gateway(2));
    let now = now();
    old.increment("n", 4, 0, now).unwrap();
    let told = old.take_changes(9);
    let new = started(1, 11);
    new.increment("n", 1, 0, now).unwrap();
    for _ in 0..2 {
        told.iter().for_each(|change| new.apply(change.clone(), now).unwrap());
        // Q7.3
        assert_eq!(read(&new, "n"), Some(5));
    }
    told.iter().for_each(|change| b.apply(change.clone(), now).unwrap());
    hand_over(&new, &[&b, &new]);
    // Q7.3
    assert_eq!([&new, &b].map(|state| read(state, "n")), [Some(5); 2]);
}

#[test]
fn q7_parts_expire_one_by_one_and_what_has_expired_is_not_taken() {
    let (a, b) = (gateway(1), gateway(2));
    a.increment("n", 4, 1_000, NOW).unwrap();
    b.increment("n", 2, 5_000, NOW).unwrap();
    for change in a.take_changes(9) {
        b.apply(change.clone(), NOW).unwrap();
        assert_eq!(b.get("n", NOW), Some(6_i64.to_le_bytes().to_vec()));
        assert_eq!(b.get("n", NOW + 1_000), Some(2_i64.to_le_bytes().to_vec()));
        assert_eq!(b.get("n", NOW + 5_000), None);
        let late = gateway(3);
        late.apply(change, NOW + 1_000).unwrap();
        assert_eq!(late.usage().0, 0);
    }
}

#[test]
fn q7_changes_of_others_keep_the_quota_and_the_limits() {
    let state = State::new(StateQuota { keys: 2, key_bytes: 4, value_bytes: 8, total_bytes: 4_096 });
    state.set_shared(true);
    state.share(1, 1);
    let change = |key: &str, value: &[u8], time_us| StateChange {
        key: key.to_owned(),
        stamp: Stamp { time_us, writer: 2 },
        content: SharedContent::Value { value: value.to_vec(), expires_ms: u64::MAX },
    };
    let apply = |change| state.apply(change, NOW);
    // Q7.4
    assert_eq!(apply(change("12345", b"", 1)), Err(ChangeRefused::TooLong));
    assert_eq!(apply(change("1", &[0; 9], 1)), Err(ChangeRefused::TooLong));
    assert_eq!(apply(change("1", b"", (NOW + 11_000) * 1_000)), Err(ChangeRefused::ClockAhead));
    assert_eq!([apply(change("1", b"", 1)), apply(change("2", b"", 1))], [Ok(()), Ok(())]);
    assert_eq!(apply(change("3", b"", 1)), Err(ChangeRefused::NoRoom));
    for writer in 0..100 {
        let content = SharedContent::Part { writer, incarnation: 1, sum: 1, expires_ms: u64::MAX };
        let stamp = Stamp { time_us: 2, writer: 2 };
        let _ = state.apply(StateChange { key: "1".to_owned(), stamp, content }, NOW);
    }
    // Q7.4
    assert_eq!(state.get("1", NOW), Some(i64::try_from(MAX_PARTS).unwrap().to_le_bytes().to_vec()));
    assert_eq!(state.usage().0, 2);
}

#[test]
fn q7_without_others_and_when_it_is_not_wanted_nothing_is_noted() {
    let apart = State::default();
    apart.set_shared(true);
    let unwanted = State::default();
    unwanted.share(1, 1);
    for state in [&apart, &unwanted] {
        state.increment("n", 1, 0, NOW).unwrap();
        state.set("v", b"x", 0, NOW).unwrap();
        state.note_all();
        // Q7.5
        assert!(state.take_changes(9).is_empty());
    }
}

proptest! {
    #[test]
    fn q7_gateways_agree_whatever_the_order_of_changes(
        steps in proptest::collection::vec((0_usize..3, 0_u8..4, 0_usize..2, any::<bool>()), 1..60),
    ) {
        let states = [gateway(1), gateway(2), gateway(3)];
        let mut told: Vec<StateChange> = Vec::new();
        let now = now();
        for (place, what, key, tell) in steps {
            let (state, key) = (&states[place], ["a", "b"][key]);
            match what {
                0 => drop(state.set(key, &7_i64.to_le_bytes(), 0, now)),
                1 => state.delete(key),
                _ => drop(state.increment(key, 1, 0, now)),
            }
            if tell {
                let changes = state.take_changes(9);
                changes.iter().for_each(|change| states[0].apply(change.clone(), now).unwrap());
                told.extend(changes);
            }
        }
        // Repeated changes end after some rounds, since no gateway writes any more.
        for _ in 0..4 {
            told.extend(states.iter().flat_map(|state| state.take_changes(9)));
            for change in told.iter().rev().chain(&told) {
                states.iter().for_each(|state| state.apply(change.clone(), now).unwrap());
            }
        }
        for key in ["a", "b"] {
            // Q7.6
            prop_assert_eq!(states[0].get(key, now), states[1].get(key, now));
            prop_assert_eq!(states[1].get(key, now), states[2].get(key, now));
        }
    }
}
