//! A client of HTTP/2 that decides what it reads, and when.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use bytes::Bytes;
use h2::{
    RecvStream, SendStream,
    client::{Builder, SendRequest},
};
use http::{Request, Response, StatusCode};
use rustls::ClientConfig;
use tokio::task::JoinSet;

use crate::tls::connect;

/// Bytes of one answer that the gateway may send before the client takes them.
pub const STREAM_WINDOW: u32 = 65_535;
/// Bytes of all answers.
const CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;

/// A connection.
pub struct Http2Client {
    requests: SendRequest<Bytes>,
    connection: JoinSet<Result<(), h2::Error>>,
}

/// A request whose answer is read piece by piece. Dropping it resets the stream.
pub struct Http2Stream {
    /// The half that sends.
    pub sending: SendStream<Bytes>,
    /// Head of the answer.
    pub head: Response<()>,
    body: RecvStream,
}

impl Http2Client {
    /// Connects to a loopback address.
    ///
    /// # Errors
    /// The handshake failed, or agreed on another protocol.
    pub async fn connect(address: SocketAddr, config: &Arc<ClientConfig>) -> anyhow::Result<Self> {
        let stream = connect(address, config).await?;
        anyhow::ensure!(stream.get_ref().1.alpn_protocol() == Some(b"h2"), "HTTP/2 was not agreed on");
        let mut builder = Builder::new();
        builder.initial_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
        let (requests, connection) = builder.handshake(stream).await?;
        let mut tasks = JoinSet::new();
        tasks.spawn(connection);
        Ok(Self { requests: requests.ready().await?, connection: tasks })
    }

    /// Sends a request, and waits for the head of its answer.
    ///
    /// # Errors
    /// The stream or the connection failed.
    pub async fn send(&mut self, method: &str, path: &str, body: &str) -> anyhow::Result<Http2Stream> {
        let (answer, sending) = self.begin(method, path, body).await?;
        let (head, body) = answer.await?.into_parts();
        Ok(Http2Stream { sending, head: Response::from_parts(head, ()), body })
    }

    /// Sends a request, and waits for nothing.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn begin(
        &mut self,
        method: &str,
        path: &str,
        body: &str,
    ) -> anyhow::Result<(h2::client::ResponseFuture, SendStream<Bytes>)> {
        let (answer, mut sending) = self.open(method, path, body.is_empty()).await?;
        if !body.is_empty() {
            sending.send_data(Bytes::copy_from_slice(body.as_bytes()), true)?;
        }
        Ok((answer, sending))
    }

    /// Sends the head of a request whose body follows, and waits for nothing.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn begin_upload(
        &mut self,
        path: &str,
    ) -> anyhow::Result<(h2::client::ResponseFuture, SendStream<Bytes>)> {
        self.open("POST", path, false).await
    }

    async fn open(
        &mut self,
        method: &str,
        path: &str,
        ends: bool,
    ) -> anyhow::Result<(h2::client::ResponseFuture, SendStream<Bytes>)> {
        let request = Request::builder().method(method).uri(format!("https://127.0.0.1{path}"));
        let request = request.header("content-type", "application/json").body(())?;
        Ok(self.requests.clone().ready().await?.send_request(request, ends)?)
    }

    /// Waits until the gateway has ended the connection. Returns how.
    ///
    /// # Errors
    /// The connection was awaited before.
    pub async fn ended(&mut self) -> anyhow::Result<Result<(), h2::Error>> {
        Ok(self.connection.join_next().await.context("the connection has ended before")??)
    }
}

impl Http2Stream {
    /// Status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.head.status()
    }

    /// Takes the next piece; `None` at the end.
    ///
    /// # Errors
    /// The stream was reset.
    pub async fn next(&mut self) -> Result<Option<Bytes>, h2::Error> {
        let Some(piece) = self.body.data().await.transpose()? else { return Ok(None) };
        self.body.flow_control().release_capacity(piece.len())?;
        Ok(Some(piece))
    }

    /// Takes all that is left.
    ///
    /// # Errors
    /// The stream was reset.
    pub async fn text(&mut self) -> Result<String, h2::Error> {
        let mut all = Vec::new();
        while let Some(piece) = self.next().await? {
            all.extend_from_slice(&piece);
        }
        Ok(String::from_utf8_lossy(&all).into_owned())
    }

    /// Header fields after the body.
    ///
    /// # Errors
    /// The stream was reset.
    pub async fn trailers(&mut self) -> Result<Option<http::HeaderMap>, h2::Error> {
        self.body.trailers().await
    }
}
