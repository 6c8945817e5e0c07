//! Policies in Python, JavaScript and TypeScript: their tools, installed once into a folder of ours, and
//! the call of them.
//!
//! Sources are copied into a folder beside the tools, together with the helper module and the contract:
//! nothing is written into the source tree, and a policy builds wherever it lies.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    GuestBuildError,
    contract::CONTRACT,
    typescript::{DECLARATIONS, declarations},
};

/// Versions that are known to work with this host.
const COMPONENTIZE_PY: &str = "componentize-py==0.25.*";
const COMPONENTIZE_JS: &str = "@bytecodealliance/componentize-js@~0.23.0";

/// TypeScript's compiler on npm, and its version.
pub const TYPESCRIPT: (&str, &str) = ("typescript", "~7.0.2");

/// Name and text of the helper module of Python policies.
pub const PYTHON_HELPER: (&str, &str) =
    ("pointsman_policy.py", include_str!("../../python/pointsman_policy.py"));
/// Name and text of the helper module of JavaScript policies.
pub const JS_HELPER: (&str, &str) = ("pointsman-policy.js", include_str!("../../js/pointsman-policy.js"));
/// Name and text of the types of that module.
pub const JS_HELPER_TYPES: (&str, &str) =
    ("pointsman-policy.d.ts", include_str!("../../js/pointsman-policy.d.ts"));
const JS_BUILD: &str = include_str!("componentize.mjs");

const PYTHON_HINT: &str =
    "a Python policy is built by python3 (3.10 or later, with venv) and componentize-py from PyPI";
const JS_HINT: &str = "a policy in JavaScript or TypeScript is built by Node 20 or later with npm, and componentize-js from npm";

/// Builds `policy.py` of the folder for a world of the contract.
pub(crate) fn python(
    folder: &Path,
    tools: &Path,
    name: &str,
    world: &str,
) -> Result<Vec<u8>, GuestBuildError> {
    let venv = tools.join("python-0.25");
    let tool = venv.join("bin/componentize-py");
    if !tool.is_file() {
        let python = env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        run(name, Command::new(python).args(["-m", "venv"]).arg(&venv), PYTHON_HINT)?;
        let mut pip = Command::new(venv.join("bin/python"));
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", COMPONENTIZE_PY]);
        run(name, &mut pip, PYTHON_HINT)?;
    }
    let place = Place::new(folder, tools, name, "py", PYTHON_HELPER)?;
    let mut build = Command::new(tool);
    build.current_dir(&place.sources).arg("-d").arg(&place.wit).args(["-w", world, "componentize"]);
    // Without WASI the component imports nothing that has to be granted.
    build.args(["--stub-wasi", "policy", "-o"]).arg(&place.output);
    run(name, &mut build, PYTHON_HINT)?;
    place.read()
}

/// Builds `policy.js` of the folder for a world of the contract.
pub(crate) fn javascript(
    folder: &Path,
    tools: &Path,
    name: &str,
    world: &str,
) -> Result<Vec<u8>, GuestBuildError> {
    let modules = npm(tools, name, &[COMPONENTIZE_JS])?;
    let place = Place::new(folder, tools, name, "js", JS_HELPER)?;
    check_syntax(name, &place.sources)?;
    componentize(&modules, &place, &place.sources, name, world)
}

/// Checks and builds `policy.ts` of the folder for a world of the contract.
pub(crate) fn typescript(
    folder: &Path,
    tools: &Path,
    name: &str,
    world: &str,
) -> Result<Vec<u8>, GuestBuildError> {
    let (package, version) = TYPESCRIPT;
    let modules = npm(tools, name, &[COMPONENTIZE_JS, &format!("{package}@{version}")])?;
    let place = Place::new(folder, tools, name, "ts", JS_HELPER)?;
    write(&place.sources.join(JS_HELPER_TYPES.0), JS_HELPER_TYPES.1)?;
    write(&place.sources.join(DECLARATIONS), declarations())?;
    let scripts = place.sources.with_file_name("js");
    write(&place.sources.join("tsconfig.json"), TSCONFIG)?;
    let mut tsc = Command::new("node");
    tsc.current_dir(&place.sources).arg(modules.join("node_modules").join(package).join("bin/tsc"));
    run(name, tsc.arg("--outDir").arg(&scripts), JS_HINT)?;
    write(&scripts.join(JS_HELPER.0), JS_HELPER.1)?;
    componentize(&modules, &place, &scripts, name, world)
}

