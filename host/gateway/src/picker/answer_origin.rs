//! Tells the answers of engines from those that Envoy writes itself.

use crate::{orchestrate::proxied::AnswerOrigin, upstream::CallError};

/// Details of an answer that an engine wrote.
const VIA_UPSTREAM: &str = "via_upstream";
/// Beginning of the details of Envoy's answer when it has no connection to the engine, or lost it.
const RESET: &str = "upstream_reset_before_response_started{";

/// Returns who wrote an answer, from Envoy's `response.code_details`.
pub(super) fn origin_of(details: &str) -> AnswerOrigin {
    if details == VIA_UPSTREAM {
        return AnswerOrigin::Engine;
    }
    let Some(reason) = details.strip_prefix(RESET) else { return AnswerOrigin::Elsewhere };
    let reason = reason.trim_end_matches('}');
    let begins = |names: &[&str]| names.iter().any(|name| reason.starts_with(name));
    if begins(&["remote_connection_failure", "connection_timeout"]) {
        AnswerOrigin::Proxy(CallError::Connect(format!("Envoy: {reason}")))
    } else if begins(&["connection_termination", "remote_reset", "protocol_error"]) {
        AnswerOrigin::Proxy(CallError::Broken(format!("Envoy: {reason}")))
    } else {
        // Envoy itself ended it, for example because of its own limits.
        AnswerOrigin::Elsewhere
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r2_details_say_whether_the_engine_answered() {
        assert!(matches!(origin_of("via_upstream"), AnswerOrigin::Engine));
        let reset = |reason: &str| origin_of(&format!("upstream_reset_before_response_started{{{reason}}}"));
        let refused = reset("remote_connection_failure|delayed_connect_error:_Connection_refused");
        // R2.9
        assert!(
            matches!(refused, AnswerOrigin::Proxy(CallError::Connect(text)) if text.ends_with("refused"))
        );
        // R2.9
        assert!(matches!(reset("connection_termination"), AnswerOrigin::Proxy(CallError::Broken(_))));
        for own in ["overflow", "local_reset"].map(reset).into_iter().chain([origin_of("route_not_found")]) {
            // R2.9
            assert!(matches!(own, AnswerOrigin::Elsewhere));
        }
    }
}
