//! The routers that are compared, as real processes.

use std::{
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use super::{
    Programs,
    engines::Engines,
    scenario::{Pair, Scenario, Shape},
};
use crate::fleet::{self, Fleet};

/// A kind of router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Router {
    /// None: clients call the engine.
    Direct,
    /// Debian's nginx, one worker.
    Nginx,
    /// Ours, as shipped.
    Pointsman,
    /// The build of Pointsman that `--versus` names.
    Versus,
    /// vLLM's router, in Rust.
    Vllm,
    /// SGLang's router, in Rust.
    Sglang,
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
    /// Ended by SIGTERM: nginx's master ends its worker then, and a kill would leave that one behind.
    Other(Child),
    Gateway(Fleet),
}

impl Router {
    pub(super) const ALL: [Self; 6] =
        [Self::Direct, Self::Nginx, Self::Pointsman, Self::Versus, Self::Vllm, Self::Sglang];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::Pointsman => "pointsman",
            Self::Versus => "versus",
            Self::Vllm => "vllm-router",
            Self::Sglang => "sglang-router",
        }
    }

    pub(super) fn is_rival(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
    }

    /// Whether it runs both legs of a request itself.
    pub(super) fn knows_legs(self) -> bool {
        !matches!(self, Self::Direct | Self::Nginx)
    }

    /// Whether it can be set up for the scenario: rivals know their own engine's handshake, and no paths of workers.
    pub(super) fn can(self, scenario: &Scenario) -> bool {
        if self.is_rival() && scenario.tokens {
            return false;
        }
        match scenario.shape {
            Shape::Single { workers } => !self.is_rival() || workers <= 16,
            Shape::Disaggregated(Pair::Vllm) => self != Self::Sglang,
            Shape::Disaggregated(Pair::Sglang) => self != Self::Vllm,
        }
    }

    pub(super) fn start(
        self,
        scenario: &Scenario,
        engines: &Engines,
        programs: &Programs,
    ) -> anyhow::Result<Running> {
        let dir = tempfile::Builder::new().prefix("pointsman-bench-").tempdir()?;
        let first = *engines.serving.first().context("no engine")?;
        let (address, process) = match self {
            Self::Direct => (first, None),
            Self::Nginx => {
                nginx(dir.path(), &engines.serving).map(|(at, child)| (at, Some(Proxy::Other(child))))?
            }
            Self::Pointsman | Self::Versus => {
                let bin = match (self, &programs.versus) {
                    (Self::Versus, Some(versus)) => versus,
                    _ => &programs.bin,
                };
                let workers = workers(scenario, engines);
                let config = match &programs.tokenizer {
                    Some(folder) if scenario.tokens => format!("[models.tiny]\ntokenizer = {folder:?}\n"),
                    _ => String::new(),
                };
                let fleet = fleet::gateway(bin, dir.path(), Vec::new(), &config, &workers)?;
                (fleet.client().parse()?, Some(Proxy::Gateway(fleet)))
            }
            Self::Vllm | Self::Sglang => {
                let python = programs.rivals.as_ref().context("no rivals")?.join("bin/python");
                let (at, child) = rival(self, &python, dir.path(), scenario, engines)?;
                (at, Some(Proxy::Other(child)))
            }
        };
        let mut running = Running { address, kind: self, idle_mb: 0.0, process, _dir: Some(dir) };
        running.idle_mb = running.rss_mb();
        Ok(running)
    }
}

fn workers(scenario: &Scenario, engines: &Engines) -> Vec<String> {
    let worker =
        |role: &str, engine: &str, at: &SocketAddr| format!("role={role},engine={engine},url=http://{at}");
    match scenario.shape {
        Shape::Single { workers } => (0..workers as usize)
            .zip(engines.serving.iter().cycle())
            .map(|(number, at)| format!("{}/w{number}", worker("aggregated", "vllm", at)))
            .collect(),
        Shape::Disaggregated(pair) => {
            let engine = if pair == Pair::Vllm { "vllm" } else { "sglang" };
            let prefill = engines.prefill.iter().map(|at| worker("prefill", engine, at));
            prefill.chain(engines.serving.iter().map(|at| worker("decode", engine, at))).collect()
        }
    }
}

/// vLLM's or SGLang's router, as their own documentation starts them: round robin, no index.
fn rival(
    kind: Router,
    python: &Path,
    dir: &Path,
    scenario: &Scenario,
    engines: &Engines,
) -> anyhow::Result<(SocketAddr, Child)> {
    let address = free_port()?;
    let (module, pair) = match kind {
        Router::Vllm => ("vllm_router.launch_router", "--vllm-pd-disaggregation"),
        _ => ("sglang_router.launch_router", "--pd-disaggregation"),
    };
    let mut command = Command::new(python);
    command.args(["-m", module, "--host", "127.0.0.1", "--policy", "round_robin", "--log-level", "error"]);
    command.args(["--port", &address.port().to_string()]);
    command.args(["--prometheus-port", &free_port()?.port().to_string()]);
    let url = |at: &SocketAddr| format!("http://{at}");
    if matches!(scenario.shape, Shape::Disaggregated(_)) {
        command.arg(pair);
        for at in &engines.prefill {
            command.args(["--prefill", &url(at)]);
            if kind == Router::Sglang {
                command.arg("8998");
            }
        }
        for at in &engines.serving {
            command.args(["--decode", &url(at)]);
        }
        if kind == Router::Vllm {
            command.args(["--kv-connector", "nixl"]);
        }
    } else {
        command.arg("--worker-urls").args(engines.serving.iter().map(url));
    }
    let log = std::fs::File::create(dir.join("log"))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut child = command.spawn().with_context(|| format!("could not start {}", python.display()))?;
    if let Err(error) = until_it_answers(&mut child, address) {
        let _ = child.kill();
        let said = std::fs::read_to_string(dir.join("log")).unwrap_or_default();
        bail!("{error}; it said: {}", said.chars().take(2_000).collect::<String>());
    }
    Ok((address, child))
}

fn free_port() -> std::io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

fn until_it_answers(child: &mut Child, address: SocketAddr) -> anyhow::Result<()> {
    let started = Instant::now();
    while crate::http::get(&address.to_string(), "/health").is_err() {
        if started.elapsed() > Duration::from_secs(60) || child.try_wait()?.is_some() {
            bail!("it does not serve");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // Its workers are looked at by its own health checks first.
    std::thread::sleep(Duration::from_secs(2));
    Ok(())
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
            Proxy::Other(child) => child.id(),
            Proxy::Gateway(fleet) => fleet.gateway.pid(),
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(Proxy::Other(child)) = &mut self.process {
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            let _ = child.wait();
        }
    }
}

fn nginx(dir: &Path, engines: &[SocketAddr]) -> anyhow::Result<(SocketAddr, Child)> {
    let address = free_port()?;
    let at = dir.display();
    let servers: String = engines.iter().map(|engine| format!("server {engine}; ")).collect();
    let config = format!(
        "daemon off; worker_processes 1; pid {at}/pid; error_log {at}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000;
  client_body_temp_path {at}/b; proxy_temp_path {at}/p; fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; scgi_temp_path {at}/s;
  upstream engine {{ {servers}keepalive 1024; keepalive_requests 1000000; }}
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
