//! The loop of the command: a save starts an attempt, an attempt goes through its steps, and what is
//! installed is watched in the gateway.

use std::{pin::Pin, process::ExitCode, time::Duration};

use pointsman_admin_cli::{Gateway, GatewayError};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::{
    console::{self, Console},
    lane_files::LaneFiles,
    live::{Look, OwnPolicy, SlotName},
    steps::{Outcome, Step, Steps},
    watch::Watch,
};

mod attempt;
mod gateway;
mod keys;

use attempt::Attempt;

/// Time without a further change after which a save is complete, and the longest such time.
const QUIET: Duration = Duration::from_millis(50);
const MAX_QUIET: Duration = Duration::from_millis(500);
/// Time between two looks at the gateway: while it installs a policy, and afterwards.
const INSTALL_POLL: Duration = Duration::from_millis(50);
const LIVE_POLL: Duration = Duration::from_secs(1);

/// Parsed arguments of the command.
pub(super) struct Options {
    pub(super) steps: Steps,
    /// The gateway and its slot.
    pub(super) gateway: Option<(Gateway, SlotName)>,
    pub(super) files: Option<LaneFiles>,
    /// Number of decisions to replay.
    pub(super) last: u32,
    pub(super) once: bool,
    pub(super) keep: bool,
}

/// A policy of this command in the gateway, and its file's content.
struct Installed {
    policy: OwnPolicy,
    bytes: Vec<u8>,
}

pub(super) struct Session {
    steps: Steps,
    gateway: Option<(Gateway, SlotName)>,
    files: Option<LaneFiles>,
    last: u32,
    once: bool,
    keep: bool,
    console: Console,
    attempt: Attempt,
    step: Option<Step>,
    /// Whether a build has ended. The first one may install tools, which must not be cut off.
    has_built: bool,
    /// A save that may be incomplete: its time, and the time from which it counts as complete.
    save: Option<(Instant, Instant)>,
    /// A save during the first build.
    queued: Option<Instant>,
    current: Option<Installed>,
    /// Policy that runs until the gateway has installed `current`.
    earlier: Option<Installed>,
    look: Option<Looking>,
    next_look: Instant,
    away: bool,
    /// Generation that is promoted if the next key confirms it.
    confirms: Option<u64>,
}

/// A question to the gateway that is under way.
type Looking = Pin<Box<dyn Future<Output = Result<Look, GatewayError>>>>;

/// Sources of events.
struct Inputs {
    watch: Option<Watch>,
    saves: Option<mpsc::Receiver<Instant>>,
    keys: Option<mpsc::Receiver<char>>,
    signals: [Signal; 3],
}

enum Event {
    Saved(Instant),
    SaveComplete,
    Key(char),
    Quit,
    Done(Outcome),
    LookNow,
    Looked(Box<Result<Look, GatewayError>>),
}

impl Session {
    /// Starts the session and runs it to its end. Removes what it installed, also after an error.
    pub(super) async fn run(options: Options) -> anyhow::Result<ExitCode> {
        let Options { steps, gateway, files, last, once, keep } = options;
        let mut inputs = Inputs::open(&steps, once)?;
        let console = Console::open(!once)?;
        if console.reads_keys() {
            inputs.keys = Some(console::keys()?);
        }
        let now = Instant::now();
        let step = Some(steps.build());
        let mut session = Self {
            steps,
            gateway,
            files,
            last,
            once,
            keep,
            console,
            attempt: Attempt::of(now),
            step,
            has_built: false,
            save: None,
            queued: None,
            current: None,
            earlier: None,
            look: None,
            next_look: now,
            away: false,
            confirms: None,
        };
        let outcome = session.work(&mut inputs).await;
        let ended = session.end();
        let code = outcome?;
        ended.map(|()| code)
    }

