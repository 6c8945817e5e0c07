//! Effects of a reload that clients and operators see through a socket.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use pointsman_gateway::config::{Config, KeyDigest, Model, TokenSource, reload::ReloadError};
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    CHAT,
    client::Reply,
    cluster::{TestCluster, TestClusterBuilder},
};
use serde_json::json;

type Edit = fn(&mut Config);

/// A cluster whose configuration the test changes; its engine takes 50 ms for an answer.
struct Reloading {
    cluster: TestCluster,
    edit: Arc<parking_lot::Mutex<Edit>>,
}

impl Reloading {
    async fn start(more: &str) -> Self {
        let edit: Arc<parking_lot::Mutex<Edit>> = Arc::new(parking_lot::Mutex::new(|_| {}));
        let read = edit.clone();
        let slow = SimConfig {
            overhead: Duration::from_millis(50),
            ..SimConfig::instant(Dialect::Vllm, Role::Aggregated)
        };
        let cluster = TestClusterBuilder::new()
            .reread(None, move |started| {
                let mut config = started.clone();
                (read.lock())(&mut config);
                Ok(config)
            })
            .sim_with(slow, more)
            .start()
            .await;
        Self { cluster, edit }
    }

    /// Reloads with this change of the configuration of the start, and no other.
    async fn reload(&self, edit: Edit) {
        *self.edit.lock() = edit;
        let reloaded = self.cluster.gateway.reload().await.unwrap();
        assert!(reloaded.needs_restart.is_empty(), "{reloaded:?}");
    }

    async fn ask(&self, headers: &[(&str, &str)]) -> Reply {
        let body =
            json!({ "model": "tiny", "max_tokens": 2, "messages": [{ "role": "user", "content": "hi" }] });
        self.cluster.client.post(CHAT, headers, body.to_string()).await.unwrap()
    }

    /// The status and code of a request after the change.
    async fn after(&self, edit: Edit) -> (u16, String) {
        self.reload(edit).await;
        status(&self.ask(&[]).await)
    }
}

fn status(reply: &Reply) -> (u16, String) {
    let code = if reply.status.is_success() { "ok".to_owned() } else { reply.code() };
    (reply.status.as_u16(), code)
}

fn answer(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test]
async fn limits_and_timeouts_take_effect_for_the_next_request() {
    let reloading = Reloading::start("").await;
    let ok = answer(200, "ok");
    assert_eq!(status(&reloading.ask(&[]).await), ok);
    assert_eq!(reloading.after(|c| c.server.max_body_bytes = 10).await, answer(413, "payload_too_large"));
    assert_eq!(reloading.after(|c| c.timeouts.request = Duration::from_millis(10)).await.0, 504);
    assert_eq!(
        reloading.after(|c| c.routing.enforce_disagg = true).await,
        answer(503, "prefill_unavailable")
    );
    assert_eq!(reloading.after(|_| {}).await, ok, "and back");
    reloading.cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn h7_a_reload_reads_a_tokenizer_whose_files_changed() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../host/tokens/fixtures/model");
    for file in std::fs::read_dir(fixture).unwrap().map(Result::unwrap).filter(|file| file.path().is_file()) {
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let folder = dir.path().to_owned();
    let cluster = TestClusterBuilder::new()
        .config(move |config| {
            let model = Model { tokenizer: Some(TokenSource::Folder(folder)), ..Model::default() };
            config.models.insert("tiny".to_owned(), model);
        })
        .reread(None, |started| Ok(started.clone()))
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let measured = async || {
        let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "hi" }] }).to_string();
        let told = cluster.client.post("/v1/route", &[], body).await.unwrap().json().unwrap();
        assert_eq!(told["prompt_tokens_estimated"], json!(false), "{told}");
        told["prompt_tokens"].as_u64().unwrap()
    };
    let before = measured().await;
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ 'one two three ' * 50 }}").unwrap();
    cluster.gateway.reload().await.unwrap();
    let after = measured().await;
    // H7.18
    assert!(after >= 50 && after != before, "{before} {after}");
    std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    let refused = cluster.gateway.reload().await.unwrap_err().to_string();
    // H7.18
    assert!(refused.contains("models.tiny.tokenizer") && refused.contains("tokenizer.json"), "{refused}");
    assert_eq!(measured().await, after);
}

