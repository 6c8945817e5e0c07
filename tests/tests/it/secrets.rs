//! Secrets: where they may come from, and where they must not appear.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{io::Read as _, path::Path};

use pointsman_gateway::config::{Config, Environment, KeyDigest};
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestClusterBuilder, log::Log, own_process, raw_engine,
};
use serde_json::json;

const TRUSTED_KEY: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";

fn load(text: &str) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.toml");
    std::fs::write(&file, text.replace("DIR", dir.path().to_str().unwrap())).unwrap();
    std::fs::write(dir.path().join("secret"), "PLANTED-of-file\n").unwrap();
    std::fs::write(dir.path().join("salt"), "77\n").unwrap();
    std::fs::write(dir.path().join("digest"), format!("{}\n", KeyDigest::sha256("k"))).unwrap();
    let trusted = format!("untrusted comment: a key\n{TRUSTED_KEY}\n");
    std::fs::write(dir.path().join("minisign.pub"), trusted).unwrap();
    Config::load(Some(&file), &Environment::default(), |_| {}).map_err(|error| error.to_string())
}

#[test]
fn k5_a_secret_may_be_in_the_environment_or_in_a_file() {
    // Cargo sets this variable for tests.
    let worker = "[[workers]]\nurl = 'http://127.0.0.1:9'\nrole = 'decode'\nengine = 'vllm'\n";
    let text = format!(
        "[server]\nadmin_token = {{ env = 'CARGO_PKG_NAME' }}\n\
         [[auth.keys]]\nid = 'a'\ndigest = {{ file = 'DIR/digest' }}\n\
         [policies]\nrequire_signed = true\ntrusted_keys = [{{ file = 'DIR/minisign.pub' }}]\n\
         [routing]\nhash_salt = {{ file = 'DIR/salt' }}\n{worker}api_key = {{ file = 'DIR/secret' }}\n"
    );
    let config = load(&text).unwrap();
    // K5.1
    assert_eq!(config.server.admin_token.as_ref().unwrap().expose(), env!("CARGO_PKG_NAME"));
    assert_eq!(config.auth.keys[0].digest.as_ref().unwrap().expose(), KeyDigest::sha256("k").to_string());
    assert!(config.policies.trusted_keys[0].ends_with(TRUSTED_KEY));
    assert_eq!(config.routing.hash_salt.expose(), 77);
    assert_eq!(config.workers[0].api_key.as_deref(), Some("PLANTED-of-file"));
    let broken = load(
        "[server]\nadmin_token = { env = 'POINTSMAN_NO_SUCH' }\n[policies]\ntrusted_keys = [{ file = '/no/such' }]\n\
         dir = { env = 'HOME' }\n",
    )
    .unwrap_err();
    for problem in [
        "p.toml:2:1: server.admin_token: cannot read the environment variable `POINTSMAN_NO_SUCH`",
        "p.toml:4:17: policies.trusted_keys[0]: cannot read the file `/no/such`",
        // Only secrets are references.
        "policies.dir: ",
    ] {
        assert!(broken.contains(problem), "{problem} is not in {broken}");
    }
}

