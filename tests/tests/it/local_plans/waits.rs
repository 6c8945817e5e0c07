//! Local plans of requests that wait in the queue or for a pair, and limits in the slot `prefill`.

use pointsman_test_guests::TENANT_LIMIT;

use super::*;

/// A prefill worker that takes some time for each prompt.
fn slow_prefill(seconds: u64) -> SimConfig {
    SimConfig { overhead: Duration::from_secs(seconds), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) }
}

fn long(first: u32) -> String {
    let prompt: Vec<u32> = (first..first + 3_000).collect();
    json!({ "model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": true }).to_string()
}

#[tokio::test]
async fn d4_a_plan_is_made_anew_after_a_wait_in_the_queue() {
    // The default override plans by what waits for the prefill worker.
    let builder = TestClusterBuilder::new().config(|config| {
        config.queue.limit = 10;
        config.queue.max_inflight = 1;
    });
    let cluster = start(builder.sim_with(slow_prefill(2), "").sim(Dialect::Vllm, Role::Decode)).await;
    let ask = async |first: u32, more: &[(&str, &str)]| {
        let headers = [&[EXPLAIN][..], more].concat();
        cluster.client.post("/v1/completions", &headers, long(first)).await.unwrap()
    };
    let waiting = async {
        cluster.until("the prefill worker is busy", prefills).await.unwrap();
        let preview = cluster.client.post("/v1/route", &[], long(10_000)).await.unwrap().json().unwrap();
        (preview, ask(10_000, &[]).await)
    };
    let pinned = [("x-prefill-instance-id", "1")];
    let (first, (preview, second)) = tokio::join!(ask(1, &pinned), waiting);
    assert_eq!((first.status, second.status), (http::StatusCode::OK, http::StatusCode::OK), "{second:?}");
    assert_eq!(preview["worker_id"].get("prefill_worker_id"), None, "now it is planned locally: {preview}");
    // D4.15
    assert_eq!(decided(&second), ["prefill=1/0 policy", "decode=2/0 policy"]);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_a_refused_prompt_waits_for_a_busy_pair_as_without_a_plan() {
    let builder = TestClusterBuilder::new().config(|config| {
        always_local(config);
        config.queue.limit = 10;
    });
    let prefill = builder.sim_with(slow_prefill(2), ",max_concurrency=1");
    let cluster = start(prefill.sim(Dialect::Vllm, Role::Decode)).await;
    let refused = async {
        cluster.until("the prefill worker is busy", prefills).await.unwrap();
        cluster.sims[1].set_faults(vec![status(400)]);
        post(&cluster, json!({})).await
    };
    let pin = [("x-prefill-instance-id", "1")];
    let (other, refused) = tokio::join!(cluster.client.post(CHAT, &pin, chat(json!({}))), refused);
    assert_eq!(other.unwrap().status, 200);
    // D4.11
    assert_eq!(refused.status, 200, "{refused:?}");
    assert_eq!(decided(&refused), ["aggregated=2/0 plan", "prefill=1/0 policy", "decode=2/0 policy"]);
    cluster.at_rest().await.unwrap();
}

/// A fleet whose tenants may send three requests.
async fn limited(change: impl FnOnce(&mut Config)) -> TestCluster {
    let text = "grants = [\"state\"]\nsettings = { requests = 3, window-ms = 4000000000, anonymous = true }";
    let entry: SlotEntry = toml::from_str(text).unwrap();
    let limited = |config: &mut Config| {
        always_local(config);
        config.policies.slots.insert(SlotKind::Prefill, entry);
        change(config);
    };
    let slow =
        SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, Role::Decode) };
    let builder = TestClusterBuilder::new().config(limited).sim(Dialect::Vllm, Role::Prefill);
    let cluster = start(builder.sim_with(slow, "")).await;
    cluster.drop_policy("prefill.wasm", TENANT_LIMIT).unwrap();
    let report = cluster.admin.post("/policies/reload", &[], "").await.unwrap();
    assert_eq!(report.status, 200, "{:?}", report.json());
    cluster
}

/// Statuses and codes of five requests, and the engines' generations for them.
async fn five(cluster: &TestCluster) -> (Vec<(u16, String)>, [u64; 2]) {
    let before = [0, 1].map(|sim| generations(cluster, sim));
    // A preview counts nothing.
    cluster.client.post("/v1/route", &[], chat(json!({}))).await.unwrap();
    let mut answers = Vec::new();
    for _ in 0..5 {
        let reply = post(cluster, json!({})).await;
        answers.push((reply.status.as_u16(), reply.code()));
    }
    (answers, [0, 1].map(|sim| generations(cluster, sim) - before[sim]))
}

#[tokio::test]
async fn d4_a_limit_in_the_slot_prefill_counts_local_prompts_once() {
    let (served, refused) = ((200, String::new()), (429, "shed".to_owned()));
    let expected = [&served, &served, &served, &refused, &refused].map(Clone::clone);
    let cluster = limited(|_| {}).await;
    // D4.14
    assert_eq!(five(&cluster).await, (expected.to_vec(), [0, 3]));
    cluster.at_rest().await.unwrap();

    // While blocks of the decode engine are in use, it may run no whole request: each plan is refused.
    let full = BusyThresholds { kv_usage: Some(0.0), ..BusyThresholds::default() };
    let cluster = limited(|config| _ = config.routing.busy.insert(Leg::Aggregated, full)).await;
    let (pin, body) = ([("x-prefill-instance-id", "1")], json!({"stream": true, "max_tokens": 4000}));
    let mut running = cluster.client.stream(CHAT, &pin, chat(body)).await.unwrap();
    running.next().await.unwrap();
    let used = |cluster: &TestCluster| {
        let decode = cluster.gateway.state().registry.snapshot().get(WorkerId(2)).unwrap().clone();
        decode.engine_load().is_some_and(|load| load.kv_usage > Some(0.0))
    };
    cluster.until("blocks of the decode engine are in use", used).await.unwrap();
    // D4.14
    assert_eq!(five(&cluster).await, (expected.to_vec(), [3, 3]));
    drop(running);
    cluster.at_rest().await.unwrap();
}
