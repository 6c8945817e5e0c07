//! Sections of the file with few rules of their own.

use std::time::Duration;

use pointsman_config_file::{Report, duration::secs, section};
use pointsman_orchestration::LegOrder;
use pointsman_routing::{BusyByLeg, RouterConfig};

use super::HashSalt;

/// Largest limit of the sequences of one request: each takes memory.
const MAX_SEQUENCES: u32 = 1_048_576;

/// Routing of requests.
#[section(rules)]
pub struct Routing {
    /// Refuse a request without a prefill worker with 503, never prefill locally.
    pub enforce_disagg: bool,
    /// Which leg is routed first: "prefill-first", or "decode-first": decode is chosen first and stays booked
    /// during prefill.
    pub order: LegOrder,
    /// Retries of a request, all legs together, before the first byte only.
    #[key(default = 2)]
    pub retries: u32,
    /// How often the rest of a stream is generated elsewhere after its engine failed, where that is safe; 0:
    /// never.
    #[key(default = 1, range = 0..=8)]
    pub continuations: u32,
    /// Prefill locally when remote prefill failed for good; ignored with `enforce_disagg`.
    pub local_fallback: bool,
    /// How long each session stays bound to its workers after its last request; 0: only sessions with a
    /// session_control are bound.
    pub session_affinity: Duration,
    /// HTTP status when every eligible worker is busy.
    #[key(default = 529, range = 400..=599, reason = "is not an HTTP error status")]
    pub busy_status: u16,
    /// How long a request body that broke two workers is refused; 0: never.
    #[key(default = secs(60))]
    pub quarantine: Duration,
    /// Tokens in a block of the prefix index; engines may have other sizes.
    #[key(default = 16, range = 1.., restart)]
    pub block_size: u32,
    /// Bytes of a token, for prompts without token ids.
    #[key(default = 4, range = 1..)]
    pub bytes_per_token: u32,
    /// Salt of the session, LoRA and tenant hashes that policies see.
    pub hash_salt: HashSalt,
    /// Thresholds of a leg (prefill, decode, aggregated): a worker beyond one of them gets no request of that
    /// leg while another worker may get it (F6).
    #[key(example = "decode")]
    pub busy: BusyByLeg,
    /// Parameters of the native cost (behaviour G); policies receive them as facts.
    pub cost: RouterConfig,
}

/// Which worker holds which prefix.
#[section(restart)]
pub struct Index {
    /// Resident memory in bytes, including unused capacity of tables.
    #[key(default = 256 * 1024 * 1024)]
    pub byte_budget: usize,
    /// How long a decision is assumed to stay cached.
    #[key(default = secs(120), positive)]
    pub ttl: Duration,
}

/// Limits for clients; limits.md lists these and all other bounds.
#[section]
pub struct Limits {
    /// Choices of a prompt: n and best_of.
    #[key(default = 128, range = 1..=MAX_SEQUENCES)]
    pub choices: u32,
    /// Prompts of a request.
    #[key(default = 2_048, range = 1..=MAX_SEQUENCES)]
    pub prompts: u32,
    /// Sequences of a request: all choices of all prompts.
    #[key(default = 4_096, range = 1..=MAX_SEQUENCES)]
    pub sequences: u32,
    /// Open connections of all clients; beyond it: 503.
    #[key(default = 10_000, range = 1.., reason = "would refuse every client")]
    pub connections: usize,
    /// Open connections of one address, of IPv6 of a /64 network, trusted proxies excepted; 0: no limit.
    pub connections_per_address: usize,
    /// Open requests over HTTP/2, in all connections together.
    #[key(
        default = 10_000,
        range = 1..,
        reason = "would refuse every request over HTTP/2 (server.http2.enabled = false offers none)"
    )]
    pub http2_requests: usize,
    /// Open WebSocket connections of clients (/v1/realtime).
    #[key(default = 256)]
    pub realtime_connections: usize,
    /// Bytes of the bodies of all requests in flight, of whole answers and of large events; at least 8/7 of
    /// server.max_body_bytes. The default is at most a quarter of the control group's memory limit, but
    /// one such body fits.
    #[key(default = 512 * 1024 * 1024)]
    pub body_bytes_in_flight: usize,
    /// Bytes of an engine's answer that is not streamed; beyond it: 502.
    #[key(default = 256 * 1024 * 1024, range = 1.., reason = "would refuse every answer")]
    pub answer_bytes: usize,
    /// Smallest rate of an upload in bytes per second, after timeouts.body_idle; 0: any rate.
    #[key(default = 1_024)]
    pub min_body_rate: u32,
}

