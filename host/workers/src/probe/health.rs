//! Health checks of one worker: the requests, their time limits, and the conclusions from the results. No
//! I/O.

use std::{net::SocketAddr, time::Duration};

use super::{HEALTH, ProbeConfig};
use crate::{
    id::Engine,
    worker::{Health, Worker},
};

/// Consecutive failed health checks that make a worker unhealthy.
const MAX_FAILURES: u32 = 2;
/// One in this many failed checks in a row may take the long time.
const LONG_EVERY: u32 = 4;

/// Returns the path that is asked first. SGLang's `/health` generates a token; `/ready` returns the result.
pub(super) fn health_path(engine: Engine) -> &'static str {
    match engine {
        Engine::Sglang => "/ready",
        Engine::Vllm | Engine::Trtllm | Engine::Openai => HEALTH,
    }
}

/// Consecutive failed health checks of a worker, and what follows from them.
#[derive(Debug, Default)]
pub struct HealthChecks {
    failures: u32,
    /// Whether the last check that passed was answered quickly.
    quick: bool,
}

/// Connection of the last health check. An engine that restarts between two checks closes it.
#[derive(Debug, Default)]
pub(super) struct KeptConnection {
    /// Its address on this side.
    local: Option<SocketAddr>,
    /// Whether two checks used it.
    is_kept: bool,
}

impl KeptConnection {
    /// Notes the connection of a check. Returns whether it is a new one although the engine had kept the one
    /// before: it may have restarted. One that never keeps connections says nothing with it.
    pub(super) fn is_replaced(&mut self, local: SocketAddr) -> bool {
        let same = self.local.replace(local) == Some(local);
        std::mem::replace(&mut self.is_kept, same) && !same
    }
}

impl HealthChecks {
    /// Returns whether the last check failed.
    #[must_use]
    pub fn failing(&self) -> bool {
        self.failures > 0
    }

    /// The engine answered, but must not be used.
    pub(super) fn answered(&mut self) {
        self.failures = 0;
    }

    /// The check timed out, and the worker made progress (B7.9): it may be too busy to answer at once. The
    /// check does not count, and the next one may take the long time.
    pub(super) fn excused(&mut self) {
        (self.failures, self.quick) = (0, false);
    }

    /// Returns the time limit of the next check. SGLang's `/health` takes a second or more by design, and any
    /// engine may be slow under load; most answer in milliseconds, and one of those that hangs has to be
    /// found soon. So an engine has the long time unless its last check was answered quickly. A first
    /// failure is confirmed with the long time, and later ones now and then.
    pub(super) fn limit(&self, config: &ProbeConfig) -> Duration {
        let long = !self.quick || self.failures % LONG_EVERY == 1;
        if long { config.health_timeout.max(config.timeout) } else { config.timeout }
    }

    /// Notes how long the engine took to answer a check.
    pub(super) fn took(&mut self, time: Duration, config: &ProbeConfig) {
        self.quick = time <= config.timeout / 2;
    }

    /// The check passed. Returns whether the worker was not healthy before.
    pub fn passed(&mut self, worker: &Worker) -> bool {
        self.failures = 0;
        worker.set_health(Health::Healthy)
    }

    /// The check failed. Returns whether the worker is unhealthy now and was not before.
    pub fn failed(&mut self, worker: &Worker) -> bool {
        self.failures += 1;
        if self.failures == 1 {
            worker.watch_answers();
        }
        if self.failures < MAX_FAILURES {
            return false;
        }
        let changed = worker.set_health(Health::Unhealthy);
        worker.release_waiting();
        changed
    }

    /// No process listens any more. One more failed check makes the worker unhealthy.
    pub(super) fn gone(&mut self, worker: &Worker) {
        if self.failures == 0 {
            worker.watch_answers();
            self.failures = MAX_FAILURES - 1;
        }
    }

    /// A request asked for a check. After a failed connect, one successful check makes the worker healthy and
    /// one failure keeps it unhealthy.
    pub fn requested(&mut self, worker: &Worker) {
        if worker.health() == Health::Unhealthy {
            self.failures = MAX_FAILURES;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::probes, *};
    use crate::spec::WorkerSpec;

    #[test]
    fn b5_a_kept_connection_that_is_replaced_is_noticed() {
        let mut connection = KeptConnection::default();
        let ports = [1, 1, 1, 2, 2, 3, 4, 5, 5, 5];
        let replaced = ports.map(|port| connection.is_replaced(SocketAddr::from(([127, 0, 0, 1], port))));
        // B5.14
        let expected = [false, false, false, true, false, true, false, false, false, false];
        assert_eq!(replaced, expected);
    }

    #[test]
    fn b8_the_time_of_a_check_follows_from_the_ones_before() {
        let [short, long] = [Duration::from_secs(1), Duration::from_secs(5)];
        let config = ProbeConfig { health_timeout: long, ..probes(Duration::from_secs(2), short) };
        let worker = Worker::new(WorkerSpec::parse_flag("role=decode,engine=vllm,url=http://a:1").unwrap());
        let mut checks = HealthChecks::default();
        // B8.6
        assert_eq!(checks.limit(&config), long, "the first");
        checks.took(Duration::from_millis(5), &config);
        assert_eq!(checks.limit(&config), short);
        let after_failures: Vec<Duration> = (0..6)
            .map(|_| {
                checks.failed(&worker);
                checks.limit(&config)
            })
            .collect();
        assert_eq!(after_failures, [long, short, short, short, long, short]);
        checks.took(Duration::from_millis(1_100), &config);
        checks.passed(&worker);
        assert_eq!(checks.limit(&config), long, "a slow engine");
        // B7.9
        checks.took(Duration::from_millis(5), &config);
        checks.failed(&worker);
        checks.excused();
        assert_eq!((checks.failing(), checks.limit(&config)), (false, long), "a busy engine");
        let impatient = ProbeConfig { health_timeout: Duration::from_millis(1), ..config };
        assert_eq!(checks.limit(&impatient), short, "never less than the others");
    }
}
