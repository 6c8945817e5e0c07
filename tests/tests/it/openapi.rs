//! The OpenAPI documents of both listeners, compared with what the listeners do.

use std::collections::BTreeSet;

use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    Act, RawEngine, RawRequest, TestCluster, TestClusterBuilder,
    client::{Client, Reply},
    raw_engine::json as raw_answer,
};
use serde_json::{Value, json};

mod document;

use document::Document;

const JSON: &str = "application/json";
/// Only SGLang serves it.
const GENERATE: &str = "/generate";
/// The simulators do not serve these.
const OTHERS: [&str; 5] =
    ["/inference/v1/generate", "/v2/embed", "/v1/classify", "/v1/tokenize", "/v1/detokenize"];
const FORM: &str = "multipart/form-data; boundary=cut";

async fn serving() -> TestCluster {
    TestClusterBuilder::new().sim(Dialect::Vllm, Role::Aggregated).start().await
}

async fn document(client: &Client) -> Document {
    let reply = client.get("/openapi.json").await.unwrap();
    assert_eq!(
        (reply.status.as_u16(), &reply.headers["content-type"]),
        (200, &"application/json".parse().unwrap())
    );
    Document(reply.json().unwrap())
}

/// Puts values in the place of the parameters of a path.
fn filled(path: &str) -> String {
    path.replace("{slot}", "prefill")
        .replace("/models/{id}", "/models/tiny")
        .replace("/responses/{id}", "/responses/resp_1")
        .replace("{id}", "1")
}

#[tokio::test]
async fn every_path_has_the_methods_of_its_document_and_no_other() {
    let cluster = serving().await;
    for client in [&cluster.client, &cluster.admin] {
        for (path, mut methods) in document(client).await.operations() {
            if methods.contains("GET") {
                methods.insert("HEAD".to_owned());
            }
            let reply = client.send("BREW", &filled(&path), &[]).await.unwrap();
            assert_eq!(reply.status, 405, "{path}: {reply:?}");
            let allowed = reply.headers["allow"].to_str().unwrap();
            let allowed: BTreeSet<String> =
                allowed.split(',').map(|method| method.trim().to_owned()).collect();
            // O4.1
            assert_eq!(allowed, methods, "{path}");
        }
    }
}

/// A request: method, path of the document, path, content type, body, status.
type Case<'a> = (&'a str, &'a str, &'a str, &'a str, String, u16);

async fn send(client: &Client, (method, _, path, kind, body, _): &Case<'_>) -> Reply {
    match *method {
        "POST" => client.post_as(kind, path, &[], body.clone()).await.unwrap(),
        method => client.send(method, path, &[]).await.unwrap(),
    }
}

/// Sends requests and checks every answer. Returns the operations that were called.
async fn checked(client: &Client, document: &Document, cases: Vec<Case<'_>>) -> BTreeSet<String> {
    let mut called = BTreeSet::new();
    for case in cases {
        let reply = send(client, &case).await;
        let (method, template, path, .., status) = case;
        assert_eq!(reply.status.as_u16(), status, "{method} {path}: {reply:?}");
        // O4.2
        assert_eq!(document.check(method, template, &reply), Ok(()), "{method} {path}: {reply:?}");
        called.insert(format!("{method} {template}"));
    }
    called
}

fn all(document: &Document) -> BTreeSet<String> {
    let of = |(path, methods): (String, BTreeSet<String>)| {
        methods.into_iter().map(move |method| format!("{method} {path}"))
    };
    document.operations().into_iter().flat_map(of).collect()
}

fn form() -> String {
    "--cut\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\ncontent-type: audio/wav\r\n\r\n\
     RIFF\r\n--cut\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\ntiny\r\n--cut--\r\n"
        .to_owned()
}

