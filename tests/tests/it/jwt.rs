//! Tokens of an identity server: verified with the public keys that a real HTTP server in the test hands out.

#![allow(clippy::disallowed_methods, reason = "servers of tests end with them")]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use futures_util::future::join_all;
use parking_lot::Mutex;
use pointsman_gateway::config::{Auth, Jwt};
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder};
use ring::{
    hmac,
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

const ISSUER: &str = "https://identity.example";

/// A key of the identity server.
struct Key {
    id: &'static str,
    pair: EcdsaKeyPair,
}

impl Key {
    fn new(id: &'static str) -> Self {
        let (random, kind) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(kind, &random).unwrap();
        Self { id, pair: EcdsaKeyPair::from_pkcs8(kind, pkcs8.as_ref(), &random).unwrap() }
    }

    fn public(&self) -> Value {
        let point = self.pair.public_key().as_ref();
        let (x, y) = (BASE64.encode(&point[1..33]), BASE64.encode(&point[33..]));
        json!({"kty": "EC", "crv": "P-256", "use": "sig", "kid": self.id, "x": x, "y": y})
    }

    fn token(&self, claims: &Value) -> String {
        self.token_with(&json!({"alg": "ES256", "kid": self.id}), claims)
    }

    fn token_with(&self, header: &Value, claims: &Value) -> String {
        let signed = signed_part(header, claims);
        let signature = self.pair.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
        format!("{signed}.{}", BASE64.encode(signature.as_ref()))
    }
}

fn signed_part(header: &Value, claims: &Value) -> String {
    format!("{}.{}", BASE64.encode(header.to_string()), BASE64.encode(claims.to_string()))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Claims of a good token, with `changes`.
fn claims(changes: Value) -> Value {
    let mut claims =
        json!({"iss": ISSUER, "aud": "pointsman", "sub": "user-1", "tenant": "team-a", "exp": now() + 600});
    for (name, value) in changes.as_object().unwrap() {
        claims[name] = value.clone();
    }
    claims
}

/// Behaviour of the identity server.
#[derive(Clone)]
enum Behaviour {
    Answer(Vec<u8>),
    /// Accepts the request and never answers.
    Silent,
    /// Closes the connection.
    Away,
    /// Sends without an end.
    Endless,
}

/// An HTTP server for public keys.
#[derive(Clone)]
struct IdentityServer {
    address: SocketAddr,
    behaviour: Arc<Mutex<Behaviour>>,
    requests: Arc<AtomicUsize>,
}

impl IdentityServer {
    async fn start(keys: &[&Key]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            behaviour: Arc::new(Mutex::new(Behaviour::Away)),
            requests: Arc::default(),
        };
        server.set(keys);
        let own = server.clone();
        tokio::spawn(async move {
            loop {
                let (mut socket, _) = listener.accept().await.unwrap();
                let own = own.clone();
                tokio::spawn(async move {
                    let mut head = [0; 4096];
                    let _ = socket.read(&mut head).await;
                    own.requests.fetch_add(1, Ordering::Relaxed);
                    let behaviour = own.behaviour.lock().clone();
                    match behaviour {
                        Behaviour::Answer(body) => {
                            let head = format!(
                                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                                body.len()
                            );
                            let _ = socket.write_all(head.as_bytes()).await;
                            let _ = socket.write_all(&body).await;
                        }
                        Behaviour::Silent => std::future::pending().await,
                        Behaviour::Away => {}
                        Behaviour::Endless => {
                            let _ = socket.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n").await;
                            while socket.write_all(&[b' '; 8192]).await.is_ok() {}
                        }
                    }
                });
            }
        });
        server
    }

    fn set(&self, keys: &[&Key]) {
        let keys: Vec<Value> = keys.iter().map(|key| key.public()).collect();
        self.behave(Behaviour::Answer(json!({"keys": keys}).to_string().into_bytes()));
    }

    fn behave(&self, behaviour: Behaviour) {
        *self.behaviour.lock() = behaviour;
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    fn jwt(&self) -> Jwt {
        Jwt {
            issuer: ISSUER.into(),
            audience: vec!["pointsman".into(), "other".into()],
            jwks_url: Some(format!("http://{}/jwks", self.address)),
            tenant_claim: "tenant".into(),
            role_claim: "groups".into(),
            viewers: vec!["readers".into()],
            operators: vec!["admins".into()],
            clock_skew: Duration::from_secs(30),
            unknown_key_pause: Duration::from_millis(300),
            ..Jwt::default()
        }
    }
}

async fn cluster(jwt: Jwt) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            config.auth = Auth { jwt: Some(jwt), ..Auth::default() };
            config.decisions.facts = vec!["tenant-hash".into(), "tenant-active-requests".into()];
        })
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), "")
        .start()
        .await
}

