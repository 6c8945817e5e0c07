//! A proxy that forwards bytes, or stops: then it closes nothing and forwards nothing, as a broken network.

use std::net::SocketAddr;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinSet,
};

/// A running proxy. Dropping it closes everything.
#[derive(Debug)]
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

    /// Stops the proxy, or lets it continue.
    pub fn stop(&self, stopped: bool) {
        self.stopped.send_replace(stopped);
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
