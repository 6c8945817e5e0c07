//! Token ids from an engine of the model, by vLLM's `POST /tokenize`: for models without a local tokenizer.
//!
//! A request waits at most the configured time, and tenants share a limited number of concurrent calls. An
//! engine that cannot tokenize is left out, and tested again with a question of the gateway's own.

use std::{
    borrow::Cow,
    collections::{HashMap, VecDeque},
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, header};
use json_splice::JsonBody;
use parking_lot::Mutex;
use pointsman_workers::{Candidate, Engine, Leg, ModelName, Registry, Worker, WorkerId};
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, timeout, timeout_at};

use crate::{
    openai::{
        messages::is_text,
        request::{Endpoint, Request},
    },
    tasks::Tasks,
    upstream::{CallError, Destination, Upstream},
};

mod call_queue;
mod left_out;

use call_queue::CallQueue;
use left_out::LeftOutEngines;

/// Prompt of the gateway's own question.
const TEST_PROMPT: &str = "test";
/// How prompts of Harmony, the format of gpt-oss, begin: `<|start|>system<|message|>`.
const HARMONY: [u32; 3] = [200_006, 17_360, 200_008];
/// Fields besides the messages that the chat template reads; chat and tokenize requests use the same names.
const CHAT_KEYS: [&str; 7] = [
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
];

/// The engines of one model and its adapters as a source of tokens.
#[derive(Debug)]
pub(super) struct EngineTokens {
    registry: Arc<Registry>,
    tasks: Tasks,
    calls: Arc<CallQueue>,
    next: AtomicUsize,
    left_out: LeftOutEngines,
    /// The engine that was last seen to write chats in Harmony. Then `/tokenize` does not write their effort
    /// (vLLM 0.33), or writes them with the template of the model (0.32).
    hides_effort: Mutex<Option<Process>>,
    hashes: RandomState,
    cache: Mutex<Cache>,
}

/// Answers by the hash of their question. The oldest is evicted first.
#[derive(Debug)]
struct Cache {
    budget: usize,
    bytes: usize,
    answers: HashMap<u64, (Arc<[u32]>, Process)>,
    order: VecDeque<u64>,
}

/// A process of a worker. The next one may have another tokenizer or template.
#[derive(Clone, Copy, Debug)]
struct Process {
    worker: WorkerId,
    number: u32,
}

#[derive(Deserialize)]
struct Answer {
    tokens: Vec<u32>,
}

impl EngineTokens {
    pub(super) fn new(registry: Arc<Registry>, tasks: Tasks, cache_bytes: usize) -> Self {
        let cache = Cache { budget: cache_bytes, bytes: 0, answers: HashMap::new(), order: VecDeque::new() };
        Self {
            registry,
            tasks,
            calls: CallQueue::new(),
            next: AtomicUsize::new(0),
            left_out: LeftOutEngines::default(),
            hides_effort: Mutex::new(None),
            hashes: RandomState::new(),
            cache: Mutex::new(cache),
        }
    }