async fn ask(cluster: &TestCluster, token: &str) -> (u16, String) {
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2}).to_string();
    let headers = [("authorization", format!("Bearer {token}"))];
    let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let reply = cluster.client.post(COMPLETIONS, &headers, body).await.unwrap();
    if reply.status.is_success() {
        return (200, String::new());
    }
    let message = reply.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    (reply.status.as_u16(), message)
}

/// Waits until the gateway has public keys.
async fn until_served(cluster: &TestCluster, token: &str) {
    for _ in 0..200 {
        if ask(cluster, token).await.0 == 200 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the token was never accepted: {:?}", ask(cluster, token).await);
}

#[tokio::test]
async fn k2_a_token_of_the_identity_server_names_the_tenant() {
    let key = Key::new("k1");
    let server = IdentityServer::start(&[&key]).await;
    let cluster = cluster(server.jwt()).await;
    until_served(&cluster, &key.token(&claims(json!({})))).await;
    let mut hashes = Vec::new();
    for changes in [json!({}), json!({"aud": ["x", "other"]}), json!({"tenant": "team-b"})] {
        cluster.at_rest().await.unwrap();
        // K2.1
        assert_eq!(ask(&cluster, &key.token(&claims(changes))).await.0, 200);
        let facts = cluster.newest_facts().await.unwrap();
        assert_eq!(facts["tenant-active-requests"], 1);
        hashes.push(facts["tenant-hash"].to_string());
    }
    assert!(hashes[0] == hashes[1] && hashes[0] != hashes[2], "{hashes:?}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k2_each_subject_of_tokens_has_a_rate_of_its_own() {
    let key = Key::new("k1");
    let server = IdentityServer::start(&[&key]).await;
    let jwt = server.jwt();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.auth = Auth { jwt: Some(jwt), ..Auth::default() };
            config.server.requests_per_second = 1;
        })
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), "")
        .start()
        .await;
    let token = |subject: &str| key.token(&claims(json!({ "sub": subject })));
    until_served(&cluster, &token("the first")).await;
    let flood = async || {
        let mut refused = 0;
        for _ in 0..10 {
            refused += usize::from(ask(&cluster, &token("the loud one")).await.0 == 429);
        }
        refused
    };
    assert!(flood().await >= 5);
    let others = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let mut served = 0;
    for subject in others {
        served += usize::from(ask(&cluster, &token(subject)).await.0 == 200);
    }
    // K2.8: two of nine may share a bucket by chance.
    assert!(served >= others.len() - 2, "{served} of {}", others.len());
    let mut served = 0;
    for subject in others {
        let long = format!("system:serviceaccount:{}:{subject}", "team".repeat(20));
        served += usize::from(ask(&cluster, &token(&long)).await.0 == 200);
    }
    // K2.10: subjects with one beginning
    assert!(served >= others.len() - 2, "{served} of {}", others.len());
}

#[tokio::test]
async fn m4_tokens_with_new_tenants_make_no_series() {
    let key = Key::new("k1");
    let server = IdentityServer::start(&[&key]).await;
    let cluster = cluster(server.jwt()).await;
    until_served(&cluster, &key.token(&claims(json!({})))).await;
    let served =
        cluster.metric("pointsman_tenant_requests_total{tenant=\"other\",code=\"ok\"}").await.unwrap();
    for count in 0..200 {
        let tenant = format!("new-{count}");
        assert_eq!(ask(&cluster, &key.token(&claims(json!({ "tenant": tenant })))).await.0, 200);
    }
    cluster.at_rest().await.unwrap();
    // M4.5
    let others = cluster.metric("pointsman_tenant_requests_total{").await.unwrap();
    assert_eq!(others, [served[0] + 200.0], "no tenant is named in the configuration");
}

