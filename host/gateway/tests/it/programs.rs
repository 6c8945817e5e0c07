//! `pointsman` with the other programs beside it, as they are installed.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{
    env,
    fs::{self, File},
    path::Path,
    process::Command,
    sync::OnceLock,
    time::SystemTime,
};

use clap::Parser;
use pointsman_gateway::cli::Cli;
use pointsman_policy_tools::PolicyCommand;

/// The programs that `pointsman` runs, and the simulated engine.
const OTHERS: [&str; 4] = ["pointsman-policy", "pointsman-lab", "pointsman-tools", "pointsman-sim"];
/// Sources of these programs.
const SOURCES: [&str; 6] = ["crates", "host", "policies", "wit", "Cargo.toml", "Cargo.lock"];
/// Variables that cargo and nextest set for a test: with them, build scripts would run again.
const OF_TESTS: [&str; 6] =
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_EXE_", "CARGO_CRATE_", "CARGO_TARGET_TMPDIR", "NEXTEST"];

/// Returns the path of `pointsman`. Builds the other programs first when a source is newer: for a test, cargo
/// builds the programs of its own package only.
pub(crate) fn pointsman() -> &'static str {
    static BUILT: OnceLock<()> = OnceLock::new();
    let program = env!("CARGO_BIN_EXE_pointsman");
    BUILT.get_or_init(|| build(Path::new(program).parent().unwrap()));
    program
}

/// `pointsman policy …`.
#[derive(Parser)]
struct Policy {
    #[command(subcommand)]
    _command: PolicyCommand,
}

/// Returns whether a command line is one of `pointsman`, or of the program that has its command `policy`.
pub(crate) fn parses<T: AsRef<str>>(words: &[T]) -> bool {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    match words.as_slice() {
        [_, rest @ ..] if rest.first() == Some(&"policy") => Policy::try_parse_from(rest).is_ok(),
        words => Cli::try_parse_from(words).is_ok(),
    }
}

fn build(bin: &Path) {
    // The file's time is the time of the last build. Its lock lets only one process of the test run build.
    let stamp = File::options().create(true).append(true).open(bin.join(".other-programs")).unwrap();
    stamp.lock().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let newest = SOURCES.iter().map(|name| changed(&root.join(name))).max().unwrap();
    let are_there = OTHERS.iter().all(|name| bin.join(name).is_file());
    if are_there && newest < stamp.metadata().unwrap().modified().unwrap() {
        return;
    }
    let began = SystemTime::now();
    let mut cargo = Command::new(env!("CARGO"));
    // With the features of the whole workspace, as its tests are built.
    cargo.current_dir(&root).args(["build", "--quiet", "--locked", "--workspace", "--target-dir"]);
    cargo.arg(bin.parent().unwrap());
    cargo.args(OTHERS.iter().flat_map(|name| ["--bin", name]));
    if !bin.ends_with("debug") {
        cargo.arg("--profile").arg(bin.file_name().unwrap());
    }
    for (name, _) in env::vars_os() {
        if OF_TESTS.iter().any(|start| name.to_string_lossy().starts_with(start)) {
            cargo.env_remove(name);
        }
    }
    assert!(cargo.status().unwrap().success(), "the other programs cannot be built");
    stamp.set_modified(began).unwrap();
}

/// Returns when the newest file at or below a path was changed.
fn changed(path: &Path) -> SystemTime {
    // A link may point to a removed file.
    let Ok(metadata) = fs::metadata(path) else { return SystemTime::UNIX_EPOCH };
    if metadata.is_file() {
        return metadata.modified().unwrap();
    }
    let skipped = |name: &std::ffi::OsStr| name == "target" || name == "node_modules";
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    let own = entries.filter(|entry| !skipped(&entry.file_name())).map(|entry| changed(&entry.path()));
    own.max().unwrap_or(SystemTime::UNIX_EPOCH)
}
