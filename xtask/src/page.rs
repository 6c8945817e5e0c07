//! `page`: tests the admin page in Chromium with real processes: live decisions, policies swapped and
//! refused, text that tries to inject markup, three widths, the keyboard, and 1,000 workers. Writes
//! `docs/page.png` and `docs/page-compare.png`.

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use pointsman_guest_build::GuestBuild;
use serde_json::json;

use crate::{
    client::Client,
    fleet::{self, EngineSpec, Fleet},
    load, sh,
};

/// Browsers in which the page is tested; the first one that exists is used.
const BROWSERS: [&str; 4] =
    ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome", "/opt/google/chrome/chrome"];
/// Maximum size of the picture, bytes.
const PICTURE: u64 = 200 * 1024;
const TOKEN: &str = "page-test";
const CLIENTS: u32 = 4;

/// Policies that are installed while the page is open.
struct Guests {
    swapped: Vec<u8>,
    canary: Vec<u8>,
    hostile: Vec<u8>,
}

/// Tests the page. Returns an error when it does not show what it should.
pub(crate) async fn run() -> anyhow::Result<()> {
    let browser = requirements()?;
    let bin = fleet::build("release")?;
    let build = |name| GuestBuild::new(&sh::root(), name).build();
    let guests = Guests {
        swapped: build("policy-weighted-random")?,
        canary: build("policy-least-loaded")?,
        hostile: build("guest-hostile")?,
    };
    let tools = tools()?;
    let dir = tempfile::Builder::new().prefix("pointsman-page-").tempdir()?;
    let fleet = start(&bin, dir.path()).await?;
    let mut drive = Command::new("node");
    drive
        .arg(sh::root().join("xtask/src/page/drive.mjs"))
        .arg(format!("http://{}/", fleet.admin_address()))
        .args([&browser, dir.path(), Path::new(TOKEN)])
        .current_dir(&tools)
        .stdout(Stdio::piped());
    let mut child = drive.spawn().context("could not start node")?;
    let out = BufReader::new(child.stdout.take().context("node has no stdout")?);
    let played = play(fleet, &guests, out.lines());
    let status = child.wait()?;
    if let Some(folder) = std::env::var_os("PAGE_PICTURES") {
        copy_pictures(dir.path(), Path::new(&folder))?;
    }
    ensure!(played? && status.success(), "the page does not show what it should; see the lines above");
    keep_picture(&dir.path().join("page.png"), "docs/page.png")?;
    keep_picture(&dir.path().join("compare.png"), "docs/page-compare.png")
}

/// Finds a browser; returns an error that names what is missing.
fn requirements() -> anyhow::Result<PathBuf> {
    let chosen = std::env::var_os("CHROMIUM").map(PathBuf::from);
    let found = chosen.or_else(|| BROWSERS.iter().map(PathBuf::from).find(|path| path.exists()));
    let npm = sh::succeeds(Command::new("npm").arg("--version"));
    match found {
        Some(browser) if npm => Ok(browser),
        Some(_) => bail!("node and npm are not installed"),
        None => bail!("Chromium is not installed: set CHROMIUM=PATH, or apt-get install chromium"),
    }
}

/// Performs the actions that the driver requests on its standard output. Returns whether the driver ended
/// normally.
fn play(
    fleet: Fleet,
    guests: &Guests,
    lines: impl Iterator<Item = std::io::Result<String>>,
) -> anyhow::Result<bool> {
    let (mut fleet, mut clients, mut done) = (Some(fleet), Vec::new(), false);
    for line in lines {
        let line = line?;
        sh::status(&format!("page: {line}"));
        match (line.as_str(), &fleet) {
            ("requests", Some(fleet)) => clients.push(start_clients(&fleet.client)),
            ("swap", Some(fleet)) => fleet.drop_policy("prefill.wasm", &guests.swapped)?,
            ("trials", Some(fleet)) => {
                fleet.drop_policy("prefill.canary.wasm", &guests.canary)?;
                fleet.drop_policy("prefill.shadow.wasm", &guests.canary)?;
            }
            ("garbage", Some(fleet)) => fleet.drop_policy("prefill.wasm", b"this is not a policy")?,
            ("markup", Some(fleet)) => {
                fleet.drop_policy("decode.wasm", &guests.hostile)?;
                fleet.drop_policy("<img src=x>.wasm", b"")?;
            }
            ("end", _) => {
                clients.clear();
                drop(fleet.take());
            }
            ("done", _) => done = true,
            _ => {}
        }
    }
    Ok(done)
}

async fn start(bin: &Path, dir: &Path) -> anyhow::Result<Fleet> {
    let plan =
        [("prefill", 1), ("prefill", 4), ("prefill", 1), ("decode", 1), ("decode", 4), ("aggregated", 1)];
    let engines = plan.map(|(role, ranks)| {
        let model = "--blocks 1200 --itl-ms 15 --overhead-ms 25 --prefill-ms-per-token 0.1";
        let flags = format!("--dp-size {ranks} {model}");
        EngineSpec::new("vllm", role, &flags).worker(&format!("dp_size={ranks}"))
    });
    let config = format!(
        "[server]\nadmin_token = \"{TOKEN}\"\n[policies]\nrescan = \"1s\"\n\
         [policies.slots.prefill]\ncanary = {{ share = 0.2 }}\n\
         [policies.slots.decode.settings]\nmode = \"markup\"\n\
         [probe]\ninterval = \"200ms\"\nload_interval = \"500ms\"\n"
    );
    fleet::start(bin, dir, &engines, &config).await
}

/// Starts clients that send requests until they are dropped. Some prompts share their beginning.
fn start_clients(client: &Client) -> load::Running {
    let client = client.clone();
    load::start(load::Arrivals::Clients(CLIENTS), u64::MAX, move |turn| {
        let (client, turn) = (client.clone(), turn.number);
        async move {
            let prompt = format!("system prompt {} ", turn % 7)
                .repeat(40 + usize::try_from(turn % 5).unwrap_or(0) * 30);
            let body = json!({
                "model": "tiny", "stream": true, "max_tokens": 12, "ignore_eos": true,
                "stream_options": { "include_usage": true },
                "messages": [{ "role": "user", "content": prompt }],
            });
            let id = format!("<script>alert(2)</script>{turn}");
            let headers = [("x-request-id", id.as_str()), ("x-pointsman-decision", "1")];
            let _ = client.stream_chat(&headers, body.to_string()).await;
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
    })
}

/// Returns the directory of the browser's driver, which is installed if it is missing.
fn tools() -> anyhow::Result<PathBuf> {
    let tools = fleet::target_dir().join("page");
    if !tools.join("node_modules/playwright-core").exists() {
        std::fs::create_dir_all(&tools)?;
        std::fs::write(tools.join("package.json"), "{ \"private\": true }\n")?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-audit", "--no-fund", "playwright-core@1.65"]);
        sh::run(npm.current_dir(&tools))?;
    }
    Ok(tools)
}

/// Copies every picture that the driver took.
fn copy_pictures(from: &Path, to: &Path) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let path = entry?.path();
        if let Some(name) =
            path.file_name().filter(|name| Path::new(name).extension() == Some("png".as_ref()))
        {
            std::fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

fn keep_picture(picture: &Path, place: &str) -> anyhow::Result<()> {
    let size = std::fs::metadata(picture)?.len();
    ensure!(size <= PICTURE, "the picture has {size} bytes; the limit is {PICTURE}");
    std::fs::copy(picture, sh::root().join(place))?;
    sh::print(&format!("the page shows what it should; {place} has {size} bytes"));
    Ok(())
}
