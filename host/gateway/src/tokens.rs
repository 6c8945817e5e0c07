//! Token ids of a request, where a tokenizer is configured for its model: so that routing sees the blocks an engine sees.
//!
//! Short prompts are encoded where they are; long ones on a few threads beside the reactor. What cannot be encoded is
//! measured in bytes, and counted.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::SystemTime};

use anyhow::Context as _;
use pointsman_tokens::{ChatOptions, EncodeError, LoadOptions, Tokenizer};
use pointsman_workers::ModelName;
use tokio::sync::Semaphore;

use crate::{
    config::Model,
    metrics::{Metrics, ReasonLabels},
    request::{Endpoint, Request},
};

/// Prompts up to this size, in bytes, are encoded on the spot: a fraction of a millisecond.
const SHORT: usize = 4 * 1024;
/// Long prompts that are encoded at once.
const AT_ONCE: usize = 2;

/// The tokenizers by model.
#[derive(Debug)]
pub struct Tokens {
    models: BTreeMap<ModelName, Arc<Tokenizer>>,
    turns: Semaphore,
}

impl Tokens {
    /// Loads every configured tokenizer.
    ///
    /// # Errors
    /// A folder that is none, with the file and what is wrong with it.
    pub fn load(models: &BTreeMap<String, Model>) -> anyhow::Result<Self> {
        let configured =
            models.iter().filter_map(|(name, model)| Some((name, model, model.tokenizer.as_ref()?)));
        let load = |(name, model, folder): (&String, &Model, &PathBuf)| {
            let options = LoadOptions { cache_bytes: model.tokenizer_cache_bytes, ..LoadOptions::default() };
            let tokenizer = Tokenizer::load_with(folder, &options);
            let tokenizer = tokenizer.with_context(|| format!("models.{name}.tokenizer"))?;
            tracing::info!(model = name, reuse = tokenizer.reuse().label(), "tokenizer");
            Ok((ModelName::new(name), Arc::new(tokenizer)))
        };
        Ok(Self {
            models: configured.map(load).collect::<anyhow::Result<_>>()?,
            turns: Semaphore::new(AT_ONCE),
        })
    }

    /// The request's token ids; `None` when the client gave them, nobody can tell, or nothing asks for them.
    pub async fn of(&self, request: &Arc<Request>, metrics: &Metrics) -> Option<Vec<u32>> {
        let tokenizer = self.models.get(&request.model)?.clone();
        let text = matches!(request.endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
        if request.token_ids.is_some() || !text || request.prompts > 1 {
            return None;
        }
        let outcome = if request.prompt().len() <= SHORT {
            encode(&tokenizer, request)
        } else {
            let _turn = self.turns.acquire().await.ok()?;
            let request = request.clone();
            // The library may panic on what it thinks impossible: the request goes on without tokens.
            match tokio::task::spawn_blocking(move || encode(&tokenizer, &request)).await {
                Ok(outcome) => outcome,
                Err(_) => Err("panicked"),
            }
        };
        match outcome {
            Ok(ids) => Some(ids),
            Err(reason) => {
                metrics.not_tokenized.get_or_create(&ReasonLabels { reason }).inc();
                None
            }
        }
    }
}

fn encode(tokenizer: &Tokenizer, request: &Request) -> Result<Vec<u32>, &'static str> {
    let get = |key: &str| request.body.get(key);
    let kind = |error: EncodeError| error.kind();
    match request.endpoint {
        Endpoint::ChatCompletions => {
            let options = ChatOptions::read(SystemTime::now(), get).map_err(kind)?;
            tokenizer.chat(request.prompt(), &options).map_err(kind)
        }
        _ => {
            let prompt: String = serde_json::from_str(request.prompt()).map_err(|_| "not_text")?;
            let special = get("add_special_tokens").is_none_or(|value| value != "false");
            if get("truncate_prompt_tokens").is_some() {
                return Err("unsupported");
            }
            tokenizer.completion(&prompt, special).map_err(kind)
        }
    }
}
