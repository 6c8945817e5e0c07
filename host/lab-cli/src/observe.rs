//! `pointsman observe`: watches the router in place through copies of its traffic and the engines' metrics.
//! It forwards nothing and answers nothing that anyone reads.

use std::{
    collections::HashMap,
    net::SocketAddr,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use parking_lot::Mutex;
use pointsman_cli::{duration, print};
use pointsman_lab::{Arm, Window, html};
use pointsman_tokens::Tokenizer;
use reqwest::Url;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, mpsc},
    time::{Duration, Instant, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    answers::{Answer, Answers},
    assign::{Assigned, How},
    counts::{Counts, tell_of_no_copy},
    engines::{EngineLog, Following, ReadError, in_order},
    finish::{ARMS, Forecast, Reserve, arms, complete, fleet, forecast, write_fleet, write_private},
    intake::{Copied, Intake},
    report::Observation,
    request::Measure,
    signals::{end_signal, time_or_signal},
    tracker::{Followed, Tracker},
    writer::{Reported, Sources, Writer, Written},
};

mod answer_tokens;
mod answers;
mod assign;
mod counts;
mod document;
mod engines;
mod ext_proc;
mod finish;
mod intake;
mod interval;
mod json_text;
mod line_file;
mod listener;
mod report;
mod request;
mod signals;
mod tracker;
mod writer;

/// Copies that wait for the writer.
const QUEUE_LENGTH: usize = 1_024;
/// How long open connections may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of requests below which nothing is forecast.
const LEAST_REQUESTS: usize = 20;
const MIB: usize = 1024 * 1024;
/// Exit code after a signal during the simulation.
const INTERRUPTED: i32 = 130;

/// Arguments of `observe`.
#[derive(Debug, Args)]
#[command(after_help = "\
Let the router in place send a copy of each request to --listen (nginx: `mirror`; Envoy: \
`request_mirror_policies`). Every copy is answered with an empty 200. Or let Envoy's filter `ext_proc` call it \
in observability mode: then it sees answers, too, with their engine and length. The trace has lengths and salted \
hashes only; the salt is not written. Engines are only read: GET /metrics once a second.

Examples:
  pointsman observe --workers http://10.0.0.1:8000,http://10.0.0.2:8000 --out trial
  pointsman observe --workers http://10.0.0.1:8000 --out trial --for 10m --arm new=./new.wasm

Ctrl-C, SIGTERM or SIGHUP ends the observation before its time, and the page is written.

Exit code: 0 when the page has a forecast; 1 when there were too few requests for one; 2 when an argument, an \
address or a file is not usable, or when no engine answers; 130 when a signal ended the simulation.")]
pub(crate) struct ObserveArgs {
    /// Address to which the router sends copies.
    #[arg(long, default_value = "127.0.0.1:9100")]
    listen: SocketAddr,
    /// Base URLs of the engines, separated by commas.
    #[arg(long, required = true, value_delimiter = ',', value_name = "URL")]
    workers: Vec<String>,
    /// Addresses of the engines' KV events (tcp://HOST:PORT), separated by commas, in the order of --workers.
    /// With them, the engine of a prompt with known token ids is known.
    #[arg(long, value_delimiter = ',', value_name = "ADDRESS")]
    kv_events: Vec<String>,
    /// Directory to write to; it is created. It must not contain a trace.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// How long to observe: 10m, 1h.
    #[arg(long = "for", value_name = "TIME", default_value = "1h", value_parser = duration)]
    time: Duration,
    /// A further way to route, as for `compare`. May be repeated.
    #[arg(long)]
    arm: Vec<String>,
    /// Number of tokens in a block of the trace.
    #[arg(long, default_value = "16", value_parser = clap::value_parser!(u32).range(1..=4_096))]
    block_tokens: u32,
    /// Hugging Face directory of the engines' model, with tokenizer.json: the tokens of text are known.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Number of bytes that count as a token, for prompts of text without --tokenizer.
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(u32).range(1..=64))]
    bytes_per_token: u32,
    /// Maximum number of sequences that run at once on an engine.
    #[arg(long, default_value = "256", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    max_num_seqs: u32,
    /// Maximum number of tokens in one step of an engine.
    #[arg(long, default_value = "8192", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    max_batched_tokens: u32,
    /// Longest body that is read, MiB.
    #[arg(long, default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1_024))]
    max_body: u32,
    /// Memory of the bodies that are read at the same time, MiB.
    #[arg(long, default_value = "128", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_memory: u32,
    /// Largest trace, MiB. Later requests are counted and not written.
    #[arg(long, default_value = "512", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_trace: u32,
    /// Number of seeds of the comparison.
    #[arg(long, default_value = "3", value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// Number of threads of the comparison.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..=1_024))]
    threads: u16,
}

