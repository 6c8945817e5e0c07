//! `e2e-image`: runs the image of `package` under podman, as a user without privileges and with a read-only
//! root. It must serve, install a policy that is copied into its directory, and stop within its
//! drain time.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::{
    client::{CHAT, Client},
    fleet::{self, ENGINE, EngineSpec, GATEWAY, POLICY},
    package, sh,
    table::Checks,
};

mod podman;

use podman::{Container, Podman};

/// A component that the tools of an earlier release built.
const FROZEN: &str = "tests/fixtures/guests/selector-0.1.0.wasm";
const CONFIG: &str = r#"
[policies]
dir = "/etc/pointsman/policies.d"
compile_cache = "/var/cache/pointsman"
rescan = "1s"
[policies.slots.aggregated]
grants = ["log", "state"]
[probe]
interval = "200ms"
[timeouts]
drain = "20s"
"#;
/// `timeouts.drain` of the configuration.
const DRAIN: Duration = Duration::from_secs(20);
/// User of the image.
const USER: &str = "65532";
/// Command of the image's health check. OCI images have none, so podman does not know it.
const HEALTH: [&str; 2] = ["/usr/bin/pointsman", "health"];
/// Maximum time of every wait.
const LIMIT: Duration = Duration::from_secs(60);
/// Tokens of the request that is in flight when the gateway is stopped, and the time between two of them.
const TOKENS: u64 = 60;
const ITL_MS: u64 = 50;
const CONFIG_FILE: &str = "/etc/pointsman/pointsman.toml";
const POLICIES_DIR: &str = "/etc/pointsman/policies.d";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Image of `cargo xtask package` [default: a new image of debug builds].
    #[arg(long)]
    image: Option<PathBuf>,
    /// Runtime that podman calls, `crun` or `runc` [default: the first one that works].
    #[arg(long)]
    runtime: Option<String>,
}

/// Returns the reason why the command cannot run on this machine.
pub(crate) fn missing() -> Option<String> {
    // Without root, the user of the container has another number outside of it.
    if !rustix::process::geteuid().is_root() {
        return Some("containers with a user of their own need root".to_owned());
    }
    let found = sh::succeeds(Command::new("podman").arg("--version"));
    (!found).then(|| "podman is not installed: apt install podman".to_owned())
}

/// Prints a table. Returns an error when a check fails.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(reason) = missing() {
        sh::print(&format!("skipped: {reason}"));
        return Ok(());
    }
    let dir = tempfile::Builder::new().prefix("pointsman-image-").tempdir()?;
    let mut checks = Checks::default();
    let programs = if args.image.is_some() { vec![ENGINE] } else { vec![GATEWAY, POLICY, ENGINE] };
    let bin = fleet::build_programs("dev", &programs)?;
    let image = match &args.image {
        Some(image) => image.clone(),
        None => {
            let programs = package::strip(&package::IMAGE_PROGRAMS, &bin, dir.path())?;
            package::write_twice(package::write_image, &programs, dir.path(), &mut checks)?
        }
    };
    checks.show("size of the image", format!("{} KiB", fs::metadata(&image)?.len() / 1024));
    let podman = Podman::load(&image, args.runtime.as_deref(), dir.path())?;
    checks.show("runtime", &podman.runtime);
    as_it_is(&podman, dir.path(), &mut checks).await?;
    serves(&podman, &bin, dir.path(), &mut checks).await?;
    checks.finish()
}

/// Runs the image's own command without a network, and its health check.
async fn as_it_is(podman: &Podman, dir: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let run = podman.run("as-it-is", &["--network", "none"]);
    let mut container = podman.start("as-it-is", run, dir)?;
    let started = Instant::now();
    while !container.exec(&HEALTH) && started.elapsed() < LIMIT {
        sleep(Duration::from_millis(200)).await;
    }
    let took = started.elapsed();
    checks.check("seconds to a good health check", format!("{:.1}", took.as_secs_f64()), took < LIMIT);
    let process = container.process()?;
    checks.check("user of the process", &process.user, process.user == USER);
    checks.check("its capabilities", &process.capabilities, process.capabilities == "0000000000000000");
    checks.check("its root is read-only", "", process.has_read_only_root);
    stop(&mut container, checks).await
}

