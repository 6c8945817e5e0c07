//! Reads a trace file line by line.

use std::{
    io::{BufRead, Read as _},
    path::Path,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use crate::arrivals::rate;

use super::{
    MAX_LINE, MAX_S, ReadLines, Trace, TraceError, TraceFormat, TurnForm, dropped::Dropped, mooncake_delta,
    open::open,
};

/// Problem of a first line that is of no known format.
const UNKNOWN_FORMAT: &str =
    "no known format: expected JSON lines, or the header of Azure's or BurstGPT's CSV; name it with --format";
/// Added to the problem of a first line of JSON whose format was guessed.
const READ_AS_MOONCAKE: &str = "; it was read as Mooncake's JSON lines, which need `timestamp`, `input_length` and \
                                `output_length`; name another format with --format";
/// Keys of JSON lines that have texts in place of lengths: those of AIPerf, LMCache, ShareGPT, datasets of
/// `vllm bench`, OpenAI's batches, WildChat, LMSYS-Chat-1M and SWE-agent.
const TEXT_KEYS: [&str; 11] = [
    "text_input",
    "text",
    "texts",
    "turns",
    "messages",
    "conversations",
    "conversation",
    "trajectory",
    "prompt",
    "input",
    "body",
];
/// Other names of the lengths of a prompt and its answer: those of Dynamo, OpenAI's usage, ServeGen and
/// OpenTelemetry.
const OTHER_LENGTHS: [[&str; 2]; 4] = [
    ["isl", "osl"],
    ["prompt_tokens", "completion_tokens"],
    ["input_tokens", "output_tokens"],
    ["gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"],
];
/// Columns of lengths in CSV files that need another header: Splitwise's and Vidur's.
const OTHER_COLUMNS: [[&str; 3]; 2] = [
    ["arrival_timestamp", "prompt_size", "token_size"],
    ["arrived_at", "num_prefill_tokens", "num_decode_tokens"],
];
/// Note about sessions whose lines may have whole prompts or additions.
const UNCLEAR_TURNS: &str = "most later turns of the trace's sessions are shorter than a prompt before them, and do not \
                             begin like it; they were read as whole prompts: if a line has only what its turn adds, give \
                             --format mooncake-delta, else --format mooncake";
/// The mark with which some programs begin a file in UTF-8.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// Rate above which times are probably seconds that were read as milliseconds, requests a second.
const IMPLAUSIBLE_RATE: f64 = 100.0;
/// Rates below which they are probably in a smaller unit, requests a second: in formats in milliseconds, and
/// in those in seconds, whose files often have milliseconds.
const IMPLAUSIBLY_LOW_RATES: [f64; 2] = [0.001, 0.05];
/// The year 2000. A trace that begins later counts from the Unix epoch in the unit of its format, or has
/// dates: its unit is in no doubt.
const CERTAIN_EPOCH: Duration = Duration::from_secs(946_684_800);
/// A start that is seconds since the Unix epoch, from the year 2001 to 2096, if it is read as milliseconds.
const EPOCH_IN_SECONDS: std::ops::Range<Duration> =
    Duration::from_millis(1_000_000_000)..Duration::from_millis(4_000_000_000);

/// Numbers of requests with unusual answers or times.
#[derive(Default)]
struct Unusual {
    /// Failed requests, which are left out.
    failed: u64,
    /// Requests whose answer has no token.
    empty: u64,
    /// Turns of a session whose time is before that of an earlier turn.
    moved: u64,
}

impl Trace {
    /// Reads a trace. `block_tokens` is the number of tokens in a block of `hash_ids`; `None` means 512, or
    /// 16 for Qwen's traces. With `skip_bad`, malformed lines are skipped and counted.
    ///
    /// # Errors
    /// [`TraceError`] names the file, the line and the field.
    pub fn read(
        path: &Path,
        format: Option<TraceFormat>,
        block_tokens: Option<u32>,
        skip_bad: bool,
    ) -> Result<Self, TraceError> {
        Self::read_counting(path, format, block_tokens, skip_bad, &Arc::default())
    }

    /// Like [`Self::read`]. `bytes` counts the bytes of the file that were read so far.
    pub(crate) fn read_counting(
        path: &Path,
        format: Option<TraceFormat>,
        block_tokens: Option<u32>,
        skip_bad: bool,
        bytes: &Arc<AtomicU64>,
    ) -> Result<Self, TraceError> {
        let file = path.display().to_string();
        let opened = open(path, bytes).map_err(|error| TraceError::Io { file: file.clone(), error })?;
        let name = path.file_stem().map_or_else(|| file.clone(), |stem| stem.to_string_lossy().into_owned());
        Self::parse(opened, &file, name, format, block_tokens, skip_bad)
    }

    pub(super) fn parse(
        mut input: impl BufRead,
        file: &str,
        name: String,
        format: Option<TraceFormat>,
        block_tokens: Option<u32>,
        skip_bad: bool,
    ) -> Result<Self, TraceError> {
        let trace = Self { name, ..Self::default() };
        let (unusual, dropped, first_problem) = (Unusual::default(), Dropped::default(), None);
        let mut parser = Parser {
            file,
            format,
            block_tokens,
            skip_bad,
            trace,
            reader: None,
            unusual,
            dropped,
            first_problem,
        };
        let mut bytes = Vec::new();
        for line in 1_u64.. {
            bytes.clear();
            let read = input.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes);
            let length = read.map_err(|error| TraceError::Io { file: file.to_owned(), error })?;
            if length == 0 {
                break;
            }
            match text(&bytes, line) {
                Ok("") => {}
                text => parser.line(line, text)?,
            }
        }
        parser.finish()
    }
}

