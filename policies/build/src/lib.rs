//! Builds policies into WebAssembly components: guest crates for build scripts, `cargo xtask policies` and
//! tests; folders of any supported language for `pointsman policy build`.
//!
//! A guest build has a target folder of its own, so that it never waits for the lock of the cargo that runs
//! it, and a cleaned environment, so that the flags of the host build do not reach it.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

mod cache;
pub mod contract;
mod error;
mod project;
mod script;
pub mod typescript;

pub use cache::BuildCache;
pub use error::GuestBuildError;
pub use project::{Built, Language, Project};
pub use script::{JS_HELPER, JS_HELPER_TYPES, PYTHON_HELPER, TYPESCRIPT};

/// A guest target of rustc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// `wasm32-unknown-unknown`: a core module, componentized here; imports nothing but our own interfaces.
    Unknown,
    /// `wasm32-wasip2`: a component as rustc makes it; imports WASI when it uses enough of std.
    Wasip2,
}

/// One guest to build.
#[derive(Clone, Debug)]
pub struct GuestBuild {
    workspace: PathBuf,
    package: String,
    target: Target,
    target_dir: PathBuf,
    profile: &'static str,
    features: Option<&'static str>,
    componentize: bool,
    shows_progress: bool,
}

impl GuestBuild {
    /// A guest `package` of the cargo workspace at `workspace`, for [`Target::Unknown`].
    #[must_use]
    pub fn new(workspace: &Path, package: &str) -> Self {
        Self {
            workspace: workspace.to_owned(),
            package: package.to_owned(),
            target: Target::Unknown,
            target_dir: target_dir(workspace),
            profile: "guest",
            features: None,
            componentize: true,
            shows_progress: false,
        }
    }

    /// Builds for another target.
    #[must_use]
    pub fn target(mut self, target: Target) -> Self {
        self.target = target;
        self
    }

    /// Builds with these features of the package instead of its default ones, written as cargo takes them.
    #[must_use]
    pub fn features(mut self, features: &'static str) -> Self {
        self.features = Some(features);
        self
    }

    /// Builds in `folder`, with a profile that the manifest has.
    fn place(mut self, folder: &Path, profile: &'static str) -> Self {
        (self.target_dir, self.profile) = (folder.to_owned(), profile);
        self
    }

    /// Answers the core module with its embedded WIT metadata instead of a component.
    #[must_use]
    pub fn core_module(mut self) -> Self {
        self.componentize = false;
        self
    }

    /// Lets cargo write its progress and messages to standard error, which must be a terminal.
    fn showing_progress(mut self, shows_progress: bool) -> Self {
        self.shows_progress = shows_progress;
        self
    }

    /// Builds it and answers its bytes.
    ///
    /// # Errors
    /// [`GuestBuildError`]; a missing target names the command that installs it.
    pub fn build(&self) -> Result<Vec<u8>, GuestBuildError> {
        if !has_target(self.target)? {
            return Err(GuestBuildError::MissingTarget(self.target.triple()));
        }
        let mut cargo = self.cargo();
        if self.shows_progress {
            cargo.stderr(Stdio::inherit());
        } else {
            cargo.arg("--quiet");
        }
        let output = run(cargo)?;
        if !output.status.success() {
            let output = match self.shows_progress {
                true => "cargo says above why".to_owned(),
                false => String::from_utf8_lossy(&output.stderr).into_owned(),
            };
            return Err(GuestBuildError::Failed { package: self.package.clone(), output });
        }
        let file = format!("{}.wasm", self.package.replace('-', "_"));
        let path = self.target_dir.join(self.target.triple()).join(self.profile).join(file);
        let bytes = std::fs::read(&path).map_err(|source| GuestBuildError::Artifact { path, source })?;
        match self.target {
            Target::Unknown if self.componentize => self.component(&bytes),
            _ => Ok(bytes),
        }
    }

    fn cargo(&self) -> Command {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        for (key, _) in env::vars_os() {
            let name = key.to_string_lossy();
            let kept = matches!(&*name, "CARGO_HOME")
                || name.starts_with("CARGO_NET_")
                || name.starts_with("CARGO_HTTP_");
            let ours =
                name.starts_with("CARGO") || name.starts_with("RUSTC") || name.starts_with("RUSTFLAGS");
            if ours && !kept {
                cargo.env_remove(&key);
            }
        }
        // SIMD makes two passes over columns cost half (wasm-facts: 1,024 rows, 5.2 to 2.2 microseconds).
        let mut flags = vec!["-Ctarget-feature=+simd128".to_owned()];
        flags.extend(remapped_paths());
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join(FLAG_SEPARATOR));
        cargo.current_dir(&self.workspace);
        cargo.args(["build", "--profile", self.profile, "--target", self.target.triple()]);
        cargo.args(["--package", &self.package]).arg("--target-dir").arg(&self.target_dir);
        if let Some(features) = self.features {
            cargo.args(["--no-default-features", "--features", features]);
        }
        cargo
    }

    fn component(&self, module: &[u8]) -> Result<Vec<u8>, GuestBuildError> {
        let encoded = wit_component::ComponentEncoder::default()
            .validate(true)
            .module(module)
            .and_then(|mut encoder| encoder.encode());
        encoded.map_err(|error| GuestBuildError::Componentize {
            package: self.package.clone(),
            problem: format!("{error:#}"),
        })
    }
}

impl Target {
    /// rustc's name of it.
    #[must_use]
    pub fn triple(self) -> &'static str {
        match self {
            Self::Unknown => "wasm32-unknown-unknown",
            Self::Wasip2 => "wasm32-wasip2",
        }
    }
}

/// Separates the flags in `CARGO_ENCODED_RUSTFLAGS`.
const FLAG_SEPARATOR: &str = "\u{1f}";

/// The host's flags that map paths, so that no path of the machine gets into a guest of a release.
fn remapped_paths() -> Vec<String> {
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let maps = flags.split(FLAG_SEPARATOR).filter(|flag| flag.starts_with("--remap-path-prefix="));
    maps.map(str::to_owned).collect()
}

/// Returns whether the toolchain in force has the target's standard library.
///
/// # Errors
/// [`GuestBuildError::Run`] when rustc cannot be asked.
pub fn has_target(target: Target) -> Result<bool, GuestBuildError> {
    let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--print", "target-libdir", "--target", target.triple()]);
    let output = run(rustc)?;
    let folder = String::from_utf8_lossy(&output.stdout);
    Ok(output.status.success() && Path::new(folder.trim()).is_dir())
}

/// The folder guests are built in: beside the host's, whose lock the cargo that runs us may hold.
fn target_dir(workspace: &Path) -> PathBuf {
    // A build script knows the host's target folder only by its own output folder within it.
    let host = env::var_os("OUT_DIR").map(PathBuf::from).and_then(|out| {
        let folder = out.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file())?;
        Some(folder.to_owned())
    });
    let configured = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    host.or(configured).unwrap_or_else(|| workspace.join("target")).join("guests")
}

fn run(mut command: Command) -> Result<std::process::Output, GuestBuildError> {
    command.output().map_err(|source| GuestBuildError::Run {
        command: command.get_program().to_string_lossy().into_owned(),
        source,
    })
}
