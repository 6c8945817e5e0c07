//! Tokens that another implementation (PyJWT 2.15 with its RSA, EC and Ed25519 keys) signed, one for each
//! algorithm, verified with the public keys of a file. The private keys were not kept.

use std::{collections::BTreeMap, path::PathBuf};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use pointsman_gateway::config::{Auth, Jwt};
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{TestCluster, TestClusterBuilder};
use serde_json::Value;

const BODY: &str = r#"{"model":"tiny","prompt":"hello","max_tokens":2}"#;

fn fixture(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "fixtures", "jwt", name].iter().collect()
}

/// The token of each algorithm.
fn tokens() -> BTreeMap<String, String> {
    serde_json::from_slice(&std::fs::read(fixture("tokens.json")).unwrap()).unwrap()
}

async fn cluster(jwks_file: PathBuf, algorithms: Vec<String>) -> TestCluster {
    let jwt = Jwt {
        issuer: "https://identity.example".into(),
        audience: vec!["pointsman".into()],
        jwks_file: Some(jwks_file),
        algorithms,
        tenant_claim: "tenant".into(),
        ..Jwt::default()
    };
    TestClusterBuilder::new()
        .config(|config| config.auth = Auth { jwt: Some(jwt), ..Auth::default() })
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), "")
        .start()
        .await
}

async fn ask(cluster: &TestCluster, token: &str) -> u16 {
    let bearer = format!("Bearer {token}");
    let reply = cluster.client.post("/v1/completions", &[("authorization", &bearer)], BODY).await.unwrap();
    reply.status.as_u16()
}

/// The token with another value in its header or claims, and the old signature.
fn forged(token: &str, part: usize, from: &str, to: &str) -> String {
    let mut parts: Vec<String> = token.split('.').map(str::to_owned).collect();
    let text = String::from_utf8(BASE64.decode(&parts[part]).unwrap()).unwrap();
    assert!(text.contains(from), "{text}");
    parts[part] = BASE64.encode(text.replace(from, to));
    parts.join(".")
}

#[tokio::test]
async fn k2_every_algorithm_of_another_implementation_is_verified() {
    let tokens = tokens();
    let cluster = cluster(fixture("jwks.json"), tokens.keys().cloned().collect()).await;
    assert_eq!(tokens.len(), 9);
    for (algorithm, token) in &tokens {
        // K2.1
        assert_eq!(ask(&cluster, token).await, 200, "{algorithm}");
    }
    // An address may be wrong ten times in a minute before it is told to wait.
    for (algorithm, token) in &tokens {
        // K2.2
        assert_eq!(ask(&cluster, &forged(token, 1, "team-a", "team-b")).await, 401, "{algorithm}");
    }
}

#[tokio::test]
async fn k2_a_token_whose_algorithm_or_key_was_exchanged_is_refused() {
    let tokens = tokens();
    let cluster = cluster(fixture("jwks.json"), tokens.keys().cloned().collect()).await;
    let cut = |algorithm: &str| tokens[algorithm][..tokens[algorithm].len() - 4].to_owned();
    let wrong = [
        forged(&tokens["RS256"], 0, "RS256", "PS256"),
        forged(&tokens["RS256"], 0, "RS256", "RS512"),
        forged(&tokens["ES256"], 0, "ES256", "ES384"),
        forged(&tokens["RS256"], 0, "\"rsa\"", "\"ed\""),
        forged(&tokens["EdDSA"], 0, "\"ed\"", "\"p256\""),
        cut("PS384"),
        cut("ES384"),
        cut("EdDSA"),
    ];
    for token in &wrong {
        // K2.2
        assert_eq!(ask(&cluster, token).await, 401, "{token}");
    }
}

#[tokio::test]
async fn k2_an_algorithm_that_is_not_configured_and_a_weak_key_verify_nothing() {
    let tokens = tokens();
    let only = cluster(fixture("jwks.json"), vec!["ES384".into()]).await;
    for (algorithm, token) in &tokens {
        let expected = if algorithm == "ES384" { 200 } else { 401 };
        // K2.2
        assert_eq!(ask(&only, token).await, expected, "{algorithm}");
    }
    // The key of the RSA tokens, cut to half its bits.
    let mut keys: Value = serde_json::from_slice(&std::fs::read(fixture("jwks.json")).unwrap()).unwrap();
    let modulus = keys["keys"][0]["n"].as_str().unwrap().to_owned();
    keys["keys"][0]["n"] = modulus[..modulus.len() / 2].into();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("jwks.json");
    std::fs::write(&file, keys.to_string()).unwrap();
    let weak = cluster(file, vec!["RS256".into(), "ES256".into()]).await;
    // K2.2
    assert_eq!((ask(&weak, &tokens["RS256"]).await, ask(&weak, &tokens["ES256"]).await), (401, 200));
}
