//! Tests of the quota, of expiry, and of increments from many threads.

use std::sync::Arc;

use super::{scratch::Scratch, *};

fn small() -> State {
    State::new(StateQuota { keys: 3, key_bytes: 4, value_bytes: 100, total_bytes: 3 * (ENTRY_OVERHEAD + 20) })
}

#[test]
fn a_value_expires_and_an_increment_does_not_extend_it() {
    let state = State::default();
    state.set("a", b"x", 10, 100).unwrap();
    assert_eq!((state.get("a", 109), state.get("a", 110)), (Some(b"x".to_vec()), None));
    assert_eq!(state.increment("n", 2, 10, 100), Ok(2));
    assert_eq!(state.increment("n", -5, 1_000, 109), Ok(-3), "the second step does not extend it");
    assert_eq!(state.increment("n", 1, 0, 110), Ok(1), "a new one, for good");
    assert_eq!(state.get("n", u64::MAX - 1), Some(1_i64.to_le_bytes().to_vec()));
    state.delete("n");
    assert_eq!(state.get("n", 0), None);
    assert_eq!(state.increment("a", 1, 0, 100), Err(StateError::NotANumber));
    assert_eq!(state.increment("m", i64::MAX, 0, 0).and(state.increment("m", 1, 0, 0)), Ok(i64::MAX));
}

#[test]
fn exceeding_a_quota_is_an_error_and_expired_entries_are_freed() {
    let state = small();
    assert_eq!(state.set("12345", b"", 0, 0), Err(StateError::KeyTooLong));
    assert_eq!(state.set("1", &[0; 101], 0, 0), Err(StateError::ValueTooLarge));
    for key in ["1", "2", "3"] {
        state.set(key, b"v", 50, 1_000).unwrap();
    }
    assert_eq!(state.set("4", b"v", 0, 1_001), Err(StateError::NoRoom));
    assert_eq!(state.set("1", &[0; 100], 0, 1_001), Err(StateError::NoRoom), "bytes are counted too");
    assert_eq!(state.get("1", 1_001), Some(b"v".to_vec()), "nothing is changed by a refusal");
    assert_eq!(state.set("4", b"v", 0, 1_050), Err(StateError::NoRoom), "a sweep was not long ago");
    assert_eq!(state.set("4", b"v", 0, 1_101), Ok(()), "refusals meanwhile do not put the next sweep off");
    assert_eq!(state.usage(), (1, 2 + ENTRY_OVERHEAD));
    state.clear();
    assert_eq!(state.usage(), (0, 0));
}

#[test]
fn increments_from_many_threads_add_up_and_usage_stays_correct() {
    let state = Arc::new(State::default());
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let state = state.clone();
            std::thread::spawn(move || {
                for step in 0..5_000_u32 {
                    state.increment("all", 1, 0, 1).unwrap();
                    state.set(&format!("{}", step % 7), &vec![0; (step % 11) as usize], 0, 1).unwrap();
                    if step % 5 == thread {
                        state.delete(&format!("{}", step % 7));
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(state.increment("all", 0, 0, 1), Ok(20_000));
    let (keys, bytes) = state.usage();
    let held: usize = state
        .shards
        .iter()
        .flat_map(|shard| shard.lock().iter().map(|(k, e)| e.size(k)).collect::<Vec<_>>())
        .sum();
    assert_eq!((keys, bytes), (state.shards.iter().map(|shard| shard.lock().len()).sum(), held));
}

#[test]
fn a_scratch_reads_through_and_writes_nothing() {
    let state = State::default();
    state.increment("n", 5, 0, 0).unwrap();
    let mut scratch = Scratch::over();
    assert_eq!(scratch.increment(&state, "n", 1, 0, 0), Ok(6));
    assert_eq!(scratch.increment(&state, "n", 1, 0, 0), Ok(7));
    scratch.set(&state, "a", b"x", 0, 0).unwrap();
    assert_eq!(scratch.get(&state, "a", 0), Some(b"x".to_vec()));
    scratch.delete("n");
    assert_eq!(scratch.get(&state, "n", 0), None);
    assert_eq!((state.get("n", 0), state.get("a", 0)), (Some(5_i64.to_le_bytes().to_vec()), None));
    assert_eq!(Scratch::alone().get(&state, "n", 0), None, "a probe knows nothing");
}