#[tokio::test]
async fn k2_a_wrong_token_is_refused_with_the_reason() {
    let (key, foreign) = (Key::new("k1"), Key::new("k1"));
    let server = IdentityServer::start(&[&key]).await;
    let cluster = cluster(server.jwt()).await;
    let good = claims(json!({}));
    until_served(&cluster, &key.token(&good)).await;
    // The classic forgery: the public key as the secret of an HMAC.
    let part = signed_part(&json!({"alg": "HS256", "kid": "k1"}), &good);
    let secret = hmac::Key::new(hmac::HMAC_SHA256, key.pair.public_key().as_ref());
    let hs256 = format!("{part}.{}", BASE64.encode(hmac::sign(&secret, part.as_bytes())));
    let none = format!("{}.", signed_part(&json!({"alg": "none", "kid": "k1"}), &good));
    let valid = key.token(&good);
    let (head, signature) = valid.rsplit_once('.').unwrap();
    let swapped = format!(
        "{}.{signature}",
        signed_part(&json!({"alg": "ES256", "kid": "k1"}), &claims(json!({"tenant": "root"})))
    );
    let cases = [
        (foreign.token(&good), "its signature is wrong"),
        (swapped, "its signature is wrong"),
        (format!("{head}.AAAA"), "its signature is wrong"),
        (hs256, "its algorithm is not one of"),
        (none, "its algorithm is not one of"),
        (key.token(&claims(json!({"iss": "https://evil.example"}))), "its issuer is not"),
        (key.token(&claims(json!({"aud": "somebody"}))), "its audience is not"),
        (key.token(&claims(json!({"aud": null}))), "is missing"),
        (key.token(&claims(json!({"exp": null}))), "is missing"),
        (key.token(&claims(json!({"exp": "soon"}))), "is not a number"),
        (key.token(&claims(json!({"exp": now() - 31}))), "it is expired"),
        (key.token(&claims(json!({"nbf": now() + 60}))), "it is not valid yet"),
        (key.token(&claims(json!({"tenant": null}))), "it names no tenant"),
        (key.token(&claims(json!({"tenant": "x".repeat(129)}))), "it names no tenant"),
        (key.token_with(&json!({"alg": "ES384", "kid": "k1"}), &good), "its algorithm is not one of"),
        (key.token_with(&json!({"alg": "RS256", "kid": "k1"}), &good), "its key is not one of"),
        (key.token_with(&json!({"alg": "ES256", "kid": "k1", "crit": ["x"]}), &good), "critical extensions"),
        ("eyJ.a.b".to_owned(), "it is not a signed token"),
        (format!("{valid}{}", "A".repeat(9_000)), "it is longer than 8192 bytes"),
    ];
    for (token, reason) in cases {
        let (status, message) = ask(&cluster, &token).await;
        // K2.2, K1.12: after ten wrong tokens the address is told so.
        let expected = if reason == "it names no tenant" { 403 } else { 401 };
        let told = (status == expected && message.contains(reason)) || status == 429;
        assert!(told, "expected {reason}: {status} {message}");
        assert!(!message.contains("root") && !message.contains(&token), "{message}");
    }
    let expired = key.token(&claims(json!({"exp": now() - 600})));
    for _ in 0..2 {
        // K1.12: the address has sent more than ten wrong tokens, and this one is no guess.
        let (status, message) = ask(&cluster, &expired).await;
        assert!(status == 401 && message.contains("it is expired"), "{status} {message}");
    }
    // K2.3: clocks may differ.
    assert_eq!(ask(&cluster, &key.token(&claims(json!({"exp": now() - 20})))).await.0, 200);
    assert_eq!(ask(&cluster, &key.token(&claims(json!({"nbf": now() + 20})))).await.0, 200);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k2_keys_rotate_and_an_unknown_key_cannot_flood_the_identity_server() {
    let (first, second, third) = (Key::new("k1"), Key::new("k2"), Key::new("forged"));
    let server = IdentityServer::start(&[&first]).await;
    let mut jwt = server.jwt();
    jwt.unknown_key_pause = Duration::from_secs(1);
    let cluster = cluster(jwt).await;
    let remembered = first.token(&claims(json!({})));
    until_served(&cluster, &remembered).await;
    assert_eq!(ask(&cluster, &remembered).await.0, 200);
    let nameless = |key: &Key| key.token_with(&json!({"alg": "ES256"}), &claims(json!({})));
    assert_eq!(ask(&cluster, &nameless(&first)).await.0, 200);
    server.set(&[&second]);
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let fetched = server.requests();
    // K2.9: without `kid` a change of the key is not noticed
    assert_eq!((ask(&cluster, &nameless(&second)).await.0, server.requests()), (401, fetched));
    // K2.4: the unknown key makes the gateway fetch, and the request waits for it.
    assert_eq!(ask(&cluster, &second.token(&claims(json!({})))).await.0, 200);
    // K2.4: a key that left the set verifies nothing, the text of a remembered token included.
    assert_eq!(ask(&cluster, &remembered).await.0, 401);
    assert_eq!(ask(&cluster, &first.token(&claims(json!({"n": 2})))).await.0, 401);
    // K2.9
    assert_eq!(
        (ask(&cluster, &nameless(&second)).await.0, ask(&cluster, &nameless(&first)).await.0),
        (200, 401)
    );
    let before = server.requests();
    let began = tokio::time::Instant::now();
    let tokens: Vec<String> = (0..300)
        .map(|number| {
            let header = json!({"alg": "ES256", "kid": format!("forged-{number}")});
            third.token_with(&header, &claims(json!({})))
        })
        .collect();
    let answers = join_all(tokens.iter().map(|token| ask(&cluster, token))).await;
    assert!(answers.iter().all(|(status, _)| matches!(status, 401 | 429)), "{answers:?}");
    let allowed = began.elapsed().as_secs() as usize + 2;
    // K2.5
    assert!(server.requests() - before <= allowed, "{} fetches", server.requests() - before);
    assert_eq!(ask(&cluster, &second.token(&claims(json!({})))).await.0, 200);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k2_each_of_several_keys_that_fit_a_token_may_verify_it() {
    let (first, second, other) = (Key::new("k"), Key::new("k"), Key::new("k"));
    let server = IdentityServer::start(&[&first, &second]).await;
    let cluster = cluster(server.jwt()).await;
    until_served(&cluster, &first.token(&claims(json!({})))).await;
    let nameless = json!({"alg": "ES256"});
    for (key, status) in [(&first, 200), (&second, 200), (&other, 401)] {
        // K2.9: one name
        assert_eq!(ask(&cluster, &key.token(&claims(json!({})))).await.0, status);
        // K2.9: no name
        assert_eq!(ask(&cluster, &key.token_with(&nameless, &claims(json!({})))).await.0, status);
    }
    cluster.at_rest().await.unwrap();
    let keys: Vec<Key> = (0..9).map(|_| Key::new("k")).collect();
    let server = IdentityServer::start(&keys.iter().collect::<Vec<_>>()).await;
    let cluster = self::cluster(server.jwt()).await;
    until_served(&cluster, &keys[7].token(&claims(json!({})))).await;
    // K2.9: the ninth one is not tried
    assert_eq!(ask(&cluster, &keys[8].token(&claims(json!({})))).await.0, 401);
}

#[tokio::test]
async fn k2_an_unknown_key_soon_after_a_fetch_or_beside_a_file_is_refused_at_once() {
    let (known, unknown) = (Key::new("k1"), Key::new("k2"));
    let server = IdentityServer::start(&[&known]).await;
    let mut jwt = server.jwt();
    jwt.unknown_key_pause = Duration::from_secs(600);
    let fetches = cluster(jwt).await;
    until_served(&fetches, &known.token(&claims(json!({})))).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), json!({"keys": [known.public()]}).to_string()).unwrap();
    let mut jwt = server.jwt();
    (jwt.jwks_url, jwt.jwks_file) = (None, Some(file.path().to_owned()));
    let reads = cluster(jwt).await;
    assert_eq!(ask(&reads, &known.token(&claims(json!({})))).await.0, 200);
    // Both sets have the key now, and the gateway does not read them again.
    server.set(&[&known, &unknown]);
    std::fs::write(file.path(), json!({"keys": [known.public(), unknown.public()]}).to_string()).unwrap();
    let before = server.requests();
    for cluster in [&fetches, &reads] {
        let (status, message) = ask(cluster, &unknown.token(&claims(json!({})))).await;
        // K2.4
        assert!(status == 401 && message.contains("its key is not one of"), "{status} {message}");
        assert_eq!(ask(cluster, &known.token(&claims(json!({"n": 1})))).await.0, 200);
    }
    // K2.5
    assert_eq!(server.requests(), before);
}

