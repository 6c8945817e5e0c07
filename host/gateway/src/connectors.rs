//! Engine dialects: one file each, behind one trait. Pure functions over bodies and headers; no I/O.

use std::fmt;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use json_splice::Edit;
use pointsman_orchestration::HandoffKind;
use pointsman_workers::{Candidate, DpRank, Engine, KvTransport, WorkerSpec};
use rand::RngExt;

use crate::{
    hex::Hex,
    openai::{
        hide::{Fields, finders},
        request::{Endpoint, Request, names_model},
        request_id::REQUEST_ID,
        sse::FAILED_ENDS,
    },
    upstream::LegHeaders,
};

mod openai;
mod python_json;
mod reserved;
mod sglang;
mod trtllm;
mod usage;
mod vllm;
mod vllm_mooncake;
mod vllm_nixl;
mod vllm_p2p_nccl;

use reserved::clean;

/// Names the model where the client did not: of the engines, vLLM and SGLang do without.
fn with_model<'a>(edit: Edit<'a>, request: &Request) -> Edit<'a> {
    if names_model(&request.body) {
        return edit;
    }
    edit.set("model", serde_json::Value::from(request.model.as_str()).to_string())
}

/// Asks for the usage of a stream.
fn with_usage<'a>(edit: Edit<'a>, context: &LegContext<'_>) -> Edit<'a> {
    if context.usage { edit.set("stream_options", r#"{"include_usage":true}"#) } else { edit }
}

/// The request id that engines see: 32 random hex digits, new for every attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestToken([u8; 16]);

/// A worker and rank that a leg was routed to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    /// The worker.
    pub spec: &'a WorkerSpec,
    /// The rank.
    pub rank: DpRank,
}

/// Everything a leg's body is made from, besides the request (C1, D1).
#[derive(Clone, Copy, Debug)]
pub(crate) struct LegContext<'a> {
    /// The attempt's id.
    pub token: RequestToken,
    /// The endpoint, if the call is a leg of a request.
    pub endpoint: Option<Endpoint>,
    /// The prefill leg's target, when there is one.
    pub prefill: Option<Target<'a>>,
    /// The target of the decode or single leg, when it is known.
    pub decode: Option<Target<'a>>,
    /// The prefill engine's own id (vLLM Mooncake).
    pub engine_id: Option<&'a str>,
    /// Bootstrap rooms, one an item.
    pub rooms: &'a [u64],
    /// The engine's own parameters from the prefill answer, opaque JSON.
    pub handoff: Option<&'a str>,
    /// Token ids that the gateway wants, or has.
    pub ids: TokenIds<'a>,
    /// Whether a stream is to end with its usage, for which the client did not ask.
    pub usage: bool,
    /// The model that the request's model is an adapter of.
    pub parent: Option<&'a str>,
}

/// Token ids of a leg whose stream may be continued, or is the rest of one (I14).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TokenIds<'a> {
    /// Whether the answer is to list the ids of its tokens.
    pub wanted: bool,
    /// The ids of a chat's prompt, a JSON list, in the place of its messages.
    pub prompt: Option<&'a str>,
}

impl<'a> LegContext<'a> {
    /// The context of a call without a handoff. `target`: `None` for a part of a pair that is tied together
    /// elsewhere.
    pub(crate) fn alone(token: RequestToken, target: Option<Target<'a>>) -> Self {
        let ids = TokenIds::default();
        let (engine_id, rooms, handoff, parent) = (None, &[][..], None, None);
        let (endpoint, usage) = (None, false);
        Self { token, endpoint, prefill: None, decode: target, engine_id, rooms, handoff, ids, usage, parent }
    }
}

/// What an engine reports of the prompt that it computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptUsage {
    /// Tokens of the prompt; 0 if the engine does not report them.
    pub tokens: u32,
    /// Those of them that were cached, if the engine reports them.
    pub cached_tokens: Option<u32>,
    /// Those that the engine wrote into its cache, if it reports them.
    pub created_tokens: Option<u32>,
}

