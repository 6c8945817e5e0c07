//! What a guest may take of the host besides its memory.

use std::sync::Arc;

use bytes::Bytes;
use pointsman_workers::Leg;
use wasmtime_wasi::{
    cli::StdoutStream as _,
    p2::{
        StreamError,
        bindings::random::{insecure::Host as _, random::Host as _},
    },
};

use super::*;

fn guest() -> Guest {
    Guest::new(Arc::from("x"), 1, &Access::default(), Counted::new(&Arc::default()))
}

#[test]
fn t9_handles_of_wasi_are_limited() {
    let mut guest = guest();
    for _ in 0..MAX_HANDLES {
        guest.ctx().table.push(()).expect("room");
    }
    // T9.2
    assert!(guest.ctx().table.push(()).is_err());
}

#[test]
fn t9_random_bytes_are_limited() {
    let mut guest = guest();
    let random = guest.ctx().ctx.random();
    assert_eq!(random.get_random_bytes(MAX_RANDOM_BYTES).expect("bytes").len() as u64, MAX_RANDOM_BYTES);
    // T9.3
    assert!(random.get_random_bytes(MAX_RANDOM_BYTES + 1).is_err());
    assert!(random.get_insecure_random_bytes(MAX_RANDOM_BYTES + 1).is_err());
}

#[test]
fn t9_what_a_call_prints_is_limited() {
    let guest = guest();
    for write in ["\n", &"\n".repeat(1_000)] {
        let call = Call { leg: Leg::Aggregated, attempt: 0, rows: 0, seed: 0, now_us: 0 };
        guest.call.begin(&DecisionContext::new(Purpose::Route), &call);
        let mut stdout = guest.log.p2_stream();
        let mut write = || stdout.write(Bytes::copy_from_slice(write.as_bytes()));
        let ended = (0..10_000).find_map(|count| write().err().map(|error| (count, error)));
        // T9.4: 4,096 writes of a few bytes, or 262 of 1,000
        assert!(matches!(ended, Some((262 | 4_096, StreamError::Trap(_)))), "{ended:?}");
    }
}

#[test]
fn t9_calls_of_the_host_end_at_the_deadline_without_a_tick_of_the_guest() {
    let mut guest = guest();
    guest.allow(TimeLimit { time: Duration::from_millis(2), key: "policies.deadline" });
    let long = "l".repeat(100_000);
    let ended = (0..1_000_000)
        .find_map(|_| wit_log::Host::log(&mut guest, wit_log::Level::Debug, long.clone()).err());
    // T9.4
    assert_eq!(ended.and_then(|error| error.downcast_ref().copied()), Some(Trap::Interrupt));
    guest.allow(TimeLimit { time: Duration::from_millis(2), key: "policies.deadline" });
    let ended = (0..10_000_000).find_map(|_| wit_state::Host::get(&mut guest, "key".to_owned()).err());
    // T9.4
    assert_eq!(ended.and_then(|error| error.downcast_ref().copied()), Some(Trap::Interrupt));
}
