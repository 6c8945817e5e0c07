//! `pointsman policy build`: builds a policy project into a component.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Args;
use pointsman_guest_build::Project;

use crate::output::{print, spinner};

/// Arguments of `build`.
#[derive(Debug, Args)]
#[command(after_help = "\
The files decide the language: Cargo.toml is Rust, policy.py is Python, policy.js is JavaScript, policy.ts is
TypeScript. Python needs python3 with venv, the last two need Node 20 with npm. The first build installs
their tools under --tools.
Exit code: 0 when the component was built, 2 when it was not.")]
pub struct BuildArgs {
    /// The project directory.
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// The component to write [default: NAME.wasm in the project directory].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Directory of the tools for scripts; projects may share it [default: target/tools in the project].
    #[arg(long, value_name = "DIR")]
    tools: Option<PathBuf>,
}

impl BuildArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let project = Project::open(&self.dir, self.tools.as_deref())?;
        let built = {
            let _spinner = spinner(format!("building {}", self.dir.display()));
            project.build()?
        };
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
