//! vLLM with the Mooncake connector: the gateway's transfer id and the prefill engine's own id tie the legs.
//! Both are known before prefill, so the legs run together.

use bytes::Bytes;
use json_splice::Edit;
use serde_json::json;

use pointsman_orchestration::HandoffKind;

use super::{Connector, LegContext, Pools, Target, vllm, vllm_nixl::Answer};
use crate::{openai::request::Request, upstream::LegHeaders};

#[derive(Debug)]
pub(super) struct VllmMooncake;

impl Connector for VllmMooncake {
    fn handoff(&self) -> Option<HandoffKind> {
        Some(HandoffKind::Bootstrap)
    }

    fn continues_messages(&self) -> bool {
        true
    }

    fn unsplittable(&self, request: &Request) -> Option<&'static str> {
        vllm::unsplittable(request)
    }

    fn refused_by(&self, request: &Request, pools: Pools<'_>) -> Option<&'static str> {
        vllm::refused_by(request, pools)
    }

    fn takes_token_ids(&self) -> bool {
        true
    }

    fn single(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        vllm::single(request, context)
    }

    fn prefill(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        let ask = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer_id(context),
        });
        let ask = ask.to_string();
        vllm::prefill(request).set("kv_transfer_params", vllm::with_prompt(&ask, context)).finish()
    }

    fn decode(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        with_transfer(vllm::answering(request, context), context)
    }

    fn decode_one_token(&self, request: &Request, context: &LegContext<'_>) -> Bytes {
        with_transfer(vllm::one_token(request), context)
    }

    fn headers(&self, context: &LegContext<'_>, target: Target<'_>) -> LegHeaders {
        vllm::headers(context, target)
    }

    /// The engine keeps the blocks of a prefill that reached its length cap. Without `min_tokens`, which
    /// Messages lack, the first token may be the end of the sequence. Other ends are found in the text of a
    /// prefill that reached its cap.
    fn ended_in_prefill(&self, body: &[u8]) -> bool {
        let answer: Option<Answer<'_>> = serde_json::from_slice(body).ok();
        let finish = answer.as_ref().and_then(Answer::finish).flatten();
        matches!(finish, Some("stop" | "end_turn"))
    }

    fn decode_knows_cached_tokens(&self) -> bool {
        false
    }
}

fn transfer_id(context: &LegContext<'_>) -> String {
    format!("xfer-{}", context.token)
}

fn with_transfer(edit: Edit<'_>, context: &LegContext<'_>) -> Bytes {
    let address = context.prefill.map(|prefill| prefill.spec.bootstrap_address());
    let parameters = json!({
        "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": transfer_id(context),
        "remote_engine_id": context.engine_id, "remote_bootstrap_addr": address,
    });
    let parameters = parameters.to_string();
    edit.set("kv_transfer_params", vllm::with_prompt(&parameters, context)).finish()
}
