//! The groups of clients. Each group has a limit of clients, bytes and time.

use std::{future::Future, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::Method;
use rand::RngExt as _;
use serde_json::json;
use tokio::{
    io::AsyncWriteExt as _,
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    Seen, Target, number,
    sockets::{connect, counted, outcome, post, send},
};
use crate::client::CHAT;

const COMPLETIONS: &str = "/v1/completions";
/// Maximum time for the end of one client.
const LIMIT: Duration = Duration::from_secs(20);
/// Maximum number of concurrent clients of a group.
const AT_ONCE: usize = 64;

/// Runs `client` `count` times, with a limit of concurrent runs.
async fn each<T, F: Future<Output = T>>(count: usize, client: impl Fn(usize) -> F) -> Vec<T> {
    stream::iter(0..count).map(client).buffer_unordered(AT_ONCE).collect().await
}

fn failed(outcome: anyhow::Result<String>) -> String {
    outcome.unwrap_or_else(|error| format!("{error:#}"))
}

/// Sends requests for endless streams that are never read.
pub(super) async fn silent_readers(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(2_000);
    let body = r#"{"model":"endless","stream":true,"messages":[{"role":"user","content":"x"}]}"#;
    let request = post(CHAT, body.len()) + body;
    let (metric, slow) = ("pointsman_requests_total", ("code", "client_too_slow"));
    let before = target.metric(metric, &[slow]).await?;
    let address = target.clients();
    let clients = each(count, |_| send(&address, request.as_bytes())).await;
    let connected = clients.iter().filter(|client| client.is_ok()).count();
    let ended = target.growth(metric, slow, (before, number(connected)), LIMIT * 2).await?;
    drop(clients);
    let seen = (format!("{ended} x client_too_slow"), connected == count && ended >= number(connected));
    let memory_mb = 64.0 + number(count) * 0.2;
    Ok(Seen::new(format!("{connected} streams"), "each ended after client_write", seen, memory_mb))
}

/// Sends requests without a key or a body, whose answers are never read.
pub(super) async fn pipelined(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(8);
    let requests = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1_000);
    let (address, requests) = (target.clients(), &requests);
    let one = |_| {
        let address = &address;
        async move {
            let mut client = connect(address).await?;
            let flood = async {
                for _ in 0..1_000 {
                    client.write_all(requests.as_bytes()).await?;
                }
                Ok::<_, std::io::Error>(())
            };
            let ended = timeout(LIMIT, flood).await;
            Ok(if matches!(ended, Ok(Err(_))) { "ended".to_owned() } else { "not ended".to_owned() })
        }
    };
    let outcomes: Vec<String> = each(count, one).await.into_iter().map(failed).collect();
    let seen = (counted(&outcomes), outcomes.iter().all(|outcome| outcome == "ended"));
    Ok(Seen::new(format!("{count} x 1,000,000 requests"), "ended after client_write", seen, 32.0))
}

/// Opens the operators' event stream and never reads it.
pub(super) async fn silent_event_readers(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(32).min(32);
    let admin = target.fleet.admin_address();
    let request = b"GET /events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
    let (metric, reason) = ("pointsman_client_connections_ended_total", ("reason", "write_timeout"));
    let before = target.metric(metric, &[reason]).await?;
    let readers = each(count, |_| send(&admin, request)).await;
    let started = Instant::now();
    let ended = target.growth(metric, reason, (before, number(count)), LIMIT).await?;
    drop(readers);
    let seen = format!("{ended} ended in {:.1} s", started.elapsed().as_secs_f64());
    let seen = (seen, ended >= number(count));
    Ok(Seen::new(format!("{count} readers"), "each ended after client_write", seen, 32.0))
}

/// Sends bodies of 31 MB without their last byte.
pub(super) async fn slow_uploads(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(20);
    let (length, address) = (31_000_000, target.clients());
    let piece = Bytes::from(vec![b' '; 1_000_000]);
    let one = |_| {
        let (piece, address) = (piece.clone(), &address);
        async move {
            let mut client = send(address, post(CHAT, length).as_bytes()).await?;
            for _ in 1..31 {
                if timeout(LIMIT, client.write_all(&piece)).await?.is_err() {
                    break;
                }
            }
            Ok(outcome(&mut client, LIMIT).await)
        }
    };
    let outcomes: Vec<String> = each(count, one).await.into_iter().map(failed).collect();
    let seen = (counted(&outcomes), outcomes.iter().all(|outcome| matches!(outcome.as_str(), "408" | "503")));
    Ok(Seen::new(
        format!("{count} x 31 MB, unfinished"),
        "408, or 503 above body_bytes_in_flight",
        seen,
        640.0,
    ))
}

