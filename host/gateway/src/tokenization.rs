//! Token ids of a request, where a source of them is configured for its model: so that routing sees the blocks an engine sees.
//!
//! Short prompts are encoded where they are; long ones on a few threads beside the reactor. What cannot be encoded is
//! measured in bytes, and counted.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use pointsman_tokens::{ChatOptions, EncodeError, LoadOptions, Tokenizer};
use pointsman_workers::{ModelName, Registry};
use tokio::sync::Semaphore;

use crate::{
    config::{TokenSource, settings::ModelSettings},
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

/// Sources of token ids, by model.
#[derive(Debug)]
pub struct Tokens {
    models: BTreeMap<ModelName, ModelTokens>,
    upstream: Upstream,
    turns: Arc<Semaphore>,
}

/// Source of one model's token ids.
#[derive(Clone, Debug)]
struct ModelTokens {
    source: Source,
    /// How long a request waits for an engine.
    timeout: Duration,
    /// What the source was made of: an equal configuration keeps it, with its cache.
    made_of: (TokenSource, usize),
}

#[derive(Clone, Debug)]
enum Source {
    Folder(Arc<Tokenizer>),
    Engine(Arc<EngineTokens>),
}

impl Tokens {
    /// Loads every configured tokenizer. Engines are found in `registry` and asked through `upstream`. Sources of
    /// `previous` whose configuration is the same are kept.
    ///
    /// # Errors
    /// A directory is not a tokenizer: the file and what is wrong with it.
    pub fn load(
        models: &BTreeMap<String, ModelSettings>,
        registry: &Arc<Registry>,
        upstream: &Upstream,
        previous: Option<&Self>,
    ) -> anyhow::Result<Self> {
        let mut loaded = BTreeMap::new();
        for (name, model) in models {
            let Some(source) = &model.tokenizer else { continue };
            let model_name = ModelName::new(name);
            let made_of = (source.clone(), model.tokenizer_cache_bytes);
            let kept = previous.and_then(|previous| previous.models.get(&model_name));
            let source = match kept.filter(|kept| kept.made_of == made_of) {
                Some(kept) => kept.source.clone(),
                None => Source::load(name, &made_of, registry)?,
            };
            loaded.insert(model_name, ModelTokens { source, timeout: model.tokenizer_timeout, made_of });
        }
        let turns = previous.map(|previous| previous.turns.clone());
        let turns = turns.unwrap_or_else(|| Arc::new(Semaphore::new(AT_ONCE)));
        Ok(Self { models: loaded, upstream: upstream.clone(), turns })
    }

    /// Returns the request's token ids; `None` when the client gave them, or the model has no source for them.
    pub async fn of(&self, request: &Arc<Request>, metrics: &Metrics) -> Option<Vec<u32>> {
        let model = self.models.get(&request.model)?;
        let text = matches!(request.endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
        if request.token_ids.is_some() || !text || request.prompts > 1 {
            return None;
        }
        let outcome = match &model.source {
            Source::Engine(engine) => engine.of(request, &self.upstream, model.timeout).await,
            Source::Folder(tokenizer) if request.prompt().len() <= SHORT => encode(tokenizer, request),
            Source::Folder(tokenizer) => {
                let _turn = self.turns.acquire().await.ok()?;
                let (tokenizer, request) = (tokenizer.clone(), request.clone());
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

impl Source {
    fn load(
        name: &str,
        (source, cache_bytes): &(TokenSource, usize),
        registry: &Arc<Registry>,
    ) -> anyhow::Result<Self> {
        match source {
            TokenSource::Engine => {
                let engine = EngineTokens::new(ModelName::new(name), registry.clone(), *cache_bytes);
                Ok(Self::Engine(Arc::new(engine)))
            }
            TokenSource::Folder(folder) => {
                let options = LoadOptions { cache_bytes: *cache_bytes, ..LoadOptions::default() };
                let tokenizer = Tokenizer::load_with(folder, &options);
                let tokenizer = tokenizer.with_context(|| format!("models.{name}.tokenizer"))?;
                tracing::info!(model = name, reuse = tokenizer.reuse().label(), "tokenizer loaded");
                Ok(Self::Folder(Arc::new(tokenizer)))
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
