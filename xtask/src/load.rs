//! A steady load: clients that send small requests at set times, whatever became of the ones before (open loop), and judge every
//! answer. What they saw is told when they stop.

use std::{
    fmt,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

const BODY: &str =
    r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"a small question"}]}"#;

/// Clients at work.
pub(crate) struct Load {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<Vec<(Instant, Duration)>>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    sent: AtomicU64,
    failed: AtomicU64,
    problem: Mutex<Option<String>>,
}

/// What clients saw.
pub(crate) struct Seen {
    pub(crate) sent: u64,
    pub(crate) failed: u64,
    /// The first failure.
    pub(crate) problem: Option<String>,
    /// When each request was due, and how long after that its answer was there.
    pub(crate) answers: Vec<(Instant, Duration)>,
}

impl Load {
    /// Starts `clients` threads, which send `rate` requests a second together.
    pub(crate) fn start(address: &str, rate: u32, clients: u32) -> Self {
        let shared = Arc::new(Shared::default());
        let gap = Duration::from_secs(1) * clients / rate;
        let begun = Instant::now();
        let one = |place: u32| {
            let (shared, address) = (shared.clone(), address.to_owned());
            thread::spawn(move || client(&shared, &address, begun + gap * place / clients, gap))
        };
        Self { clients: (0..clients).map(one).collect(), shared }
    }

    /// Requests that failed so far.
    pub(crate) fn failed(&self) -> u64 {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// Ends the clients.
    pub(crate) fn stop(self) -> Seen {
        self.shared.stop.store(true, Ordering::Relaxed);
        let answers = self.clients.into_iter().flat_map(|client| client.join().unwrap_or_default()).collect();
        let problem = self.shared.problem.lock().ok().and_then(|mut problem| problem.take());
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Seen { sent: get(&self.shared.sent), failed: get(&self.shared.failed), problem, answers }
    }
}

fn client(shared: &Shared, address: &str, mut due: Instant, gap: Duration) -> Vec<(Instant, Duration)> {
    let (mut connection, mut answers) = (None, Vec::new());
    while !shared.stop.load(Ordering::Relaxed) {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        shared.sent.fetch_add(1, Ordering::Relaxed);
        match ask(&mut connection, address) {
            Ok(()) => answers.push((due, due.elapsed())),
            Err(error) => {
                connection = None;
                shared.failed.fetch_add(1, Ordering::Relaxed);
                if let Ok(mut problem) = shared.problem.lock() {
                    problem.get_or_insert_with(|| format!("{error:#}"));
                }
            }
        }
        due += gap;
    }
    answers
}

/// One request on a connection that is kept.
fn ask(connection: &mut Option<BufReader<TcpStream>>, address: &str) -> anyhow::Result<()> {
    if connection.is_none() {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        *connection = Some(BufReader::new(stream));
    }
    let reader = connection.as_mut().context("no connection")?;
    let length = BODY.len();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{BODY}"
    );
    reader.get_mut().write_all(request.as_bytes())?;
    let mut status = String::new();
    reader.read_line(&mut status)?;
    let (mut line, mut length) = (String::new(), None);
    loop {
        line.clear();
        ensure!(reader.read_line(&mut line)? > 0, "closed in the head after {status:?}");
        let header = line.trim_end().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = Some(value.trim().parse()?);
        }
    }
    let mut body = vec![0; length.context("an answer without a length")?];
    reader.read_exact(&mut body)?;
    let text = String::from_utf8_lossy(&body);
    ensure!(status.starts_with("HTTP/1.1 200"), "{}: {text}", status.trim_end());
    ensure!(text.contains("\"choices\""), "no completion: {text}");
    Ok(())
}

/// Memory of a process, megabytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    /// All that is resident: what follows, and pages of the binary and libraries.
    pub(crate) resident: f64,
    /// Heap, stacks, guests and their code.
    pub(crate) anonymous: f64,
}

impl Memory {
    /// What a process has now.
    pub(crate) fn of(pid: u32) -> anyhow::Result<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let megabytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kilobytes: f64 = line.context("not told")?.trim().trim_end_matches("kB").trim().parse()?;
            Ok::<_, anyhow::Error>(kilobytes * 1_024.0 / 1e6)
        };
        Ok(Self { resident: megabytes("VmRSS:")?, anonymous: megabytes("RssAnon:")? })
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MB resident, {:.1} anonymous", self.resident, self.anonymous)
    }
}
