//! D4: a request whose decode worker is planned to prefill the prompt itself, when that worker does not take
//! it: then it runs over a pair, as if it had been planned so.

use std::time::Duration;

use pointsman_gateway::config::{Config, Model, SlotEntry};
use pointsman_routing::{BusyThresholds, SlotKind};
use pointsman_sim::{Dialect, Fault, FaultKind, FaultLeg, Role, SimConfig};
use pointsman_tests::{CHAT, COMPLETIONS, TestCluster, TestClusterBuilder, client::Reply};
use pointsman_workers::{Leg, WorkerId};
use serde_json::{Value, json};

use crate::{
    continuation,
    orchestration::{EXPLAIN, chat},
};

mod waits;

/// Plans local prefill wherever the decode worker can prefill.
fn always_local(config: &mut Config) {
    let text =
        "builtin = \"conditional-disagg\"\nsettings = { enabled = true, local-prompt-tokens = 1000000 }";
    let entry: SlotEntry = toml::from_str(text).unwrap();
    config.policies.slots.insert(SlotKind::DecodeOverride, entry);
}

fn local_fleet(decode: usize, change: impl FnOnce(&mut Config)) -> TestClusterBuilder {
    let builder = TestClusterBuilder::new().config(|config| {
        always_local(config);
        change(config);
    });
    let builder = builder.sim(Dialect::Vllm, Role::Prefill);
    (0..decode).fold(builder, |builder, _| builder.sim(Dialect::Vllm, Role::Decode))
}

async fn start(builder: TestClusterBuilder) -> TestCluster {
    let cluster = builder.start().await;
    let known = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        snapshot.workers().iter().all(|worker| worker.engine_load().is_some())
    };
    cluster.until("the load of every engine is known", known).await.unwrap();
    cluster
}

fn status(status: u16) -> Fault {
    Fault { times: Some(1), ..Fault::always(FaultKind::Status { status, retry_after: None }) }
}

/// Returns the decisions about a request without ids and policies, such as `aggregated=2/0 plan`.
fn decided(reply: &Reply) -> Vec<String> {
    let header = reply.headers["x-pointsman-decision"].to_str().unwrap();
    let short = |one: &str| format!("{} {}", one.split(' ').next().unwrap(), one.rsplit(' ').next().unwrap());
    header.split(", ").map(short).collect()
}

async fn post(cluster: &TestCluster, more: Value) -> Reply {
    cluster.client.post(CHAT, &[EXPLAIN], chat(more)).await.unwrap()
}

async fn handoffs(cluster: &TestCluster, result: &str) -> f64 {
    let start = format!("pointsman_handoffs_total{{result=\"{result}\"}}");
    cluster.metric(&start).await.unwrap().iter().sum()
}

/// Returns whether the prefill worker has a request.
fn prefills(cluster: &TestCluster) -> bool {
    let snapshot = cluster.gateway.state().registry.snapshot();
    snapshot.get(WorkerId(1)).is_some_and(|prefill| prefill.active_requests() == 1)
}

/// Number of generations that an engine was asked for.
fn generations(cluster: &TestCluster, sim: usize) -> u64 {
    cluster.sims[sim].state().requests.values().sum()
}

