//! What a guest may take of the host beside its memory.

use std::sync::Arc;

use wasmtime_wasi::p2::bindings::random::{insecure::Host as _, random::Host as _};

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
