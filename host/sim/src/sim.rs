//! Starts and stops an engine: binds its sockets and tracks its tasks.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{net::TcpListener, sync::broadcast};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    config::{Role, SimConfig},
    engine::{Engine, Recorded, SimState, kv_events, side},
    faults::Fault,
    http,
    server::{self, Stop},
};

/// Starts engines.
#[derive(Debug)]
pub struct Sim;

/// A running engine. Dropping it stops the engine.
pub struct SimHandle {
    addr: SocketAddr,
    side_addr: Option<SocketAddr>,
    kv_addr: Option<SocketAddr>,
    engine: Arc<Engine>,
    stop: Stop,
    side_stop: CancellationToken,
    tasks: TaskTracker,
}

/// Reason for which an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings are invalid. Lists all problems.
    #[error("invalid settings: {0}")]
    Config(String),
    /// An address cannot be bound.
    #[error(
        "cannot listen on port {} of {}: {error}; give another one with --listen, --bootstrap-port or \
         --kv-events-port (0: any free port)", .addr.port(), .addr.ip()
    )]
    Listen {
        /// Address to listen on.
        addr: SocketAddr,
        /// Error of the operating system.
        error: io::Error,
    },
}

impl Sim {
    /// Binds the sockets and serves.
    ///
    /// # Errors
    /// [`StartError`] if the settings are invalid or an address cannot be bound.
    pub async fn start(config: SimConfig) -> Result<SimHandle, StartError> {
        let problems = config.problems();
        if !problems.is_empty() {
            return Err(StartError::Config(problems.join("; ")));
        }
        let (listener, addr) = listen(config.listen).await?;
        let side_port = config.dialect.side_port(&config);
        let side = match side_port {
            Some(port) => Some(listen(SocketAddr::new(config.listen.ip(), port)).await?),
            None => None,
        };
        let side_addr = side.as_ref().map(|(_, addr)| *addr);
        let kv = match config.kv_events {
            true => Some(listen(SocketAddr::new(config.listen.ip(), config.kv_events_port)).await?),
            false => None,
        };
        let kv_addr = kv.as_ref().map(|(_, addr)| *addr);
        let advertised = (reachable(addr), side_addr.map_or(0, |addr| addr.port()));
        let engine = Arc::new(Engine::new(config, advertised, kv_addr.map(|addr| addr.port())));

        let (tasks, stop, side_stop) = (TaskTracker::new(), Stop::default(), CancellationToken::new());
        tasks.spawn(server::serve(listener, http::router(&engine), tasks.clone(), stop.clone()));
        if let Some((listener, _)) = side {
            tasks.spawn(side::serve(Arc::clone(&engine), listener, tasks.clone(), side_stop.clone()));
        }
        if let Some((listener, _)) = kv {
            let publisher = Arc::clone(&engine);
            let subscribe = move || publisher.kv_events().unwrap_or_else(|| broadcast::channel(1).1);
            tasks.spawn(kv_events::serve(listener, subscribe, tasks.clone(), side_stop.clone()));
        }
        let (runner, runner_stop) = (Arc::clone(&engine), side_stop.clone());
        tasks.spawn(async move { runner.run(runner_stop).await });
        let (sweeper, sweeper_stop) = (Arc::clone(&engine), side_stop.clone());
        tasks.spawn(async move { sweeper.sweep(sweeper_stop).await });
        Ok(SimHandle { addr, side_addr, kv_addr, engine, stop, side_stop, tasks })
    }
}

impl SimHandle {
    /// Returns the address on which the engine listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the base URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Returns the port of the bootstrap server (SGLang prefill) or the side channel (vLLM prefill).
    #[must_use]
    pub fn bootstrap_port(&self) -> Option<u16> {
        self.side_addr.map(|addr| addr.port())
    }

    /// Returns the port of the KV events, if the engine publishes them.
    #[must_use]
    pub fn kv_events_port(&self) -> Option<u16> {
        self.kv_addr.map(|addr| addr.port())
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> SimState {
        self.engine.state()
    }

    /// Returns the active faults.
    #[must_use]
    pub fn faults(&self) -> Vec<Fault> {
        self.engine.faults.list()
    }

    /// Replaces the active faults.
    pub fn set_faults(&self, faults: Vec<Fault>) {
        self.engine.faults.replace(faults);
    }

    /// Switches the role, as `/pd_role_switch` does.
    pub fn switch_role(&self, role: Role) {
        self.engine.set_role(role);
    }

    /// Returns the recorded requests, oldest first, if `record` is set.
    #[must_use]
    pub fn recorded(&self) -> Vec<Recorded> {
        self.engine.recorded()
    }

    /// Stops accepting, waits up to `grace` for requests to end, then cancels the rest.
    pub async fn shutdown(self, grace: Duration) {
        self.stop.gently.cancel();
        self.tasks.close();
        // Keep the side channel open as long as there are requests: a decode engine may still pull its
        // blocks.
        let drained = async {
            while !self.engine.is_idle() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(grace, drained).await.is_err() {
            tracing::warn!("requests cancelled at shutdown");
            self.stop.now.cancel();
        }
        self.side_stop.cancel();
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_err() {
            self.stop.now.cancel();
            self.tasks.wait().await;
        }
    }

    /// Stops the engine as a crash would: resets all connections and closes the ports.
    pub async fn kill(self) {
        self.cut();
        self.tasks.wait().await;
    }

    fn cut(&self) {
        self.stop.now.cancel();
        self.side_stop.cancel();
        self.tasks.close();
    }
}

impl Drop for SimHandle {
    fn drop(&mut self) {
        self.cut();
    }
}

async fn listen(addr: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |error| StartError::Listen { addr, error };
    let listener = TcpListener::bind(addr).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Returns an address to which other engines can connect, even if the engine listens on all addresses.
fn reachable(addr: SocketAddr) -> String {
    match addr {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => "127.0.0.1".to_owned(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => "::1".to_owned(),
        _ => addr.ip().to_string(),
    }
}
