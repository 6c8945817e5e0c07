//! Agent programs: their facts in receipts, and in a policy that keeps them where they run.

use std::time::Duration;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{CHAT, TestCluster, TestClusterBuilder};
use pointsman_workers::name_hash;
use serde_json::{Value, json};

const SESSION: &str = "x-dynamo-session-id";
const PARENT: &str = "x-dynamo-parent-session-id";
const SALT: u64 = 77;
/// Keeps a program on its worker, and sends a new one to where least of the others is.
const STAYS: &str = "[policies.slots.aggregated]\nbuiltin = 'formula'\n[policies.slots.aggregated.settings]\n\
                     cost = 'program_turn == 0 ? running_program_tokens : -program_tokens'";

async fn cluster(slots: &str) -> TestCluster {
    let more: Config = toml::from_str(slots).unwrap();
    let itl = Duration::from_millis(1);
    let engine = || SimConfig { itl, ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    TestClusterBuilder::new()
        .config(|config| {
            config.policies.slots = more.policies.slots;
            config.routing.hash_salt = SALT.into();
            config.decisions.facts = ["program-hash", "program-turn", "program-idle-ms", "session-hash"]
                .map(str::to_owned)
                .to_vec();
        })
        .sim_with(engine(), "")
        .sim_with(engine(), "")
        .sim_with(engine(), "")
        .start()
        .await
}

/// Sends a request of a session. Returns the worker that served it.
async fn ask(cluster: &TestCluster, headers: &[(&str, &str)], nvext: Value) -> u64 {
    let body = json!({"model": "tiny", "max_tokens": 2, "nvext": nvext,
                      "messages": [{"role": "user", "content": "hello"}]});
    let reply = cluster.client.post(CHAT, headers, body.to_string()).await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    cluster.newest_receipt().await.unwrap()["choice"]["worker"].as_u64().unwrap()
}

#[tokio::test]
async fn f11_requests_of_a_session_and_its_sub_agents_are_one_program() {
    let cluster = cluster("").await;
    let root = json!(name_hash(b"lead", SALT));
    ask(&cluster, &[(SESSION, "lead")], json!({})).await;
    let first = cluster.newest_facts().await.unwrap();
    // F11.1, F11.2, F11.3
    assert_eq!((&first["program-hash"], &first["session-hash"]), (&root, &root));
    assert_eq!((&first["program-turn"], &first["program-idle-ms"]), (&json!(0), &json!(u32::MAX)));
    tokio::time::sleep(Duration::from_millis(30)).await;
    let child = json!({"agent_context": {"session_id": "scout", "parent_session_id": "lead"}});
    ask(&cluster, &[], child).await;
    let second = cluster.newest_facts().await.unwrap();
    assert_eq!((&second["program-hash"], &second["program-turn"]), (&root, &json!(1)));
    let idle = second["program-idle-ms"].as_u64().unwrap();
    assert!((30..5_000).contains(&idle), "{second}");
    // A sub-agent of the sub-agent, whose first request names only the latter.
    ask(&cluster, &[(SESSION, "deep"), (PARENT, "scout")], json!({})).await;
    ask(&cluster, &[(SESSION, "deep")], json!({})).await;
    let fourth = cluster.newest_facts().await.unwrap();
    assert_eq!((&fourth["program-hash"], &fourth["program-turn"]), (&root, &json!(3)));
    // A preview is not a turn.
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]});
    cluster.client.post("/v1/route", &[(SESSION, "lead")], body.to_string()).await.unwrap();
    ask(&cluster, &[(SESSION, "lead"), ("x-dynamo-session-final", "true")], json!({})).await;
    assert_eq!(cluster.newest_facts().await.unwrap()["program-turn"], json!(4));
    let text = cluster.newest_receipt().await.unwrap().to_string();
    // F11.7
    assert!(!["lead", "scout", "deep"].iter().any(|name| text.contains(name)), "{text}");
    cluster.at_rest().await.unwrap();
    ask(&cluster, &[(SESSION, "lead")], json!({})).await;
    // F11.6
    assert_eq!(cluster.newest_facts().await.unwrap()["program-turn"], json!(0));
    ask(&cluster, &[], json!({})).await;
    let none = cluster.newest_facts().await.unwrap();
    assert_eq!((&none["program-hash"], &none["program-turn"]), (&json!(0), &json!(0)));
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f11_a_policy_keeps_programs_where_they_run() {
    let cluster = cluster(STAYS).await;
    let mut homes = Vec::new();
    for root in ["a", "b", "c"] {
        homes.push((root, ask(&cluster, &[(SESSION, root)], json!({})).await));
    }
    let mut workers: Vec<u64> = homes.iter().map(|(_, worker)| *worker).collect();
    workers.sort_unstable();
    // F11.5: each went to a worker without programs.
    assert_eq!(workers, [1, 2, 3]);
    for (root, home) in homes {
        for turn in 0..4 {
            let child = format!("{root}-{turn}");
            // F11.4
            assert_eq!(ask(&cluster, &[(SESSION, root)], json!({})).await, home);
            assert_eq!(ask(&cluster, &[(SESSION, &child), (PARENT, root)], json!({})).await, home);
        }
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn f11_a_program_ends_with_a_last_request_that_is_answered_and_stays_ended() {
    let cluster = cluster("").await;
    let last = [(SESSION, "lead"), ("x-dynamo-session-final", "true")];
    let body = |stream: bool| {
        json!({"model": "tiny", "max_tokens": 500, "ignore_eos": true, "stream": stream,
               "messages": [{"role": "user", "content": "hello"}]})
        .to_string()
    };
    ask(&cluster, &[(SESSION, "lead")], json!({})).await;
    let refuse = Fault::always(FaultKind::Status { status: 400, retry_after: None });
    cluster.sims.iter().for_each(|sim| sim.set_faults(vec![refuse.clone()]));
    assert_eq!(cluster.client.post(CHAT, &last, body(false)).await.unwrap().status, 400);
    cluster.sims.iter().for_each(|sim| sim.set_faults(Vec::new()));
    cluster.at_rest().await.unwrap();
    let mut stream = cluster.client.stream(CHAT, &[(SESSION, "lead")], body(true)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    // F11.6: the client may send the request that failed again
    assert_eq!(cluster.newest_facts().await.unwrap()["program-turn"], json!(2));
    ask(&cluster, &last, json!({})).await;
    assert_eq!(stream.all().await.unwrap().last().unwrap(), "[DONE]");
    cluster.at_rest().await.unwrap();
    ask(&cluster, &[(SESSION, "lead")], json!({})).await;
    let facts = cluster.newest_facts().await.unwrap();
    // F11.6: the stream that ended later does not count
    assert_eq!((&facts["program-turn"], &facts["program-idle-ms"]), (&json!(0), &json!(u32::MAX)));
    cluster.at_rest().await.unwrap();
}
