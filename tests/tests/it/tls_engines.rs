//! TLS towards engines: whom the gateway trusts, what it says when it does not, and that nothing falls back
//! to plain text.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use pointsman_gateway::config::{Config, Model, TokenSource, UpstreamTls};
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle};
use pointsman_tests::{
    Act, Client, RawEngine, TestCluster, TestClusterBuilder,
    tls::{Authority, Issued, Leaf, TlsFiles},
    tls_proxy::TlsProxy,
};
use pointsman_workers::{Worker, WorkerSpec};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};
use tokio_util::task::TaskTracker;

const CHAT: &str =
    r#"{"model":"tiny","stream":true,"max_tokens":8,"messages":[{"role":"user","content":"x"}]}"#;
/// A change is seen after one interval of two seconds and applied after the next.
const LIMIT: Duration = Duration::from_secs(20);

/// An engine behind TLS.
struct Engine {
    sim: SimHandle,
    proxy: TlsProxy,
}

impl Engine {
    async fn start(certificate: &Issued, clients: Option<&Authority>) -> Self {
        Self::of(SimConfig::instant(Dialect::Vllm, Role::Aggregated), certificate, clients).await
    }

    async fn of(sim: SimConfig, certificate: &Issued, clients: Option<&Authority>) -> Self {
        let sim = Sim::start(sim).await.unwrap();
        let proxy = TlsProxy::start(sim.addr(), certificate, clients).await.unwrap();
        Self { sim, proxy }
    }

    fn spec(&self, more: &str) -> WorkerSpec {
        let url = format!("https://127.0.0.1:{}", self.proxy.address.port());
        WorkerSpec::parse_flag(&format!("role=aggregated,engine=vllm,url={url}{more}")).unwrap()
    }
}

/// Files of `[upstream.tls]`: an authority, and the certificate of the gateway.
fn files(authority: &Authority, own: Option<&Issued>) -> (TlsFiles, UpstreamTls) {
    let files = match own {
        Some(own) => TlsFiles::new(own, Some(authority)).unwrap(),
        None => TlsFiles::new(&authority.server().unwrap(), Some(authority)).unwrap(),
    };
    let tls = UpstreamTls {
        ca_file: Some(files.path("ca.pem")),
        cert_file: own.map(|_| files.path("cert.pem")),
        key_file: own.map(|_| files.path("key.pem")),
        ..UpstreamTls::default()
    };
    (files, tls)
}

async fn cluster(change: impl FnOnce(&mut Config)) -> TestCluster {
    TestClusterBuilder::new()
        .config(|config| {
            config.server.threads = 1;
            change(config);
        })
        .start()
        .await
}

async fn chat(cluster: &TestCluster) -> String {
    let reply = cluster.client.post("/v1/chat/completions", &[], CHAT).await.unwrap();
    format!("{} {}", reply.status.as_u16(), String::from_utf8_lossy(&reply.body))
}

/// Adds a worker, and returns what `/workers` says of its problem.
async fn problem_of(cluster: &TestCluster, spec: WorkerSpec) -> String {
    let id = spec.id;
    let worker: Arc<Worker> = cluster.gateway.state().registry.upsert(spec);
    let started = Instant::now();
    while worker.problem().is_none() {
        assert!(started.elapsed() < LIMIT && worker.ineligible().is_some(), "the worker has no problem");
        sleep(Duration::from_millis(10)).await;
    }
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let list = workers.as_array().or_else(|| workers["workers"].as_array()).unwrap();
    let shown = list.iter().find(|shown| shown.to_string().contains(&id.to_string())).unwrap();
    shown.to_string()
}

