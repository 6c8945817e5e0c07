//! The thread that writes the log.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError},
    },
};

use pointsman_decision_log::{FileHeader, LOG_NAME, LOG_VERSION};
use pointsman_workers::unix_ms;
use serde::Serialize;
use tokio::time::{Duration, Instant};
use zstd::bulk::Compressor;

use super::{Entry, Message, Problem, files::Files, salt::Salt};
use crate::{config::DecisionLogSettings, telemetry::metrics::Metrics, version::VERSION};

/// Number of bytes of lines at which they are written.
const FRAME_BYTES: usize = 256 * 1024;
/// Maximum time that a line waits to be written. A killed daemon loses the lines of this time.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which nothing is written after the disk failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// zstd's default level: 3 to 4 times smaller, at some hundred MB a second.
const LEVEL: i32 = 3;

/// Collects lines and writes them as frames. Each frame can be read without the others.
pub(super) struct Writer {
    files: Files,
    salt: Option<Salt>,
    /// Whether the salt belongs to the directory; false for a configured salt.
    keeps_salt: bool,
    compressor: Compressor<'static>,
    block_tokens: u32,
    lines: Vec<u8>,
    /// Number of collected lines.
    records: u64,
    /// Latest time at which the lines are written.
    due: Option<Instant>,
    /// Earliest time of the next write, after a write failed.
    retry_at: Option<Instant>,
    /// Whether the directory was written once.
    is_ready: bool,
    problem: Problem,
    metrics: Arc<Metrics>,
    queued_bytes: Arc<AtomicUsize>,
}

impl Writer {
    pub(super) fn new(
        dir: PathBuf,
        settings: &DecisionLogSettings,
        block_tokens: u32,
        metrics: Arc<Metrics>,
        (queued_bytes, problem): (Arc<AtomicUsize>, Problem),
    ) -> io::Result<Self> {
        let mut compressor = Compressor::new(LEVEL)?;
        compressor.include_checksum(true)?;
        Ok(Self {
            files: Files::new(dir, settings.file_bytes, settings.total_bytes),
            keeps_salt: settings.salt.is_none(),
            salt: settings.salt.as_ref().map(|salt| Salt::configured(salt.expose())),
            compressor,
            block_tokens,
            lines: Vec::new(),
            records: 0,
            due: None,
            retry_at: None,
            is_ready: false,
            problem,
            metrics,
            queued_bytes,
        })
    }

    /// Writes until all senders are dropped.
    pub(super) fn run(mut self, queue: &Receiver<Message>) {
        self.prepare();
        loop {
            let next = self.due.or(self.retry_at.filter(|_| !self.is_ready));
            let wait = next.map_or(Duration::MAX, |next| next.saturating_duration_since(Instant::now()));
            match queue.recv_timeout(wait) {
                Ok(Message::Entry(entry)) => {
                    self.queued_bytes.fetch_sub(entry.bytes(), Ordering::Relaxed);
                    self.append_entry(&entry);
                }
                Ok(Message::Flush(done)) => {
                    self.write();
                    let _ = done.send(());
                }
                Err(RecvTimeoutError::Timeout) if self.due.is_none() => self.prepare(),
                Err(RecvTimeoutError::Timeout) => self.write(),
                Err(RecvTimeoutError::Disconnected) => return self.write(),
            }
        }
    }

    /// Makes the directory and its salt: one that cannot be written is found before the first request.
    fn prepare(&mut self) {
        match self.files.make_dir().and_then(|()| self.salt()) {
            Ok(_) => self.succeeded(),
            Err(error) => self.failed(&error),
        }
    }

    fn append_entry(&mut self, entry: &Entry) {
        if self.retry_at.is_some_and(|at| Instant::now() < at) {
            self.metrics.log_dropped("disk", 1);
            return;
        }
        let line = self.salt().map(|salt| entry.logged(&salt));
        self.records += 1;
        match line.and_then(|line| push_line(&line, &mut self.lines)) {
            Ok(()) => {
                self.due.get_or_insert_with(|| Instant::now() + FLUSH_INTERVAL);
                if self.lines.len() >= FRAME_BYTES {
                    self.write();
                }
            }
            Err(error) => self.failed(&error),
        }
    }

    /// Returns the salt. Reads or creates it before the first line.
    fn salt(&mut self) -> io::Result<Salt> {
        if let Some(salt) = &self.salt {
            return Ok(salt.clone());
        }
        self.files.make_dir()?;
        let salt = Salt::of_dir(self.files.dir())?;
        self.salt = Some(salt.clone());
        Ok(salt)
    }

    /// Writes the collected lines as one frame.
    fn write(&mut self) {
        self.due = None;
        if self.records == 0 {
            return;
        }
        match self.try_write() {
            Ok(bytes) => {
                self.metrics.decision_log_records.inc_by(self.records);
                self.metrics.decision_log_bytes.inc_by(bytes);
                self.clear();
                self.succeeded();
            }
            Err(error) => self.failed(&error),
        }
    }

    fn try_write(&mut self) -> io::Result<u64> {
        let frame = self.compressor.compress(&self.lines)?;
        if self.files.needs_new(frame.len()) {
            self.files.make_dir()?;
            if let Some(salt) = self.salt.as_ref().filter(|_| self.keeps_salt) {
                salt.keep(self.files.dir())?;
            }
            let header = self.header()?;
            self.files.begin(&header)?;
        }
        self.files.append(&frame)?;
        Ok(frame.len() as u64)
    }

    /// Returns the first frame of a file.
    fn header(&mut self) -> io::Result<Vec<u8>> {
        let header = FileHeader {
            log: LOG_NAME.to_owned(),
            version: LOG_VERSION,
            block_tokens: self.block_tokens,
            started_at_ms: unix_ms(),
            gateway: VERSION.to_owned(),
        };
        let mut line = Vec::new();
        push_line(&header, &mut line)?;
        self.compressor.compress(&line)
    }

    fn succeeded(&mut self) {
        self.is_ready = true;
        if self.retry_at.take().is_some() {
            self.problem.store(None);
            tracing::info!(dir = %self.files.dir().display(), "decision log is written again");
        }
    }

    /// Drops the collected lines. Logs only the first of consecutive failures.
    fn failed(&mut self, error: &io::Error) {
        self.metrics.log_dropped("disk", self.records);
        self.clear();
        let why = format!("the decision log in {} cannot be written: {error}", self.files.dir().display());
        self.problem.store(Some(Arc::new(why)));
        if self.retry_at.replace(Instant::now() + RETRY_INTERVAL).is_none() {
            tracing::warn!(
                dir = %self.files.dir().display(),
                %error,
                "decision log cannot be written: records are dropped until it can; requests are not affected"
            );
        }
    }

    fn clear(&mut self) {
        self.lines.clear();
        self.records = 0;
        self.due = None;
    }
}

fn push_line(value: &impl Serialize, lines: &mut Vec<u8>) -> io::Result<()> {
    serde_json::to_writer(&mut *lines, value)?;
    lines.push(b'\n');
    Ok(())
}
