//! Roles of llm-d, the same for its endpoints file and for its pods.

/// Label that names the role.
pub(super) const ROLE_LABEL: &str = "llm-d.ai/role";

/// Role of a worker that only encodes images, sound and video.
pub(super) const ENCODE: &str = "encode";

/// Returns our name of a role of llm-d. An encoder in the same engine changes nothing for the legs.
///
/// # Errors
/// No worker has this role here.
pub(super) fn role_of(role: &str) -> Result<&'static str, String> {
    match role {
        "prefill" | "encode-prefill" => Ok("prefill"),
        "decode" => Ok("decode"),
        "prefill-decode" | "encode-prefill-decode" | "both" | "aggregated" => Ok("aggregated"),
        ENCODE => Err(format!("label {ROLE_LABEL} `{ENCODE}`: an encoder serves neither prefill nor decode")),
        _ => Err(format!("label {ROLE_LABEL} `{role}`: expected prefill, decode or prefill-decode")),
    }
}
