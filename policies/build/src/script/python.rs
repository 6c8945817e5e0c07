//! Policies in Python.

use std::{
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use super::{
    exports::explain,
    job::{Job, Place, read, write},
    template::{MAX_SOURCE_BYTES, SLOT_BYTES, SLOT_UNIT, find_slot, with_source},
};
use crate::{BuildCache, GuestBuildError, cache::Key, contract::CONTRACT};

/// Versions that are known to work with this host.
const COMPONENTIZE_PY: &str = "componentize-py==0.25.*";
/// Name and text of the helper module of Python policies.
pub const PYTHON_HELPER: (&str, &str) =
    ("pointsman_policy.py", include_str!("../../../python/pointsman_policy.py"));
const HINT: &str =
    "a Python policy is built by python3 (3.10 or later, with venv) and componentize-py from PyPI";

/// Lists the imports of a policy.
const IMPORTS: &str = include_str!("imports.py");
/// Module of the template, and its text.
const TEMPLATE: (&str, &str) = ("pointsman_template", include_str!("template.py"));

/// A component, and whether its source never ran: then the caller has to try it.
pub(crate) struct Component {
    pub(crate) bytes: Vec<u8>,
    pub(crate) is_untried: bool,
}

/// Builds `policy.py` of the folder for a world of the contract.
pub(crate) fn python(job: &Job<'_>) -> Result<Component, GuestBuildError> {
    let venv = job.tools.join("python-0.25");
    let tool = venv.join("bin/componentize-py");
    job.install(
        || tool.is_file(),
        || {
            let python = env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
            job.run(Command::new(python).args(["-m", "venv"]).arg(&venv), HINT)?;
            let mut pip = Command::new(venv.join("bin/python"));
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", COMPONENTIZE_PY]);
            job.run(&mut pip, HINT).map(drop)
        },
    )?;
    let build = Build { job, place: job.place("py", PYTHON_HELPER)?, venv, tool };
    let start = job.cache.and_then(|cache| build.start(cache));
    if let Some(bytes) = start.as_ref().and_then(Start::with_template) {
        return Ok(Component { bytes, is_untried: true });
    }
    thread::scope(|scope| {
        // On another core, so that the first build takes no longer than one without a cache.
        if let Some(start) = &start {
            scope.spawn(|| build.keep_template(start));
        }
        job.run(&mut build.componentize("policy", &build.place.sources, &build.place.output), HINT)
    })
    .map_err(|error| explain(error, "policy.py", job.world))?;
    Ok(Component { bytes: build.place.read()?, is_untried: false })
}

/// Inputs of a build with a cache.
struct Start<'a> {
    cache: &'a BuildCache,
    source: Vec<u8>,
    /// Statements that import what the source imports.
    imports: String,
    key: Key,
    /// A component with these imports, and where its slot is.
    template: Option<(Vec<u8>, usize)>,
}

impl Start<'_> {
    fn with_template(&self) -> Option<Vec<u8>> {
        let (component, slot) = self.template.as_ref()?;
        with_source(component, *slot, &self.source)
    }
}

struct Build<'a> {
    job: &'a Job<'a>,
    place: Place,
    venv: PathBuf,
    tool: PathBuf,
}

impl Build<'_> {
    fn componentize(&self, module: &str, sources: &Path, output: &Path) -> Command {
        let mut build = Command::new(&self.tool);
        build.current_dir(sources).arg("-d").arg(&self.place.wit);
        build.args(["-w", self.job.world, "componentize"]);
        // Without WASI the component imports nothing that has to be granted.
        build.args(["--stub-wasi", module, "-o"]).arg(output);
        build
    }

    /// Returns what there is to start from. `None`: only the whole build can make the component, or say what
    /// is wrong.
    fn start<'c>(&self, cache: &'c BuildCache) -> Option<Start<'c>> {
        let file = self.place.sources.join("policy.py");
        let source = read(&file).ok().filter(|source| source.len() <= MAX_SOURCE_BYTES)?;
        let mut python = Command::new(self.venv.join("bin/python"));
        python.args(["-I", "-S", "-c", IMPORTS]).arg(file);
        let imports = self.job.run(&mut python, HINT).ok()?;
        let inputs: [&[u8]; 6] = [
            CONTRACT.as_bytes(),
            self.job.world.as_bytes(),
            PYTHON_HELPER.1.as_bytes(),
            TEMPLATE.1.as_bytes(),
            imports.as_bytes(),
            &identity(&self.venv)?,
        ];
        let key = Key::new("python", &inputs);
        let kept = cache.get(&key).and_then(|parts| <[Vec<u8>; 2]>::try_from(parts).ok());
        let template =
            kept.and_then(|[component, slot]| Some((component, str::from_utf8(&slot).ok()?.parse().ok()?)));
        Some(Start { cache, source, imports, key, template })
    }

    /// Makes the template for later builds, unless there is one. Without it they take as long as this one,
    /// and nothing else.
    fn keep_template(&self, start: &Start<'_>) -> Option<()> {
        if start.template.is_some() {
            return None;
        }
        let component = self.template(&start.imports).ok()?;
        let slot = find_slot(&component)?;
        start.cache.put(&start.key, &[&component, slot.to_string().as_bytes()]).ok()
    }

    /// Builds a component that has these imports, and room for a source.
    fn template(&self, imports: &str) -> Result<Vec<u8>, GuestBuildError> {
        let folder = self.place.root.join("template");
        let (module, text) = template(imports);
        write(&folder.join(module).with_extension("py"), text)?;
        write(&folder.join(PYTHON_HELPER.0), PYTHON_HELPER.1)?;
        // The tool adds the packages that are installed on the machine. A template must not depend on them.
        let nothing = self.place.root.join("no-packages");
        write(&nothing.join("lib/site-packages/.empty"), "")?;
        let output = self.place.root.join("template.wasm");
        let mut build = self.componentize(module, &folder, &output);
        self.job.run(build.env("VIRTUAL_ENV", nothing), HINT)?;
        read(&output)
    }
}

