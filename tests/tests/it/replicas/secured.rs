//! NATS servers that ask who a gateway is, and show who they are.

use std::path::PathBuf;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use nkeys::KeyPair;
use pointsman_gateway::config::ReplicasTls;
use pointsman_tests::tls::{Authority, TlsFiles};

use super::*;

/// Waits until the gateway says why it is not connected, and checks that it serves.
pub(super) async fn until_refused(cluster: &TestCluster, word: &str) {
    let is_named = |replicas: &Value| replicas["problem"].to_string().contains(word);
    until(cluster, "/replicas", word, is_named).await;
    assert_eq!(get(cluster, "/replicas").await["connected"], false);
    assert_eq!(chat(cluster).await, 200);
}

pub(super) async fn until_connected(cluster: &TestCluster) {
    until(cluster, "/replicas", "connected", |replicas| replicas["connected"] == true).await;
}

#[tokio::test]
async fn q4_a_server_with_a_certificate_of_another_authority_is_refused() {
    let (authority, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    let files = TlsFiles::new(&authority.server().unwrap(), Some(&authority)).unwrap();
    files.write("other.pem", &other.pem).unwrap();
    let path = |name: &str| files.path(name).display().to_string();
    let tls = format!("tls {{ cert_file: \"{}\", key_file: \"{}\" }}", path("cert.pem"), path("key.pem"));
    let Some(nats) = Nats::start(&tls).await else { return };
    let with = |name: &str, ca: &str| Replicas {
        tls: Some(ReplicasTls { ca_file: Some(files.path(ca)), ..ReplicasTls::default() }),
        ..replicas(name, &nats.url())
    };
    let one = first(with("one", "ca.pem")).await;
    let two = second(&one, with("two", "other.pem")).await;
    until(&one, "/replicas", "connected", |replicas| replicas["connected"] == true).await;
    // Q4.5
    until(&two, "/replicas", "refused", |replicas| replicas["problem"].to_string().contains("certificate"))
        .await;
    assert_eq!(get(&two, "/replicas").await["connected"], false);
    assert_eq!(chat(&two).await, 200);
    // The files are read again for each attempt.
    files.write("other.pem", &authority.pem).unwrap();
    until_peers(&two, 1).await;
}

#[tokio::test]
async fn q4_wrong_credentials_are_refused_and_named() {
    let config = "authorization { users = [ { user: a, password: right } ] }";
    let Some(nats) = Nats::start(config).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    std::fs::write(&file, "wrong\n").unwrap();
    let settings = Replicas {
        username: Some("a".to_owned()),
        password_file: Some(file.clone()),
        ..replicas("one", &nats.url())
    };
    let one = first(settings).await;
    // Q4.5
    until(&one, "/replicas", "refused", |replicas| replicas["problem"].to_string().contains("authorization"))
        .await;
    assert!(!get(&one, "/replicas").await.to_string().contains("wrong"));
    assert_eq!(chat(&one).await, 200);
    std::fs::write(&file, "right\n").unwrap();
    // Q3.2
    until(&one, "/replicas", "connected", |replicas| replicas["connected"] == true).await;
}

/// Certificates of a server and of its clients, and the lines of its configuration.
pub(super) fn mutual_tls() -> (TlsFiles, String) {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), Some(&authority)).unwrap();
    let client = authority.issue(&pointsman_tests::tls::Leaf::default()).unwrap();
    files.write("client.pem", &client.certificate_pem).unwrap();
    files.write("client-key.pem", &client.key_pem).unwrap();
    let path = |name: &str| files.path(name).display().to_string();
    let lines = format!(
        "tls {{ cert_file: \"{}\", key_file: \"{}\", ca_file: \"{}\", verify: true }}\n",
        path("cert.pem"),
        path("key.pem"),
        path("ca.pem")
    );
    (files, lines)
}

pub(super) fn tls(files: &TlsFiles) -> Option<ReplicasTls> {
    let path = |name| Some(files.path(name));
    Some(ReplicasTls {
        ca_file: path("ca.pem"),
        cert_file: path("client.pem"),
        key_file: path("client-key.pem"),
    })
}

