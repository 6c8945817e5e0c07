//! `langs`: the policies in Python and JavaScript, built, tested with the cases of their Rust twins, and measured.

use std::{path::PathBuf, process::Command};

use crate::{fleet, policies, setup, sh};

/// Memory of an instance that both languages run well in.
const MEMORY: &str = "67108864";

/// Builds, tests and measures each of them with release binaries.
pub(crate) fn run() -> anyhow::Result<()> {
    setup::run()?;
    let pointsman = fleet::build()?.join("pointsman");
    let built = policies::scripts(&sh::root().join("target/policies"))?;
    for (source, component) in built {
        let name = source.file_name().map(PathBuf::from).unwrap_or_default();
        let cases = sh::root().join("policies").join(name).join("cases.toml");
        let policy = |command: &str| {
            let mut run = Command::new(&pointsman);
            run.args(["policy", command, "--memory-bytes", MEMORY, "--deadline-ms", "20"]).arg(&component);
            run
        };
        sh::run(policy("test").arg("--cases").arg(cases))?;
        sh::run(policy("bench").args(["--rows", "8,64,512"]))?;
    }
    Ok(())
}