#[test]
fn k5_a_placeholder_in_the_place_of_a_secret_is_refused() {
    let advice = "write `{ env = \"ADMIN_TOKEN\" }`";
    for token in ["'${ADMIN_TOKEN}'", "'$ADMIN_TOKEN'", "'${ADMIN_TOKEN:-PLANTED}'"] {
        let problem = load(&format!("[server]\nadmin_token = {token}\n")).unwrap_err();
        // K5.7
        assert!(
            problem.contains("p.toml:2:1: server.admin_token: ") && problem.contains(advice),
            "{problem}"
        );
        assert!(!problem.contains("PLANTED"), "{problem}");
    }
    let of_worker = "[[workers]]\nurl = 'http://127.0.0.1:9'\nrole = 'decode'\nengine = 'vllm'\n\
                     api_key = '{{ .Values.key }}'\n";
    let problem = load(of_worker).unwrap_err();
    assert!(problem.contains("api_key: is a place of a template"), "{problem}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "${ADMIN_TOKEN}\n").unwrap();
    let path = file.path().display();
    let problem = load(&format!("[server]\nadmin_token = {{ file = '{path}' }}\n")).unwrap_err();
    let told =
        format!("server.admin_token: the file `{path}` contains a placeholder: put the secret itself there");
    assert!(problem.contains(&told), "{problem}");
    assert!(load("[server]\nadmin_token = 'a$ADMIN_TOKEN'\n").is_ok());
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one story from the start to the end")]
async fn k5_no_secret_appears_anywhere() {
    own_process!();
    // The compiler of policies logs gigabytes at this level.
    let levels =
        "info,pointsman=trace,pointsman_gateway=trace,pointsman_workers=trace,hyper=debug,reqwest=trace";
    let log = Log::with_levels(levels);
    let logs = tempfile::tempdir().unwrap();
    let jwt = "PLANTED-jwt-user:PLANTED-jwt-password@";
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            config.server.admin_token = Some("PLANTED-admin-token".into());
            config.routing.hash_salt = 5_550_123_456_789.into();
            config.decisions.log_dir = Some(logs.path().to_owned());
            config.decisions.log_salt = Some("PLANTED-log-salt".into());
            let keys = [("PLANTED-digest-key", ""), ("PLANTED-tenant-key", "team-a")];
            config.auth.keys = pointsman_tests::client_keys(&keys);
        })
        .reread(None, |started| {
            let mut broken = started.clone();
            broken.auth.keys[0].digest = Some("PLANTED-not-a-digest".into());
            Ok(broken)
        })
        .sim_with(SimConfig::instant(Dialect::Vllm, Role::Aggregated), ",api_key=PLANTED-worker-key")
        .start()
        .await;
    let mut shown = String::new();
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2}).to_string();
    for key in ["PLANTED-tenant-key", "PLANTED-digest-key", "PLANTED-wrong-key", "eyJ.PLANTED.x"] {
        let bearer = format!("Bearer {key}");
        for headers in [[("authorization", bearer.as_str())], [("x-api-key", key)]] {
            let reply = cluster.client.post(COMPLETIONS, &headers, body.clone()).await.unwrap();
            shown.push_str(&String::from_utf8_lossy(&reply.body));
            let reply = cluster.client.post(COMPLETIONS, &headers, "{\"model\": 7").await.unwrap();
            shown.push_str(&String::from_utf8_lossy(&reply.body));
        }
    }
    for token in ["PLANTED-admin-token", "PLANTED-wrong-token"] {
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", bearer.as_str())];
        for path in
            ["/workers", "/policies", "/decisions", "/decisions/export", "/metrics", "/config", "/readyz"]
        {
            let reply = cluster.admin.get_with(path, &headers).await.unwrap();
            shown.push_str(&format!("{:?}{}", reply.headers, String::from_utf8_lossy(&reply.body)));
        }
        for worker in [
            r#"{"id":77,"url":"http://127.0.0.1:9","role":"decode","engine":"vllm","api_key":"PLANTED-joined"}"#,
            r#"{"id":78,"url":"http://127.0.0.1:9","role":"x","engine":"vllm","api_key":"PLANTED-joined"}"#,
            r#"{"id":79,"url":"http://127.0.0.1:9","role":"decode","engine":"vllm","api_key":["PLANTED-joined"]}"#,
        ] {
            let reply = cluster.admin.post("/workers", &headers, worker).await.unwrap();
            shown.push_str(&String::from_utf8_lossy(&reply.body));
        }
        let reply = cluster.admin.post("/config/reload", &headers, "").await.unwrap();
        shown.push_str(&String::from_utf8_lossy(&reply.body));
    }
    let state = cluster.gateway.state();
    shown.push_str(&format!("{state:?}{state:#?}"));
    let text = format!(
        "[auth.jwt]\njwks_url = 'http://{jwt}x/'\n\
         [server]\nadmin_token = [700755555500777, 'PLANTED-a']\napi_keys = 'PLANTED-b'\n\
         [[discovery.etcd]]\nname = 'e'\nendpoints = ['https://root:PLANTED-e@127.0.0.1:1']\n\
         [[discovery.kubernetes]]\nname = 'k'\napi = 'https://root:PLANTED-f@127.0.0.1:1'\n\
         [[auth.keys]]\nid = 'a'\ndigest = 'PLANTED-c'\n[[auth.operators]]\nid = 'a'\ndigest = ['PLANTED-d']\n"
    );
    let problems = load(&text).unwrap_err();
    for key in ["auth.jwt.jwks_url", "auth.keys[0].digest", "discovery.etcd[0]", "discovery.kubernetes[0]"] {
        assert!(problems.contains(key), "{key}: {problems}");
    }
    shown.push_str(&problems);
    cluster.gateway.drain().await;
    let logged = log.text();
    assert!(
        logged.contains("change requested") && shown.contains("auth.keys[0].digest"),
        "nothing was exercised"
    );
    let decisions = decision_log(logs.path());
    assert!(decisions.contains("tenant_hash"), "{decisions}");
    for text in [&shown, &logged, &decisions] {
        let at = text
            .find("PLANTED")
            .or_else(|| text.find("5550123456789"))
            .or_else(|| text.find("700755555500777"));
        // K5.2
        assert!(at.is_none(), "{}", &text[at.unwrap().saturating_sub(300)..][..400]);
    }
}

