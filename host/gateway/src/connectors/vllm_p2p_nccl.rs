//! vLLM with the P2pNccl connector, which vLLM 0.32 no longer has: the request id of both legs names both
//! workers, and that is all there is. Prefill pushes its blocks to decode, which is sent when prefill ended.

use bytes::Bytes;

use pointsman_orchestration::HandoffKind;

use super::{Connector, IdDetail, LegContext, Pools, Target, clean, token_header, vllm};
use crate::{openai::request::Request, upstream::LegHeaders};

#[derive(Debug)]
pub(super) struct VllmP2pNccl;

impl Connector for VllmP2pNccl {
    fn handoff(&self) -> Option<HandoffKind> {
        Some(HandoffKind::Addressed)
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

    fn prefill(&self, request: &Request, _: &LegContext<'_>) -> Bytes {
        vllm::prefill(request).finish()
    }

    fn decode(&self, request: &Request, _: &LegContext<'_>) -> Bytes {
        clean(request).finish()
    }

    fn decode_one_token(&self, request: &Request, _: &LegContext<'_>) -> Bytes {
        vllm::one_token(request).finish()
    }

    fn headers(&self, context: &LegContext<'_>, target: Target<'_>) -> LegHeaders {
        let address = |target: Option<Target<'_>>| {
            target.and_then(|target| target.spec.kv_addr.clone()).unwrap_or_default()
        };
        let id = format!(
            "___prefill_addr_{}___decode_addr_{}_{}",
            address(context.prefill),
            address(context.decode),
            context.token
        );
        let mut headers = vec![token_header(id)];
        headers.extend(vllm::rank_header(target));
        headers
    }

    fn decode_knows_cached_tokens(&self) -> bool {
        false
    }

    /// Its response id is the request id, addresses and all.
    fn id_detail(&self, _: &Request) -> Option<IdDetail> {
        Some(IdDetail::Addresses)
    }
}