/// Content of the prefill answer of a completed handoff.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PrefillAnswer {
    /// Parameters for the decode leg, opaque.
    Handoff {
        /// Raw JSON.
        parameters: String,
        prompt: PromptUsage,
    },
    /// The engine pinned no block of the prompt: decode computes it itself (C7b).
    Nothing,
    /// Generation ended within prefill; this is the whole answer (C8).
    WasAll,
    /// The answer cannot be read.
    MissingData(String),
    /// The answer has no parameters although it ended on its length cap.
    MissingParameters,
    /// The parameters lack this field. Forwarding them would crash the decode engine (C7a).
    Incomplete(&'static str),
}

/// Returns the prefill answer of an engine that gave the request up, if it says so with this finish reason.
fn given_up(finish: &str) -> Option<PrefillAnswer> {
    let problem = || format!("the engine ended it with `{finish}`");
    FAILED_ENDS.contains(&finish).then(|| PrefillAnswer::MissingData(problem()))
}

/// Returns that a prefill answer cannot be read, and where. What stands there is output or a handoff.
fn unread(error: &serde_json::Error) -> PrefillAnswer {
    let what = if error.is_data() { "an unexpected value" } else { "invalid JSON" };
    PrefillAnswer::MissingData(format!("{what} at line {} column {}", error.line(), error.column()))
}

/// The calls that abort a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Abort {
    /// Path at the worker.
    pub path: &'static str,
    /// JSON bodies, one for each id that the engine gave to an item of the request.
    pub bodies: Vec<Bytes>,
}

/// Content of an answer's id besides the attempt's id, which no client gets (A5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdDetail {
    /// The addresses of both workers, in front of it.
    Addresses,
    /// The number of an item in a batch, after it: `_0`.
    ItemNumber,
}

/// The prefill and the decode workers of a model.
pub(crate) type Pools<'a> = [&'a [Candidate]; 2];

/// One dialect.
pub(crate) trait Connector: Send + Sync + fmt::Debug {
    /// Kind of handoff between its legs; `None` if it serves aggregated requests only.
    fn handoff(&self) -> Option<HandoffKind>;

    /// Why this request cannot be split over two workers; `None` when it can.
    fn unsplittable(&self, _request: &Request) -> Option<&'static str> {
        None
    }

    /// Why one of these workers cannot take its leg of this request; `None` when all can.
    fn refused_by(&self, _request: &Request, _pools: Pools<'_>) -> Option<&'static str> {
        None
    }

    /// Returns whether the engine's handler of `/v1/responses` takes a handoff.
    fn hands_over_responses(&self) -> bool {
        false
    }

    /// Returns whether a decode worker stores the response of a pair for later requests, as engines do that
    /// run a request alone.
    fn decode_stores_responses(&self) -> bool {
        false
    }

    /// The prefill leg's body.
    fn prefill(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        self.single(request, context)
    }

    /// The decode leg's body.
    fn decode(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        self.single(request, context)
    }

    /// A decode body that consumes the handoff and asks for one token (E1).
    fn decode_one_token(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        self.decode(request, context)
    }

    /// The body of a request that runs on one worker.
    fn single(&self, request: &Request, _context: &LegContext<'_>) -> Bytes {
        clean(request).finish()
    }

    /// Headers of a leg to `target`.
    fn headers(&self, _context: &LegContext<'_>, _target: Target<'_>) -> LegHeaders {
        LegHeaders::new()
    }

    /// Reads the prefill answer of a completed handoff.
    fn read_prefill(&self, _body: &[u8]) -> PrefillAnswer {
        PrefillAnswer::MissingParameters
    }

    /// Returns whether generation ended with this prefill answer of a bootstrap handoff, so that the engine
    /// kept no blocks for decode.
    fn ended_in_prefill(&self, _body: &[u8]) -> bool {
        false
    }

    /// Returns whether the engine may keep blocks for decode after its prefill answer has ended. The answer
    /// of a pair that aborts by id (SGLang) ends with the transfer.
    fn keeps_blocks(&self) -> bool {
        self.handoff() != Some(HandoffKind::Bootstrap) || !self.abortable()
    }

    /// Returns whether the engine can continue the last message of a chat (`continue_final_message`).
    fn continues_messages(&self) -> bool {
        false
    }

    /// Returns whether the engine lists the ids of its tokens when asked, and begins from such ids.
    fn takes_token_ids(&self) -> bool {
        false
    }

    /// Returns whether the engine can abort a leg by its id.
    fn abortable(&self) -> bool {
        false
    }

    /// Returns how to abort a leg of this request by its id; `None` if the engine cannot.
    fn abort(&self, _request: &Request, _token: RequestToken) -> Option<Abort> {
        None
    }

    /// Fields of an answer that belong to the handoff: a client gets null in their place (A5).
    fn private_answer_fields(&self) -> &'static Fields {
        static FIELDS: Fields = Fields::new(|| finders(&["kv_transfer_params", "ec_transfer_params"]));
        &FIELDS
    }

    /// Part of the answer's id that must not reach a client (A5).
    fn id_detail(&self, _request: &Request) -> Option<IdDetail> {
        None
    }

    /// Returns whether the decode leg's own `cached_tokens` counts the prompt's cached tokens.
    fn decode_knows_cached_tokens(&self) -> bool {
        true
    }
}

