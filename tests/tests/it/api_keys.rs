//! API keys by their digests, and tokens of operators with roles.

use std::{path::Path, time::Duration};

use futures_util::future::join_all;
use pointsman_gateway::config::{Auth, Config, KeyDigest, KeyEntry, OperatorEntry, Role};
use pointsman_sim::{Dialect, Role as EngineRole, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder};
use serde_json::json;

fn entry(id: &str, tenant: &str, digest: KeyDigest) -> KeyEntry {
    KeyEntry { id: id.into(), tenant: tenant.into(), digest: Some(digest.to_string().into()) }
}

async fn cluster(auth: Auth) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            config.auth = auth;
            config.decisions.facts = vec!["tenant-hash".into()];
        })
        .sim_with(SimConfig::instant(Dialect::Vllm, EngineRole::Aggregated), "")
        .start()
        .await
}

pub(crate) async fn ask(cluster: &TestCluster, headers: &[(&str, &str)]) -> (u16, String) {
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2}).to_string();
    let reply = cluster.client.post(COMPLETIONS, headers, body).await.unwrap();
    (reply.status.as_u16(), reply.code())
}

async fn with_key(cluster: &TestCluster, key: &str) -> (u16, String) {
    ask(cluster, &[("authorization", &format!("Bearer {key}"))]).await
}

async fn tenant_hash(cluster: &TestCluster) -> String {
    let facts = cluster.newest_facts().await.unwrap();
    facts["tenant-hash"].to_string()
}

fn ok() -> (u16, String) {
    (200, String::new())
}

/// A gateway whose clients' keys are in a directory.
async fn with_key_dir(dir: &Path) -> TestCluster {
    let key_dir = Some(dir.to_owned());
    TestClusterBuilder::new()
        .config(|config| config.auth = Auth { key_dir, ..Auth::default() })
        .reread(None, |started| Ok(started.clone()))
        .sim(Dialect::Vllm, EngineRole::Aggregated)
        .start()
        .await
}

#[tokio::test]
async fn k1_a_key_is_known_by_its_digest_in_the_file_in_a_file_and_in_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("digest"), format!("{}\n", KeyDigest::sha256("of-file"))).unwrap();
    let text = format!("[[auth.keys]]\nid = 'f'\ndigest = {{ file = '{}/digest' }}\n", dir.path().display());
    std::fs::write(dir.path().join("p.toml"), text).unwrap();
    let of_file = Config::read(&dir.path().join("p.toml")).unwrap().auth.keys.remove(0);
    let keys = dir.path().join("keys");
    std::fs::create_dir(&keys).unwrap();
    let text = |id: &str, key: &str| {
        format!("[[auth.keys]]\nid = '{id}'\ntenant = 'team-b'\ndigest = '{}'\n", KeyDigest::sha256(key))
    };
    std::fs::write(keys.join("b.toml"), text("b", "of-dir")).unwrap();
    std::fs::write(keys.join(".hidden"), "no TOML").unwrap();
    let slow = KeyDigest::argon2id("slow.made-up").unwrap();
    let cluster = cluster(Auth {
        keys: vec![
            entry("a", "team-a", KeyDigest::sha256("of-config")),
            entry("slow", "team-a", slow),
            of_file,
        ],
        key_dir: Some(keys),
        ..Auth::default()
    })
    .await;
    let mut hashes = Vec::new();
    for key in ["of-config", "slow.made-up", "of-dir", "of-file"] {
        // K1.1
        assert_eq!(with_key(&cluster, key).await, ok(), "{key}");
        hashes.push(tenant_hash(&cluster).await);
    }
    // K1.1: the tenant of the key fills the fact.
    assert_eq!(hashes[0], hashes[1]);
    assert!(hashes[0] != hashes[2] && hashes[2] != "0" && hashes[3] == "0", "{hashes:?}");
    let digest = KeyDigest::sha256("of-config").to_string();
    for wrong in ["of-confi", "slow.made-u", "slow.", "slow", &digest, &digest[7..]] {
        assert_eq!(with_key(&cluster, wrong).await, (401, "unauthorized".into()), "{wrong}");
    }
    assert_eq!(ask(&cluster, &[]).await, (401, "unauthorized".into()));
    cluster.at_rest().await.unwrap();
}

