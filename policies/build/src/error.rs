//! Why a policy could not be built.

use std::path::PathBuf;

/// Why a guest could not be built.
#[derive(Debug, thiserror::Error)]
pub enum GuestBuildError {
    /// The toolchain lacks the target.
    #[error("the Rust target `{0}` is not installed: run `rustup target add {0}`")]
    MissingTarget(&'static str),
    /// cargo or rustc could not be started.
    #[error(
        "could not run {command}: {source}; a policy in Rust needs rustup.rs with the target wasm32-unknown-unknown"
    )]
    Run {
        /// The command.
        command: String,
        /// Why it did not start.
        source: std::io::Error,
    },
    /// The build failed; cargo's own words.
    #[error("building policy `{package}` failed:\n{output}")]
    Failed {
        /// The guest.
        package: String,
        /// Output of cargo.
        output: String,
    },
    /// The artifact could not be read.
    #[error("{}: {source}", path.display())]
    Artifact {
        /// Path where the file should be.
        path: PathBuf,
        /// Why it could not be read.
        source: std::io::Error,
    },
    /// The core module could not be made a component.
    #[error("guest `{package}` is not a component: {problem}")]
    Componentize {
        /// The guest.
        package: String,
        /// wit-component's words.
        problem: String,
    },
    /// The folder does not have a policy in a language that can be built.
    #[error("{}: {problem}", folder.display())]
    Project {
        /// The folder.
        folder: PathBuf,
        /// What is missing or wrong.
        problem: String,
    },
    /// A tool that the language needs is not there.
    #[error("`{tool}` cannot be run ({problem}): {hint}")]
    MissingTool {
        /// The tool.
        tool: String,
        /// Why it cannot be run.
        problem: String,
        /// What to install.
        hint: &'static str,
    },
}
