//! Who sends the legs of a request, and what begins when they were sent.

use bytes::Bytes;
use http::{HeaderMap, Response};
use pointsman_orchestration::{HandoffKind, PrefillTraits};
use pointsman_workers::Candidate;

#[cfg(feature = "ext-proc")]
use crate::upstream::LegHeaders;
use crate::{
    connectors::connector_for,
    openai::error::ApiError,
    upstream::{Body, UpgradedCall},
};

/// Who sends the legs of a request.
pub(super) enum Executor {
    /// The gateway calls their engines.
    Calls,
    /// The gateway asks an engine to upgrade a connection: the client's path and query, and the headers of
    /// the upgrade.
    Upgrade(String, HeaderMap),
    /// A proxy sends them, after it was told what the answering engine gets.
    #[cfg(feature = "ext-proc")]
    Proxy(Option<Handover>),
}

/// How far a request got.
pub(super) enum Reached {
    /// The client gets an answer with a body that is complete.
    Ending(Ending),
    /// The head of an answer that is a stream.
    Stream(Response<Body>),
    /// A connection to an engine.
    Upgraded(UpgradedCall),
    /// The legs were handed to the proxy.
    #[cfg(feature = "ext-proc")]
    HandedOver(Handover),
}

/// The answer of a request that is not relayed.
pub(super) enum Ending {
    Whole(Response<Bytes>),
    Failed(ApiError),
}

/// What the answering engine gets of the proxy.
#[cfg(feature = "ext-proc")]
#[derive(Debug)]
pub(crate) struct Handover {
    pub(crate) headers: LegHeaders,
    pub(crate) body: Bytes,
}

/// The header by which vLLM takes the data-parallel rank.
pub(super) const RANK: &str = "x-data-parallel-rank";

impl Reached {
    /// Returns why the request failed.
    pub(super) fn error(self) -> ApiError {
        if let Self::Ending(Ending::Failed(error)) = self { error } else { ApiError::ClientClosed }
    }
}

impl Executor {
    /// Whether the gateway calls the engines itself: it may retry, abort, and knows what broke on a request.
    pub(super) fn calls(&self) -> bool {
        matches!(self, Self::Calls)
    }

    /// Whether a proxy sends the legs.
    pub(super) fn is_proxy(&self) -> bool {
        match self {
            #[cfg(feature = "ext-proc")]
            Self::Proxy(_) => true,
            Self::Calls | Self::Upgrade(..) => false,
        }
    }

    /// Returns how a prefill worker's leg is tied to decode; `None`: it cannot be.
    pub(super) fn traits(&self, candidate: &Candidate) -> Option<PrefillTraits> {
        let spec = candidate.worker.spec();
        let connector = connector_for(spec);
        let handoff = connector.handoff()?;
        if self.is_proxy() {
            // The sidecar gets both workers at once, and no call of the gateway's frees blocks.
            return Some(PrefillTraits {
                handoff: HandoffKind::Bootstrap,
                cancellable: true,
                abortable: true,
            });
        }
        Some(PrefillTraits {
            handoff,
            cancellable: candidate.worker.cancels_prefill(),
            abortable: connector.abortable(),
        })
    }
}
