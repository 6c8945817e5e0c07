//! The log of a process that runs one test.

use std::{io, sync::Arc};

use parking_lot::Mutex;
use serde_json::Value;
use tracing_subscriber::{EnvFilter, fmt};

/// Collects the log lines of this process.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Begins the log.
    #[must_use]
    pub fn start() -> Self {
        Self::with_levels("info,pointsman_gateway::telemetry::account=debug")
    }

    /// Begins the log with these levels.
    #[must_use]
    pub fn with_levels(levels: &str) -> Self {
        let log = Self::default();
        let writer = log.clone();
        let lines = fmt().with_ansi(false).with_env_filter(EnvFilter::new(levels));
        lines.with_writer(move || writer.clone()).init();
        log
    }

    /// Begins the log, with a JSON object on each line.
    #[must_use]
    pub fn json() -> Self {
        let log = Self::default();
        let writer = log.clone();
        fmt().json().with_writer(move || writer.clone()).init();
        log
    }

    /// Returns the lines so far.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }

    /// Returns the objects that were logged since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<Value> {
        let lines = std::mem::take(&mut *self.0.lock());
        serde_json::Deserializer::from_slice(&lines).into_iter().filter_map(Result::ok).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
