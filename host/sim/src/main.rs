//! `pointsman-sim`: runs one engine as a process.

use clap::Parser;
use pointsman_sim::cli::SimArgs;

/// Simulates an inference engine with the HTTP interface of vLLM, SGLang or a plain OpenAI server.
///
/// Durations are in engine time. The defaults model an 8B model on an H100; `--speedup` accelerates the
/// clock. Ends on SIGTERM or SIGINT.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    args: SimArgs,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        // Otherwise a line that cannot be written ends the request with a panic.
        .log_internal_errors(false)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .init();
    cli.args.run()
}
