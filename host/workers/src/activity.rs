//! Progress of a worker while requests wait for it. It distinguishes a worker that is stuck from one that is
//! slow.
//!
//! The code that reads an answer sets a flag, unless it is set already. Bytes therefore cost one load, and
//! neither a clock call nor a write. The watch (`crate::probe`) takes the flags of all workers a few times a
//! second and adds up how long each has been silent.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::time::{Duration, Instant};

use crate::{id::WorkerId, unix_time::millis};

mod signs;

pub(crate) use signs::{EngineProgress, EngineSigns};

/// Deadlines of different requests that pass in a row until a worker counts as stuck.
pub(crate) const MAX_DEADLINES: usize = 3;
/// Longest and shortest time between two requests of the gateway's own to a worker that is stuck.
const MAX_PROBE_PAUSE: Duration = Duration::from_secs(60);
const MIN_PROBE_PAUSE: Duration = Duration::from_secs(1);
/// How long a worker whose handoffs do not finish is left out before one of them is tried.
const HANDOFF_PAUSE: Duration = Duration::from_secs(60);

/// Why a worker counts as stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StuckBy {
    /// Requests waited, no byte arrived, and the engine's figures did not move.
    Silence,
    /// Deadlines passed, and the engine reports no figures.
    Deadlines,
    /// Handoffs did not finish before their deadlines.
    Handoffs,
}

impl StuckBy {
    /// Returns the stable label in answers and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Silence => "silence",
            Self::Deadlines => "deadlines",
            Self::Handoffs => "handoffs",
        }
    }
}

/// A worker that makes no progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Why it counts as stuck.
    pub by: StuckBy,
    /// When that was found.
    pub since: Instant,
}

/// Result of one look at a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Why the worker is stuck, if it is.
    pub(crate) stuck: Option<Stuck>,
    /// Whether the worker became stuck, or stopped being stuck, at this look.
    pub(crate) changed: bool,
    /// Whether the gateway should send a request of its own.
    pub(crate) probe: bool,
    /// The engine's figures should be read at once.
    pub(crate) read: bool,
}

/// The activity of one worker.
#[derive(Debug)]
pub(crate) struct Activity {
    /// Whether a byte of an answer arrived since the last look.
    heard: AtomicBool,
    /// Calls that wait for bytes of an answer.
    waiting: AtomicU32,
    /// The last sign of progress, milliseconds after `created`.
    alive_ms: AtomicU64,
    /// Time after `created`, ms, of the last answered health check that says that the worker works.
    healthy_ms: AtomicU64,
    /// Time after `created`, ms, at which the last health check began that passed.
    passed_ms: AtomicU64,
    created: Instant,
    /// Whether handoffs were late since one finished.
    handoffs_late: AtomicBool,
    /// Times the worker was ejected.
    ejections: AtomicU64,
    track: Mutex<Track>,
}

/// State that looks, readings and deadlines update.
#[derive(Debug)]
struct Track {
    looked_at: Instant,
    /// How long requests have waited without a sign of progress.
    silent: Duration,
    /// The part of it that ended with a reading of the engine's figures.
    confirmed: Duration,
    signs: Option<EngineSigns>,
    /// Whether the figures moved since the last look.
    moved: bool,
    /// Requests whose deadlines passed since the last sign of progress.
    deadlines: Vec<u64>,
    /// Requests whose handoffs did not finish in time since one did, and the other worker of each.
    handoffs: Vec<(u64, WorkerId)>,
    stuck: Option<Stuck>,
    probe: ProbeTurn,
}

/// When the gateway sends a request of its own.
#[derive(Debug)]
struct ProbeTurn {
    runs: bool,
    due: Instant,
    pause: Duration,
}

