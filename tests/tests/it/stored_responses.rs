//! Responses that engines store: later requests about one go to the engine that has it.

use std::collections::BTreeSet;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Fault, FaultKind, Role, SimConfig};
use pointsman_tests::{
    RESPONSES, TestCluster, TestClusterBuilder,
    client::{Client, Reply},
    picker::PickerClient,
};
use serde_json::{Value, json};

async fn cluster(workers: usize, change: impl FnOnce(&mut Config)) -> TestCluster {
    let builder = TestClusterBuilder::new().config(change);
    let builder = (0..workers).fold(builder, |builder, _| builder.sim(Dialect::Vllm, Role::Aggregated));
    builder.start().await
}

pub(crate) fn turn(previous: Option<&str>, stream: bool) -> String {
    let mut body = json!({ "model": "tiny", "input": "hello", "max_output_tokens": 2, "stream": stream });
    if let Some(previous) = previous {
        body["previous_response_id"] = previous.into();
    }
    body.to_string()
}

pub(crate) fn id_of(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json().unwrap()["id"].as_str().unwrap().to_owned()
}

/// Makes a response and returns its id.
pub(crate) async fn first(client: &Client) -> String {
    id_of(&client.post(RESPONSES, &[], turn(None, false)).await.unwrap())
}

/// The engine that stored a response, by its place.
pub(crate) async fn place_of(cluster: &TestCluster, id: &str) -> usize {
    for (place, sim) in cluster.sims.iter().enumerate() {
        let reply = Client::new(sim.addr()).get(&format!("{RESPONSES}/{id}")).await.unwrap();
        if reply.status == 200 {
            return place;
        }
    }
    panic!("no engine has {id}");
}

#[tokio::test]
async fn i12_the_next_turn_goes_to_the_worker_that_stored_the_last_one() {
    let cluster = cluster(3, |_| {}).await;
    let mut places = BTreeSet::new();
    for round in 0..64 {
        // Equal workers are chosen by chance.
        if round >= 6 && places.len() > 1 {
            break;
        }
        let whole = first(&cluster.client).await;
        // Other requests move the round of the workers on.
        first(&cluster.client).await;
        let next = id_of(&cluster.client.post(RESPONSES, &[], turn(Some(&whole), false)).await.unwrap());
        let place = place_of(&cluster, &whole).await;
        // I12.1
        assert_eq!(place_of(&cluster, &next).await, place);
        let stream = cluster.client.stream(RESPONSES, &[], turn(Some(&next), true)).await.unwrap();
        assert_eq!(stream.status, 200);
        // I6.18
        assert_eq!(stream.headers["x-accel-buffering"], "no");
        let events = stream.all().await.unwrap();
        let created: Value = serde_json::from_str(events[0].split_once("data: ").unwrap().1).unwrap();
        let streamed = created["response"]["id"].as_str().unwrap().to_owned();
        let last = cluster.client.post(RESPONSES, &[], turn(Some(&streamed), false)).await.unwrap();
        // I12.1: the id of a streamed answer is known, too
        assert_eq!(place_of(&cluster, &id_of(&last)).await, place);
        places.insert(place);
    }
    assert!(places.len() > 1, "one worker served everything: {places:?}");
    let unknown = cluster.client.post(RESPONSES, &[], turn(Some("resp_none"), false)).await.unwrap();
    // I12.3
    assert!(
        unknown.status == 404 && String::from_utf8_lossy(&unknown.body).contains("resp_none"),
        "{unknown:?}"
    );
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i12_a_response_is_read_cancelled_and_deleted_where_it_is() {
    let cluster = cluster(3, |config| config.auth.keys = pointsman_tests::client_keys(&[("sk-1", "")])).await;
    let key = [("authorization", "Bearer sk-1")];
    for _ in 0..6 {
        let id = id_of(&cluster.client.post(RESPONSES, &key, turn(None, false)).await.unwrap());
        let path = format!("{RESPONSES}/{id}");
        let read = cluster.client.get_with(&path, &key).await.unwrap();
        // I12.2
        assert_eq!((read.status.as_u16(), read.json().unwrap()["id"].as_str()), (200, Some(id.as_str())));
        let stream = cluster.client.events(&format!("{path}?stream=true"), &key).await.unwrap();
        assert_eq!(stream.headers["content-type"], "text/event-stream; charset=utf-8");
        // I6.18
        assert_eq!(stream.headers["x-accel-buffering"], "no");
        // I12.2: the query passes, and a stream of events
        assert!(stream.all().await.unwrap()[0].contains("response.completed"));
        let cancelled = cluster.client.post(&format!("{path}/cancel"), &key, "").await.unwrap();
        // I12.2
        assert_eq!(
            (cancelled.status.as_u16(), &cancelled.json().unwrap()["status"]),
            (200, &json!("cancelled"))
        );
        let refused = cluster.client.get(&path).await.unwrap();
        // I12.2: with the key of a client only
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (401, "unauthorized"));
        let deleted = cluster.client.send("DELETE", &path, &key).await.unwrap();
        // I12.2
        assert_eq!((deleted.status.as_u16(), &deleted.json().unwrap()["deleted"]), (200, &json!(true)));
        // I12.3
        assert_eq!(cluster.client.get_with(&path, &key).await.unwrap().status, 404);
    }
    for id in ["resp_none", "..%2f..%2fhealth", "%00", &"x".repeat(300)] {
        let reply = cluster.client.get_with(&format!("{RESPONSES}/{id}"), &key).await.unwrap();
        // I12.3, I_response_not_found
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (404, "response_not_found"), "{id}");
    }
    cluster.at_rest().await.unwrap();
    let counted = cluster.metric("pointsman_requests_total{endpoint=\"stored_responses\"").await.unwrap();
    assert!(counted.iter().sum::<f64>() >= 40.0, "{counted:?}");
}

