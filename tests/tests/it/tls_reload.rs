//! Certificates that change while the gateway serves.

use std::{fs, sync::Arc, time::Duration};

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    TestCluster, TestClusterBuilder,
    tls::{Authority, Issued, Leaf, TlsFiles, connect},
};
use rustls::ClientConfig;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::{Instant, sleep},
};

/// A change is seen after one interval of two seconds and applied after the next.
const LIMIT: Duration = Duration::from_secs(20);

async fn is_served(cluster: &TestCluster, config: &Arc<ClientConfig>, issued: &Issued) -> bool {
    let stream = connect(cluster.gateway.address, config).await.unwrap();
    stream.get_ref().1.peer_certificates().is_some_and(|chain| chain.first() == Some(&issued.certificate))
}

async fn metric(cluster: &TestCluster, start: &str) -> f64 {
    cluster.metric(start).await.unwrap().iter().sum()
}

const IN_FORCE: &str = "pointsman_tls_last_reload_successful{listener=\"clients\"}";

async fn reasons(cluster: &TestCluster) -> String {
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    status["reasons"].to_string()
}

async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < LIMIT, "waited in vain: {what}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn j3_a_new_certificate_serves_new_connections_and_ends_none() {
    let authority = Authority::new().unwrap();
    let (first, second) = (authority.server().unwrap(), authority.server().unwrap());
    let files = TlsFiles::new(&first, None).unwrap();
    let sim =
        SimConfig { itl: Duration::from_millis(20), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let tls = files.tls();
    let builder = TestClusterBuilder::new().sim_with(sim, "").config(|config| config.server.tls = Some(tls));
    let cluster = builder.start().await;
    let config = authority.client(None, &[]).unwrap();
    assert!(is_served(&cluster, &config, &first).await);
    let expiry = "pointsman_tls_certificate_expiry_timestamp_seconds{listener=\"clients\"}";
    // J3.3: the certificates of the test authority expire in the year 4096
    assert!(metric(&cluster, expiry).await > 6e10);

    let mut stream = connect(cluster.gateway.address, &config).await.unwrap();
    let body = r#"{"model":"tiny","stream":true,"max_tokens":600,"ignore_eos":true,"messages":[{"role":"user","content":"x"}]}"#;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();

    // The key does not fit the certificate: nothing changes.
    files.write("cert.pem", &second.certificate_pem).unwrap();
    let refused = "pointsman_tls_reloads_total{listener=\"clients\",outcome=\"refused\"}";
    until("the mismatch is refused", async || metric(&cluster, refused).await >= 1.0).await;
    // J3.2
    assert!(is_served(&cluster, &config, &first).await);
    sleep(Duration::from_millis(2_500)).await;
    // J3.2: once for each content
    assert_eq!(metric(&cluster, refused).await, 1.0);
    // J3.2
    assert!(reasons(&cluster).await.contains("changed files are not in force: server.tls.key_file: "));
    assert_eq!(metric(&cluster, IN_FORCE).await, 0.0);
    files.write("cert.pem", &first.certificate_pem).unwrap();
    until("the first files are back", async || metric(&cluster, IN_FORCE).await == 1.0).await;
    // J3.2
    assert!(!reasons(&cluster).await.contains("not in force"));
    files.write("cert.pem", &second.certificate_pem).unwrap();

    files.write("key.pem", &second.key_pem).unwrap();
    until("the new certificate serves", async || is_served(&cluster, &config, &second).await).await;
    // J3.1
    assert_eq!(
        metric(&cluster, "pointsman_tls_reloads_total{listener=\"clients\",outcome=\"applied\"}").await,
        1.0
    );
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer);
    // J3.1: the stream that began before
    assert!(answer.contains("[DONE]"), "{}", answer.len());
    cluster.at_rest().await.unwrap();

    // A file that is missing, or a certificate that has expired, changes nothing either.
    let expired =
        authority.issue(&Leaf { names: vec!["127.0.0.1"], expired: true, ..Leaf::default() }).unwrap();
    files.write("cert.pem", &expired.certificate_pem).unwrap();
    files.write("key.pem", &expired.key_pem).unwrap();
    until("the expired one is refused", async || metric(&cluster, refused).await >= 2.0).await;
    fs::remove_file(files.path("key.pem")).unwrap();
    until("the missing one is refused", async || metric(&cluster, refused).await >= 3.0).await;
    // J3.2
    assert!(is_served(&cluster, &config, &second).await);
}

#[tokio::test]
async fn j3_an_expired_certificate_serves_from_the_start_until_it_is_renewed() {
    let authority = Authority::new().unwrap();
    let leaf = Leaf { names: vec!["127.0.0.1"], expired: true, ..Leaf::default() };
    let (expired, valid) = (authority.issue(&leaf).unwrap(), authority.server().unwrap());
    let files = TlsFiles::new(&expired, None).unwrap();
    let tls = files.tls();
    let read = |started: &Config| {
        let mut config = started.clone();
        config.server.http2.enabled = false;
        Ok(config)
    };
    let builder = TestClusterBuilder::new().config(|config| config.server.tls = Some(tls));
    let builder = builder.reread(None, read).sim(Dialect::Vllm, Role::Aggregated);
    let cluster = builder.start().await;
    let config = authority.client(None, &[]).unwrap();
    let refused = connect(cluster.gateway.address, &config).await.unwrap_err().to_string();
    // J3.5: clients refuse it themselves.
    assert!(refused.to_lowercase().contains("expired"), "{refused}");
    // J3.6
    assert!(reasons(&cluster).await.contains("expired on 2021-01-01 00:00:00 UTC: renew it"));
    // J3.5: a reload that leaves the file as it is.
    cluster.gateway.reload().await.unwrap();
    files.write("cert.pem", &valid.certificate_pem).unwrap();
    files.write("key.pem", &valid.key_pem).unwrap();
    until("the renewed one serves", async || connect(cluster.gateway.address, &config).await.is_ok()).await;
    // J3.6
    assert!(!reasons(&cluster).await.contains("expired on"));
}

#[tokio::test]
async fn n1_a_file_that_lost_its_tls_waits_for_an_operator() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pointsman.toml");
    fs::write(&path, "[server.tls]").unwrap();
    let authority = Authority::new().unwrap();
    let server = authority.server().unwrap();
    let files = TlsFiles::new(&server, None).unwrap();
    let read = {
        let path = path.clone();
        move |started: &Config| {
            let mut config = started.clone();
            config.server.tls = config.server.tls.filter(|_| fs::read(&path).unwrap() == b"[server.tls]");
            Ok(config)
        }
    };
    let tls = files.tls();
    let builder = TestClusterBuilder::new().config(|config| config.server.tls = Some(tls));
    let builder = builder.reread(Some(path.clone()), read).sim(Dialect::Vllm, Role::Aggregated);
    let cluster = builder.start().await;
    fs::write(&path, "[server]").unwrap();
    until("the refusal is told", async || {
        reasons(&cluster).await.contains("the file would serve clients without TLS")
    })
    .await;
    let config = authority.client(None, &[]).unwrap();
    // N1.4
    assert!(is_served(&cluster, &config, &server).await);
    cluster.gateway.reload().await.unwrap();
    // N1.4: as SIGHUP does.
    assert_eq!(cluster.client.get("/version").await.unwrap().status, 200);
}