/// Settings of TypeScript's compiler for a build.
const TSCONFIG: &str = r#"{
  "compilerOptions": {
    "target": "ES2022",
    "lib": ["ES2022"],
    "module": "ESNext",
    "moduleResolution": "bundler",
    "rootDir": ".",
    "types": [],
    "strict": true,
    "noEmitOnError": true
  },
  "files": ["policy.ts", "pointsman-contract.d.ts"]
}
"#;

/// Installs the packages where they are missing, and returns the folder that has them in `node_modules`.
fn npm(tools: &Path, name: &str, packages: &[&str]) -> Result<PathBuf, GuestBuildError> {
    let modules = tools.join("js-0.23");
    // The version follows the last `@`; a scope begins with one.
    let folder = |package: &str| package.rfind('@').and_then(|at| package.get(..at)).map(str::to_owned);
    let there = |package: &&&str| {
        let folder = folder(package).unwrap_or_default();
        modules.join("node_modules").join(folder).join("package.json").is_file()
    };
    if packages.iter().filter(there).count() < packages.len() {
        write(&modules.join("package.json"), "{ \"private\": true }\n")?;
        let mut npm = Command::new("npm");
        npm.current_dir(&modules).args(["install", "--no-audit", "--no-fund", "--loglevel=error"]);
        run(name, npm.args(packages), JS_HINT)?;
    }
    Ok(modules)
}

/// Makes a component of `policy.js` in `sources`.
fn componentize(
    modules: &Path,
    place: &Place,
    sources: &Path,
    name: &str,
    world: &str,
) -> Result<Vec<u8>, GuestBuildError> {
    write(&modules.join("componentize.mjs"), JS_BUILD)?;
    let mut node = Command::new("node");
    node.current_dir(modules).arg("componentize.mjs").arg(sources.join("policy.js"));
    run(name, node.arg(&place.wit).arg(world).arg(&place.output), JS_HINT)?;
    place.read()
}

/// Where one build happens.
struct Place {
    sources: PathBuf,
    wit: PathBuf,
    output: PathBuf,
}

impl Place {
    fn new(
        folder: &Path,
        tools: &Path,
        name: &str,
        extension: &str,
        (helper, text): (&str, &str),
    ) -> Result<Self, GuestBuildError> {
        let root = tools.join("build").join(format!("{extension}-{name}"));
        // A file that was deleted from the project must not linger.
        if root.exists() {
            fs::remove_dir_all(&root).map_err(|source| at(&root, source))?;
        }
        let place =
            Self { sources: root.join("src"), wit: root.join("wit"), output: root.join("policy.wasm") };
        write(&place.wit.join("policy.wit"), CONTRACT)?;
        copy(folder, &place.sources, extension)?;
        // The project may have a copy of another release, for its unit tests.
        write(&place.sources.join(helper), text)?;
        Ok(place)
    }

    fn read(&self) -> Result<Vec<u8>, GuestBuildError> {
        fs::read(&self.output).map_err(|source| at(&self.output, source))
    }
}

/// Copies sources of a language, with their folders; neither hidden ones nor what a build left.
fn copy(from: &Path, to: &Path, extension: &str) -> Result<(), GuestBuildError> {
    for entry in fs::read_dir(from).map_err(|source| at(from, source))? {
        let path = entry.map_err(|source| at(from, source))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if path.is_dir() {
            let skipped = name.starts_with(['.', '_']) || ["target", "node_modules"].contains(&name);
            if !skipped {
                copy(&path, &to.join(name), extension)?;
            }
        } else if path.extension().is_some_and(|its| its == extension) {
            let text = fs::read(&path).map_err(|source| at(&path, source))?;
            write(&to.join(name), text)?;
        }
    }
    Ok(())
}

fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<(), GuestBuildError> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|source| at(parent, source))?;
    }
    fs::write(path, text).map_err(|source| at(path, source))
}

