//! A request that was admitted, until it ends.

use std::sync::Arc;

use fair_queue::{Charge, NO_TENANT};
use pointsman_workers::ModelName;
use tokio::time::{Duration, Instant};

use super::{AdmissionQueue, AdmissionRequest, Place};

/// An admitted request. Dropping it ends it.
#[derive(Debug)]
pub struct Admission {
    queue: Arc<AdmissionQueue>,
    model: ModelName,
    tenant: Option<u64>,
    /// Input and output tokens: estimated, later counted.
    tokens: (u64, u64),
    charge: Option<Charge<ModelName>>,
    /// When it found a worker.
    confirmed: Option<Instant>,
    /// Time from then to its first token.
    first_token: Option<Duration>,
    /// Whether its end wakes another request.
    wakes: bool,
}

impl Admission {
    pub(super) fn unconfirmed(queue: Arc<AdmissionQueue>, admission_request: &AdmissionRequest<'_>) -> Self {
        let (model, tenant) = (admission_request.model.clone(), admission_request.request.tenant_hash);
        let tokens = admission_request.tokens();
        Self { queue, model, tenant, tokens, charge: None, confirmed: None, first_token: None, wakes: true }
    }

    /// Confirms that the request found a worker, and charges its tenant when requests of the model wait.
    /// `place` is the place that it had.
    pub(crate) fn confirm(&mut self, place: Option<&Place>) {
        let queue = self.queue.clone();
        let mut inner = queue.inner.lock();
        let (input, output) = self.tokens;
        let cost = inner.rules.cost(input, output);
        let weight = inner.rules.share(self.tenant).weight;
        let now = Instant::now();
        self.confirmed = Some(now);
        self.charge = match place {
            Some(place) => {
                inner.drain.note(now);
                inner.order.charge(&place.position, weight, cost)
            }
            None => {
                let tenant = self.tenant.unwrap_or(NO_TENANT);
                inner.order.charge_passing(&self.model, tenant, weight, cost)
            }
        };
    }

    /// States the tokens that the request really used.
    pub fn used(&mut self, input: u64, output: u64) {
        self.tokens = (input, output);
    }

    /// States when the request's first token came.
    pub fn first_token(&mut self, at: Instant) {
        self.first_token = self.confirmed.and_then(|confirmed| at.checked_duration_since(confirmed));
    }

    /// Gives an unconfirmed admission back, without waking another request.
    pub(crate) fn withdraw(mut self) {
        self.wakes = false;
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let queue = self.queue.clone();
        let mut inner = queue.inner.lock();
        inner.inflight -= 1;
        if let Some(count) = inner.inflight_of.get_mut(&self.model) {
            *count -= 1;
            if *count == 0 {
                inner.inflight_of.remove(&self.model);
            }
        }
        if let Some(charge) = self.charge.take() {
            let real = inner.rules.cost(self.tokens.0, self.tokens.1);
            inner.order.settle(&charge, real);
        }
        if let Some(time) = self.first_token {
            inner.first_token_times.note(&self.model, time);
        }
        drop(inner);
        if self.wakes {
            queue.wake();
        }
    }
}
