//! Watches whether workers make progress, ejects those that do not, and asks these for a token until they
//! answer.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::{sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    ProbeConfig,
    client::Clients,
    one_token::{self, Answer},
};
use crate::{
    activity::{Stuck, StuckBy},
    id::{Leg, ModelName, WorkerId},
    pool::Pool,
    registry::{Registry, Snapshot},
    worker::{Health, Ineligible, Worker},
};

/// Shortest time between two looks.
const MIN_LOOK_INTERVAL: Duration = Duration::from_millis(10);
const LEGS: [Leg; 3] = [Leg::Aggregated, Leg::Prefill, Leg::Decode];
/// Longest and shortest wait for the gateway's own request.
const MAX_WAIT: Duration = Duration::from_secs(60);
const MIN_WAIT: Duration = Duration::from_secs(1);

/// The watch of all workers.
pub(super) struct Watch {
    registry: Arc<Registry>,
    config: watch::Receiver<ProbeConfig>,
    clients: Clients,
    tasks: TaskTracker,
}

impl Watch {
    pub(super) fn new(
        registry: Arc<Registry>,
        config: watch::Receiver<ProbeConfig>,
        clients: Clients,
        tasks: TaskTracker,
    ) -> Self {
        Self { registry, config, clients, tasks }
    }

    /// Looks at all workers again and again. Its requests end with `stop`.
    pub(super) async fn run(self, stop: CancellationToken) {
        loop {
            let config = *self.config.borrow();
            tokio::time::sleep(config.look_interval.max(MIN_LOOK_INTERVAL)).await;
            let snapshot = self.registry.snapshot();
            let mut stuck: Vec<(Stuck, &Arc<Worker>)> = Vec::new();
            for worker in snapshot.workers() {
                worker.end_warm_up();
                let found = self.look(worker, &config);
                if found.probe {
                    self.probe(worker, &snapshot, &config, &stop);
                }
                match found.stuck {
                    Some(by) => stuck.push((by, worker)),
                    None => take_back(worker),
                }
            }
            blame_one_of_two(&mut stuck);
            eject(&snapshot, stuck);
        }
    }

    fn look(&self, worker: &Arc<Worker>, config: &ProbeConfig) -> crate::activity::Found {
        let rests = worker.is_asleep() || worker.is_engine_paused();
        if worker.health() != Health::Healthy || rests {
            // Health checks judge it, and another process may serve afterwards. A sleeping or paused worker
            // answers nothing.
            worker.activity().forget();
        }
        let found = worker.activity().look(Instant::now(), config.stuck_after);
        if found.read && !config.load_interval.is_zero() {
            worker.read_figures();
        }
        if found.changed
            && let Some(stuck) = found.stuck
        {
            let (spec, by) = (worker.spec(), stuck.by.as_str());
            tracing::warn!(worker = %spec.id, url = %spec.url, role = %spec.role, by, "worker makes no progress");
        }
        found
    }

    /// Sends the gateway's own request. At most one runs for a worker.
    fn probe(
        &self,
        worker: &Arc<Worker>,
        snapshot: &Snapshot,
        config: &ProbeConfig,
        stop: &CancellationToken,
    ) {
        let Some(model) = model_of(worker, snapshot) else {
            worker.activity().probed(false);
            return;
        };
        let (worker, client) = (worker.clone(), self.clients.of(worker.spec()));
        let (stop, limit) = (stop.clone(), (config.stuck_after / 2).clamp(MIN_WAIT, MAX_WAIT));
        self.tasks.spawn(async move {
            let answer = tokio::select! {
                answer = one_token::ask(&client, worker.spec(), &model, limit) => answer,
                () = stop.cancelled() => return,
            };
            // A refusal says nothing while the worker may only be slow.
            let answered = answer == Answer::Token || (answer == Answer::Refused && worker.is_ejected());
            if answered && worker.activity().stuck().is_some() {
                worker.note_outcome(true);
            }
            if worker.activity().probed(answered) {
                worker.put_on_trial();
            }
        });
    }
}