#[tokio::test]
async fn j4_engines_are_called_over_tls_and_connections_are_used_again() {
    let authority = Authority::new().unwrap();
    let engine = Engine::start(&authority.server().unwrap(), None).await;
    let (_files, tls) = files(&authority, None);
    let cluster = cluster(|config| {
        config.upstream.tls = tls;
        config.workers.push(engine.spec(""));
        config.probe.interval = Duration::from_secs(60);
    })
    .await;
    let answer = chat(&cluster).await;
    // J4.1: probes made the worker eligible, and the stream is whole
    assert!(answer.starts_with("200") && answer.contains("[DONE]"), "{answer}");
    let handshakes = engine.proxy.handshakes();
    for _ in 0..20 {
        assert!(chat(&cluster).await.contains("[DONE]"));
    }
    // J4.1
    assert_eq!(engine.proxy.handshakes(), handshakes, "connections are kept");
    assert_eq!(engine.proxy.plain(), 0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j4_tokens_come_from_an_engine_over_tls() {
    let authority = Authority::new().unwrap();
    let engine = Engine::start(&authority.server().unwrap(), None).await;
    let (_files, tls) = files(&authority, None);
    let cluster = cluster(|config| {
        config.upstream.tls = tls;
        config.workers.push(engine.spec(",model=tiny"));
        let model = Model {
            tokenizer: Some(TokenSource::Engine),
            tokenizer_timeout: LIMIT,
            tokenizer_cache_bytes: 1 << 20,
            ..Model::default()
        };
        config.models.insert("tiny".to_owned(), model);
    })
    .await;
    let direct = Client::new(engine.sim.addr());
    let expected = direct.post("/tokenize", &[], CHAT).await.unwrap().json().unwrap();
    let routed = cluster.client.post("/v1/route", &[], CHAT).await.unwrap().json().unwrap();
    // J4.1: the tokens are the engine's, and it speaks nothing but TLS
    assert_eq!(routed["token_ids"], expected["tokens"]);
    assert!(!expected["tokens"].as_array().unwrap().is_empty());
    assert!(chat(&cluster).await.contains("[DONE]"));
    assert!(cluster.metric("pointsman_not_tokenized_total{").await.unwrap().is_empty());
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn j4_an_engine_that_cannot_be_verified_is_not_used_and_workers_say_why() {
    let (authority, stranger) = (Authority::new().unwrap(), Authority::new().unwrap());
    let (_files, tls) = files(&authority, None);
    let cluster = cluster(|config| config.upstream.tls = tls).await;
    let named = |name| Leaf { names: vec![name], ..Leaf::default() };
    let expired = Leaf { expired: true, ..named("127.0.0.1") };
    let cases = [
        (stranger.server().unwrap(), None, "upstream.tls.ca_file"),
        (authority.issue(&named("engine.example")).unwrap(), None, "tls_server_name"),
        (authority.issue(&expired).unwrap(), None, "has expired"),
        (authority.server().unwrap(), Some(&authority), "upstream.tls.cert_file"),
    ];
    for (certificate, clients, advice) in cases {
        let engine = Engine::start(&certificate, clients).await;
        let spec = engine.spec("");
        let id = spec.id;
        let shown = problem_of(&cluster, spec).await;
        // J4.2
        assert!(shown.contains(advice), "{advice}: {shown}");
        let answer = chat(&cluster).await;
        // J4.3
        assert!(answer.starts_with("503") || answer.starts_with("404"), "{answer}");
        assert_eq!((engine.proxy.plain(), engine.sim.state().requests.len()), (0, 0), "{advice}");
        cluster.gateway.state().registry.remove(id);
    }
    // A port without TLS.
    let sim = Sim::start(SimConfig::instant(Dialect::Vllm, Role::Aggregated)).await.unwrap();
    let flag = format!("role=aggregated,engine=vllm,url={}", sim.url().replace("http://", "https://"));
    let shown = problem_of(&cluster, WorkerSpec::parse_flag(&flag).unwrap()).await;
    // J4.2, J4.3
    assert!(shown.contains("does not speak TLS") && sim.state().requests.is_empty(), "{shown}");
}

#[tokio::test]
async fn j4_the_name_of_a_certificate_may_be_configured() {
    let authority = Authority::new().unwrap();
    let certificate = authority.issue(&Leaf { names: vec!["engine.example"], ..Leaf::default() }).unwrap();
    let engine = Engine::start(&certificate, None).await;
    let (_files, tls) = files(&authority, None);
    let cluster = cluster(|config| {
        config.upstream.tls = tls;
        config.workers.push(engine.spec(",tls_server_name=engine.example"));
    })
    .await;
    // J4.4
    assert!(chat(&cluster).await.contains("[DONE]"));
    let id = cluster.gateway.state().registry.snapshot().workers()[0].id();
    cluster.gateway.state().registry.remove(id);
    let shown = problem_of(&cluster, engine.spec(",tls_server_name=other.example")).await;
    // J4.4: the idle connections of the worker with the other name are not used
    assert!(shown.contains("tls_server_name"), "{shown}");
    assert!(!chat(&cluster).await.contains("[DONE]"));
}

#[tokio::test]
async fn j4_the_gateway_proves_who_it_is_and_realtime_connections_do_too() {
    let authority = Authority::new().unwrap();
    let engine = Engine::start(&authority.server().unwrap(), Some(&authority)).await;
    let own = authority.issue(&Leaf { names: vec!["gateway.example"], ..Leaf::default() }).unwrap();
    let (_files, tls) = files(&authority, Some(&own));
    let cluster = cluster(|config| {
        config.upstream.tls = tls;
        config.workers.push(engine.spec(""));
    })
    .await;
    // J4.5
    assert!(chat(&cluster).await.contains("[DONE]"));
    let request = "GET /v1/realtime?model=tiny HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                   sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    let mut socket = tokio::net::TcpStream::connect(cluster.gateway.address).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut head = [0; 12];
    socket.read_exact(&mut head).await.unwrap();
    // J4.1
    assert_eq!(&head, b"HTTP/1.1 101");
    // A close frame: the engine answers through both connections.
    socket.write_all(&[0x88, 0x80, 0, 0, 0, 0]).await.unwrap();
    socket.read_to_end(&mut Vec::new()).await.unwrap();
    assert_eq!(engine.proxy.plain(), 0);
}

#[tokio::test]
async fn j4_changed_files_serve_new_connections_and_end_no_stream() {
    let (first, second) = (Authority::new().unwrap(), Authority::new().unwrap());
    let sim =
        SimConfig { itl: Duration::from_millis(20), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let engine = Engine::of(sim, &first.server().unwrap(), None).await;
    let (files, tls) = files(&first, None);
    let cluster = cluster(|config| {
        config.upstream.tls = tls;
        config.workers.push(engine.spec(""));
    })
    .await;
    let long = CHAT.replace("\"max_tokens\":8", "\"max_tokens\":600,\"ignore_eos\":true");
    let mut stream = cluster.client.stream("/v1/chat/completions", &[], long).await.unwrap();
    assert_eq!(stream.status.as_u16(), 200);
    assert!(stream.next().await.unwrap().is_some());
    engine.proxy.show(&second.server().unwrap(), None).unwrap();
    files.write("ca.pem", &second.pem).unwrap();
    let started = Instant::now();
    let applied = "pointsman_tls_reloads_total{listener=\"engines\",outcome=\"applied\"}";
    while cluster.metric(applied).await.unwrap().iter().sum::<f64>() < 1.0 {
        assert!(started.elapsed() < LIMIT, "the files were not read again");
        sleep(Duration::from_millis(50)).await;
    }
    let handshakes = engine.proxy.handshakes();
    let is_eligible = |cluster: &TestCluster| {
        cluster.gateway.state().registry.snapshot().workers()[0].ineligible().is_none()
    };
    cluster.until("probes trust the new authority", is_eligible).await.unwrap();
    // J4.6
    assert!(chat(&cluster).await.contains("[DONE]"));
    assert!(engine.proxy.handshakes() > handshakes, "the call is not made over a connection of before");
    let mut last = String::new();
    while let Some(event) = stream.next().await.unwrap() {
        last = event;
    }
    // J4.6: the stream that began before
    assert_eq!(last, "[DONE]");
    cluster.at_rest().await.unwrap();
}

/// What a server with TLS does with a connection that begins without it.
#[derive(Clone, Copy, Debug)]
enum Untold {
    Closes,
    /// nginx and its like.
    Answers400,
}

/// Starts a server that passes connections with TLS to `tls`.
async fn before(tls: SocketAddr, untold: Untold) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = TaskTracker::new();
    let serve = move |mut client: TcpStream| async move {
        let mut first = [0];
        client.peek(&mut first).await.unwrap();
        if first == [0x16] {
            let mut server = TcpStream::connect(tls).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        } else if matches!(untold, Untold::Answers400) {
            let _ = client.read(&mut [0; 1024]).await;
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n").await;
        } else {
            let _ = client.read(&mut [0; 1024]).await;
        }
    };
    tasks.clone().spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tasks.spawn(serve(client));
        }
    });
    address
}

