//! Sends the planned requests and collects the times that they took.

use std::cell::{Cell, RefCell};

use futures_util::future::join_all;
use indicatif::ProgressBar;
use pointsman_lab::calibrate::{Burst, Design, Experiment, MixRequest, Sample};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use tokio::time::{Duration, Instant, sleep};

use super::target::{Target, TargetError};

/// Token ids of prompts. Small ids are special tokens in many vocabularies, and every vocabulary has more
/// than a thousand.
const TOKEN_IDS: std::ops::Range<u32> = 100..1_000;
/// Maximum number of requests that may fail. With more failures, the server is not fit to be measured.
const MAX_FAILURES: u32 = 3;
/// Pause between bursts, in which the server becomes idle.
const SETTLE: Duration = Duration::from_millis(100);
/// Assumed time of a request if none was measured. It determines the pauses of the mix.
const TYPICAL: Duration = Duration::from_millis(500);

/// A run of measurements, with its limits.
pub(super) struct Run {
    model: String,
    pub(super) bar: ProgressBar,
    rng: RefCell<SmallRng>,
    failures: Cell<u32>,
    succeeded: Cell<bool>,
}

impl Run {
    pub(super) fn new(model: String, seed: u64, bar: ProgressBar) -> Self {
        let rng = RefCell::new(SmallRng::seed_from_u64(seed));
        Self { model, bar, rng, failures: Cell::new(0), succeeded: Cell::new(false) }
    }

    /// Sends the bursts one after another until `is_over` returns true. Appends the measurements to `out`.
    pub(super) async fn bursts(
        &self,
        target: &Target,
        bursts: &[Burst],
        is_over: &dyn Fn() -> bool,
        out: &RefCell<Vec<Experiment>>,
    ) -> Result<(), TargetError> {
        for burst in bursts {
            if is_over() {
                break;
            }
            let start = Instant::now();
            let requests = (0..burst.requests).map(|_| self.one(target, burst.isl, burst.osl, start));
            let answers = join_all(requests).await;
            let mut samples = Vec::new();
            for answer in answers {
                samples.extend(answer?);
            }
            // A burst in which a request failed is another experiment, with a load that was not measured.
            if samples.len() == burst.requests as usize {
                samples.sort_by(|left, right| left.at_ms.total_cmp(&right.at_ms));
                out.borrow_mut().push(Experiment { samples });
            }
            sleep(SETTLE).await;
        }
        Ok(())
    }

    /// Sends the mix: each of its users waits for the answer and a pause before the next request. `typical`
    /// is the mean pause.
    pub(super) async fn mix(
        &self,
        target: &Target,
        design: &Design,
        typical: Option<Duration>,
        out: &RefCell<Vec<Sample>>,
    ) -> Result<(), TargetError> {
        let (start, next) = (Instant::now(), Cell::new(0));
        let typical = typical.unwrap_or(TYPICAL);
        let user = |_| async {
            while let Some(MixRequest { isl, osl, pause }) = design.mix.get(next.get()) {
                next.set(next.get() + 1);
                sleep(typical.mul_f64(*pause)).await;
                let sample = self.one(target, *isl, *osl, start).await?;
                out.borrow_mut().extend(sample);
            }
            Ok(())
        };
        join_all((0..design.users).map(user)).await.into_iter().collect()
    }

    /// Measures one request with its own prompt. Returns `None` when the request failed and the limit of
    /// failures is not reached.
    async fn one(
        &self,
        target: &Target,
        isl: u32,
        osl: u32,
        start: Instant,
    ) -> Result<Option<Sample>, TargetError> {
        let prompt: Vec<u32> = {
            let mut rng = self.rng.borrow_mut();
            (0..isl).map(|_| rng.random_range(TOKEN_IDS)).collect()
        };
        let measured = target.measure(&self.model, &prompt, osl, start).await;
        self.bar.inc(1);
        match measured {
            Ok(sample) => {
                self.succeeded.set(true);
                Ok(Some(sample))
            }
            Err(error) => {
                self.failures.set(self.failures.get() + 1);
                if !self.succeeded.get() || self.failures.get() > MAX_FAILURES {
                    return Err(error);
                }
                self.bar.println(format!("warning: a request failed: {error}"));
                Ok(None)
            }
        }
    }
}
