//! Request traces: arrival times, lengths and the identity of prompt blocks. A trace contains no text.

use std::time::Duration;

use clap::ValueEnum;
use serde::de::DeserializeOwned;

mod azure;
mod block_ids;
mod burst_gpt;
mod csv;
mod date_time;
mod dropped;
mod endless_cache;
mod json;
mod models;
mod mooncake;
mod mooncake_delta;
mod open;
mod order;
mod qwen;
mod read;
mod sessions;

pub use block_ids::BlockIds;
use dropped::Dropped;
pub(crate) use endless_cache::endless_cache_hit_rate;
pub(crate) use order::Order;
pub use sessions::MAX_TURNS;
use sessions::TurnForm;

/// Maximum length of a line, bytes. The line of a prompt of a million tokens has 20 KB.
pub const MAX_LINE: u64 = 16 * 1024 * 1024;
/// Longest time between two requests of a trace, and longest pause in a session, seconds: a year.
const MAX_S: f64 = 366.0 * 86_400.0;
/// Latest timestamp, milliseconds: the year 2286 after the Unix epoch.
const MAX_TIMESTAMP_MS: f64 = 1e13;
/// Maximum number of tokens of a prompt or an answer.
pub const MAX_TOKENS: u32 = 16 * 1024 * 1024;

/// One request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceRequest {
    /// Time of arrival, from the start of the trace. A request that waits for an answer may arrive later; see
    /// [`RunOptions::fixed_schedule`](crate::RunOptions::fixed_schedule).
    pub at: Duration,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Output tokens.
    pub output_tokens: u32,
    /// Id of each block of the prompt, with or without a partial last block. Requests with equal first ids
    /// share a prefix. If empty, the request shares no block.
    pub blocks: BlockIds,
    /// Session that the request belongs to.
    pub session: Option<String>,
    /// Pause between the end of the session's previous request and this one. For the first request of a
    /// forked session, the pause between the end of the parent's request and this one.
    pub delay: Option<Duration>,
    /// Session from which this one was forked, at the newest request of that session. Only a session's first
    /// request has a parent.
    pub parent: Option<String>,
    /// Whether the request also waits for the sessions that were forked after its session's previous request.
    pub join: bool,
    /// Model.
    pub model: Option<String>,
    /// Salted hash of the tenant.
    pub tenant_hash: Option<u64>,
    /// Priority; higher is served first.
    pub priority: f32,
    /// Targets of the request's client.
    pub targets: Targets,
}

/// Latencies that a client asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Targets {
    /// Time to first token.
    pub ttft: Option<Duration>,
    /// Inter-token latency.
    pub itl: Option<Duration>,
}

impl Targets {
    /// Returns the targets for TTFT and ITL in microseconds.
    pub(crate) fn micros(self) -> (Option<u32>, Option<u32>) {
        let micros = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        (self.ttft.map(micros), self.itl.map(micros))
    }
}

/// A trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Name in reports: that of the file or of the generator.
    pub name: String,
    /// Number of tokens in a block of [`TraceRequest::blocks`].
    pub block_tokens: u32,
    /// Requests in the order of their arrival.
    pub requests: Vec<TraceRequest>,
    /// Format in which the file was read.
    pub format: Option<TraceFormat>,
    /// Number of lines that could not be read and were skipped.
    pub skipped: u64,
    /// What a reader of results has to know about the file: requests that it left out, and times that look
    /// wrong.
    pub notes: Vec<String>,
}

/// Format of a trace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    /// Mooncake's JSONL, with or without the further keys that `trace export` writes.
    ///
    /// Its keys are `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; also `session_id`, `delay`
    /// (ms), `parent_session_id`, `join`, `model`, `tenant_hash`, `priority`, `ttft_target_ms`,
    /// `itl_target_ms`.
    Mooncake,
    /// Mooncake's JSONL in which a later turn has only what it adds to its session, as in AIPerf's agentic
    /// datasets.
    ///
    /// `input_length` and `hash_ids` of a later turn cover what follows the prompt and the answer before it.
    MooncakeDelta,
    /// Qwen's usage traces, JSONL.
    ///
    /// Their keys are `chat_id`, `parent_chat_id`, `timestamp` (s), `input_length`, `output_length`, `type`,
    /// `turn`, `hash_ids` of 16 tokens.
    Qwen,
    /// Azure's LLM inference traces, CSV with the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`.
    Azure,
    /// BurstGPT, CSV with the columns `Timestamp` (s), `Request tokens` and `Response tokens`; also `Model`
    /// and `Session ID`.
    #[value(name = "burstgpt")]
    BurstGpt,
}

