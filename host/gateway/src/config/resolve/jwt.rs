//! Validates `[auth.jwt]`, and reads its files.

use std::path::Path;

use super::{Problems, auth::read};
use crate::config::{
    JwtAlgorithm,
    auth::Jwt,
    settings::{JwtSettings, KeySource},
};

impl Problems {
    pub(super) fn jwt(&mut self, jwt: &Jwt) -> Option<JwtSettings> {
        let Jwt {
            ref issuer,
            ref audience,
            ref jwks_url,
            ref jwks_ca,
            ref jwks_file,
            ref algorithms,
            clock_skew,
            ref tenant_claim,
            ref role_claim,
            ref viewers,
            ref operators,
            refresh,
            unknown_key_pause,
            max_stale,
        } = *jwt;
        if issuer.is_empty() {
            self.add("auth.jwt.issuer", "it is missing: give the `iss` of the identity server's tokens");
        }
        if audience.is_empty() || audience.iter().any(String::is_empty) {
            let advice =
                "it is missing: give the `aud` that the identity server puts into tokens for this gateway";
            self.add("auth.jwt.audience", advice);
        }
        if role_claim.is_empty() && !(viewers.is_empty() && operators.is_empty()) {
            let advice = "it is missing: `viewers` and `operators` are values of this claim";
            self.add("auth.jwt.role_claim", advice);
        }
        let keys = self.key_source(jwks_url.as_deref(), jwks_ca.as_deref(), jwks_file.as_deref());
        let algorithms = self.algorithms(algorithms);
        let named = |claim: &String| Some(claim.clone()).filter(|claim| !claim.is_empty());
        Some(JwtSettings {
            issuer: issuer.clone(),
            audience: audience.clone(),
            keys: keys?,
            algorithms,
            clock_skew,
            tenant_claim: named(tenant_claim),
            role_claim: named(role_claim),
            viewers: viewers.clone(),
            operators: operators.clone(),
            refresh: self.limit("auth.jwt.refresh", refresh),
            unknown_key_pause: self.limit("auth.jwt.unknown_key_pause", unknown_key_pause),
            max_stale: self.limit("auth.jwt.max_stale", max_stale),
        })
    }

    fn key_source(&mut self, url: Option<&str>, ca: Option<&Path>, file: Option<&Path>) -> Option<KeySource> {
        match (url, file) {
            (Some(url), None) => {
                if !is_safe(url) {
                    let message = format!(
                        "`{}` is not an address of public keys: expected `https://…`, or `http://` on this machine",
                        without_user(url)
                    );
                    self.add("auth.jwt.jwks_url", message);
                    return None;
                }
                let ca = match ca.map(read).transpose() {
                    Ok(pem) => pem.map(Into::into),
                    Err(error) => {
                        self.add("auth.jwt.jwks_ca", error);
                        return None;
                    }
                };
                Some(KeySource::Url { url: url.to_owned(), ca })
            }
            (None, Some(file)) => match read(file) {
                Ok(text) => Some(KeySource::File(text.into())),
                Err(error) => {
                    self.add("auth.jwt.jwks_file", error);
                    None
                }
            },
            (Some(_), Some(_)) => {
                self.add("auth.jwt.jwks_file", "`jwks_url` is given, too: remove one of them");
                None
            }
            (None, None) => {
                self.add("auth.jwt.jwks_url", "it is missing: give it, or `jwks_file`");
                None
            }
        }
    }

    fn algorithms(&mut self, names: &[String]) -> Vec<JwtAlgorithm> {
        if names.is_empty() {
            self.add("auth.jwt.algorithms", "the list is empty: no token would be accepted");
        }
        let mut algorithms = Vec::new();
        for (index, name) in names.iter().enumerate() {
            match JwtAlgorithm::of(name) {
                Some(algorithm) => algorithms.push(algorithm),
                None => self.add(
                    format!("auth.jwt.algorithms[{index}]"),
                    format!(
                        "`{name}` is not supported: expected RS256, RS384, RS512, PS256, PS384, PS512, ES256, \
                         ES384 or EdDSA"
                    ),
                ),
            }
        }
        algorithms
    }
}

/// Whether what comes from a URL is what its server sent.
fn is_safe(url: &str) -> bool {
    let Ok(url) = url.parse::<http::Uri>() else { return false };
    let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let local = host == "localhost" || host.parse().is_ok_and(|host: std::net::IpAddr| host.is_loopback());
    let user = url.authority().is_some_and(|authority| authority.as_str().contains('@'));
    !host.is_empty()
        && !user
        && (url.scheme_str() == Some("https") || (local && url.scheme_str() == Some("http")))
}

/// A URL without its possible password.
fn without_user(url: &str) -> String {
    match url.rsplit_once('@') {
        Some((_, rest)) => format!("…@{rest}"),
        None => url.to_owned(),
    }
}
