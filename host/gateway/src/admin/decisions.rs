//! `/decisions`: the last routing decisions, newest first, filtered, or all of them as lines of JSON.
//!
//! Decisions are copied one by one, so that a large answer makes no data thread wait.

use std::{
    convert::Infallible,
    str::FromStr,
    sync::{Arc, LazyLock},
};

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State as Extract},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::stream;
use pointsman_embedded_policies::PREDICTED_DISAGG;
use pointsman_policy_runtime::digest;
use pointsman_routing::{DecisionHeader, DecisionId, DecisionResult, Decisions, Record};
use pointsman_workers::{ModelName, Snapshot, Worker, WorkerId};
use serde_json::{Value, json};
use tokio::time::Duration;

use super::refuse::{PathText, invalid, refuse};
use crate::{big_numbers::with_texts, state::State};

/// Default number of decisions in an answer.
const DEFAULT_LIMIT: usize = 50;
/// Largest number of decisions in an answer; an export has no limit.
const MAX_LIMIT: usize = 1_000;
/// Largest worker id that is taken for one of an operator, as the page does.
const LONGEST_CHOSEN: u64 = 9_999_999_999;
/// Number of lines written between two yields to other tasks.
const LINES_PER_TURN: usize = 32;
/// Digest of the built-in `predicted-disagg`, as in receipts.
static PREDICTED_DISAGG_DIGEST: LazyLock<String> = LazyLock::new(|| digest(PREDICTED_DISAGG).to_string());

/// Filter of decisions. A decision has to match every given field.
#[derive(Debug, Default)]
struct Filter {
    limit: Option<usize>,
    before: Option<DecisionId>,
    model: Option<String>,
    leg: Option<String>,
    slot: Option<String>,
    /// Model of the slot; empty: the slot of all models.
    slot_model: Option<String>,
    worker: Option<u64>,
    rank: Option<u32>,
    policy: Option<String>,
    generation: Option<u64>,
    decider: Option<String>,
    code: Option<String>,
    min_ttft: Option<Duration>,
    request_id: Option<String>,
    lane: Option<String>,
    /// Only requests that ended.
    ended: bool,
    /// Only requests that ended with status 400 or above.
    failed: bool,
    /// Whether each decision is told without its inputs.
    short: bool,
}

/// `GET /decisions`.
pub(super) async fn list(
    Extract(state): Extract<Arc<State>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let filter = match Filter::parse(query.as_deref().unwrap_or_default()) {
        Ok(filter) => filter,
        Err(problem) => return invalid(&headers, &problem),
    };
    let decisions = state.router.decisions();
    let limit = filter.limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT);
    let ids = decisions.ids();
    let kept = ids.len();
    let found = ids.into_iter().filter_map(|id| filter.copy(decisions, id)).take(limit);
    let found = found.map(|record| if filter.short { json!(record.summary()) } else { json!(record) });
    let found: Vec<Value> = found.collect();
    let found = json!({ "kept": kept, "lost": decisions.lost(), "decisions": found });
    Json(with_texts(found)).into_response()
}

/// `GET /decisions/{id}`: a decision, with the sentences that `pointsman decisions ID` prints.
pub(super) async fn one(
    Extract(state): Extract<Arc<State>>,
    PathText(id): PathText,
    headers: HeaderMap,
) -> Response {
    let Ok(number) = id.parse() else {
        return invalid(
            &headers,
            &format!(
                "`{id}` is not a decision id: expected hexadecimal digits; GET /decisions?request_id= has those of a request"
            ),
        );
    };
    match state.router.decisions().get(number, |_, _| true) {
        Some(record) => {
            let mut receipt = json!(record);
            let snapshot = state.registry.snapshot();
            let address = |id| address(&snapshot, id);
            let sentences = pointsman_admin_cli::sentences(&receipt, &address, &PREDICTED_DISAGG_DIGEST);
            if let Some(members) = receipt.as_object_mut() {
                members.insert("sentences".to_owned(), json!(sentences));
            }
            Json(with_texts(receipt)).into_response()
        }
        None => refuse(
            &headers,
            StatusCode::NOT_FOUND,
            "decision_not_found",
            &format!("decision `{id}` is not recorded; decisions.keep and decisions.bytes limit the record"),
        ),
    }
}

/// The address of a worker, unless an operator chose its id: ids of that length are hashes. `None` also when
/// the worker left, or another one has the same address.
fn address(workers: &Snapshot, id: u64) -> Option<String> {
    let address = |worker: &Arc<Worker>| {
        let url = worker.spec().url.trim_end_matches('/').to_owned();
        url.split_once("://").map_or(url.clone(), |(_, address)| address.to_owned())
    };
    let found = workers.get(WorkerId(id)).filter(|_| id > LONGEST_CHOSEN).map(address)?;
    let uses = workers.workers().iter().filter(|worker| address(worker) == found).count();
    (uses == 1).then_some(found)
}

