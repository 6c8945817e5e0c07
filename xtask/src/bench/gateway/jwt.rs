//! Tokens (JWT) that clients send, and the key with which the gateway verifies them.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, anyhow};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _},
};
use serde_json::json;

const ISSUER: &str = "https://identity.example";
const AUDIENCE: &str = "pointsman";
/// Lifetime of a token, seconds. It is longer than a run.
const LIFE: u64 = 3_600;
/// Number of tokens that are signed in advance. It is larger than a scenario's number of clients.
const CLIENTS: u64 = 512;

/// How long a client keeps a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Tokens {
    /// Each client sends one token with all its requests. The gateway remembers it as verified.
    PerClient,
    /// Each request has its own token, whose signature the gateway verifies.
    PerRequest,
}

/// An identity server's key (ES256) and the tokens that it signs.
pub(super) struct Issuer {
    pair: EcdsaKeyPair,
    random: SystemRandom,
    /// One token for each client; empty when each request has its own.
    of_clients: Vec<String>,
}

/// Returns the header `authorization` of a client's request; empty when clients send no tokens.
pub(super) fn authorization(issuer: Option<&Issuer>, client: u64, request: u64) -> anyhow::Result<String> {
    issuer.map_or(Ok(String::new()), |issuer| issuer.authorization(client, request))
}

impl Issuer {
    pub(super) fn new(tokens: Tokens) -> anyhow::Result<Self> {
        let (random, kind) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(kind, &random).map_err(|_| anyhow!("no random key"))?;
        let pair =
            EcdsaKeyPair::from_pkcs8(kind, pkcs8.as_ref(), &random).map_err(|error| anyhow!("{error}"))?;
        let mut issuer = Self { pair, random, of_clients: Vec::new() };
        if tokens == Tokens::PerClient {
            issuer.of_clients =
                (0..CLIENTS).map(|client| issuer.sign(client, 0)).collect::<Result<_, _>>()?;
        }
        Ok(issuer)
    }

    /// Writes the public key into a directory, and returns the gateway's table that reads it.
    pub(super) fn table(&self, dir: &Path) -> anyhow::Result<String> {
        let file = dir.join("jwks.json");
        let point = self.pair.public_key().as_ref();
        let (x, y) = point.get(1..).and_then(|point| point.split_at_checked(32)).context("a strange key")?;
        let key = json!({
            "kty": "EC", "crv": "P-256", "use": "sig", "kid": "bench", "x": BASE64.encode(x), "y": BASE64.encode(y),
        });
        std::fs::write(&file, json!({ "keys": [key] }).to_string())?;
        Ok(format!(
            "[auth.jwt]\nissuer = {ISSUER:?}\naudience = [{AUDIENCE:?}]\njwks_file = {file:?}\ntenant_claim = \"\"\n"
        ))
    }

    /// Returns the header `authorization` of a client's request. `request` counts the requests of all
    /// clients.
    fn authorization(&self, client: u64, request: u64) -> anyhow::Result<String> {
        let kept = self.of_clients.get(usize::try_from(client)? % self.of_clients.len().max(1));
        let token = kept.map_or_else(|| self.sign(client, request), |token| Ok(token.clone()))?;
        Ok(format!("Bearer {token}"))
    }

    fn sign(&self, client: u64, request: u64) -> anyhow::Result<String> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let claims = json!({
            "iss": ISSUER, "aud": AUDIENCE, "sub": format!("client-{client}"), "jti": format!("{request}"),
            "iat": now, "exp": now + LIFE,
        });
        let header = json!({ "alg": "ES256", "typ": "JWT", "kid": "bench" });
        let text = format!("{}.{}", BASE64.encode(header.to_string()), BASE64.encode(claims.to_string()));
        let signature = self.pair.sign(&self.random, text.as_bytes()).map_err(|_| anyhow!("not signed"))?;
        Ok(format!("{text}.{}", BASE64.encode(signature.as_ref())))
    }
}

impl std::fmt::Debug for Issuer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issuer").field("clients", &self.of_clients.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
    use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
    use serde_json::Value;

    use super::{Issuer, Tokens};

    #[test]
    fn tokens_are_valid_for_the_published_key() {
        let (dir, issuer) = (tempfile::tempdir().unwrap(), Issuer::new(Tokens::PerRequest).unwrap());
        let table = issuer.table(dir.path()).unwrap();
        assert!(table.starts_with("[auth.jwt]\n") && table.contains("jwks.json"), "{table}");
        let set: Value =
            serde_json::from_slice(&std::fs::read(dir.path().join("jwks.json")).unwrap()).unwrap();
        let part = |name: &str| BASE64.decode(set["keys"][0][name].as_str().unwrap()).unwrap();
        let point = [vec![4], part("x"), part("y")].concat();
        let header = issuer.authorization(3, 7).unwrap();
        let (text, signature) = header.strip_prefix("Bearer ").unwrap().rsplit_once('.').unwrap();
        let signature = BASE64.decode(signature).unwrap();
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(text.as_bytes(), &signature).unwrap();
        let claims = BASE64.decode(text.split_once('.').unwrap().1).unwrap();
        let claims: Value = serde_json::from_slice(&claims).unwrap();
        assert_eq!((&claims["sub"], &claims["jti"]), (&"client-3".into(), &"7".into()));
    }

    #[test]
    fn a_client_keeps_its_token_or_has_one_for_each_request() {
        for (tokens, kept) in [(Tokens::PerClient, true), (Tokens::PerRequest, false)] {
            let issuer = Issuer::new(tokens).unwrap();
            let of = |client, request| issuer.authorization(client, request).unwrap();
            assert_eq!(of(1, 1) == of(1, 2), kept);
            assert_ne!(of(1, 1), of(2, 1));
        }
    }
}
