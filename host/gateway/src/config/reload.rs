//! Reads the configuration again while the daemon runs: applies what a reload can change, and names what it
//! cannot.
//!
//! A file with any problem changes nothing. This module decides what differs; a `ReloadTarget` applies it.

use std::{
    io,
    path::Path,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::{ArcSwap, ArcSwapOption};
use pointsman_policy_runtime::{CommandError, Report};
use pointsman_routing::Lane;
use pointsman_workers::WorkerId;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::settings::Settings;

mod source;
mod stamp;
mod unattended;
mod watched;

pub use source::{ConfigSource, ReadConfig};
use watched::{KeyFiles, Watched};

/// Interval of looking at the files. A change is applied when two looks in a row find the same.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long a reload waits for its files.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Looks in a row that cannot read the file until this is reported: an editor may be replacing it.
const MISSING_LOOKS: u32 = 2;

/// The parts of the daemon that a configuration changes.
pub(crate) trait ReloadTarget: Send + Sync {
    /// Changes everything from `before` to `after`.
    ///
    /// # Errors
    /// [`ReloadError`]; then nothing changed.
    fn apply(
        &self,
        before: &Settings,
        after: &Settings,
    ) -> impl Future<Output = Result<Applied, ReloadError>> + Send;
}

/// Reloads the configuration.
#[derive(Debug)]
pub(crate) struct ConfigReloader {
    source: Option<ConfigSource>,
    /// Settings of the start. Those that only a restart changes stay in force.
    started: Settings,
    /// The lock makes reloads take turns.
    current: tokio::sync::Mutex<Current>,
    /// Why the latest version of the file is not in force.
    not_applied: ArcSwapOption<String>,
    /// Dotted paths of the keys of the file in force whose values need a restart.
    needs_restart: ArcSwap<Vec<String>>,
    /// Whether a thread reads the files: one at a time, since a file system may never answer.
    reading: Arc<AtomicBool>,
}

/// What is in force.
#[derive(Debug)]
struct Current {
    settings: Settings,
    /// The files before `settings` were read from them: a change that the reading missed is still found.
    files: Option<Arc<Watched>>,
    /// The files whose change was refused and reported.
    refused: Option<Arc<Watched>>,
}

/// What made the gateway read the configuration again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trigger {
    Operator,
    /// A change of the file, or of a file that it names.
    File,
}

/// Result of a reload.
#[derive(Clone, Debug, Serialize)]
pub struct Reloaded {
    /// Changes of slots and workers.
    #[serde(flatten)]
    pub changes: Applied,
    /// Dotted paths of the keys whose new values are in force.
    pub applied: Vec<String>,
    /// Dotted paths of the keys that differ from those of the start: restart to apply them.
    pub needs_restart: Vec<String>,
}

/// Changes of slots and workers.
#[derive(Clone, Debug, Serialize)]
pub struct Applied {
    /// Slots that changed, and refusals in force.
    #[serde(flatten)]
    pub policies: Report,
    /// Workers that changed.
    pub workers: WorkerChanges,
}

/// Workers of the file that joined, left, and were replaced because their description changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerChanges {
    /// Workers that joined.
    pub added: Vec<WorkerId>,
    /// Workers that left.
    pub removed: Vec<WorkerId>,
    /// Workers that were replaced.
    pub changed: Vec<WorkerId>,
}

/// Why a reload changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The daemon was started without a file.
    #[error(
        "cannot reload: the daemon was started without a configuration file; restart it with `--config FILE`"
    )]
    NoFile,
    /// The configuration is not valid: all problems.
    #[error("{0}")]
    Invalid(String),
    /// The files do not answer.
    #[error(
        "the configuration file, or a file that it names, was not read within {} s: check their file systems",
        READ_TIMEOUT.as_secs()
    )]
    NotRead,
    /// The file changed by itself and would take much away.
    #[error(
        "the file {0}, and one that is half written looks like that: repair it, or apply it with SIGHUP or `POST \
         /config/reload`"
    )]
    NeedsOperator(String),
    /// The policy manager did not take the slots.
    #[error(transparent)]
    Policies(#[from] CommandError),
}

