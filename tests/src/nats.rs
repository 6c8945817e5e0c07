//! The real NATS server, and a proxy in front of it that stops: for tests of gateways that share their load.

use std::{
    net::{SocketAddr, TcpListener as StdListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinSet,
};

/// A running server.
pub struct Nats {
    process: Child,
    /// Its port on 127.0.0.1.
    pub port: u16,
    dir: TempDir,
}

impl Nats {
    /// Starts a server with these lines of configuration. `None`, with a message, when it is not installed.
    ///
    /// # Panics
    /// It does not listen within 10 s.
    #[expect(clippy::print_stderr, reason = "a test says that it was skipped")]
    pub async fn start(config: &str) -> Option<Self> {
        let port = free_port();
        let dir = TempDir::new().ok()?;
        std::fs::write(dir.path().join("nats.conf"), config).ok()?;
        let Some(process) = spawn(dir.path(), port) else {
            eprintln!("skipped: nats-server is not in the PATH (Debian: apt-get install nats-server)");
            return None;
        };
        let server = Self { process, port, dir };
        server.ready().await;
        Some(server)
    }

    /// Ends the server as `kill -9` does.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Starts it again, on the same port.
    ///
    /// # Panics
    /// It does not listen within 10 s.
    pub async fn restart(&mut self) {
        self.kill();
        if let Some(process) = spawn(self.dir.path(), self.port) {
            self.process = process;
        }
        self.ready().await;
    }

    /// URL of the server.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    #[expect(clippy::panic, reason = "helpers of tests may fail as tests do")]
    async fn ready(&self) {
        for _ in 0..500 {
            if TcpStream::connect(("127.0.0.1", self.port)).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("nats-server does not listen");
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(dir: &Path, port: u16) -> Option<Child> {
    let mut command = Command::new("nats-server");
    command.arg("-c").arg(dir.join("nats.conf")).args(["-a", "127.0.0.1", "-p", &port.to_string()]);
    command.arg("-sd").arg(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().ok()
}

fn free_port() -> u16 {
    let socket = StdListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    socket.map_or(0, |address| address.port())
}

/// A proxy that forwards bytes, or stops: it closes nothing and forwards nothing, as a broken network.
pub struct StoppingProxy {
    /// Its address.
    pub address: SocketAddr,
    stopped: watch::Sender<bool>,
    _tasks: JoinSet<()>,
}

impl StoppingProxy {
    /// Starts a proxy in front of a port on 127.0.0.1.
    ///
    /// # Errors
    /// It cannot listen.
    pub async fn start(port: u16) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (stopped, watched) = watch::channel(false);
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, port, watched));
        Ok(Self { address, stopped, _tasks: tasks })
    }

    /// Stops, or goes on.
    pub fn stop(&self, stopped: bool) {
        self.stopped.send_replace(stopped);
    }

    /// URL of a NATS server behind it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }
}

async fn accept(listener: TcpListener, port: u16, stopped: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let stopped = stopped.clone();
        connections.spawn(async move {
            let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
            let ((from, to), (back, forth)) = (client.into_split(), server.into_split());
            tokio::select! {
                () = forward(from, forth, stopped.clone()) => {}
                () = forward(back, to, stopped) => {}
            }
        });
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut stopped: watch::Receiver<bool>) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        if stopped.wait_for(|stopped| !stopped).await.is_err() {
            return;
        }
        let read = tokio::select! {
            read = from.read(&mut buffer) => read,
            // Looks at it again.
            _ = stopped.changed() => continue,
        };
        let Ok(length @ 1..) = read else { return };
        if to.write_all(buffer.get(..length).unwrap_or_default()).await.is_err() {
            return;
        }
    }
}
