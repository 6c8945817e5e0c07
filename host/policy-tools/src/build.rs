//! `pointsman policy build`: a policy's folder into a component.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Args;
use pointsman_guest_build::Project;

use crate::output::print;

/// Which folder, and where to.
#[derive(Debug, Args)]
#[command(after_help = "\
The language is told by the folder: Cargo.toml is Rust, policy.py is Python, policy.js is JavaScript.
Python needs python3 with venv, JavaScript needs Node 20 with npm; their tools are installed on first use, under --tools.")]
pub struct BuildArgs {
    /// The policy's folder.
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// The component [default: NAME.wasm in the folder].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Where tools for Python and JavaScript are kept; several policies may share it [default: target/tools in the folder].
    #[arg(long, value_name = "DIR")]
    tools: Option<PathBuf>,
}

impl BuildArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let project = Project::open(&self.dir, self.tools.as_deref())?;
        let built = project.build()?;
        let out = self.out.clone().unwrap_or_else(|| self.dir.join(format!("{}.wasm", built.name)));
        fs::write(&out, &built.bytes).with_context(|| out.display().to_string())?;
        print(&format!(
            "built     {}, {} bytes, from {}\nsha256    {}\n",
            out.display(),
            built.bytes.len(),
            project.language().as_str(),
            pointsman_policy_runtime::digest(&built.bytes),
        ))?;
        Ok(ExitCode::SUCCESS)
    }
}