/// Returns the first model of a worker.
fn model_of(worker: &Worker, snapshot: &Snapshot) -> Option<ModelName> {
    if let Some(model) = worker.spec().models.first() {
        return Some(model.clone());
    }
    let leg = LEGS.into_iter().find(|leg| worker.spec().role.serves(*leg))?;
    let serves = |model: &&&ModelName| snapshot.pool(model, leg).rows_of(worker.id()).next().is_some();
    snapshot.models().iter().find(serves).map(|model| (*model).clone())
}

fn take_back(worker: &Worker) {
    if worker.set_ejected(false) {
        worker.set_problem(None);
        let spec = worker.spec();
        tracing::info!(worker = %spec.id, url = %spec.url, role = %spec.role, "worker taken back");
    }
}

/// Late handoffs do not show which of both workers is to blame. A worker with several late partners is. If
/// two had only each other, the prefill worker is, until the other one is late with another partner, too.
fn blame_one_of_two(stuck: &mut Vec<(Stuck, &Arc<Worker>)>) {
    let late = stuck.iter().filter(|(stuck, _)| stuck.by == StuckBy::Handoffs).map(|(_, worker)| *worker);
    let mut late: Vec<(Option<WorkerId>, &Arc<Worker>)> =
        late.map(|worker| (worker.activity().only_partner(), worker)).collect();
    late.sort_by_key(|(partner, worker)| {
        (partner.is_some(), !worker.spec().role.serves(Leg::Prefill), worker.id())
    });
    let (mut blamed, mut excused) = (HashSet::new(), HashSet::new());
    for (partner, worker) in late {
        if partner.is_some_and(|partner| blamed.contains(&partner)) {
            excused.insert(worker.id());
            worker.activity().excuse_handoffs();
            take_back(worker);
        } else {
            blamed.insert(worker.id());
        }
    }
    stuck.retain(|(_, worker)| !excused.contains(&worker.id()));
}

/// Ejects as many of the stuck workers as their pools can do without, those first that were stuck first.
fn eject(snapshot: &Snapshot, mut stuck: Vec<(Stuck, &Arc<Worker>)>) {
    stuck.sort_by_key(|(stuck, worker)| (stuck.since, worker.id()));
    let mut away: HashSet<WorkerId> = HashSet::new();
    for (stuck, worker) in stuck {
        away.insert(worker.id());
        if !pools_of(worker, snapshot).all(|pool| can_do_without(pool, &away)) {
            away.remove(&worker.id());
            take_back(worker);
            continue;
        }
        if worker.set_ejected(true) {
            worker.activity().count();
            worker.set_problem(Some(format!(
                "requests wait for it and it makes no progress ({})",
                stuck.by.as_str()
            )));
            let spec = worker.spec();
            tracing::warn!(worker = %spec.id, url = %spec.url, role = %spec.role, "worker ejected");
        }
    }
}

fn pools_of<'a>(worker: &'a Worker, snapshot: &'a Snapshot) -> impl Iterator<Item = &'a Pool> {
    let pools = snapshot.models().into_iter().flat_map(|model| LEGS.map(|leg| snapshot.pool(model, leg)));
    pools.filter(|pool| pool.rows_of(worker.id()).next().is_some())
}

/// Returns whether at least half of the workers of a pool stay, and one of them is eligible.
fn can_do_without(pool: &Pool, away: &HashSet<WorkerId>) -> bool {
    let (mut up, mut gone, mut left, mut last) = (0_usize, 0_usize, 0_usize, None);
    for candidate in pool {
        // The ranks of a worker are neighbours.
        if last.replace(candidate.worker_id()) == Some(candidate.worker_id()) {
            continue;
        }
        let state = candidate.worker.ineligible();
        if state.is_some_and(Ineligible::is_down) {
            continue;
        }
        up += 1;
        if away.contains(&candidate.worker_id()) {
            gone += 1;
        } else if state != Some(Ineligible::Failing) {
            left += 1;
        }
    }
    gone * 2 <= up && left > 0
}

#[cfg(test)]
mod tests;