/// What was seen until the end.
struct Seen {
    /// How long copies were taken.
    seconds: f64,
    counts: Arc<Counts>,
    /// In the order of arrival.
    written: Vec<Written>,
    /// What KV events told.
    followed: Followed,
    /// What answers told, by the numbers of their copies.
    answers: HashMap<u64, Answer>,
    logs: Vec<EngineLog>,
}

impl Seen {
    /// Returns the engine of a request, if it was told.
    fn engine(&self, number: u64) -> Option<Assigned> {
        let of = |how| move |engine| Assigned { engine, how };
        let answer = self.answers.get(&number).and_then(|answer| answer.engine).map(of(How::Answer));
        answer.or_else(|| self.followed.engines.get(&number).copied().map(of(How::Events)))
    }

    /// Returns whether the answer to a request was an error.
    fn has_failed(&self, request: &Written) -> bool {
        self.answers.get(&request.number).is_some_and(|answer| answer.has_failed)
    }
}

impl ObserveArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        self.check()?;
        let trace = self.out.join("trace.jsonl");
        ensure!(
            !trace.exists(),
            "`{}` exists: give another directory with --out, or remove it",
            trace.display()
        );
        let reserve = Reserve::take(&self.out)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let seen = runtime.block_on(self.observe(&trace))?;
        // A second signal ends the simulation, too, except SIGHUP.
        runtime.spawn(async {
            if end_signal().await.is_ok() {
                std::process::exit(INTERRUPTED)
            }
        });
        let has_forecast = self.write_results(&trace, &seen, reserve)?;
        runtime.shutdown_timeout(END_TIMEOUT);
        Ok(if has_forecast { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn check(&self) -> anyhow::Result<()> {
        for (place, url) in self.workers.iter().enumerate() {
            let same = |other: &String| other.trim_end_matches('/') == url.trim_end_matches('/');
            ensure!(!self.workers.iter().take(place).any(same), "--workers {url}: the engine is named twice");
            let parsed = url.parse::<Url>().ok();
            let has_secret = |url: &Url| !url.username().is_empty() || url.password().is_some();
            ensure!(
                !parsed.as_ref().is_some_and(has_secret),
                "--workers: leave user and password out of the addresses: the page names the engines"
            );
            let usable = parsed.is_some_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
            ensure!(usable, "--workers {url}: not the address of an engine; expected http://HOST:PORT");
        }
        ensure!(
            self.kv_events.is_empty() || self.kv_events.len() == self.workers.len(),
            "--kv-events has {} addresses for {} --workers: give one for each",
            self.kv_events.len(),
            self.workers.len()
        );
        ensure!(!self.time.is_zero(), "--for 0s: nothing can be observed in no time; give at least 1s");
        for address in &self.kv_events {
            ensure!(
                address.starts_with("tcp://"),
                "--kv-events {address}: not the address of KV events; expected tcp://HOST:PORT"
            );
        }
        for arm in Arm::parse_all(self.arm.iter().map(String::as_str))? {
            ensure!(!ARMS.contains(&&*arm.label), "--arm {}: it is compared anyway", arm.label);
        }
        let mut directory = std::fs::DirBuilder::new();
        directory.recursive(true).mode(0o700);
        directory.create(&self.out).with_context(|| format!("cannot create {}", self.out.display()))
    }

    /// Observes until the time is over or a signal ends it.
    async fn observe(&self, trace: &Path) -> anyhow::Result<Seen> {
        let counts = Arc::new(Counts::default());
        let tokenizer = self.tokenizer.as_deref().map(Tokenizer::load).transpose()?;
        let measure = Arc::new(Measure::new(self.block_tokens, self.bytes_per_token, tokenizer));
        let reported: Arc<Mutex<Reported>> = Arc::default();
        let (stop, tasks, start) = (CancellationToken::new(), TaskTracker::new(), Instant::now());
        let tracker = self.track(&tasks, &stop);
        // A copy that came before them would have no counter.
        let following = self.follow_from_first_readings(start, &reported, &stop).await?;
        let listener = TcpListener::bind(self.listen).await;
        let listener = listener.with_context(|| format!("cannot listen on {}", self.listen))?;
        let sources = Sources {
            measure: Arc::clone(&measure),
            counts: Arc::clone(&counts),
            reported: Arc::clone(&reported),
            tracker: tracker.clone(),
        };
        let writer = Writer::new(trace, u64::from(self.max_trace) * MIB as u64, sources)?;
        let (queue, copies) = mpsc::channel(QUEUE_LENGTH);
        let waiting = queue.downgrade();
        let writing =
            std::thread::Builder::new().name("trace".to_owned()).spawn(move || writer.run(copies))?;
        let (workers, address) = (self.workers.len(), listener.local_addr()?);
        print(&format!("observing: copies to http://{address}, {workers} engines, {:?}\n", self.time))?;
        let answers = Arc::new(Answers::of(&self.workers).await);
        let opened = Instant::now();
        let intake = Arc::new(Intake {
            answers: Arc::clone(&answers),
            counts: Arc::clone(&counts),
            measure,
            max_body: self.max_body as usize * MIB,
            memory: Arc::new(Semaphore::new(self.max_memory as usize * MIB)),
            queue,
            start,
        });
        tasks.spawn(listener::run(intake, listener, tasks.clone(), stop.clone()));
        tasks.spawn(stop.clone().run_until_cancelled_owned(tell_of_no_copy(Arc::clone(&counts), address)));
        if let Some(tracker) = tracker.clone() {
            let told = tracker::tell_of_no_events(tracker, self.kv_events.clone());
            tasks.spawn(stop.clone().run_until_cancelled_owned(told));
        }
        time_or_signal(self.time).await?;
        // The writer may need a while for the copies that wait.
        let seconds = opened.elapsed().as_secs_f64();
        tell_of_waiting(seconds, &waiting);
        stop.cancel();
        tasks.close();
        let _ = timeout(END_TIMEOUT, tasks.wait()).await;
        let logs = in_order(following).await?;
        let joined = tokio::task::spawn_blocking(move || writing.join()).await?;
        let mut written = joined.map_err(|_| anyhow::anyhow!("the writer of the trace panicked"))?;
        // As the trace is sorted when it is read.
        written.sort_by_key(|request| request.at);
        let followed = tracker.map(|tracker| tracker.finish()).unwrap_or_default();
        let answers = answers.take();
        Ok(Seen { seconds, counts, written, followed, answers, logs })
    }

    /// Follows the KV events of the engines, if their addresses are known.
    fn track(&self, tasks: &TaskTracker, stop: &CancellationToken) -> Option<Arc<Tracker>> {
        let has_events = !self.kv_events.is_empty();
        let tracker = has_events.then(|| Arc::new(Tracker::new(self.workers.len(), self.block_tokens)))?;
        tracker.start(&self.kv_events, tasks, stop);
        Some(tracker)
    }

    /// Reads the metrics of each engine, by its position. Returns when each was read once, and warns of those
    /// that could not be read.
    ///
    /// # Errors
    /// No engine answered.
    async fn follow_from_first_readings(
        &self,
        start: Instant,
        reported: &Arc<Mutex<Reported>>,
        stop: &CancellationToken,
    ) -> anyhow::Result<Following> {
        let mut following = Following::new();
        let (first, mut readings) = mpsc::channel(self.workers.len());
        for (place, url) in self.workers.iter().enumerate() {
            let url = url.trim_end_matches('/').to_owned();
            let log = EngineLog::follow(url, start, Arc::clone(reported), first.clone(), stop.clone());
            following.spawn(async move { (place, log.await) });
        }
        drop(first);
        let mut silent = 0;
        while let Some((url, problem)) = readings.recv().await {
            let Some(problem) = problem else { continue };
            silent += usize::from(problem != ReadError::TooLarge);
            print(&format!(
                "warning: {url}/metrics {problem}: nothing is known of this engine until it does\n"
            ))?;
        }
        ensure!(
            silent < self.workers.len(),
            "no engine of --workers answers: give the base URLs under which the engines have /metrics"
        );
        Ok(following)
    }

    /// Completes the trace, and writes fleet and page. Returns whether there is a forecast.
    fn write_results(&self, trace: &Path, seen: &Seen, reserve: Reserve) -> anyhow::Result<bool> {
        let mut total = Window::default();
        seen.logs.iter().for_each(|log| total.add(&log.total()));
        // A request that failed used no engine, or not for as long as one that is served.
        let has_failed: Vec<bool> = seen.written.iter().map(|request| seen.has_failed(request)).collect();
        let served: Vec<Written> =
            seen.written.iter().filter(|request| !seen.has_failed(request)).copied().collect();
        let known: Vec<_> = served.iter().map(|request| seen.engine(request.number)).collect();
        let assigned = assign::assign(&served, &known, &seen.logs);
        let (mut found, mut incomplete, mut saved) = (None, None, Ok(()));
        if served.len() >= LEAST_REQUESTS {
            let told = |request: &Written| seen.answers.get(&request.number)?.output_tokens;
            let told: Vec<_> = served.iter().map(told).collect();
            let (trace, warning) = complete(trace, self.block_tokens, &has_failed, (&served, &told), &total)?;
            drop(reserve);
            let (fleet, equations) = fleet(self, &seen.logs);
            saved = write_fleet(&self.out.join("fleet.toml"), &fleet, equations);
            // Fails when the terminal went away, and the page matters more.
            let _ = print(&format!("simulating {} requests\n", trace.requests.len()));
            found = Some(forecast(self, &arms(self)?, &trace, (&assigned, &seen.logs), (fleet, equations))?);
            incomplete = warning;
        }
        let observation = Observation {
            seconds: seen.seconds,
            counts: &seen.counts,
            written: &served,
            failed: seen.written.len() - served.len(),
            assigned: &assigned,
            followed: &seen.followed,
            answers: &seen.answers,
            incomplete,
            logs: &seen.logs,
            total,
        };
        let blocks = report::blocks(&observation, found.as_ref());
        self.write_page(&blocks, found.as_ref())?;
        saved.map(|()| found.is_some())
    }

    /// Writes the page, and prints it as text, also when it could not be written.
    fn write_page(&self, blocks: &[document::Block], found: Option<&Forecast>) -> anyhow::Result<()> {
        let mut text = document::text(blocks);
        let mut saved = Ok(());
        match found {
            Some(forecast) => {
                let title = "What your router did, and what each policy would have done";
                let page = html::page_after(&forecast.study, title, &document::html(blocks));
                let path = self.out.join("report.html");
                saved = write_private(&path, &page);
                if saved.is_ok() {
                    text.push_str(&format!("\nwritten: {}\n", path.display()));
                }
            }
            None => text.push_str(&format!("\nfewer than {LEAST_REQUESTS} requests: nothing is forecast\n")),
        }
        print(&text)?;
        saved
    }
}

/// Says how many copies wait to be measured after an observation of so many seconds, if any do.
fn tell_of_waiting(seconds: f64, queue: &mpsc::WeakSender<Copied>) {
    let waiting = queue.upgrade().map_or(0, |queue| queue.max_capacity() - queue.capacity());
    if waiting > 0 {
        let _ = print(&format!("observed for {seconds:.0} s; measuring {waiting} copies that wait\n"));
    }
}