/// URL of a server to which clients speak TLS.
pub(super) fn secure_url(nats: &Nats) -> String {
    nats.url().replace("nats://", "tls://")
}

#[tokio::test]
async fn q4_an_nkey_over_tls_connects_and_a_wrong_one_is_named() {
    let (files, lines) = mutual_tls();
    let (known, unknown) = (KeyPair::new_user(), KeyPair::new_user());
    let lines = format!("{lines}authorization {{ users = [ {{ nkey: {} }} ] }}", known.public_key());
    let Some(nats) = Nats::start(&lines).await else { return };
    files.write("nk", "not a seed").unwrap();
    let with = |name: &str, tls| Replicas {
        nkey_file: Some(files.path("nk")),
        tls,
        ..replicas(name, &secure_url(&nats))
    };
    let one = first(with("one", tls(&files))).await;
    // Q4.5, Q4.8
    until_refused(&one, "the NKey file").await;
    files.write("nk", &unknown.seed().unwrap()).unwrap();
    until_refused(&one, "authorization").await;
    let seed = known.seed().unwrap();
    files.write("nk", &(seed.clone() + "\n")).unwrap();
    until_connected(&one).await;
    assert!(!get(&one, "/replicas").await.to_string().contains(&seed));
    // Without a certificate of its own.
    let two = second(
        &one,
        with("two", Some(ReplicasTls { ca_file: Some(files.path("ca.pem")), ..ReplicasTls::default() })),
    )
    .await;
    until_refused(&two, "ertificate").await;
    drop(two);
    let three = second(&one, with("three", tls(&files))).await;
    until_peers(&three, 1).await;
}

/// A JWT of NATS.
pub(super) fn jwt(issuer: &KeyPair, subject: &KeyPair, of: Value, expires: Option<u64>) -> String {
    let mut claims = json!({
        "jti": "test", "iat": 1_700_000_000, "iss": issuer.public_key(), "sub": subject.public_key(),
        "name": "test", "nats": of,
    });
    if let Some(expires) = expires {
        claims["exp"] = json!(expires);
    }
    let header = json!({ "typ": "JWT", "alg": "ed25519-nkey" });
    let [header, claims] = [header, claims].map(|part| BASE64.encode(part.to_string()));
    let signed = format!("{header}.{claims}");
    let signature = BASE64.encode(issuer.sign(signed.as_bytes()).unwrap());
    format!("{signed}.{signature}")
}