/// The connector of a worker.
#[must_use]
pub(crate) fn connector_for(spec: &WorkerSpec) -> &'static dyn Connector {
    match (spec.engine, spec.transport) {
        (Engine::Vllm, KvTransport::Nixl) => &vllm_nixl::VllmNixl,
        (Engine::Vllm, KvTransport::Mooncake) => &vllm_mooncake::VllmMooncake,
        (Engine::Vllm, KvTransport::P2pNccl) => &vllm_p2p_nccl::VllmP2pNccl,
        (Engine::Sglang, _) => &sglang::Sglang,
        (Engine::Trtllm, _) => &trtllm::Trtllm,
        (Engine::Openai, _) => &openai::Openai,
    }
}

/// All headers of a leg: the dialect's, and the worker's key, else the client's `authorization`, when engines
/// get it.
#[must_use]
pub(crate) fn leg_headers(
    context: &LegContext<'_>,
    target: Target<'_>,
    of_client: Option<&HeaderValue>,
) -> LegHeaders {
    let mut headers = connector_for(target.spec).headers(context, target);
    let key =
        target.spec.api_key.as_ref().and_then(|key| HeaderValue::from_str(&format!("Bearer {key}")).ok());
    if let Some(mut value) = key.or_else(|| of_client.cloned()) {
        value.set_sensitive(true);
        headers.push((header::AUTHORIZATION, value));
    }
    headers
}

/// Uniform room numbers for `items` items [C6]: within `2^42..=2^63-1`, and with a data-parallel size `s` and
/// rank `r` congruent to `r`.
///
/// SGLang reads room 0 as "no metadata has arrived" (`disaggregation/decode.py`, `utils.py`), so its decode
/// waits for ever. TensorRT-LLM keeps ids below 2^42 for requests of its own (`MIN_GLOBAL_ID`).
#[must_use]
pub(crate) fn rooms(items: u32, dp_size: u32, rank: DpRank) -> Vec<u64> {
    let mut rng = rand::rng();
    (0..items.max(1)).map(|_| room(rng.random(), dp_size, rank)).collect()
}

/// `room = q * s + r` with `q` uniform between the quotients of the first and the last room of the rank.
fn room(x: u64, dp_size: u32, rank: DpRank) -> u64 {
    const MIN: u64 = 1 << 42;
    const MAX: u64 = i64::MAX as u64;
    let (size, rank) = (u64::from(dp_size.max(1)), u64::from(rank.0));
    let first = MIN.saturating_sub(rank).div_ceil(size);
    let last = MAX.saturating_sub(rank) / size;
    (first + x % (last - first + 1)) * size + rank
}

impl RequestToken {
    /// Returns a new random token.
    #[must_use]
    pub(crate) fn fresh() -> Self {
        // An array of bytes would take a word of randomness for each.
        Self(rand::random::<u128>().to_be_bytes())
    }

    /// Returns the digits by which engines know it.
    pub(crate) fn digits(self) -> Hex<32> {
        Hex::of_u128(u128::from_be_bytes(self.0))
    }
}

impl fmt::Display for RequestToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.digits().as_str())
    }
}

impl fmt::Debug for RequestToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The header that carries the id engines see.
fn token_header(id: impl AsRef<[u8]>) -> (HeaderName, HeaderValue) {
    (REQUEST_ID, HeaderValue::from_bytes(id.as_ref()).unwrap_or(HeaderValue::from_static("")))
}

#[cfg(test)]
mod tests;
