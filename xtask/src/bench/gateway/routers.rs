//! The compared routers, as real processes.

use std::{path::Path, process::Command, time::Duration};

use anyhow::Context as _;

use super::{
    Programs,
    engines::{Engine, Engines},
    scenario::{Handshake, Scenario, Shape},
};
use crate::{
    certificates::Certificates,
    client::Client,
    fleet::{self, End, Process, free_port},
    poll::until_listening,
    proc::{self, CpuTime},
};

mod rivals;

pub(super) use rivals::Rivals;

/// A kind of router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Router {
    /// No router: clients call an engine directly.
    Direct,
    /// Debian's nginx with one worker process.
    Nginx,
    /// This build of Pointsman with default settings.
    Pointsman,
    /// The build of Pointsman that `--versus` names.
    Versus,
    /// vLLM's router, in Rust.
    Vllm,
    /// vLLM's router with its policy `kv_aware`, which asks the engines for tokens.
    VllmKvAware,
    /// SGLang's router, in Rust.
    Sglang,
    /// Shepherd Model Gateway, which continues SGLang's router.
    Smg,
    /// Envoy with one worker thread, which makes no routing decision.
    Envoy,
    /// NVIDIA Dynamo's frontend, in front of its own mockers instead of the simulated engines.
    Dynamo,
}

/// A running router.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) kind: Router,
    /// Client that calls the router.
    pub(super) client: Client,
    /// Client that calls the gateway's admin port.
    pub(super) admin: Option<Client>,
    /// Resident memory before the first request, megabytes.
    pub(super) idle_mb: f64,
    process: Option<Process>,
    /// Engines that belong to it alone.
    _engines: Option<Engines>,
    _dir: tempfile::TempDir,
}

impl Router {
    pub(super) const ALL: [Self; 10] = [
        Self::Direct,
        Self::Nginx,
        Self::Pointsman,
        Self::Versus,
        Self::Vllm,
        Self::VllmKvAware,
        Self::Sglang,
        Self::Smg,
        Self::Envoy,
        Self::Dynamo,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::Pointsman => "pointsman",
            Self::Versus => "versus",
            Self::Vllm => "vllm-router",
            Self::VllmKvAware => "vllm-kv-aware",
            Self::Sglang => "sglang-router",
            Self::Smg => "smg",
            Self::Envoy => "envoy",
            Self::Dynamo => "dynamo+mocker",
        }
    }

    pub(super) fn is_rival(self) -> bool {
        !matches!(self, Self::Direct | Self::Nginx | Self::Pointsman | Self::Versus)
    }

    /// Whether the router prefers the worker that has a prompt's tokens in its cache.
    pub(super) fn follows_tokens(self) -> bool {
        matches!(self, Self::Pointsman | Self::Versus | Self::VllmKvAware | Self::Dynamo)
    }

    /// Whether the router makes the calls of both legs itself.
    pub(super) fn knows_legs(self) -> bool {
        !matches!(self, Self::Direct | Self::Nginx | Self::Envoy)
    }

    /// Whether the router supports the scenario. A rival supports only the handshake of its own engine, and
    /// no workers on paths; smg hands no KV parameters over.
    pub(super) fn can_serve(self, scenario: &Scenario) -> bool {
        if self.is_rival() && scenario.tokens != self.follows_tokens() {
            return false;
        }
        match scenario.shape {
            Shape::Aggregated { workers } => !self.is_rival() || workers <= 16,
            Shape::Disaggregated(Handshake::Vllm) => !matches!(self, Self::Sglang | Self::Smg),
            Shape::Disaggregated(Handshake::Sglang) => !matches!(self, Self::Vllm | Self::Smg),
        }
    }

    /// Starts the router and waits until it serves.
    pub(super) async fn start(
        self,
        scenario: &Scenario,
        engines: &Engines,
        programs: &Programs,
    ) -> anyhow::Result<Running> {
        let dir = tempfile::Builder::new().prefix("pointsman-bench-").tempdir()?;
        let targets = engines.relay_targets();
        let tls = programs.tls.then(|| Certificates::write(dir.path())).transpose()?;
        let tls = tls.as_ref();
        let access = tls.map_or_else(String::new, |tls| format!("[server.tls]\n{}", tls.table()));
        let mut own = None;
        let (address, process) = match self {
            Self::Direct => (targets.first().context("the scenario has no engine")?.address.clone(), None),
            Self::Nginx => some(nginx(dir.path(), targets, tls).await?),
            Self::Pointsman => {
                some(gateway(&programs.bin, dir.path(), (scenario, &access), engines, programs).await?)
            }
            Self::Versus => {
                let bin = programs.versus.as_ref().context("--versus is not set")?;
                some(gateway(bin, dir.path(), (scenario, &access), engines, programs).await?)
            }
            rival => {
                if rival == Self::VllmKvAware {
                    own = Some(Engines::with_tokens(scenario, &programs.bin, dir.path())?);
                }
                some(rivals::start(rival, programs, dir.path(), own.as_ref().unwrap_or(engines)).await?)
            }
        };
        let client = match tls {
            Some(tls) => Client::secure(&address, &tls.authority)?,
            None => Client::new(&address),
        };
        let admin = process.as_ref().and_then(|process| process.announced["admin"].as_str()).map(Client::new);
        let mut running =
            Running { client, admin, kind: self, idle_mb: 0.0, process, _engines: own, _dir: dir };
        running.idle_mb = running.resident_mb();
        Ok(running)
    }
}