/// Reason for which a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("{file}: {error}")]
    Io {
        /// The file.
        file: String,
        /// The cause.
        error: std::io::Error,
    },
    /// A line is malformed without which the rest of the file cannot be read, such as a header.
    #[error("{file}, line {line}: {problem}")]
    Unusable {
        /// The file.
        file: String,
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong with the line.
        problem: String,
    },
    /// A line is malformed.
    #[error("{file}, line {line}: {problem}{}", if problem.contains("--") { "" } else { "; --skip-bad leaves such lines out" })]
    Line {
        /// The file.
        file: String,
        /// Number of the line, from 1.
        line: u64,
        /// The field and what is wrong with it.
        problem: String,
    },
    /// The lines of a session do not make prompts.
    #[error(
        "{file}: read as mooncake-delta, in which the prompts of a session grow: {problem}; --skip-bad leaves such \
         requests out, and --format mooncake reads whole prompts"
    )]
    Turns {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// The trace has no request.
    #[error("{file}: contains no request{why}")]
    Empty {
        /// The file.
        file: String,
        /// The lines that were left out, and the first problem.
        why: String,
    },
    /// The requests are too far apart.
    #[error(
        "{file}: the last request is {days:.0} days after the first; expected at most 366: check that its times are in {unit}"
    )]
    Span {
        /// The file.
        file: String,
        /// Time between the first and the last request.
        days: f64,
        /// Unit of the format's times.
        unit: &'static str,
    },
}

/// Reads the lines of one format, in the order of the file.
trait ReadLines {
    /// Reads one line. Returns `None` if the line is a header.
    fn line(&mut self, text: &str, block_tokens: u32) -> Result<Option<TraceRequest>, String>;

    /// Completes the requests after the last line was read. They are the results of [`ReadLines::line`], in
    /// order.
    fn finish(&mut self, _requests: &mut [TraceRequest]) {}

    /// Returns the fields without effect, if the reader looks for them.
    fn dropped(&self) -> Dropped {
        Dropped::default()
    }

    /// Returns the number of turns whose time was before that of an earlier turn of their session.
    fn moved(&self) -> u64 {
        0
    }

    /// Returns what the lines of later turns have, as far as it is not the format that says so.
    fn turn_form(&self) -> TurnForm {
        TurnForm::Whole
    }
}

impl TraceFormat {
    /// Guesses the format from the first line. Whether the lines of sessions are of
    /// [`Self::MooncakeDelta`] may show in later lines.
    fn of(first: &str) -> Option<Self> {
        let is_json = first.trim_start().starts_with('{');
        let has = |name: &str| first.to_lowercase().contains(name);
        if is_json && first.contains("\"chat_id\"") {
            Some(Self::Qwen)
        } else if is_json && first.contains("\"group_id\"") {
            Some(Self::MooncakeDelta)
        } else if is_json {
            Some(Self::Mooncake)
        } else if has("contexttokens") {
            Some(Self::Azure)
        } else {
            (has("timestamp") && has("request tokens")).then_some(Self::BurstGpt)
        }
    }

    /// Returns the name that `--format` has for it.
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn reader(self) -> Box<dyn ReadLines> {
        match self {
            Self::Mooncake => Box::new(mooncake::Reader::default()),
            Self::MooncakeDelta => Box::new(mooncake_delta::Reader::new()),
            Self::Qwen => Box::new(qwen::Reader::default()),
            Self::Azure => Box::new(csv::Reader::new(&azure::COLUMNS, &[], azure::request)),
            Self::BurstGpt => {
                let (needed, others) = (&burst_gpt::COLUMNS, &burst_gpt::OTHER_COLUMNS);
                Box::new(csv::Reader::new(needed, others, burst_gpt::request))
            }
        }
    }

