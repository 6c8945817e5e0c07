//! Answers of the admin listener, and the ways in which a call fails.

use std::{process::ExitCode, time::Duration};

use serde::{Deserialize, de::DeserializeOwned};

use crate::{print, text::clean};

/// Characters of a text of the gateway that an error quotes.
const MAX_QUOTED: usize = 300;

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub(crate) url: String,
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// Why the gateway did not carry out a command.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// No connection, or it broke.
    #[error(
        "calling {url}: {problem}; check that the gateway runs and that --gateway is the URL of its admin listener"
    )]
    Unreachable {
        /// The called URL.
        url: String,
        /// Text about the connection.
        problem: String,
    },
    /// The listener showed the certificate of an authority, which must not be that of a server.
    #[error(
        "calling {url}: the gateway's certificate is that of an authority: make it with `openssl req -x509 -addext \
         basicConstraints=critical,CA:FALSE`, or use one that the authority signed"
    )]
    OfAuthority {
        /// The called URL.
        url: String,
    },
    /// No whole answer in time.
    #[error("calling {url}: no whole answer within {} s; check the gateway's log and load", .limit.as_secs())]
    Late {
        /// The called URL.
        url: String,
        /// Time that the command waited.
        limit: Duration,
    },
    /// The answer is larger than any sensible one.
    #[error("calling {url}: the answer is larger than {limit} bytes; ask for less")]
    TooLarge {
        /// The called URL.
        url: String,
        /// The limit.
        limit: usize,
    },
    /// An answer of something else than a gateway.
    #[error(
        "calling {url}: the answer (status {status}, {bytes} bytes) is not one of a gateway's admin listener: \
         {problem}; check --gateway, and that both have the same release"
    )]
    Garbage {
        /// The called URL.
        url: String,
        /// HTTP status.
        status: u16,
        /// Size of the answer.
        bytes: usize,
        /// The problem with it.
        problem: String,
    },
    /// The gateway has no such worker, or several.
    #[error("{0}")]
    NoWorker(String),
    /// The gateway refused.
    #[error("the gateway refused ({status} {code}): {message}{}", advice(*status, code))]
    Refused {
        /// HTTP status.
        status: u16,
        /// Stable code of the error.
        code: String,
        /// The gateway's own words.
        message: String,
    },
}

/// The body of a refusal.
#[derive(Deserialize)]
struct ErrorBody {
    error: ErrorText,
}

#[derive(Deserialize)]
struct ErrorText {
    code: String,
    message: String,
}

fn advice(status: u16, code: &str) -> &'static str {
    match status {
        404 if code == "unknown_url" => {
            "; --gateway has to name the admin listener: this one is for clients, or of another release"
        }
        401 => {
            "; give it with --token-file FILE or POINTSMAN_ADMIN_TOKEN, or a certificate with --tls-cert and --tls-key"
        }
        _ => "",
    }
}

impl Answer {
    /// Returns whether the gateway carried the request out.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Returns the body as text, made safe for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        text.lines().map(|line| format!("{}\n", clean(line))).collect()
    }

    /// Parses the body of a success.
    ///
    /// # Errors
    /// The gateway refused, or this is not an answer of a gateway.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, GatewayError> {
        if !self.succeeded() {
            return Err(self.refusal());
        }
        serde_json::from_slice(&self.body).map_err(|error| self.garbage(&error.to_string()))
    }

    /// Prints the body unchanged when it is a success and JSON. A terminal gets control characters as JSON
    /// escapes.
    pub(crate) fn print_json(&self) -> anyhow::Result<ExitCode> {
        self.read::<serde::de::IgnoredAny>()?;
        let text = String::from_utf8_lossy(&self.body);
        let terminal = std::io::IsTerminal::is_terminal(&std::io::stdout());
        print(&format!("{}\n", if terminal { escaped(&text) } else { text.into_owned() }))?;
        Ok(ExitCode::SUCCESS)
    }

    pub(crate) fn refusal(&self) -> GatewayError {
        let quoted = |text: &str| clean(&text.chars().take(MAX_QUOTED).collect::<String>()).into_owned();
        match serde_json::from_slice::<ErrorBody>(&self.body) {
            Ok(ErrorBody { error }) => GatewayError::Refused {
                status: self.status,
                code: quoted(&error.code),
                message: quoted(&error.message),
            },
            Err(_) => self.garbage("it has no error in the gateway's shape"),
        }
    }

    fn garbage(&self, problem: &str) -> GatewayError {
        let problem = clean(&problem.chars().take(MAX_QUOTED).collect::<String>()).into_owned();
        GatewayError::Garbage { url: self.url.clone(), status: self.status, bytes: self.body.len(), problem }
    }
}

/// JSON with the control characters that JSON allows in strings as escapes.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        let code = u32::from(character);
        if (0x7f..0xa0).contains(&code) {
            text.push_str(&format!("\\u{code:04x}"));
        } else {
            text.push(character);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Answer {
        Answer { url: "http://g/x".to_owned(), status, body: body.into() }
    }

    #[test]
    fn a_refusal_is_told_with_its_code_and_advice_and_without_control_characters() {
        let body = r#"{"error":{"code":"unauthorized","message":"needs \u001b[2J a token"}}"#;
        let error = answer(401, body).read::<serde_json::Value>().unwrap_err().to_string();
        let expected = "the gateway refused (401 unauthorized): needs \u{fffd}[2J a token; give it with \
                        --token-file FILE or POINTSMAN_ADMIN_TOKEN, or a certificate with --tls-cert and --tls-key";
        assert_eq!(error, expected);
        let body = r#"{"error":{"code":"unknown_url","message":"GET /status: this path does not exist"}}"#;
        let error = answer(404, body).read::<serde_json::Value>().unwrap_err().to_string();
        assert!(
            error.contains("exist; --gateway has to name the admin listener: this one is for clients"),
            "{error}"
        );
    }

    #[test]
    fn an_answer_of_something_else_is_named_with_status_and_size() {
        for (status, body) in [(200, "<html>"), (502, "<html>"), (200, ""), (404, "{}")] {
            let error = answer(status, body).read::<serde_json::Value>().unwrap_err().to_string();
            let expected =
                format!("calling http://g/x: the answer (status {status}, {} bytes) is not", body.len());
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    #[test]
    fn a_terminal_gets_c1_control_characters_as_escapes() {
        assert_eq!(escaped("{\"a\":\"\u{9b}2J é\u{7f}\"}"), "{\"a\":\"\\u009b2J é\\u007f\"}");
    }
}
