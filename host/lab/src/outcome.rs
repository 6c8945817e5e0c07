//! The outcome of one request, as its client saw it.

use std::time::Duration;

use pointsman_routing::RouteError;

use crate::trace::Targets;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With all its tokens.
    Complete,
    /// A policy refused it, or every worker was busy.
    Shed,
    /// It can never fit into an engine.
    TooLarge,
    /// No worker was eligible, or the policy failed and the operator's configuration refuses such requests.
    NoWorker,
    /// Its engines failed, and no retry was left or the client already had the first token.
    Failed,
}

impl Ended {
    /// Returns the outcome of a request for which the router found no worker.
    pub(crate) fn of_refusal(error: &RouteError) -> Self {
        let refused = error.is_back_pressure() || matches!(error, RouteError::Shed(_));
        if refused { Self::Shed } else { Self::NoWorker }
    }

    /// Returns the name of the outcome in reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Shed => "shed",
            Self::TooLarge => "too-large",
            Self::NoWorker => "no-worker",
            Self::Failed => "failed",
        }
    }
}

/// One request as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Time of arrival, from the start of the run.
    pub at: Duration,
    /// How the request ended.
    pub ended: Ended,
    /// Time to first token.
    pub ttft: Duration,
    /// Time to last token.
    pub e2e: Duration,
    /// Time in the gateway's queue.
    pub queued: Duration,
    /// Number of attempts; 0 if the request was refused before the first.
    pub attempts: u32,
    /// Targets of its client.
    pub targets: Targets,
    /// Prompt tokens.
    pub isl: u32,
    /// Output tokens.
    pub osl: u32,
    /// Prompt tokens that the engine which computed the prompt had cached.
    pub cached: u32,
    /// Engine that computed the prompt, by its position in the fleet.
    pub prefill_engine: u32,
    /// Engine that generated the answer.
    pub decode_engine: u32,
    /// Whether the native fallback chose because a policy abstained or failed.
    pub fell_back: bool,
}

impl Outcome {
    /// Returns the mean inter-token latency: (E2E - TTFT) / (OSL - 1), as AIPerf defines it. Returns `None`
    /// for an answer of one token.
    #[must_use]
    pub fn itl(&self) -> Option<Duration> {
        (self.osl > 1).then(|| (self.e2e - self.ttft) / (self.osl - 1))
    }
}

/// Engines of a request, by position: the one that computes the prompt and the one that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) prefill: u32,
    pub(crate) decode: u32,
}

impl Place {
    /// Place of a request that was not sent to an engine.
    pub(crate) const NONE: Self = Self { prefill: u32::MAX, decode: u32::MAX };

    pub(crate) fn of(outcome: &Outcome) -> Self {
        Self { prefill: outcome.prefill_engine, decode: outcome.decode_engine }
    }

    /// Whether one engine runs the whole request.
    pub(crate) fn is_local(self) -> bool {
        self.prefill == self.decode
    }

    /// Returns the place of a request that runs on one engine.
    pub(crate) fn whole(engine: u32) -> Self {
        Self { prefill: engine, decode: engine }
    }
}