#[tokio::test]
async fn keys_and_the_rate_limit_take_effect_for_the_next_request() {
    let reloading = Reloading::start("").await;
    assert_eq!(reloading.after(|c| c.auth.keys = pointsman_tests::client_keys(&[("k", "")])).await.0, 401);
    assert_eq!(reloading.ask(&[("authorization", "Bearer k")]).await.status, 200);
    reloading.reload(|c| c.server.requests_per_second = 1).await;
    assert_eq!(
        [reloading.ask(&[]).await, reloading.ask(&[]).await].map(|reply| reply.status.as_u16()),
        [200, 429]
    );
    reloading.reload(|_| {}).await;
    assert_eq!(reloading.ask(&[]).await.status, 200);
}

#[tokio::test]
async fn the_operators_token_takes_effect_for_the_next_request() {
    let reloading = Reloading::start("").await;
    let admin = &reloading.cluster.admin;
    let statuses = async || {
        let read = admin.get("/workers").await.unwrap();
        let change = admin.post("/policies/reload", &[], "").await.unwrap();
        (read.status.as_u16(), change.status.as_u16())
    };
    assert_eq!(statuses().await, (200, 200));
    reloading.reload(|c| c.server.admin_token = Some("t".into())).await;
    assert_eq!(statuses().await, (200, 401));
    reloading
        .reload(|c| {
            c.server.admin_token = Some("t".into());
            c.server.admin_token_reads = true;
        })
        .await;
    assert_eq!(statuses().await, (401, 401));
    let read = admin.get_with("/workers", &[("authorization", "Bearer t")]).await.unwrap();
    assert_eq!(read.status, 200);
    reloading.reload(|_| {}).await;
    assert_eq!(statuses().await, (200, 200));
}

#[tokio::test]
async fn whether_decisions_are_shown_and_recorded_takes_effect_for_the_next_request() {
    let reloading = Reloading::start("").await;
    let shown = async || {
        let reply = reloading.ask(&[("x-pointsman-decision", "1")]).await;
        let recorded = reloading.cluster.admin.get("/decisions").await.unwrap().json().unwrap();
        (reply.headers.contains_key("x-pointsman-decision"), recorded["decisions"].as_array().unwrap().len())
    };
    assert_eq!(shown().await, (true, 1));
    assert_eq!(shown().await, (true, 2));
    reloading.reload(|c| c.server.tell_decisions = false).await;
    assert_eq!(shown().await, (false, 3), "the record goes on");
    reloading.reload(|c| c.decisions.keep = 0).await;
    assert_eq!(shown().await, (true, 0), "nothing is recorded");
    reloading.reload(|c| c.decisions.facts = vec!["active-requests".to_owned()]).await;
    assert_eq!(shown().await, (true, 1), "a new record");
}

#[tokio::test]
async fn the_busy_status_and_the_queue_take_effect_for_the_next_request() {
    let reloading = Reloading::start(",max_concurrency=1").await;
    let two = async || {
        let (one, other) = tokio::join!(reloading.ask(&[]), reloading.ask(&[]));
        let mut statuses = [one.status.as_u16(), other.status.as_u16()];
        statuses.sort_unstable();
        statuses
    };
    assert_eq!(two().await, [200, 529]);
    reloading.reload(|c| c.routing.busy_status = 503).await;
    assert_eq!(two().await, [200, 503]);
    reloading.reload(|c| c.queue.limit = 4).await;
    assert_eq!(two().await, [200, 200], "the second waited");
    reloading
        .reload(|c| {
            c.queue.limit = 4;
            c.queue.timeout = Duration::from_millis(1);
        })
        .await;
    assert_eq!(two().await, [200, 529], "the second waited too long");
}

