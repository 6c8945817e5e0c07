//! Workers of keys of the real etcd, which asks who the gateway is. Without `etcd` in the PATH these tests
//! say so and pass.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use pointsman_gateway::config::DiscoveryEtcd;
use pointsman_sim::{Dialect, Role, Sim, SimConfig};
use pointsman_tests::{
    TestCluster, TestClusterBuilder,
    etcd::Etcd,
    tls::{Authority, Leaf, TlsFiles},
};
use serde_json::{Value, json};

async fn source(cluster: &TestCluster) -> Value {
    let status = cluster.admin.get("/discovery").await.unwrap().json().unwrap();
    let sources = status["sources"].as_array().unwrap();
    sources.iter().find(|source| source["name"] == "etcd:a").unwrap().clone()
}

async fn until(cluster: &TestCluster, what: &str, fits: impl Fn(&Value) -> bool) {
    for _ in 0..1_500 {
        if fits(&source(cluster).await) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: {}", source(cluster).await);
}

/// Waits until the source says why it is away, and checks that the gateway serves.
async fn until_refused(cluster: &TestCluster, word: &str) {
    until(cluster, word, |source| source["problem"].to_string().contains(word)).await;
    let body = json!({ "model": "tiny", "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }] });
    let reply = cluster.client.post("/v1/chat/completions", &[], body.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{word}");
}

/// Lets `gateway` read the keys below /w/, and `stranger` none. Their passwords are `right`.
pub(crate) async fn add_users(etcd: &Etcd) {
    let [key, end] = ["/w/", "/w0"].map(|key| BASE64.encode(key));
    let permission = json!({ "permType": "READ", "key": key, "range_end": end });
    for (path, body) in [
        ("user/add", json!({ "name": "root", "password": "root" })),
        ("user/add", json!({ "name": "gateway", "password": "right" })),
        ("user/add", json!({ "name": "stranger", "password": "right" })),
        ("role/add", json!({ "name": "reader" })),
        ("role/grant", json!({ "name": "reader", "perm": permission })),
        ("user/grant", json!({ "user": "gateway", "role": "reader" })),
        ("user/grant", json!({ "user": "root", "role": "root" })),
        ("enable", json!({})),
    ] {
        etcd.call(&format!("/v3/auth/{path}"), body).await.unwrap();
    }
}

/// Files of an etcd that asks for certificates, and of its clients.
fn files() -> TlsFiles {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), Some(&authority)).unwrap();
    files.write("other.pem", &Authority::new().unwrap().pem).unwrap();
    for (name, unnamed) in [("client", true), ("named", false)] {
        let client = authority.issue(&Leaf { unnamed, ..Leaf::default() }).unwrap();
        files.write(&format!("{name}.pem"), &client.certificate_pem).unwrap();
        files.write(&format!("{name}-key.pem"), &client.key_pem).unwrap();
    }
    files
}

/// Flags of an etcd that asks for certificates.
fn tls_flags(files: &TlsFiles) -> Vec<String> {
    let flags = [("cert-file", "cert.pem"), ("key-file", "key.pem"), ("trusted-ca-file", "ca.pem")];
    let flags = flags.map(|(flag, file)| format!("--{flag}={}", files.path(file).display()));
    ["--client-cert-auth".to_owned()].into_iter().chain(flags).collect()
}

/// A gateway with an engine of its own, which reads etcd, too.
async fn gateway(settings: DiscoveryEtcd) -> TestCluster {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    builder.config(|config| config.discovery.etcd = vec![settings]).start().await
}

#[tokio::test]
async fn p8_an_etcd_with_tls_and_users_names_workers_and_what_it_refuses_is_named() {
    let Some(mut etcd) = Etcd::start().await else { return };
    let engine = Sim::start(SimConfig::instant(Dialect::Vllm, Role::Aggregated)).await.unwrap();
    let worker = json!({ "url": engine.url(), "role": "aggregated", "engine": "vllm" });
    etcd.put("/w/1", &worker).await.unwrap();
    add_users(&etcd).await;
    let files = files();
    etcd.restart("https", &tls_flags(&files)).await;
    let right = DiscoveryEtcd {
        name: "a".to_owned(),
        endpoints: vec![format!("https://127.0.0.1:{}", etcd.port())],
        prefix: "/w/".to_owned(),
        ca_file: Some(files.path("ca.pem")),
        cert_file: Some(files.path("client.pem")),
        key_file: Some(files.path("client-key.pem")),
        username: Some("gateway".to_owned()),
        password_file: Some(files.path("password")),
        ..DiscoveryEtcd::default()
    };
    files.write("password", "wrong\n").unwrap();
    let cluster = gateway(right.clone()).await;
    // P8.5
    until_refused(&cluster, "check `username` and `password_file`").await;
    files.write("password", "right\n").unwrap();
    until(&cluster, "the key is read", |source| source["workers"] == 1).await;
    drop(cluster);
    let named = DiscoveryEtcd {
        cert_file: Some(files.path("named.pem")),
        key_file: Some(files.path("named-key.pem")),
        ..right.clone()
    };
    let unknown = DiscoveryEtcd { cert_file: None, key_file: None, ..right.clone() };
    let nobody = DiscoveryEtcd { username: None, password_file: None, ..right.clone() };
    for (settings, word) in [
        (DiscoveryEtcd { username: Some("stranger".to_owned()), ..right.clone() }, "give the role"),
        (DiscoveryEtcd { ca_file: Some(files.path("other.pem")), ..right.clone() }, "certificate"),
        (named, "with a common name"),
        (unknown, "ertificate"),
        (nobody, "set `username` and `password_file`"),
    ] {
        let cluster = gateway(settings).await;
        // P8.5
        until_refused(&cluster, word).await;
        assert_eq!(source(&cluster).await["workers"], 0, "{word}");
    }
}

/// Settings of the user `gateway`, whose password is in a file of the directory.
fn as_user(etcd: &Etcd, dir: &std::path::Path) -> DiscoveryEtcd {
    std::fs::write(dir.join("password"), "right\n").unwrap();
    DiscoveryEtcd {
        name: "a".to_owned(),
        endpoints: vec![format!("http://127.0.0.1:{}", etcd.port())],
        prefix: "/w/".to_owned(),
        resync: Duration::from_secs(1),
        username: Some("gateway".to_owned()),
        password_file: Some(dir.join("password")),
        ..DiscoveryEtcd::default()
    }
}

/// Writes the description of a worker that does not run.
async fn put_worker(etcd: &Etcd, number: u16) {
    let url = format!("http://127.0.0.1:{number}");
    let worker = json!({ "url": url, "role": "aggregated", "engine": "vllm" });
    let (key, value) = (BASE64.encode(format!("/w/{number}")), BASE64.encode(worker.to_string()));
    etcd.call_as("root", "root", "/v3/kv/put", json!({ "key": key, "value": value })).await.unwrap();
}

#[tokio::test]
async fn p8_tokens_of_users_are_renewed_before_etcd_lets_them_end() {
    let Some(mut etcd) = Etcd::start().await else { return };
    add_users(&etcd).await;
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("jwt-key");
    std::fs::write(&key, "a key that only this etcd has").unwrap();
    let of_key = format!("--auth-token=jwt,sign-method=HS256,priv-key={},ttl=1s", key.display());
    let mut number = 0;
    for flag in ["--auth-token-ttl=1".to_owned(), of_key] {
        etcd.restart("http", std::slice::from_ref(&flag)).await;
        for resync in [1, 60].map(Duration::from_secs) {
            let cluster = gateway(DiscoveryEtcd { resync, ..as_user(&etcd, dir.path()) }).await;
            until(&cluster, "the keys are read", |source| source["state"] == "present").await;
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_millis(1_500)).await;
                number += 1;
                put_worker(&etcd, number).await;
                // P8.6
                until(&cluster, "the key is read", |source| source["workers"] == number).await;
            }
            // P8.6
            assert_eq!(source(&cluster).await["times_away"], 0, "{flag} {resync:?}");
        }
    }
}

