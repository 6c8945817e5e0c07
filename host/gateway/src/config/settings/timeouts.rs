//! `[timeouts]`, validated.

use std::time::Duration;

settings! {
    /// Time limits.
    TimeoutSettings {
        /// Limit of connecting to a worker.
        "timeouts.connect" connect: Duration,
        /// Limit of a whole request.
        "timeouts.request" request: Duration,
        /// How long a client may pause while it uploads a body.
        "timeouts.body_idle" body_idle: Duration,
        /// How long the head of a streamed answer, and then its first event, may take.
        "timeouts.head" head: Duration,
        /// How long the head of a prefill leg's answer may take.
        "timeouts.prefill_head" prefill_head: Duration,
        /// How long the head of an answer that is not streamed may take.
        "timeouts.whole_head" whole_head: Duration,
        /// How long an engine may pause within an answer.
        "timeouts.event_idle" event_idle: Duration,
        /// How long an engine may pause within an answer in any case.
        "timeouts.event_idle_max" event_idle_max: Duration,
        /// Silence of a stream after which its client gets a comment; 0: never.
        "timeouts.stream_comment" stream_comment: Duration,
        /// How long a call to abort a leg may take.
        "timeouts.abort" abort: Duration,
        /// How long a connection may stay without a whole request head.
        "timeouts.client_idle" client_idle: Duration,
        /// How long a client may accept no byte of an answer.
        "timeouts.client_write" client_write: Duration,
        /// How long both ends of a WebSocket connection may be silent.
        "timeouts.realtime_idle" realtime_idle: Duration,
        /// Time without a token after which a booking is released.
        "timeouts.booking" booking: Duration,
        /// How long requests in flight may run after the drain began.
        "timeouts.drain" drain: Duration,
    }
}
