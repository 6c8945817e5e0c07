//! What an operator can do about a server that was not connected to.

use std::path::Path;

use async_nats::ConnectErrorKind;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use pointsman_workers::unix_time;

use super::secret;
use crate::config::{Credentials, ReplicasConfig};

/// Returns the end of a message about `error`, whose text with causes is `problem`.
pub(super) async fn advice_on(
    config: &ReplicasConfig,
    error: &async_nats::ConnectError,
    problem: &str,
) -> String {
    if error.kind() == ConnectErrorKind::AuthorizationViolation {
        return format!("; {}", about_credentials(&config.credentials).await);
    }
    let advice = if problem.contains("CertificateRequired") {
        "; the server asks for a client certificate: set `replicas.tls.cert_file` and `key_file`"
    } else if problem.contains("UnknownIssuer") {
        "; `replicas.tls.ca_file` does not have the authority that signed the server's certificate"
    } else if problem.contains("corrupt message") {
        "; this server does not speak TLS"
    } else if problem.contains("fatal alert") {
        "; the server refuses the certificate of `replicas.tls.cert_file`"
    } else {
        ""
    };
    advice.to_owned()
}

async fn about_credentials(credentials: &Credentials) -> String {
    match credentials {
        Credentials::None => {
            "this server asks for credentials: set `replicas.username` and `password_file`, \
                              `token_file`, `nkey_file` or `credentials_file`"
                .to_owned()
        }
        Credentials::User(user, file) => {
            format!("check that the server knows the user `{user}` and the password in {}", file.display())
        }
        Credentials::Token(file) => format!("check the token in {}", file.display()),
        Credentials::NKey(file) => {
            let seed = secret("the NKey file", file).await.unwrap_or_default();
            let key = nkeys::KeyPair::from_seed(&seed).map(|pair| pair.public_key()).unwrap_or_default();
            format!("check that the server knows the NKey {key} of {}", file.display())
        }
        Credentials::Jwt(file) => about_jwt(file).await,
    }
}

async fn about_jwt(file: &Path) -> String {
    let text = secret("the credentials file", file).await.unwrap_or_default();
    let now = unix_time().as_secs();
    match expiry(&text).and_then(|expires| now.checked_sub(expires)) {
        Some(since) => format!("the JWT in {} expired {since} s ago: write a new one there", file.display()),
        None => format!(
            "check that the server knows the account of the JWT in {}, and that the user is not revoked",
            file.display()
        ),
    }
}

/// Returns when the first JWT in a text expires, in seconds since 1970. Its signature is not checked.
fn expiry(text: &str) -> Option<u64> {
    let jwt = text.lines().map(str::trim).find(|line| line.split('.').count() == 3)?;
    let claims = BASE64.decode(jwt.split('.').nth(1)?).ok()?;
    serde_json::from_slice::<serde_json::Value>(&claims).ok()?.get("exp")?.as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expiry_of_a_jwt_is_read() {
        let jwt =
            |claims: &str| format!("---BEGIN---\n{}.{}.{}\n---END---", "e30", BASE64.encode(claims), "AA");
        assert_eq!(expiry(&jwt(r#"{"exp":17}"#)), Some(17));
        assert_eq!(expiry(&jwt("{}")), None);
        assert_eq!(expiry("a.b.c"), None);
    }
}