#[tokio::test]
async fn i12_a_response_of_one_tenant_does_not_exist_for_another() {
    let keys = pointsman_tests::client_keys(&[("sk-1", "one"), ("sk-2", "two")]);
    for workers in [1, 3] {
        let cluster = cluster(workers, |config| config.auth.keys.clone_from(&keys)).await;
        let [own, other] = ["Bearer sk-1", "Bearer sk-2"].map(|key| [("authorization", key)]);
        let id = id_of(&cluster.client.post(RESPONSES, &own, turn(None, false)).await.unwrap());
        let path = format!("{RESPONSES}/{id}");
        let asked = cluster.sims.iter().map(|sim| sim.recorded().len()).sum::<usize>();
        for (method, path) in [("GET", &path), ("DELETE", &path), ("POST", &format!("{path}/cancel"))] {
            let refused = cluster.client.send(method, path, &other).await.unwrap();
            // I12.4
            assert_eq!((refused.status.as_u16(), refused.code().as_str()), (404, "response_not_found"));
        }
        let next = cluster.client.post(RESPONSES, &other, turn(Some(&id), false)).await.unwrap();
        // I12.4
        assert_eq!((next.status.as_u16(), next.code().as_str()), (404, "response_not_found"));
        // A hint names the worker, and its engine would continue the response.
        for previous in [json!(id), json!(format!("{id} ")), json!([id])] {
            let mut body: Value = serde_json::from_str(&turn(None, false)).unwrap();
            body["previous_response_id"] = previous;
            for worker in 1..=workers {
                body["nvext"] = json!({ "backend_instance_id": worker });
                let next = cluster.client.post(RESPONSES, &other, body.to_string()).await.unwrap();
                // I12.1, I12.7
                assert_eq!((next.status.as_u16(), next.code().as_str()), (404, "response_not_found"));
            }
        }
        // I12.4: no engine was asked
        assert_eq!(cluster.sims.iter().map(|sim| sim.recorded().len()).sum::<usize>(), asked);
        assert_eq!(cluster.client.send("DELETE", &path, &own).await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn i12_a_response_whose_worker_left_is_gone() {
    let cluster = cluster(2, |_| {}).await;
    let id = first(&cluster.client).await;
    let worker = place_of(&cluster, &id).await + 1;
    assert_eq!(cluster.admin.delete(&format!("/workers/{worker}")).await.unwrap().status, 200);
    let next = cluster.client.post(RESPONSES, &[], turn(Some(&id), false)).await.unwrap();
    // I12.3
    assert_eq!((next.status.as_u16(), next.code().as_str()), (404, "response_not_found"));
    let read = cluster.client.get(&format!("{RESPONSES}/{id}")).await.unwrap();
    // I12.3
    assert_eq!((read.status.as_u16(), read.code().as_str()), (404, "response_not_found"));
    let message = read.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(&id), "{message}");
}

#[tokio::test]
async fn i12_a_response_is_found_when_its_engine_comes_back_as_another_worker() {
    let cluster = cluster(2, |_| {}).await;
    let id = first(&cluster.client).await;
    let place = place_of(&cluster, &id).await;
    assert_eq!(cluster.admin.delete(&format!("/workers/{}", place + 1)).await.unwrap().status, 200);
    let worker = json!({"id": 9, "role": "aggregated", "engine": "vllm", "url": cluster.sims[place].url()});
    let joined = cluster.admin.post("/workers", &[], worker.to_string()).await.unwrap();
    assert!(joined.status.is_success(), "{joined:?}");
    let eligible = |cluster: &TestCluster| {
        let snapshot = cluster.gateway.state().registry.snapshot();
        snapshot.workers().len() == 2 && snapshot.workers().iter().all(|worker| worker.ineligible().is_none())
    };
    cluster.until("the engine is back", eligible).await.unwrap();
    let read = cluster.client.get(&format!("{RESPONSES}/{id}")).await.unwrap();
    // I12.3
    assert_eq!(read.status, 200, "{read:?}");
    for _ in 0..4 {
        let next = cluster.client.post(RESPONSES, &[], turn(Some(&id), false)).await.unwrap();
        // I12.3, I12.1
        assert_eq!(place_of(&cluster, &id_of(&next)).await, place);
    }
}

#[tokio::test]
async fn i12_a_worker_that_drains_still_serves_what_it_stored() {
    for roles in [vec![Role::Aggregated; 2], vec![Role::Prefill, Role::Decode, Role::Decode]] {
        let builder = roles.iter().fold(TestClusterBuilder::new(), |all, role| all.sim(Dialect::Vllm, *role));
        let cluster = builder.start().await;
        let id = first(&cluster.client).await;
        let decode = |place: &usize| roles[*place] != Role::Prefill;
        let mut stores = Vec::new();
        for place in (0..roles.len()).filter(decode) {
            let engine = Client::new(cluster.sims[place].addr());
            let reply = engine.get(&format!("{RESPONSES}/{id}")).await.unwrap();
            stores.extend((reply.status == 200).then_some(place));
        }
        let place = *stores.last().unwrap();
        let drain = format!("/workers/{}/drain", place + 1);
        assert!(cluster.admin.post(&drain, &[], "").await.unwrap().status.is_success());
        for stream in [false, true] {
            let next = cluster.client.post(RESPONSES, &[], turn(Some(&id), stream)).await.unwrap();
            // I12.6
            assert_eq!(next.status, 200, "{roles:?} {next:?}");
        }
        let read = cluster.client.get(&format!("{RESPONSES}/{id}")).await.unwrap();
        // I12.6
        assert_eq!(read.status, 200);
        let new = place_of(&cluster, &first(&cluster.client).await).await;
        assert_ne!(new, place, "it gets no other requests");
        cluster.at_rest().await.unwrap();
    }
}

#[tokio::test]
async fn i12_a_draining_worker_that_is_paused_is_asked_no_more_than_another() {
    let cluster = cluster(2, |_| {}).await;
    let id = first(&cluster.client).await;
    let place = place_of(&cluster, &id).await;
    cluster.sims[place]
        .set_faults(vec![Fault::always(FaultKind::Status { status: 503, retry_after: Some(30) })]);
    let drain = format!("/workers/{}/drain", place + 1);
    assert!(cluster.admin.post(&drain, &[], "").await.unwrap().status.is_success());
    let mut asked = Vec::new();
    for _ in 0..3 {
        let next = cluster.client.post(RESPONSES, &[], turn(Some(&id), false)).await.unwrap();
        assert_eq!((next.status.as_u16(), next.code().as_str()), (503, "overloaded"), "{next:?}");
        asked.push(cluster.sims[place].state().requests.values().sum::<u64>());
    }
    // I12.6, I13.2
    assert_eq!(asked[0], asked[2], "a pause holds for a worker that drains, too");
    cluster.at_rest().await.unwrap();
}

#[tokio::test]
async fn i12_a_response_that_the_gateway_does_not_know_is_found_at_the_workers() {
    let cluster = cluster(3, |_| {}).await;
    for place in 0..3 {
        // As after a restart of the gateway.
        let engine = Client::new(cluster.sims[place].addr());
        let (one, two) = (first(&engine).await, first(&engine).await);
        // I12.5
        assert_eq!(cluster.client.get(&format!("{RESPONSES}/{one}")).await.unwrap().status, 200);
        let next = cluster.client.post(RESPONSES, &[], turn(Some(&two), false)).await.unwrap();
        // I12.5
        assert_eq!(place_of(&cluster, &id_of(&next)).await, place);
    }
}

#[tokio::test]
async fn i12_a_response_whose_owner_is_not_known_does_not_exist_where_tenants_do() {
    let keys = pointsman_tests::client_keys(&[("sk-1", "one"), ("sk-2", "")]);
    for workers in [1, 3] {
        let cluster = cluster(workers, |config| config.auth.keys.clone_from(&keys)).await;
        // As after a restart of the gateway.
        let engine = Client::new(cluster.sims[workers - 1].addr());
        let id = first(&engine).await;
        let path = format!("{RESPONSES}/{id}");
        let asked = || cluster.sims.iter().map(|sim| sim.recorded().len()).sum::<usize>();
        let before = asked();
        // A caller without a tenant might be reading a tenant's response.
        for key in ["Bearer sk-1", "Bearer sk-2"].map(|key| [("authorization", key)]) {
            for (method, path) in [("GET", &path), ("DELETE", &path), ("POST", &format!("{path}/cancel"))] {
                let refused = cluster.client.send(method, path, &key).await.unwrap();
                // I12.7
                assert_eq!((refused.status.as_u16(), refused.code().as_str()), (404, "response_not_found"));
            }
            let next = cluster.client.post(RESPONSES, &key, turn(Some(&id), false)).await.unwrap();
            // I12.7
            assert_eq!((next.status.as_u16(), next.code().as_str()), (404, "response_not_found"));
        }
        // I12.7: no engine was asked
        assert_eq!(asked(), before);
        assert_eq!(engine.get(&path).await.unwrap().status, 200, "it was not deleted");
        let own = [("authorization", "Bearer sk-1")];
        let made = id_of(&cluster.client.post(RESPONSES, &own, turn(None, false)).await.unwrap());
        let read = cluster.client.get_with(&format!("{RESPONSES}/{made}"), &own).await.unwrap();
        // I12.2
        assert_eq!(read.status, 200, "{read:?}");
    }
}

#[tokio::test]
async fn i12_behind_a_proxy_the_next_turn_goes_there_too() {
    let cluster = cluster(3, |config| config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap())).await;
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    for _ in 0..4 {
        let (picked, mut carried) = picker.ask(RESPONSES, &[], &turn(None, false)).await.unwrap();
        let engine: std::net::SocketAddr = picked.endpoint().unwrap().parse().unwrap();
        let answer = Client::new(engine).post(RESPONSES, &[], turn(None, false)).await.unwrap();
        let id = id_of(&answer);
        carried.answer_head(200, "application/json", None).unwrap();
        carried.answer_body(&answer.body, true).unwrap();
        carried.close();
        while carried.next().await.unwrap().is_some() {}
        let (next, _carried) = picker.ask(RESPONSES, &[], &turn(Some(&id), false)).await.unwrap();
        // I12.1
        assert_eq!(next.endpoint(), picked.endpoint());
        let mut read = picker.open().await.unwrap();
        read.head("GET", &format!("{RESPONSES}/{id}"), &[], true).unwrap();
        let (status, body) = read.picked().await.unwrap().refusal();
        // I12.2
        assert!(status == 200 && body.contains(&id), "{status} {body}");
    }
}

#[tokio::test]
async fn a1_a_turn_for_another_model_than_the_last_one_is_refused_by_their_names() {
    let other = SimConfig { model: "other".into(), ..SimConfig::instant(Dialect::Vllm, Role::Aggregated) };
    let builder = TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).sim_with(other, "");
    let cluster = builder.start().await;
    let id = first(&cluster.client).await;
    let next = turn(Some(&id), false).replace("\"tiny\"", "\"other\"");
    let refused = cluster.client.post(RESPONSES, &[], next).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (409, "worker_not_eligible"));
    // A1.17
    let text = String::from_utf8_lossy(&refused.body);
    assert!(text.contains(&format!("no worker of the model `other` has the response `{id}`")), "{text}");
    assert_eq!(cluster.client.post(RESPONSES, &[], turn(Some(&id), false)).await.unwrap().status, 200);
}