#[tokio::test]
async fn d4_the_retry_of_a_local_plan_runs_over_a_pair_without_the_worker_that_failed() {
    let cluster = start(local_fleet(2, |_| {})).await;
    for stream in [false, true] {
        let before = handoffs(&cluster, "local_failed").await;
        let local = || vec![Fault { leg: Some(FaultLeg::Aggregated), ..status(500) }];
        (1..3).for_each(|sim| cluster.sims[sim].set_faults(local()));
        let reply = post(&cluster, json!({"stream": stream})).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        (1..3).for_each(|sim| cluster.sims[sim].set_faults(vec![]));
        let decided = decided(&reply);
        assert_eq!(decided.len(), 3, "{decided:?}");
        let worker = |one: &str| one.split(['=', '/']).nth(1).unwrap().to_owned();
        assert!(decided[0].starts_with("aggregated=") && decided[0].ends_with("plan"), "{decided:?}");
        // D4.9
        assert!(decided[1].starts_with("prefill=1/") && decided[2].starts_with("decode="), "{decided:?}");
        assert_ne!(worker(&decided[0]), worker(&decided[2]), "{decided:?}");
        // D4.13
        assert_eq!(handoffs(&cluster, "local_failed").await, before + 1.0);
    }
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_the_only_decode_worker_decodes_for_a_pair_after_it_failed_or_refused_to_prefill() {
    let p2p = |role: &str, port: u16| format!(",role={role},transport=p2p_nccl,kv_addr=127.0.0.9:{port}");
    let sim = |dialect, role| SimConfig::instant(dialect, role);
    let kinds = [
        (sim(Dialect::Vllm, Role::Prefill), String::new(), sim(Dialect::Vllm, Role::Decode), String::new()),
        (
            sim(Dialect::Sglang, Role::Prefill),
            String::new(),
            sim(Dialect::Sglang, Role::Decode),
            ",local_prefill=true".to_owned(),
        ),
        (
            sim(Dialect::Vllm, Role::Aggregated),
            p2p("prefill", 14_581),
            sim(Dialect::Vllm, Role::Aggregated),
            format!("{},local_prefill=true", p2p("decode", 14_582)),
        ),
    ];
    for (prefill, of_prefill, decode, of_decode) in kinds {
        let builder = TestClusterBuilder::new().config(always_local);
        let cluster = start(builder.sim_with(prefill, &of_prefill).sim_with(decode, &of_decode)).await;
        // An SGLang decode engine refuses each prompt that comes without a handoff.
        let refuses = of_decode == ",local_prefill=true";
        let ways = [(500, "local_failed"), (400, "local_refused_by_engine")];
        for (code, reason) in ways.into_iter().skip(usize::from(refuses)) {
            cluster.sims[1].set_faults(if refuses { vec![] } else { vec![status(code)] });
            let reply = post(&cluster, json!({})).await;
            assert_eq!(reply.status, 200, "{of_decode} {code}: {reply:?}");
            let expected = ["aggregated=2/0 plan", "prefill=1/0 policy", "decode=2/0 policy"];
            // D4.9, D4.11
            assert_eq!(decided(&reply), expected, "{of_decode} {code}");
            assert_eq!(handoffs(&cluster, reason).await, 1.0, "{of_decode} {code}");
            cluster.at_rest().await.unwrap();
        }
    }
}

#[tokio::test]
async fn d4_a_prompt_that_the_planned_worker_refuses_goes_to_the_pair_without_a_retry() {
    let cluster = start(local_fleet(1, |config| config.routing.retries = 0)).await;
    for code in [400, 413, 422] {
        cluster.sims[1].set_faults(vec![status(code)]);
        let reply = post(&cluster, json!({"stream": code == 413})).await;
        // D4.11
        assert_eq!((reply.status.as_u16(), decided(&reply).len()), (200, 3), "{code}: {reply:?}");
    }
    // No worker is to blame.
    let failed = |worker: u64| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        snapshot.get(WorkerId(worker)).unwrap().ineligible().is_some()
    };
    assert!(!failed(1) && !failed(2));
    cluster.sims[0].set_faults(vec![status(422)]);
    cluster.sims[1].set_faults(vec![status(400)]);
    let reply = post(&cluster, json!({})).await;
    // D4.11: the pair's own answer
    assert_eq!((reply.status.as_u16(), decided(&reply).len()), (422, 2), "{reply:?}");
    for code in [401, 403, 404] {
        let before = generations(&cluster, 0);
        cluster.sims[0].set_faults(vec![]);
        cluster.sims[1].set_faults(vec![status(code)]);
        let reply = post(&cluster, json!({})).await;
        // D4.11: nothing that the prompt could change
        assert!(reply.status.as_u16() >= 400 && generations(&cluster, 0) == before, "{code}: {reply:?}");
    }
    // Without a pair, the refusal is the answer.
    let failing = Fault { leg: Some(FaultLeg::Health), times: None, ..status(500) };
    cluster.sims[0].set_faults(vec![failing]);
    let down = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        snapshot.get(WorkerId(1)).unwrap().ineligible().is_some()
    };
    cluster.until("prefill is down", down).await.unwrap();
    cluster.sims[1].set_faults(vec![status(400)]);
    assert_eq!(post(&cluster, json!({})).await.status, 400);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_a_client_that_leaves_while_the_pair_is_asked_leaves_nothing_behind() {
    let slow =
        SimConfig { overhead: Duration::from_secs(3), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let builder = TestClusterBuilder::new().config(always_local).sim_with(slow, "");
    let cluster = start(builder.sim(Dialect::Vllm, Role::Decode)).await;
    for code in [400, 500] {
        cluster.sims[1].set_faults(vec![status(code)]);
        tokio::select! {
            reply = post(&cluster, json!({})) => panic!("{reply:?}"),
            asked = cluster.until("the pair is asked", prefills) => asked.unwrap(),
        }
        // D4.9, E1.2
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn d4_a_planned_worker_has_to_be_within_the_limits_of_both_legs() {
    let full = BusyThresholds { kv_usage: Some(0.0), ..BusyThresholds::default() };
    for leg in [Leg::Aggregated, Leg::Decode] {
        let slow =
            SimConfig { itl: Duration::from_millis(10), ..SimConfig::instant(Dialect::Vllm, Role::Decode) };
        let builder = TestClusterBuilder::new().config(|config| {
            always_local(config);
            config.routing.busy.insert(leg, full);
        });
        let cluster = start(builder.sim(Dialect::Vllm, Role::Prefill).sim_with(slow, "")).await;
        assert_eq!(decided(&post(&cluster, json!({})).await), ["aggregated=2/0 plan"]);
        let long = chat(json!({"stream": true, "max_tokens": 4000}));
        let mut running = cluster.client.stream(CHAT, &[], long).await.unwrap();
        running.next().await.unwrap();
        let used = |cluster: &TestCluster| {
            let snapshot = cluster.gateway.state().registry.snapshot();
            let decode = snapshot.get(WorkerId(2)).unwrap().clone();
            decode.engine_load().is_some_and(|load| load.kv_usage > Some(0.0))
        };
        cluster.until("blocks of the decode engine are in use", used).await.unwrap();
        let preview = cluster.client.post("/v1/route", &[], chat(json!({}))).await.unwrap();
        let reply = post(&cluster, json!({})).await;
        if leg == Leg::Decode {
            // No decode worker is free, wherever the prompt is prefilled.
            assert_eq!((preview.status.as_u16(), reply.status.as_u16()), (529, 529), "{reply:?}");
        } else {
            // D4.10
            assert_eq!(preview.json().unwrap()["worker_id"]["prefill_worker_id"], 1, "{preview:?}");
            assert_eq!(decided(&reply).len(), 2, "{reply:?}");
            assert_eq!(handoffs(&cluster, "local_refused").await, 1.0);
        }
        drop(running);
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn f8_a_local_plan_binds_the_decode_leg_of_its_session() {
    let cluster = start(local_fleet(3, |_| {})).await;
    let session = json!({"nvext": {"session_control": {"session_id": "s", "action": "bind"}}});
    let first = decided(&post(&cluster, session.clone()).await);
    assert!(first[0].ends_with("plan") && first.len() == 1, "{first:?}");
    let bound = first[0].split(['=', '/']).nth(1).unwrap().to_owned();
    for turn in 0..4 {
        let more = json!({"messages": [{"role": "user", "content": format!("{turn}").repeat(400)}]});
        let mut body = session.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        // F8.6: the preview of decode finds the session's worker
        assert_eq!(decided(&post(&cluster, body).await), [format!("aggregated={bound}/0 plan")]);
    }
    let pinned = [EXPLAIN, ("x-prefill-instance-id", "1")];
    let remote = cluster.client.post(CHAT, &pinned, chat(session)).await.unwrap();
    // F8.6: and so does its decode leg
    assert_eq!(decided(&remote), ["prefill=1/0 pin".to_owned(), format!("decode={bound}/0 session")]);
    // D4.5: a hint that excludes local prefill refuses no plan
    assert_eq!(handoffs(&cluster, "local_refused").await, 0.0);
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_a_local_plan_is_not_refused_where_disaggregation_is_enforced() {
    let cluster = start(local_fleet(1, |config| config.routing.enforce_disagg = true)).await;
    let reply = post(&cluster, json!({})).await;
    // D4.5
    assert_eq!((decided(&reply).len(), handoffs(&cluster, "local_refused").await), (2, 0.0), "{reply:?}");
}

/// A fleet with local plans whose engines write a token every few milliseconds.
async fn streaming(change: impl FnOnce(&mut Config)) -> TestCluster {
    let sim = |role| SimConfig { itl: Duration::from_millis(3), ..SimConfig::instant(Dialect::Vllm, role) };
    let builder = TestClusterBuilder::new().config(|config| {
        always_local(config);
        change(config);
    });
    let roles = [Role::Prefill, Role::Decode, Role::Decode];
    start(roles.into_iter().fold(builder, |builder, role| builder.sim_with(sim(role), ""))).await
}

#[tokio::test]
async fn d4_the_rest_of_a_stream_whose_planned_worker_breaks_runs_over_a_pair() {
    let cluster = streaming(|config| {
        let rules = Model { continuations: Some(1), ..Model::default() };
        config.models.insert("tiny".into(), rules);
    })
    .await;
    let undisturbed = continuation::normal(&continuation::stream(&cluster, COMPLETIONS, json!({})).await);
    let before = generations(&cluster, 0);
    let cut = Fault { times: Some(1), ..Fault::always(FaultKind::Cut { after_tokens: 6 }) };
    (1..3).for_each(|sim| {
        let leg = Some(FaultLeg::Aggregated);
        cluster.sims[sim].set_faults(vec![Fault { leg, ..cut.clone() }]);
    });
    let events = continuation::stream(&cluster, COMPLETIONS, json!({})).await;
    // D4.12
    assert_eq!(continuation::normal(&events), undisturbed);
    assert_eq!(generations(&cluster, 0), before + 1, "the rest was prefilled remotely");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_a_stream_that_leaves_its_planned_worker_moves_to_a_pair() {
    let cluster = streaming(|_| {}).await;
    let undisturbed =
        continuation::normal(&continuation::stream(&cluster, COMPLETIONS, json!({"max_tokens": 120})).await);
    let before = generations(&cluster, 0);
    let body = continuation::body(COMPLETIONS, json!({"max_tokens": 120}));
    let mut stream = cluster.client.stream(COMPLETIONS, &[], body).await.unwrap();
    let mut events = Vec::new();
    for _ in 0..5 {
        events.push(stream.next().await.unwrap().unwrap());
    }
    let snapshot = cluster.gateway.state().registry.snapshot();
    let serving = snapshot.workers().iter().find(|worker| worker.own_requests() > 0).unwrap().id();
    cluster.admin.post(&format!("/workers/{serving}/drain?move=true"), &[], "").await.unwrap();
    events.extend(stream.all().await.unwrap());
    // D4.12
    assert_eq!(continuation::normal(&events), undisturbed);
    assert_eq!(generations(&cluster, 0), before + 1, "the rest was prefilled remotely");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn d4_a_busy_pair_is_not_waited_for() {
    let slow =
        SimConfig { overhead: Duration::from_secs(20), ..SimConfig::instant(Dialect::Vllm, Role::Prefill) };
    let builder = TestClusterBuilder::new().config(always_local).sim_with(slow, ",max_concurrency=1");
    let builder = builder.sim(Dialect::Vllm, Role::Decode).sim(Dialect::Vllm, Role::Aggregated);
    let cluster = start(builder).await;
    let others = async {
        cluster.until("the prefill worker is busy", prefills).await.unwrap();
        cluster.sims[1].set_faults(vec![status(500)]);
        let failed = post(&cluster, json!({})).await;
        cluster.sims[1].set_faults(vec![status(400)]);
        (failed, post(&cluster, json!({})).await)
    };
    let pin = [("x-prefill-instance-id", "1")];
    let (failed, refused) = tokio::select! {
        reply = cluster.client.post(CHAT, &pin, chat(json!({}))) => panic!("it has to last: {reply:?}"),
        replies = others => replies,
    };
    assert_eq!(failed.status, 200, "{failed:?}");
    // D4.9
    assert_eq!(decided(&failed), ["aggregated=2/0 plan", "aggregated=3/0 policy"]);
    // D4.11: as without a plan
    assert_eq!((refused.status.as_u16(), decided(&refused)), (529, vec!["aggregated=2/0 plan".to_owned()]));
    assert!(refused.headers.contains_key(http::header::RETRY_AFTER), "{refused:?}");
}
