//! TLS in front of an engine that has none.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
};
use tokio_rustls::TlsAcceptor;

use crate::tls::{Authority, Issued};

/// How long a refused client has to read why.
const LINGER: Duration = Duration::from_secs(1);

/// A running proxy. Dropping it closes everything.
#[derive(Debug)]
pub struct TlsProxy {
    /// Address on which the proxy listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    task: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    config: Mutex<Arc<ServerConfig>>,
    engine: SocketAddr,
    handshakes: AtomicUsize,
    plain: AtomicUsize,
}

impl TlsProxy {
    /// Starts a proxy that shows a certificate, and asks for one of `clients`.
    ///
    /// # Errors
    /// It cannot listen, or the certificate cannot be used.
    pub async fn start(
        engine: SocketAddr,
        certificate: &Issued,
        clients: Option<&Authority>,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            config: Mutex::new(server(certificate, clients)?),
            engine,
            handshakes: AtomicUsize::new(0),
            plain: AtomicUsize::new(0),
        });
        let serving = shared.clone();
        #[allow(clippy::disallowed_methods, reason = "the handle of the proxy ends the task")]
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, serving.clone()));
            }
        });
        Ok(Self { address, shared, task: task.abort_handle() })
    }

    /// Shows another certificate to new connections.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn show(&self, certificate: &Issued, clients: Option<&Authority>) -> anyhow::Result<()> {
        *self.shared.config.lock() = server(certificate, clients)?;
        Ok(())
    }

    /// Number of handshakes that succeeded.
    #[must_use]
    pub fn handshakes(&self) -> usize {
        self.shared.handshakes.load(Ordering::SeqCst)
    }

    /// Number of connections that began without TLS.
    #[must_use]
    pub fn plain(&self) -> usize {
        self.shared.plain.load(Ordering::SeqCst)
    }
}

impl Drop for TlsProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn server(certificate: &Issued, clients: Option<&Authority>) -> anyhow::Result<Arc<ServerConfig>> {
    let provider = Arc::new(ring::default_provider());
    let builder =
        ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
    let builder = match clients {
        Some(clients) => {
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(clients.pem.as_bytes())?)?;
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
            builder.with_client_cert_verifier(verifier)
        }
        None => builder.with_no_client_auth(),
    };
    let key = PrivateKeyDer::from_pem_slice(certificate.key_pem.as_bytes())?;
    Ok(Arc::new(builder.with_single_cert(vec![certificate.certificate.clone()], key)?))
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut first = [0];
    if stream.peek(&mut first).await? == 1 && first != [0x16] {
        shared.plain.fetch_add(1, Ordering::SeqCst);
    }
    let config = shared.config.lock().clone();
    let mut client = match TlsAcceptor::from(config).accept(stream).into_fallible().await {
        Ok(client) => client,
        Err((_, mut stream)) => {
            // Unread bytes would turn the alert into a reset.
            stream.shutdown().await?;
            let _ = tokio::time::timeout(LINGER, stream.read_to_end(&mut Vec::new())).await;
            return Ok(());
        }
    };
    shared.handshakes.fetch_add(1, Ordering::SeqCst);
    let mut engine = TcpStream::connect(shared.engine).await?;
    engine.set_nodelay(true)?;
    tokio::io::copy_bidirectional(&mut client, &mut engine).await.map(drop)
}