impl Running {
    /// Returns the process id; `None` for direct calls.
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    /// Returns the CPU time used so far.
    pub(super) fn cpu_time(&self) -> CpuTime {
        self.process.as_ref().map(|process| CpuTime::of(process.pid())).unwrap_or_default()
    }

    /// Makes the router end normally when it is dropped, instead of killing it.
    pub(super) fn end_on_sigterm(&mut self) {
        self.process.iter_mut().for_each(|process| process.set_end(End::Terminate));
    }

    /// Returns the resident memory, megabytes.
    pub(super) fn resident_mb(&self) -> f64 {
        self.process.as_ref().map_or(0.0, |process| proc::resident_mb(process.pid()))
    }
}

fn some((address, process): (String, Process)) -> (String, Option<Process>) {
    (address, Some(process))
}

async fn gateway(
    bin: &Path,
    dir: &Path,
    (scenario, access): (&Scenario, &str),
    engines: &Engines,
    programs: &Programs,
) -> anyhow::Result<(String, Process)> {
    let mut config = match &programs.tokenizer {
        Some(folder) if scenario.tokens => format!("[models.tiny]\ntokenizer = {folder:?}\n"),
        _ => String::new(),
    };
    config.push_str(access);
    config.push_str(programs.config);
    let fleet = fleet::gateway(bin, dir, &config, &engines.worker_flags(scenario.shape)).await?;
    Ok((fleet.gateway.listening(), fleet.gateway))
}

/// Returns the TLS settings of nginx that equal the gateway's: versions 1.2 and 1.3, and tickets.
fn nginx_tls(tls: &Certificates) -> String {
    format!(
        " ssl_certificate {}; ssl_certificate_key {}; ssl_protocols TLSv1.2 TLSv1.3; ssl_session_tickets on;",
        tls.certificate.display(),
        tls.key.display()
    )
}

/// Returns the path of nginx, if it is installed.
pub(super) fn nginx_program() -> Option<&'static str> {
    ["/usr/sbin/nginx", "/usr/bin/nginx"].into_iter().find(|path| Path::new(path).exists())
}

async fn nginx(
    dir: &Path,
    engines: &[Engine],
    tls: Option<&Certificates>,
) -> anyhow::Result<(String, Process)> {
    let port = free_port()?;
    let address = format!("127.0.0.1:{port}");
    let listen = tls.map_or_else(|| format!("{address};"), |tls| format!("{address} ssl;{}", nginx_tls(tls)));
    let servers: String = engines.iter().map(|engine| format!("server {};", engine.address)).collect();
    let config = include_str!("routers/nginx.conf").replace("DIR", &dir.to_string_lossy());
    let config = config.replace("SERVERS", &servers).replace("LISTEN", &listen);
    let file = dir.join("nginx.conf");
    std::fs::write(&file, config)?;
    let mut command = Command::new(nginx_program().context("nginx is not installed")?);
    command.arg("-c").arg(&file).arg("-p").arg(dir);
    let process = Process::logging("nginx", command, dir, End::Terminate)?;
    let listens = until_listening("nginx", port, Duration::from_secs(5)).await;
    listens.with_context(|| process.last_lines())?;
    Ok((address, process))
}
