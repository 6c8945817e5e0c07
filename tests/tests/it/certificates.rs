//! Certificates as the identity of clients and operators.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use pointsman_gateway::config::{CertificateEntry, Config, KeyDigest, KeyEntry, Role};
use pointsman_sim::{Dialect, Role as EngineRole, SimConfig};
use pointsman_tests::{
    TestCluster, TestClusterBuilder,
    tls::{Authority, Issued, Leaf, TlsFiles, connect},
};
use rustls::ClientConfig;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

const BODY: &str = r#"{"model":"tiny","prompt":"hello","max_tokens":2}"#;

/// A gateway whose listeners ask for certificates of `authority`.
struct Site {
    authority: Authority,
    cluster: TestCluster,
    _files: TlsFiles,
}

fn entry(name: &str, tenant: &str, role: Option<Role>) -> CertificateEntry {
    CertificateEntry { name: name.into(), tenant: tenant.into(), role }
}

fn clients() -> Vec<CertificateEntry> {
    vec![entry("spiffe://prod/team-a", "team-a", None), entry("Bot.Team-B.example", "team-b", None)]
}

fn operators() -> Vec<CertificateEntry> {
    let entry = |name, role| entry(name, "", Some(role));
    vec![entry("spiffe://ops/reader", Role::Viewer), entry("spiffe://ops/admin", Role::Operator)]
}

impl Site {
    async fn start(change: impl FnOnce(&mut Config)) -> Self {
        let authority = Authority::new().unwrap();
        let files = TlsFiles::new(&authority.server().unwrap(), Some(&authority)).unwrap();
        let cluster = TestClusterBuilder::new()
            .config(|config| {
                config.server.tls = Some(files.tls());
                config.auth.certificates = clients();
                config.decisions.facts = vec!["tenant-hash".into()];
                change(config);
            })
            .sim_with(SimConfig::instant(Dialect::Vllm, EngineRole::Aggregated), "")
            .start()
            .await;
        Self { authority, cluster, _files: files }
    }

    fn with_uri(&self, uri: &'static str) -> Issued {
        self.authority.issue(&Leaf { uri: Some(uri), ..Leaf::default() }).unwrap()
    }

    fn client(&self, own: Option<&Issued>) -> Arc<ClientConfig> {
        self.authority.client(own, &[]).unwrap()
    }

    /// Sends a completion with further headers; returns the status.
    async fn ask(&self, own: Option<&Issued>, headers: &str) -> u16 {
        let address = self.cluster.gateway.address;
        send(address, &self.client(own), "POST /v1/completions", headers, BODY).await.0
    }

    async fn tenant_hash(&self) -> String {
        let facts = self.cluster.newest_facts().await.unwrap();
        facts["tenant-hash"].to_string()
    }
}