#[tokio::test]
async fn j4_an_engine_with_tls_whose_url_has_none_is_told_from_one_that_does_not_answer() {
    let authority = Authority::new().unwrap();
    let engine = Engine::start(&authority.server().unwrap(), None).await;
    let cluster = cluster(|_| {}).await;
    let tls = engine.proxy.address;
    for address in [tls, before(tls, Untold::Closes).await, before(tls, Untold::Answers400).await] {
        let spec = WorkerSpec::parse_flag(&format!("role=aggregated,engine=vllm,url=http://{address}"));
        let spec = spec.unwrap();
        let id = spec.id;
        let shown = problem_of(&cluster, spec).await;
        let told = "the engine speaks TLS here: begin the worker's url with https://";
        // J4.9
        assert!(shown.contains(told), "{shown}");
        let status = cluster.admin.get("/status").await.unwrap().json().unwrap()["reasons"].to_string();
        assert!(status.contains(told), "{status}");
        assert_eq!(engine.sim.state().requests.len(), 0);
        cluster.gateway.state().registry.remove(id);
    }
    let silent = RawEngine::start(|_| vec![Act::Close]).await;
    let shown = problem_of(&cluster, silent.worker("role=aggregated,engine=vllm")).await;
    // J4.9
    assert!(shown.contains("connection closed before message completed"), "{shown}");
}