/// `GET /decisions/export`: one decision a line, newest first, as they are when their line is written.
pub(super) async fn export(
    Extract(state): Extract<Arc<State>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let filter = match Filter::parse(query.as_deref().unwrap_or_default()) {
        Ok(filter) => filter,
        Err(problem) => return invalid(&headers, &problem),
    };
    let decisions = state.router.decisions().clone();
    let ids = decisions.ids().into_iter();
    let left = filter.limit.unwrap_or(usize::MAX);
    let lines = stream::unfold((ids, left), move |(mut ids, mut left)| {
        let lines = lines(&decisions, &filter, &mut ids, &mut left);
        async move {
            tokio::task::yield_now().await;
            lines.map(|lines| (Ok::<_, Infallible>(lines), (ids, left)))
        }
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

/// Returns the next lines; `None` at the end. An empty chunk is possible: then no decision of this turn
/// matched.
fn lines(
    decisions: &Decisions,
    filter: &Filter,
    ids: &mut std::vec::IntoIter<DecisionId>,
    left: &mut usize,
) -> Option<Bytes> {
    if *left == 0 || ids.len() == 0 {
        return None;
    }
    let mut lines = Vec::new();
    for record in ids.by_ref().take(LINES_PER_TURN).filter_map(|id| filter.copy(decisions, id)).take(*left) {
        *left -= 1;
        if serde_json::to_writer(&mut lines, &with_texts(json!(record))).is_ok() {
            lines.push(b'\n');
        }
    }
    Some(Bytes::from(lines))
}

impl Filter {
    /// Reads a query string.
    fn parse(query: &str) -> Result<Self, String> {
        let mut filter = Self::default();
        for (name, value) in pairs(query) {
            match name.as_str() {
                "limit" => filter.limit = Some(number(&name, &value)?),
                "before" => filter.before = Some(number(&name, &value)?),
                "model" => filter.model = Some(value),
                "leg" => filter.leg = Some(one_of(&name, value, &["aggregated", "prefill", "decode"])?),
                "slot" => {
                    let slots = ["aggregated", "prefill", "decode", "decode-override"];
                    filter.slot = Some(one_of(&name, value, &slots)?);
                }
                "slot_model" => filter.slot_model = Some(value),
                // With its rank, as in `x-pointsman-decision`.
                "worker" => {
                    let (id, rank) =
                        value.split_once('/').map_or((&*value, None), |(id, rank)| (id, Some(rank)));
                    filter.worker = Some(number(&name, id)?);
                    filter.rank = rank.map(|rank| number(&name, rank)).transpose()?;
                }
                // With its generation, as there.
                "policy" => match value.rsplit_once('@') {
                    Some((policy, generation)) => {
                        filter.policy = Some(policy.to_owned());
                        filter.generation = Some(number(&name, generation)?);
                    }
                    None => filter.policy = Some(value),
                },
                "generation" => filter.generation = Some(number(&name, &value)?),
                "decider" => {
                    let deciders = ["policy", "native", "fallback", "pin", "session", "plan"];
                    filter.decider = Some(one_of(&name, value, &deciders)?);
                }
                "code" => filter.code = Some(value),
                "min_ttft_ms" => {
                    let time = number::<f64>(&name, &value).ok();
                    let time = time.and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok());
                    let problem = || format!("min_ttft_ms: `{value}` is not a number of milliseconds");
                    filter.min_ttft = Some(time.ok_or_else(problem)?);
                }
                "request_id" => filter.request_id = Some(value),
                "lane" => filter.lane = Some(one_of(&name, value, &["active", "canary"])?),
                "ended" => filter.ended = number(&name, &value)?,
                "failed" => filter.failed = number(&name, &value)?,
                "short" => filter.short = number(&name, &value)?,
                _ => {
                    return Err(format!(
                        "unknown filter `{name}`: expected limit, before, model, leg, slot, slot_model, worker, policy, generation, decider, code, min_ttft_ms, request_id, lane, ended, failed or short"
                    ));
                }
            }
        }
        Ok(filter)
    }

    fn copy(&self, decisions: &Decisions, id: DecisionId) -> Option<Record> {
        let old = self.before.is_none_or(|before| id < before);
        old.then(|| decisions.get(id, |head, request| self.takes(head, request))).flatten()
    }

    fn takes(&self, head: &DecisionHeader, request: &str) -> bool {
        let same = |wanted: &Option<String>, is: &str| wanted.as_deref().is_none_or(|wanted| wanted == is);
        let worker = match head.result {
            DecisionResult::Chosen(worker, rank) | DecisionResult::Planned(_, Some((worker, rank))) => {
                Some((worker.0, rank.0))
            }
            _ => None,
        };
        let policy = || head.program.ranker().map_or("native", |step| &step.name);
        // A request in flight has no code and no time yet.
        let outcome = head.outcome.as_ref();
        let slow =
            |least: Duration| outcome.and_then(|outcome| outcome.ttft).is_some_and(|ttft| ttft >= least);
        same(&self.model, head.model.as_str())
            && same(&self.leg, head.leg.as_str())
            && same(&self.slot, head.program.slot.as_str())
            && same(&self.slot_model, head.program.model.as_ref().map_or("", ModelName::as_str))
            && self.worker.is_none_or(|wanted| worker.is_some_and(|(id, _)| id == wanted))
            && self.rank.is_none_or(|wanted| worker.is_some_and(|(_, rank)| rank == wanted))
            && self.policy.as_deref().is_none_or(|wanted| wanted == policy() || wanted == &*head.program.name)
            && self.generation.is_none_or(|wanted| head.program.generation.0 == wanted)
            && same(&self.decider, head.by.label())
            && self.code.as_deref().is_none_or(|wanted| outcome.is_some_and(|outcome| outcome.code == wanted))
            && self.min_ttft.is_none_or(slow)
            && same(&self.request_id, request)
            && same(&self.lane, head.program.lane.as_str())
            && (!self.ended || outcome.is_some())
            && (!self.failed || outcome.is_some_and(|outcome| outcome.status >= 400))
    }
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{name}: `{value}` is not a valid value"))
}

fn one_of(name: &str, value: String, values: &[&str]) -> Result<String, String> {
    if values.contains(&value.as_str()) {
        Ok(value)
    } else {
        Err(format!("{name}: unknown value `{value}`: expected one of {}", values.join(", ")))
    }
}

/// Names and values of a query string, `%` and `+` undone.
fn pairs(query: &str) -> Vec<(String, String)> {
    let parsed = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(
        &format!("/?{query}").parse().unwrap_or_default(),
    );
    parsed.map(|pairs| pairs.0).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{Registry, WorkerSpec};

    use super::*;

    #[test]
    fn o1_a_worker_whose_id_is_a_hash_has_its_address_in_sentences() {
        let registry = Registry::default();
        let add = |flag: &str| registry.upsert(WorkerSpec::parse_flag(flag).unwrap());
        add("id=7,role=decode,engine=vllm,model=m,url=http://a:1");
        add("id=10000000000,role=decode,engine=vllm,model=m,url=https://b:2/x/");
        add("id=10000000001,role=prefill,engine=vllm,model=m,url=http://c:3");
        add("id=10000000002,role=decode,engine=vllm,model=m,url=http://c:3/");
        let snapshot = registry.snapshot();
        // O1.26
        assert_eq!(address(&snapshot, 10_000_000_000).as_deref(), Some("b:2/x"));
        for id in [7, 10_000_000_001, 10_000_000_003] {
            assert_eq!(address(&snapshot, id), None, "{id}");
        }
    }

    #[test]
    fn o4_the_document_has_the_filters_of_decisions() {
        let problem = Filter::parse("no-filter=1").unwrap_err();
        let (_, names) = problem.split_once("expected ").unwrap();
        let names = names.replace(" or ", ", ");
        let known: Vec<&str> = names.split(", ").collect();
        let document: Value = serde_json::from_str(crate::openapi::ADMIN).unwrap();
        for (path, others) in [("/decisions", &[][..]), ("/decisions/export", &["short"][..])] {
            let listed = document["paths"][path]["get"]["parameters"].as_array().unwrap();
            let listed: Vec<&str> = listed.iter().map(|one| one["name"].as_str().unwrap()).collect();
            let expected: Vec<&str> = known.iter().copied().filter(|name| !others.contains(name)).collect();
            // O4.4
            assert_eq!(listed, expected, "{path}");
        }
    }

    #[test]
    fn a_filter_that_makes_no_sense_is_named() {
        let cases = [
            ("limit=many", "limit: `many` is not a valid value"),
            ("leg=left", "leg: unknown value `left`: expected one of aggregated, prefill, decode"),
            (
                "model=a&colour=red",
                "unknown filter `colour`: expected limit, before, model, leg, slot, slot_model, worker, policy, generation, decider, code, min_ttft_ms, request_id, lane, ended, failed or short",
            ),
            ("worker=7/x", "worker: `x` is not a valid value"),
            ("before=xyz", "before: `xyz` is not a valid value"),
            ("failed=1", "failed: `1` is not a valid value"),
            ("lane=shadow", "lane: unknown value `shadow`: expected one of active, canary"),
            ("min_ttft_ms=-1", "min_ttft_ms: `-1` is not a number of milliseconds"),
        ];
        for (query, expected) in cases {
            assert_eq!(Filter::parse(query).unwrap_err(), expected);
        }
        let filter = Filter::parse("model=a%20b&min_ttft_ms=1.5&before=1f").unwrap();
        assert_eq!(
            (filter.model.as_deref(), filter.min_ttft),
            (Some("a b"), Some(Duration::from_micros(1_500)))
        );
        assert_eq!(filter.before, "1f".parse().ok());
        let header = Filter::parse("worker=18446744073709551615/3&policy=low-queue%2Bkv-aware%407").unwrap();
        let named = (header.worker, header.rank, header.policy.as_deref(), header.generation);
        // O1.5
        assert_eq!(named, (Some(u64::MAX), Some(3), Some("low-queue+kv-aware"), Some(7)));
    }
}
