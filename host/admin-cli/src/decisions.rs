//! `pointsman decisions`.

use std::{fmt::Write as _, process::ExitCode};

use clap::{Args, Subcommand};
use serde::Deserialize;

use crate::{
    EXIT_CODES,
    answer::GatewayError,
    api::{Decision, Decisions, Outcome},
    block_on,
    explain::{candidate, why_failed},
    gateway::{Gateway, GatewayArgs, query, segment},
    print,
    summary::SummaryArgs,
    text::{Column, NONE, Table, clean, millis, moment},
    worker_name::worker_of,
};

/// Digits of the id of a decision. A request id of a client may look like one.
const DECISION_ID_DIGITS: usize = 16;

/// Commands below `decisions`.
#[derive(Debug, Subcommand)]
pub(crate) enum DecisionsCommand {
    /// Compare the lanes of each slot: decisions, fallbacks, agreement, cache hits and latencies.
    #[command(after_help = EXIT_CODES)]
    Summary(SummaryArgs),
}

/// Arguments of `decisions`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DecisionsArgs {
    #[command(subcommand)]
    command: Option<DecisionsCommand>,
    /// Id of a decision: explain it in sentences. Or a request id (x-request-id): list its decisions.
    /// A request id of at most 16 hex digits needs `--request`.
    #[arg(conflicts_with_all = ["last", "slot", "worker", "request"])]
    id: Option<String>,
    /// Number of decisions, newest first.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    last: u32,
    /// Only decisions of this slot: prefill, decode, aggregated or decode-override.
    #[arg(long)]
    slot: Option<String>,
    /// Only decisions for this worker: its id, URL or address, or a beginning that no other one has.
    #[arg(long)]
    worker: Option<String>,
    /// Only decisions of this request: the x-request-id of its answer.
    #[arg(long, value_name = "ID")]
    request: Option<String>,
    /// Print the JSON of the answer unchanged.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// The answer of `GET /decisions/{id}`.
#[derive(Deserialize)]
struct Explained {
    sentences: Vec<String>,
}

impl Explained {
    fn text(&self) -> String {
        self.sentences.iter().map(|sentence| format!("{}\n", clean(sentence))).collect()
    }
}

