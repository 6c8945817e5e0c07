//! Log lines on stderr.

use std::io::IsTerminal as _;

use clap::Args;

use crate::text_log;

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
/// terminals only, since files and journals would keep the escape sequences.
pub fn start_log(json: bool, default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colours = std::io::stderr().is_terminal() && !no_color;
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    if json { log.json().init() } else { log.fmt_fields(text_log::fields()).init() }
}