/// Sends a request on a connection of its own; returns the status and the whole answer.
async fn send(
    address: SocketAddr,
    config: &Arc<ClientConfig>,
    line: &str,
    headers: &str,
    body: &str,
) -> (u16, String) {
    let mut stream = connect(address, config).await.unwrap();
    let length = body.len();
    let request =
        format!("{line} HTTP/1.1\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(Duration::from_secs(10), stream.read_to_end(&mut answer)).await.unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    (answer[9..12].parse().unwrap(), answer)
}

const JSON: &str = "host: 127.0.0.1\r\ncontent-type: application/json\r\n";

#[tokio::test]
async fn k6_a_listed_certificate_is_accepted_for_its_tenant() {
    let site = Site::start(|_| {}).await;
    let team_a = site.with_uri("spiffe://prod/team-a");
    let of_b = Leaf { names: vec!["bot.team-b.example"], ..Leaf::default() };
    let team_b = site.authority.issue(&of_b).unwrap();
    // K6.1
    assert_eq!(site.ask(Some(&team_a), JSON).await, 200);
    let hash_a = site.tenant_hash().await;
    assert_eq!(site.ask(Some(&team_b), JSON).await, 200);
    let hash_b = site.tenant_hash().await;
    let hash = |name: &str| pointsman_workers::name_hash(name.as_bytes(), 0).to_string();
    // K6.1: the tenant of each
    assert_eq!((hash_a, hash_b), (hash("team-a"), hash("team-b")));
    let stranger = site.with_uri("spiffe://prod/team-c");
    // The authority lets this client choose a DNS name, and it chose the text of a URI entry.
    let posing = site.authority.issue(&Leaf { names: vec!["team-a"], ..Leaf::default() }).unwrap();
    for unlisted in [Some(&stranger), Some(&posing), None] {
        // K6.1
        assert_eq!(site.ask(unlisted, JSON).await, 401);
    }
    site.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k6_a_key_is_judged_without_the_certificate() {
    let site = Site::start(|config| {
        let digest = Some(KeyDigest::sha256("sk-c").to_string().into());
        config.auth.keys = vec![KeyEntry { id: "c".into(), tenant: "team-c".into(), digest }];
    })
    .await;
    let team_a = site.with_uri("spiffe://prod/team-a");
    let with_key = |key: &str| format!("{JSON}authorization: Bearer {key}\r\n");
    assert_eq!(site.ask(Some(&team_a), &with_key("sk-c")).await, 200);
    // K6.2
    let hash = pointsman_workers::name_hash(b"team-c", 0).to_string();
    assert_eq!(site.tenant_hash().await, hash);
    // K6.2
    assert_eq!(site.ask(Some(&team_a), &with_key("sk-wrong")).await, 401);
    assert_eq!(site.ask(Some(&team_a), JSON).await, 200);
    assert_eq!(site.ask(None, &with_key("sk-c")).await, 200);
}

#[tokio::test]
async fn k6_an_operators_certificate_has_a_role_and_a_browser_gains_nothing_from_it() {
    let authority = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), Some(&authority)).unwrap();
    let site = Site::start(|config| {
        config.server.admin_tls = Some(files.tls());
        config.server.admin_token_reads = true;
        config.auth.certificates.extend(operators());
    })
    .await;
    let address = site.cluster.gateway.admin;
    let of = |uri: &'static str| {
        let issued = authority.issue(&Leaf { uri: Some(uri), ..Leaf::default() }).unwrap();
        authority.client(Some(&issued), &[]).unwrap()
    };
    let (reader, admin) = (of("spiffe://ops/reader"), of("spiffe://ops/admin"));
    let read = async |who: &Arc<ClientConfig>, headers: &str| {
        send(address, who, "GET /workers", headers, "").await.0
    };
    let change = async |who: &Arc<ClientConfig>, headers: &str| {
        send(address, who, "POST /config/reload", headers, "{}").await.0
    };
    // K6.3
    assert_eq!((read(&reader, JSON).await, change(&reader, JSON).await), (200, 403));
    let changed = change(&admin, JSON).await;
    // K6.3: let through; a gateway without a file has nothing to reload
    assert!(!matches!(changed, 401 | 403 | 415), "{changed}");
    for other in [of("spiffe://prod/team-a"), of("spiffe://x"), authority.client(None, &[]).unwrap()] {
        // K6.3
        assert_eq!((read(&other, JSON).await, change(&other, JSON).await), (401, 401));
    }
    let foreign_host = JSON.replace("127.0.0.1", "evil.example");
    let foreign_origin = format!("{JSON}origin: https://evil.example\r\n");
    let of_site = format!("{JSON}sec-fetch-site: cross-site\r\n");
    // K6.4
    assert_eq!([read(&admin, &foreign_host).await, change(&admin, &foreign_host).await], [403; 2]);
    // K6.4
    assert_eq!([change(&admin, &foreign_origin).await, change(&admin, &of_site).await], [403; 2]);
    // K6.4
    assert_eq!(change(&admin, "host: 127.0.0.1\r\ncontent-type: text/plain\r\n").await, 415);
}