#[tokio::test]
async fn p8_a_role_that_loses_its_permission_is_named_and_its_workers_stay() {
    let Some(etcd) = Etcd::start().await else { return };
    add_users(&etcd).await;
    let dir = tempfile::tempdir().unwrap();
    let cluster = gateway(as_user(&etcd, dir.path())).await;
    put_worker(&etcd, 1).await;
    until(&cluster, "the key is read", |source| source["workers"] == 1).await;
    let [key, end] = ["/w/", "/w0"].map(|key| BASE64.encode(key));
    let revoke = json!({ "role": "reader", "key": key, "range_end": end });
    etcd.call_as("root", "root", "/v3/auth/role/revoke", revoke).await.unwrap();
    // P8.5
    until_refused(&cluster, "give the role of this user the right to read").await;
    assert_eq!(source(&cluster).await["workers"], 1);
    let permission = json!({ "permType": "READ", "key": key, "range_end": end });
    let grant = json!({ "name": "reader", "perm": permission });
    etcd.call_as("root", "root", "/v3/auth/role/grant", grant).await.unwrap();
    put_worker(&etcd, 2).await;
    // P8.5
    until(&cluster, "it reads again", |source| source["workers"] == 2 && source["state"] == "present").await;
    etcd.call_as("root", "root", "/v3/auth/disable", json!({})).await.unwrap();
    let third = json!({ "url": "http://127.0.0.1:3", "role": "aggregated", "engine": "vllm" });
    etcd.put("/w/3", &third).await.unwrap();
    // P8.11
    until(&cluster, "it reads without a user", |source| source["workers"] == 3).await;
    etcd.call("/v3/auth/enable", json!({})).await.unwrap();
    put_worker(&etcd, 4).await;
    // P8.11
    until(&cluster, "it reads as its user again", |source| source["workers"] == 4).await;
}

