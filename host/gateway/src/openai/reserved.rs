//! Names of fields that belong to the gateway and to the engines: never taken from a client (A5).

/// Fields of the handoff and of the gateway. A partial set of `kv_transfer_params` kills a real decode
/// engine.
pub(crate) const RESERVED_FIELDS: [&str; 30] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_cache_report_mode",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disaggregated_params",
    "prompt_token_ids_b64",
    "injected_chat_template_kwargs",
    "rid",
    "request_id",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "encoder_urls",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "mm_data_mooncake",
    "mm_hashes",
    "mm_content_hashes",
    "kv_hints",
    "kv_router_hint",
    "http_worker_ipc",
    "lora_id",
    "external_trace_header",
    "received_time",
    "nvext",
    "_HEALTH_CHECK",
];

/// Objects whose members an engine, or a proxy before it, reads as if they were at the top level. vLLM copies
/// `vllm_xargs` into the arguments in which its scheduler looks for `kv_transfer_params`.
pub(crate) const CONTAINERS: [&str; 4] = ["vllm_xargs", "extra_body", "extra_args", "sampling_params"];

/// Returns whether a field of a form is reserved. A form reaches the engine as it is, so a container cannot
/// be cleaned.
#[must_use]
pub(crate) fn is_reserved(name: &str) -> bool {
    RESERVED_FIELDS.iter().chain(&CONTAINERS).any(|reserved| reserved.eq_ignore_ascii_case(name.trim()))
}
