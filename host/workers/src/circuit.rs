//! Passive health: a worker whose legs fail several times in a row is put aside, longer each time, and comes back on
//! probation, where one more failure puts it aside again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::time::{Duration, Instant};

/// Failures in a row that open the circuit.
const FAILURES: u32 = 5;
/// The first pause; it doubles with every further one.
const PAUSE: Duration = Duration::from_millis(500);
/// Doublings at most: 16 s.
const DOUBLINGS: u32 = 5;

/// The circuit of one worker. Closed while nothing is wrong.
#[derive(Debug)]
pub(crate) struct Circuit {
    origin: Instant,
    /// Failures since the last success.
    failures: AtomicU32,
    /// Times it opened since the last success.
    opened: AtomicU32,
    /// Open until then, milliseconds after `origin`; 0: closed.
    until_ms: AtomicU64,
}

impl Default for Circuit {
    fn default() -> Self {
        Self {
            origin: Instant::now(),
            failures: AtomicU32::new(0),
            opened: AtomicU32::new(0),
            until_ms: AtomicU64::new(0),
        }
    }
}

impl Circuit {
    /// Whether the worker is put aside now.
    pub(crate) fn is_open(&self) -> bool {
        let until = self.until_ms.load(Ordering::Relaxed);
        until != 0 && self.now_ms() < until
    }

    /// Takes an outcome. Outcomes of several requests may race; a lost one changes a pause, nothing else.
    pub(crate) fn note(&self, ok: bool) {
        if ok {
            // Either alone may be what is left of a failure in another thread, whose halves this came between.
            if self.failures.load(Ordering::Relaxed) != 0 || self.until_ms.load(Ordering::Relaxed) != 0 {
                self.failures.store(0, Ordering::Relaxed);
                self.opened.store(0, Ordering::Relaxed);
                self.until_ms.store(0, Ordering::Relaxed);
            }
            return;
        }
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        let on_probation = self.until_ms.load(Ordering::Relaxed) != 0;
        if self.is_open() || (failures < FAILURES && !on_probation) {
            return;
        }
        let opened = self.opened.fetch_add(1, Ordering::Relaxed);
        let pause = PAUSE * 2_u32.pow(opened.min(DOUBLINGS));
        let pause = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        self.until_ms.store(self.now_ms().saturating_add(pause).max(1), Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn five_failures_in_a_row_open_it_and_probation_ends_with_a_success() {
        let circuit = Circuit::default();
        (0..4).for_each(|_| circuit.note(false));
        circuit.note(true);
        (0..4).for_each(|_| circuit.note(false));
        assert!(!circuit.is_open());
        circuit.note(false);
        assert!(circuit.is_open());
        tokio::time::advance(PAUSE).await;
        assert!(!circuit.is_open());
        // On probation one failure is enough, and the pause is longer.
        circuit.note(false);
        tokio::time::advance(PAUSE).await;
        assert!(circuit.is_open());
        tokio::time::advance(PAUSE).await;
        assert!(!circuit.is_open());
        circuit.note(true);
        (0..4).for_each(|_| circuit.note(false));
        assert!(!circuit.is_open());
    }
}
