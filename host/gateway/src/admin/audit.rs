//! The audit log: one event, with target `audit`, for every change of the gateway that was asked for, refused
//! ones included.

use std::{net::IpAddr, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::{MatchedPath, Request},
    http::{Method, Response},
};
use pointsman_workers::LogLimit;

use crate::telemetry::{labels::Name, metrics::Metrics};

/// Limit of the events about refused requests without a token.
static REFUSALS: LogLimit = LogLimit::new(Duration::from_millis(100));
/// Maximum length of the path and query in an event, characters.
const MAX_PATH: usize = 256;

/// Fields that a handler adds to its request's event, as an extension of the response.
#[derive(Clone, Debug)]
pub(super) struct Detail(pub(super) String);

/// Caller and request, while the request is handled.
#[derive(Debug)]
pub(super) struct Change {
    address: IpAddr,
    action: String,
    path: String,
}

impl Change {
    /// Returns what a request wants to change; `None` for a request that reads, or asks for the methods.
    pub(super) fn of(request: &Request, address: IpAddr) -> Option<Self> {
        if is_read(request.method()) || *request.method() == Method::OPTIONS {
            return None;
        }
        let route = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str);
        let uri = request.uri();
        let path = uri.path_and_query().map_or(uri.path(), |path| path.as_str());
        Some(Self {
            address,
            action: format!("{} {route}", method_name(request.method())),
            path: path.chars().take(MAX_PATH).collect(),
        })
    }

    /// Writes the event and counts it. `operator`: whose token the request carried.
    pub(super) fn record(self, metrics: &Metrics, operator: Option<&str>, response: &Response<Body>) {
        let Self { address, action, path } = self;
        let status = response.status();
        let who = operator.unwrap_or("anonymous");
        metrics.admin_change(Name(Arc::from(action.as_str())), status.as_u16());
        // Otherwise a client without a token could fill the log with refusals.
        let done = status.is_success();
        let outcome = if done { "done" } else { "refused" };
        let due = if done || operator.is_some() { Some(0) } else { REFUSALS.due() };
        let Some(suppressed) = due else { return };
        let detail = response.extensions().get::<Detail>().map_or("", |detail| detail.0.as_str());
        tracing::info!(
            target: "audit",
            who,
            %address,
            action,
            path,
            detail,
            outcome,
            status = status.as_u16(),
            suppressed,
            "change requested"
        );
    }
}

/// Returns whether a method changes nothing.
pub(super) fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

/// The method as a label: a client may invent others.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        _ => "OTHER",
    }
}
