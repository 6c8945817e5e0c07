//! Arguments that say how to read a trace, and which of its requests to use.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use clap::Args;

use super::progress::Progress;
use crate::trace::{Trace, TraceFormat};

#[derive(Debug, Args)]
pub(super) struct TraceArgs {
    /// Format of the trace [default: found from its lines].
    #[arg(long)]
    format: Option<TraceFormat>,
    /// Number of tokens in a block of the trace's `hash_ids` [default: 512; 16 for Qwen's traces].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    trace_block: Option<u32>,
    /// Skip malformed lines, and count them.
    #[arg(long)]
    skip_bad: bool,
    /// Use only requests of this model.
    #[arg(long)]
    model: Option<String>,
}

impl TraceArgs {
    /// Reads the first `limit` requests of a trace that these arguments select. Shows the progress.
    pub(super) fn read(&self, path: &Path, limit: Option<usize>) -> anyhow::Result<Trace> {
        let bytes: Arc<AtomicU64> = Arc::default();
        let done = Arc::clone(&bytes);
        let total = path.metadata().map_or(0, |file| file.len());
        let name = format!("reading {}", path.display());
        // A pipe has no length.
        let shown = (total > 0).then(|| Progress::start(move || done.load(Relaxed), total, name, "bytes"));
        let trace = Trace::read_counting(path, self.format, self.trace_block, self.skip_bad, &bytes);
        drop(shown);
        let trace = trace?;
        let trace = match &self.model {
            Some(model) => trace.of_model(model).map_err(anyhow::Error::msg)?,
            None => trace,
        };
        let mut trace = trace.truncated(limit.unwrap_or(usize::MAX));
        trace.note_models();
        Ok(trace)
    }
}