/// A reading of the configuration that is not over.
struct Reading(Arc<AtomicBool>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl ConfigReloader {
    /// Starts with `started` in force, which came from `source`.
    #[must_use]
    pub(crate) fn new(started: Settings, source: Option<ConfigSource>) -> Self {
        let files = source.as_ref().and_then(|source| source.at_start.clone());
        let current = tokio::sync::Mutex::new(Current { settings: started.clone(), files, refused: None });
        let (not_applied, needs_restart) = (ArcSwapOption::empty(), ArcSwap::default());
        Self { source, current, started, not_applied, needs_restart, reading: Arc::default() }
    }

    /// Returns why the file, which changed by itself, is not in force; `None` if it is.
    pub(crate) fn not_applied(&self) -> Option<Arc<String>> {
        self.not_applied.load_full()
    }

    /// Returns the keys whose values in the file differ from those of the start, and need a restart.
    pub(crate) fn needs_restart(&self) -> Arc<Vec<String>> {
        self.needs_restart.load_full()
    }

    /// Reads the configuration again and applies what a reload can change.
    ///
    /// # Errors
    /// [`ReloadError`]; then nothing changed.
    pub(crate) async fn reload(&self, target: &impl ReloadTarget) -> Result<Reloaded, ReloadError> {
        self.reload_for(Trigger::Operator, &mut *self.current.lock().await, target).await
    }

    async fn reload_for(
        &self,
        trigger: Trigger,
        current: &mut Current,
        target: &impl ReloadTarget,
    ) -> Result<Reloaded, ReloadError> {
        let source = self.source.as_ref().ok_or(ReloadError::NoFile)?;
        let (new, files) = self.read(source.clone()).await?;
        let before = &current.settings;
        let applied = before.changes(&new).applied;
        let needs_restart = self.started.changes(&new).needs_restart;
        let new = new.with_started(&self.started);
        let is_empty = |files: &Option<Arc<Watched>>| files.as_ref().is_some_and(|files| files.is_empty());
        let is_emptied = is_empty(&files) && !is_empty(&current.files);
        if trigger == Trigger::File
            && let Some(loss) = unattended::loss(before, &new, is_emptied)
        {
            return Err(ReloadError::NeedsOperator(loss));
        }
        let changes = target.apply(before, &new).await?;
        *current = Current { settings: new, files, refused: None };
        self.not_applied.store(None);
        self.needs_restart.store(Arc::new(needs_restart.clone()));
        let WorkerChanges { added, removed, changed } = &changes.workers;
        tracing::info!(
            applied = applied.join(","),
            needs_restart = needs_restart.join(","),
            slots_changed = changes.policies.changed.len(),
            policies_refused = changes.policies.refused.len(),
            stray_files = changes.policies.strays.len() + changes.policies.more_strays,
            workers_added = joined(added),
            workers_removed = joined(removed),
            workers_changed = joined(changed),
            "configuration reloaded"
        );
        log_policies(&changes.policies);
        Ok(Reloaded { changes, applied, needs_restart })
    }

    /// Reads and checks the configuration on another thread: this one serves operators.
    async fn read(&self, source: ConfigSource) -> Result<(Settings, Option<Arc<Watched>>), ReloadError> {
        if self.reading.swap(true, Ordering::Relaxed) {
            return Err(ReloadError::NotRead);
        }
        let reading = Reading(self.reading.clone());
        let read = tokio::task::spawn_blocking(move || {
            let _reading = reading;
            source.settings()
        });
        match tokio::time::timeout(READ_TIMEOUT, read).await {
            Ok(Ok(read)) => read.map_err(ReloadError::Invalid),
            Ok(Err(error)) => Err(ReloadError::Invalid(format!("reading the configuration failed: {error}"))),
            Err(_) => Err(ReloadError::NotRead),
        }
    }

    /// Looks at the file, and at the files with keys that it names, until `stop`. Reloads when one changed.
    pub(crate) async fn watch(&self, target: &impl ReloadTarget, stop: CancellationToken) {
        let Some(source) = &self.source else { return };
        let Some(path) = &source.path else { return };
        // A look or a reload may wait for a file system; the end does not.
        stop.run_until_cancelled(self.follow(source, path, target)).await;
    }

    async fn follow(&self, source: &ConfigSource, path: &Path, target: &impl ReloadTarget) {
        let mut before = self.current.lock().await.files.clone();
        // A pipe, such as standard input, was read once and is not watched.
        let (is_watched, mut missing) = (before.is_some(), Missing::default());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let handled = self.current.lock().await.handled().cloned();
            let mut look = pin!(self.look(source, before.clone()));
            let now = match tokio::time::timeout(READ_TIMEOUT, &mut look).await {
                Ok(now) => now,
                Err(_) => {
                    let silent = format!("no answer within {} s", READ_TIMEOUT.as_secs());
                    missing.looks = missing.looks.max(MISSING_LOOKS - 1);
                    self.note_missing(path, &mut missing, Some(&io::Error::other(silent)));
                    look.await
                }
            };
            if is_watched {
                self.note_missing(path, &mut missing, now.as_ref().err());
            }
            let now = now.ok();
            // A file that is being written differs between two looks. A file that is written more slowly is
            // refused, and read again when it is complete.
            if now == before
                && now != handled
                && let Some(files) = &now
            {
                self.file_changed(path, files, target).await;
            }
            before = now;
        }
    }

    /// Reloads because the files changed. Says in the log, and until the next reload in the status, why not.
    async fn file_changed(&self, path: &Path, files: &Arc<Watched>, target: &impl ReloadTarget) {
        let mut current = self.current.lock().await;
        let reloaded = self.reload_for(Trigger::File, &mut current, target).await;
        let was_read = !matches!(reloaded, Err(ReloadError::NotRead));
        let outcome = if reloaded.is_ok() { "done" } else { "refused" };
        let why = reloaded.err().map(|error| Arc::new(error.to_string()));
        if !was_read && self.not_applied() == why {
            // It is tried at each look, and was said before.
            return;
        }
        tracing::info!(target: "audit", who = "file", action = "reload", outcome, "change requested");
        if let Some(error) = why {
            tracing::error!(path = %path.display(), %error, "configuration not reloaded");
            self.not_applied.store(Some(error));
            current.refused = was_read.then(|| files.clone());
        }
    }

    /// Says once, in the log and in the status, that the file cannot be read; takes it back when it can.
    fn note_missing(&self, path: &Path, missing: &mut Missing, problem: Option<&io::Error>) {
        let Some(error) = problem else {
            if missing.looks >= MISSING_LOOKS {
                self.not_applied.store(missing.before.take());
            }
            missing.looks = 0;
            return;
        };
        missing.looks = missing.looks.saturating_add(1);
        if missing.looks == MISSING_LOOKS {
            tracing::warn!(path = %path.display(), %error, "configuration file cannot be read: the settings stay");
            let why = format!("the configuration file cannot be read: {error}; a restart would fail");
            missing.before = self.not_applied.swap(Some(Arc::new(why)));
        }
    }

    async fn look(&self, source: &ConfigSource, before: Option<Arc<Watched>>) -> io::Result<Arc<Watched>> {
        let (source, keys) = (source.clone(), KeyFiles::of(&self.current.lock().await.settings.auth));
        let look = move || {
            let files =
                source.files(before.as_deref()).unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()));
            Ok(Arc::new(files?.with_keys(keys, before.as_deref())))
        };
        tokio::task::spawn_blocking(look).await.map_err(io::Error::other)?
    }
}

