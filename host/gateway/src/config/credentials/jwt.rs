//! Reads the files of `[auth.jwt]`.

use std::path::Path;

use pointsman_workers::url_without_secrets;

use super::{JwtSettings, KeySource, Reader, read};
use crate::config::auth::Jwt;

impl Reader {
    pub(super) fn jwt(&mut self, jwt: &Jwt) -> Option<JwtSettings> {
        let Jwt { jwks_url, jwks_ca, jwks_file, .. } = jwt;
        let keys = self.key_source(jwks_url.as_deref(), jwks_ca.as_deref(), jwks_file.as_deref())?;
        Some(JwtSettings { rules: jwt.clone(), keys })
    }

    fn key_source(&mut self, url: Option<&str>, ca: Option<&Path>, file: Option<&Path>) -> Option<KeySource> {
        match (url, file) {
            (Some(url), None) => {
                if !is_safe(url) {
                    let message = format!(
                        "`{}` is not an address of public keys: expected `https://…`, or `http://` on this machine",
                        url_without_secrets(url)
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
}

/// Returns whether content from a URL cannot be changed on the way: `https`, or a loopback address.
fn is_safe(url: &str) -> bool {
    let Ok(url) = url.parse::<http::Uri>() else { return false };
    let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let local = host == "localhost" || host.parse().is_ok_and(|host: std::net::IpAddr| host.is_loopback());
    let user = url.authority().is_some_and(|authority| authority.as_str().contains('@'));
    !host.is_empty()
        && !user
        && (url.scheme_str() == Some("https") || (local && url.scheme_str() == Some("http")))
}
