//! A realtime session: its worker is chosen as that of any request, and a connection is opened to it.

use std::sync::Arc;

use http::HeaderMap;
use pointsman_orchestration::Event;
use tokio_util::sync::CancellationToken;

use super::{
    Drive, PlannedRequest,
    executor::{Executor, Reached},
};
use crate::{
    openai::error::ApiError,
    state::State,
    telemetry::account::Account,
    upstream::{UpgradedCall, Upstream},
};

/// A session of a client with a worker.
pub(crate) struct Session(Box<Drive>);

impl Session {
    /// Returns a session that is not open yet. `path` is the client's path and query, `headers` are those of
    /// the upgrade.
    pub(crate) fn new(
        state: Arc<State>,
        upstream: Upstream,
        planned: Box<PlannedRequest>,
        (path, headers): (String, HeaderMap),
        account: Box<Account>,
    ) -> Self {
        let executor = Executor::Upgrade(path, headers);
        // When the client leaves, this is dropped.
        Self(Drive::new(state, upstream, executor, planned, account, CancellationToken::new()))
    }

    /// Chooses a worker and upgrades a connection to it. Another worker is tried within the retries.
    ///
    /// # Errors
    /// [`ApiError`] of the routing, or of the last worker.
    pub(crate) async fn open(&mut self) -> Result<UpgradedCall, ApiError> {
        match self.0.run().await {
            Reached::Upgraded(engine) => Ok(engine),
            other => Err(other.error()),
        }
    }

    /// Adds the gateway's own headers to the answer that opens the session.
    pub(crate) fn add_own_headers(&self, headers: &mut HeaderMap) {
        self.0.add_own_headers(headers);
    }

    /// The record of the session.
    pub(crate) fn account(&mut self) -> &mut Account {
        &mut self.0.account
    }

    /// Ends an open session. `engine_slow`: the worker did not take the client's bytes in time.
    pub(crate) fn end(mut self, engine_slow: bool) {
        let leg = self.0.answering();
        if let Some(candidate) = self.0.candidate(leg).filter(|_| engine_slow) {
            candidate.load().observe_outcome(false);
            candidate.worker.note_outcome(false);
            candidate.worker.note_timeout();
            let why = || format!("the last {leg} leg failed: the engine did not read what the client sent");
            candidate.worker.explain_failure(why);
        }
        self.0.account.leg_ended(leg, if engine_slow { Err("timeout") } else { Ok(()) });
        self.0.report(Event::Ended);
        while let Some(action) = self.0.next_action() {
            self.0.perform(action);
        }
    }
}