impl Activity {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self {
            heard: AtomicBool::new(false),
            waiting: AtomicU32::new(0),
            alive_ms: AtomicU64::new(0),
            healthy_ms: AtomicU64::new(0),
            passed_ms: AtomicU64::new(0),
            created: now,
            handoffs_late: AtomicBool::new(false),
            ejections: AtomicU64::new(0),
            track: Mutex::new(Track::new(now)),
        }
    }

    /// A call waits for bytes.
    pub(crate) fn waits(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that a call no longer waits for bytes.
    pub(crate) fn waits_no_more(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Records that a byte of an answer arrived.
    pub(crate) fn note_sign_of_life(&self) {
        // Read first: threads share the flag, and it is set nearly always.
        if !self.heard.load(Ordering::Relaxed) {
            self.heard.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether a byte of an answer arrived since the last call or look. The next look counts it, too.
    pub(crate) fn take_heard(&self) -> bool {
        let heard = self.heard.swap(false, Ordering::Relaxed);
        if heard {
            let mut track = self.track.lock();
            track.moved = true;
            self.alive(track.looked_at);
        }
        heard
    }

    /// Returns whether a health check passed that began since then.
    pub(crate) fn passed_check_since(&self, at: Instant) -> bool {
        self.passed_ms.load(Ordering::Relaxed) > self.millis(at)
    }

    /// Returns when the worker last gave a sign of progress, or its creation. It may lag by two looks.
    pub(crate) fn alive_at(&self) -> Instant {
        self.created + Duration::from_millis(self.alive_ms.load(Ordering::Relaxed))
    }

    /// Returns whether the engine reports figures that move while it works.
    pub(crate) fn counts_its_work(&self) -> bool {
        let signs = self.track.lock().signs;
        signs.is_some_and(|signs| signs.progress.is_known() || signs.kv_tokens.is_some())
    }

    /// Returns whether the worker gave a sign of progress since `at`.
    pub(crate) fn progressed_since(&self, at: Instant) -> bool {
        self.heard.load(Ordering::Relaxed) || self.alive_at() >= at
    }

    /// Like [`Activity::alive_at`]. Where figures are not known, an answered health check is a sign, too.
    pub(crate) fn works_at(&self) -> Instant {
        let healthy = self.created + Duration::from_millis(self.healthy_ms.load(Ordering::Relaxed));
        healthy.max(self.alive_at())
    }

    /// Returns how often the worker was ejected.
    pub(crate) fn ejections(&self) -> u64 {
        self.ejections.load(Ordering::Relaxed)
    }

    /// Returns why the worker is stuck, and when that began.
    pub(crate) fn stuck(&self) -> Option<Stuck> {
        self.track.lock().stuck
    }

    /// Takes a reading of the engine's figures; `None`: they are not known any more.
    pub(crate) fn read(&self, signs: Option<EngineSigns>) {
        let (mut track, now) = (self.track.lock(), Instant::now());
        let before = std::mem::replace(&mut track.signs, signs);
        let Some(signs) = signs else { return };
        track.confirmed = track.silent;
        let moved = before.is_some_and(|before| signs.moved_since(&before));
        track.moved |= moved;
        // Such an engine counts as working, so that no stream ends early.
        if moved || signs.tells_only_that_requests_run() {
            self.alive(now);
        }
    }

    /// The engine passed a health check, which `began` then. Where its figures are not known, nothing else
    /// says that it works on a stream that is silent. It is not progress: an engine that is stuck may answer,
    /// too.
    pub(crate) fn note_health(&self, began: Instant) {
        self.passed_ms.fetch_max(self.millis(began), Ordering::Relaxed);
        let track = self.track.lock();
        if track.signs.is_none() && track.stuck.is_none() {
            self.healthy_ms.fetch_max(self.millis(Instant::now()), Ordering::Relaxed);
        }
    }

    /// The deadline of a request passed while the worker owed it an answer.
    pub(crate) fn note_deadline(&self, request: u64) {
        note(&mut self.track.lock().deadlines, request);
    }

    /// A handoff was not finished when its request's deadline passed.
    pub(crate) fn note_handoff_late(&self, request: u64, partner: WorkerId) {
        let handoffs = &mut self.track.lock().handoffs;
        if handoffs.len() < MAX_DEADLINES && handoffs.iter().all(|(other, _)| *other != request) {
            handoffs.push((request, partner));
        }
        self.handoffs_late.store(true, Ordering::Release);
    }

    /// A handoff finished.
    pub(crate) fn note_handoff_done(&self) {
        if !self.handoffs_late.load(Ordering::Acquire) || !self.handoffs_late.swap(false, Ordering::AcqRel) {
            return;
        }
        let mut track = self.track.lock();
        track.handoffs.clear();
        if track.stuck.is_some_and(|stuck| stuck.by == StuckBy::Handoffs) {
            track.stuck = None;
        }
    }

    /// Returns the other worker of the late handoffs, if it was the same each time.
    pub(crate) fn only_partner(&self) -> Option<WorkerId> {
        let track = self.track.lock();
        let mut partners = track.handoffs.iter().map(|(_, partner)| *partner);
        let first = partners.next()?;
        partners.all(|other| other == first).then_some(first)
    }

    /// Another worker is to blame for the late handoffs.
    pub(crate) fn excuse_handoffs(&self) {
        let mut track = self.track.lock();
        track.handoffs.clear();
        track.stuck = None;
    }

    /// Forgets everything: the engine is away, or another process serves.
    pub(crate) fn forget(&self) {
        let mut track = self.track.lock();
        let new = Track::new(Instant::now());
        let probe = ProbeTurn { runs: track.probe.runs, ..new.probe };
        *track = Track { signs: track.signs, probe, ..new };
    }

    /// Records the end of the gateway's own request. `answered`: the worker served it. Returns whether to try
    /// the worker with the next handoff, because a request without one proves nothing about handoffs.
    pub(crate) fn probed(&self, answered: bool) -> bool {
        let mut track = self.track.lock();
        track.probe.runs = false;
        track.probe.due = Instant::now() + track.probe.pause;
        track.probe.pause = (track.probe.pause * 2).min(MAX_PROBE_PAUSE);
        let by_handoffs = track.stuck.filter(|stuck| stuck.by == StuckBy::Handoffs);
        match (answered, by_handoffs) {
            (true, None) => self.heard.store(true, Ordering::Relaxed),
            (true, Some(stuck)) if stuck.since.elapsed() >= HANDOFF_PAUSE => {
                track.handoffs.clear();
                track.stuck = None;
                return true;
            }
            _ => {}
        }
        false
    }

    /// Looks at what happened since the last look. `stuck_after`: silence that makes a worker stuck; 0: none
    /// does.
    pub(crate) fn look(&self, now: Instant, stuck_after: Duration) -> Found {
        let heard = self.heard.load(Ordering::Relaxed) && self.heard.swap(false, Ordering::Relaxed);
        let mut track = self.track.lock();
        let before = std::mem::replace(&mut track.looked_at, now);
        if heard {
            self.alive(before);
        }
        let was_stuck = track.stuck.is_some();
        if heard | std::mem::take(&mut track.moved) {
            track.progress();
        } else if self.waiting.load(Ordering::Relaxed) > 0 {
            track.silent += now.saturating_duration_since(before);
        }
        if stuck_after.is_zero() {
            track.stuck = None;
            return Found { changed: was_stuck, ..Found::default() };
        }
        if track.stuck.is_none()
            && let Some(by) = track.judge(stuck_after)
        {
            track.stuck = Some(Stuck { by, since: now });
            track.probe = ProbeTurn { pause: MIN_PROBE_PAUSE, due: now, ..track.probe };
        }
        let (is_stuck, tells) = (track.stuck.is_some(), track.reports_progress());
        let suspicious = tells && track.silent >= stuck_after / 2;
        let read = suspicious && track.silent >= stuck_after && track.confirmed < stuck_after;
        let probe = (is_stuck || suspicious) && !track.probe.runs && now >= track.probe.due;
        track.probe.runs |= probe;
        let changed = is_stuck != was_stuck;
        Found { stuck: track.stuck, changed, probe, read }
    }

    /// Counts that the worker was ejected.
    pub(crate) fn count(&self) {
        self.ejections.fetch_add(1, Ordering::Relaxed);
    }

    fn alive(&self, at: Instant) {
        self.alive_ms.fetch_max(self.millis(at), Ordering::Relaxed);
    }

    /// Milliseconds from the worker's creation.
    fn millis(&self, at: Instant) -> u64 {
        millis(at.saturating_duration_since(self.created))
    }
}

impl Track {
    fn new(now: Instant) -> Self {
        Self {
            looked_at: now,
            silent: Duration::ZERO,
            confirmed: Duration::ZERO,
            signs: None,
            moved: false,
            deadlines: Vec::new(),
            handoffs: Vec::new(),
            stuck: None,
            probe: ProbeTurn { runs: false, due: now, pause: MIN_PROBE_PAUSE },
        }
    }

    /// Returns whether the engine reports figures of progress.
    fn reports_progress(&self) -> bool {
        self.signs.is_some_and(|signs| signs.progress.is_known())
    }

    fn judge(&self, stuck_after: Duration) -> Option<StuckBy> {
        if self.handoffs.len() >= MAX_DEADLINES {
            return Some(StuckBy::Handoffs);
        }
        if self.reports_progress() {
            return (self.confirmed >= stuck_after).then_some(StuckBy::Silence);
        }
        (self.deadlines.len() >= MAX_DEADLINES).then_some(StuckBy::Deadlines)
    }

    /// The worker made progress.
    fn progress(&mut self) {
        (self.silent, self.confirmed) = (Duration::ZERO, Duration::ZERO);
        self.deadlines.clear();
        if !self.stuck.is_some_and(|stuck| stuck.by == StuckBy::Handoffs) {
            self.stuck = None;
            self.probe.pause = MIN_PROBE_PAUSE;
        }
    }
}

/// Adds a request to those that count, once each.
fn note(requests: &mut Vec<u64>, request: u64) {
    if requests.len() < MAX_DEADLINES && !requests.contains(&request) {
        requests.push(request);
    }
}

#[cfg(test)]
mod tests;
