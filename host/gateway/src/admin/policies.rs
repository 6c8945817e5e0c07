//! `/policies`: status, log lines, reload of the directory, rollback and promotion.
//!
//! The policy manager's thread executes a command; the answer waits for it for a limited time.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Query, State as Extract, rejection::QueryRejection},
    http::{HeaderMap, Response, StatusCode},
    response::IntoResponse,
};
use pointsman_policy_runtime::{Command, CommandError, LaneStatus, Report, SlotName};
use pointsman_routing::{Lane, SlotKind};
use pointsman_workers::ModelName;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::refuse::PathText;
use crate::{http::request_id, openai::error, state::State};

/// How long an answer waits for the manager: the time of a few compilations.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// Letters of a client's text in a message.
const MAX_SHOWN: usize = 64;

/// Query of a rollback.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RollBackQuery {
    /// The model whose own slot is meant.
    model: Option<String>,
    /// The lane to roll back.
    lane: Option<String>,
}

/// Query of an undo. It takes no lane: the content goes back to the lanes whose files ask for it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct UndoQuery {
    model: Option<String>,
}

/// Query of a promotion.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct PromoteQuery {
    model: Option<String>,
    /// The trial to promote.
    from: Option<String>,
}

type Given<T> = Result<Query<T>, QueryRejection>;

/// Selects log lines of a slot's policies.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct WhichLines {
    /// The model whose own slot is meant.
    model: Option<String>,
    /// Only lines with a number above this one.
    after: u64,
}

/// Why a command was not executed.
#[derive(Debug, thiserror::Error)]
pub(super) enum AdminError {
    /// The path names no slot.
    #[error("unknown slot `{0}`: expected prefill, decode, aggregated or decode-override")]
    NoSlot(String),
    /// The query string is not valid.
    #[error("{0}")]
    BadQuery(String),
    /// The query names no lane that the command takes.
    #[error("`{key}={given}` is not a lane for this: expected {expected}; slot `{slot}` runs {lanes}")]
    BadLane {
        /// `lane` or `from`.
        key: &'static str,
        /// The text, or its beginning.
        given: String,
        /// Lanes that the command takes.
        expected: String,
        /// Label of the slot.
        slot: String,
        /// Lanes that run something.
        lanes: String,
    },
    /// The manager refused the command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The manager has not executed the command yet.
    #[error(
        "the policy manager did not answer within 30 s; it executes the command later, see GET /policies"
    )]
    Busy,
}

pub(super) async fn status(Extract(state): Extract<Arc<State>>) -> Json<Value> {
    Json(json!(*state.policies.status()))
}

/// Returns the last lines that the policies of a slot logged.
pub(super) async fn log(
    Extract(state): Extract<Arc<State>>,
    PathText(slot): PathText,
    which: Given<WhichLines>,
    headers: HeaderMap,
) -> Response<Body> {
    let found = query(which).and_then(|which| {
        let name = name(&slot, which.model.as_deref())?;
        let lines = state.policies.lines(&name, which.after);
        lines.ok_or_else(|| CommandError::UnknownSlot(slot).into())
    });
    answer(found, &headers)
}

/// Reads the policy directory now.
pub(super) async fn reload(Extract(state): Extract<Arc<State>>, headers: HeaderMap) -> Response<Body> {
    answer(ask(&state, Command::Reload).await, &headers)
}

/// Restores the previous content of a slot, or ends a trial.
pub(super) async fn roll_back(
    Extract(state): Extract<Arc<State>>,
    PathText(slot): PathText,
    given: Given<RollBackQuery>,
    headers: HeaderMap,
) -> Response<Body> {
    let work = async {
        let RollBackQuery { model, lane } = query(given)?;
        let slot = name(&slot, model.as_deref())?;
        let lane = lane.map(|lane| lane_of(&state, &slot, "lane", &lane, &Lane::ALL)).transpose()?;
        ask(&state, Command::RollBack { slot, lane: lane.unwrap_or_default() }).await
    };
    answer(work.await, &headers)
}

/// Lets the content run again that a slot rolled back last.
pub(super) async fn undo_roll_back(
    Extract(state): Extract<Arc<State>>,
    PathText(slot): PathText,
    given: Given<UndoQuery>,
    headers: HeaderMap,
) -> Response<Body> {
    let work = async {
        let slot = name(&slot, query(given)?.model.as_deref())?;
        ask(&state, Command::UndoRollBack { slot }).await
    };
    answer(work.await, &headers)
}