    async fn work(&mut self, inputs: &mut Inputs) -> anyhow::Result<ExitCode> {
        self.introduce()?;
        loop {
            match self.next(inputs).await {
                Event::Quit => return Ok(if self.once { ExitCode::FAILURE } else { ExitCode::SUCCESS }),
                Event::Key(key) => {
                    if self.key(key).await? {
                        return Ok(ExitCode::SUCCESS);
                    }
                }
                Event::Saved(at) => self.saved(at),
                Event::SaveComplete => self.begin(inputs)?,
                Event::Done(outcome) => self.done(outcome)?,
                Event::LookNow => self.start_look(),
                Event::Looked(look) => self.looked(*look)?,
            }
            if let Some(good) = self.once.then(|| self.verdict()).flatten() {
                return Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
        }
    }

    fn introduce(&mut self) -> anyhow::Result<()> {
        let mut text = self.steps.source.path().display().to_string();
        if let Some((gateway, slot)) = &self.gateway {
            let model = slot.model.as_ref().map(|model| format!("{model}/")).unwrap_or_default();
            text.push_str(&format!("\nslot {model}{} of {}", slot.slot, gateway.url()));
        }
        self.console.print_below("dev", &text)?;
        if self.console.reads_keys() { self.console.print_below("keys", keys::HELP) } else { Ok(()) }
    }

    /// The next event. A step or a look that has ended is taken out.
    async fn next(&mut self, inputs: &mut Inputs) -> Event {
        let looks = self.look.is_none() && self.current.is_some();
        let (next_look, complete) =
            (self.next_look, self.save.map_or(self.next_look, |(_, complete)| complete));
        tokio::select! {
            () = received(&mut inputs.signals) => Event::Quit,
            key = next_of(&mut inputs.keys) => Event::Key(key),
            at = next_of(&mut inputs.saves) => Event::Saved(at),
            () = sleep_until(complete), if self.save.is_some() => Event::SaveComplete,
            outcome = end_of(&mut self.step) => {
                self.step = None;
                Event::Done(outcome)
            }
            look = end_of(&mut self.look) => {
                self.look = None;
                Event::Looked(Box::new(look))
            }
            () = sleep_until(next_look), if looks => Event::LookNow,
        }
    }

    /// Waits for more changes of the same save: editors write several files, or one of them in pieces.
    fn saved(&mut self, at: Instant) {
        let (first, _) = *self.save.get_or_insert((at, at));
        self.save = Some((first, (Instant::now() + QUIET).min(first + MAX_QUIET)));
    }

    /// Starts an attempt for a complete save. It takes the place of the one that runs.
    fn begin(&mut self, inputs: &mut Inputs) -> anyhow::Result<()> {
        let Some((saved, _)) = self.save.take() else { return Ok(()) };
        // There may be new directories to watch.
        if let Some(Err(error)) = inputs.watch.as_mut().map(Watch::refresh) {
            self.console.print_below("watch", &format!("{error:#}"))?;
        }
        if !self.has_built && self.step.is_some() {
            self.queued = Some(saved);
            return Ok(());
        }
        self.start(saved)
    }

    /// Ends the running step and removes the installed files.
    fn end(&mut self) -> anyhow::Result<()> {
        (self.step, self.look) = (None, None);
        let mut said = Vec::new();
        if let Some(files) = &mut self.files {
            if !self.keep {
                said.extend(files.remove());
            }
            said.extend(files.copies().map(|copy| format!("{} is what was promoted over", copy.display())));
        }
        self.console.clear_status()?;
        said.iter().try_for_each(|line| self.console.print_below("end", line))
    }
}

impl Inputs {
    fn open(steps: &Steps, once: bool) -> anyhow::Result<Self> {
        let (watch, saves) = if once {
            (None, None)
        } else {
            let (watch, saves) = Watch::start(steps.source.watched(&steps.cases))?;
            (Some(watch), Some(saves))
        };
        let signals = [
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ];
        Ok(Self { watch, saves, keys: None, signals })
    }
}

/// Directory of files that one step leaves for the next.
pub(super) fn scratch() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("pointsman-dev-").tempdir()
}

async fn received(signals: &mut [Signal; 3]) {
    let [one, two, three] = signals;
    tokio::select! {
        _ = one.recv() => {}
        _ = two.recv() => {}
        _ = three.recv() => {}
    }
}

async fn next_of<T>(receiver: &mut Option<mpsc::Receiver<T>>) -> T {
    match receiver {
        Some(open) => match open.recv().await {
            Some(value) => value,
            None => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}

async fn end_of<T>(future: &mut Option<Pin<Box<dyn Future<Output = T>>>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
