//! The time between the start of the health checks and the first client. A gateway that accepted clients at
//! once would refuse them: it has no worker that it knows to be healthy.

use std::time::Duration;

use pointsman_workers::{Health, Registry, Worker, WorkerId};
use tokio::time::{Instant, sleep};

use crate::config::settings::Settings;

/// Time between two looks at the workers.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The workers of the configuration, until each of them was asked once.
#[derive(Debug)]
pub(super) struct FirstChecks {
    configured: Vec<WorkerId>,
    /// The longest time: that of one health check.
    limit: Duration,
}

impl FirstChecks {
    pub(super) fn of(settings: &Settings) -> Self {
        let configured = settings.workers.iter().map(|worker| worker.id).collect();
        let probe = &settings.probe;
        Self { configured, limit: probe.health_timeout.max(probe.timeout) }
    }

    /// Waits until the result of the first question to each worker is known, or the time is over.
    pub(super) async fn wait(self, registry: &Registry) {
        let end = Instant::now() + self.limit;
        loop {
            let snapshot = registry.snapshot();
            let open =
                self.configured.iter().filter_map(|id| snapshot.get(*id)).filter(|worker| is_open(worker));
            let open = open.count();
            if open == 0 {
                return;
            }
            if Instant::now() >= end {
                tracing::warn!(workers = open, "clients are served before every configured worker answered");
                return;
            }
            sleep(LOOK_INTERVAL).await;
        }
    }
}

/// Returns whether nothing is known of a worker yet, neither that it is healthy nor what is wrong with it.
fn is_open(worker: &Worker) -> bool {
    worker.health() == Health::Unknown && worker.problem().is_none() && !worker.is_misconfigured()
}

#[cfg(test)]
mod tests {
    use pointsman_workers::WorkerSpec;

    use super::*;

    fn spec(id: u64) -> WorkerSpec {
        let flag = format!("id={id},role=aggregated,engine=vllm,url=http://127.0.0.1:{id}");
        WorkerSpec::parse_flag(&flag).unwrap()
    }

    /// How long a start waits with `healthy` and `failed` workers.
    async fn waited(workers: u64, healthy: &[u64], failed: &[u64]) -> Duration {
        let registry = Registry::default();
        (1..=workers).for_each(|id| _ = registry.upsert(spec(id)));
        let snapshot = registry.snapshot();
        let of = |id: &u64| snapshot.get(WorkerId(*id)).unwrap();
        healthy.iter().for_each(|id| _ = of(id).set_health(Health::Healthy));
        failed.iter().for_each(|id| _ = of(id).set_health(Health::Unhealthy));
        let configured = (1..=workers).map(WorkerId).collect();
        let begun = Instant::now();
        FirstChecks { configured, limit: Duration::from_secs(5) }.wait(&registry).await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn n10_a_start_waits_for_the_first_check_of_each_configured_worker_and_no_longer_than_one() {
        // N10.1
        assert_eq!(waited(0, &[], &[]).await, Duration::ZERO);
        assert_eq!(waited(3, &[1, 3], &[2]).await, Duration::ZERO);
        // N10.2
        assert_eq!(waited(3, &[1, 3], &[]).await, Duration::from_secs(5));
    }
}
