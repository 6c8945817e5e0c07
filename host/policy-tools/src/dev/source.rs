//! Source of the policy that is developed: a project in any language, or a formula file.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use pointsman_guest_build::Language;
use pointsman_policy_runtime::FORMULA_SUFFIX;

use super::watch::Sources;
use crate::policy_file;

/// Source of the policy, by its canonical path.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// Directory of a project.
    Project(PathBuf),
    /// A formula file.
    Formula(PathBuf),
}

impl Source {
    /// Finds what `path` names: a project directory, a formula file, or a directory with one formula file.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let found = path.canonicalize().with_context(|| path.display().to_string())?;
        if found.is_file() {
            if is_formula(&found) {
                return Ok(Self::Formula(found));
            }
            bail!("{}: not a directory, and not named NAME{FORMULA_SUFFIX}", path.display());
        }
        if Language::of(&found).is_some() {
            return Ok(Self::Project(found));
        }
        let entries = std::fs::read_dir(&found).with_context(|| path.display().to_string())?;
        let mut formulas = entries.flatten().map(|entry| entry.path()).filter(|file| is_formula(file));
        match (formulas.next(), formulas.next()) {
            (Some(only), None) => Ok(Self::Formula(only)),
            (Some(_), Some(_)) => bail!("{}: has several formula files; name one", path.display()),
            _ => bail!(
                "{}: has none of Cargo.toml, policy.py, policy.ts, policy.js, NAME{FORMULA_SUFFIX}; \
                 `pointsman policy new` creates a project",
                path.display()
            ),
        }
    }

    /// Returns whether it is a formula file.
    pub(super) fn is_formula(&self) -> bool {
        matches!(self, Self::Formula(_))
    }

    /// The project's directory or the file.
    pub(super) fn path(&self) -> &Path {
        let (Self::Project(path) | Self::Formula(path)) = self;
        path
    }

    /// The cases that belong to it.
    pub(super) fn cases(&self) -> PathBuf {
        match self {
            Self::Project(dir) => dir.join("cases.toml"),
            Self::Formula(file) => file.with_file_name("cases.toml"),
        }
    }

    /// Name of the built policy.
    pub(super) fn output(&self) -> PathBuf {
        match self {
            Self::Formula(file) => file.file_name().map(PathBuf::from),
            Self::Project(_) => None,
        }
        .unwrap_or_else(|| PathBuf::from("policy.wasm"))
    }

    /// Files whose change is a save.
    pub(super) fn watched(&self, cases: &Path) -> Sources {
        let cases = cases.to_owned();
        match self {
            Self::Project(dir) => Sources { tree: Some(dir.clone()), files: vec![cases] },
            Self::Formula(file) => Sources { tree: None, files: vec![file.clone(), cases] },
        }
    }
}

fn is_formula(file: &Path) -> bool {
    let hidden = file.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    policy_file::is_formula(file) && !hidden
}
