//! `models`: checks the host's lock-free code with the loom model checker, in every interleaving.
//! `tests/models` is a workspace of its own, because it compiles the host's files with `cfg(loom)`.

use crate::{fleet, sh};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only models and flaws whose names contain this.
    filter: Option<String>,
    /// Largest number of preemptions in one execution; each more takes many times as long.
    #[arg(long, default_value_t = 2)]
    preemptions: u32,
}

impl Default for Args {
    fn default() -> Self {
        Self { filter: None, preemptions: 2 }
    }
}

/// Runs each model in a process of its own, then each flaw, which the checker has to find.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut cargo = sh::cargo();
    cargo.args([
        "run",
        "--release",
        "--quiet",
        "--manifest-path",
        "tests/models/Cargo.toml",
        "--locked",
        "--",
    ]);
    cargo.args(["--preemptions", &args.preemptions.to_string()]).args(&args.filter);
    sh::run(cargo.env("CARGO_TARGET_DIR", fleet::target_dir().join("models")))
}
