//! Token ids of a request, where a source of them is configured for its model. With them, routing sees the
//! same blocks as an engine.
//!
//! Short prompts are encoded on the data thread, long ones on a pool of threads that tenants share fairly. A
//! prompt that cannot be encoded, or waited too long for it, is measured in bytes, and counted.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, SystemTime},
};

use pointsman_tokens::{
    ChatOptions, EncodeError, LoadOptions, PromptForm, PromptKey, PromptTokens, Tokenizer,
};
use pointsman_workers::{ModelName, Registry, Snapshot};

use crate::{
    config::{Model, Problem, TokenSource},
    openai::request::{Endpoint, Request},
    tasks::Tasks,
    telemetry::metrics::{Metrics, ReasonLabels},
    upstream::Upstream,
};

mod encodes;
mod engine;
pub(crate) mod latency_targets;
mod missing;
mod request_tokens;
pub(crate) mod routing_request;

use encodes::Encodes;
use engine::EngineTokens;
use missing::MissingTokenizers;
pub(crate) use request_tokens::RequestTokens;
use request_tokens::SegmentHashes;

/// Largest prompt that is encoded on the data thread, bytes: it takes a fraction of a millisecond.
const INLINE_ENCODE_BYTES: usize = 4 * 1024;
/// Part of a tokenizer's cache that holds block hashes: they take an eighth of the memory of their tokens.
const HASHES_SHARE: usize = 16;

/// The files of a tokenizer, each with its inode, time of change and length.
type FileVersions = Vec<(PathBuf, u64, Option<SystemTime>, u64)>;

/// Sources of token ids, by model.
#[derive(Debug)]
pub(crate) struct Tokens {
    models: BTreeMap<ModelName, ModelTokens>,
    encodes: Arc<Encodes>,
    missing: Arc<MissingTokenizers>,
    tasks: Tasks,
}

/// Source of one model's token ids.
#[derive(Clone, Debug)]
struct ModelTokens {
    source: Source,
    /// How long a request waits for its tokens.
    timeout: Duration,
    /// Configuration of the source, and its files. A reload that finds them equal keeps the source and its
    /// cache.
    made_of: (TokenSource, usize, FileVersions),
}

#[derive(Clone, Debug)]
enum Source {
    Folder(Arc<Tokenizer>, Arc<SegmentHashes>),
    Engine(Arc<EngineTokens>),
}

impl Tokens {
    /// Returns no sources. Long prompts will be encoded on `threads` threads, which start with the first
    /// tokenizer. Tests of engines are `tasks`.
    pub(crate) fn new(threads: usize, tasks: Tasks) -> Self {
        let encodes = Arc::new(Encodes::new(threads));
        Self { models: BTreeMap::new(), encodes, missing: Arc::default(), tasks }
    }

    /// Loads every configured tokenizer. Engines are found in `registry`. Sources of `self` whose
    /// configuration and files are the same are kept.
    ///
    /// # Errors
    /// All directories that hold no tokenizer: the file and what is wrong with it.
    pub(crate) fn load(
        &self,
        models: &BTreeMap<String, Model>,
        registry: &Arc<Registry>,
    ) -> Result<Self, Vec<Problem>> {
        let (mut loaded, mut problems) = (BTreeMap::new(), Vec::new());
        for (name, model) in models {
            let Some(source) = &model.tokenizer else { continue };
            let model_name = ModelName::new(name);
            let files = match source {
                TokenSource::Folder(folder) => file_versions(folder),
                TokenSource::Engine => FileVersions::default(),
            };
            let made_of = (source.clone(), model.tokenizer_cache_bytes, files);
            let kept = self.models.get(&model_name).filter(|kept| kept.made_of == made_of);
            let source = match kept {
                Some(kept) => kept.source.clone(),
                None => match self.open(name, &made_of, registry) {
                    Ok(source) => source,
                    Err(problem) => {
                        problems.push(Problem::new(format!("models.{name}.tokenizer"), problem));
                        continue;
                    }
                },
            };
            loaded.insert(model_name, ModelTokens { source, timeout: model.tokenizer_timeout, made_of });
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let (encodes, missing, tasks) = (self.encodes.clone(), self.missing.clone(), self.tasks.clone());
        Ok(Self { models: loaded, encodes, missing, tasks })
    }

    /// Returns the request's token ids; `None` when the client gave them, or the model has no source for
    /// them. A request waits for them at most the configured time, and continues without them after that.
    /// Dropping the future ends the work. Tenants share the threads for long prompts and the calls to
    /// engines. An adapter has the source of the model that it adapts, unless it has its own.
    pub(crate) async fn of(
        &self,
        request: &Arc<Request>,
        tenant: Option<u64>,
        upstream: &Upstream,
        metrics: &Metrics,
        workers: &Snapshot,
    ) -> Option<RequestTokens> {
        // A preview returns the tokens for the engine, even if routing uses others.
        let is_known = match request.hints.query_only {
            true => request.token_ids.is_some(),
            false => request.given_token_ids().is_some(),
        };
        if is_known {
            return None;
        }
        let not_tokenized = |reason| metrics.not_tokenized.get_or_create(&ReasonLabels { reason }).inc();
        let model = workers.own_or_parent(&request.model, |model| self.models.get(model));
        let is_encoded =
            match request.endpoint {
                Endpoint::ChatCompletions | Endpoint::Completions | Endpoint::Generate => {
                    if request.prompts > 1 { Err("batch") } else { Ok(()) }
                }
                Endpoint::Messages | Endpoint::Responses => Err("endpoint"),
                _ => return None,
            };
        if let Err(reason) = is_encoded {
            if model.is_some() || MissingTokenizers::has_events(&request.model, workers) {
                not_tokenized(reason);
            }
            return None;
        }
        let Some(model) = model else {
            if self.missing.concerns(&request.model, workers) {
                not_tokenized("no_tokenizer");
            }
            return None;
        };
        let outcome = match &model.source {
            Source::Engine(engine) => {
                let tokens = Box::pin(engine.of(request, tenant, (upstream, model.timeout))).await;
                tokens.map(|tokens| (tokens.into(), None))
            }
            Source::Folder(tokenizer, hashes) => {
                let tokens = if request.tokenized_bytes() <= INLINE_ENCODE_BYTES {
                    encode(tokenizer, request, None, &AtomicBool::new(false))
                } else {
                    Box::pin(self.long(tokenizer, request, tenant, model.timeout)).await
                };
                tokens.map(|tokens| (tokens, Some(hashes.clone())))
            }
        };
        match outcome {
            Ok((tokens, hashes)) => Some(RequestTokens::new(tokens, hashes)),
            Err(reason) => {
                not_tokenized(reason);
                None
            }
        }
    }

    /// Returns the token ids of a long prompt: from memory if it was sent before.
    async fn long(
        &self,
        tokenizer: &Arc<Tokenizer>,
        request: &Arc<Request>,
        tenant: Option<u64>,
        limit: Duration,
    ) -> Result<PromptTokens, &'static str> {
        let form = match request.endpoint {
            Endpoint::ChatCompletions => PromptForm::Chat,
            _ => PromptForm::Completion,
        };
        let get = |field: &str| request.body.get(field);
        let key = tokenizer.prompt_key(form, request.prompt(), request.message_ends(), get).map(Arc::new);
        if let Some(known) = key.as_ref().and_then(|key| tokenizer.known(key)) {
            return Ok(known);
        }
        let tenant = tenant.unwrap_or_default();
        let encoded = self.encodes.run(tokenizer.clone(), request.clone(), key.clone(), tenant);
        let tokens = tokio::time::timeout(limit, encoded).await.unwrap_or(Err("tokenizer_slow"))?;
        key.iter().for_each(|key| tokenizer.remember(key, &tokens));
        Ok(tokens)
    }