#[tokio::test]
async fn n1_half_of_a_file_waits_for_an_operator() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pointsman.toml");
    let token = "[server]\nadmin_token = 't'\n";
    let key = format!("[[auth.keys]]\nid = 'a'\ndigest = '{}'\n", KeyDigest::sha256("k"));
    let worker = "[[workers]]\nid = 1\nrole = 'aggregated'\nengine = 'vllm'\nurl = 'http://a'\n";
    let whole = format!("{token}{worker}{key}");
    std::fs::write(&path, &whole).unwrap();
    let read = {
        let path = path.clone();
        move |started: &Config| {
            let (file, mut read) = (Config::read(&path)?, started.clone());
            (read.auth, read.server.admin_token) = (file.auth, file.server.admin_token);
            read.workers.retain(|worker| file.workers.iter().any(|listed| listed.id == worker.id));
            Ok(read)
        }
    };
    let of_file = Config::read(&path).unwrap();
    let cluster = TestClusterBuilder::new()
        .config(|config| {
            (config.auth, config.server.admin_token) = (of_file.auth, of_file.server.admin_token)
        })
        .reread(Some(path.clone()), read)
        .sim(Dialect::Vllm, Role::Aggregated)
        .start()
        .await;
    let body = json!({ "model": "tiny", "prompt": "a", "max_tokens": 2 }).to_string();
    let ask = async |headers: &[(&str, &str)]| {
        cluster.client.post("/v1/completions", headers, body.clone()).await.unwrap().status.as_u16()
    };
    let told = async |reason: &str| {
        for _ in 0..50 {
            let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
            let told = status["reasons"].as_array().unwrap().iter().any(|told| {
                told.as_str().unwrap().starts_with(&format!(
                    "the configuration, or a file that it names, changed and is not applied: {reason}"
                ))
            });
            if told != reason.is_empty() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        false
    };
    for (text, reason) in [
        (String::new(), "the file is empty, and one"),
        (format!("{token}{worker}"), "the file would serve clients that do not authenticate"),
        (format!("{worker}{key}"), "the file would let in operators that do not authenticate"),
        (format!("{token}{key}"), "the file would remove 1 of 1 workers"),
    ] {
        std::fs::write(&path, text).unwrap();
        // N1.4
        assert!(told(reason).await, "{reason}");
        assert_eq!(cluster.metric("pointsman_config_last_reload_successful ").await.unwrap(), [0.0]);
        assert_eq!([ask(&[]).await, ask(&[("authorization", "Bearer k")]).await], [401, 200], "{reason}");
        assert_eq!(cluster.admin.post("/policies/reload", &[], "").await.unwrap().status, 401);
    }
    std::fs::write(&path, &whole).unwrap();
    assert!(told("").await, "the file is repaired");
    assert_eq!(cluster.metric("pointsman_config_last_reload_successful ").await.unwrap(), [1.0]);
    std::fs::write(&path, format!("{token}{worker}")).unwrap();
    assert!(told("the file would serve clients").await);
    // N1.4: as SIGHUP does.
    cluster.gateway.reload().await.unwrap();
    assert_eq!(ask(&[]).await, 200);
    assert!(told("").await);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn n1_files_that_do_not_answer_keep_no_operator_waiting() {
    let (answer, answers) = std::sync::mpsc::channel::<()>();
    let answers = Mutex::new(answers);
    let read = move |started: &Config| {
        let _ = answers.lock().recv();
        Ok(started.clone())
    };
    let builder = TestClusterBuilder::new().reread(None, read).sim(Dialect::Vllm, Role::Aggregated);
    let cluster = builder.start().await;
    let asked = async {
        let healthy = tokio::time::timeout(Duration::from_secs(5), cluster.admin.get("/healthz")).await;
        assert_eq!(healthy.unwrap().unwrap().status.as_u16(), 200);
        // It takes its turn after the reload that waits.
        cluster.admin.post("/config/reload", &[], "").await.unwrap()
    };
    // N1.5
    let (reloaded, refused) = tokio::join!(cluster.gateway.reload(), asked);
    assert!(matches!(reloaded, Err(ReloadError::NotRead)), "{reloaded:?}");
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (503, "config_not_read"));
    answer.send(()).unwrap();
    answer.send(()).unwrap();
    let mut again = cluster.gateway.reload().await;
    while matches!(again, Err(ReloadError::NotRead)) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        again = cluster.gateway.reload().await;
    }
    again.unwrap();
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn n1_a_changed_file_that_was_not_read_in_time_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pointsman.toml");
    std::fs::write(&path, "").unwrap();
    let (answer, answers) = std::sync::mpsc::channel::<()>();
    let answers = Mutex::new(answers);
    let read = move |started: &Config| {
        let _ = answers.lock().recv();
        Ok(started.clone())
    };
    let builder = TestClusterBuilder::new().reread(Some(path.clone()), read);
    let cluster = builder.sim(Dialect::Vllm, Role::Aggregated).start().await;
    let is_in_force = async |expected: f64| {
        for _ in 0..200 {
            if cluster.metric("pointsman_config_last_reload_successful ").await.unwrap() == [expected] {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        false
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    std::fs::write(&path, "# changed").unwrap();
    // N1.5
    assert!(is_in_force(0.0).await);
    answer.send(()).unwrap();
    answer.send(()).unwrap();
    assert!(is_in_force(1.0).await, "the file did not change again");
}

#[tokio::test]
async fn n1_a_file_that_is_put_back_after_a_reload_is_applied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pointsman.toml");
    std::fs::write(&path, "# as it was").unwrap();
    let read = {
        let path = path.clone();
        move |started: &Config| {
            let mut config = started.clone();
            if std::fs::read_to_string(&path)? != "# as it was" {
                config.server.max_body_bytes = 10;
            }
            Ok(config)
        }
    };
    let builder = TestClusterBuilder::new().reread(Some(path.clone()), read);
    let cluster = builder.sim(Dialect::Vllm, Role::Aggregated).start().await;
    let ask = async || {
        let body = json!({ "model": "tiny", "prompt": "a", "max_tokens": 2 }).to_string();
        cluster.client.post("/v1/completions", &[], body).await.unwrap().status.as_u16()
    };
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    std::fs::write(&path, "# changed").unwrap();
    cluster.gateway.reload().await.unwrap();
    assert_eq!(ask().await, 413);
    std::fs::write(&path, "# as it was").unwrap();
    let begun = tokio::time::Instant::now();
    while ask().await != 200 {
        // N1.7
        assert!(begun.elapsed() < Duration::from_secs(10), "the file is not in force again");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn n1_a_configuration_file_that_is_gone_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pointsman.toml");
    std::fs::write(&path, "").unwrap();
    let builder =
        TestClusterBuilder::new().reread(Some(path.clone()), |started: &Config| Ok(started.clone()));
    let cluster = builder.sim(Dialect::Vllm, Role::Aggregated).start().await;
    let reported = async |expected: bool| {
        for _ in 0..100 {
            let status = cluster.admin.get("/status").await.unwrap().json().unwrap();
            if status["reasons"].to_string().contains("the configuration file cannot be read") == expected {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        false
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    // N1.6
    assert!(reported(true).await, "a directory is in its place");
    std::fs::remove_dir(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    assert!(reported(false).await, "it is back");
}

#[tokio::test]
async fn a_request_in_flight_keeps_the_values_it_started_with() {
    let reloading = Reloading::start("").await;
    let (reply, ()) = tokio::join!(reloading.ask(&[]), async {
        reloading.cluster.until("it is in flight", |cluster| cluster.booked() == 1).await.unwrap();
        reloading.reload(|c| c.timeouts.request = Duration::from_millis(1)).await;
    });
    assert_eq!(status(&reply), answer(200, "ok"));
    assert_eq!(reloading.after(|c| c.timeouts.request = Duration::from_millis(1)).await.0, 504);
}

#[tokio::test]
async fn n1_a_key_that_needs_a_restart_is_told_until_the_file_has_its_old_value() {
    let reloading = Reloading::start("").await;
    let told = async || {
        let status = reloading.cluster.admin.get("/status").await.unwrap().json().unwrap();
        let count = reloading.cluster.metric("pointsman_config_needs_restart").await.unwrap();
        (status["reasons"].to_string(), count)
    };
    assert_eq!(told().await, ("[]".to_owned(), vec![0.0]));
    *reloading.edit.lock() = |config| {
        config.server.listen.set_port(1);
        config.index.ttl = Duration::from_secs(77);
    };
    reloading.cluster.gateway.reload().await.unwrap();
    let reason = "the configuration changed, and a restart is needed to apply it: server.listen, index.ttl";
    // N1.8
    assert_eq!(told().await, (json!([reason]).to_string(), vec![2.0]));
    reloading.reload(|_| {}).await;
    // N1.8
    assert_eq!(told().await, ("[]".to_owned(), vec![0.0]));
}
