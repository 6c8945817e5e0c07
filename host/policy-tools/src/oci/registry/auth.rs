//! Authentication as the registry asks for it: basic, or with a token of its token server.

use http_auth::{ChallengeRef, parser::ChallengeParser};
use reqwest::{
    Method, RequestBuilder, StatusCode, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, WWW_AUTHENTICATE},
};
use serde::Deserialize;

use super::{
    body::Reader,
    connect::{Connection, shown},
    credentials::{Credentials, Secret, basic},
    error::{RegistryError, clean},
};

/// Largest answer of a token server that is read, bytes.
const MAX_TOKEN_BYTES: u64 = 256 << 10;
/// Name of this client for token servers.
const CLIENT_ID: &str = "pointsman";
/// Media type of a form.
const FORM: &str = "application/x-www-form-urlencoded";

/// Value of the header `Authorization`.
pub(super) type Authorization = HeaderValue;

/// Authentication that the registry asks for.
#[derive(Debug)]
pub(super) enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

/// Answer of a token server. Servers use one of the two names, some use both.
#[derive(Deserialize)]
struct Token {
    #[serde(default)]
    token: String,
    #[serde(default)]
    access_token: String,
}

impl Challenge {
    /// Returns the challenge of an answer that this client can meet; it prefers a token to a password.
    pub(super) fn find(headers: &HeaderMap) -> Option<Self> {
        let values = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
        let challenges = values.flat_map(ChallengeParser::new).filter_map(Result::ok);
        let known: Vec<Self> = challenges.filter_map(|challenge| Self::parse(&challenge)).collect();
        let bearer = known.iter().position(|challenge| matches!(challenge, Self::Bearer { .. }));
        known.into_iter().nth(bearer.unwrap_or(0))
    }

    fn parse(challenge: &ChallengeRef<'_>) -> Option<Self> {
        if challenge.scheme.eq_ignore_ascii_case("Basic") {
            return Some(Self::Basic);
        }
        let parameter = |name: &str| {
            let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_unescaped())
        };
        let bearer = challenge.scheme.eq_ignore_ascii_case("Bearer");
        bearer.then(|| Some(Self::Bearer { realm: parameter("realm")?, service: parameter("service") }))?
    }
}

/// Answers a challenge with the credentials.
pub(super) async fn authorize(
    connection: &Connection,
    reader: &Reader,
    challenge: Challenge,
    scope: &str,
    credentials: &Credentials,
) -> Result<Authorization, RegistryError> {
    match (challenge, &credentials.secret) {
        (_, Secret::RegistryToken(token)) => bearer(token, "the registry token of Docker's configuration"),
        (Challenge::Bearer { realm, service }, _) => {
            let server = TokenServer::new(connection, &realm, service)?;
            server.token(connection, reader, scope, credentials).await
        }
        (Challenge::Basic, Secret::Password { user, password }) => basic(user, password),
        (Challenge::Basic, _) => Err(RegistryError::new(
            "the registry asks for a user and a password",
            format!("log in with `docker login`; {}", credentials.source()),
        )),
    }
}

/// The server that issues the registry's tokens.
struct TokenServer {
    url: Url,
    service: Option<String>,
}

impl TokenServer {
    fn new(connection: &Connection, realm: &str, service: Option<String>) -> Result<Self, RegistryError> {
        let url = Url::parse(realm).map_err(|error| {
            RegistryError::new(
                format!("the registry names the token server \"{}\": {error}", clean(realm)),
                "check that the host is an OCI registry",
            )
        })?;
        Ok(Self { url: connection.check(url)?, service })
    }

