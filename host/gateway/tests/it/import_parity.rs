//! Golden parity: what an import makes chooses as the published rule of the other router does. The tables and
//! the expected values are in tests/fixtures/import/parity.json, which parity.py computes from the published
//! formulas.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{fs, process::Command};

use pointsman_policy_sdk::testing::{run_decode_override, run_filter, run_scorer, run_selector};
use policy_cache_aware::CacheAware;
use policy_conditional_disagg::ConditionalDisagg;
use policy_formula::Keep;
use policy_queue_kv_prefix::QueueKvPrefix;
use serde_json::Value;
use toml::Table;

use crate::import::fixtures;

fn golden() -> Value {
    serde_json::from_str(&fs::read_to_string(fixtures().join("parity.json")).unwrap()).unwrap()
}

/// The slots of the configuration that a sample becomes.
fn slots(sample: &str) -> Table {
    let path = fixtures().join(sample);
    let mut command = Command::new(crate::programs::pointsman());
    if sample.starts_with("llm-d") {
        command.args(["import", "llm-d"]).arg(path);
    } else {
        let router = format!("{}-router", sample.split('-').next().unwrap());
        let text = fs::read_to_string(path).unwrap();
        command.args(["import", &router, "--"]).args(text.lines());
    }
    let ran = command.output().unwrap();
    let config: Table = String::from_utf8(ran.stdout).unwrap().parse().unwrap();
    config["policies"]["slots"].as_table().unwrap().clone()
}

/// A case with a policy's settings, as TOML.
fn case(
    settings: &toml::Value,
    request: &[(&str, &Value)],
    rows: &Value,
    facts: &[(&str, &str)],
    expect: Table,
) -> Table {
    let number = |value: &Value| match value.as_i64() {
        Some(number) => toml::Value::Integer(number),
        None => toml::Value::Float(value.as_f64().unwrap()),
    };
    let row = |row: &Value| -> toml::Value {
        let known = facts.iter().map(|(theirs, fact)| ((*fact).to_owned(), number(&row[*theirs])));
        toml::Value::Table(known.collect())
    };
    let request: Table = request.iter().map(|(fact, value)| ((*fact).to_owned(), number(value))).collect();
    let mut case = Table::new();
    case.insert("name".to_owned(), "golden".into());
    case.insert("settings".to_owned(), settings.clone());
    case.insert("request".to_owned(), request.into());
    case.insert("rows".to_owned(), rows.as_array().unwrap().iter().map(row).collect::<Vec<_>>().into());
    case.insert("expect".to_owned(), expect.into());
    case
}

fn cases(list: Vec<Table>) -> String {
    let mut file = Table::new();
    file.insert("case".to_owned(), list.into());
    toml::to_string(&file).unwrap()
}

fn one(key: &str, value: impl Into<toml::Value>) -> Table {
    Table::from_iter([(key.to_owned(), value.into())])
}

#[test]
fn s4_scores_of_llm_d_are_those_of_the_imported_slot() {
    const FACTS: [(&str, &str); 6] = [
        ("queue", "engine-queue"),
        ("running", "engine-running"),
        ("kv", "kv-usage"),
        ("active", "active-requests"),
        ("cached", "cached-blocks-device"),
        ("waiting_tokens", "active-prefill-tokens"),
    ];
    for group in golden()["llm_d"].as_array().unwrap() {
        let (sample, slot) = (group["sample"].as_str().unwrap(), group["slot"].as_str().unwrap());
        let slots = slots(sample);
        let scorer = &slots[slot]["scorers"][0];
        assert_eq!(scorer["policy"].as_str(), Some("queue-kv-prefix"));
        let settings = &scorer["settings"];
        let weights = ["queue", "kv", "prefix", "load", "running", "active", "tokens", "lora"];
        let total: f64 =
            weights.iter().filter_map(|name| settings.get(name)).filter_map(toml::Value::as_float).sum();
        let mut list = Vec::new();
        for table in group["tables"].as_array().unwrap() {
            let scores = table["scores"].as_array().unwrap().iter().map(|score| score.as_f64().unwrap());
            // A cost is the distance to the best possible score, so the lowest cost is the highest score.
            let costs: Vec<toml::Value> = scores.clone().map(|score| (total - score).into()).collect();
            let least = scores.clone().fold(f64::MIN, f64::max);
            let best: Vec<u64> =
                (0..).zip(scores).filter(|(_, score)| *score > least - 1e-6).map(|(row, _)| row).collect();
            assert_eq!(serde_json::to_value(best).unwrap(), table["best"]);
            let request = [("request-blocks", &table["blocks"]), ("block-size", &table["block_size"])];
            list.push(case(settings, &request, &table["rows"], &FACTS, one("costs", costs)));
        }
        // S4.1
        run_scorer::<QueueKvPrefix>(&cases(list))
            .unwrap_or_else(|report| panic!("{sample} {slot}: {report}"));
    }
}