#[test]
fn k1_a_plain_key_is_refused() {
    for text in ["[server]\napi_keys = ['sk-SECRET']\n", "[server]\ntenants = { a = ['sk-SECRET'] }\n"] {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let problems = Config::read(file.path()).unwrap_err().to_string();
        // K1.2
        assert!(problems.contains("unknown key"), "{problems}");
        assert!(!problems.contains("SECRET"), "{problems}");
    }
    let mut config = Config::default();
    config.auth.keys =
        vec![KeyEntry { digest: Some("sk-SECRET".into()), ..entry("a", "", KeyDigest::sha256("k")) }];
    let problems = config.resolve().unwrap_err().to_string();
    // K1.2
    assert!(problems.contains("auth.keys[0].digest: the value is not a digest"), "{problems}");
    assert!(!problems.contains("SECRET"), "{problems}");
}

#[tokio::test]
async fn k1_two_keys_in_one_request_are_refused() {
    let auth = Auth { keys: vec![entry("a", "", KeyDigest::sha256("a-key"))], ..Auth::default() };
    let cluster = cluster(auth).await;
    let (bearer, other) = (("authorization", "Bearer a-key"), ("x-api-key", "other"));
    // K1.5
    assert_eq!(ask(&cluster, &[bearer, other]).await, (400, "invalid_request".into()));
    assert_eq!(ask(&cluster, &[bearer, bearer]).await, (400, "invalid_request".into()));
    assert_eq!(ask(&cluster, &[bearer, ("x-api-key", "a-key")]).await, ok());
    assert_eq!(ask(&cluster, &[bearer, ("x-api-key", "")]).await, ok());
    assert_eq!(ask(&cluster, &[("x-api-key", "")]).await, (401, "unauthorized".into()));
    let long = "x".repeat(30_000);
    assert_eq!(with_key(&cluster, &long).await, (401, "unauthorized".into()));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k1_a_flood_of_wrong_slow_keys_delays_no_other_key() {
    let slow = KeyDigest::argon2id("slow.right").unwrap();
    let cluster = cluster(Auth {
        keys: vec![entry("slow", "", slow), entry("fast", "", KeyDigest::sha256("fast-key"))],
        ..Auth::default()
    })
    .await;
    assert_eq!(with_key(&cluster, "slow.right").await, ok());
    let wrong: Vec<String> = (0..100).map(|number| format!("slow.{number}")).collect();
    let flood = join_all(wrong.iter().map(|key| with_key(&cluster, key)));
    let others = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        for key in ["fast-key", "slow.right", "fast-key", "slow.right"] {
            // K1.4: the right keys wait for no verification, and so none is answered that too many wait.
            assert_eq!(with_key(&cluster, key).await, ok(), "{key}");
        }
    };
    let (flood, ()) = tokio::join!(flood, others);
    // K1.4: only few of the wrong ones cost one.
    let busy = flood.iter().filter(|(status, code)| *status == 503 && code == "keys_busy").count();
    // I_keys_busy
    assert!(busy >= 50, "{busy} of 100 were refused: {flood:?}");
    assert!(flood.iter().all(|(status, _)| *status != 200));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k1_a_reload_reads_the_keys_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.toml");
    let write = |key: &str| {
        let text = format!("[[auth.keys]]\nid = 'a'\ndigest = '{}'\n", KeyDigest::sha256(key));
        std::fs::write(&file, text).unwrap();
    };
    write("first");
    let cluster = with_key_dir(dir.path()).await;
    assert_eq!(with_key(&cluster, "first").await, ok());
    write("second");
    let reloaded = cluster.gateway.reload().await.unwrap();
    assert_eq!(reloaded.applied, ["auth.key_dir"]);
    // K1.6
    assert_eq!(with_key(&cluster, "first").await.0, 401);
    assert_eq!(with_key(&cluster, "second").await, ok());
    std::fs::write(&file, "[[auth.keys]]\nid = 'a'\ndigest = 'sk-SECRET'\n").unwrap();
    let refused = cluster.gateway.reload().await.unwrap_err().to_string();
    assert!(refused.contains("a.toml") && !refused.contains("SECRET"), "{refused}");
    assert_eq!(with_key(&cluster, "second").await, ok(), "a bad file changes nothing");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k1_the_removal_of_the_last_key_lets_nobody_in() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.toml");
    let entry = format!("[[auth.keys]]\nid = 'a'\ndigest = '{}'\n", KeyDigest::sha256("first"));
    let cluster = with_key_dir(dir.path()).await;
    let refused = async || {
        assert_eq!(ask(&cluster, &[]).await, (401, "unauthorized".into()));
        assert_eq!(with_key(&cluster, "first").await, (401, "unauthorized".into()));
    };
    // K1.9: from the start, and after the last key was revoked.
    refused().await;
    std::fs::write(&file, &entry).unwrap();
    cluster.gateway.reload().await.unwrap();
    assert_eq!(with_key(&cluster, "first").await, ok());
    std::fs::remove_file(&file).unwrap();
    cluster.gateway.reload().await.unwrap();
    refused().await;
    std::fs::write(&file, &entry).unwrap();
    cluster.gateway.reload().await.unwrap();
    for empty in ["", "# team a\n", "[auth]\nkeys = []\n"] {
        std::fs::write(&file, empty).unwrap();
        // K1.9
        let problem = cluster.gateway.reload().await.unwrap_err().to_string();
        assert!(problem.contains("a.toml): it holds no key: write what"), "{problem}");
        assert_eq!(with_key(&cluster, "first").await, ok(), "the keys in force stay");
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k1_the_status_names_keys_that_are_missing() {
    let dir = tempfile::tempdir().unwrap();
    let (keys, target) = (dir.path().join("keys"), dir.path().join("a.toml"));
    std::fs::create_dir(&keys).unwrap();
    std::fs::write(&target, format!("[[auth.keys]]\nid = 'a'\ndigest = '{}'\n", KeyDigest::sha256("first")))
        .unwrap();
    std::os::unix::fs::symlink(&target, keys.join("a.toml")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("gone"), keys.join("b.toml")).unwrap();
    let cluster = with_key_dir(&keys).await;
    let reasons = async || {
        let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
        status["reasons"].to_string()
    };
    let (links, none) = (
        |count: u32| {
            format!("`auth.key_dir` has links that lead to no file ({count}), and their keys are refused")
        },
        "`auth.key_dir` holds no key: every client is refused",
    );
    // K1.10
    assert!(reasons().await.contains(&links(1)) && !reasons().await.contains(none));
    assert_eq!(with_key(&cluster, "first").await, ok());
    std::fs::remove_file(&target).unwrap();
    cluster.gateway.reload().await.unwrap();
    assert!(reasons().await.contains(&links(2)) && reasons().await.contains(none), "{}", reasons().await);
    assert_eq!(with_key(&cluster, "first").await.0, 401);
    std::fs::remove_file(keys.join("a.toml")).unwrap();
    std::fs::remove_file(keys.join("b.toml")).unwrap();
    cluster.gateway.reload().await.unwrap();
    assert!(!reasons().await.contains("lead to no file") && reasons().await.contains(none));
}

#[tokio::test]
async fn k1_a_backup_of_a_key_file_opens_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let entry =
        |id: &str, key: &str| format!("[[auth.keys]]\nid = '{id}'\ndigest = '{}'\n", KeyDigest::sha256(key));
    std::fs::write(dir.path().join("team-a"), entry("a", "first")).unwrap();
    let cluster = with_key_dir(dir.path()).await;
    assert_eq!(with_key(&cluster, "first").await, ok());
    // The key of team a is replaced, and an editor keeps the file as it was.
    for backup in ["team-a~", "team-a.bak", "team-a.swp", "team-a.RPMSAVE", "team-a.dpkg-old", "#team-a#"] {
        std::fs::rename(dir.path().join("team-a"), dir.path().join(backup)).unwrap();
        std::fs::write(dir.path().join("team-a"), entry("a2", "second")).unwrap();
        cluster.gateway.reload().await.unwrap();
        // K1.11
        assert_eq!(with_key(&cluster, "first").await.0, 401, "{backup}");
        assert_eq!(with_key(&cluster, "second").await, ok());
        let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
        let told = format!("names are those of backups (1), and their keys are refused: `{backup}`;");
        assert!(status["reasons"].to_string().contains(&told), "{}", status["reasons"]);
        std::fs::rename(dir.path().join(backup), dir.path().join("team-a")).unwrap();
        cluster.gateway.reload().await.unwrap();
        assert_eq!(with_key(&cluster, "first").await, ok());
    }
    let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
    assert!(!status["reasons"].to_string().contains("backups"), "{}", status["reasons"]);
}

#[tokio::test]
async fn k1_a_changed_key_file_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (config, keys, digest) =
        (dir.path().join("pointsman.toml"), dir.path().join("keys"), dir.path().join("digest"));
    let entry = |id: &str, digest: &str| format!("[[auth.keys]]\nid = '{id}'\ndigest = {digest}\n");
    let of = |key: &str| KeyDigest::sha256(key).to_string();
    std::fs::create_dir(&keys).unwrap();
    std::fs::write(keys.join("a.toml"), entry("a", &format!("'{}'", of("first")))).unwrap();
    std::fs::write(&digest, of("third")).unwrap();
    let named = entry("c", &format!("{{ file = '{}' }}", digest.display()));
    std::fs::write(&config, format!("[auth]\nkey_dir = '{}'\n{named}", keys.display())).unwrap();
    let read = {
        let config = config.clone();
        move |started: &Config| {
            let mut read = started.clone();
            read.auth = Config::read(&config)?.auth;
            read.check()?;
            Ok(read)
        }
    };
    let auth = read(&Config::default()).unwrap().auth;
    let cluster = TestClusterBuilder::new()
        .config(|config| config.auth = auth)
        .reread(Some(config), read)
        .sim(Dialect::Vllm, EngineRole::Aggregated)
        .start()
        .await;
    assert_eq!(with_key(&cluster, "first").await, ok());
    assert_eq!(with_key(&cluster, "third").await, ok());
    let becomes = async |key: &str, status: u16| {
        // Not often: wrong keys are counted.
        for _ in 0..20 {
            if with_key(&cluster, key).await.0 == status {
                return true;
            }
            tokio::time::sleep(Duration::from_secs(3)).await;
        }
        false
    };
    // K1.6: as a Secret of Kubernetes is renewed, and without a signal.
    std::fs::write(keys.join(".new"), entry("a", &format!("'{}'", of("second")))).unwrap();
    std::fs::rename(keys.join(".new"), keys.join("a.toml")).unwrap();
    assert!(becomes("second", 200).await);
    assert_eq!(with_key(&cluster, "first").await.0, 401);
    std::fs::write(&digest, of("fourth")).unwrap();
    assert!(becomes("fourth", 200).await);
    assert_eq!(with_key(&cluster, "third").await.0, 401);
    // The keys in force stay until the file is right again.
    std::fs::write(keys.join("a.toml"), "[[auth.keys").unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(with_key(&cluster, "second").await, ok());
    std::fs::remove_file(keys.join("a.toml")).unwrap();
    assert!(becomes("second", 401).await);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn k3_a_viewer_reads_and_an_operator_changes() {
    let operator = |id: &str, role, token: &str| OperatorEntry {
        id: id.into(),
        role,
        digest: Some(KeyDigest::sha256(token).to_string().into()),
    };
    let auth = Auth {
        operators: vec![
            operator("grafana", Role::Viewer, "reads"),
            operator("alice", Role::Operator, "changes"),
        ],
        ..Auth::default()
    };
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.auth = auth;
            config.server.admin_token = Some("s3cret".into());
            config.server.admin_token_reads = true;
        })
        .sim(Dialect::Vllm, EngineRole::Aggregated)
        .start()
        .await;
    let status = async |method: &str, path: &str, token: Option<&str>| {
        let token = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<_> = token.iter().map(|token| ("authorization", token.as_str())).collect();
        let reply = cluster.admin.send(method, path, &headers).await.unwrap();
        (reply.status.as_u16(), reply.code())
    };
    // K3.1
    assert_eq!(status("GET", "/workers", Some("reads")).await.0, 200);
    assert_eq!(status("POST", "/policies/reload", Some("reads")).await, (403, "forbidden".into()));
    assert_eq!(status("DELETE", "/workers/1", Some("reads")).await, (403, "forbidden".into()));
    for token in ["changes", "s3cret"] {
        assert_eq!(status("GET", "/workers", Some(token)).await.0, 200);
        assert_eq!(status("POST", "/policies/reload", Some(token)).await.0, 200);
    }
    for (method, path) in [("GET", "/workers"), ("POST", "/policies/reload")] {
        assert_eq!(status(method, path, None).await, (401, "unauthorized".into()));
        assert_eq!(status(method, path, Some("other")).await, (401, "unauthorized".into()));
    }
    assert_eq!(status("GET", "/healthz", None).await.0, 200);
}