/// One request that is served for each endpoint with a body.
fn served() -> Vec<(&'static str, &'static str, Value)> {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let rerank = json!({ "model": "tiny", "query": "q", "documents": ["a", "b"] });
    let score = json!({ "model": "tiny", "text_1": "q", "text_2": ["a", "b"] });
    let chat = json!({ "model": "tiny", "messages": messages, "max_tokens": 3 });
    vec![
        ("/v1/chat/completions", JSON, chat.clone()),
        (
            "/v1/chat/completions",
            JSON,
            json!({ "model": "tiny", "messages": messages, "max_tokens": 3, "stream": true }),
        ),
        ("/v1/completions", JSON, json!({ "model": "tiny", "prompt": "hello", "max_tokens": 3 })),
        (
            GENERATE,
            JSON,
            json!({ "model": "tiny", "text": "hello", "sampling_params": { "max_new_tokens": 3 } }),
        ),
        ("/v1/embeddings", JSON, json!({ "model": "tiny", "input": "x" })),
        (
            OTHERS[0],
            JSON,
            json!({ "model": "tiny", "token_ids": [1], "sampling_params": { "max_tokens": 3 } }),
        ),
        (OTHERS[1], JSON, json!({ "model": "tiny", "texts": ["x"] })),
        (OTHERS[2], JSON, json!({ "model": "tiny", "input": "x" })),
        (OTHERS[3], JSON, json!({ "model": "tiny", "prompt": "a b" })),
        (OTHERS[4], JSON, json!({ "model": "tiny", "tokens": [1, 2] })),
        ("/v1/responses", JSON, json!({ "model": "tiny", "input": "hello", "max_output_tokens": 3 })),
        ("/v1/messages", JSON, chat.clone()),
        ("/v1/messages/count_tokens", JSON, json!({ "model": "tiny", "messages": messages })),
        ("/v1/rerank", JSON, rerank.clone()),
        ("/v2/rerank", JSON, rerank.clone()),
        ("/rerank", JSON, rerank),
        ("/v1/score", JSON, score.clone()),
        ("/score", JSON, score),
        ("/pooling", JSON, json!({ "model": "tiny", "input": "x" })),
        ("/classify", JSON, json!({ "model": "tiny", "input": "x" })),
        ("/v1/audio/transcriptions", FORM, Value::Null),
        ("/v1/audio/translations", FORM, Value::Null),
        ("/v1/audio/speech", JSON, json!({ "model": "tiny", "input": "hello", "voice": "alloy" })),
        ("/v1/images/generations", JSON, json!({ "model": "tiny", "prompt": "a bridge" })),
        ("/tokenize", JSON, json!({ "model": "tiny", "prompt": "a b" })),
        ("/detokenize", JSON, json!({ "model": "tiny", "tokens": [1, 2] })),
        ("/v1/route", JSON, chat),
    ]
}

#[tokio::test]
async fn answers_to_clients_are_as_documented() {
    let cluster = serving().await;
    let document = document(&cluster.client).await;
    let mut cases: Vec<Case<'_>> = Vec::new();
    for (path, kind, body) in served() {
        let unknown = body.to_string().replace("\"tiny\"", "\"absent\"");
        let body = if kind == FORM { form() } else { body.to_string() };
        cases.push(("POST", path, path, kind, body, 200));
        let (wrong, status) = if kind == FORM { ("no form".to_owned(), 400) } else { (unknown, 404) };
        cases.push(("POST", path, path, kind, wrong, status));
        cases.push(("POST", path, path, kind, "{".to_owned(), 400));
    }
    let get = |template: &'static str, path: &'static str, status| {
        ("GET", template, path, "", String::new(), status)
    };
    cases.extend([
        get("/v1/models", "/v1/models", 200),
        get("/v1/models/{id}", "/v1/models/tiny", 200),
        get("/v1/models/{id}", "/v1/models/a/b", 404),
        get("/v1/realtime", "/v1/realtime?model=tiny", 426),
        get("/v1/responses/{id}", "/v1/responses/resp_none", 404),
        ("DELETE", "/v1/responses/{id}", "/v1/responses/resp_none", "", String::new(), 404),
        ("POST", "/v1/responses/{id}/cancel", "/v1/responses/resp_none/cancel", JSON, String::new(), 404),
        get("/version", "/version", 200),
        get("/health", "/health", 200),
        get("/healthz", "/healthz", 200),
        get("/openapi.json", "/openapi.json", 200),
    ]);
    let (native, cases): (Vec<_>, Vec<_>) = cases.into_iter().partition(|(_, path, ..)| *path == GENERATE);
    let (others, cases): (Vec<_>, Vec<_>) =
        cases.into_iter().partition(|(_, path, ..)| OTHERS.contains(path));
    let mut called = checked(&cluster.client, &document, cases).await;
    let script = |request: &RawRequest| {
        let models = r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#;
        vec![Act::Send(raw_answer(if request.line.ends_with("models") { models } else { "{}" }))]
    };
    let engine = RawEngine::start(script).await;
    let raw = TestClusterBuilder::new()
        .config(|config| config.workers.push(engine.worker("role=aggregated,engine=vllm")))
        .start()
        .await;
    called.extend(checked(&raw.client, &document, others).await);
    let sglang = TestClusterBuilder::new().sim(Dialect::Sglang, Role::Aggregated).start().await;
    called.extend(checked(&sglang.client, &document, native).await);
    // O4.2: each operation was called
    assert_eq!(called, all(&document));
    let without =
        TestClusterBuilder::new().config(|config| config.server.max_body_bytes = 1_000).start().await;
    let large = "x".repeat(2_000);
    let cases = served().into_iter().filter(|(_, kind, _)| *kind == JSON).flat_map(|(path, kind, body)| {
        [("POST", path, path, kind, body.to_string(), 503), ("POST", path, path, kind, large.clone(), 413)]
    });
    checked(&without.client, &document, cases.collect()).await;
}

