//! A prefill and a decode engine that share a machine, and a link between them.

use super::*;

/// Latency of the link and its time for a token, ms.
const LINK: (f64, f64) = (30.0, 0.1);

/// A gateway before a pair.
struct Pair {
    prefill: Arc<Engine>,
    decode: Arc<Engine>,
}

async fn through(State(pair): State<Arc<Pair>>, body: Bytes) -> Response {
    let request: Value = serde_json::from_slice(&body).expect("JSON");
    let prompt = request["prompt"].as_array().expect("token ids").len() as u32;
    let osl = request["max_tokens"].as_u64().expect("a number") as u32;
    let mut prefilled = pair.prefill.submit(prompt, 1, PromptKv::Computed);
    prefilled.recv().await.expect("a token");
    let transfer_ms = LINK.0 + LINK.1 * f64::from(prompt);
    tokio::time::sleep(Duration::from_secs_f64(transfer_ms / 1e3)).await;
    let tokens = pair.decode.submit(prompt, osl, PromptKv::Received);
    pair.decode.open.lock().0 += 1;
    answer(pair.decode.clone(), tokens, prompt, osl)
}

/// Starts a pair whose engines slow each other down. Returns the addresses of gateway, prefill and decode.
async fn start() -> [String; 3] {
    let busy = Arc::new(AtomicUsize::new(0));
    let (prefill_url, prefill) = Engine::start_beside(Flaw::None, busy.clone()).await;
    let (decode_url, decode) = Engine::start_beside(Flaw::None, busy).await;
    let app = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/completions", post(through))
        .with_state(Arc::new(Pair { prefill, decode }));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let serve = async move { axum::serve(listener, app).await };
    tokio::runtime::Handle::current().spawn(serve);
    [url, prefill_url, decode_url]
}

/// `c0 + c1` of an engine, and what 500 tokens of a prompt take.
fn step(fleet: &Fleet, place: usize) -> (f64, f64) {
    let pointsman_lab::StepTimeSpec::Linear { c0, c1, c3, c4, .. } = fleet.engines[place].step_time else {
        panic!("{fleet:?}")
    };
    (c0 + c1, 500.0 * c3 + 250_000.0 * c4)
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_slow_each_other_down_are_measured_together_and_their_link_apart() {
    let directory = tempfile::tempdir().expect("a directory");
    let [url, prefill, decode] = start().await;
    let pair = ["--url", &url, "--prefill", &prefill, "--decode", &decode, "--max-requests", "150"];
    let small = ["--max-concurrency", "4", "--max-prompt-tokens", "600", "--output-tokens", "8"];
    let together = [&pair[..], &small, &["-o", "together.toml"]].concat();
    let output = calibrate(directory.path(), &together).await;
    let told = text(&output.stdout);
    assert!(output.status.success(), "{told}{}", text(&output.stderr));
    assert!(told.contains("prefill engine under the load of the other (1024 blocks"), "{told}");
    assert!(told.contains("lone requests to the decode engine while the other is idle"), "{told}");
    assert!(told.contains("at most 8 requests at the same time"), "{told}");
    let apart = [&pair[..], &small, &["--apart", "-o", "apart.toml"]].concat();
    let output = calibrate(directory.path(), &apart).await;
    let told_apart = text(&output.stdout);
    assert!(output.status.success() && !told_apart.contains("beside the load"), "{told_apart}");

    let read = |name: &str| Fleet::read(&directory.path().join(name)).expect("a fleet");
    let (together, apart) = (read("together.toml"), read("apart.toml"));
    for place in 0..2 {
        let (one, both) = (step(&apart, place), step(&together, place));
        // Between a step that meets none of the other engine and one that does: 1.6 times as long.
        assert!((1.05..1.6).contains(&(both.0 / one.0)), "{one:?} {both:?}: {told} {told_apart}");
    }
    assert!(told.contains("under the load of the other engine and"), "{told}");
    // A lone request meets no other: what the link takes is the same in both ways. Sleeps that are late on a
    // busy machine make it longer, and errors of 5 % in the time of a prompt shift it by some milliseconds.
    for (fleet, told) in [(&together, &told), (&apart, &told_apart)] {
        let links = fleet.links;
        let bytes = links.bytes_per_token as f64;
        let transfer_ms = links.latency_ms + bytes * 300.0 / links.gigabytes_per_second / 1e6;
        assert!((40.0..100.0).contains(&transfer_ms), "{transfer_ms}: {links:?} {told}");
    }
}
