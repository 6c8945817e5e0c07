//! Bodies and events of errors, in the shape of the API that the client speaks.

use http::StatusCode;
use serde_json::{Value, json};

use crate::openai::endpoint::Format;

/// An error as it appears in bodies and events.
#[derive(Clone, Copy, Debug)]
pub(super) struct ErrorFields<'a> {
    pub(super) status: StatusCode,
    pub(super) code: &'a str,
    /// The `type` of an OpenAI error, where it differs from the one of the status.
    pub(super) kind: Option<&'a str>,
    pub(super) message: &'a str,
    pub(super) request_id: &'a str,
}

impl ErrorFields<'_> {
    /// The body of an answer.
    pub(super) fn body(self, format: Format) -> Value {
        let Self { status, code, kind, message, request_id } = self;
        if format == Format::Anthropic {
            let error = json!({ "type": self.anthropic_type(), "message": message, "code": code });
            return json!({ "type": "error", "error": error, "request_id": request_id });
        }
        let of_status = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
        let kind = kind.unwrap_or(of_status);
        json!({ "error": {
            "message": message, "type": kind, "param": null, "code": code, "request_id": request_id,
        } })
    }

    /// One valid event that ends a stream. `number`: its place in a stream of the Responses API.
    pub(super) fn event(self, format: Format, number: u64) -> String {
        match format {
            Format::OpenAi | Format::Generate | Format::Transcript => {
                format!("data: {}\n\n", self.body(format))
            }
            Format::Anthropic => format!("event: error\ndata: {}\n\n", self.body(format)),
            Format::Responses => {
                // The event of the API, and the object by which clients of other APIs know an error.
                let mut event = json!({
                    "type": "error", "code": self.code, "message": self.message, "param": null,
                    "sequence_number": number,
                });
                if let (Some(event), Value::Object(error)) = (event.as_object_mut(), self.body(format)) {
                    event.extend(error);
                }
                format!("event: error\ndata: {event}\n\n")
            }
        }
    }

    /// Anthropic's name of a status.
    fn anthropic_type(self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            504 => "timeout_error",
            503 | 529 => "overloaded_error",
            status if status < 500 => "invalid_request_error",
            _ => "api_error",
        }
    }
}
