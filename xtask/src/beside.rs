//! A steady load of well-behaved clients that runs during other actions, and the cost of each.

use std::{cell::Cell, sync::Arc};

use crate::{
    fleet::Fleet,
    load::{Load, Recorder, Running, Target, latency_ms},
    proc,
};

/// A running load, and the gateway process that serves it.
pub(crate) struct Beside {
    pid: u32,
    recorder: Arc<Recorder>,
    running: Running,
    failed: Cell<usize>,
}

/// Cost of a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// Resident memory before the case, megabytes.
    pub(crate) before_mb: f64,
    /// Peak of resident memory during the case, megabytes.
    pub(crate) peak_mb: f64,
    /// p99 of the steady load's requests, milliseconds; NaN when none was answered.
    pub(crate) p99_ms: f64,
    /// Number of requests of the steady load that failed during the case.
    pub(crate) failed: usize,
}

impl Beside {
    pub(crate) fn start(fleet: &Fleet, target: &Target, load: Load) -> anyhow::Result<Self> {
        let recorder = Arc::<Recorder>::default();
        let running = recorder.start(load, target)?;
        Ok(Self { pid: fleet.gateway.pid(), recorder, running, failed: Cell::new(0) })
    }

    /// Begins a case. Returns the resident memory before it, megabytes.
    pub(crate) fn begin(&self) -> anyhow::Result<f64> {
        self.take();
        let before_mb = proc::resident_mb(self.pid);
        proc::reset_peak(self.pid)?;
        Ok(before_mb)
    }

    /// Ends a case. Returns its cost.
    pub(crate) fn end(&self, before_mb: f64) -> anyhow::Result<Cost> {
        let answers = self.recorder.take();
        let failed = answers.iter().filter(|answer| answer.failed()).count();
        self.failed.set(self.failed.get() + failed);
        let p99_ms = latency_ms(answers.iter(), 0.99);
        Ok(Cost { before_mb, peak_mb: proc::peak_mb(self.pid)?, p99_ms, failed })
    }

    fn take(&self) {
        let failed = self.recorder.take().iter().filter(|answer| answer.failed()).count();
        self.failed.set(self.failed.get() + failed);
    }

    /// Ends the load. Returns the numbers of sent and of failed requests, and the first problems.
    pub(crate) async fn stop(self) -> (u64, usize, Vec<String>) {
        let Self { recorder, running, failed, .. } = self;
        running.stop().await;
        let last = recorder.take().iter().filter(|answer| answer.failed()).count();
        (recorder.sent(), failed.get() + last, recorder.problems())
    }
}
