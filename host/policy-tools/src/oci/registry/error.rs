//! Errors of registries, and text of strangers in them.

use pointsman_cli::with_causes;

use super::super::error::OciError;

/// Longest text of a registry in a message, characters.
const MAX_TEXT_CHARS: usize = 300;

/// The problem, and what to do about it. The caller adds what was being done.
#[derive(Debug, thiserror::Error)]
#[error("{problem}; {advice}")]
pub(crate) struct RegistryError {
    problem: String,
    advice: String,
}

impl RegistryError {
    pub(super) fn new(problem: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { problem: problem.into(), advice: advice.into() }
    }

    /// Describes a request that failed without an answer, or in the middle of one.
    pub(super) fn transport(call: &str, error: reqwest::Error) -> Self {
        let connect = error.is_connect();
        let chain = clean(&with_causes(&error.without_url()));
        let advice = if ["UnknownIssuer", "BadSignature"].iter().any(|name| chain.contains(name)) {
            "give the registry's root certificate with --tls-ca"
        } else if chain.contains("certificate") {
            "the registry's certificate must be valid for this host"
        } else if chain.contains("InvalidContentType") || chain.contains("corrupt message") {
            "the registry does not speak TLS on this port: use --plain-http, or another port"
        } else if connect {
            "check the host and the port, and that the registry runs"
        } else {
            "try again, and look at the registry's log"
        };
        Self::new(format!("{call} failed: {chain}"), advice)
    }
}

impl From<OciError> for RegistryError {
    fn from(error: OciError) -> Self {
        Self::new(error.to_string(), "push the policy again, and check what stands before the registry")
    }
}

/// Returns a stranger's text as one printable line of limited length.
pub(super) fn clean(text: &str) -> String {
    let text = text.trim();
    let mut line: String = text.chars().take(MAX_TEXT_CHARS).collect::<String>().escape_debug().to_string();
    line = line.replace("\\\"", "\"").replace("\\'", "'");
    if text.chars().nth(MAX_TEXT_CHARS).is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_stranger_is_one_short_printable_line() {
        assert_eq!(clean(" \"a\"\n\u{1b}[31m'b' "), "\"a\"\\n\\u{1b}[31m'b'");
        assert_eq!(clean(&"x".repeat(1_000)).chars().count(), MAX_TEXT_CHARS + 1);
    }
}
