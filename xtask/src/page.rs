//! `page`: the admin port's page in Chromium, before real processes: live decisions, a policy swapped, an operator's word,
//! words that mean harm. Writes `docs/page.png`.

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use pointsman_guest_build::GuestBuild;
use serde_json::json;

use crate::{
    fleet::{self, Fleet},
    http, setup, sh,
};

/// Browsers that will do, the first that is there.
const BROWSERS: [&str; 4] =
    ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome", "/opt/google/chrome/chrome"];
/// The picture's size at most, bytes.
const PICTURE: u64 = 200 * 1024;
const TOKEN: &str = "page-test";
const CLIENTS: usize = 4;

/// Policies that are dropped into the folder.
struct Guests {
    swapped: Vec<u8>,
    canary: Vec<u8>,
    hostile: Vec<u8>,
}

/// Drives the page; an error when it does not show what it should. Without Chromium, node or npm it says so and does nothing.
pub(crate) fn run() -> anyhow::Result<()> {
    let chosen = std::env::var_os("CHROMIUM").map(PathBuf::from);
    let found = chosen.or_else(|| BROWSERS.iter().map(PathBuf::from).find(|path| path.exists()));
    let node = sh::succeeds(Command::new("npm").arg("--version"));
    let Some(browser) = found.filter(|_| node) else {
        sh::tell(
            "not run: the page's test needs Chromium (CHROMIUM=PATH, or apt-get install chromium), node and npm",
        );
        return Ok(());
    };
    setup::run()?;
    let bin = fleet::build()?;
    let build = |name| GuestBuild::new(&sh::root(), name).build();
    let guests = Guests {
        swapped: build("policy-weighted-random")?,
        canary: build("policy-least-loaded")?,
        hostile: build("guest-hostile")?,
    };
    let tools = tools()?;
    let dir = tempfile::Builder::new().prefix("pointsman-page-").tempdir()?;
    let fleet = start(&bin, dir.path())?;
    let mut drive = Command::new("node");
    drive
        .arg(sh::root().join("xtask/src/page/drive.mjs"))
        .arg(format!("http://{}/", fleet.admin()))
        .args([&browser, dir.path(), Path::new(TOKEN)])
        .current_dir(&tools)
        .stdout(Stdio::piped());
    let mut child = drive.spawn().context("could not run node")?;
    let out = BufReader::new(child.stdout.take().context("no stdout")?);
    let story = play(fleet, &guests, out.lines());
    let status = child.wait()?;
    if let Some(folder) = std::env::var_os("PAGE_PICTURES") {
        for name in ["page.png", "dark.png", "phone.png", "receipt.png"] {
            let _ = std::fs::copy(dir.path().join(name), Path::new(&folder).join(name));
        }
    }
    ensure!(story? && status.success(), "the page does not do what it should (see above)");
    keep_picture(&dir.path().join("page.png"))
}

/// Does what the driver asks for; whether it came to its end.
fn play(
    fleet: Fleet,
    guests: &Guests,
    words: impl Iterator<Item = std::io::Result<String>>,
) -> anyhow::Result<bool> {
    let stop = Arc::new(AtomicBool::new(false));
    let (mut fleet, mut clients) = (Some(fleet), Vec::new());
    let mut done = false;
    for word in words {
        let word = word?;
        sh::tell(&format!("page: {word}"));
        match (word.as_str(), &fleet) {
            ("requests", Some(fleet)) => clients = start_clients(&fleet.client(), &stop),
            ("swap", Some(fleet)) => fleet.drop_policy("prefill.wasm", &guests.swapped)?,
            ("trials", Some(fleet)) => {
                fleet.drop_policy("prefill.canary.wasm", &guests.canary)?;
                fleet.drop_policy("prefill.shadow.wasm", &guests.canary)?;
            }
            ("garbage", Some(fleet)) => fleet.drop_policy("prefill.wasm", b"this is no policy")?,
            ("markup", Some(fleet)) => {
                fleet.drop_policy("decode.wasm", &guests.hostile)?;
                fleet.drop_policy("<img src=x>.wasm", b"")?;
            }
            ("end", _) => {
                stop.store(true, Ordering::SeqCst);
                clients.drain(..).for_each(|client| drop(thread::JoinHandle::join(client)));
                drop(fleet.take());
            }
            ("done", _) => done = true,
            _ => {}
        }
    }
    stop.store(true, Ordering::SeqCst);
    Ok(done)
}

