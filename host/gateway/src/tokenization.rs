//! Token ids of a request, where a source of them is configured for its model. With them, routing sees the
//! same blocks as an engine.
//!
//! Short prompts are encoded on the data thread, long ones on a few threads beside it. A prompt that cannot
//! be encoded is measured in bytes, and counted.

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

/// Largest prompt that is encoded on the data thread, bytes: it takes a fraction of a millisecond.
const INLINE_ENCODE_BYTES: usize = 4 * 1024;
/// Number of long prompts that are encoded at the same time.
const MAX_CONCURRENT_ENCODES: usize = 2;

/// Sources of token ids, by model.
#[derive(Debug)]
pub(crate) struct Tokens {
    models: BTreeMap<ModelName, ModelTokens>,
    turns: Arc<Semaphore>,
}

/// Source of one model's token ids.
#[derive(Clone, Debug)]
struct ModelTokens {
    source: Source,
    /// How long a request waits for its tokens.
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
    /// Loads every configured tokenizer. Engines are found in `registry`. Sources of `previous` whose
    /// configuration is the same are kept.
    ///
    /// # Errors
    /// A directory is not a tokenizer: the file and what is wrong with it.
    pub(crate) fn load(
        models: &BTreeMap<String, ModelSettings>,
        registry: &Arc<Registry>,
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
        let turns = turns.unwrap_or_else(|| Arc::new(Semaphore::new(MAX_CONCURRENT_ENCODES)));
        Ok(Self { models: loaded, turns })
    }

    /// Returns the request's token ids; `None` when the client gave them, or the model has no source for
    /// them. A request waits for them at most the configured time, and goes on without them after that.
    pub(crate) async fn of(
        &self,
        request: &Arc<Request>,
        upstream: &Upstream,
        metrics: &Metrics,
    ) -> Option<Vec<u32>> {
        let model = self.models.get(&request.model)?;
        let text = matches!(request.endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
        if request.token_ids.is_some() || !text || request.prompts > 1 {
            return None;
        }
        let outcome = match &model.source {
            Source::Engine(engine) => engine.of(request, upstream, model.timeout).await,
            Source::Folder(tokenizer) if request.prompt().len() <= INLINE_ENCODE_BYTES => {
                encode(tokenizer, request)
            }
            Source::Folder(tokenizer) => {
                let encoded = encode_on_a_thread(self.turns.clone(), tokenizer.clone(), request.clone());
                tokio::time::timeout(model.timeout, encoded).await.unwrap_or(Err("tokenizer_slow"))
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

/// Encodes a long prompt beside the runtime. The permit ends with the encoding, not with the wait for it: a
/// request that no longer waits does not make room for another encoding.
async fn encode_on_a_thread(
    turns: Arc<Semaphore>,
    tokenizer: Arc<Tokenizer>,
    request: Arc<Request>,
) -> Result<Vec<u32>, &'static str> {
    let turn = turns.acquire_owned().await.map_err(|_| "tokenizer_closed")?;
    let encode = move || {
        let _turn = turn;
        encode(&tokenizer, &request)
    };
    // The library may panic on input that it does not expect: the request goes on without tokens.
    tokio::task::spawn_blocking(encode).await.unwrap_or(Err("panicked"))
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
