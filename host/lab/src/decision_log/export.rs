//! `pointsman trace export`.

use std::{collections::BTreeSet, fmt::Write as _, path::PathBuf, time::Duration};

use clap::Args;
use pointsman_decision_log::LoggedRequest;

use super::{
    convert::{Converter, Inexact, LeftOut},
    ran::{LaneArm, Seen},
    reader::{ReadStats, files, read},
    time::moment,
};
use crate::{
    output_file::{check_outputs, output_file, write_file},
    trace::Trace,
};

/// Says what a rule with names of tenants does on the trace.
const SALTED_TENANTS: &str = "the hashes of tenants are salted, so a rule that names a tenant matches none of these \
                              requests and decides otherwise than it did";

/// Arguments of `trace export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Directory of the decision log (`decisions.log_dir` of the gateway), or one of its files.
    log: PathBuf,
    /// File to write the trace to.
    #[arg(short, long, value_parser = output_file)]
    output: PathBuf,
    /// Use only requests of this model.
    #[arg(long)]
    model: Option<String>,
    /// Use only requests that arrived at this time or later: 2026-01-31T12:00:00Z, or an age such as 2h.
    #[arg(long, value_parser = moment)]
    since: Option<u64>,
    /// Use only requests that arrived before this time.
    #[arg(long, value_parser = moment)]
    until: Option<u64>,
    /// Number of tokens in a block of the trace, a multiple of the gateway's `routing.block_size` [default:
    /// that size].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    trace_block: Option<u32>,
    /// Skip malformed lines, and count them.
    #[arg(long)]
    skip_bad: bool,
}

impl ExportArgs {
    /// Writes the trace and returns the messages for the user.
    ///
    /// # Errors
    /// A file cannot be read or written, a line is malformed, or no request is left.
    pub fn run(&self) -> anyhow::Result<String> {
        let (mut stats, mut requests, mut seen) =
            (ReadStats::default(), Converter::default(), Seen::default());
        let logs = files(&self.log)?;
        let logged: Vec<_> = logs.iter().map(|file| ("the decision log", file.as_path())).collect();
        check_outputs(&logged, [&self.output])?;
        for file in logs {
            read(&file, self.skip_bad, &mut stats, |header, request| {
                if self.wants(&request) {
                    seen.note(&request);
                    requests.add_request(header, request);
                } else {
                    requests.left_out.filtered += 1;
                }
            })?;
        }
        let (left_out, inexact) = (requests.left_out, requests.inexact);
        let log = self.log.display();
        let Some(largest) = requests.largest_block() else {
            anyhow::bail!("{log}: {} files contain no request to export ({})", stats.files, left_out.text());
        };
        let block_tokens = self.trace_block.unwrap_or(largest);
        if let Some(own) = requests.unfit_block(block_tokens) {
            anyhow::bail!(
                "{log}: the gateway logged blocks of {own} tokens, which cannot be joined to blocks of {block_tokens}; \
                 use --trace-block with a multiple of {own}, or select other requests with --since and --until"
            );
        }
        let name =
            self.output.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let trace = requests.trace(name, block_tokens, stats.skipped);
        write_file(&self.output, |out| trace.write_mooncake(out))?;
        Ok(self.report(&trace, &stats, (left_out, inexact), &seen))
    }

    fn wants(&self, request: &LoggedRequest) -> bool {
        self.model.as_ref().is_none_or(|model| *model == request.model)
            && self.since.is_none_or(|since| request.arrived_at_us >= since)
            && self.until.is_none_or(|until| request.arrived_at_us < until)
    }

    fn report(
        &self,
        trace: &Trace,
        stats: &ReadStats,
        (left_out, inexact): (LeftOut, Inexact),
        seen: &Seen,
    ) -> String {
        let output = self.output.display();
        let block = trace.block_tokens;
        let span = trace.requests.last().map_or(Duration::ZERO, |request| request.at);
        let mut text = format!(
            "{output}: {} requests in {:.0} s from {} files, blocks of {block} tokens; an unlimited cache of such blocks would \
             hold {:.1} % of the prompt tokens\nleft out: {}; {} malformed lines",
            trace.requests.len(),
            span.as_secs_f64(),
            stats.files,
            trace.endless_cache_hit_rate() * 100.0,
            left_out.text(),
            stats.skipped,
        );
        if stats.cut_files > 0 {
            let _ = write!(text, "; {} files end within a frame and were read up to it", stats.cut_files);
        }
        let has_tenants = trace.requests.iter().any(|request| request.tenant_hash.is_some());
        let tenants = has_tenants.then(|| SALTED_TENANTS.to_owned());
        for warning in stats.damaged.iter().cloned().chain(inexact.warnings()).chain(tenants) {
            let _ = write!(text, "\nwarning: {warning}");
        }
        let _ = write!(text, "\n\n{}", seen.fleet(block));
        let _ = write!(
            text,
            "\nCompare what ran, and what ran beside it as canary and shadow, on this traffic:\n\n  pointsman compare \
             --trace {output} --trace-block {block} --fleet fleet.toml --seeds 5 --jitter-ms 20"
        );
        let (mut files, mut warnings) = (BTreeSet::new(), Vec::from_iter(seen.sessions()));
        for LaneArm { lane, parts, warnings: of_lane } in seen.arms() {
            let _ = write!(text, " \\\n      --arm {lane}={}", parts.join("+"));
            files.extend(parts.into_iter().filter(|part| part.starts_with("./")));
            warnings.extend(of_lane);
        }
        text.push('\n');
        for warning in warnings {
            let _ = writeln!(text, "\nwarning: {warning}");
        }
        if !files.is_empty() {
            let files = files.into_iter().collect::<Vec<_>>().join(", ");
            let _ = write!(
                text,
                "\nThe log does not contain policies. Put them where you run this command, as they served: {files}. \
                 Formulas of the configuration go into such a file, too. If they read labels or taints, give the engines \
                 in fleet.toml `labels` and `taints`. The trace has no `max_tokens` and no adapters.\n"
            );
        }
        text
    }
}

impl LeftOut {
    fn text(self) -> String {
        let Self { filtered, unserved, failed, no_prompt, several_prompts } = self;
        format!(
            "{filtered} by --model, --since or --until, {unserved} that no worker served, {failed} that failed before \
             their first token, {no_prompt} without a prompt, {several_prompts} with several prompts"
        )
    }
}

impl Inexact {
    fn warnings(self) -> impl Iterator<Item = String> {
        let Self { estimated, several_choices, no_output } = self;
        let counts = [
            (
                estimated,
                "prompts have a length that was estimated from their bytes; for exact ones, set \
                 `models.NAME.tokenizer`, or let clients ask for usage (`stream_options.include_usage`)",
            ),
            (several_choices, "requests asked for several choices (`n`); the trace has one choice of each"),
            (no_output, "answers have no output tokens, as those of embeddings; in the trace they have one"),
        ];
        counts.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}"))
    }
}