fn start(bin: &Path, dir: &Path) -> anyhow::Result<Fleet> {
    let (mut engines, mut workers) = (Vec::new(), Vec::new());
    let plan =
        [("prefill", 1), ("prefill", 4), ("prefill", 1), ("decode", 1), ("decode", 4), ("aggregated", 1)];
    for (place, (role, ranks)) in plan.into_iter().enumerate() {
        let ranks = ranks.to_string();
        let mut args = vec!["--role", role, "--dp-size", &ranks, "--blocks", "1200", "--itl-ms", "15"];
        args.extend(["--overhead-ms", "25", "--prefill-ms-per-token", "0.1"]);
        let engine = fleet::engine(bin, dir, &format!("{role}-{}", place + 1), &args)?;
        let url = engine.listening();
        workers.push(format!("id={},role={role},engine=vllm,dp_size={ranks},url=http://{url}", place + 1));
        engines.push(engine);
    }
    let config = format!(
        "[server]\nadmin_token = \"{TOKEN}\"\n[policies]\nrescan = \"1s\"\n[policies.slots.prefill]\ncanary = {{ share = 0.2 }}\n\
         [policies.slots.decode.settings]\nmode = \"markup\"\n[probe]\ninterval = \"200ms\"\nload_interval = \"500ms\"\n"
    );
    fleet::gateway(bin, dir, engines, &config, &workers)
}

/// Clients that ask one after another until told to stop; some prompts begin alike.
fn start_clients(address: &str, stop: &Arc<AtomicBool>) -> Vec<thread::JoinHandle<()>> {
    let count = Arc::new(AtomicUsize::new(0));
    let client = |_| {
        let (address, stop, count) = (address.to_owned(), stop.clone(), count.clone());
        thread::spawn(move || {
            while !stop.load(Ordering::SeqCst) {
                let turn = count.fetch_add(1, Ordering::SeqCst);
                let prompt = format!("system prompt {} ", turn % 7).repeat(40 + turn % 5 * 30);
                let body = json!({
                    "model": "tiny", "stream": true, "max_tokens": 12, "ignore_eos": true,
                    "stream_options": { "include_usage": true },
                    "messages": [{ "role": "user", "content": prompt }],
                });
                let headers =
                    format!("x-request-id: <script>alert(2)</script>{turn}\r\nx-pointsman-decision: 1\r\n");
                let _ = http::stream_chat_with(&address, &body.to_string(), &headers);
                thread::sleep(Duration::from_millis(60));
            }
        })
    };
    (0..CLIENTS).map(client).collect()
}

/// The folder with the browser's driver, installed when it is not there.
fn tools() -> anyhow::Result<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| sh::root().join("target"), PathBuf::from);
    let tools = target.join("page");
    if !tools.join("node_modules/playwright-core").exists() {
        std::fs::create_dir_all(&tools)?;
        std::fs::write(tools.join("package.json"), "{ \"private\": true }\n")?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-audit", "--no-fund", "playwright-core@1.65"]);
        sh::run(npm.current_dir(&tools))?;
    }
    Ok(tools)
}

fn keep_picture(picture: &Path) -> anyhow::Result<()> {
    let size = std::fs::metadata(picture)?.len();
    ensure!(size <= PICTURE, "the picture has {size} bytes, more than {PICTURE}");
    std::fs::copy(picture, sh::root().join("docs/page.png"))?;
    sh::print(&format!("the page does what it should; docs/page.png has {size} bytes"));
    Ok(())
}