/// Sends bodies at one byte a second.
pub(super) async fn trickled_bodies(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(1_000);
    let (address, head) = (target.clients(), post(CHAT, 100_000));
    let clients = each(count, |_| send(&address, head.as_bytes())).await;
    let mut clients: Vec<TcpStream> = clients.into_iter().collect::<anyhow::Result<_>>()?;
    for _ in 0..4 {
        for client in &mut clients {
            let _ = client.try_write(b" ");
        }
        sleep(Duration::from_secs(1)).await;
    }
    let ended = stream::iter(clients).map(|mut client| async move { outcome(&mut client, LIMIT).await });
    let outcomes: Vec<String> = ended.buffer_unordered(AT_ONCE).collect().await;
    let seen = (counted(&outcomes), outcomes.iter().all(|outcome| outcome == "408"));
    Ok(Seen::new(format!("{count} x 1 B/s"), "408 below min_body_rate", seen, 64.0))
}

/// Sends bodies in segments of one byte.
pub(super) async fn one_byte_segments(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(40);
    let segments = 5_000;
    let (clients, admin) = (target.clients(), target.fleet.admin_address());
    let one = |place: usize| {
        let (address, path) = if place.is_multiple_of(2) { (&clients, CHAT) } else { (&admin, "/workers") };
        async move {
            let mut client = send(address, post(path, segments).as_bytes()).await?;
            for _ in 0..segments {
                client.write_all(b" ").await?;
                tokio::task::yield_now().await;
            }
            Ok(outcome(&mut client, LIMIT).await)
        }
    };
    let outcomes: Vec<String> = each(count, one).await.into_iter().map(failed).collect();
    let seen = (counted(&outcomes), outcomes.iter().all(|outcome| outcome == "400"));
    Ok(Seen::new(format!("{count} x {segments} segments"), "400, no page for a segment", seen, 64.0))
}

/// Sends large prompts from clients that disconnect at once. Prompts of 6 KB must be encoded in time
/// meanwhile.
pub(super) async fn abandoned_prompts(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(30);
    let number = rand::rng().random::<u32>();
    let text: String = (0..500_000).map(|place| format!("sentence {number:010} {place:09}. ")).collect();
    let body = json!({ "model": "tiny", "prompt": text, "max_tokens": 1 }).to_string();
    let request = Bytes::from(post(COMPLETIONS, body.len()) + &body);
    let tokenless = [("reason", "tokenizer_slow")];
    let before = target.metric("pointsman_not_tokenized_total", &tokenless).await?;
    let address = target.clients();
    let mut leaving = JoinSet::new();
    for _ in 0..count {
        let (address, request) = (address.clone(), request.clone());
        leaving.spawn(async move { send(&address, &request).await.map(drop) });
    }
    let (mut slowest, mut answered) = (Duration::ZERO, 0);
    for place in 0..30 {
        let prompt = format!("{place} of {number} is a short prompt, ").repeat(180);
        let body = json!({ "model": "tiny", "prompt": prompt, "max_tokens": 1 }).to_string();
        let started = Instant::now();
        let answer = target.fleet.client.post(COMPLETIONS, body).await;
        answered += u32::from(answer.is_ok());
        slowest = slowest.max(started.elapsed());
        sleep(Duration::from_millis(100)).await;
    }
    let tokenless = target.metric("pointsman_not_tokenized_total", &tokenless).await? - before;
    let sent = generations(target).await?;
    let seen = (
        format!(
            "{sent} engine calls, slowest {:.0} ms, {tokenless} without tokens",
            slowest.as_secs_f64() * 1e3
        ),
        answered == 30 && sent == 30 && slowest < Duration::from_secs(1),
    );
    Ok(Seen::new(
        format!("{count} x {:.0} MB, 30 x 6 KB", megabytes(body.len())),
        "no engine call for them, 6 KB in 1 s",
        seen,
        1_000.0,
    ))
}

fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