    /// Returns the token ids of a request of `tenant`, asked for through `upstream` for at most `limit`. If
    /// an engine has none, one other is asked.
    ///
    /// # Errors
    /// A stable label.
    pub(super) async fn of(
        self: &Arc<Self>,
        request: &Request,
        tenant: Option<u64>,
        (upstream, limit): (&Upstream, Duration),
    ) -> Result<Vec<u32>, &'static str> {
        let deadline = Instant::now() + limit;
        let question = question(request)?;
        let has_effort = has_effort(request);
        if has_effort && self.hides_effort.lock().is_some_and(|process| self.runs(process)) {
            return Err("unsupported");
        }
        let hash = self.hashes.hash_one(&question);
        let known = self.cache.lock().answers.get(&hash).cloned();
        if let Some((tokens, _)) = known.filter(|(_, process)| self.runs(*process)) {
            return Ok(tokens.to_vec());
        }
        let permit = timeout_at(deadline, self.calls.enter(tenant, question.len())).await;
        let _permit = permit.ok().flatten().ok_or("engine_busy")?;
        let (tokens, process) =
            self.ask_two((&request.model, question.into()), (upstream, limit), deadline).await?;
        if tokens.starts_with(&HARMONY) {
            *self.hides_effort.lock() = Some(process);
            if has_effort {
                return Err("unsupported");
            }
        }
        self.cache.lock().put(hash, &tokens, process);
        Ok(tokens)
    }

    /// Returns whether a process has not ended, as far as the gateway knows.
    fn runs(&self, process: Process) -> bool {
        let snapshot = self.registry.snapshot();
        snapshot.get(process.worker).is_some_and(|worker| Process::of(worker).number == process.number)
    }

    /// Asks an engine and, unless that answers or refuses the question, another one.
    async fn ask_two(
        self: &Arc<Self>,
        (model, question): (&ModelName, Bytes),
        (upstream, limit): (&Upstream, Duration),
        deadline: Instant,
    ) -> Result<(Vec<u32>, Process), &'static str> {
        let mut failed: Option<(WorkerId, &'static str)> = None;
        loop {
            let candidate = match self.candidate(model, failed.map(|(id, _)| id), (upstream, limit)) {
                Ok(candidate) => candidate,
                Err(reason) => return Err(failed.map_or(reason, |(_, reason)| reason)),
            };
            let process = Process::of(&candidate.worker);
            let reason = match timeout_at(deadline, ask(upstream, &candidate, question.clone())).await {
                Ok(Ok(tokens)) => return Ok((tokens, process)),
                Ok(Err(error)) if is_refusal(&error) => return Err("engine_refused"),
                Ok(Err(_)) => "engine_failed",
                Err(_) => "engine_slow",
            };
            self.test(model, &candidate, (upstream, limit));
            if failed.is_some() || Instant::now() >= deadline {
                return Err(reason);
            }
            failed = Some((candidate.worker.id(), reason));
        }
    }

    /// Chooses a worker that has the endpoint, round robin, other than `failed`. Tests those that are left
    /// out, from time to time.
    ///
    /// # Errors
    /// No worker is left. The error is a stable label.
    fn candidate(
        self: &Arc<Self>,
        model: &ModelName,
        failed: Option<WorkerId>,
        test_with: (&Upstream, Duration),
    ) -> Result<Candidate, &'static str> {
        let snapshot = self.registry.snapshot();
        let able = |candidate: &&Candidate| {
            candidate.worker.spec().engine == Engine::Vllm
                && candidate.ineligible().is_none()
                && Some(candidate.worker.id()) != failed
        };
        let all = || {
            let pools = [Leg::Prefill, Leg::Aggregated, Leg::Decode];
            pools.into_iter().flat_map(|leg| snapshot.pool(model, leg)).filter(able)
        };
        let is_left_out = |candidate: &&Candidate| self.left_out.has(&(candidate.worker.id(), model.clone()));
        if self.left_out.has_any() {
            all().filter(is_left_out).for_each(|candidate| self.test(model, candidate, test_with));
        }
        let count = all().filter(|candidate| !is_left_out(candidate)).count();
        let number = self.next.fetch_add(1, Ordering::Relaxed) % count.max(1);
        let chosen = all().filter(|candidate| !is_left_out(candidate)).nth(number);
        let none = if all().next().is_some() { "engine_paused" } else { "no_engine" };
        chosen.cloned().ok_or(none)
    }

    /// Asks an engine the gateway's own question, unless that was done a moment ago, and leaves the engine
    /// out until it answers. What a client asks does not decide that.
    fn test(self: &Arc<Self>, model: &ModelName, candidate: &Candidate, with: (&Upstream, Duration)) {
        let (engine, (upstream, limit)) = ((candidate.worker.id(), model.clone()), with);
        if !self.left_out.begin_test(&engine, Instant::now()) {
            return;
        }
        let (source, candidate, upstream) = (self.clone(), candidate.clone(), upstream.without_client());
        self.tasks.spawn(async move {
            let question = json!({ "model": engine.1, "prompt": TEST_PROMPT }).to_string();
            let failure = match timeout(limit, ask(&upstream, &candidate, question.into())).await {
                // This host has no room for the call.
                Ok(Err(CallError::Shortage(_) | CallError::NoRoom(_))) => return,
                Ok(Err(error)) if !is_refusal(&error) => Some(error.to_string()),
                Ok(_) => None,
                Err(_) => Some(format!("no answer within {limit:?}")),
            };
            source.left_out.end_test(&engine, failure.as_deref());
        });
    }
}

