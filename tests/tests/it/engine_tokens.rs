//! Engines as sources of token ids: those that fail, questions that they refuse, lists of one prompt, and the
//! shares of tenants.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use parking_lot::Mutex;
use pointsman_gateway::config::{Config, Model, TokenSource};
use pointsman_tests::{
    Act, COMPLETIONS, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    log::Log,
    own_process,
    raw_engine::{json as ok, status},
};
use pointsman_workers::WorkerSpec;
use serde_json::{Value, json};
use tokio::time::Instant;

const TOKENIZE: &str = "POST /tokenize";
const LIMIT: Duration = Duration::from_secs(1);

/// What an engine does with `/tokenize`.
const WORKS: usize = 0;
const HAS_NONE: usize = 1;
const HANGS: usize = 2;

/// How long an engine takes for a prompt with `LATE`.
const LATE: Duration = Duration::from_millis(50);
const TENANT: &str = "x-tenant";

/// An engine that makes a token of each byte. It refuses prompts with `REFUSED`, fails at those with `FAILS`,
/// is late with those with `LATE`, and never answers those with `SLOW`.
async fn engine(mode: Arc<AtomicUsize>) -> RawEngine {
    let answer = move |request: &RawRequest| match request.line.as_str() {
        "GET /v1/models" => Some(ok(r#"{"object":"list","data":[{"id":"tiny","owned_by":"vllm"}]}"#)),
        TOKENIZE if mode.load(Ordering::SeqCst) == HAS_NONE => Some(status("404 Not Found", "{}")),
        TOKENIZE if mode.load(Ordering::SeqCst) == HANGS || request.body.contains("SLOW") => None,
        TOKENIZE if request.body.contains("REFUSED") => Some(status("400 Bad Request", "{}")),
        TOKENIZE if request.body.contains("FAILS") => Some(status("500 Internal Server Error", "{}")),
        TOKENIZE => {
            let asked: Value = serde_json::from_str(&request.body).unwrap();
            let tokens =
                asked["prompt"].as_str().map(|prompt| ok(&json!({"tokens": prompt.as_bytes()}).to_string()));
            Some(tokens.unwrap_or_else(|| status("400 Bad Request", "{}")))
        }
        _ => Some(ok("{}")),
    };
    RawEngine::start(move |request| {
        let pause = if request.body.contains("LATE") { LATE } else { Duration::ZERO };
        vec![Act::Pause(pause), answer(request).map_or(Act::Hang, Act::Send)]
    })
    .await
}

/// Two engines in these modes, and a gateway that asks them for tokens.
async fn cluster(modes: [usize; 2]) -> (TestCluster, [RawEngine; 2], [Arc<AtomicUsize>; 2]) {
    cluster_with(modes, LIMIT).await
}

/// The same, where a prompt waits this long for its tokens.
async fn cluster_with(
    modes: [usize; 2],
    tokenizer_timeout: Duration,
) -> (TestCluster, [RawEngine; 2], [Arc<AtomicUsize>; 2]) {
    let modes = modes.map(|mode| Arc::new(AtomicUsize::new(mode)));
    let engines = [engine(modes[0].clone()).await, engine(modes[1].clone()).await];
    let builder = TestClusterBuilder::new().config(|config: &mut Config| {
        let tokenizer = Some(TokenSource::Engine);
        let model = Model { tokenizer, tokenizer_timeout, ..Model::default() };
        config.models.insert("tiny".to_owned(), model);
        config.server.tenant_header = TENANT.to_owned();
        config.auth.trusted_proxies = vec!["127.0.0.0/8".to_owned()];
        for (number, engine) in engines.iter().enumerate() {
            let flag = format!("id={},role=aggregated,engine=vllm,url=http://{}", number + 1, engine.address);
            config.workers.push(WorkerSpec::parse_flag(&flag).unwrap());
        }
    });
    let cluster = builder.start().await;
    cluster.until("both are eligible", |cluster| cluster.ineligible() == 0).await.unwrap();
    (cluster, engines, modes)
}

/// What a preview says of a prompt: its length, and whether that is an estimate.
async fn measured(cluster: &TestCluster, prompt: &Value) -> (u64, bool) {
    measured_for(cluster, prompt, &[]).await
}

async fn measured_for(cluster: &TestCluster, prompt: &Value, headers: &[(&str, &str)]) -> (u64, bool) {
    let body = json!({"model": "tiny", "prompt": prompt}).to_string();
    let told = cluster.client.post("/v1/route", headers, body).await.unwrap().json().unwrap();
    (told["prompt_tokens"].as_u64().unwrap(), told["prompt_tokens_estimated"].as_bool().unwrap())
}

/// Returns whether each of some new prompts got its tokens.
async fn all_have_tokens(cluster: &TestCluster, name: &str) -> bool {
    for number in 0..20 {
        let prompt = format!("{name} {number:02}");
        if measured(cluster, &json!(prompt)).await != (prompt.len() as u64, false) {
            return false;
        }
    }
    true
}

fn asked(engine: &RawEngine) -> usize {
    engine.requests().iter().filter(|request| request.line == TOKENIZE).count()
}

async fn counted(cluster: &TestCluster, reason: &str) -> f64 {
    let start = format!("pointsman_not_tokenized_total{{reason=\"{reason}\"}}");
    cluster.metric(&start).await.unwrap().iter().sum()
}

#[tokio::test]
async fn h7_what_an_engine_said_before_it_restarted_does_not_count() {
    const HARMONY: [u32; 3] = [200_006, 17_360, 200_008];
    let (process, tokens) = (Arc::new(AtomicUsize::new(1)), Arc::new(Mutex::new(HARMONY.to_vec())));
    let (runs, said) = (process.clone(), tokens.clone());
    let engine = RawEngine::start(move |request: &RawRequest| {
        let started = runs.load(Ordering::SeqCst);
        vec![Act::Send(match request.line.as_str() {
            "GET /v1/models" => ok(r#"{"object":"list","data":[{"id":"tiny","owned_by":"vllm"}]}"#),
            "GET /metrics" => ok(&format!("process_start_time_seconds {started}\n")),
            TOKENIZE => ok(&json!({"tokens": *said.lock()}).to_string()),
            _ => ok("{}"),
        })]
    })
    .await;
    let change = |config: &mut Config| {
        let model = Model { tokenizer: Some(TokenSource::Engine), ..Model::default() };
        config.models.insert("tiny".to_owned(), model);
        config.workers.push(engine.worker("id=1,role=aggregated,engine=vllm"));
    };
    let cluster = TestClusterBuilder::new().config(change).start().await;
    cluster.until("it is eligible", |cluster| cluster.ineligible() == 0).await.unwrap();
    let chat = async || {
        let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"});
        let told = cluster.client.post("/v1/route", &[], body.to_string()).await.unwrap().json().unwrap();
        told["prompt_tokens_estimated"].as_bool().unwrap()
    };
    assert_eq!((measured(&cluster, &json!("a b")).await, chat().await), ((3, false), true));
    *tokens.lock() = vec![1; 7];
    // H7.17: its answers are remembered
    assert_eq!((measured(&cluster, &json!("a b")).await, chat().await), ((3, false), true));
    process.store(2, Ordering::SeqCst);
    cluster.until("it restarted", |cluster| cluster.worker(1).process() > 0).await.unwrap();
    // H7.17
    assert_eq!((measured(&cluster, &json!("a b")).await, chat().await), ((7, false), false));
}

#[tokio::test]
async fn h7_a_question_that_engines_refuse_or_fail_at_costs_only_its_request_the_tokens() {
    let (cluster, engines, _) = cluster([WORKS, WORKS]).await;
    for (word, reason) in [("REFUSED", "engine_refused"), ("FAILS", "engine_failed"), ("SLOW", "engine_slow")]
    {
        for number in 0..3 {
            // H7.13
            assert!(measured(&cluster, &json!(format!("{word} {number}"))).await.1, "{word}");
            assert!(
                all_have_tokens(&cluster, &format!("{} {number} of others", word.to_lowercase())).await,
                "{word}"
            );
        }
        assert_eq!(counted(&cluster, reason).await, 3.0, "{word}");
    }
    assert_eq!(counted(&cluster, "engine_paused").await, 0.0);
    let refused = |engine: &RawEngine| {
        engine.requests().iter().filter(|request| request.body.contains("REFUSED")).count()
    };
    assert_eq!(engines.iter().map(refused).sum::<usize>(), 3, "no other engine would take it");
}

#[tokio::test]
async fn h7_an_engine_that_does_not_tokenize_is_left_out_until_it_does() {
    own_process!();
    let log = Log::start();
    let lines = |text: &str| log.text().matches(text).count();
    for mode in [HAS_NONE, HANGS] {
        let (before, again) = (lines("engine does not tokenize"), lines("engine tokenizes again"));
        let (cluster, engines, modes) = cluster([mode, WORKS]).await;
        // A prompt for an engine that hangs goes without tokens, until the gateway has noticed.
        let mut tries = 0;
        while !all_have_tokens(&cluster, &format!("try {tries}")).await {
            tries += 1;
            assert!(tries < 5, "the gateway does not notice");
        }
        assert!(mode == HANGS || tries == 0, "another engine is asked at once");
        let (tests, since) = (asked(&engines[0]), Instant::now());
        for round in 0..3 {
            // H7.14
            assert!(all_have_tokens(&cluster, &format!("round {round}")).await);
        }
        let seconds = usize::try_from(since.elapsed().as_secs()).unwrap();
        assert!(asked(&engines[0]) <= tests + seconds + 2, "one test a second at most");
        assert_eq!(lines("engine does not tokenize"), before + 1, "named once");
        modes[0].store(WORKS, Ordering::SeqCst);
        modes[1].store(HAS_NONE, Ordering::SeqCst);
        let mut tries = 0;
        while lines("engine tokenizes again") == again {
            tries += 1;
            assert!(tries < 200, "it is not tested again");
            measured(&cluster, &json!(format!("again {tries}"))).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // H7.14
        assert!(all_have_tokens(&cluster, "from the other one").await);
    }
}

#[tokio::test]
async fn h7_an_only_engine_that_does_not_tokenize_costs_no_time() {
    let (cluster, engines, modes) = cluster([HANGS, HANGS]).await;
    let mut tries = 0;
    while counted(&cluster, "engine_paused").await == 0.0 {
        tries += 1;
        assert!(tries < 20, "the gateway does not notice");
        assert!(measured(&cluster, &json!(format!("try {tries}"))).await.1);
    }
    for engine in &engines {
        // H7.14
        assert!(asked(engine) <= tries + 20, "{} questions", asked(engine));
    }
    modes.iter().for_each(|mode| mode.store(WORKS, Ordering::SeqCst));
    let mut tries = 0;
    while !all_have_tokens(&cluster, &format!("again {tries}")).await {
        tries += 1;
        assert!(tries < 200, "they are not tested again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn h7_many_prompts_of_one_tenant_do_not_take_the_tokens_from_another() {
    let (cluster, _engines, _) = cluster_with([WORKS, WORKS], 20 * LIMIT).await;
    let asks = async |tenant, number: usize| {
        let prompt = json!(format!("LATE {tenant} {number}"));
        u32::from(!measured_for(&cluster, &prompt, &[(TENANT, tenant)]).await.1)
    };
    // More at a time than the engines are asked for.
    let flood = join_all((0..40).map(async |first: usize| {
        let mut with_tokens = 0;
        for round in 0..5 {
            with_tokens += asks("a", 40 * round + first).await;
        }
        with_tokens
    }));
    let other = async {
        let mut with_tokens = 0;
        for number in 0..4 {
            tokio::time::sleep(LATE).await;
            with_tokens += asks("b", number).await;
        }
        with_tokens
    };
    let (flood, other) = tokio::join!(flood, other);
    // H7.16
    assert_eq!((flood.iter().sum::<u32>(), other), (200, 4));
    assert_eq!(counted(&cluster, "engine_busy").await, 0.0);
}

#[tokio::test]
async fn a1_a_list_of_one_prompt_is_that_prompt() {
    let (cluster, engines, _) = cluster([WORKS, WORKS]).await;
    let text = "an only prompt, of some length";
    let length = text.len() as u64;
    // A1.18
    assert_eq!(measured(&cluster, &json!([text])).await, (length, false));
    assert_eq!(measured(&cluster, &json!(text)).await, (length, false));
    let questions =
        || engines.iter().flat_map(RawEngine::requests).filter(|request| request.line == TOKENIZE);
    let prompts: Vec<Value> = questions()
        .map(|asked| serde_json::from_str::<Value>(&asked.body).unwrap()["prompt"].clone())
        .collect();
    assert_eq!(prompts, [json!(text)], "the second one has the tokens of the first");
    // A1.18
    assert_eq!(measured(&cluster, &json!([text.as_bytes()])).await, (length, false));
    assert_eq!(questions().count(), 1);
    assert!(measured(&cluster, &json!([text, text])).await.1);
    assert_eq!(questions().count(), 1, "no engine takes several");
    // H7.15
    assert_eq!(counted(&cluster, "batch").await, 1.0);
    let body = format!(r#"{{"model":"tiny","max_tokens":1,"prompt": [ "{text}" ]}}"#);
    cluster.client.post(COMPLETIONS, &[], body).await.unwrap();
    let sent =
        engines.iter().flat_map(RawEngine::requests).find(|request| request.line.ends_with(COMPLETIONS));
    // A5.7
    assert!(sent.unwrap().body.contains(&format!(r#""prompt": [ "{text}" ]"#)));
}

#[tokio::test]
async fn h7_prompts_of_endpoints_without_tokens_are_counted() {
    let (cluster, _engines, _) = cluster([WORKS, WORKS]).await;
    let message = json!([{"role": "user", "content": "hi"}]);
    let messages = json!({"model": "tiny", "max_tokens": 1, "messages": message});
    cluster.client.post("/v1/messages", &[], messages.to_string()).await.unwrap();
    let responses = json!({"model": "tiny", "input": message});
    cluster.client.post("/v1/responses", &[], responses.to_string()).await.unwrap();
    cluster
        .client
        .post("/v1/embeddings", &[], json!({"model": "tiny", "input": "hi"}).to_string())
        .await
        .unwrap();
    // H7.15
    assert_eq!(counted(&cluster, "endpoint").await, 2.0);
    let embeds = json!({"model": "tiny", "max_tokens": 1, "prompt_embeds": "gAJj"});
    cluster.client.post(COMPLETIONS, &[], embeds.to_string()).await.unwrap();
    assert_eq!(counted(&cluster, "unsupported").await, 1.0);
}