/// Returns the number of completions that the engine received.
async fn generations(target: &Target) -> anyhow::Result<usize> {
    let mut count = 0;
    for engine in &target.fleet.engines {
        let list = engine.client().json("/sim/requests").await?;
        count += list.as_array().into_iter().flatten().filter(|one| one["path"] == COMPLETIONS).count();
    }
    Ok(count)
}

/// Sends bytes that are not HTTP, or malformed HTTP.
pub(super) async fn malformed(target: &Target) -> anyhow::Result<Seen> {
    let head = |field: &str| format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n{field}\r\n\r\n");
    let many: String = (0..500).map(|number| format!("x-{number}: y\r\n")).collect();
    let cases = [
        ("\x16\x03\x01\x02\0\x01\0\x01garbage\r\n\r\n".to_owned(), "400"),
        ("GET\r\n\r\n".to_owned(), "400"),
        (head("content-length: two"), "400"),
        (head("content-length: 3\r\ncontent-length: 4"), "400"),
        (head("content-length: 3\r\ntransfer-encoding: chunked") + "xyz\r\n", "400"),
        (head("transfer-encoding: gzip"), "400"),
        (head("transfer-encoding: chunked") + "zz\r\n", "400"),
        (head(&format!("x-long: {}", "y".repeat(100_000))), "431"),
        (head(many.trim_end()), "431"),
        (head("content-length: 99999999999"), "413"),
    ];
    let (address, cases) = (target.clients(), &cases);
    let count = target.count(50) * cases.len();
    let one = |place: usize| {
        let address = &address;
        async move {
            let (request, status) = cases.get(place % cases.len()).cloned().unwrap_or_default();
            let mut client = connect(address).await?;
            let _ = client.write_all((request + &"z".repeat(100_000)).as_bytes()).await;
            let seen = outcome(&mut client, LIMIT).await;
            Ok(if seen == status { "as expected".to_owned() } else { format!("{seen} for {status}") })
        }
    };
    let outcomes: Vec<String> = each(count, one).await.into_iter().map(failed).collect();
    let seen = (counted(&outcomes), outcomes.iter().all(|outcome| outcome == "as expected"));
    Ok(Seen::new(format!("{count} requests"), "400, 413 or 431 before the end", seen, 32.0))
}

/// Opens streams whose clients disconnect after a random time.
pub(super) async fn departing(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(1_000);
    let body = json!({
        "model": "tiny", "stream": true, "max_tokens": 2_000, "ignore_eos": true,
        "messages": [{ "role": "user", "content": "a question" }],
    });
    let body = Bytes::from(body.to_string());
    let one = |_| async {
        let stay = Duration::from_millis(rand::rng().random_range(0..200));
        let headers = [("connection", "close")];
        let answer = target.fleet.client.send(Method::POST, CHAT, &headers, body.clone());
        let _ = timeout(stay, async {
            let answer = answer.await;
            sleep(LIMIT).await;
            drop(answer);
        })
        .await;
    };
    each(count, one).await;
    let booked = target.fleet.booked(Duration::from_secs(5)).await?;
    let running = target.fleet.engines_sum("/running").await;
    let seen = (format!("{booked} bookings, {running} sequences"), booked <= 10 && running <= 10);
    // The well-behaved client may have a request in flight.
    Ok(Seen::new(format!("{count} streams"), "no booking and no sequence left", seen, 64.0))
}

/// Opens more connections than `limits.connections`, without a request.
pub(super) async fn idle_connections(target: &Target) -> anyhow::Result<Seen> {
    let (count, address) = (3_000, target.clients());
    let refused = [("reason", "too_many")];
    let before = target.metric("pointsman_client_connections_ended_total", &refused).await?;
    let clients = each(count, |_| connect(&address)).await;
    let clients: Vec<TcpStream> = clients.into_iter().collect::<anyhow::Result<_>>()?;
    let ended = stream::iter(clients).map(|mut client| async move { outcome(&mut client, LIMIT).await });
    let outcomes: Vec<String> = ended.buffer_unordered(count).collect().await;
    let refused = target.metric("pointsman_client_connections_ended_total", &refused).await? - before;
    Ok(Seen {
        sent: format!("{count} connections"),
        expected: "500 or more refused, others closed after client_idle",
        seen: format!("{refused} refused; {}", counted(&outcomes)),
        refuses_others: true,
        passed: refused >= 400.0 && outcomes.iter().all(|outcome| outcome != "silent"),
        memory_mb: 100.0,
    })
}