#[tokio::test]
async fn k2_the_last_keys_serve_while_the_identity_server_is_broken() {
    let key = Key::new("k1");
    let server = IdentityServer::start(&[&key]).await;
    let mut jwt = server.jwt();
    jwt.refresh = Duration::from_millis(300);
    jwt.max_stale = Duration::from_secs(8);
    let cluster = cluster(jwt).await;
    let token = |number: u32| key.token(&claims(json!({"n": number})));
    until_served(&cluster, &token(0)).await;
    let huge = format!(r#"{{"keys":[],"x":"{}"}}"#, "x".repeat(300_000)).into_bytes();
    for (number, behaviour) in
        [Behaviour::Away, Behaviour::Answer(b"garbage".to_vec()), Behaviour::Answer(huge), Behaviour::Endless]
            .into_iter()
            .enumerate()
    {
        server.behave(behaviour);
        tokio::time::sleep(Duration::from_millis(700)).await;
        // K2.6
        assert_eq!(ask(&cluster, &token(number as u32 + 1)).await.0, 200, "{number}");
    }
    let failed = cluster.metric("pointsman_key_set_fetches_total{result=\"failed\"}").await.unwrap();
    assert!(failed.iter().sum::<f64>() >= 4.0, "{failed:?}");
    server.behave(Behaviour::Silent);
    let began = tokio::time::Instant::now();
    assert_eq!(ask(&cluster, &token(9)).await.0, 200);
    // A fetch from a silent server takes 5 s.
    assert!(began.elapsed() < Duration::from_secs(4), "a known key waits for no fetch");
    tokio::time::sleep(Duration::from_secs(8)).await;
    // K2.6: up to auth.jwt.max_stale.
    let (status, message) = ask(&cluster, &token(10)).await;
    let body = json!({"model": "tiny", "prompt": "hello"}).to_string();
    let bearer = format!("Bearer {}", token(10));
    let code = cluster.client.post(COMPLETIONS, &[("authorization", &bearer)], body).await.unwrap().code();
    // I_key_set_unavailable
    assert_eq!((status, code.as_str()), (503, "key_set_unavailable"), "{message}");
    server.set(&[&key]);
    until_served(&cluster, &token(11)).await;
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k2_a_role_in_a_token_lets_an_operator_in() {
    let key = Key::new("k1");
    let server = IdentityServer::start(&[&key]).await;
    let mut jwt = server.jwt();
    jwt.tenant_claim = String::new();
    let cluster = cluster(jwt).await;
    until_served(&cluster, &key.token(&claims(json!({})))).await;
    let status = async |groups: Value| {
        let token = format!("Bearer {}", key.token(&claims(json!({"groups": groups}))));
        let headers = [("authorization", token.as_str())];
        let read = cluster.admin.get_with("/workers", &headers).await.unwrap().status.as_u16();
        let change = cluster.admin.post("/policies/reload", &headers, "").await.unwrap().status.as_u16();
        (read, change)
    };
    // K2.7
    assert_eq!(status(json!(["x", "admins"])).await, (200, 200));
    assert_eq!(status(json!("readers")).await, (200, 403));
    // K3.1: a valid token without a role
    assert_eq!(status(json!(["x"])).await, (200, 403));
    let expired = format!("Bearer {}", key.token(&claims(json!({"groups": "admins", "exp": 1}))));
    for _ in 0..12 {
        // K1.12
        let headers = [("authorization", &*expired)];
        let reply = cluster.admin.post("/policies/reload", &headers, "").await.unwrap();
        let message = String::from_utf8_lossy(&reply.body).into_owned();
        assert!(reply.status == 401 && message.contains("it is expired"), "{message}");
    }
    let without = cluster.admin.post("/policies/reload", &[], "").await.unwrap();
    assert_eq!(without.status, 401);
}
