//! Token ids of a request, where a source of them is configured for its model: so that routing sees the blocks an engine sees.
//!
//! Short prompts are encoded where they are; long ones on a few threads beside the reactor. What cannot be encoded is
//! measured in bytes, and counted.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use anyhow::Context as _;
use pointsman_tokens::{ChatOptions, EncodeError, LoadOptions, Tokenizer};
use pointsman_workers::{ModelName, Registry};
use tokio::sync::Semaphore;

use crate::{
    config::{Model, TokenSource},
    openai::request::{Endpoint, Request},
    telemetry::metrics::{Metrics, ReasonLabels},
    upstream::Upstream,
};

mod engine;
pub(crate) mod routing_request;

use engine::EngineTokens;

/// Prompts up to this size, in bytes, are encoded on the spot: a fraction of a millisecond.
const SHORT: usize = 4 * 1024;
/// Long prompts that are encoded at once.
const AT_ONCE: usize = 2;

/// The sources of tokens by model.
#[derive(Debug)]
pub struct Tokens {
    models: BTreeMap<ModelName, Source>,
    turns: Semaphore,
}

#[derive(Clone, Debug)]
enum Source {
    Folder(Arc<Tokenizer>),
    Engine(Arc<EngineTokens>),
}

impl Tokens {
    /// Loads every configured tokenizer. Engines are found in `registry` and asked through `upstream`.
    ///
    /// # Errors
    /// A folder that is none, with the file and what is wrong with it.
    pub fn load(
        models: &BTreeMap<String, Model>,
        registry: &Arc<Registry>,
        upstream: &Upstream,
    ) -> anyhow::Result<Self> {
        let configured =
            models.iter().filter_map(|(name, model)| Some((name, model, model.tokenizer.as_ref()?)));
        let load = |(name, model, source): (&String, &Model, &TokenSource)| {
            let cache_bytes = model.tokenizer_cache_bytes;
            let source = match source {
                TokenSource::Engine => {
                    let (registry, upstream) = (registry.clone(), upstream.clone());
                    let (name, limit) = (ModelName::new(name), model.tokenizer_timeout);
                    Source::Engine(Arc::new(EngineTokens::new(name, registry, upstream, limit, cache_bytes)))
                }
                TokenSource::Folder(folder) => {
                    let options = LoadOptions { cache_bytes, ..LoadOptions::default() };
                    let tokenizer = Tokenizer::load_with(folder, &options);
                    let tokenizer = tokenizer.with_context(|| format!("models.{name}.tokenizer"))?;
                    tracing::info!(model = name, reuse = tokenizer.reuse().label(), "tokenizer");
                    Source::Folder(Arc::new(tokenizer))
                }
            };
            Ok((ModelName::new(name), source))
        };
        Ok(Self {
            models: configured.map(load).collect::<anyhow::Result<_>>()?,
            turns: Semaphore::new(AT_ONCE),
        })
    }

    /// The request's token ids; `None` when the client gave them, nobody can tell, or nothing asks for them.
    pub async fn of(&self, request: &Arc<Request>, metrics: &Metrics) -> Option<Vec<u32>> {
        let source = self.models.get(&request.model)?.clone();
        let text = matches!(request.endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
        if request.token_ids.is_some() || !text || request.prompts > 1 {
            return None;
        }
        let outcome = match source {
            Source::Engine(engine) => engine.of(request).await,
            Source::Folder(tokenizer) if request.prompt().len() <= SHORT => encode(&tokenizer, request),
            Source::Folder(tokenizer) => {
                let _turn = self.turns.acquire().await.ok()?;
                let request = request.clone();
                // The library may panic on what it thinks impossible: the request goes on without tokens.
                let encoded = tokio::task::spawn_blocking(move || encode(&tokenizer, &request)).await;
                encoded.unwrap_or(Err("panicked"))
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