#[tokio::test]
async fn answers_to_operators_are_as_documented() {
    let cluster = serving().await;
    let document = document(&cluster.admin).await;
    let (path, kind, body) = served().swap_remove(0);
    assert_eq!(cluster.client.post_as(kind, path, &[], body.to_string()).await.unwrap().status, 200);
    let listed = cluster.admin.get("/decisions").await.unwrap().json().unwrap();
    let decision = format!("/decisions/{}", listed["decisions"][0]["id"].as_str().unwrap());
    let get = |template: &'static str, path, status| ("GET", template, path, JSON, String::new(), status);
    let post = |template: &'static str, path, status| ("POST", template, path, JSON, String::new(), status);
    let spec = json!({ "id": u64::MAX, "url": "http://127.0.0.1:9", "role": "decode", "engine": "vllm" })
        .to_string();
    let big = format!("/workers/{}", u64::MAX);
    let mut cases = vec![
        get("/decisions", "/decisions?limit=3&slot=aggregated", 200),
        get("/decisions", "/decisions?limit=many", 400),
        get("/decisions/export", "/decisions/export", 200),
        get("/decisions/export", "/decisions/export?colour=red", 400),
        get("/decisions/summary", "/decisions/summary?window=15m", 200),
        get("/decisions/summary", "/decisions/summary?window=2h", 400),
        get("/decisions/{id}", &decision, 200),
        get("/decisions/{id}", "/decisions/0000000000000001", 404),
        get("/decisions/{id}", "/decisions/xyz", 400),
        ("POST", "/workers", "/workers", JSON, spec, 200),
        ("POST", "/workers", "/workers", JSON, "{}".to_owned(), 400),
        ("POST", "/workers", "/workers", "text/plain", "{}".to_owned(), 415),
        get("/workers", "/workers", 200),
        get("/workers/{id}", "/workers/1", 200),
        get("/workers/{id}", "/workers/99", 404),
        get("/decisions", "/decisions?short=true&ended=true&lane=active", 200),
        get("/decisions", "/decisions?failed=perhaps", 400),
        get("/events", "/events?kinds=cars", 400),
        post("/workers/{id}/drain", "/workers/1/drain", 200),
        get("/status", "/status", 200),
        get("/readyz", "/readyz", 503),
        ("DELETE", "/workers/{id}/drain", "/workers/1/drain", "", String::new(), 200),
        ("DELETE", "/workers/{id}/drain", "/workers/7/drain", "", String::new(), 404),
        post("/workers/{id}/drain", "/workers/seven/drain", 400),
        ("DELETE", "/workers/{id}", &big, "", String::new(), 200),
        ("DELETE", "/workers/{id}", &big, "", String::new(), 404),
        get("/readyz", "/readyz", 200),
        get("/policies", "/policies", 200),
        post("/policies/reload", "/policies/reload", 200),
        get("/policies/{slot}/log", "/policies/prefill/log", 200),
        get("/policies/{slot}/log", "/policies/prefill/log?after=some", 400),
        get("/policies/{slot}/log", "/policies/prefill/log?model=absent", 404),
        post("/policies/{slot}/rollback", "/policies/prefill/rollback", 409),
        post("/policies/{slot}/rollback", "/policies/prefill/rollback?lane=left", 400),
        post("/policies/{slot}/rollback", "/policies/left/rollback", 404),
        ("DELETE", "/policies/{slot}/rollback", "/policies/prefill/rollback", "", String::new(), 409),
        (
            "DELETE",
            "/policies/{slot}/rollback",
            "/policies/prefill/rollback?lane=canary",
            "",
            String::new(),
            400,
        ),
        post("/policies/{slot}/promote", "/policies/prefill/promote", 409),
        post("/config/reload", "/config/reload", 409),
        ("PUT", "/workers/{id}", "/workers/7", JSON, String::new(), 404),
        ("PUT", "/workers/{id}", "/workers/7?ttl=soon", JSON, String::new(), 400),
        get("/discovery", "/discovery", 200),
        get("/replicas", "/replicas", 200),
        get("/metrics", "/metrics", 200),
        get("/healthz", "/healthz", 200),
        get("/openapi.json", "/openapi.json", 200),
    ];
    for file in document.0["paths"].as_object().unwrap().keys() {
        if file == "/" || file.starts_with("/page") {
            let file: &'static str = file.clone().leak();
            cases.push(get(file, file, 200));
        }
    }
    let mut called = checked(&cluster.admin, &document, cases).await;
    let events = cluster.admin.events("/events", &[]).await.unwrap();
    // Endless: only its head can be compared.
    let head = Reply { status: events.status, headers: events.headers.clone(), body: "event".into() };
    assert_eq!(document.check("GET", "/events", &head), Ok(()));
    called.insert("GET /events".to_owned());
    // O4.2: each operation was called
    assert_eq!(called, all(&document));
}

#[tokio::test]
async fn the_operators_document_needs_what_other_reads_need() {
    let builder = TestClusterBuilder::new().config(|config| {
        config.server.admin_token = Some("s3cret".into());
        config.server.admin_token_reads = true;
    });
    let cluster = builder.start().await;
    let document = document(&cluster.client).await;
    // O4.3
    assert_eq!(document.0["openapi"], "3.1.0");
    // O4.3
    assert_eq!(cluster.admin.get("/openapi.json").await.unwrap().status, 401);
    let token = [("authorization", "Bearer s3cret")];
    let reply = cluster.admin.get_with("/openapi.json", &token).await.unwrap();
    assert_eq!(reply.status, 200);
    let refused = cluster.admin.get("/workers").await.unwrap();
    // O4.2
    assert_eq!(Document(reply.json().unwrap()).check("GET", "/workers", &refused), Ok(()));
}
