//! TLS and HTTP/2 with clients that others wrote: curl and openssl.

use std::{io::Write as _, net::SocketAddr, path::Path, time::Duration};

use pointsman_gateway::config::Tls;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    TestCluster, TestClusterBuilder,
    tls::{Authority, Leaf, TlsFiles},
};
use tokio::{process::Command, time::timeout};

const LIMIT: Duration = Duration::from_secs(60);
const CHAT: &str =
    r#"{"model":"tiny","stream":true,"max_tokens":5,"messages":[{"role":"user","content":"x"}]}"#;

/// Returns the output of a program, and its exit code.
async fn run(program: &str, arguments: &[&str]) -> (String, i32) {
    let mut command = Command::new(program);
    command.args(arguments).stdin(std::process::Stdio::null()).kill_on_drop(true);
    let output = timeout(LIMIT, command.output()).await.unwrap().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&text).into_owned(), output.status.code().unwrap_or(-1))
}

/// Returns whether a program can be started. If not, says that the test is skipped.
async fn is_installed(program: &str) -> bool {
    let version = if program == "openssl" { "version" } else { "--version" };
    let started = Command::new(program).arg(version).output().await;
    if started.is_err() {
        let _ = writeln!(std::io::stderr(), "skipped: {program} is not installed");
    }
    started.is_ok()
}

async fn cluster(tls: Tls) -> TestCluster {
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated);
    builder.config(|config| config.server.tls = Some(tls)).start().await
}

async fn curl(address: SocketAddr, authority: &Path, more: &[&str]) -> (String, i32) {
    let (url, authority) = (format!("https://localhost:{}", address.port()), authority.display().to_string());
    let path = if more.contains(&"-d") { "/v1/chat/completions" } else { "/v1/models" };
    let url = format!("{url}{path}");
    let resolve = format!("localhost:{}:127.0.0.1", address.port());
    let common = ["-sS", "-N", "--max-time", "30", "--noproxy", "*", "--resolve", &resolve];
    let shown = ["-w", "\n%{http_version} %{http_code}\n", "--cacert", &authority];
    run("curl", &[&common[..], &shown, more, &[&url]].concat()).await
}

#[tokio::test]
async fn j5_curl_speaks_http_2_and_1_1() {
    if !is_installed("curl").await {
        return;
    }
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    files.write("authority.pem", &authority.pem).unwrap();
    let (trusted, cluster) = (files.path("authority.pem"), cluster(files.tls()).await);
    let address = cluster.gateway.address;
    let (models, code) = curl(address, &trusted, &["--http2"]).await;
    // J5.1
    assert!(code == 0 && models.contains("tiny") && models.ends_with("2 200\n"), "{code} {models}");
    let (models, code) = curl(address, &trusted, &["--http1.1"]).await;
    // J5.1
    assert!(code == 0 && models.ends_with("1.1 200\n"), "{code} {models}");
    let json = ["-H", "content-type: application/json", "-d", CHAT];
    let (stream, code) = curl(address, &trusted, &[&["--http2"], &json[..]].concat()).await;
    // J5.2
    assert!(code == 0 && stream.contains("data: [DONE]") && stream.ends_with("2 200\n"), "{code} {stream}");
    let stranger = Authority::new().unwrap();
    files.write("stranger.pem", &stranger.pem).unwrap();
    let (refused, code) = curl(address, &files.path("stranger.pem"), &["--http2"]).await;
    // The certificate of the peer cannot be verified.
    assert_eq!(code, 60, "{refused}");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j2_curl_proves_who_it_is() {
    if !is_installed("curl").await {
        return;
    }
    let (authority, clients) = (Authority::new().unwrap(), Authority::new().unwrap());
    let files = TlsFiles::new(&authority.server().unwrap(), Some(&clients)).unwrap();
    files.write("authority.pem", &authority.pem).unwrap();
    let cluster = cluster(Tls { require_client_cert: true, ..files.tls() }).await;
    let own = clients.issue(&Leaf { names: vec!["client.example"], ..Leaf::default() }).unwrap();
    files.write("own.pem", &own.certificate_pem).unwrap();
    files.write("own.key", &own.key_pem).unwrap();
    let path = |name| files.path(name).display().to_string();
    let (certificate, key) = (path("own.pem"), path("own.key"));
    let (address, trusted) = (cluster.gateway.address, files.path("authority.pem"));
    let (models, code) = curl(address, &trusted, &["--http2", "--cert", &certificate, "--key", &key]).await;
    // J2.1
    assert!(code == 0 && models.ends_with("2 200\n"), "{code} {models}");
    let (refused, code) = curl(address, &trusted, &["--http2"]).await;
    // J2.2
    assert!(code != 0 && !refused.contains("tiny"), "{code} {refused}");
}

/// Returns the report of `openssl s_client` on a handshake, and its exit code.
async fn s_client(address: SocketAddr, more: &[&str]) -> (String, i32) {
    let address = address.to_string();
    run("openssl", &[&["s_client", "-connect", &address][..], more].concat()).await
}

#[tokio::test]
async fn j1_openssl_finds_no_version_below_the_oldest_allowed() {
    if !is_installed("openssl").await {
        return;
    }
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), None).unwrap();
    let both = cluster(files.tls()).await;
    let only = cluster(Tls { min_version: "1.3".to_owned(), ..files.tls() }).await;
    let old = ["-tls1_1", "-cipher", "ALL:@SECLEVEL=0"];
    for (listener, version, accepted) in [
        (&both, &["-tls1_3"][..], true),
        (&both, &["-tls1_2"], true),
        (&both, &old, false),
        (&only, &["-tls1_3"], true),
        (&only, &["-tls1_2"], false),
    ] {
        let (report, code) = s_client(listener.gateway.address, version).await;
        // J1.1
        assert_eq!(code == 0, accepted, "{version:?}: {report}");
        assert_eq!(report.contains("Cipher is (NONE)"), !accepted, "{version:?}: {report}");
    }
    let (report, _) = s_client(both.gateway.address, &["-alpn", "http/1.1,h2"]).await;
    // J5.1
    assert!(report.contains("ALPN protocol: h2"), "{report}");
    let (report, _) = s_client(both.gateway.address, &["-alpn", "http/1.1"]).await;
    // J5.1
    assert!(report.contains("ALPN protocol: http/1.1"), "{report}");
    let (report, code) = s_client(both.gateway.address, &["-alpn", "spdy/3"]).await;
    assert!(code != 0 && report.contains("no application protocol"), "{report}");
}
