//! Workers that are gateways, and send requests back (I19).

use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::Reply,
    raw_engine::{ANSWER, json},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};

async fn engine() -> RawEngine {
    RawEngine::serving(|_: &RawRequest| vec![Act::Send(json(ANSWER))]).await
}

/// A gateway in front of an engine, and one whose only worker is the first. The first prefers the second.
async fn two_that_list_each_other(engine: &RawEngine) -> [TestCluster; 2] {
    let first = TestClusterBuilder::new().in_turn([engine]).start().await;
    let flag = format!("role=aggregated,engine=openai,url=http://{}", first.gateway.address);
    let second = TestClusterBuilder::new()
        .config(|config| config.workers.push(WorkerSpec::parse_flag(&flag).unwrap()))
        .start()
        .await;
    let body = json!({
        "url": format!("http://{}", second.gateway.address), "role": "aggregated", "engine": "openai",
        "labels": {"turn": "0"},
    });
    assert_eq!(first.admin.put("/workers/7?ttl=60", &[], body.to_string()).await.unwrap().status, 200);
    let is_up = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        snapshot.workers().len() == 2 && snapshot.workers().iter().all(|worker| worker.ineligible().is_none())
    };
    first.until("the second gateway is eligible", is_up).await.unwrap();
    [first, second]
}

async fn ask(cluster: &TestCluster, headers: &[(&str, &str)]) -> Reply {
    let body = json!({"model": "tiny", "prompt": "hello"}).to_string();
    cluster.client.post(COMPLETIONS, headers, body).await.unwrap()
}

/// Number of requests that a gateway answered.
async fn requests(cluster: &TestCluster) -> f64 {
    cluster.at_rest().await.unwrap();
    cluster.metric("pointsman_requests_total{").await.unwrap().iter().sum()
}

#[tokio::test]
async fn i19_a_request_that_comes_back_is_refused_once_and_tried_on_another_worker() {
    let engine = engine().await;
    let [first, second] = two_that_list_each_other(&engine).await;
    for _ in 0..10 {
        // I19.1, I19.3
        assert_eq!(ask(&first, &[]).await.status, 200);
    }
    assert_eq!((requests(&first).await, requests(&second).await), (20.0, 10.0));
    let told = first.admin.get("/workers/7").await.unwrap().json().unwrap()["worker"].clone();
    // I19.3: others cannot have a gateway left out with a header.
    assert_eq!((&told["ineligible"], &told["reason"]), (&Value::Null, &Value::Null));

    assert_eq!(first.admin.post("/workers/1/drain", &[], "{}".to_owned()).await.unwrap().status, 200);
    let reply = ask(&first, &[]).await;
    assert_eq!((reply.status.as_u16(), &*reply.code()), (508, "loop_detected"));
    assert_eq!((requests(&first).await, requests(&second).await), (22.0, 11.0));
}

#[tokio::test]
async fn i19_every_request_to_a_worker_names_the_program() {
    let engine = engine().await;
    let cluster = TestClusterBuilder::new().in_turn([&engine]).start().await;
    assert_eq!(ask(&cluster, &[("user-agent", "of-client")]).await.status, 200);
    let requests = engine.requests();
    assert!(requests.iter().any(|request| request.line.starts_with("POST")));
    for request in requests {
        let lines = request.head.lines().filter(|line| line.starts_with("user-agent: "));
        // I19.6
        assert_eq!(lines.collect::<Vec<_>>(), [concat!("user-agent: pointsman/", env!("CARGO_PKG_VERSION"))]);
    }
}

#[tokio::test]
async fn i19_requests_to_workers_name_the_gateways_that_they_passed() {
    let engine = engine().await;
    let cluster = TestClusterBuilder::new().in_turn([&engine]).start().await;
    let via = || {
        let last = engine.requests().into_iter().rfind(|request| request.line.starts_with("POST")).unwrap();
        last.head.lines().find_map(|line| line.strip_prefix("via: ")).unwrap().to_owned()
    };
    assert_eq!(ask(&cluster, &[("via", "1.1 google, 1.1 varnish (x)")]).await.status, 200);
    let own = via();
    // I19.4
    assert!(own.starts_with("1.1 pointsman-") && !own.contains(','), "{own}");
    let four = ["1.1 pointsman-a"; 4].join(", ");
    assert_eq!(ask(&cluster, &[("via", &four)]).await.status, 200);
    assert_eq!(via(), format!("{four}, {own}"));
    let posts = || engine.requests().iter().filter(|request| request.line.starts_with("POST")).count();
    let before = posts();
    for via in [format!("{four}, 1.1 pointsman-a"), own] {
        let reply = ask(&cluster, &[("via", &via)]).await;
        // I19.2, I_loop_detected
        assert_eq!((reply.status.as_u16(), &*reply.code()), (508, "loop_detected"), "{via}");
    }
    for (path, headers) in [
        ("/v1/responses/resp_1", vec![]),
        (
            "/v1/realtime",
            vec![("upgrade", "websocket"), ("connection", "upgrade"), ("sec-websocket-key", "a")],
        ),
    ] {
        let five = ["1.1 pointsman-a"; 5].join(", ");
        let headers = [headers, vec![("via", &*five)]].concat();
        let reply = cluster.client.get_with(path, &headers).await.unwrap();
        assert_eq!((reply.status.as_u16(), &*reply.code()), (508, "loop_detected"), "{path}");
    }
    assert_eq!(posts(), before);
    cluster.at_rest().await.unwrap();
}
