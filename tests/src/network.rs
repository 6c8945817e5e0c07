//! Networks that break as real ones do: hosts in network namespaces of their own, and a firewall that drops
//! packets between them and the gateway. Neither side learns that a packet was dropped.
//!
//! ```text
//! namespace of the test: gateway, clients      namespace of a host: an engine, or a server
//!              v1  10.77.1.1 ----------------- 10.77.1.2  e0   <- nftables drops here
//!              v2  10.77.2.1 ----------------- 10.77.2.2  e0
//! ```

use std::{
    env, fs,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use pointsman_sim::{Dialect, Role, Sim, SimConfig};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::own_process::run_alone;

/// Set in the process that runs one test in a namespace of its own.
const INSIDE: &str = "POINTSMAN_TEST_NETWORK";
/// Describes the engine that [`serve_engine`] runs.
const ENGINE: &str = "POINTSMAN_TEST_ENGINE";
/// Port of each engine.
const ENGINE_PORT: u16 = 8_000;

/// Goes on in a process that has a network of its own. Elsewhere runs the test that has this line in such a
/// process and returns from it.
#[macro_export]
macro_rules! own_network {
    () => {{
        fn here() {}
        if !$crate::network::is_own(std::any::type_name_of_val(&here)) {
            return;
        }
    }};
}

/// Returns true in a process that has a network of its own. Elsewhere runs the test around `place`, the
/// path of a function in it, in such a process and returns false. Says so when it cannot.
///
/// # Panics
/// When the test fails there.
#[must_use]
#[expect(clippy::panic, clippy::print_stderr, reason = "a part of a test")]
pub fn is_own(place: &str) -> bool {
    if env::var_os(INSIDE).is_some() {
        let forward = || fs::write("/proc/sys/net/ipv4/ip_forward", "1").map_err(anyhow::Error::from);
        if let Err(error) = run("ip", &["link", "set", "lo", "up"]).and_then(|()| forward()) {
            panic!("cannot set up the network: {error:#}");
        }
        return true;
    }
    for (program, arguments) in
        [("unshare", &["--net", "true"][..]), ("nsenter", &["--version"]), ("ip", &["-V"]), ("nft", &["-v"])]
    {
        if let Err(error) = run(program, arguments) {
            eprintln!("skipped: needs root, util-linux, iproute2 and nftables: {error:#}");
            return false;
        }
    }
    let inside = |program| {
        let mut command = Command::new("unshare");
        command.arg("--net").arg(program);
        command
    };
    eprint!("{}", run_alone(place, INSIDE, inside));
    false
}

/// Runs the engine of a [`Host`], if this process is one, until the test has ended.
///
/// # Errors
/// It cannot listen.
pub fn serve_engine() -> anyhow::Result<()> {
    let Ok(text) = env::var(ENGINE) else { return Ok(()) };
    let engine: Value = serde_json::from_str(&text)?;
    let of = |key: &str| engine.get(key).unwrap_or(&Value::Null);
    let role = match of("role").as_str() {
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        _ => Role::Aggregated,
    };
    let itl = Duration::from_millis(of("itl_ms").as_u64().unwrap_or_default());
    let listen: SocketAddr = of("listen").as_str().context("no address")?.parse()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let config = SimConfig { itl, listen, ..SimConfig::instant(Dialect::Vllm, role) };
        let _engine = Sim::start(config).await?;
        // The pipe ends with the test, however that ends.
        let mut end = String::new();
        tokio::task::spawn_blocking(move || std::io::stdin().read_line(&mut end)).await??;
        Ok(())
    })
}

/// Place of a server: an address, and the namespace that has it.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Address on which the server listens.
    pub address: Ipv4Addr,
    namespace: Option<u32>,
}

impl Place {
    /// The loopback address of this process.
    pub const HERE: Self = Self { address: Ipv4Addr::LOCALHOST, namespace: None };

    /// Returns a command that runs there.
    #[must_use]
    pub fn command(self, program: &str) -> Command {
        let Some(process) = self.namespace else { return Command::new(program) };
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &process.to_string(), program]);
        command
    }
}

/// A host that the test reaches over a network. Dropping it ends its namespace and its engines.
pub struct Host {
    namespace: Child,
    /// The end of its link in the namespace of the test.
    link: String,
    /// The host's place.
    pub place: Place,
    engines: Vec<Child>,
}

