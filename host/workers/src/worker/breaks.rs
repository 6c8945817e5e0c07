//! When the engine last broke on requests: whether it broke on one of them alone.

use parking_lot::Mutex;
use tokio::time::{Duration, Instant};

use super::Worker;

/// How long after one request of an engine that dies the others have broken, too.
const TOGETHER: Duration = Duration::from_secs(1);

/// The last two times.
#[derive(Debug, Default)]
pub(super) struct Breaks(Mutex<[Option<Instant>; 2]>);

impl Breaks {
    fn note(&self) {
        let mut last = self.0.lock();
        let [_, newest] = *last;
        *last = [newest, Some(Instant::now())];
    }

    fn were_two(&self) -> bool {
        self.0.lock().iter().all(|at| at.is_some_and(|at| at.elapsed() <= TOGETHER))
    }
}

impl Worker {
    /// Notes that the engine broke on a request.
    pub fn note_broke(&self) {
        self.state.breaks.note();
    }

    /// Whether the engine, which broke on a request a moment ago, broke on no other one, although it serves
    /// others of this gateway.
    #[must_use]
    pub fn broke_alone(&self) -> bool {
        self.own_requests() > 0 && !self.state.breaks.were_two() && !self.is_down()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn two_breaks_within_a_second_are_the_engine_s() {
        let breaks = Breaks::default();
        breaks.note();
        assert!(!breaks.were_two());
        tokio::time::advance(TOGETHER).await;
        breaks.note();
        assert!(breaks.were_two());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(!breaks.were_two());
    }
}