/// Serves requests with an engine on the host, installs a policy, and stops while a request is in flight.
async fn serves(podman: &Podman, bin: &Path, dir: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let engine = EngineSpec::new("vllm", "aggregated", &format!("--itl-ms {ITL_MS}")).start(bin, dir, 1)?;
    let address = engine.listening();
    let port = address.rsplit(':').next().context("the engine announced no port")?;
    let [policies, config, hosts] = ["policies", "pointsman.toml", "hosts"].map(|name| dir.join(name));
    fs::create_dir(&policies)?;
    fs::write(&config, CONFIG)?;
    // The image's libc resolves this name.
    fs::write(&hosts, "127.0.0.1 localhost engine.internal\n")?;
    let worker = |scheme| format!("role=aggregated,engine=vllm,url={scheme}://engine.internal:{port}");
    // The connection to the second worker fails, but only after the root certificates were read.
    let workers = ["--worker", &worker("http"), "--worker", &worker("https")];
    let listen = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    let mounts = [(&*policies, POLICIES_DIR), (&*config, CONFIG_FILE), (&*hosts, "/etc/hosts")];
    let mounts = mounts.map(|(from, to)| format!("--volume={}:{to}:ro", from.display()));
    let mut run =
        podman.run("serves", &[&["--network=host"], &mounts.each_ref().map(String::as_str)[..]].concat());
    run.args(["serve", "--config", CONFIG_FILE]).args(workers).args(listen);
    let mut container = podman.start("serves", run, dir)?;
    let (client, admin) = (container.client("listening"), container.client("admin"));
    until(|| async { client.post(CHAT, body(1, false)).await.is_ok() }).await;
    let answer = client.post(CHAT, body(4, false)).await;
    checks.check("a request is answered", "", answer.is_ok_and(|text| text.contains("\"choices\"")));
    let is_plain = |reasons: &str| reasons.contains("does not speak TLS");
    until(|| async { reasons(&admin).await.is_ok_and(|reasons| is_plain(&reasons)) }).await;
    let reasons = reasons(&admin).await?;
    let found = is_plain(&reasons);
    checks.check("root certificates are found", if found { "" } else { &reasons }, found);
    let inspect = ["/usr/bin/pointsman", "policy", "inspect", &format!("{POLICIES_DIR}/aggregated.wasm")];
    fs::copy(sh::root().join(FROZEN), policies.join(".staged"))?;
    fs::rename(policies.join(".staged"), policies.join("aggregated.wasm"))?;
    until(|| async { policy(&admin).await.is_ok_and(|name| name == "frozen") }).await;
    let name = policy(&admin).await?;
    checks.check("a policy that was built elsewhere serves", &name, name == "frozen");
    checks.check("pointsman-policy reads it", "", container.exec(&inspect));
    drains(&mut container, &client, checks).await
}

/// Stops the gateway while a request is in flight.
async fn drains(container: &mut Container<'_>, client: &Client, checks: &mut Checks) -> anyhow::Result<()> {
    let stream = async {
        let streamed = client.stream_chat(&[], body(TOKENS, true)).await;
        (streamed, Instant::now())
    };
    let stop = async {
        sleep(Duration::from_millis(ITL_MS * TOKENS / 3)).await;
        let signalled = Instant::now();
        stop(container, checks).await?;
        anyhow::Ok(signalled)
    };
    let ((streamed, ended), signalled) = tokio::join!(stream, stop);
    checks.check("a request was in flight", "", ended > signalled?);
    checks.check("it ended whole", streamed.problem.unwrap_or_default(), streamed.complete);
    Ok(())
}

/// Stops a container, and checks that it ends well within its drain time.
async fn stop(container: &mut Container<'_>, checks: &mut Checks) -> anyhow::Result<()> {
    let started = Instant::now();
    let status = container.stop(LIMIT.as_secs()).await?;
    let took = started.elapsed();
    checks.check("after the image's stop signal", status, status.success());
    checks.check("seconds until it stopped", format!("{:.1}", took.as_secs_f64()), took < DRAIN);
    Ok(())
}

/// Returns the name of the policy that decides.
async fn policy(admin: &Client) -> anyhow::Result<String> {
    let policies = admin.json("/policies").await?;
    let slots = policies["slots"].as_array().context("/policies lists no slots")?;
    let slot = slots.iter().find(|slot| slot["slot"] == "aggregated");
    let slot = slot.context("/policies lists no slot `aggregated`")?;
    Ok(slot["policy"].as_str().unwrap_or_default().to_owned())
}

/// Returns the reasons for which workers get no requests.
async fn reasons(admin: &Client) -> anyhow::Result<String> {
    let workers = admin.json("/workers").await?;
    let workers = workers["workers"].as_array().context("/workers lists no workers")?;
    let reasons: Vec<&str> = workers.iter().filter_map(|worker| worker["reason"].as_str()).collect();
    Ok(reasons.join("; "))
}

fn body(tokens: u64, stream: bool) -> String {
    let messages = json!([{ "role": "user", "content": "Hello" }]);
    json!({ "model": "tiny", "max_tokens": tokens, "stream": stream, "messages": messages }).to_string()
}

/// Waits until a condition holds or a time limit ends. The checks that follow report whether it holds.
async fn until<F: Future<Output = bool>>(holds: impl Fn() -> F) {
    let started = Instant::now();
    while !holds().await && started.elapsed() < LIMIT {
        sleep(Duration::from_millis(100)).await;
    }
}