#[tokio::test]
async fn p8_certificates_are_read_again_and_a_server_without_a_valid_one_is_not_used() {
    let Some(mut etcd) = Etcd::start().await else { return };
    let worker = json!({ "url": "http://127.0.0.1:1", "role": "aggregated", "engine": "vllm" });
    etcd.put("/w/1", &worker).await.unwrap();
    let (files, authority) = (files(), Authority::new().unwrap());
    let issue = |names: Vec<&'static str>, expired, unnamed| {
        authority.issue(&Leaf { names, expired, unnamed, ..Leaf::default() }).unwrap()
    };
    let settings = DiscoveryEtcd {
        name: "a".to_owned(),
        endpoints: vec![format!("https://127.0.0.1:{}", etcd.port())],
        prefix: "/w/".to_owned(),
        ca_file: Some(files.path("other.pem")),
        cert_file: Some(files.path("client.pem")),
        key_file: Some(files.path("client-key.pem")),
        resync: Duration::from_secs(1),
        ..DiscoveryEtcd::default()
    };
    let serve = |names, expired| {
        let server = issue(names, expired, false);
        files.write("cert.pem", &server.certificate_pem).unwrap();
        files.write("key.pem", &server.key_pem).unwrap();
        files.write("ca.pem", &authority.pem).unwrap();
    };
    serve(vec!["127.0.0.1"], false);
    etcd.restart("https", &tls_flags(&files)).await;
    let cluster = gateway(settings).await;
    // P8.5
    until_refused(&cluster, "UnknownIssuer").await;
    // etcd reads its certificate again for each connection.
    serve(vec!["127.0.0.1"], true);
    files.write("other.pem", &authority.pem).unwrap();
    // P8.7: the authority's file is read again
    until_refused(&cluster, "expired").await;
    serve(vec!["etcd.example"], false);
    // P8.5
    until_refused(&cluster, "not valid for name").await;
    serve(vec!["127.0.0.1"], false);
    // P8.5: the certificate of the gateway is one of another authority
    until_refused(&cluster, "ertificate").await;
    let client = issue(Vec::new(), false, true);
    files.write("client.pem", &client.certificate_pem).unwrap();
    files.write("client-key.pem", &client.key_pem).unwrap();
    // P8.7
    until(&cluster, "it reads with its new certificate", |source| source["workers"] == 1).await;
}
