//! The endpoint picker for Envoy: `[ext_proc]`.
//!
//! Envoy carries a request and asks for its endpoint. `exchange` answers with what gateway mode would choose
//! and watches the answer pass; `endpoints` translates between workers and addresses; `own_answer` answers
//! what no engine answers. The protocol is the crate `pointsman-endpoint-picker`.

use std::sync::Arc;

use axum::{Router, http::Extensions};
use pointsman_endpoint_picker::{
    EXT_PROC_SERVICE, Health, Picker, RequestHead, ext_proc_service, health_service,
};

use crate::{
    budget::{Budget, Share},
    http::{DataThread, arrival::Arrival, peer::Sender},
    openai::body_bytes::reserve,
    orchestrate::availability::is_ready,
    state::SharedState,
};

mod answer_origin;
mod endpoints;
mod exchange;
mod own_answer;

use exchange::GatewayExchange;

/// Picks endpoints on one data thread.
struct GatewayPicker {
    thread: DataThread,
    /// Endpoints of the gateway itself.
    own: Router,
    streams: Arc<Budget>,
}

impl Picker for GatewayPicker {
    type Exchange = GatewayExchange;
    type Room = Share;

    fn reserve(&self, bytes: usize) -> Option<Share> {
        let mut share = self.thread.context().0.body_bytes.share();
        reserve(&mut share, bytes).is_ok().then_some(share)
    }

    fn begin(&self, head: RequestHead, extensions: &Extensions) -> GatewayExchange {
        // The proxy's certificate is not the client's.
        let sender = Sender::at(Arrival::of(extensions).sender.address);
        GatewayExchange::begin(&self.thread, self.own.clone(), &self.streams, head, sender)
    }
}

/// Tells gRPC health checks what `/readyz` says.
struct Readiness(SharedState);

impl Health for Readiness {
    fn is_ready(&self) -> bool {
        let state = self.0.get();
        is_ready(&state, &state.registry.snapshot())
    }
}

/// Returns the services of the picker's listener. `own` are the clients' endpoints; `streams` bounds the
/// requests of all data threads, and `max_body` a message.
pub(crate) fn routes(
    thread: DataThread,
    shared: SharedState,
    own: Router,
    streams: Arc<Budget>,
    max_body: usize,
) -> Router {
    let max_silent = streams.limit();
    let picker = ext_proc_service(GatewayPicker { thread, own, streams }, max_body, max_silent);
    Router::new()
        .route_service(&format!("/{EXT_PROC_SERVICE}/{{method}}"), picker)
        .route_service("/grpc.health.v1.Health/{method}", health_service(Readiness(shared)))
}
