//! Python environments with an engine, created with `uv` on first use.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use crate::sh;

const TINY_MODEL: &str = include_str!("tiny_model.py");

/// A Python environment.
#[derive(Debug)]
pub(crate) struct Venv {
    root: PathBuf,
}

impl Venv {
    /// Returns the environment at a path. It need not exist.
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Returns the path of a program in the environment.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.root.join("bin").join(name)
    }

    /// Returns a command for the environment's Python.
    pub(crate) fn python(&self) -> Command {
        Command::new(self.program("python"))
    }

    /// Whether these modules can be found. The modules are not loaded, because that takes long.
    pub(crate) fn has(&self, modules: &str) -> bool {
        let script = "import importlib.util as u, sys\n\
                      sys.exit(any(u.find_spec(name) is None for name in sys.argv[1].split()))";
        sh::succeeds(self.python().args(["-c", script, modules]))
    }

    /// Creates the environment. `UV_PYTHON` names the interpreter, if it is not the default one.
    pub(crate) fn create(&self) -> anyhow::Result<()> {
        if self.program("python").is_file() {
            return Ok(());
        }
        sh::run(Command::new("uv").arg("venv").arg(&self.root)).context("uv is not installed: pip install uv")
    }

    /// Installs wheels with these arguments of `uv pip install`.
    pub(crate) fn install(&self, args: &[&str]) -> anyhow::Result<()> {
        let mut install = Command::new("uv");
        install.args(["pip", "install", "--python"]).arg(self.program("python"));
        sh::run(install.args(["--only-binary", ":all:"]).args(args))
    }

    /// Installs wheels from a list of requirements, which is also stored in the environment.
    pub(crate) fn install_list(&self, list: &str) -> anyhow::Result<()> {
        let file = self.root.join("requirements.txt");
        std::fs::write(&file, list)?;
        self.install(&["--requirement", &file.display().to_string()])
    }

    /// Returns the directory of the installed packages.
    pub(crate) fn packages(&self) -> anyhow::Result<PathBuf> {
        // Packages put libraries into the same directory.
        let names = std::fs::read_dir(self.root.join("lib"))?.filter_map(|entry| Some(entry.ok()?.path()));
        let mut packages = names.map(|path| path.join("site-packages"));
        packages
            .find(|path| path.is_dir())
            .context("the environment has no directory lib/python*/site-packages")
    }

    /// Replaces a text in an installed file, unless it is already replaced.
    pub(crate) fn patch(&self, file: &str, from: &str, to: &str) -> anyhow::Result<()> {
        let path = self.packages()?.join(file);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        if text.contains(to) {
            return Ok(());
        }
        ensure!(text.matches(from).count() == 1, "{}: expected `{from}` once", path.display());
        Ok(std::fs::write(&path, text.replacen(from, to, 1))?)
    }

    /// Returns the directory of the tiny model, which is created on first use.
    pub(crate) fn model(&self) -> anyhow::Result<PathBuf> {
        let model = self.root.join("tiny-model");
        if !model.join("tokenizer.json").is_file() {
            sh::run(self.python().args(["-c", TINY_MODEL]).arg(&model))?;
        }
        Ok(model)
    }
}