async fn ask(upstream: &Upstream, candidate: &Candidate, question: Bytes) -> Result<Vec<u32>, CallError> {
    let spec = candidate.worker.spec();
    let key = spec.api_key.as_ref().and_then(|key| HeaderValue::from_str(&format!("Bearer {key}")).ok());
    let headers = key.map(|key| (header::AUTHORIZATION, key)).into_iter().collect();
    let to = Destination::new(spec, "/tokenize");
    let answer = upstream.whole(&to, &headers, question).await;
    let answer = answer.inspect_err(|error| tracing::debug!(worker = %spec.id, %error, "no tokens"))?;
    let read = serde_json::from_slice::<Answer>(answer.body()).map(|answer| answer.tokens);
    read.map_err(|error| CallError::Protocol(format!("no tokens in the answer: {error}")))
}

/// Returns whether an error is about the question: the engine works.
fn is_refusal(error: &CallError) -> bool {
    matches!(error, CallError::Status { status, .. } if matches!(status.as_u16(), 400 | 413 | 422))
}

impl Process {
    fn of(worker: &Worker) -> Self {
        Self { worker: worker.id(), number: worker.process() }
    }
}

impl Cache {
    fn put(&mut self, hash: u64, tokens: &[u32], process: Process) {
        let bytes = bytes_of(tokens);
        if bytes > self.budget {
            return;
        }
        self.bytes += bytes;
        match self.answers.insert(hash, (tokens.into(), process)) {
            Some((earlier, _)) => self.bytes -= bytes_of(&earlier),
            None => self.order.push_back(hash),
        }
        while self.bytes > self.budget {
            let Some(oldest) = self.order.pop_front() else { return };
            if let Some((gone, _)) = self.answers.remove(&oldest) {
                self.bytes -= bytes_of(&gone);
            }
        }
    }
}

/// Size of an answer in the cache, bytes, with its entries in the map and the queue.
fn bytes_of(tokens: &[u32]) -> usize {
    size_of_val(tokens) + 64
}

