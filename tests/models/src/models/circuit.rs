//! The circuit of a worker: outcomes of several requests at once.

use super::circuit::Circuit;
use crate::stand_in::{sync::Arc, time};

/// A request fails while another succeeds. Whatever came of it, after the next success one failure opens nothing.
pub(crate) fn closes() {
    time::set(0);
    let circuit = Arc::new(Circuit::default());
    (0..4).for_each(|_| circuit.note(false));
    let outcomes = [true, false].map(|ok| {
        let circuit = circuit.clone();
        loom::thread::spawn(move || circuit.note(ok))
    });
    outcomes.into_iter().for_each(|outcome| outcome.join().unwrap());
    time::set(60_000);
    circuit.note(true);
    circuit.note(false);
    assert!(!circuit.is_open(), "on probation after a success");
}
