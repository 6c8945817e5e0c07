//! Errors of engines in answers that say 200: what the status would have been.

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use serde_json::{Value, json};

use super::{CallError, RetryAdvice};

impl CallError {
    /// Converts the error of an answer with status 200. Its code is the status, where it has one;
    /// otherwise the code or the type may name it. Other text is quoted.
    #[must_use]
    pub(crate) fn of_error_body(body: &[u8]) -> Self {
        let json: Value = serde_json::from_slice(body).unwrap_or_default();
        // SGLang's `/generate` names an error as the reason why an output ended, in a batch one of them.
        let outputs = json.as_array().map_or(std::slice::from_ref(&json), Vec::as_slice);
        let mut ends = outputs.iter().filter_map(|output| output.pointer("/meta_info/finish_reason"));
        let abort = ends.find(|end| end["status_code"].is_number()).map(|end| {
            let [message, kind, code] = ["message", "err_type", "status_code"].map(|key| &end[key]);
            json!({ "error": { "message": message, "type": kind, "code": code } })
        });
        let status = status_of(abort.as_ref().unwrap_or(&json)).unwrap_or(StatusCode::BAD_GATEWAY);
        let content_type = Some(HeaderValue::from_static("application/json"));
        let body = abort.map_or_else(|| Bytes::copy_from_slice(body), |abort| abort.to_string().into());
        Self::Status { status, content_type, retry: RetryAdvice::default(), body, in_body: true }
    }
}

/// Returns the status that an error object names, by number or else by name.
fn status_of(json: &Value) -> Option<StatusCode> {
    let fields = ["/error/code", "/code", "/error/status", "/error/type", "/type"];
    let values = || fields.iter().filter_map(|field| json.pointer(field));
    let status = values().find_map(number).or_else(|| values().find_map(|value| named(value.as_str()?)))?;
    StatusCode::from_u16(status).ok()
}

/// Returns the status that a code is. Some servers write it as a text or with a fraction, and some write
/// another number there.
fn number(code: &Value) -> Option<u16> {
    let code = code.as_f64().or_else(|| code.as_str()?.parse().ok())?;
    (400..600).find(|status| f64::from(*status) == code)
}

/// Returns the status of an error's name, as OpenAI, Anthropic and engines write it: `overloaded_error`,
/// `ServiceUnavailableError`, `Service Unavailable`.
fn named(name: &str) -> Option<u16> {
    let mut name: String = name.chars().filter(char::is_ascii_alphabetic).take(40).collect();
    name.make_ascii_lowercase();
    Some(match name.strip_suffix("error").unwrap_or(&name) {
        "badrequest" | "invalidrequest" | "contextlengthexceeded" | "invalidprompt" => 400,
        "authentication" | "unauthorized" | "invalidapikey" => 401,
        "permission" | "permissiondenied" | "forbidden" => 403,
        "notfound" | "modelnotfound" => 404,
        "requesttoolarge" => 413,
        "unprocessableentity" => 422,
        "ratelimit" | "ratelimitexceeded" | "toomanyrequests" => 429,
        "notimplemented" => 501,
        "serviceunavailable" | "serveroverloaded" | "engineoverloaded" | "overloaded" | "slowdown" => 503,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(body: &str) -> u16 {
        let CallError::Status { status, .. } = CallError::of_error_body(body.as_bytes()) else { return 0 };
        status.as_u16()
    }

    #[test]
    fn the_status_is_a_number_before_a_name_and_a_code_before_a_type() {
        // I1.4
        assert_eq!(status(r#"{"error":{"type":"overloaded_error","code":500}}"#), 500);
        assert_eq!(status(r#"{"error":{"type":"invalid_request_error","code":"model_not_found"}}"#), 404);
        assert_eq!(status(r#"{"object":"error","type":"TooManyRequests","code":"x"}"#), 429);
        assert_eq!(status(r#"{"error":{"code":"429.0"},"code":400}"#), 429);
        assert_eq!(status(r#"{"error":{"status":"slow_down"}}"#), 503);
        for (none, body) in [
            ("a fraction", r#"{"error":{"code":503.5}}"#),
            ("another number", r#"{"error":{"code":1001}}"#),
            ("a word", r#"{"error":{"code":"nan","type":"server_error"}}"#),
            ("a text", "full"),
            ("nothing", ""),
        ] {
            assert_eq!(status(body), 502, "{none}");
        }
    }
}