/// The body of `/tokenize` for a request.
fn question(request: &Request) -> Result<String, &'static str> {
    let get = |key: &str| request.body.get(key);
    if request.has_embeds() || get("truncate_prompt_tokens").is_some_and(|limit| limit != "null") {
        return Err("unsupported");
    }
    // `/tokenize` does not render them.
    if request.endpoint == Endpoint::ChatCompletions && get("documents").is_some_and(|value| value != "null")
    {
        return Err("unsupported");
    }
    let (field, keys): (&str, &[&str]) = match request.endpoint {
        Endpoint::ChatCompletions => ("messages", &CHAT_KEYS),
        _ => ("prompt", &["add_special_tokens"]),
    };
    if field == "messages" && !is_text(request.prompt()) {
        return Err("unsupported");
    }
    let model = serde_json::Value::from(request.model.as_str());
    let mut body = format!(r#"{{"model":{model},"{field}":{}"#, request.prompt());
    for key in keys {
        let value = match *key {
            "chat_template_kwargs" => template_arguments(&request.body)?,
            key => get(key).map(Cow::Borrowed),
        };
        if let Some(value) = value {
            body.push_str(&format!(r#","{key}":{value}"#));
        }
    }
    body.push('}');
    Ok(body)
}

/// Returns whether a chat asks for another effort than Harmony's default.
fn has_effort(request: &Request) -> bool {
    let effort = request.body.get("reasoning_effort");
    request.endpoint == Endpoint::ChatCompletions
        && effort.is_some_and(|effort| !matches!(effort, "null" | r#""medium""#))
}

/// Returns the arguments of the chat template, with those that vLLM derives from a chat's `reasoning_effort`:
/// `/tokenize` has no such field.
fn template_arguments(body: &JsonBody) -> Result<Option<Cow<'_, str>>, &'static str> {
    const KEY: &str = "chat_template_kwargs";
    let Some(effort) = body.get("reasoning_effort").filter(|effort| *effort != "null") else {
        return Ok(body.get(KEY).map(Cow::Borrowed));
    };
    let given = body.object(KEY).transpose().map_err(|_| "unsupported")?.unwrap_or_else(JsonBody::empty);
    let mut edit = given.edit().set("reasoning_effort", effort);
    if given.get("enable_thinking").is_none() {
        edit = edit.set("enable_thinking", if effort == r#""none""# { "false" } else { "true" });
    }
    Ok(Some(String::from_utf8_lossy(&edit.finish()).into_owned().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h1_a_question_has_what_the_engine_s_template_is_given() {
        let parse = |endpoint, body: &str| {
            Request::parse(
                endpoint,
                &http::HeaderMap::new(),
                body.to_owned().into(),
                &crate::openai::hints::HintTrust::default().into(),
            )
            .unwrap()
        };
        let chat = parse(
            Endpoint::ChatCompletions,
            r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[1],"max_tokens":3,"stream":true}"#,
        );
        assert_eq!(
            question(&chat).unwrap(),
            r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[1]}"#
        );
        let text = parse(Endpoint::Completions, r#"{"prompt":"a b","model":"m","add_special_tokens":false}"#);
        assert_eq!(question(&text).unwrap(), r#"{"model":"m","prompt":"a b","add_special_tokens":false}"#);
        for (fields, arguments) in [
            (r#""reasoning_effort":"low""#, r#"{"reasoning_effort":"low","enable_thinking":true}"#),
            (
                r#""reasoning_effort":"none","chat_template_kwargs":{"a":1}"#,
                r#"{"a":1,"reasoning_effort":"none","enable_thinking":false}"#,
            ),
            (
                r#""reasoning_effort":"low","chat_template_kwargs":{"enable_thinking":false,"reasoning_effort":"high"}"#,
                r#"{"enable_thinking":false,"reasoning_effort":"low"}"#,
            ),
            (r#""reasoning_effort":null,"chat_template_kwargs":{"a":1}"#, r#"{"a":1}"#),
        ] {
            let chat =
                parse(Endpoint::ChatCompletions, &format!(r#"{{"model":"m","messages":[],{fields}}}"#));
            // H7.10
            assert_eq!(
                question(&chat).unwrap(),
                format!(r#"{{"model":"m","messages":[],"chat_template_kwargs":{arguments}}}"#)
            );
        }
        let uncut =
            parse(Endpoint::Completions, r#"{"prompt":"a b","model":"m","truncate_prompt_tokens":null}"#);
        assert!(question(&uncut).is_ok());
        let cut = parse(Endpoint::Completions, r#"{"prompt":"a b","model":"m","truncate_prompt_tokens":9}"#);
        assert_eq!(question(&cut), Err("unsupported"));
        let documents =
            parse(Endpoint::ChatCompletions, r#"{"model":"m","messages":[],"documents":[{"a":"b"}]}"#);
        // H7.9
        assert_eq!(question(&documents), Err("unsupported"));
        let parts = |kind: &str| format!(r#"[{{"role":"user","content":[{{"type":"{kind}","x":1}}]}}]"#);
        assert!(is_text(&parts("text")) && is_text(r#"[{"role":"assistant","content":null}]"#));
        assert!(!is_text(&parts("image_url")) && !is_text("{}"));
    }

    #[test]
    fn h1_answers_are_remembered_within_the_budget_and_the_oldest_go_first() {
        let mut cache = Cache { budget: 300, bytes: 0, answers: HashMap::new(), order: VecDeque::new() };
        let process = Process { worker: WorkerId(1), number: 0 };
        (0..10).for_each(|hash| cache.put(hash, &[1; 9], process));
        assert_eq!((cache.bytes, cache.answers.len(), cache.order.len()), (300, 3, 3));
        assert!(cache.answers.contains_key(&9) && !cache.answers.contains_key(&6));
        cache.put(9, &[1; 9], process);
        cache.put(11, &[1; 1000], process);
        assert_eq!((cache.bytes, cache.answers.len(), cache.order.len()), (300, 3, 3));
    }
}
