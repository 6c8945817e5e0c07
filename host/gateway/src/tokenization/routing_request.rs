//! Measures a request for routing: token counts and block hashes, never text.

use std::sync::Arc;

use pointsman_routing::{AgentProgram, RoutingRequest};
use pointsman_workers::{Pool, Snapshot, name_hash};
use prefix_index::{Prefix, Salt};

use crate::{
    config::HashSalt,
    openai::request::Request,
    tokenization::{
        RequestTokens,
        latency_targets::{TargetRules, Targets},
    },
};

/// How prompts are measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measure {
    /// Tokens in a block.
    pub block_size: u32,
    /// Bytes that count as one token when there are no tokens (H5).
    pub bytes_per_token: u32,
    /// Salt of the hashes that policies see.
    pub salt: HashSalt,
}

/// Facts about a request's tenant for routing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TenantLoad {
    /// Salted hash of its name.
    pub hash: u64,
    /// Requests of the tenant that are now in the gateway, this one included.
    pub active_requests: u32,
}

/// Returns what routing may know of a request. `tokens` are the ids from a tokenizer when the client sent
/// text, and `adapter` is the LoRA adapter that it runs with.
#[must_use]
pub(crate) fn routing_request(
    (request, adapter, workers): (&Request, Option<&str>, &Snapshot),
    measure: &Measure,
    targets: &TargetRules,
    tokens: Option<&RequestTokens>,
    tenant: Option<TenantLoad>,
) -> RoutingRequest {
    let hints = &request.hints;
    let salt = Salt { lora: adapter, cache: hints.cache_salt.as_deref() };
    let (size, objects) = (measure.block_size.max(1), &hints.block_objects);
    let all_ids = count(request.given_token_ids().map_or(0, <[u32]>::len));
    let (prompt_tokens, estimated, prefix) = match (request.routing_token_ids(), tokens) {
        // Other engines than vLLM cut nothing off, so that all ids count.
        (Some(ids), _) => (all_ids, false, Prefix::of_tokens(ids, size as usize, &salt, objects)),
        (None, Some(tokens)) => (count(tokens.count()), false, tokens.prefix(size as usize, &salt, objects)),
        (None, None) => {
            let bytes = measure.bytes_per_token.max(1);
            let prompt = request.prompt_bytes(bytes);
            let tokens = count(prompt.count()).div_ceil(bytes);
            (tokens, true, Prefix::of_byte_parts(prompt.parts(), (size * bytes) as usize, &salt))
        }
    };
    // Of a batch, each prompt has a context of its own.
    let known = if estimated || request.prompts > 1 { 0 } else { prompt_tokens };
    let output = if request.endpoint.generates() { request.max_tokens.unwrap_or(1).max(1) } else { 0 };
    let needed = known.saturating_add(output.min(1)).max(output);
    let mut contexts = workers.pools(&request.model).into_iter().map(Pool::shortest_context);
    let context_tokens = contexts.any(|context| context < needed).then_some(needed);
    let own = Targets {
        ttft_us: hints.ttft_target_ms.and_then(micros),
        itl_us: hints.itl_target_ms.and_then(micros),
    };
    let targets = own.or(targets.of_request(&request.model, tenant.map(|tenant| tenant.hash), workers));
    let hash = |text: &str| name_hash(text.as_bytes(), measure.salt.expose());
    // Two tenants may use the same names of sessions: neither may see or end what the other's has.
    let session_salt = measure.salt.expose() ^ tenant.map_or(0, |tenant| tenant.hash);
    let session_hash = |session: &str| name_hash(session.as_bytes(), session_salt);
    RoutingRequest {
        prompt_tokens,
        prompt_tokens_estimated: estimated,
        block_size: size,
        prefix,
        skips_cache: request.skips_cache(),
        n: request.n,
        max_tokens: request.max_tokens,
        context_tokens,
        expected_output_tokens: hints.expected_output_tokens,
        ttft_target_us: targets.ttft_us,
        itl_target_us: targets.itl_us,
        priority: hints.priority,
        priority_jump_s: hints.priority_jump,
        draw: rand::random(),
        session_hash: hints.session.as_deref().map(session_hash),
        program: hints.lineage.as_ref().map(|lineage| {
            let session = session_hash(&lineage.session);
            let parent = lineage.parent.as_deref().map(session_hash);
            Box::new(AgentProgram { session, parent, hash: session, ..AgentProgram::default() })
        }),
        lora: hints.lora.as_deref().map(Arc::from),
        lora_hash: adapter.map(hash),
        tenant_hash: tenant.map(|tenant| tenant.hash),
        tenant_active_requests: tenant.map_or(0, |tenant| tenant.active_requests),
        required_taints: hints.required_taints.clone(),
        preferred_taints: hints.preferred_taints.clone(),
        allowed_workers: hints.allowed_workers.clone(),
        engine: request.endpoint.engine(),
        config: hints.config,
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float cast saturates")]
fn micros(millis: f64) -> Option<u32> {
    (millis > 0.0).then_some(((millis * 1_000.0) as u32).max(1))
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;
    use prefix_index::block_hashes;

    use super::*;
    use crate::{openai::hints::HintTrust, openai::request::Endpoint};

    const MEASURE: Measure = Measure { block_size: 4, bytes_per_token: 4, salt: HashSalt::new(1) };

    fn of(body: &str) -> RoutingRequest {
        of_tenant(body, None)
    }

    fn of_tenant(body: &str, tenant: Option<u64>) -> RoutingRequest {
        of_endpoint(Endpoint::Completions, body, tenant)
    }

    fn of_endpoint(endpoint: Endpoint, body: &str, tenant: Option<u64>) -> RoutingRequest {
        let body = bytes::Bytes::copy_from_slice(body.as_bytes());
        let request = Request::parse(endpoint, &HeaderMap::new(), body, &HintTrust::Trusted.into()).unwrap();
        routing_request(
            (&request, request.hints.lora.as_deref(), &Snapshot::default()),
            &MEASURE,
            &TargetRules::default(),
            None,
            tenant.map(|hash| TenantLoad { hash, active_requests: 1 }),
        )
    }

    #[test]
    fn h5_without_tokens_a_prompt_is_measured_in_bytes_and_marked_as_an_estimate() {
        let prompt = "x".repeat(62);
        let routing_request = of(&format!(r#"{{"model":"m","prompt":"{prompt}"}}"#));
        // H5.2, H5.3
        assert_eq!(
            (
                routing_request.prompt_tokens,
                routing_request.prompt_tokens_estimated,
                routing_request.prefix.named_blocks()
            ),
            (16, true, 4)
        );
    }

    #[test]
    fn h7_token_ids_that_vllm_cuts_off_are_not_hashed() {
        let of = |fields: &str| of(&format!(r#"{{"model":"m","prompt":[1,2,3,4,5,6,7,8],{fields}}}"#));
        let hashes = |ids: &[u32]| block_hashes(ids, 4, &Salt::default());
        for (fields, ids) in [
            (r#""truncate_prompt_tokens":4"#, [5, 6, 7, 8].as_slice()),
            (r#""truncate_prompt_tokens":4,"truncation_side":"left""#, &[5, 6, 7, 8]),
            (r#""truncate_prompt_tokens":4,"truncation_side":"right""#, &[1, 2, 3, 4]),
            (r#""truncate_prompt_tokens":9,"truncation_side":null"#, &[1, 2, 3, 4, 5, 6, 7, 8]),
            (r#""truncate_prompt_tokens":null"#, &[1, 2, 3, 4, 5, 6, 7, 8]),
        ] {
            let request = of(fields);
            // H7.11
            assert_eq!((request.prompt_tokens, request.prompt_tokens_estimated), (8, false));
            assert_eq!(**request.prefix.hashes(), *hashes(ids), "{fields}");
        }
        // How many tokens an engine keeps by its own limit is not known.
        assert!(of(r#""truncate_prompt_tokens":-1"#).prompt_tokens_estimated);
    }

    #[test]
    fn h3_a_request_for_logprobs_of_its_prompt_uses_no_cached_block() {
        let skips = |endpoint, fields: &str| {
            of_endpoint(endpoint, &format!(r#"{{"model":"m","prompt":[1],"messages":[]{fields}}}"#), None)
                .skips_cache
        };
        for (fields, text) in [
            ("", false),
            (r#","prompt_logprobs":0"#, true),
            (r#","prompt_logprobs":null,"echo":true"#, false),
            (r#","echo":true,"logprobs":0"#, true),
            (r#","echo":false,"logprobs":1"#, false),
            (r#","echo":true,"logprobs":null"#, false),
        ] {
            let chat = fields.contains(r#""prompt_logprobs":0"#) || fields.contains(r#""echo":true"#);
            // H3.4
            assert_eq!(skips(Endpoint::Completions, fields), text, "{fields}");
            assert_eq!(skips(Endpoint::ChatCompletions, fields), chat, "{fields}");
        }
    }

    #[test]
    fn h1_sglang_s_extra_key_follows_the_salt() {
        let of = |fields: &str| of(&format!(r#"{{"model":"m","prompt":[1,2,3,4]{fields}}}"#)).prefix;
        let both = of(r#","cache_salt":"a","extra_key":"b""#);
        // H1.8
        assert_eq!(both.hashes(), of(r#","cache_salt":"ab""#).hashes());
        assert_eq!(of(r#","extra_key":"ab","cache_salt":null"#).hashes(), both.hashes());
        assert_eq!(of(r#","extra_key":["a"]"#).hashes(), of(r#","extra_key":"""#).hashes());
        let long = format!(r#"{{"model":"m","prompt":[1],"extra_key":"{}"}}"#, "a".repeat(1_025));
        let trust = &HintTrust::Trusted.into();
        Request::parse(Endpoint::Completions, &HeaderMap::new(), long.into(), trust).unwrap_err();
    }

    #[test]
    fn h5_no_prompt_has_more_blocks_with_hashes_than_tokens() {
        let image = "iVBORw0KGgoA".repeat(100_000);
        let message = format!(
            r#"[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]}}]"#
        );
        for (endpoint, tools, system) in [
            (Endpoint::ChatCompletions, "", ""),
            (Endpoint::ChatCompletions, r#""tools":[{"type":"function"}],"#, ""),
            (Endpoint::Messages, r#""tools":[{"name":"t"}],"#, r#""system":"be brief","#),
        ] {
            let body = format!(r#"{{"model":"m",{tools}{system}"max_tokens":1,"messages":{message}}}"#);
            let request = of_endpoint(endpoint, &body, None);
            let named = request.prefix.named_blocks() * MEASURE.block_size;
            // H5.8
            assert!((1_024..1_100).contains(&request.prompt_tokens), "{}", request.prompt_tokens);
            assert!(named <= request.prompt_tokens && named > 900, "{named}");
        }
    }

    #[test]
    fn h5_a_prompt_without_tools_has_the_hashes_of_its_field_alone() {
        let messages = format!(r#"[{{"role":"user","content":"{}"}}]"#, "hello ".repeat(90));
        let chat = |fields: &str| {
            let body = format!(r#"{{"model":"m",{fields}"max_tokens":1,"messages":{messages}}}"#);
            of_endpoint(Endpoint::Messages, &body, None).prefix
        };
        let of = |text: &str| Prefix::of_bytes(text.as_bytes(), 16, &Salt::default());
        // H5.6
        assert_eq!(chat(""), of(&messages));
        assert_eq!(chat(r#""system":"be brief","#), of(&format!("\"be brief\"{messages}")));
        assert_eq!(chat(r#""tools":[{}],"#), of(&format!("[{{}}]{messages}")));
    }

    #[test]
    fn a4_token_ids_are_used_as_they_are() {
        let routing_request = of(r#"{"model":"m","prompt":[1,2,3,4,5,6,7,8,9]}"#);
        assert_eq!(
            (
                routing_request.prompt_tokens,
                routing_request.prompt_tokens_estimated,
                routing_request.prefix.named_blocks()
            ),
            (9, false, 2)
        );
        // A4.2
        assert_eq!(
            routing_request.prefix.hashes().to_vec(),
            block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8], 4, &Salt::default())
        );
        let sent = of(r#"{"model":"m","prompt":"text","nvext":{"token_data":[1,2,3,4]}}"#);
        assert_eq!((sent.prompt_tokens, sent.prefix.named_blocks()), (4, 1));
    }

    #[test]
    fn invariant_6_names_reach_policies_as_salted_hashes_only() {
        let routing_request = of(r#"{"model":"m","prompt":"t","nvext":{"session_id":"alice","lora_name":"l",
                "agent_context":{"session_id":"sub","parent_session_id":"alice"}}}"#);
        assert_eq!(routing_request.session_hash, Some(name_hash(b"alice", 1)));
        let program = routing_request.program.as_deref().unwrap();
        // F11.7
        assert_eq!((program.session, program.parent), (name_hash(b"sub", 1), Some(name_hash(b"alice", 1))));
        assert_ne!(routing_request.session_hash, Some(name_hash(b"alice", 2)));
    }

    #[test]
    fn f8_f11_equal_names_of_sessions_of_two_tenants_are_two_sessions() {
        let sessions = |tenant| {
            let request = of_tenant(
                r#"{"model":"m","prompt":"t","nvext":{"session_id":"alice",
                    "agent_context":{"session_id":"sub","parent_session_id":"alice"}}}"#,
                tenant,
            );
            let program = request.program.unwrap();
            [request.session_hash.unwrap(), program.session, program.parent.unwrap(), program.hash]
        };
        let all: Vec<_> = [None, Some(7), Some(8)].into_iter().map(sessions).collect();
        assert_eq!(all, [None, Some(7), Some(8)].map(sessions), "a session of a tenant is found again");
        // F8.5, F11.8
        let each_differs = |a: &[u64; 4], b: &[u64; 4]| a.iter().zip(b).all(|(a, b)| a != b);
        assert!(
            each_differs(&all[0], &all[1])
                && each_differs(&all[1], &all[2])
                && each_differs(&all[0], &all[2])
        );
        assert_eq!(all[1][0], all[1][2], "the parent is the session of its own requests");
    }
}
