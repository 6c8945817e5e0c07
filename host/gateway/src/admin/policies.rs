//! `/policies`: status, log lines, reload of the directory, rollback and promotion.
//!
//! The policy manager's thread executes a command; the answer waits for it for a limited time.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Path, Query, State as Extract},
    http::{HeaderMap, Response, StatusCode},
    response::IntoResponse,
};
use pointsman_policy_runtime::{Command, CommandError, Report, SlotName};
use pointsman_routing::{Lane, SlotKind};
use pointsman_workers::ModelName;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{http::request_id, openai::error, state::State};

/// How long an answer waits for the manager: the time of a few compilations.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// Which slot, and what of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Which {
    /// The model whose own slot is meant.
    model: Option<String>,
    /// The trial to promote.
    from: Option<Lane>,
    /// The lane to roll back.
    lane: Option<Lane>,
}

/// Which lines of a slot's policies.
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
    Path(slot): Path<String>,
    which: Result<Query<WhichLines>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Response<Body> {
    let found = which.map_err(|error| AdminError::BadQuery(error.body_text())).and_then(|Query(which)| {
        let name = slot_name(&slot, which.model.as_deref())?;
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
    Path(slot): Path<String>,
    which: Result<Query<Which>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Response<Body> {
    let work = async {
        let (slot, which) = name(&slot, which)?;
        ask(&state, Command::RollBack { slot, lane: which.lane.unwrap_or_default() }).await
    };
    answer(work.await, &headers)
}

/// Lets the content run again that a slot rolled back last.
pub(super) async fn undo_roll_back(
    Extract(state): Extract<Arc<State>>,
    Path(slot): Path<String>,
    which: Result<Query<Which>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Response<Body> {
    let work = async {
        let (slot, _) = name(&slot, which)?;
        ask(&state, Command::UndoRollBack { slot }).await
    };
    answer(work.await, &headers)
}

/// Makes a trial the active generation.
pub(super) async fn promote(
    Extract(state): Extract<Arc<State>>,
    Path(slot): Path<String>,
    which: Result<Query<Which>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Response<Body> {
    let work = async {
        let (slot, which) = name(&slot, which)?;
        ask(&state, Command::Promote { slot, from: which.from }).await
    };
    answer(work.await, &headers)
}

/// Sends a command to the manager and waits for its report.
async fn ask(state: &State, command: Command) -> Result<Report, AdminError> {
    let asked = tokio::time::timeout(COMMAND_TIMEOUT, state.policies.execute(command));
    Ok(asked.await.map_err(|_| AdminError::Busy)??)
}

fn name(
    slot: &str,
    which: Result<Query<Which>, axum::extract::rejection::QueryRejection>,
) -> Result<(SlotName, Which), AdminError> {
    let Query(which) = which.map_err(|error| AdminError::BadQuery(error.body_text()))?;
    Ok((slot_name(slot, which.model.as_deref())?, which))
}

fn slot_name(slot: &str, model: Option<&str>) -> Result<SlotName, AdminError> {
    let kind = SlotKind::ALL.into_iter().find(|kind| kind.as_str() == slot);
    let kind = kind.ok_or_else(|| AdminError::NoSlot(slot.to_owned()))?;
    Ok((kind, model.map(ModelName::new)))
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
            Self::BadQuery(_) => (StatusCode::BAD_REQUEST, "invalid_request"),
            Self::Command(E::NothingToRollBack(_)) => (StatusCode::CONFLICT, "nothing_to_roll_back"),
            Self::Command(E::NothingToUndo(_)) => (StatusCode::CONFLICT, "nothing_to_undo"),
            Self::Command(E::NothingToPromote(_)) => (StatusCode::CONFLICT, "nothing_to_promote"),
            Self::Command(E::Ambiguous(_)) => (StatusCode::CONFLICT, "ambiguous"),
            Self::Command(E::Refused(refusal)) => (StatusCode::CONFLICT, refusal.kind()),
            Self::Command(E::Ended) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
            Self::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
        }
    }
}