    /// Returns the fields of its lines of JSON.
    fn fields(self) -> &'static [&'static str] {
        match self {
            Self::Mooncake | Self::MooncakeDelta => &mooncake::FIELDS,
            Self::Qwen => &qwen::FIELDS,
            Self::Azure | Self::BurstGpt => &[],
        }
    }

    fn is_csv(self) -> bool {
        matches!(self, Self::Azure | Self::BurstGpt)
    }

    /// Returns the unit of the times in a file.
    fn unit(self) -> &'static str {
        match self {
            Self::Mooncake | Self::MooncakeDelta => "milliseconds",
            Self::Qwen | Self::BurstGpt => "seconds",
            Self::Azure => "the form 2023-11-16 18:15:46.68",
        }
    }

    /// Returns the tokens of a block in `hash_ids` for this format, unless `--trace-block` sets another size.
    fn block_tokens(self) -> u32 {
        if self == Self::Qwen { 16 } else { 512 }
    }
}

impl Trace {
    /// Sorts the requests by arrival, and moves all times so that the first request arrives at 0.
    pub(crate) fn sort(&mut self) {
        self.requests.sort_by_key(|request| request.at);
        let start = self.requests.first().map_or(Duration::ZERO, |request| request.at);
        self.requests.iter_mut().for_each(|request| request.at -= start);
    }

    /// Keeps the first `count` requests.
    #[must_use]
    pub fn truncated(mut self, count: usize) -> Self {
        self.requests.truncate(count);
        self
    }

    /// Writes the trace as Mooncake's JSONL.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn write_mooncake(&self, out: impl std::io::Write) -> std::io::Result<()> {
        mooncake::write(self, out)
    }
}

/// Reads a line of JSON. An error names the field.
pub(crate) fn parse_line<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    // serde would read the elements of a list as the fields in their order.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err("expected a JSON object".to_owned());
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let (path, problem) = (error.path().to_string(), error.inner().to_string());
        let problem = problem.replace(" at line 1 column ", " at column ");
        if error.inner().is_eof() {
            return format!("the JSON object is cut off: {problem}");
        }
        if path == "." { problem } else { format!("`{path}`: {problem}") }
    })?;
    json.end().map_err(|_| "continues after the JSON object".to_owned())?;
    Ok(value)
}

/// Checks a number of tokens.
fn tokens(field: &str, value: u64, least: u32) -> Result<u32, String> {
    let tokens = u32::try_from(value).ok().filter(|tokens| (least..=MAX_TOKENS).contains(tokens));
    tokens.ok_or_else(|| format!("`{field}` is {value}; expected {least} to {MAX_TOKENS}"))
}

/// Reads a point in time in milliseconds, from the start of the trace or from the Unix epoch.
fn timestamp_ms(field: &str, value: f64) -> Result<Duration, String> {
    if (0.0..=MAX_TIMESTAMP_MS).contains(&value) {
        Ok(Duration::from_nanos((value * 1e6).round() as u64))
    } else {
        Err(format!("`{field}` is {value}; expected milliseconds from 0 to {MAX_TIMESTAMP_MS:e}"))
    }
}

/// Checks a length of time in milliseconds.
fn milliseconds(field: &str, value: f64) -> Result<Duration, String> {
    let limit = MAX_S * 1e3;
    if (0.0..=limit).contains(&value) {
        Ok(Duration::from_nanos((value * 1e6).round() as u64))
    } else {
        Err(format!("`{field}` is {value}; expected milliseconds from 0 to {limit}"))
    }
}

/// Checks that a prompt has an id for each of its blocks, for each of its whole blocks, or no id.
fn check_block_count(ids: &[u64], input_tokens: u32, block_tokens: u32) -> Result<(), String> {
    let (found, expected) = (ids.len(), input_tokens.div_ceil(block_tokens.max(1)) as usize);
    if [0, expected, (input_tokens / block_tokens.max(1)) as usize].contains(&found) {
        return Ok(());
    }
    Err(format!(
        "`hash_ids` has {found} ids; {input_tokens} tokens in blocks of {block_tokens} have {expected}; give the size of \
         the trace's blocks with --trace-block"
    ))
}

/// Returns how long an engine takes for a request without other load, at the speeds with which AIPerf
/// estimates the length of sessions. Formats that do not record the ends of requests get their times and
/// pauses from it.
pub(crate) fn nominal_time(new_tokens: u32, output_tokens: u32) -> Duration {
    const PREFILL_TOKENS_PER_S: f64 = 20_000.0;
    const DECODE_TOKENS_PER_S: f64 = 60.0;
    let seconds =
        f64::from(new_tokens) / PREFILL_TOKENS_PER_S + f64::from(output_tokens) / DECODE_TOKENS_PER_S;
    Duration::from_millis((seconds * 1e3).round() as u64)
}

#[cfg(test)]
mod tests;
