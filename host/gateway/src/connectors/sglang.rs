//! SGLang: a bootstrap handoff. Both legs get the same body and run together, tied by a room number at the
//! prefill worker's bootstrap address.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::json;

use super::{Abort, Connector, HandoffKind, LegContext, RequestToken, clean};
use crate::{openai::json::Edit, openai::request::Request};

/// The dialect.
#[derive(Debug)]
pub(super) struct Sglang;

impl Connector for Sglang {
    fn handoff(&self) -> Option<HandoffKind> {
        Some(HandoffKind::Bootstrap)
    }

    fn prefill(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let mut edit = pair(request, context);
        if let Some(target) = context.prefill.filter(|target| target.spec.dp_size > 1) {
            edit = edit.set("routed_dp_rank", target.rank.to_string());
        }
        edit.finish()
    }

    fn decode(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let mut edit = pair(request, context);
        if let Some(target) = context.decode.filter(|target| target.spec.dp_size > 1) {
            edit = edit.set("routed_dp_rank", target.rank.to_string());
        }
        if let Some(target) = context.prefill.filter(|target| target.spec.dp_size > 1) {
            edit = edit.set("disagg_prefill_dp_rank", target.rank.to_string());
        }
        edit.finish()
    }

    fn single(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let mut edit = clean(request).set("rid", json!(context.token.to_string()).to_string());
        if let Some(target) = context.decode.filter(|target| target.spec.dp_size > 1) {
            edit = edit.set("routed_dp_rank", target.rank.to_string());
        }
        edit.finish()
    }

    fn abort(&self, token: RequestToken) -> Option<Abort> {
        let body = json!({ "rid": token.to_string(), "abort_all": false }).to_string();
        Some(Abort { path: "/abort_request", body: body.into() })
    }
}

/// Fields that both legs share. A batch has three arrays of equal length, with one room number for each item.
fn pair<'a>(request: &'a Request, context: &LegContext<'_>) -> Edit<'a> {
    let prefill = context.prefill.map(|target| target.spec);
    let host = prefill.map_or("", |spec| spec.bootstrap.host.as_deref().unwrap_or_else(|| spec.host()));
    let port = prefill.and_then(|spec| spec.bootstrap.port);
    let (host, port, room) = if request.items() > 1 {
        let each = context.rooms.len();
        (json!(vec![host; each]), json!(vec![port; each]), json!(context.rooms))
    } else {
        (json!(host), json!(port), json!(context.rooms.first()))
    };
    clean(request)
        .set("bootstrap_host", Cow::Owned(host.to_string()))
        .set("bootstrap_port", Cow::Owned(port.to_string()))
        .set("bootstrap_room", Cow::Owned(room.to_string()))
        .set("rid", json!(context.token.to_string()).to_string())
}
