//! `pointsman policy build`: builds a policy project into a component.

use std::{
    fs,
    io::{IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Args;
use pointsman_guest_build::{BuildCache, Built, Language, Project};

use crate::{
    output::{print, spinner},
    policy_file, user_cache,
};

/// Arguments of `build`.
#[derive(Debug, Args)]
#[command(after_help = "\
The files decide the language: Cargo.toml is Rust, policy.py is Python, policy.js is JavaScript, policy.ts is \
TypeScript. Python needs python3 with venv, the last two need Node 20 with npm. The first build installs \
their tools under --tools, and leaves in --cache what later ones start from: an edit of a script then takes \
a second or less. A new world, and in Python a new import, takes one whole build.
Exit code: 0 when the component was built, 2 when it was not.")]
pub struct BuildArgs {
    /// The project directory.
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// The component to write [default: NAME.wasm in the project directory].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    how: HowArgs,
}

/// How a project is built.
#[derive(Debug, Args)]
pub(crate) struct HowArgs {
    /// Directory of the tools for scripts; projects may share it [default: target/tools in the project].
    #[arg(long, value_name = "DIR")]
    tools: Option<PathBuf>,
    /// Directory with data that builds of scripts reuse, at most 512 MiB. Anybody who can write there can
    /// change the built components [default: pointsman/builds in $XDG_CACHE_HOME or ~/.cache].
    #[arg(long, value_name = "DIR", conflicts_with = "no_cache")]
    cache: Option<PathBuf>,
    /// Do not say that the build begins.
    #[arg(long)]
    quiet: bool,
    /// Build a script with its tools alone, and nothing of earlier builds. A Python policy then starts
    /// faster.
    #[arg(long)]
    no_cache: bool,
}

impl BuildArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let project = self.how.open(&self.dir)?;
        let built = self.how.build(&project, &self.dir)?;
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

/// Returns whether cargo writes to the terminal.
fn shows_cargo(project: &Project) -> bool {
    project.language() == Language::Rust && std::io::stderr().is_terminal()
}

impl HowArgs {
    pub(crate) fn open(&self, dir: &Path) -> anyhow::Result<Project> {
        let project = Project::open(dir, self.tools.as_deref())?;
        Ok(if shows_cargo(&project) { project.showing_progress() } else { project })
    }

    /// Builds the project in `dir`.
    pub(crate) fn build(&self, project: &Project, dir: &Path) -> anyhow::Result<Built> {
        if !self.quiet {
            let language = project.language().as_str();
            let was_built =
                dir.join("target").exists() || self.tools.as_ref().is_some_and(|dir| dir.exists());
            let first = if was_built { "" } else { "; a first build takes a minute or more" };
            let line = format!("building  {}, from {language}{first}\n", dir.display());
            // A closed stderr does not end the build.
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
        // cargo shows its own progress.
        let building = || (!shows_cargo(project)).then(|| spinner(format!("building {}", dir.display())));
        if let Some(cache) = self.cache() {
            let spinner = building();
            let built = project.build_with(&cache)?;
            drop(spinner);
            let tried = if built.is_untried { policy_file::try_start(dir, &built.bytes) } else { Ok(()) };
            match tried {
                Ok(()) => return Ok(built),
                // A build without the cache may start. If it fails, the tools say why.
                Err(error) => tracing::debug!(%error, "the script is built without a cache"),
            }
        }
        let _spinner = building();
        Ok(project.build()?)
    }

    fn cache(&self) -> Option<BuildCache> {
        if self.no_cache {
            return None;
        }
        let dir = self.cache.clone().or_else(|| user_cache::dir("builds"))?;
        Some(BuildCache::new(&dir))
    }
}
