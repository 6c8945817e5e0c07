//! `GET /v1/models` and `GET /v1/models/{id}`: which models can be served now (B3).

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::State as Extract,
    http::{HeaderMap, Request as HttpRequest, Response},
    response::IntoResponse,
};
use pointsman_workers::{ModelName, Snapshot};
use serde_json::{Value, json};

use super::{DataThread, PathText, arrival::Arrival, auth, find_model::look_again, peer::Sender, request_id};
use crate::{
    openai::{error::ApiError, request::Endpoint, short_text::shortened},
    orchestrate::{
        availability::{context_length, servable_models, use_another},
        no_worker_registered,
    },
    state::State,
};

/// Lists the models.
pub(super) async fn list(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    let (headers, sender) = (request.headers().clone(), Arrival::of(request.extensions()).sender);
    let models = async {
        let models = allowed(&thread, &headers, &sender).await?;
        let data: Vec<_> = models.names.iter().map(|name| models.describe(name)).collect();
        Ok(json!({ "object": "list", "data": data }))
    };
    answer(models.await, &headers)
}

/// Describes one model. Its name may contain slashes.
pub(super) async fn one(
    thread: Extract<DataThread>,
    PathText(id): PathText,
    request: HttpRequest<Body>,
) -> Response<Body> {
    let (headers, sender) = (request.headers().clone(), Arrival::of(request.extensions()).sender);
    let model = async {
        let mut models = allowed(&thread, &headers, &sender).await?;
        if !models.names.contains(&id) {
            let state = thread.state.get();
            look_again(&state, &ModelName::new(&id), Endpoint::ChatCompletions).await;
            models = Models::of(&state);
        }
        let found = models.names.iter().find(|name| **name == id).map(|name| models.describe(name));
        let none = models.snapshot.workers().is_empty();
        let missing = || {
            if none {
                no_worker_registered(&thread.state.get())
            } else {
                ApiError::ModelNotFound(shortened(&id), use_another(&models.names))
            }
        };
        found.ok_or_else(missing)
    };
    answer(model.await, &headers)
}

/// The models that can be served.
struct Models {
    names: Vec<String>,
    snapshot: Arc<Snapshot>,
}

/// Returns the models, for a client that may know them.
async fn allowed(thread: &DataThread, headers: &HeaderMap, sender: &Sender) -> Result<Models, ApiError> {
    let state = thread.state.get();
    auth::authorize_client(&state, headers, sender).await?;
    Ok(Models::of(&state))
}

impl Models {
    fn of(state: &State) -> Self {
        let snapshot = state.registry.snapshot();
        Self { names: servable_models(&snapshot, &state.settings), snapshot }
    }

    /// Returns the description of a model, with its parent and the length of its context where vLLM and
    /// SGLang have them. Their `root` is a path of their machine; here it is the model.
    fn describe(&self, name: &str) -> Value {
        let model = ModelName::new(name);
        let parent = self.snapshot.parent_of(&model).map(ModelName::as_str);
        let mut card = json!({
            "id": name, "object": "model", "created": 0, "owned_by": "pointsman",
            "root": parent.unwrap_or(name), "parent": parent,
        });
        let length = context_length(&self.snapshot, &model);
        if let (Some(length), Some(fields)) = (length, card.as_object_mut()) {
            fields.insert("max_model_len".to_owned(), length.into());
        }
        card
    }
}

fn answer(answered: Result<Value, ApiError>, headers: &HeaderMap) -> Response<Body> {
    match answered {
        Ok(value) => Json(value).into_response(),
        Err(error) => error.response(&request_id(headers)).map(Body::from),
    }
}