impl DecisionsArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        if let Some(DecisionsCommand::Summary(args)) = &self.command {
            return args.run();
        }
        let gateway = self.gateway.client()?;
        let (last, worker) = (self.last.to_string(), self.worker_id(&gateway)?);
        let (decision, request) = self.ids();
        let path = match decision {
            Some(id) => format!("/decisions/{}", segment(id)),
            None => {
                let pairs = [
                    ("limit", Some(&*last)),
                    ("slot", self.slot.as_deref()),
                    ("worker", worker.as_deref()),
                    ("request_id", request),
                ];
                format!("/decisions{}", query(&pairs))
            }
        };
        let answer = block_on(async { Ok(gateway.get(&path).await?) })?;
        if !answer.succeeded() {
            return Err(hinted(answer.refusal(), decision).into());
        }
        if self.json {
            return answer.print_json();
        }
        match decision {
            Some(_) => print(&answer.read::<Explained>()?.text())?,
            None => print(&table(&answer.read::<Decisions>()?))?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl DecisionsArgs {
    /// Returns the ids of the decision and of the request that the arguments name.
    fn ids(&self) -> (Option<&str>, Option<&str>) {
        let id = self.id.as_deref();
        let is_decision =
            |id: &&str| id.len() <= DECISION_ID_DIGITS && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        (id.filter(is_decision), self.request.as_deref().or(id.filter(|id| !is_decision(id))))
    }

    /// Returns the id of the worker that the argument names. A whole id may belong to a worker that left, and
    /// may be followed by a rank, as in `x-pointsman-decision`.
    fn worker_id(&self, gateway: &Gateway) -> anyhow::Result<Option<String>> {
        let Some(name) = &self.worker else { return Ok(None) };
        let id = name.split_once('/').map_or(&**name, |(id, _)| id);
        if id.parse::<u64>().is_ok() {
            return Ok(Some(name.to_owned()));
        }
        Ok(Some(block_on(async { Ok(worker_of(gateway, name).await?.id) })?.to_string()))
    }
}

/// Says of a decision that is not recorded that its id may be that of a request.
fn hinted(mut error: GatewayError, decision: Option<&str>) -> GatewayError {
    if let (GatewayError::Refused { status: 404, message, .. }, Some(id)) = (&mut error, decision) {
        let _ = write!(message, "; a request id: `pointsman decisions --request {id}`");
    }
    error
}

fn table(found: &Decisions) -> String {
    if found.decisions.is_empty() {
        return format!("no decision matches; the gateway keeps {}\n", found.kept);
    }
    let mut table = Table::new(&[
        Column::Left("ID"),
        Column::Left("TIME"),
        Column::Left("MODEL"),
        Column::Left("LEG"),
        Column::Left("POLICY"),
        Column::Left("DECIDER"),
        Column::Left("CHOICE"),
        Column::Right("COST"),
        Column::Left("OUTCOME"),
        Column::Right("TTFT"),
        Column::Left("REQUEST"),
    ]);
    for one in &found.decisions {
        table.row(vec![
            one.id.clone(),
            moment(one.call.now_us / 1_000),
            one.model.clone(),
            one.leg.clone(),
            policy(one),
            one.decider.by.clone(),
            choice(one),
            one.choice
                .as_ref()
                .and_then(|choice| choice.cost)
                .map_or(NONE.to_owned(), |cost| format!("{cost:.2}")),
            one.outcome.as_ref().map_or("in flight".to_owned(), ended),
            millis(one.outcome.as_ref().and_then(|outcome| outcome.ttft_ms)),
            one.request_id.clone(),
        ]);
    }
    table.text()
}

/// Returns the policy and its generation, which are of the slot of all models unless a model is named.
fn policy(one: &Decision) -> String {
    let name = one.program.as_ref().or(one.policy.as_ref()).map_or("native", |name| name);
    let of = one.slot_model.as_ref().map(|model| format!(" of {model}")).unwrap_or_default();
    format!("{name}@{}{of}", one.generation)
}

/// Returns how the request ended, and how the leg of this decision failed, if it did.
fn ended(outcome: &Outcome) -> String {
    let failed = outcome.run.as_ref().and_then(why_failed);
    failed.map_or(outcome.code.clone(), |why| format!("{}; leg failed: {why}", outcome.code))
}

fn choice(one: &Decision) -> String {
    match (&one.plan, &one.refused, &one.choice) {
        (Some(plan), _, _) => plan.word.clone(),
        (_, Some(refused), _) => refused.code.clone(),
        (_, _, Some(choice)) => candidate(choice.worker, choice.dp_rank),
        _ => NONE.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;
    use serde_json::json;

    use super::*;

    fn shown(run: &serde_json::Value) -> String {
        let outcome = json!({
            "status": 200, "code": "ok", "retried": true, "moved": false, "times_ms": {}, "duration_ms": 60.0,
            "cached_tokens": { "predicted": null, "reported": null }, "run": run,
        });
        ended(&serde_json::from_value(outcome).unwrap())
    }

    #[test]
    fn o1_what_answers_name_is_taken_as_it_stands_there() {
        let ids = |args: &[&str]| {
            let args = ["decisions"].iter().chain(args);
            let parsed =
                DecisionsArgs::augment_args(clap::Command::new("decisions")).try_get_matches_from(args);
            let args = DecisionsArgs::from_arg_matches(&parsed.unwrap()).unwrap();
            let (decision, request) = args.ids();
            (decision.map(str::to_owned), request.map(str::to_owned))
        };
        let some = |id: &str| Some(id.to_owned());
        // O1.5
        assert_eq!(ids(&["6b0e418100000001"]), (some("6b0e418100000001"), None));
        for request in ["075b2df3fac4045f43bb397a5159460e", "my-request"] {
            assert_eq!(ids(&[request]), (None, some(request)));
        }
        assert_eq!(ids(&["--request", "42"]), (None, some("42")));
    }

    #[test]
    fn t2_the_list_says_that_the_leg_of_a_decision_failed() {
        let failed = |kind: &str, status: Option<u16>| {
            shown(&json!({ "sent_ms": 1.0, "ended_ms": 2.0, "failed": kind, "status": status }))
        };
        // T2.8
        assert_eq!(failed("status_5xx", Some(503)), "ok; leg failed: HTTP 503");
        assert_eq!(failed("connect", None), "ok; leg failed: no connection");
        assert_eq!(shown(&json!({ "sent_ms": 1.0, "ended_ms": 2.0, "failed": null, "status": null })), "ok");
        assert_eq!(shown(&json!(null)), "ok");
    }
}
