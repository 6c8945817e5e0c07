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
async fn add_users(etcd: &Etcd) {
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

#[tokio::test]
async fn p8_an_etcd_with_tls_and_users_names_workers_and_what_it_refuses_is_named() {
    let Some(mut etcd) = Etcd::start().await else { return };
    let engine = Sim::start(SimConfig::instant(Dialect::Vllm, Role::Aggregated)).await.unwrap();
    let worker = json!({ "url": engine.url(), "role": "aggregated", "engine": "vllm" });
    etcd.put("/w/1", &worker).await.unwrap();
    add_users(&etcd).await;
    let files = files();
    let path = |name: &str| files.path(name).display().to_string();
    let flags = ["--client-cert-auth".to_owned()].into_iter().chain(
        [("cert-file", "cert.pem"), ("key-file", "key.pem"), ("trusted-ca-file", "ca.pem")]
            .map(|(flag, file)| format!("--{flag}={}", path(file))),
    );
    etcd.restart("https", &flags.collect::<Vec<_>>()).await;
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
    let of = async |settings: DiscoveryEtcd| {
        let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
        builder.config(|config| config.discovery.etcd = vec![settings]).start().await.unwrap()
    };
    files.write("password", "wrong\n").unwrap();
    let cluster = of(right.clone()).await;
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
        (DiscoveryEtcd { username: Some("stranger".to_owned()), ..right.clone() }, "permission denied"),
        (DiscoveryEtcd { ca_file: Some(files.path("other.pem")), ..right.clone() }, "certificate"),
        (named, "with a common name"),
        (unknown, "ertificate"),
        (nobody, "set `username` and `password_file`"),
    ] {
        let cluster = of(settings).await;
        // P8.5
        until_refused(&cluster, word).await;
        assert_eq!(source(&cluster).await["workers"], 0, "{word}");
    }
}
