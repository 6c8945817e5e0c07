//! Log lines on stderr.

use std::io::IsTerminal as _;

use clap::Args;
use tracing_subscriber::EnvFilter;

use crate::{
    log_queue::{LogFlush, LogQueue},
    text_log,
};

/// Log lines that are written unless `RUST_LOG` selects others. The error of a command says what the TLS
/// verifier logs, and the exchange with other gateways what its NATS client logs.
pub const DEFAULT_LOG: &str = "info,async_nats=off,rustls_platform_verifier=off";

/// The flag of every program for its log lines.
#[derive(Clone, Copy, Debug, Args)]
pub struct LogArgs {
    /// Log lines as JSON.
    #[arg(long, global = true)]
    pub log_json: bool,
}

/// Writes log lines to stderr: those that `RUST_LOG` selects, else those of `default`. Colours are for
/// terminals only, since files and journals would keep the escape sequences. The last lines are
/// written when the result is dropped.
pub fn start_log(json: bool, default: &str) -> LogFlush {
    let (filter, wrong) = filter(std::env::var_os("RUST_LOG").as_deref(), default);
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colours = std::io::stderr().is_terminal() && !no_color;
    let queue = LogQueue::to_stderr();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(queue.clone()).with_ansi(colours);
    if json {
        log.json().init()
    } else {
        log.fmt_fields(text_log::fields()).init()
    }
    if let Some(error) = wrong {
        tracing::warn!(error, default, "RUST_LOG is not used: write `info` or `warn,TARGET=LEVEL`");
    }
    LogFlush(queue)
}

/// Returns what `RUST_LOG` selects, or else `default` and what is wrong with the variable.
fn filter(variable: Option<&std::ffi::OsStr>, default: &str) -> (EnvFilter, Option<String>) {
    let Some(text) = variable.filter(|text| !text.is_empty()) else { return (EnvFilter::new(default), None) };
    let text = text.to_string_lossy();
    match EnvFilter::try_new(&text) {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new(default), Some(format!("`{text}`: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn n8_a_selection_of_log_lines_that_cannot_be_parsed_is_reported() {
        let of = |text: &str| filter(Some(OsStr::new(text)), "info");
        // N8.4
        let (used, wrong) = of("info,pointsman::access=of");
        assert!(used.to_string() == "info" && wrong.unwrap().starts_with("`info,pointsman::access=of`: "));
        let (used, wrong) = of("warn,audit=info");
        assert!(used.to_string().contains("audit=info") && wrong.is_none());
        assert!(of("").1.is_none() && filter(None, "info").1.is_none());
    }
}
