//! Request bodies with a content coding: decoded within their limits, or refused by name.

use std::io::Write as _;

use pointsman_gateway::config::Config;
use pointsman_sim::{Dialect, Role};
use pointsman_tests::{
    CHAT, TestCluster, TestClusterBuilder,
    client::Client,
    picker::PickerClient,
    raw::{send, until_mark},
};

use crate::client_bodies::cluster;

const BODY: &str = r#"{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"hello"}]}"#;
/// [`BODY`], by Google's encoder.
const BROTLI: &[u8] = b"\
\x1b\x4d\x00\x30\x2c\x8e\x77\x10\x2f\x82\x8a\x8a\xf0\xbc\xb8\xc5\xf0\xa5\x08\xde\x5e\x85\xb5\xb5\
\x0e\x4b\x57\xdf\x14\x91\xd9\x4a\x91\xaf\x39\x8f\xb1\x73\x86\x47\x8e\xe9\x2a\x1e\x70\x17\xac\x11\
\x48\x18\x26\xe6\x57\xaa\xe6\x9b\x62\x2f\x2f\x80\x50\x58\x38\xe1\x48\x7c\x07";
/// 64 MiB of spaces, by the same.
const BROTLI_BOMB: &[u8] = b"\
\xcf\xff\xff\x7f\xf8\x25\x40\xe2\xb1\x40\x20\xf7\xfe\x9f\xff\xff\xff\xf0\x4b\x00\xc4\x61\x01\x80\
\xee\xfd\x3f\xff\xff\xff\xe1\x97\x00\x88\xc3\x22\x00\xdd\xfb\x7f\xfe\xff\xff\xc3\x2f\x01\x10\x87\
\x05\x00\xba\xf7\xff\x03";

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 3).unwrap()
}

async fn answer(client: &Client, path: &str, coding: &str, body: &[u8]) -> (u16, String) {
    let reply = client.post(path, &[("content-encoding", coding)], body.to_vec()).await.unwrap();
    (reply.status.as_u16(), String::from_utf8_lossy(&reply.body).into_owned())
}

#[tokio::test]
async fn i11_a_compressed_body_is_decoded_for_routing_and_for_the_engine() {
    let cluster = cluster(|_| {}).await;
    let plain = cluster.client.post("/v1/route", &[], BODY).await.unwrap().json().unwrap();
    for (coding, body) in [
        ("gzip", gzip(BODY.as_bytes())),
        ("GZip", gzip(BODY.as_bytes())),
        ("x-gzip", gzip(BODY.as_bytes())),
        ("zstd", zstd(BODY.as_bytes())),
        ("br", BROTLI.to_vec()),
        ("identity", BODY.into()),
    ] {
        let (status, text) = answer(&cluster.client, CHAT, coding, &body).await;
        // I11.1
        assert!(status == 200 && text.contains("\"completion_tokens\":2"), "{coding}: {status} {text}");
        let (status, text) = answer(&cluster.client, "/v1/route", coding, &body).await;
        let route: serde_json::Value = serde_json::from_str(&text).unwrap();
        // I11.1
        assert_eq!((status, &route["prompt_tokens"]), (200, &plain["prompt_tokens"]), "{coding}");
    }
    let workers = cluster.admin.get("/workers").await.unwrap().json().unwrap();
    let lease = gzip(br#"{"role":"aggregated"}"#);
    let (status, text) = answer(&cluster.admin, "/workers", "gzip", &lease).await;
    // I11.1: operators' bodies, too: the gateway misses what the decoded body lacks.
    assert!(status == 400 && text.contains("url"), "{workers}: {status} {text}");
}

#[tokio::test]
async fn i11_a_bomb_is_refused_where_it_exceeds_the_limit_of_decoded_bytes() {
    let cluster = cluster(|_| {}).await;
    let large = vec![b' '; 64 * 1024 * 1024];
    for (coding, body) in [("gzip", gzip(&large)), ("zstd", zstd(&large)), ("br", BROTLI_BOMB.to_vec())] {
        assert!(body.len() < 100_000, "{coding}: {} bytes", body.len());
        let (status, text) = answer(&cluster.client, CHAT, coding, &body).await;
        // I11.2
        assert!(status == 413 && text.contains("payload_too_large"), "{coding}: {status} {text}");
        let (status, text) = answer(&cluster.admin, "/workers", coding, &body).await;
        // I11.2
        assert!(status == 413 && text.contains("payload_too_large"), "{coding}: {status} {text}");
    }
    // The rest of the bomb never comes.
    let bomb = gzip(&large);
    let declared = bomb.len() + 1_000_000;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: {declared}\r\n\r\n"
    );
    let mut client = send(cluster.gateway.address, [head.as_bytes(), &bomb].concat()).await.unwrap();
    let text = until_mark(&mut client, "payload_too_large").await;
    // I11.2
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    assert_eq!(cluster.client.post(CHAT, &[], BODY).await.unwrap().status, 200);
    cluster.at_rest().await.unwrap();
    assert_eq!(cluster.gateway.state().body_bytes.used(), 0);
}