fn at(path: &Path, source: std::io::Error) -> GuestBuildError {
    GuestBuildError::Artifact { path: path.to_owned(), source }
}

/// Returns what a tool wrote that is about the policy: without the frames of the tool itself.
fn own_words(output: &str) -> String {
    // componentize-py raises the error of the policy as one of its own, and adds its native frames.
    let own = output.split_once("\nAssertionError: ").map_or(output, |(_, own)| own);
    let own = own.split("\nCaused by:").next().unwrap_or(own);
    own.replace("File \"/0/", "File \"").trim_end().to_owned()
}

/// Finds syntax errors in the sources, with their place, which componentize-js does not tell.
fn check_syntax(package: &str, sources: &Path) -> Result<(), GuestBuildError> {
    // Node takes files of this folder for modules.
    write(&sources.join("package.json"), "{ \"type\": \"module\" }\n")?;
    for entry in fs::read_dir(sources).map_err(|source| at(sources, source))? {
        let path = entry.map_err(|source| at(sources, source))?.path();
        if path.extension().is_none_or(|its| its != "js") {
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        run(package, Command::new("node").arg("--check").arg(&path), JS_HINT).map_err(
            |error| match error {
                GuestBuildError::Failed { package, output } => GuestBuildError::Failed {
                    package,
                    output: syntax_error(&name, &output).unwrap_or(output),
                },
                other => other,
            },
        )?;
    }
    Ok(())
}

/// Rewrites Node's report of a syntax error: file, line, column, message and the line with a mark.
fn syntax_error(file: &str, output: &str) -> Option<String> {
    let mut lines = output.lines();
    let (_, line) = lines.next()?.rsplit_once(':')?;
    let line: u32 = line.trim().parse().ok()?;
    let (text, mark) = (lines.next()?, lines.next()?);
    let column = mark.chars().position(|sign| sign == '^')? + 1;
    let message = lines.find(|line| line.starts_with("SyntaxError"))?;
    Some(format!("{file}:{line}:{column}: {message}\n{text}\n{mark}"))
}

fn run(package: &str, command: &mut Command, hint: &'static str) -> Result<(), GuestBuildError> {
    let output = command.output().map_err(|error| GuestBuildError::MissingTool {
        tool: command.get_program().to_string_lossy().into_owned(),
        problem: error.to_string(),
        hint,
    })?;
    if output.status.success() {
        return Ok(());
    }
    let words = [output.stdout, output.stderr].concat();
    let output = own_words(String::from_utf8_lossy(&words).trim());
    Err(GuestBuildError::Failed { package: package.to_owned(), output })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_python_policy_is_told_without_the_tool_s_frames() {
        let output = "Traceback (most recent call last):\n  File \"/t/bin/componentize-py\", line 8\n    sys.exit(script())\n\
                      AssertionError: Traceback (most recent call last):\n  File \"/0/policy.py\", line 6, in <module>\n    \
                      import nothere\nModuleNotFoundError: No module named 'nothere'\n\n\nCaused by:\n    ModuleNotFoundError\n\n\
                      Stack backtrace:\n   0: <anyhow::Error>::msg";
        let own = "Traceback (most recent call last):\n  File \"policy.py\", line 6, in <module>\n    import nothere\n\
                   ModuleNotFoundError: No module named 'nothere'";
        assert_eq!(own_words(output), own);
        assert_eq!(own_words("error: pip failed"), "error: pip failed");
    }

    #[test]
    fn the_syntax_error_of_a_javascript_policy_has_line_and_column() {
        let output = "/x/src/policy.js:5\nlet maxRequests = ;\n                  ^\n\nSyntaxError: Unexpected token ';'\n    \
                      at checkSyntax (node:internal/main/check_syntax:74:5)\n\nNode.js v20";
        let own =
            "policy.js:5:19: SyntaxError: Unexpected token ';'\nlet maxRequests = ;\n                  ^";
        assert_eq!(syntax_error("policy.js", output).as_deref(), Some(own));
        assert_eq!(syntax_error("policy.js", "node: bad option"), None);
    }
}