    fn open(
        &self,
        name: &str,
        (source, cache_bytes, _): &(TokenSource, usize, FileVersions),
        registry: &Arc<Registry>,
    ) -> Result<Source, String> {
        match source {
            TokenSource::Engine => {
                let engine = EngineTokens::new(registry.clone(), self.tasks.clone(), *cache_bytes);
                Ok(Source::Engine(Arc::new(engine)))
            }
            TokenSource::Folder(folder) => {
                let for_hashes = cache_bytes / HASHES_SHARE;
                let options = LoadOptions { cache_bytes: cache_bytes - for_hashes, ..LoadOptions::default() };
                let tokenizer = Tokenizer::load_with(folder, &options).map_err(|error| error.to_string())?;
                self.encodes.start().map_err(|error| format!("cannot start its threads: {error}"))?;
                let (encoder, reuse) = (tokenizer.encoder().label(), tokenizer.reuse().label());
                tracing::info!(model = name, encoder, reuse, "tokenizer serves");
                Ok(Source::Folder(Arc::new(tokenizer), Arc::new(SegmentHashes::new(for_hashes))))
            }
        }
    }
}

/// Returns the versions of the files that a tokenizer may be read from. Those that are missing or cannot be
/// read are left out: reading them fails with its own error.
fn file_versions(folder: &Path) -> FileVersions {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries(folder).chain(entries(&folder.join("additional_chat_templates")));
    let version = |path: PathBuf| {
        path.extension().filter(|extension| *extension == "json" || *extension == "jinja")?;
        let file = fs::metadata(&path).ok()?;
        Some((path, file.ino(), file.modified().ok(), file.len()))
    };
    let mut versions: Vec<_> = paths.filter_map(|entry| version(entry.path())).collect();
    versions.sort();
    versions
}

/// Encodes a prompt with this key until `stopped` is set.
fn encode(
    tokenizer: &Tokenizer,
    request: &Request,
    key: Option<&PromptKey>,
    stopped: &AtomicBool,
) -> Result<PromptTokens, &'static str> {
    let get = |key: &str| request.body.get(key);
    let kind = |error: EncodeError| error.kind();
    match request.endpoint {
        Endpoint::ChatCompletions => {
            let options = ChatOptions::read(SystemTime::now(), get).map_err(kind)?;
            tokenizer.chat_until(request.prompt(), key, &options, stopped).map_err(kind)
        }
        _ => {
            if request.has_embeds() {
                return Err("unsupported");
            }
            let prompt: String = serde_json::from_str(request.prompt()).map_err(|_| "not_text")?;
            let special = get("add_special_tokens").is_none_or(|value| value != "false");
            if get("truncate_prompt_tokens").is_some_and(|limit| limit != "null") {
                return Err("unsupported");
            }
            tokenizer.completion_until(prompt, special, stopped).map_err(kind)
        }
    }
}