impl Host {
    /// Connects a host. Its address is 10.77.NUMBER.2.
    ///
    /// # Errors
    /// This process may not create namespaces or links.
    pub fn new(number: u8) -> anyhow::Result<Self> {
        let namespace = Command::new("unshare").args(["--net", "sleep", "600"]).spawn()?;
        let (address, process) = (Ipv4Addr::new(10, 77, number, 2), namespace.id());
        let place = Place { address, namespace: Some(process) };
        let host = Self { namespace, link: format!("v{number}"), place, engines: Vec::new() };
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/net"));
        let (own, begun) = (of("self")?, Instant::now());
        while of(&process.to_string()).map_or(true, |other| other == own) {
            ensure!(begun.elapsed() < Duration::from_secs(5), "the namespace was not created");
            std::thread::sleep(Duration::from_millis(2));
        }
        let (link, gateway) = (&*host.link, format!("10.77.{number}.1"));
        let pid = process.to_string();
        run("ip", &["link", "add", link, "type", "veth", "peer", "name", "e0", "netns", &pid])?;
        run("ip", &["addr", "add", &format!("{gateway}/24"), "dev", link])?;
        run("ip", &["link", "set", link, "up"])?;
        host.run("ip", &["addr", "add", &format!("{address}/24"), "dev", "e0"])?;
        host.run("ip", &["link", "set", "e0", "up"])?;
        host.run("ip", &["link", "set", "lo", "up"])?;
        // Engines reach each other through the gateway's host.
        host.run("ip", &["route", "add", "default", "via", &gateway])?;
        Ok(host)
    }

    /// Starts an engine, and returns its `--worker` flag.
    ///
    /// # Errors
    /// It does not listen within 20 s.
    pub fn engine(&mut self, role: &str, itl_ms: u64) -> anyhow::Result<String> {
        let listen = SocketAddr::from((self.place.address, ENGINE_PORT));
        let engine = json!({ "role": role, "itl_ms": itl_ms, "listen": listen });
        let program = env::current_exe()?;
        let mut command = self.place.command(program.to_str().context("the path of this program")?);
        command.args(["networks::an_engine", "--exact", "--nocapture"]).env(ENGINE, engine.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        self.engines.push(command.spawn()?);
        let begun = Instant::now();
        while TcpStream::connect_timeout(&listen, Duration::from_millis(500)).is_err() {
            ensure!(begun.elapsed() < Duration::from_secs(20), "the engine does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(format!("role={role},engine=vllm,url=http://{listen}"))
    }

    /// Drops every packet from and to the host.
    ///
    /// # Errors
    /// `nft` refuses the rules.
    pub fn cut(&self) -> anyhow::Result<()> {
        self.filter("drop")
    }

    /// Drops every packet from and to another host.
    ///
    /// # Errors
    /// `nft` refuses the rules.
    pub fn cut_from(&self, other: &Self) -> anyhow::Result<()> {
        let other = other.place.address;
        self.filter(&format!("ip saddr {other} drop; ip daddr {other} drop"))
    }

    /// Drops one packet in a hundred for each percent, in both directions.
    ///
    /// # Errors
    /// `nft` refuses the rules.
    pub fn lose(&self, percent: u8) -> anyhow::Result<()> {
        self.filter(&format!("numgen random mod 100 < {percent} drop"))
    }

    /// Delays packets, some more than others, so that they overtake each other. Returns false, with a
    /// message, when the kernel cannot.
    #[expect(clippy::print_stderr, reason = "a test says what it left out")]
    pub fn delay(&self) -> bool {
        let delay = ["delay", "20ms", "8ms", "reorder", "25%"];
        let delayed = self.run("tc", &[&["qdisc", "add", "dev", "e0", "root", "netem"][..], &delay].concat());
        if let Err(error) = &delayed {
            eprintln!("skipped: a network that delays and reorders packets needs netem: {error:#}");
        }
        delayed.is_ok()
    }

    /// Lets every packet pass.
    ///
    /// # Errors
    /// `nft` refuses to.
    pub fn heal(&self) -> anyhow::Result<()> {
        self.rules("delete table inet broken\n")
    }

    fn filter(&self, rule: &str) -> anyhow::Result<()> {
        self.rules(&format!(
            "table inet broken {{\n\
             chain in {{ type filter hook input priority 0; iifname \"e0\" {rule}; }}\n\
             chain through {{ type filter hook output priority 0; oifname \"e0\" {rule}; }}\n}}\n"
        ))
    }

    fn rules(&self, rules: &str) -> anyhow::Result<()> {
        let mut command = self.place.command("nft");
        let mut nft = command.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        nft.stdin.take().context("no input")?.write_all(rules.as_bytes())?;
        let output = nft.wait_with_output()?;
        ensure!(output.status.success(), "nft: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    fn run(&self, program: &str, arguments: &[&str]) -> anyhow::Result<()> {
        finish(program, self.place.command(program).args(arguments))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The kernel removes it with the namespace, but later.
        let _ = run("ip", &["link", "del", &self.link]);
        for process in self.engines.iter_mut().chain([&mut self.namespace]) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    finish(program, Command::new(program).args(arguments))
}

fn finish(program: &str, command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| program.to_owned())?;
    if !output.status.success() {
        bail!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(())
}
