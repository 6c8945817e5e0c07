//! Vocabulary of the leg state machine: shapes, events and actions.

use pointsman_workers::Leg;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Which leg of a disaggregated request is routed first (D5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LegOrder {
    /// Prefill. Decode is routed when prefill's worker, or its answer, is known.
    #[default]
    PrefillFirst,
    /// Decode. Its booking lasts while prefill runs.
    DecodeFirst,
}

/// Order of the legs, retries and fallback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Leg that is routed first.
    pub order: LegOrder,
    /// Number of further attempts, all legs together.
    pub retries: u32,
    /// Whether a request whose prefill failed for good, or that no prefill worker takes, may run on a worker
    /// that prefills locally (B6).
    pub local_fallback: bool,
    /// How often the rest of a stream may be generated elsewhere after its engine failed.
    pub continuations: u32,
}

/// How a remote request hands its prefill over to decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandoffKind {
    /// The handoff is known before prefill; the legs run together.
    Bootstrap,
    /// The prefill answer returns the handoff.
    Completed,
    /// Both workers are known before prefill, which pushes to decode; decode is sent when prefill ended.
    Addressed,
}

/// Number of workers that run a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One leg on one worker.
    Aggregated,
    /// Prefill and decode on two workers.
    Remote,
}

/// Properties of the prefill worker that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTraits {
    /// Kind of handoff.
    pub handoff: HandoffKind,
    /// Whether a running prefill may be cancelled (E4).
    pub cancellable: bool,
    /// Whether its engine can abort by request id.
    pub abortable: bool,
}

/// How a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Whether another worker may succeed.
    pub retryable: bool,
    /// Whether the engine refused the request as the client's error (4xx), and not because it is overloaded.
    pub refused: bool,
    /// Whether the engine may have begun to work on the request. It has not when no byte reached it, or when
    /// it refused the request.
    pub began: bool,
    /// Whether the engine broke while it handled the request. The request may be the reason.
    pub broke: bool,
    /// Whether the rest of the answer that was relayed so far may be generated elsewhere.
    pub continuable: bool,
}

/// An event that the driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A place for the decode leg is reserved.
    Reserved,
    /// The aggregated or the decode leg has a worker.
    Routed,
    /// The prefill leg has a worker.
    PrefillRouted(PrefillTraits),
    /// No worker can take a leg on the client's terms.
    Unroutable,
    /// The worker that a local plan names cannot take the aggregated leg.
    PlanRefused,
    /// A committed handoff cannot be consumed.
    HandoffLost(Lost),
    /// No prefill worker can take the prefill leg: each failed, is down or refuses more work.
    NoPrefill,
    /// The prefill answer carries a complete handoff.
    PrefillHandoff,
    /// The prefill leg of a bootstrap pair succeeded, or the answer of another one says that there is nothing
    /// to hand over.
    PrefillEnded,
    /// Generation ended within prefill, which handed nothing over; its answer is the whole answer (C8).
    PrefillWasAll,
    /// The decode or aggregated leg answers with a success status.
    Head,
    /// The first event with a token, or a whole body, arrived: a handoff is consumed.
    FirstToken,
    /// The first event with a finish reason arrived, and the client has not seen it.
    FinishSeen,
    /// The decode or aggregated leg's answer is complete.
    Ended,
    /// The worker that answers drains, and others were found for the rest of its answer.
    Move,
    /// The stream pauses for a request of a higher priority.
    Pause,
    /// A leg failed, or the answer of prefill has no usable handoff.
    Failed(Leg, Failed),
    /// The client disconnected.
    ClientGone,
    /// The request's deadline passed. The second time: the time that engines get after it passed, too.
    Deadline,
}

/// Why a committed handoff stays unconsumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// No live decode worker can take it from its prefill worker.
    NoDecodeWorker,
    /// The prefill engine died, and the blocks with it.
    PrefillDied,
}

impl Lost {
    /// Every reason.
    pub const ALL: [Self; 2] = [Self::NoDecodeWorker, Self::PrefillDied];

    /// Stable metric label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoDecodeWorker => "lost_no_decode_worker",
            Self::PrefillDied => "lost_prefill_died",
        }
    }
}

/// An action that the driver performs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Check that decode can be routed, and reserve its place: prefill is sent afterwards.
    Reserve,
    /// Choose and book a worker for the leg.
    Route(Leg),
    /// Send the leg's request.
    Send(Leg),
    /// Send decode for one output token, only to consume the handoff; the answer is discarded.
    SendToConsume,
    /// Release the leg's booking, and close its connection once an abort that was sent before is answered.
    Cancel(Leg),
    /// Record that the request continues on one worker that prefills locally (B6).
    FallBackToLocal,
    /// Ask the leg's engine to abort by request id, and keep reading until the answer ends.
    Abort(Leg),
    /// Give the decode or aggregated leg's answer to the client from now on.
    Relay,
    /// From now on, legs generate the rest of the answer, and their events join the client's stream.
    Continue,
    /// Hold back all further bytes of the answer.
    Hold,
    /// Send the bytes that were held back.
    Release,
    /// Answer with the prefill leg's result.
    AnswerPrefill,
    /// Answer (or end the stream) with the failure of this leg.
    Fail(Leg),
    /// Answer (or end the stream) with "deadline".
    FailDeadline,
    /// Count a committed handoff that stays unconsumed.
    Lose(Lost),
    /// Release everything that is left.
    Finish,
}

/// Actions of one event, in order. Hardly any event has more than four.
pub type Actions = SmallVec<[Action; 4]>;
