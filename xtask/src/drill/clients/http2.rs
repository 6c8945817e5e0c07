//! Clients that speak HTTP/2 and misbehave. They write the frames themselves, because no library sends such
//! frames.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use futures_util::future::join_all;
use rustls::pki_types::ServerName;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{Seen, Target, number, sockets};
use crate::client::{CHAT, trusting};

/// Maximum time for the end of one client.
const LIMIT: Duration = Duration::from_secs(20);
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Types of frames (RFC 9113, section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
/// `SETTINGS_INITIAL_WINDOW_SIZE` 0.
const NO_WINDOW: [u8; 6] = [0, 4, 0, 0, 0, 0];
/// Number of streams that each client of [`closed_windows`] opens.
const STREAMS: u32 = 50;

/// Sends requests and resets each at once.
pub(super) async fn rapid_reset(target: &Target) -> anyhow::Result<Seen> {
    let requests = (0..5_000_u32).flat_map(|count| {
        let stream = count * 2 + 1;
        let cancel = 8_u32.to_be_bytes();
        [frame(HEADERS, END_HEADERS, stream, &post()), frame(RST_STREAM, 0, stream, &cancel)].concat()
    });
    flood(target, 50, "5,000 requests, each reset", "flood", &requests.collect::<Vec<u8>>()).await
}

/// Sends a head that never ends.
pub(super) async fn continuation(target: &Target) -> anyhow::Result<Seen> {
    let mut frames = frame(HEADERS, 0, 1, &post());
    // A literal field without indexing, with a name of one byte and a value of a hundred.
    let field = [&[0x10, 1, b'x', 100][..], &[b'y'; 100]].concat();
    for _ in 0..500 {
        frames.extend(frame(CONTINUATION, 0, 1, &field.repeat(150)));
    }
    flood(target, 50, "8 MB of CONTINUATION", "flood", &frames).await
}

/// Sends settings that the gateway must acknowledge, from clients that do not read.
pub(super) async fn settings(target: &Target) -> anyhow::Result<Seen> {
    let frames = frame(SETTINGS, 0, 0, &NO_WINDOW).repeat(200_000);
    flood(target, 50, "200,000 SETTINGS, answers unread", "write_timeout", &frames).await
}

/// Sends pings that the gateway must answer, from clients that do not read.
pub(super) async fn pings(target: &Target) -> anyhow::Result<Seen> {
    let frames = frame(PING, 0, 0, &[0; 8]).repeat(200_000);
    flood(target, 50, "200,000 pings, answers unread", "write_timeout", &frames).await
}

/// Opens streams of an endless answer whose windows stay closed.
pub(super) async fn closed_windows(target: &Target) -> anyhow::Result<Seen> {
    let count = target.count(20);
    let (metric, slow) = ("pointsman_requests_total", ("code", "client_too_slow"));
    let before = target.metric(metric, &[slow]).await?;
    let body = r#"{"model":"endless","stream":true,"messages":[{"role":"user","content":"x"}]}"#;
    let mut frames = [PREFACE, &frame(SETTINGS, 0, 0, &NO_WINDOW)].concat();
    for stream in (0..STREAMS).map(|count| count * 2 + 1) {
        frames.extend(frame(HEADERS, END_HEADERS, stream, &post()));
        frames.extend(frame(DATA, END_STREAM, stream, body.as_bytes()));
    }
    let clients = join_all((0..count).map(|_| async {
        let mut client = connect(target).await?;
        client.write_all(&frames).await?;
        anyhow::Ok(client)
    }));
    let clients = clients.await.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let all = f64::from(STREAMS) * number(count);
    let ended = target.growth(metric, slow, (before, all), LIMIT).await?;
    drop(clients);
    let seen = (format!("{ended} x client_too_slow"), ended >= all);
    Ok(Seen::new(
        format!("{count} x {STREAMS} streams"),
        "each ended after client_write",
        seen,
        64.0 + all * 0.2,
    ))
}

/// Sends frames over `full` connections and reads nothing, until the gateway ends each for `reason`.
async fn flood(
    target: &Target,
    full: u32,
    what: &str,
    reason: &'static str,
    frames: &[u8],
) -> anyhow::Result<Seen> {
    let count = target.count(full);
    let name = "pointsman_client_connections_ended_total";
    let before = target.metric(name, &[("reason", reason)]).await?;
    let start = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    let clients = join_all((0..count).map(|_| async {
        let mut client = connect(target).await?;
        client.write_all(&start).await?;
        // The gateway ends the connection before everything is sent.
        let _ = timeout(LIMIT, client.write_all(frames)).await;
        anyhow::Ok(client)
    }));
    let connected = clients.await.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let ended = target.growth(name, ("reason", reason), (before, number(count)), LIMIT).await?;
    drop(connected);
    let seen = (format!("{ended} x {reason}"), ended >= number(count));
    Ok(Seen::new(format!("{count} x {what}"), "each connection ended", seen, 64.0))
}

async fn connect(target: &Target) -> anyhow::Result<TlsStream<TcpStream>> {
    let authority = target.address.authority.as_deref().context("the listener has no TLS")?;
    let mut config = trusting(authority)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let socket = sockets::connect(&target.clients()).await?;
    let name = ServerName::try_from("localhost")?;
    let connecting = timeout(LIMIT, connector.connect(name, socket)).await;
    connecting.context("the handshake took too long")?.context("the handshake failed")
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&length[..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns the fields of a POST to the chat endpoint, from HPACK's static table where possible.
fn post() -> Vec<u8> {
    let (method, scheme, path) = (0x83, 0x87, 0x04);
    let length = u8::try_from(CHAT.len()).unwrap_or(u8::MAX);
    [&[method, scheme, path, length], CHAT.as_bytes()].concat()
}
