//! A guest's lines in the host's log: by `log`, and by what it prints.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use pointsman_routing::scope;
use wasmtime_wasi::{
    cli::{IsTerminal, StdoutStream},
    p2::{OutputStream, Pollable, StreamResult},
};

use super::Inputs;
use crate::log_limit::LogLimit;

/// Lines a guest may log in one call; the rest is dropped.
const LINES_PER_CALL: u32 = 8;
/// Characters of a line.
const LINE: usize = 512;

/// A guest's lines in the host's log.
#[derive(Clone)]
pub(super) struct GuestLog {
    policy: Arc<str>,
    left: Arc<AtomicU64>,
    limit: Arc<LogLimit>,
    inputs: Arc<Inputs>,
}

impl GuestLog {
    pub(super) fn new(policy: Arc<str>, limit: Arc<LogLimit>, inputs: Arc<Inputs>) -> Self {
        Self { policy, left: Arc::new(AtomicU64::new(u64::from(LINES_PER_CALL))), limit, inputs }
    }

    /// The next call may say as much as the one before.
    pub(super) fn begin(&self) {
        self.left.store(u64::from(LINES_PER_CALL), Ordering::Relaxed);
    }

    pub(super) fn write(&self, level: tracing::Level, message: &str) {
        let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left.is_err() || !self.limit.allows() {
            return;
        }
        // The seed is in the receipt of the decision that the line belongs to.
        let seed = self.inputs.seed.load(Ordering::Relaxed);
        let generation = scope::generation().map(|generation| generation.0);
        let line: String = message.trim_end().chars().take(LINE).collect();
        let policy = &*self.policy;
        scope::with_request(|request| match level {
            tracing::Level::ERROR => {
                tracing::error!(target: "pointsman::guest", policy, generation, request, seed, "{line}");
            }
            tracing::Level::WARN => {
                tracing::warn!(target: "pointsman::guest", policy, generation, request, seed, "{line}");
            }
            tracing::Level::INFO => {
                tracing::info!(target: "pointsman::guest", policy, generation, request, seed, "{line}");
            }
            _ => tracing::debug!(target: "pointsman::guest", policy, generation, request, seed, "{line}"),
        });
    }
}

impl IsTerminal for GuestLog {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for GuestLog {
    fn async_stream(&self) -> Box<dyn tokio::io::AsyncWrite + Send + Sync> {
        Box::new(tokio::io::sink())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(Lines { log: self.clone(), rest: Vec::new() })
    }
}

/// What a guest prints, line by line: many print a line in pieces.
struct Lines {
    log: GuestLog,
    /// The line that has no end yet.
    rest: Vec<u8>,
}

impl OutputStream for Lines {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = (LINE * 4).saturating_sub(self.rest.len());
            self.rest.extend(piece.iter().take(room));
            if piece.ends_with(b"\n") {
                self.log.write(tracing::Level::INFO, &String::from_utf8_lossy(&self.rest));
                self.rest.clear();
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(64 * 1024)
    }
}

#[async_trait::async_trait]
impl Pollable for Lines {
    async fn ready(&mut self) {}
}