impl Current {
    /// The files that need no reload: those of the settings, unless a later change was refused.
    fn handled(&self) -> Option<&Arc<Watched>> {
        self.refused.as_ref().or(self.files.as_ref())
    }
}

/// A file that cannot be read.
#[derive(Debug, Default)]
struct Missing {
    /// Number of looks in a row that could not.
    looks: u32,
    /// Why its content was not in force before.
    before: Option<Arc<String>>,
}

fn joined(workers: &[WorkerId]) -> String {
    workers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Logs what the answer of a reload says about policies: every refusal in force, every stray file, and the
/// content of each slot.
fn log_policies(report: &Report) {
    for refused in &report.refused {
        tracing::warn!(
            slot = %refused.slot,
            model = refused.model,
            lane = %refused.lane,
            file = refused.file,
            kind = refused.kind,
            error = refused.message,
            "policy refusal in force"
        );
    }
    for (file, error) in report.strays.iter().zip(&report.stray_problems) {
        tracing::warn!(file, error, "file in the policy directory names no slot");
    }
    for lane in &report.compiling {
        tracing::info!(lane, "policy still compiles");
    }
    for slot in &report.slots {
        let lanes =
            [(Lane::Active, &slot.active), (Lane::Canary, &slot.canary), (Lane::Shadow, &slot.shadow)];
        for (lane, runs) in lanes.into_iter().filter_map(|(lane, runs)| Some((lane, runs.as_ref()?))) {
            tracing::info!(
                slot = %slot.slot,
                model = slot.model,
                %lane,
                state = slot.state.as_str(),
                policy = runs.policy,
                generation = runs.generation.0,
                digest = runs.digest.map(|digest| digest.to_string()),
                "slot state"
            );
        }
    }
}
