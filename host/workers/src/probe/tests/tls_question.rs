//! How often an engine is asked whether it speaks TLS.

use super::*;

#[tokio::test]
async fn j4_an_engine_is_asked_once_in_a_row_of_failures_whether_it_speaks_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let (answers, requests, questions) = <(Arc<AtomicBool>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
    let engine = (answers.clone(), requests.clone(), questions.clone());
    let connections = tasks.clone();
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (answers, requests, questions) = engine.clone();
            connections.spawn(async move {
                let mut buffer = vec![0; 4096];
                let read = stream.read(&mut buffer).await.unwrap_or_default();
                if buffer[..read].starts_with(b"GET") {
                    requests.fetch_add(1, Relaxed);
                } else if read > 0 {
                    questions.fetch_add(1, Relaxed);
                }
                if answers.load(Relaxed) {
                    let body = r#"{"data":[{"id":"tiny","owned_by":"me"}]}"#;
                    let head = format!("connection: close\r\ncontent-length: {}", body.len());
                    let answer = format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}");
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            });
        }
    });
    let registry = Arc::new(Registry::default());
    let spec = WorkerSpec::parse_flag(&format!("role=aggregated,engine=openai,url={url}")).unwrap();
    let worker = registry.upsert(spec);
    start(&registry, probes(Duration::from_millis(10), Duration::from_secs(10)), &tasks, &stop);
    let more = async |what| {
        let before = requests.load(Relaxed);
        until(what, || requests.load(Relaxed) >= before + 10).await;
    };
    more("readings of the facts").await;
    // J4.9
    assert_eq!(questions.load(Relaxed), 1);
    answers.store(true, Relaxed);
    until("it answers", || worker.health() == Health::Healthy).await;
    answers.store(false, Relaxed);
    more("health checks").await;
    // J4.9: another row of failures
    assert_eq!(questions.load(Relaxed), 2);
    stop.cancel();
}