/// Time limits.
#[section]
pub struct Timeouts {
    /// Time limit for connecting to a worker.
    #[key(default = secs(2), positive)]
    pub connect: Duration,
    /// Time limit of a request, from its first byte to the last byte of the answer.
    #[key(default = secs(3_600), positive)]
    pub request: Duration,
    /// How long a client may pause while it uploads a body.
    #[key(default = secs(30), positive)]
    pub body_idle: Duration,
    /// Wait for the head of a streamed answer, and then for its first event, while its worker makes no
    /// progress.
    #[key(default = secs(60), positive)]
    pub head: Duration,
    /// Wait for the head of a prefill leg's answer, which comes after the prefill, while its worker makes no
    /// progress.
    #[key(default = secs(120), positive)]
    pub prefill_head: Duration,
    /// Wait for the head of an answer that is not streamed, which comes after the last token, while its
    /// worker makes no progress; otherwise the limit is `request`.
    #[key(default = secs(300), positive)]
    pub whole_head: Duration,
    /// Longest pause of an engine between two events, or within a whole answer, while its worker makes no
    /// progress.
    #[key(default = secs(60), positive)]
    pub event_idle: Duration,
    /// Longest pause, and longest wait for a stream to begin or a prefill to end, even while its worker makes
    /// progress; the larger of the two limits counts.
    #[key(default = secs(360), positive)]
    pub event_idle_max: Duration,
    /// Silence of a stream after which its client gets a keep-alive; 0: never.
    #[key(default = secs(15))]
    pub stream_comment: Duration,
    /// Time limit of a call that aborts a leg.
    #[key(default = secs(5), positive)]
    pub abort: Duration,
    /// How long a connection may stay without a whole request head.
    #[key(default = secs(75), positive)]
    pub client_idle: Duration,
    /// How long a client may accept no byte of an answer.
    #[key(default = secs(30), positive)]
    pub client_write: Duration,
    /// Silence of both ends after which a WebSocket connection is closed.
    #[key(default = secs(300), positive)]
    pub realtime_idle: Duration,
    /// Time without a token after which a booking stops counting as load: of a client that does not read, of
    /// a request that waits without a call to a worker, or of one that Envoy carries.
    #[key(default = secs(300), positive)]
    pub booking: Duration,
    /// How long the gateway serves new requests after the signal that ends it, while health checks find it
    /// not ready. Then the drain begins.
    pub drain_delay: Duration,
    /// How long requests in flight may run after the drain began.
    #[key(default = secs(30))]
    pub drain: Duration,
}

/// Probes of workers.
#[section]
pub struct Probe {
    /// Interval of health checks.
    #[key(default = secs(2), positive)]
    pub interval: Duration,
    /// Time limit of each request of a probe.
    #[key(default = secs(1), positive)]
    pub timeout: Duration,
    /// Time limit of health checks of engines that answer them slowly (B8.6).
    #[key(default = secs(5), positive)]
    pub health_timeout: Duration,
    /// How often the engines' own load figures are read; 0: never.
    #[key(default = secs(5))]
    pub load_interval: Duration,
    /// Maximum number of probe requests per second, all workers together; with more workers both intervals
    /// grow.
    #[key(default = 1_000, range = 1.., reason = "would never check a worker")]
    pub max_per_second: u32,
    /// How long requests may wait for a worker that makes no progress until it is ejected; 0: never.
    #[key(default = secs(30))]
    pub stuck_after: Duration,
}

impl Routing {
    fn rules(&self, report: &mut Report<'_>) {
        check_busy(&self.busy, &mut report.at("busy"));
        for (key, problem) in self.cost.problems() {
            report.at("cost").add(key, problem);
        }
    }
}

/// Checks the values of thresholds.
pub(super) fn check_busy(busy: &BusyByLeg, report: &mut Report<'_>) {
    for (leg, thresholds) in busy {
        if let Err((key, problem)) = thresholds.check() {
            report.at(&leg.to_string()).add(key, problem);
        }
    }
}