/// A credentials file, as `nsc` writes it.
pub(crate) fn credentials(account: &KeyPair, expires: Option<u64>) -> String {
    let user = KeyPair::new_user();
    let of =
        json!({ "type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {} });
    let (jwt, seed) = (jwt(account, &user, of, expires), user.seed().unwrap());
    format!(
        "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
}

/// Lines of a server of an operator with this account.
pub(crate) fn of_account(account: &KeyPair) -> String {
    let operator = KeyPair::new_operator();
    let of_operator = jwt(&operator, &operator, json!({ "type": "operator", "version": 2 }), None);
    let limits = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1,
        "leaf": -1,
    });
    let of_account =
        jwt(&operator, account, json!({ "type": "account", "version": 2, "limits": limits }), None);
    format!(
        "operator: {of_operator}\nresolver: MEMORY\nresolver_preload: {{ {}: {of_account} }}",
        account.public_key()
    )
}

#[tokio::test]
async fn q4_a_jwt_over_tls_connects_and_a_wrong_one_is_named() {
    let (files, lines) = mutual_tls();
    let (account, other) = (KeyPair::new_account(), KeyPair::new_account());
    let lines = lines + &of_account(&account);
    let Some(nats) = Nats::start(&lines).await else { return };
    let with = |name: &str, file: PathBuf| Replicas {
        credentials_file: Some(file),
        tls: tls(&files),
        ..replicas(name, &secure_url(&nats))
    };
    let good = credentials(&account, None);
    files.write("user.creds", "no credentials").unwrap();
    let one = first(with("one", files.path("user.creds"))).await;
    // Q4.5, Q4.8
    until_refused(&one, "the credentials file").await;
    files.write("user.creds", &good).unwrap();
    until_connected(&one).await;
    // What a file says counts for the next connection.
    files.write("user.creds", "no credentials").unwrap();
    assert_eq!(get(&one, "/replicas").await["connected"], true);
    for (name, wrong, advice) in [
        ("other", credentials(&other, None), "check that the server knows the account"),
        ("old", credentials(&account, Some(1_700_000_001)), "expired"),
    ] {
        files.write(name, &wrong).unwrap();
        let refused = second(&one, with(name, files.path(name))).await;
        until_refused(&refused, "authorization").await;
        until_refused(&refused, advice).await;
        files.write(name, &good).unwrap();
        until_connected(&refused).await;
    }
    files.write("two.creds", &credentials(&account, None)).unwrap();
    let two = second(&one, with("two", files.path("two.creds"))).await;
    until_peers(&two, 1).await;
    let booking = book(&one);
    // Q1.1
    until_remote(&two, 1).await;
    drop(booking);
    until_remote(&two, 0).await;
}

#[tokio::test]
async fn q4_a_jwt_that_expires_while_it_is_used_is_replaced_from_its_file() {
    let account = KeyPair::new_account();
    let Some(nats) = Nats::start(&of_account(&account)).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("user.creds");
    std::fs::write(&file, "no credentials").unwrap();
    let settings =
        |name: &str| Replicas { credentials_file: Some(file.clone()), ..replicas(name, &nats.url()) };
    let one = first(settings("one")).await;
    let in_seconds = |seconds| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        std::fs::write(&file, credentials(&account, Some(now.as_secs() + seconds))).unwrap();
    };
    in_seconds(5);
    until_connected(&one).await;
    // Q4.5
    until_refused(&one, &format!("the JWT in {} expired", file.display())).await;
    in_seconds(3_600);
    // Q4.8
    until_connected(&one).await;
    let two = second(&one, settings("two")).await;
    until_peers(&two, 1).await;
}

#[tokio::test]
async fn q4_a_server_whose_certificate_is_not_valid_is_not_used() {
    let authority = Authority::new().unwrap();
    let of = |names: Vec<&'static str>, expired| {
        authority.issue(&pointsman_tests::tls::Leaf { names, expired, ..Default::default() }).unwrap()
    };
    let files = TlsFiles::new(&of(vec!["127.0.0.1"], true), Some(&authority)).unwrap();
    files.write("password", "right").unwrap();
    let path = |name: &str| files.path(name).display().to_string();
    let users = "authorization { users = [ { user: a, password: right } ] }";
    let tls =
        format!("tls {{ cert_file: \"{}\", key_file: \"{}\" }}\n{users}", path("cert.pem"), path("key.pem"));
    let Some(mut nats) = Nats::start(&tls).await else { return };
    let one = first(Replicas {
        username: Some("a".to_owned()),
        password_file: Some(files.path("password")),
        tls: Some(ReplicasTls { ca_file: Some(files.path("ca.pem")), ..ReplicasTls::default() }),
        ..replicas("one", &nats.url())
    })
    .await;
    // Q4.5
    until_refused(&one, "certificate expired").await;
    let other = of(vec!["nats.example"], false);
    files.write("cert.pem", &other.certificate_pem).unwrap();
    files.write("key.pem", &other.key_pem).unwrap();
    nats.restart().await;
    // Q4.5
    until_refused(&one, "not valid for name").await;
    // With `[replicas.tls]` the gateway does not fall back to a connection without TLS.
    nats.configure(users).unwrap();
    nats.restart().await;
    // Q4.5
    until_refused(&one, "this server does not speak TLS").await;
    let right = of(vec!["127.0.0.1"], false);
    files.write("cert.pem", &right.certificate_pem).unwrap();
    files.write("key.pem", &right.key_pem).unwrap();
    nats.configure(&tls).unwrap();
    nats.restart().await;
    // Q3.2
    until_connected(&one).await;
}
