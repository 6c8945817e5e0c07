//! Protocol of service managers such as systemd: they pass listening sockets, which outlive a restart, and
//! the daemon reports that it is ready, alive or stopping.

use std::{
    ffi::OsStr,
    io,
    net::TcpListener,
    os::unix::net::UnixDatagram,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::Context as _;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Names of the sockets (`FileDescriptorName=` of a socket unit).
const NAMES: [&str; 2] = ["clients", "admin"];
/// How often a data thread shows that it runs.
const BEAT: Duration = Duration::from_secs(1);

/// Listening sockets that the service manager opened. They take the place of the configured addresses.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    pub(super) clients: Option<TcpListener>,
    pub(super) admin: Option<TcpListener>,
}

/// When each data thread last showed that it runs.
#[derive(Clone, Debug)]
pub(super) struct Heartbeats {
    begun: Instant,
    /// Milliseconds since `begun`.
    beats: Arc<[AtomicU64]>,
}

impl InheritedSockets {
    /// Takes the sockets that were passed to this process (`LISTEN_FDS`).
    ///
    /// # Errors
    /// A socket has another name, or does not listen for TCP connections.
    pub(crate) fn of_process() -> anyhow::Result<Self> {
        let mut passed = listenfd::ListenFd::from_env();
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut sockets = Self::default();
        for index in 0..passed.len() {
            let name = names.next().unwrap_or_default();
            let socket = passed.take_tcp_listener(index).with_context(|| {
                format!("the service manager passed `{name}`, which does not listen for TCP connections")
            })?;
            let place = match name {
                "clients" => &mut sockets.clients,
                "admin" => &mut sockets.admin,
                _ => anyhow::bail!(
                    "the service manager passed a socket named `{name}`: expected FileDescriptorName={}",
                    NAMES.join(" or ")
                ),
            };
            let Some(socket) = socket else { continue };
            socket.set_nonblocking(true)?;
            // The processes that compile policies must not keep the socket open.
            rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
            anyhow::ensure!(place.is_none(), "the service manager passed two sockets named `{name}`");
            *place = Some(socket);
        }
        Ok(sockets)
    }
}

impl Heartbeats {
    pub(super) fn new(threads: usize) -> Self {
        Self { begun: Instant::now(), beats: (0..threads).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Shows the watchdog that a thread runs, until the future is dropped.
    pub(super) async fn report_alive(self, thread: usize) {
        loop {
            if let Some(beat) = self.beats.get(thread) {
                beat.store(self.now(), Ordering::Relaxed);
            }
            tokio::time::sleep(BEAT).await;
        }
    }

    /// Reports to the service manager's watchdog while all threads run. Returns at once without a watchdog.
    pub(super) async fn report(self, stop: CancellationToken) {
        let Some(limit) = watchdog_limit() else { return };
        let mut stuck = false;
        loop {
            tokio::select! {
                () = tokio::time::sleep(limit / 3) => {}
                () = stop.cancelled() => return,
            }
            if self.all_within((limit / 2).max(BEAT * 3)) {
                stuck = false;
                notify("WATCHDOG=1\n");
            } else if !stuck {
                stuck = true;
                tracing::error!("a data thread does not run; the watchdog gets no report");
            }
        }
    }

    fn all_within(&self, limit: Duration) -> bool {
        let oldest = self.now().saturating_sub(limit.as_millis() as u64);
        self.beats.iter().all(|beat| beat.load(Ordering::Relaxed) >= oldest)
    }

    fn now(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64
    }
}

/// Returns the time within which the watchdog wants a report. Without `WATCHDOG_PID` it watches this process.
fn watchdog_limit() -> Option<Duration> {
    let is_watched =
        std::env::var_os("WATCHDOG_PID").is_none_or(|pid| pid == *std::process::id().to_string());
    let limit_us: u64 = std::env::var("WATCHDOG_USEC").ok()?.parse().ok()?;
    (is_watched && limit_us > 0).then(|| Duration::from_micros(limit_us))
}

/// Tells the service manager that requests are served.
pub(crate) fn ready() {
    notify("READY=1\n");
}

/// Tells the service manager that the daemon drains.
pub(crate) fn stopping() {
    notify("STOPPING=1\n");
}

/// Tells the service manager that the end takes up to `limit` from now on, where its own limit is shorter.
pub(crate) fn ends_within(limit: Duration) {
    notify(&format!("EXTEND_TIMEOUT_USEC={}\n", limit.as_micros()));
}

/// Does nothing without a service manager.
fn notify(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(%error, ?socket, state, "the service manager was not notified");
    }
}

/// Sends a message to a socket: a path, or a name without a file, which begins with `@`.
fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let sender = UnixDatagram::unbound()?;
    #[cfg(target_os = "linux")]
    if let Some(name) = socket.as_encoded_bytes().strip_prefix(b"@") {
        use std::os::{linux::net::SocketAddrExt as _, unix::net::SocketAddr};

        sender.send_to_addr(state.as_bytes(), &SocketAddr::from_abstract_name(name)?)?;
        return Ok(());
    }
    sender.send_to(state.as_bytes(), socket)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_thread_that_stands_still_is_noticed() {
        let beats = Heartbeats::new(2);
        let first = beats.clone().report_alive(0);
        tokio::pin!(first);
        tokio::select! {
            () = first.as_mut() => {}
            () = beats.clone().report_alive(1) => {}
            () = tokio::time::sleep(Duration::from_secs(30)) => {}
        }
        assert!(beats.all_within(Duration::from_secs(2)));
        tokio::select! {
            () = first => {}
            () = tokio::time::sleep(Duration::from_secs(10)) => {}
        }
        assert!(!beats.all_within(Duration::from_secs(5)));
    }
}