#[test]
fn s4_the_decider_of_llm_d_splits_the_same_requests() {
    let golden = golden();
    let group = &golden["decider"];
    let slots = slots(group["sample"].as_str().unwrap());
    let settings = &slots["decode-override"]["settings"];
    let mut list = Vec::new();
    for row in group["cases"].as_array().unwrap() {
        let plan = if row["remote"].as_bool().unwrap() { "remote" } else { "local" };
        let request = [("prompt-tokens", &row["prompt"]), ("block-size", &group["block_size"])];
        let mut made = case(
            settings,
            &request,
            &Value::Array(vec![Value::Object(serde_json::Map::new())]),
            &[],
            one("plan", plan),
        );
        let decode = Table::from_iter([
            ("local-prefill".to_owned(), 1.into()),
            ("cached-blocks-device".to_owned(), row["cached"].as_i64().unwrap().into()),
            ("engine-queue".to_owned(), row["queue"].as_i64().unwrap().into()),
            ("kv-usage".to_owned(), row["kv"].as_f64().unwrap().into()),
            // llm-d does not look at the load, so neither may its age count.
            ("load-age-ms".to_owned(), 4_294_967_295_i64.into()),
        ]);
        made.insert("decode".to_owned(), decode.into());
        list.push(made);
    }
    // S4.2
    run_decode_override::<ConditionalDisagg>(&cases(list)).unwrap_or_else(|report| panic!("{report}"));
}

#[test]
fn s4_cache_aware_of_both_routers_chooses_the_same_workers() {
    for group in golden()["cache_aware"].as_array().unwrap() {
        let sample = group["sample"].as_str().unwrap();
        let slots = slots(sample);
        let slot = slots.get("prefill").or_else(|| slots.get("aggregated")).unwrap();
        assert_eq!(slot["builtin"].as_str(), Some("cache-aware"), "{sample}");
        let facts = [("active", "active-requests"), ("cached", "cached-blocks-device")];
        for table in group["tables"].as_array().unwrap() {
            let request = [("request-blocks", &table["blocks"])];
            let chosen = table["rows_chosen"].as_array().unwrap();
            // Of equal workers any may be drawn: one of the original's candidates, and never another.
            let fits = chosen.iter().any(|row| {
                let expect = one("row", row.as_i64().unwrap());
                let made = case(&slot["settings"], &request, &table["rows"], &facts, expect);
                run_selector::<CacheAware>(&cases(vec![made])).is_ok()
            });
            // S4.3
            assert!(fits, "{sample}: {table}");
        }
    }
}

/// A worker: its cached blocks of ten, and its prompt tokens in flight.
type Affine = (u32, u32);

/// The workers that llm-d's `prefix-cache-affinity-filter` keeps with its defaults (`plugin.go` at 066c20e).
fn sticky(workers: &[Affine]) -> Vec<usize> {
    let is_sticky = |(cached, _): &Affine| f64::from(*cached) / 10.0 >= 0.8;
    let time_ms = |(_, tokens): &Affine| f64::from(*tokens) / 15_928.0 * 1_000.0;
    let best = |sticky: bool| {
        workers.iter().filter(|worker| is_sticky(worker) == sticky).map(time_ms).reduce(f64::min)
    };
    let (all, kept) = (0..workers.len(), 0..workers.len());
    match (best(true), best(false)) {
        (None, _) => all.collect(),
        (Some(own), Some(other)) if own - other > 18_000.0 => all.collect(),
        _ => kept.filter(|row| is_sticky(&workers[*row])).collect(),
    }
}

#[test]
fn s4_the_workers_with_a_cached_prompt_are_those_that_llm_d_keeps() {
    let slots = slots("llm-d-affinity.yaml");
    let filter = &slots["aggregated"]["filters"][0];
    assert_eq!(filter["policy"].as_str(), Some("formula"));
    let (cached, tokens) = ([0, 7, 8, 10], [0, 5_000, 286_000, 287_000, 600_000]);
    let all: Vec<Affine> = cached.iter().flat_map(|cached| tokens.map(|tokens| (*cached, tokens))).collect();
    let mut list = Vec::new();
    for (first, second) in all.iter().flat_map(|first| all.iter().map(move |second| (*first, *second))) {
        let workers = [first, second, (9, 300_000), (3, 20_000)];
        for workers in [&workers[..], &workers[..3], &workers[..2], &workers[..1]] {
            let row = |(cached, tokens): &Affine| -> toml::Value {
                let facts = [("cached-blocks-device", *cached), ("active-prefill-tokens", *tokens)];
                toml::Value::Table(
                    facts.map(|(name, value)| (name.to_owned(), value.into())).into_iter().collect(),
                )
            };
            let kept: Vec<toml::Value> =
                sticky(workers).into_iter().map(|row| i64::try_from(row).unwrap().into()).collect();
            let mut case = Table::new();
            case.insert("name".to_owned(), format!("{workers:?}").into());
            case.insert("settings".to_owned(), filter["settings"].clone());
            case.insert("request".to_owned(), one("request-blocks", 10).into());
            case.insert("rows".to_owned(), workers.iter().map(row).collect::<Vec<_>>().into());
            case.insert("expect".to_owned(), one("keep", kept).into());
            list.push(case);
        }
    }
    let kinds: std::collections::BTreeSet<usize> =
        list.iter().map(|case| case["expect"]["keep"].as_array().unwrap().len()).collect();
    assert_eq!(kinds.len(), 4, "{kinds:?}");
    // S4.5
    run_filter::<Keep>(&cases(list)).unwrap_or_else(|report| panic!("{report}"));
}
