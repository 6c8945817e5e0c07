//! `e2e-wheel`: installs a wheel from a file into a new environment and calls its programs there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use crate::{
    fleet::{self, GATEWAY, LAB, POLICY, TOOLS},
    package, sh,
    table::Checks,
};

/// Tool that reads the tag which the symbols of a wheel's programs permit.
const AUDIT: &str = "auditwheel==6.8.2";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Wheel of `cargo xtask package` [default: a new wheel of debug builds].
    #[arg(long)]
    wheel: Option<PathBuf>,
}

/// Returns the reason why the command cannot run on this machine.
pub(crate) fn missing() -> Option<String> {
    let needed = [("python3", "--version"), ("zip", "--version"), ("readelf", "--version")];
    let missing = needed.iter().find(|(name, flag)| !sh::succeeds(Command::new(name).arg(flag)))?;
    Some(format!("{} is not installed", missing.0))
}

/// Prints a table. Returns an error when a check fails.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(reason) = missing() {
        sh::print(&format!("skipped: {reason}"));
        return Ok(());
    }
    let dir = tempfile::Builder::new().prefix("pointsman-wheel-").tempdir()?;
    let mut checks = Checks::default();
    let wheel = match &args.wheel {
        Some(wheel) => wheel.canonicalize().with_context(|| format!("could not find {}", wheel.display()))?,
        None => {
            let bin = fleet::build_programs("dev", &[GATEWAY, LAB, POLICY, TOOLS])?;
            let programs = package::strip(&package::wheel_programs(), &bin, dir.path())?;
            package::write_twice(package::write_wheel, &programs, dir.path(), &mut checks)?
        }
    };
    let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    checks.show("size of the wheel", format!("{} KiB", fs::metadata(&wheel)?.len() / 1024));
    checks.show("tag of the wheel", name.rsplit('-').next().unwrap_or_default());
    audit(&wheel, &name, dir.path(), &mut checks)?;
    let venv = dir.path().join("venv");
    sh::run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    let mut pip = Command::new(venv.join("bin/pip"));
    pip.args(["install", "--quiet", "--no-index", "--disable-pip-version-check"]);
    sh::run(pip.current_dir(dir.path()).arg(&wheel))?;
    installed(&venv, &mut checks)?;
    checks.finish()
}

/// Compares the wheel's tag with the tag of auditwheel, which is installed from PyPI.
fn audit(wheel: &Path, name: &str, dir: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let Ok(auditwheel) = sh::venv_program(&dir.join("venv-audit"), "auditwheel", &[AUDIT]) else {
        checks.show("auditwheel", "skipped: no PyPI");
        return Ok(());
    };
    let shown = Command::new(auditwheel).arg("show").arg(wheel).output()?;
    let told = String::from_utf8_lossy(&shown.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    let tag = name.rsplit('-').next().and_then(|tag| tag.strip_suffix(".whl")).unwrap_or_default();
    let agrees = told.contains(&format!("following platform tag: \"{tag}\""));
    checks.check("auditwheel finds the same tag", if agrees { "" } else { &told }, agrees);
    Ok(())
}

/// Calls the programs of an environment.
fn installed(venv: &Path, checks: &mut Checks) -> anyhow::Result<()> {
    let program = venv.join("bin/pointsman");
    let call = |arguments: &[&str]| -> anyhow::Result<(bool, String)> {
        // Only the environment's own directory is searched; PATH does not matter.
        let output = Command::new(&program).args(arguments).env("PATH", "/nonexistent").output()?;
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let (succeeded, help) = call(&["--help"])?;
    let names =
        ["serve", "policy", "demo", "compare", "calibrate", "observe", "trace", "sim", "import", "top"];
    let listed = |name: &&str| help.lines().any(|line| line.trim_start().starts_with(&format!("{name} ")));
    let lacking: Vec<&str> = names.into_iter().filter(|name| !listed(name)).collect();
    let complete = succeeded && lacking.is_empty() && !help.contains("Not installed");
    checks.check("`pointsman --help` lists every command", lacking.join(" "), complete);
    for command in ["compare", "policy", "import"] {
        let (succeeded, help) = call(&[command, "--help"])?;
        let passed = succeeded && help.contains("Usage: ");
        checks.check(&format!("`pointsman {command} --help`"), "", passed);
    }
    let (passed, told) = call(&["demo"])?;
    let first = told.lines().find(|line| line.ends_with("FAILED")).unwrap_or_default();
    checks.check("`pointsman demo`", first, passed && told.contains("hot swap"));
    let found = Command::new(venv.join("bin/pip")).args(["show", "--files", "pointsman"]).output()?;
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    let lacking: Vec<&str> = package::wheel_programs()
        .into_iter()
        .filter(|name| !found.lines().any(|line| line.trim().ends_with(&format!("bin/{name}"))))
        .collect();
    checks.check("pip lists the programs", lacking.join(" "), lacking.is_empty());
    Ok(())
}
