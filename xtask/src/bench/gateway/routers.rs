//! The routers that are compared, as real processes.

use std::{
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use super::scenario::{Scenario, Shape};
use crate::{
    engine::Engine,
    fleet::{self, Fleet},
};

/// A kind of router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Router {
    /// None: clients call the engine.
    Direct,
    /// Debian's nginx, one worker.
    Nginx,
    /// Ours, as shipped.
    Pointsman,
}

/// A running one.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) address: SocketAddr,
    pub(super) kind: Router,
    /// RSS before the first request, megabytes.
    pub(super) idle_mb: f64,
    process: Option<Proxy>,
    _dir: Option<tempfile::TempDir>,
}

#[derive(Debug)]
enum Proxy {
    Nginx(Child),
    Gateway(Fleet),
}

impl Router {
    pub(super) const ALL: [Self; 3] = [Self::Direct, Self::Nginx, Self::Pointsman];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::Pointsman => "pointsman",
        }
    }

    pub(super) fn start(self, scenario: &Scenario, engine: &Engine, bin: &Path) -> anyhow::Result<Running> {
        let dir = tempfile::Builder::new().prefix("pointsman-bench-").tempdir()?;
        let (address, process) = match self {
            Self::Direct => (engine.address, None),
            Self::Nginx => {
                nginx(dir.path(), engine.address).map(|(at, child)| (at, Some(Proxy::Nginx(child))))?
            }
            Self::Pointsman => {
                let fleet =
                    fleet::gateway(bin, dir.path(), Vec::new(), "", &workers(scenario, engine.address))?;
                (fleet.client().parse()?, Some(Proxy::Gateway(fleet)))
            }
        };
        let mut running = Running { address, kind: self, idle_mb: 0.0, process, _dir: Some(dir) };
        running.idle_mb = running.rss_mb();
        Ok(running)
    }
}

fn workers(scenario: &Scenario, engine: SocketAddr) -> Vec<String> {
    let worker = |role: &str, place: String| format!("role={role},engine=vllm,url=http://{engine}{place}");
    match scenario.shape {
        Shape::Single { workers } => (0..workers).map(|n| worker("aggregated", format!("/w{n}"))).collect(),
        Shape::Disaggregated => vec![
            worker("prefill", "/p0".to_owned()),
            worker("prefill", "/p1".to_owned()),
            worker("decode", "/d0".to_owned()),
            worker("decode", "/d1".to_owned()),
        ],
    }
}

impl Running {
    /// CPU time so far, nanoseconds.
    pub(super) fn cpu(&self) -> u64 {
        self.pid().map_or(0, super::cpu::nanos)
    }

    pub(super) fn rss_mb(&self) -> f64 {
        self.pid().map_or(0.0, super::cpu::rss_mb)
    }

    fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| match process {
            Proxy::Nginx(child) => child.id(),
            Proxy::Gateway(fleet) => fleet.gateway.pid(),
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Its master ends the worker on SIGTERM; a kill would leave that one behind.
        if let Some(Proxy::Nginx(child)) = &mut self.process {
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            let _ = child.wait();
        }
    }
}

fn nginx(dir: &Path, engine: SocketAddr) -> anyhow::Result<(SocketAddr, Child)> {
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let at = dir.display();
    let config = format!(
        "daemon off; worker_processes 1; pid {at}/pid; error_log {at}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000;
  client_body_temp_path {at}/b; proxy_temp_path {at}/p; fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; scgi_temp_path {at}/s;
  upstream engine {{ server {engine}; keepalive 1024; keepalive_requests 1000000; }}
  server {{ listen {address}; location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_buffering off; }} }}
}}
"
    );
    let file = dir.join("nginx.conf");
    std::fs::write(&file, config)?;
    let program = ["/usr/sbin/nginx", "/usr/bin/nginx"].into_iter().find(|path| Path::new(path).exists());
    let program = program.context("nginx is not installed: apt-get install nginx-light")?;
    let mut child = Command::new(program)
        .arg("-c")
        .arg(&file)
        .args(["-p", &at.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("could not start nginx")?;
    let started = Instant::now();
    while std::net::TcpStream::connect(address).is_err() {
        if started.elapsed() > Duration::from_secs(5) || child.try_wait()?.is_some() {
            bail!("nginx does not listen");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok((address, child))
}