impl Trace {
    /// Makes whole prompts of requests that have only what their turn adds. With `skip_bad`, requests that
    /// cannot have such a prompt are skipped and counted.
    fn accumulate(&mut self, file: &str, skip_bad: bool) -> Result<(), TraceError> {
        let before = self.requests.len();
        let Some(problem) = mooncake_delta::accumulate(&mut self.requests, self.block_tokens) else {
            return Ok(());
        };
        let file = file.to_owned();
        if !skip_bad {
            return Err(TraceError::Turns { file, problem });
        }
        if self.requests.is_empty() {
            let why = format!(": read as mooncake-delta, all requests are malformed, the first: {problem}");
            return Err(TraceError::Empty { file, why });
        }
        self.skipped += (before - self.requests.len()) as u64;
        Ok(())
    }
}

/// A file of which some lines were read.
struct Parser<'a> {
    file: &'a str,
    /// Format that the caller named.
    format: Option<TraceFormat>,
    block_tokens: Option<u32>,
    skip_bad: bool,
    trace: Trace,
    reader: Option<(TraceFormat, Box<dyn ReadLines>)>,
    unusual: Unusual,
    dropped: Dropped,
    /// Number and problem of the first line that was skipped.
    first_problem: Option<(u64, String)>,
}

impl Parser<'_> {
    /// Reads a line; `text` is an error if it has none.
    fn line(&mut self, line: u64, text: Result<&str, String>) -> Result<(), TraceError> {
        let unusable =
            |problem: String| Err(TraceError::Unusable { file: self.file.to_owned(), line, problem });
        let is_first = self.reader.is_none();
        if is_first && let Some(problem) = text.as_ref().ok().and_then(|text| not_json_lines(text)) {
            return unusable(problem);
        }
        let (format, reader) = match &mut self.reader {
            Some(reader) => reader,
            None => {
                let guessed = || text.as_ref().ok().and_then(|text| TraceFormat::of(text));
                let Some(format) = self.format.or_else(guessed) else {
                    let problem = || text.as_ref().map_or_else(String::clone, |text| unknown_format(text));
                    return unusable(problem());
                };
                self.trace.block_tokens = self.block_tokens.unwrap_or_else(|| format.block_tokens());
                self.reader.insert((format, format.reader()))
            }
        };
        let content = text.as_ref().ok().copied();
        match text.and_then(|text| reader.line(text, self.trace.block_tokens)) {
            Ok(None) => {}
            Ok(Some(request)) if request.output_tokens == 0 && *format == TraceFormat::BurstGpt => {
                self.unusual.failed += 1;
            }
            Ok(Some(mut request)) => {
                self.unusual.empty += u64::from(request.output_tokens == 0);
                request.output_tokens = request.output_tokens.max(1);
                self.trace.requests.push(request);
                if let Some(text) = content.filter(|_| !format.is_csv()) {
                    self.dropped.look_at(text, format.fields());
                }
            }
            // Without its header, no line of the file can be read.
            Err(problem) if is_first && format.is_csv() => return unusable(problem),
            Err(mut problem) => {
                let is_guessed = is_first && self.format.is_none() && *format == TraceFormat::Mooncake;
                if is_guessed && problem.starts_with("missing field") {
                    problem.push_str(READ_AS_MOONCAKE);
                    problem.extend(content.and_then(what_lines_have));
                }
                if !self.skip_bad {
                    return Err(TraceError::Line { file: self.file.to_owned(), line, problem });
                }
                self.trace.skipped += 1;
                self.first_problem.get_or_insert((line, problem));
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Trace, TraceError> {
        let (file, mut trace) = (self.file.to_owned(), self.trace);
        let (Some((mut format, mut reader)), false) = (self.reader, trace.requests.is_empty()) else {
            let why = self.unusual.why_empty(trace.skipped, self.first_problem);
            return Err(TraceError::Empty { file, why });
        };
        reader.finish(&mut trace.requests);
        trace.notes = Unusual { moved: reader.moved(), ..self.unusual }.notes();
        let dropped = if format.is_csv() { reader.dropped() } else { self.dropped };
        trace.notes.extend(dropped.notes(format.fields()));
        match reader.turn_form() {
            TurnForm::Addition if self.format.is_none() => {
                trace.accumulate(&file, self.skip_bad)?;
                format = TraceFormat::MooncakeDelta;
            }
            TurnForm::Unclear if self.format.is_none() => trace.notes.push(UNCLEAR_TURNS.to_owned()),
            _ => {}
        }
        trace.format = Some(format);
        if trace.skipped > 0 {
            trace.remove_lost_parents();
        }
        let start = trace.requests.iter().map(|request| request.at).min().unwrap_or_default();
        trace.sort();
        // The times of turns with a `delay` do not come from the file.
        let timed = trace.requests.iter().filter(|request| request.delay.is_none());
        let (count, last) = timed.fold((0, 0.0), |(count, _), one| (count + 1, one.at.as_secs_f64()));
        if last > MAX_S {
            return Err(TraceError::Span { file, days: last / 86_400.0, unit: format.unit() });
        }
        trace.notes.extend(doubtful_unit(format, start, (count, trace.requests.len()), last));
        Ok(trace)
    }
}

/// Returns the problem of a first line that is of no known format, and how to read the file if it has all
/// that is needed.
fn unknown_format(first: &str) -> String {
    let has = |names: &&[&str; 3]| names.iter().all(|name| first.contains(name));
    OTHER_COLUMNS.iter().find(has).map_or_else(
        || UNKNOWN_FORMAT.to_owned(),
        |[at, input, output]| {
            format!(
                "no known format: its columns are read as BurstGPT's, with times in seconds, after `sed \
                 '1s/{at}/Timestamp/;1s/{input}/Request tokens/;1s/{output}/Response tokens/'`"
            )
        },
    )
}

/// Says what lines of JSON without lengths have, and what to do.
fn what_lines_have(line: &str) -> Option<String> {
    let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).ok()?;
    if fields.contains_key("input_lens") {
        return Some(
            ". This is a result of `vllm bench serve`, with all requests in one line: write a line for each, with a time of \
             arrival and its elements of `input_lens` and `output_lens`. It does not say which prompts begin alike"
                .to_owned(),
        );
    }
    if let Some([input, output]) =
        OTHER_LENGTHS.iter().find(|names| names.iter().all(|name| fields.contains_key(*name)))
    {
        return Some(format!(
            ". Write its `{input}` as `input_length` and its `{output}` as `output_length`"
        ));
    }
    let key = TEXT_KEYS.iter().find(|key| fields.contains_key(**key))?;
    Some(format!(
        ". Its lines have texts (`{key}`) and no lengths: count their tokens with the model's tokenizer, and write a \
         number for each block of a prompt into `hash_ids`"
    ))
}

/// Returns the problem of a first line that begins JSON of another form than one object a line.
fn not_json_lines(text: &str) -> Option<String> {
    let (form, way) = match text.trim_start() {
        "{" => ("an indented JSON object", "`jq -c .` writes it as one line"),
        text if text.starts_with('[') => ("a JSON array", "`jq -c '.[]'` writes its elements as lines"),
        _ => return None,
    };
    Some(format!(
        "begins {form}: expected JSON lines, each a request with `timestamp`, `input_length` and `output_length`; {way}. \
         Texts, such as ShareGPT's, have no lengths: count their tokens with the model's tokenizer"
    ))
}

/// Warns when the times are probably in another unit than that of their format: when so many requests without
/// a pause before them arrive in a second, when so few requests of any kind do, or when the first time is
/// one since the epoch in seconds. Sessions that all start together have no rate.
fn doubtful_unit(
    format: TraceFormat,
    start: Duration,
    (starts, requests): (usize, usize),
    seconds: f64,
) -> Option<String> {
    let unit = format.unit();
    let in_milliseconds = unit == TraceFormat::Mooncake.unit();
    if format == TraceFormat::Azure || start >= CERTAIN_EPOCH {
        return None;
    }
    let [low_in_milliseconds, low_in_seconds] = IMPLAUSIBLY_LOW_RATES;
    let low = if in_milliseconds { low_in_milliseconds } else { low_in_seconds };
    let of = |count: usize| rate(count.saturating_sub(1), seconds);
    let arrive = |rate: String| format!("{rate} requests of the trace arrive in a second");
    let (what, advice) = if in_milliseconds && starts > 9 && of(starts) > IMPLAUSIBLE_RATE {
        (arrive(format!("{:.0}", of(starts))), "seconds, multiply them by 1000")
    } else if in_milliseconds && EPOCH_IN_SECONDS.contains(&start) {
        let what = format!("the trace begins at {}", start.as_millis());
        (what, "seconds since the Unix epoch, multiply them by 1000")
    } else if starts > 9 && seconds > 0.0 && of(requests) < low {
        let microseconds = "microseconds, divide them by 1000";
        let advice = if in_milliseconds { microseconds } else { "milliseconds, divide them by 1000" };
        (arrive(format!("{:.5}", of(requests))), advice)
    } else {
        return None;
    };
    Some(format!("{what}: `timestamp` is in {unit} in this format; if the file has {advice}"))
}

/// Returns the text of a line, without blanks at its end.
fn text(bytes: &[u8], line: u64) -> Result<&str, String> {
    if bytes.len() as u64 == MAX_LINE {
        return Err(format!("is longer than {MAX_LINE} bytes"));
    }
    let is_marked = line == 1 && bytes.starts_with(BYTE_ORDER_MARK);
    let bytes = if is_marked { bytes.get(BYTE_ORDER_MARK.len()..).unwrap_or_default() } else { bytes };
    std::str::from_utf8(bytes)
        .map(str::trim_end)
        .map_err(|_| "is not UTF-8: expected plain text, gzip or zstd".to_owned())
}

impl Unusual {
    fn why_empty(&self, malformed: u64, first: Option<(u64, String)>) -> String {
        let failed =
            if self.failed > 0 { format!(": {} requests failed", self.failed) } else { String::new() };
        let malformed = first.map_or_else(String::new, |(line, problem)| {
            format!(": {malformed} lines are malformed, the first is line {line}: {problem}")
        });
        failed + &malformed
    }

    fn notes(&self) -> Vec<String> {
        let failed =
            format!("{} failed requests of the trace (no response tokens) were left out", self.failed);
        let empty = format!(
            "{} requests of the trace have an answer of 0 tokens, which counts as one token",
            self.empty
        );
        let moved = format!(
            "{} requests of the trace have a `timestamp` before that of an earlier turn of their session, and got the time \
             of that turn",
            self.moved
        );
        [(self.failed, failed), (self.empty, empty), (self.moved, moved)]
            .into_iter()
            .filter_map(|(count, note)| (count > 0).then_some(note))
            .collect()
    }
}