/// Returns name and text of the module that has these imports, and room for a source.
fn template(imports: &str) -> (&'static str, String) {
    let (module, text) = TEMPLATE;
    let unit = String::from_utf8_lossy(SLOT_UNIT);
    let text = text.replace("# IMPORTS", imports.trim()).replace("UNIT_TEXT", &unit);
    (module, text.replace("SLOT_BYTES", &SLOT_BYTES.to_string()))
}

/// Returns what identifies the installed tool, with the interpreter in it: the digests of its files.
fn identity(venv: &Path) -> Option<Vec<u8>> {
    let below = |folder: &Path, prefix: &str| {
        let found = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
        found
            .into_iter()
            .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
    };
    let packages = below(&venv.join("lib"), "python3")?.join("site-packages");
    let record = fs::read_to_string(below(&packages, "componentize_py-")?.join("RECORD")).ok()?;
    // Scripts outside of the packages' folder name the folder that they are installed in.
    let mut files: Vec<&str> = record.lines().filter(|line| !line.starts_with("..")).collect();
    files.sort_unstable();
    let mut identity = files.join("\n");
    for entry in fs::read_dir(packages.join("componentize_py")).ok()?.flatten() {
        let found = entry.metadata().ok()?;
        if found.is_file() {
            write!(identity, "\n{} {}", entry.file_name().to_string_lossy(), found.len()).ok()?;
        }
    }
    Some(identity.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs Python with a script and arguments in `dir`, and returns its output.
    fn python(dir: &Path, script: &str, arguments: &[&str]) -> Result<String, String> {
        let ran =
            Command::new("python3").current_dir(dir).args(["-S", "-c", script]).args(arguments).output();
        let ran = ran.expect("python3 runs");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        if ran.status.success() { Ok(text(ran.stdout)) } else { Err(text(ran.stderr)) }
    }

    #[test]
    fn the_imports_of_a_policy_are_those_that_run_when_it_is_loaded() {
        let dir = tempfile::tempdir().expect("a directory");
        let imports = |source: &str| {
            fs::write(dir.path().join("policy.py"), source).expect("written");
            python(dir.path(), IMPORTS, &["policy.py"])
        };
        let source = "from __future__ import annotations\nimport math, os.path\nimport pointsman_policy as pp\n\
                      from wit_world.imports import state\nfrom typing import TYPE_CHECKING\n\
                      class A:\n    from collections import deque\n    def f(self):\n        import json\n\
                      if TYPE_CHECKING:\n    import decimal\n";
        let expected = [
            "from collections import deque",
            "from typing import TYPE_CHECKING",
            "from wit_world.imports import state",
            "import math",
            "import os.path",
            "import pointsman_policy",
        ];
        let found = imports(source).expect("they are known");
        assert_eq!(found.lines().map(str::trim).collect::<Vec<_>>(), expected);
        assert_eq!(imports("x = 1\n").as_deref(), Ok(""));
        assert_eq!(imports("from math import *\n").as_deref(), Ok("    import math\n"));
        for (source, reason) in [
            ("import numpy\n", "not of the standard library: numpy"),
            ("from .rules import x\n", "line 1: a relative import"),
            (
                "try:\n    import tomllib\nexcept ImportError:\n    pass\n",
                "line 1: an import that may not run",
            ),
            ("def broken(:\n", "SyntaxError"),
            ("# -*- coding: latin-1 -*-\nx = 1\n", "another encoding"),
        ] {
            let error = imports(source).expect_err(source);
            assert!(error.contains(reason), "{source}: {error}");
        }
    }

    #[test]
    fn a_template_runs_its_source_once_and_then_calls_it_directly() {
        let dir = tempfile::tempdir().expect("a directory");
        let (module, text) = template("    import math\n");
        fs::write(dir.path().join(module).with_extension("py"), text).expect("written");
        fs::write(dir.path().join(PYTHON_HELPER.0), PYTHON_HELPER.1).expect("written");
        let script = r#"
import sys
sys.path.insert(0, ".")
import pointsman_template as template
assert len(template.SLOT) == 65536 and template.SLOT.startswith(b"pointsman-policy-source-is-here:"), template.SLOT
source = b"import math\nruns = []\nruns.append(1)\nclass Policy:\n    def describe(self): return len(runs), __name__, math.pi\nclass Scoring:\n    def score(self, call, facts): raise ValueError(call)\n"
template.SLOT = b"%016d" % len(source) + source + bytes(100)
describe, configure, scoring = template.Policy(), template.Policy(), template.Scoring()
assert describe.describe() == describe.describe() == configure.describe() == (1, "policy", __import__("math").pi)
try:
    scoring.score(1, 2)
    scoring.score(1, 2)
except ValueError as error:
    at = error.__traceback__.tb_next
    assert (at.tb_frame.f_code.co_filename, at.tb_lineno) == ("/0/policy.py", 7), at
else:
    raise AssertionError
try:
    template.Scoring().keep
except AttributeError:
    print("ok")
"#;
        assert_eq!(python(dir.path(), script, &[]).as_deref(), Ok("ok\n"));
    }
}