#[tokio::test]
async fn i11_decoded_bytes_count_for_the_bodies_in_flight() {
    let change = |config: &mut Config| {
        config.server.max_body_bytes = 1_000_000;
        config.limits.body_bytes_in_flight = 1_200_000;
    };
    let cluster = cluster(change).await;
    let used = |cluster: &TestCluster| cluster.gateway.state().body_bytes.used();
    let text = vec![b' '; 900_000];
    // A body whose last bytes do not come is decoded as far as it arrived.
    let upload = |body: Vec<u8>| {
        let fields = format!("content-encoding: zstd\r\ncontent-length: {}", body.len() + 100);
        [format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n{fields}\r\n\r\n").into_bytes(), body].concat()
    };
    let first = send(cluster.gateway.address, upload(zstd(&text))).await.unwrap();
    cluster.until("the first upload is decoded", |cluster| used(cluster) > 800_000).await.unwrap();
    let mut second = send(cluster.gateway.address, upload(zstd(&text))).await.unwrap();
    let answer = until_mark(&mut second, "\"request_id\"").await;
    // I11.2
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("body_bytes_in_flight"), "{answer}");
    drop((first, second));
    cluster.until("the bytes are free again", |cluster| used(cluster) == 0).await.unwrap();
}

#[tokio::test]
async fn i11_codings_that_are_unknown_or_false_are_415_and_named() {
    let cluster = cluster(|_| {}).await;
    for client in [&cluster.client, &cluster.admin] {
        let path = if std::ptr::eq(client, &cluster.client) { CHAT } else { "/workers" };
        for coding in ["deflate", "gzip, br", "compress", "gzip;q=1"] {
            let reply = client.post(path, &[("content-encoding", coding)], BODY).await.unwrap();
            let text = String::from_utf8_lossy(&reply.body);
            // I11.3, I_unsupported_content_coding
            assert_eq!((reply.status.as_u16(), reply.code().as_str()), (415, "unsupported_content_coding"));
            // I11.3
            assert!(text.contains(&format!("`{coding}`")), "{text}");
            // I11.3
            assert_eq!(reply.headers["accept-encoding"], "gzip, zstd, br");
        }
        for (coding, body) in
            [("gzip", BODY.into()), ("zstd", gzip(BODY.as_bytes())), ("br", BROTLI[..40].into())]
        {
            let body: Vec<u8> = body;
            let (status, text) = answer(client, path, coding, &body).await;
            // I11.4
            assert!(status == 415 && text.contains(&format!("not valid `{coding}`")), "{status} {text}");
        }
    }
}

#[tokio::test]
async fn r1_a_compressed_body_goes_on_decoded() {
    let builder = TestClusterBuilder::new()
        .config(|config| config.ext_proc.listen = Some("127.0.0.1:0".parse().unwrap()))
        .sim(Dialect::Vllm, Role::Aggregated);
    let cluster = builder.start().await;
    let picker = PickerClient::connect(cluster.gateway.ext_proc.unwrap()).await.unwrap();
    let mut carried = picker.open().await.unwrap();
    carried.head("POST", CHAT, &[("content-encoding", "gzip")], false).unwrap();
    carried.body(&gzip(BODY.as_bytes()), true).unwrap();
    let picked = carried.picked().await.unwrap();
    // R1.8
    assert_eq!(picked.body(), BODY);
    // R1.8
    assert!(picked.removed.iter().any(|name| name == "content-encoding"), "{picked:?}");
    let refusal = picker.ask(CHAT, &[("content-encoding", "deflate")], BODY).await.unwrap().0.refusal();
    // R3.1
    assert!(refusal.0 == 415 && refusal.1.contains("`deflate`"), "{refusal:?}");
    let mut bomb = picker.open().await.unwrap();
    bomb.head("POST", CHAT, &[("content-encoding", "br")], false).unwrap();
    bomb.body(BROTLI_BOMB, true).unwrap();
    // R3.1
    assert_eq!(bomb.picked().await.unwrap().refusal().0, 413);
    drop((carried, bomb));
    cluster.at_rest().await.unwrap();
}