/// Makes a trial the active generation.
pub(super) async fn promote(
    Extract(state): Extract<Arc<State>>,
    PathText(slot): PathText,
    given: Given<PromoteQuery>,
    headers: HeaderMap,
) -> Response<Body> {
    let work = async {
        let PromoteQuery { model, from } = query(given)?;
        let slot = name(&slot, model.as_deref())?;
        let trials = [Lane::Canary, Lane::Shadow];
        let from = from.map(|from| lane_of(&state, &slot, "from", &from, &trials)).transpose()?;
        ask(&state, Command::Promote { slot, from }).await
    };
    answer(work.await, &headers)
}

/// Sends a command to the manager and waits for its report.
async fn ask(state: &State, command: Command) -> Result<Report, AdminError> {
    let asked = tokio::time::timeout(COMMAND_TIMEOUT, state.policies.execute(command));
    Ok(asked.await.map_err(|_| AdminError::Busy)??)
}

fn query<T>(given: Given<T>) -> Result<T, AdminError> {
    let Query(query) = given.map_err(|error| AdminError::BadQuery(error.body_text()))?;
    Ok(query)
}

fn name(slot: &str, model: Option<&str>) -> Result<SlotName, AdminError> {
    let kind = SlotKind::ALL.into_iter().find(|kind| kind.as_str() == slot);
    let kind = kind.ok_or_else(|| AdminError::NoSlot(slot.to_owned()))?;
    Ok((kind, model.map(ModelName::new)))
}

/// Returns the lane that the query names. `lanes`: those that the command takes.
fn lane_of(
    state: &State,
    (kind, model): &SlotName,
    key: &'static str,
    given: &str,
    lanes: &[Lane],
) -> Result<Lane, AdminError> {
    if let Some(lane) = lanes.iter().find(|lane| lane.as_str() == given) {
        return Ok(*lane);
    }
    let model = model.as_ref().map(ToString::to_string);
    let status = state.policies.status();
    let slot = status.slots.iter().find(|slot| (slot.slot, &slot.model) == (*kind, &model));
    let label = model.as_ref().map_or_else(|| kind.to_string(), |model| format!("{model}/{kind}"));
    let Some(slot) = slot else { return Err(CommandError::UnknownSlot(label).into()) };
    let trial = |lane: Lane, trial: &Option<LaneStatus>| {
        trial.as_ref().map(|trial| format!("{lane} `{}`", trial.policy))
    };
    let running = [trial(Lane::Canary, &slot.canary), trial(Lane::Shadow, &slot.shadow)];
    let active = format!("{} `{}`", Lane::Active, slot.policy);
    let running: Vec<String> = std::iter::once(active).chain(running.into_iter().flatten()).collect();
    let expected: Vec<&str> = lanes.iter().map(|lane| lane.as_str()).collect();
    let expected = expected.split_last().map(|(last, others)| format!("{} or {last}", others.join(", ")));
    Err(AdminError::BadLane {
        key,
        given: given.chars().take(MAX_SHOWN).collect(),
        expected: expected.unwrap_or_default(),
        slot: label,
        lanes: running.join(", "),
    })
}

fn answer<T: Serialize>(outcome: Result<T, AdminError>, headers: &HeaderMap) -> Response<Body> {
    match outcome {
        Ok(report) => Json(report).into_response(),
        Err(error) => {
            let (status, code) = error.status();
            let body = error::body(status, code, &error.to_string(), &request_id(headers));
            (status, Json(body)).into_response()
        }
    }
}

impl AdminError {
    fn status(&self) -> (StatusCode, &'static str) {
        use CommandError as E;
        match self {
            Self::NoSlot(_) | Self::Command(E::UnknownSlot(_)) => (StatusCode::NOT_FOUND, "slot_not_found"),
            Self::BadQuery(_) | Self::BadLane { .. } => (StatusCode::BAD_REQUEST, "invalid_request"),
            Self::Command(E::NothingToRollBack(_)) => (StatusCode::CONFLICT, "nothing_to_roll_back"),
            Self::Command(E::NothingToUndo(_) | E::NoFileToUndo { .. } | E::UndoRefused { .. }) => {
                (StatusCode::CONFLICT, "nothing_to_undo")
            }
            Self::Command(E::NothingToPromote { .. }) => (StatusCode::CONFLICT, "nothing_to_promote"),
            Self::Command(E::Ambiguous { .. }) => (StatusCode::CONFLICT, "ambiguous"),
            Self::Command(E::Refused(refusal)) => (StatusCode::CONFLICT, refusal.kind()),
            Self::Command(E::Ended) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
            Self::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
        }
    }
}