/// The text of a decision log.
fn decision_log(dir: &Path) -> String {
    let mut text = String::new();
    for file in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        let bytes = std::fs::read(&file).unwrap();
        match zstd::Decoder::new(&bytes[..]) {
            Ok(mut decoder) if file.extension().is_some_and(|kind| kind == "zst") => {
                let _ = decoder.read_to_string(&mut text);
            }
            _ => {}
        }
    }
    text
}

fn recording(role: Role) -> SimConfig {
    SimConfig { record: 100, ..SimConfig::instant(Dialect::Vllm, role) }
}

#[tokio::test]
async fn k5_the_clients_authorization_reaches_an_engine_only_when_it_is_configured() {
    let both = &[("authorization", "Bearer of-client"), ("x-api-key", "of-client")][..];
    for (forward, headers, worker_key, expected) in [
        (false, both, "", None),
        (true, both, "", Some("Bearer of-client")),
        (true, &both[1..], "", Some("Bearer of-client")),
        (true, &[("x-api-key", "")][..], "", None),
        (true, both, ",api_key=of-worker", Some("Bearer of-worker")),
        (false, both, ",api_key=of-worker", Some("Bearer of-worker")),
    ] {
        let cluster = TestClusterBuilder::new()
            .config(|config| config.upstream.forward_authorization = forward)
            .sim_with(recording(Role::Prefill), worker_key)
            .sim_with(recording(Role::Decode), worker_key)
            .start()
            .await;
        let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 2}).to_string();
        assert_eq!(cluster.client.post(COMPLETIONS, headers, body).await.unwrap().status, 200);
        for sim in &cluster.sims {
            let seen = sim.recorded();
            let legs: Vec<_> = seen.iter().filter(|request| request.leg.is_some()).collect();
            assert!(!legs.is_empty());
            for leg in legs {
                let of = |name: &str| {
                    let mut values = leg.headers.iter().filter(|(key, _)| key == name);
                    (values.next().map(|(_, value)| value.as_str()), values.count())
                };
                // K5.3
                assert_eq!(of("authorization"), (expected, 0), "forward {forward}, worker {worker_key}");
                assert_eq!(of("x-api-key"), (None, 0));
            }
        }
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn k5_an_engine_that_refuses_the_gateway_s_key_is_named_with_what_to_set() {
    own_process!();
    let log = Log::with_levels("warn");
    for status in ["401 Unauthorized", "403 Forbidden"] {
        let engine = RawEngine::start(move |request: &RawRequest| match request.line.as_str() {
            "GET /health" => vec![Act::Send(raw_engine::json("{}"))],
            _ => vec![Act::Send(raw_engine::status(status, r#"{"error":"Unauthorized"}"#))],
        });
        let engine = engine.await;
        let cluster = TestClusterBuilder::new().start().await;
        cluster.gateway.state().registry.upsert(engine.worker("id=1,role=aggregated,engine=vllm,model=tiny"));
        let advice = format!("status {status}; set api_key of the worker to a key of the engine");
        let is_logged = |_: &_| {
            let logged = log.text();
            logged.lines().any(|line| line.contains("WARN") && line.contains(&advice))
        };
        // K5.6
        cluster.until("the log warns", is_logged).await.unwrap();
        let body = json!({"model": "tiny", "prompt": "hello"}).to_string();
        let reply = cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        // K5.6
        assert!(
            reply.status == 503
                && text.contains(
                    "the only aggregated worker refuses the gateway's key (set api_key of the worker)"
                ),
            "{text}"
        );
        let told = cluster.admin.get("/workers/1").await.unwrap().json().unwrap()["worker"].clone();
        let reason = told["reason"].as_str().unwrap();
        // K5.6
        assert!(reason.ends_with(&advice), "{reason}");
    }
}
