//! Secrets towards NATS and etcd, which must appear nowhere.

use futures_util::future::join_all;
use nkeys::KeyPair;
use pointsman_gateway::config::{DiscoveryEtcd, Replicas};
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{TestCluster, TestClusterBuilder, etcd::Etcd, log::Log, nats::Nats, own_process};
use serde_json::json;

use crate::replicas::secured::{credentials, of_account};

#[tokio::test]
async fn k5_secrets_towards_nats_and_etcd_appear_nowhere() {
    own_process!();
    let levels =
        "info,pointsman=trace,async_nats=trace,reqwest=trace,hyper=trace,hyper_util=trace,rustls=debug";
    let log = Log::with_levels(levels);
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).unwrap();
        Some(dir.path().join(name))
    };
    let account = KeyPair::new_account();
    let users = "authorization { users = [ { user: a, password: PLANTED-right } ] }";
    let (Some(nats), Some(of_operator), Some(etcd)) =
        (Nats::start(users).await, Nats::start(&of_account(&account)).await, Etcd::start().await)
    else {
        return;
    };
    let (nkey, jwt) = (KeyPair::new_user().seed().unwrap(), credentials(&account, None));
    let user = |name: &str, password: &str| Replicas {
        username: Some("a".to_owned()),
        password_file: file(name, password),
        ..Replicas::default()
    };
    let settings = [
        (&nats, user("right", "PLANTED-right\n")),
        (&nats, user("wrong", "PLANTED-wrong\n")),
        (&nats, Replicas { token_file: file("token", "PLANTED-token"), ..Replicas::default() }),
        (&nats, Replicas { nkey_file: file("nkey", &nkey), ..Replicas::default() }),
        (&of_operator, Replicas { credentials_file: file("right.creds", &jwt), ..Replicas::default() }),
        (&nats, Replicas { credentials_file: file("wrong.creds", &jwt), ..Replicas::default() }),
    ];
    crate::etcd::add_users(&etcd).await;
    let gateways = settings.into_iter().enumerate().map(|(place, (server, replicas))| {
        let password = if place == 0 { "right\n" } else { "PLANTED-etcd\n" };
        let etcd = DiscoveryEtcd {
            name: "a".to_owned(),
            endpoints: vec![format!("http://127.0.0.1:{}", etcd.port())],
            username: Some("gateway".to_owned()),
            password_file: file(&format!("etcd-{place}"), password),
            prefix: "/w/".to_owned(),
            ..DiscoveryEtcd::default()
        };
        let name = format!("g{place}");
        let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(|config| {
            config.replicas = Replicas { servers: vec![server.url()], name, ..replicas };
            config.discovery.etcd = vec![etcd];
        });
        async move {
            let cluster = builder.start().await;
            settled(&cluster).await;
            let mut shown = format!("{:?}", cluster.gateway.state());
            for path in ["/replicas", "/discovery", "/readyz", "/metrics", "/workers"] {
                shown.push_str(&String::from_utf8_lossy(&cluster.admin.get(path).await.unwrap().body));
            }
            cluster.gateway.drain().await;
            shown
        }
    });
    let shown = join_all(gateways).await.concat();
    let logged = log.text();
    assert!(logged.contains("connected to NATS") && logged.contains("write operation: CONNECT"));
    let claims = jwt.lines().find(|line| line.contains('.')).unwrap();
    let seed = jwt.lines().find(|line| line.starts_with("SU")).unwrap();
    for text in [&shown, &logged] {
        for secret in ["PLANTED", &nkey, claims, seed, "\"password\":\"right\""] {
            let at = text.find(secret);
            // Q4.8
            assert!(at.is_none(), "{}", &text[at.unwrap().saturating_sub(300)..][..400]);
        }
    }
}

/// Waits until NATS and etcd have let the gateway in or refused it.
async fn settled(cluster: &TestCluster) {
    for _ in 0..1_000 {
        let get = async |path| cluster.admin.get(path).await.unwrap().json().unwrap();
        let (replicas, discovery) = (get("/replicas").await, get("/discovery").await);
        let sources = discovery["sources"].as_array().unwrap();
        let source = sources.iter().find(|source| source["name"] == "etcd:a").unwrap();
        let nats = replicas["connected"] == json!(true) || replicas["problem"].is_string();
        if nats && source["state"] != "starting" {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("NATS or etcd did not answer");
}