    async fn token(
        &self,
        connection: &Connection,
        reader: &Reader,
        scope: &str,
        credentials: &Credentials,
    ) -> Result<Authorization, RegistryError> {
        let user = match &credentials.secret {
            Secret::Password { user, password } => Some(basic(user, password)?),
            _ => None,
        };
        let request = || self.request(connection, scope, &credentials.secret, user.as_ref());
        let call = format!("asking the token server {}", shown(&self.url));
        let answer = reader.send(&call, request).await?;
        let status = answer.status();
        if status != StatusCode::OK {
            let text = clean(&String::from_utf8_lossy(&reader.read_error(answer).await));
            let advice = format!("log in with `docker login`; {}", credentials.source());
            return Err(RegistryError::new(format!("{call} was answered with {status}: {text}"), advice));
        }
        let body = reader.read(answer, &call, MAX_TOKEN_BYTES).await?;
        let malformed = "the answer of the token server";
        let token: Token = serde_json::from_slice(&body).map_err(|_| invalid_token(malformed))?;
        let token = if token.token.is_empty() { token.access_token } else { token.token };
        bearer(&token, malformed)
    }

    fn request(
        &self,
        connection: &Connection,
        scope: &str,
        secret: &Secret,
        user: Option<&Authorization>,
    ) -> RequestBuilder {
        let mut url = self.url.clone();
        let mut pairs = vec![("scope", scope)];
        pairs.extend(self.service.as_deref().map(|service| ("service", service)));
        // The identity token is exchanged as in OAuth 2, all others ask with a query.
        if let Secret::IdentityToken(token) = secret {
            pairs.extend([
                ("grant_type", "refresh_token"),
                ("client_id", CLIENT_ID),
                ("refresh_token", token),
            ]);
            let mut form = url.clone();
            form.query_pairs_mut().clear().extend_pairs(pairs);
            let form = form.query().unwrap_or_default().to_owned();
            return connection.client.request(Method::POST, url).header(CONTENT_TYPE, FORM).body(form);
        }
        url.query_pairs_mut().extend_pairs(pairs);
        let request = connection.client.request(Method::GET, url);
        match user {
            Some(user) => request.header(AUTHORIZATION, user),
            None => request,
        }
    }
}

fn bearer(token: &str, source: &str) -> Result<Authorization, RegistryError> {
    let value = HeaderValue::from_str(&format!("Bearer {token}")).ok().filter(|_| !token.is_empty());
    let mut value = value.ok_or_else(|| invalid_token(source))?;
    value.set_sensitive(true);
    Ok(value)
}

fn invalid_token(source: &str) -> RegistryError {
    RegistryError::new(format!("{source} contains no valid token"), "check the registry and its token server")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(values: &[&str]) -> Option<Challenge> {
        let values = values.iter().map(|value| (WWW_AUTHENTICATE, HeaderValue::from_str(value).unwrap()));
        Challenge::find(&values.collect())
    }

    #[test]
    fn a_challenge_for_a_token_is_preferred_to_one_for_a_password() {
        let bearer = r#"Bearer realm="https://auth.example/token?a=\"b\"",service="registry, the",scope="x""#;
        for values in [&[bearer][..], &["Basic realm=\"x\"", bearer], &["Negotiate", bearer]] {
            match find(values).unwrap() {
                Challenge::Bearer { realm, service } => {
                    assert_eq!(realm, "https://auth.example/token?a=\"b\"");
                    assert_eq!(service.as_deref(), Some("registry, the"));
                }
                Challenge::Basic => panic!("{values:?}"),
            }
        }
        assert!(matches!(find(&["basic realm=x"]), Some(Challenge::Basic)));
        for values in [&[][..], &["Negotiate"], &["Bearer service=\"no realm\""], &["\"\",,=", ""]] {
            assert!(find(values).is_none(), "{values:?}");
        }
    }

    #[test]
    fn a_token_that_cannot_be_a_header_is_an_error() {
        assert_eq!(bearer("abc", "x").unwrap().as_bytes(), b"Bearer abc");
        for token in ["", "a\r\nx: y", "a\0"] {
            let error = bearer(token, "the answer").unwrap_err().to_string();
            assert!(error.contains("the answer contains no valid token"), "{error}");
        }
    }
}
