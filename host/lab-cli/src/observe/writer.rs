//! Writes the trace: a line for each request, without its text, up to a limit of bytes.

use std::{
    collections::{BTreeSet, HashMap},
    fs::OpenOptions,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use parking_lot::Mutex;
use pointsman_lab::{MAX_LINE, MAX_TOKENS, MAX_TURNS, Trace, TraceRequest};
use tokio::{
    sync::mpsc,
    time::{Duration, Instant},
};

use super::{
    counts::{Counts, Missed},
    intake::Copied,
    line_file::{LineFile, Lost},
    request::{Kept, Measure},
    tracker::Tracker,
};

/// How often lines reach the file, while requests arrive.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
/// Output tokens of a request, as long as the engines reported none.
const DEFAULT_OUTPUT: u32 = 128;
/// Model of requests for one that no engine reports.
const OTHER: &str = "other";
/// Maximum number of requests: about 100 bytes of memory each with its session, and those of the comparison.
const MAX_REQUESTS: usize = 4_000_000;

/// What the engines reported, for the requests to come.
#[derive(Debug, Default)]
pub(super) struct Reported {
    generated_tokens: f64,
    first_tokens: f64,
    /// Names of the models. A request for another one gets the model `other`: a name may be any text.
    pub(super) models: BTreeSet<String>,
}

impl Reported {
    /// Adds tokens that an engine generated, and the number of requests that got their first one.
    pub(super) fn outputs(&mut self, generated_tokens: f64, first_tokens: f64) {
        self.generated_tokens += generated_tokens;
        self.first_tokens += first_tokens;
    }

    /// Returns the mean output tokens of a request; `None` when the engines did not report it.
    pub(super) fn mean_output(&self) -> Option<f64> {
        let mean = self.generated_tokens / self.first_tokens;
        (mean >= 1.0 && mean.is_finite()).then_some(mean)
    }
}

/// A request of the trace, as far as it is needed at the end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Written {
    /// Number of the copy.
    pub(super) number: u64,
    /// Time of arrival, from the start of the observation.
    pub(super) at: Duration,
    pub(super) input_tokens: u32,
    pub(super) max_tokens: Option<u32>,
    /// Number of answers that the client asks for. The trace has one of them.
    pub(super) sequences: u32,
    pub(super) is_estimated: bool,
}

/// What a writer shares with others.
pub(super) struct Sources {
    pub(super) measure: Arc<Measure>,
    pub(super) counts: Arc<Counts>,
    pub(super) reported: Arc<Mutex<Reported>>,
    /// Without KV events there is none.
    pub(super) tracker: Option<Arc<Tracker>>,
}

/// Writes requests to a file.
pub(super) struct Writer {
    out: LineFile,
    path: PathBuf,
    /// Bytes that may still be written.
    left: u64,
    sources: Sources,
    written: Vec<Written>,
    /// Requests of each session. There are fewer sessions than requests.
    turns: HashMap<String, u32>,
}

impl Writer {
    /// Begins a trace of at most `limit` bytes.
    ///
    /// # Errors
    /// The file exists or cannot be created.
    pub(super) fn new(path: &Path, limit: u64, sources: Sources) -> anyhow::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let file = file
            .with_context(|| format!("cannot create {}; give a new directory with --out", path.display()))?;
        Ok(Self {
            out: LineFile::new(file),
            path: path.to_owned(),
            left: limit,
            sources,
            written: Vec::new(),
            turns: HashMap::new(),
        })
    }

    /// Writes copies until the last sender is gone. Returns the requests in the order of the file.
    pub(super) fn run(mut self, mut copies: mpsc::Receiver<Copied>) -> Vec<Written> {
        let mut flushed = Instant::now();
        while let Some(copy) = copies.blocking_recv() {
            let number = copy.number;
            match self.measured(copy) {
                Ok(kept) => self.keep(number, kept),
                Err(why) => self.sources.counts.miss(why),
            }
            if flushed.elapsed() >= FLUSH_INTERVAL {
                self.flush();
                flushed = Instant::now();
            }
        }
        self.flush();
        self.written
    }

    /// Measures a copy, and gives its memory back.
    fn measured(&self, copy: Copied) -> Result<Kept, Missed> {
        let Copied { number, arrived, body, .. } = copy;
        self.sources.measure.body(arrived, body, number)
    }

    fn keep(&mut self, number: u64, kept: Kept) {
        let Kept { mut request, model, max_tokens, sequences, is_estimated, hashes } = kept;
        request.session = request.session.filter(|session| {
            let turns = self.turns.entry(session.clone()).or_default();
            *turns = turns.saturating_add(1);
            *turns <= MAX_TURNS
        });
        {
            let reported = self.sources.reported.lock();
            request.output_tokens = output_tokens(max_tokens, reported.mean_output());
            request.model = Some(if reported.models.contains(&model) { model } else { OTHER.to_owned() });
        }
        let (at, input_tokens) = (request.at, request.input_tokens);
        let of = Written { number, at, input_tokens, max_tokens, sequences, is_estimated };
        let mut line = Vec::new();
        let wrote = write_line(request, self.sources.measure.block_tokens, &mut line);
        let length = line.len() as u64;
        if length >= MAX_LINE || input_tokens > MAX_TOKENS {
            return self.sources.counts.miss(Missed::TooLong);
        }
        if self.written.len() >= MAX_REQUESTS || length > self.left || wrote.is_err() {
            // A shorter request may still fit, but a trace without the long ones is not that of the traffic.
            self.left = 0;
            return self.sources.counts.miss(Missed::Full);
        }
        self.left -= length;
        self.written.push(of);
        if let Some(tracker) = &self.sources.tracker {
            tracker.add(number, &hashes);
        }
        let added = self.out.add(&line);
        self.end_trace(added);
    }

    fn flush(&mut self) {
        let flushed = self.out.flush();
        self.end_trace(flushed);
    }

    /// Counts lines that could not be written, and ends the trace.
    fn end_trace(&mut self, result: Result<(), Lost>) {
        let Err(Lost { lines, error }) = result else { return };
        tracing::warn!(path = %self.path.display(), %error, lines, "trace not writable, it ends");
        self.left = 0;
        self.written.truncate(self.written.len().saturating_sub(lines));
        for _ in 0..lines {
            self.sources.counts.miss(Missed::Full);
        }
    }
}

/// Returns the output tokens that a request is assumed to have.
pub(super) fn output_tokens(max_tokens: Option<u32>, mean: Option<f64>) -> u32 {
    let mean = mean.map_or(DEFAULT_OUTPUT, |mean| mean.round() as u32);
    max_tokens.unwrap_or(u32::MAX).min(mean).max(1)
}

fn write_line(request: TraceRequest, block_tokens: u32, out: &mut Vec<u8>) -> std::io::Result<()> {
    Trace { block_tokens, requests: vec![request], ..Trace::default() }.write_mooncake(out)
}
