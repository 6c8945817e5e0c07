//! `POST /v1/route` says what a request would get: both are asked over a grid of settings, states and hints.

use std::{collections::BTreeMap, time::Duration};

use pointsman_gateway::config::{LegOrder, SlotEntry};
use pointsman_routing::{NativeMode, SlotKind};
use pointsman_sim::{Dialect, Role, SimConfig};
use pointsman_tests::{COMPLETIONS, TestCluster, TestClusterBuilder, client::Reply};
use pointsman_workers::{Booking, BookingRequest, Leg, Refusal};
use prefix_index::Prefix;
use serde_json::{Value, json};

/// Prefill, prefill, decode, decode.
const WORKERS: u64 = 4;

/// The settings of one model. Its workers are those from `first`.
#[derive(Clone, Debug)]
struct Model {
    name: String,
    first: u64,
    order: LegOrder,
    enforce_disagg: bool,
    local_fallback: bool,
    conditional: bool,
}

/// State of some workers of a model, by their indices.
#[derive(Clone, Copy, Debug)]
enum State {
    Well,
    Draining(&'static [u64]),
    Busy(&'static [u64]),
    Paused(&'static [u64]),
}

/// A pause cannot be taken back: these states come last.
const STATES: [State; 12] = [
    State::Well,
    State::Draining(&[0]),
    State::Draining(&[1]),
    State::Draining(&[0, 1]),
    State::Draining(&[2]),
    State::Draining(&[2, 3]),
    State::Busy(&[0, 1]),
    State::Busy(&[3]),
    State::Busy(&[2, 3]),
    State::Paused(&[0]),
    State::Paused(&[1]),
    State::Paused(&[2, 3]),
];

/// Headers and `nvext` of a request to a model whose first worker is this.
fn hints(first: u64) -> Vec<(Vec<(&'static str, String)>, Value)> {
    let prefill = |place: u64| ("x-prefill-instance-id", (first + place).to_string());
    let worker = |place: u64| ("x-worker-instance-id", (first + place).to_string());
    vec![
        (vec![], json!({})),
        (vec![prefill(0)], json!({})),
        (vec![prefill(1)], json!({})),
        (vec![worker(2)], json!({})),
        (vec![worker(3)], json!({})),
        (vec![prefill(0), worker(3)], json!({})),
        (vec![prefill(1), worker(2)], json!({})),
        (vec![prefill(900)], json!({})),
        (vec![worker(900)], json!({})),
        (vec![worker(0)], json!({})),
        (vec![], json!({ "allowed_worker_ids": [first + 1, first + 3] })),
        (vec![], json!({ "allowed_worker_ids": [first + 3] })),
    ]
}

fn models() -> Vec<Model> {
    let mut models = Vec::new();
    for order in [LegOrder::PrefillFirst, LegOrder::DecodeFirst] {
        for bits in 0..8_u64 {
            let number = models.len() as u64;
            models.push(Model {
                name: format!("m{number}"),
                first: 1 + number * WORKERS,
                order,
                enforce_disagg: bits & 1 != 0,
                local_fallback: bits & 2 != 0,
                conditional: bits & 4 != 0,
            });
        }
    }
    models
}

async fn cluster(dialect: Dialect, models: &[Model]) -> TestCluster {
    let mut builder = TestClusterBuilder::new().config(|config| {
        // Its next choice follows from the last one, not from the request's random number.
        for kind in [SlotKind::Prefill, SlotKind::Decode, SlotKind::Aggregated] {
            let native = Some(NativeMode::RoundRobin);
            config.policies.slots.insert(kind, SlotEntry { native, ..SlotEntry::default() });
        }
        for model in models {
            let settings = config.models.entry(model.name.clone()).or_default();
            (settings.order, settings.enforce_disagg) = (Some(model.order), Some(model.enforce_disagg));
            settings.local_fallback = Some(model.local_fallback);
            if model.conditional {
                let entry: SlotEntry = toml::from_str("settings = { enabled = true }").unwrap();
                let entry = SlotEntry { builtin: Some("conditional-disagg".to_owned()), ..entry };
                settings.slots.insert(SlotKind::DecodeOverride, entry);
            }
        }
    });
    for model in models {
        for (role, more) in [
            (Role::Prefill, ",max_concurrency=2,topology.rack=r1,kv_transfer=required:rack"),
            (Role::Prefill, ",max_concurrency=2"),
            (Role::Decode, ",max_concurrency=2,topology.rack=r1"),
            (Role::Decode, ",max_concurrency=2,topology.rack=r2"),
        ] {
            let sim = SimConfig { model: model.name.clone(), ..SimConfig::instant(dialect, role) };
            builder = builder.sim_with(sim, more);
        }
    }
    builder.start().await
}

/// Brings the workers of a model into a state. Returns the load that keeps them busy.
fn enter(cluster: &TestCluster, model: &Model, state: State) -> Vec<Booking> {
    let mut held = Vec::new();
    let of = |place: &u64| cluster.worker(model.first + place);
    match state {
        State::Well => {}
        State::Draining(places) => places.iter().for_each(|place| of(place).set_draining(true)),
        State::Paused(places) => {
            let retry_after = Some(Duration::from_secs(30));
            let refusal = Refusal { retry_after, is_too_many: false };
            places
                .iter()
                .for_each(|place| _ = of(place).note_refusal(refusal, tokio::time::Instant::now(), 0));
        }
        State::Busy(places) => {
            let request = BookingRequest::new(Leg::Decode, Prefix::default(), 16, 16);
            for place in places {
                held.extend((0..2).map(|_| of(place).candidates()[0].book(&request)));
            }
        }
    }
    held
}

fn leave(cluster: &TestCluster, model: &Model) {
    (0..WORKERS).for_each(|place| cluster.worker(model.first + place).set_draining(false));
}

/// Answer for a client: the prefill and the decode worker, or status and code.
type Seen = Result<(Option<u64>, u64), (u16, String)>;

fn refused(reply: &Reply) -> (u16, String) {
    (reply.status.as_u16(), reply.code())
}

fn previewed(reply: &Reply) -> Seen {
    if reply.status != 200 {
        return Err(refused(reply));
    }
    let workers = &reply.json().unwrap()["worker_id"];
    Ok((workers["prefill_worker_id"].as_u64(), workers["decode_worker_id"].as_u64().unwrap()))
}

fn served(reply: &Reply) -> Seen {
    if reply.status != 200 {
        return Err(refused(reply));
    }
    let decisions = reply.headers["x-pointsman-decision"].to_str().unwrap();
    let mut chosen = BTreeMap::new();
    for decision in decisions.split(", ") {
        let (leg, rest) = decision.split_once('=').unwrap();
        chosen.insert(leg, rest.split_once('/').unwrap().0.parse::<u64>().unwrap());
    }
    let local = chosen.get("aggregated").map(|worker| (None, *worker));
    Ok(local.unwrap_or_else(|| (chosen.get("prefill").copied(), chosen["decode"])))
}

/// Asks for each cell of the grid where it would run, and runs it. Returns how often each outcome was seen.
async fn compare(dialect: Dialect) -> BTreeMap<String, u32> {
    let models = models();
    let cluster = cluster(dialect, &models).await;
    let mut seen = BTreeMap::new();
    for model in &models {
        for state in STATES {
            let held = enter(&cluster, model, state);
            for (headers, nvext) in hints(model.first) {
                let body = json!({
                    "model": model.name, "prompt": "where would this run ".repeat(60), "max_tokens": 2, "nvext": nvext,
                });
                let mut all: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
                all.push(("x-pointsman-decision", "1"));
                cluster.gateway.state().router.index().flush();
                let preview = cluster.client.post("/v1/route", &all, body.to_string()).await.unwrap();
                let reply = cluster.client.post(COMPLETIONS, &all, body.to_string()).await.unwrap();
                let (preview, reply) = (previewed(&preview), served(&reply));
                // F2.7
                assert_eq!(preview, reply, "{dialect:?} {model:?} {state:?} {headers:?} {body}");
                let kind = match reply {
                    Ok((Some(_), _)) => "two workers".to_owned(),
                    Ok((None, _)) => "one worker".to_owned(),
                    Err((status, code)) => format!("{status} {code}"),
                };
                *seen.entry(kind).or_insert(0) += 1;
                let booked = held.len() as u32;
                cluster.until("the request has ended", |cluster| cluster.booked() == booked).await.unwrap();
            }
            drop(held);
            leave(&cluster, model);
        }
    }
    seen
}

#[tokio::test]
async fn f2_a_preview_says_what_a_request_would_get_over_the_whole_grid_of_settings() {
    let seen = compare(Dialect::Vllm).await;
    // The comparison means something only when each outcome occurs.
    for kind in [
        "two workers",
        "one worker",
        "404 worker_not_found",
        "409 worker_not_eligible",
        "503 no_worker",
        "503 overloaded",
        "503 prefill_unavailable",
        "529 overloaded",
    ] {
        assert!(seen.get(kind).is_some_and(|count| *count >= 5), "{kind}: {seen:?}");
    }
}

#[tokio::test]
async fn f2_a_preview_of_engines_without_local_prefill_says_what_a_request_would_get() {
    let seen = compare(Dialect::Sglang).await;
    for kind in ["two workers", "409 worker_not_eligible", "503 no_worker", "529 overloaded"] {
        assert!(seen.get(kind).is_some_and(|count| *count >= 5), "{kind}: {seen:?}");
    }
    assert_eq!(seen.get("one worker"), None, "{seen:?}");
}
