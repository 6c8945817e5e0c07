//! Policies in JavaScript and TypeScript.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    exports::explain,
    job::{Job, Place, at, read, write},
    template::{code_of, with_snapshot},
};
use crate::{
    BuildCache, GuestBuildError,
    cache::Key,
    contract::CONTRACT,
    typescript::{DECLARATIONS, declarations},
};

/// Versions that are known to work with this host.
const COMPONENTIZE_JS: &str = "@bytecodealliance/componentize-js@~0.23.0";
/// TypeScript's compiler on npm, and its version.
pub const TYPESCRIPT: (&str, &str) = ("typescript", "~7.0.2");

/// Name and text of the helper module of JavaScript policies.
pub const JS_HELPER: (&str, &str) = ("pointsman-policy.js", include_str!("../../../js/pointsman-policy.js"));
/// Name and text of the type definitions of that module.
pub const JS_HELPER_TYPES: (&str, &str) =
    ("pointsman-policy.d.ts", include_str!("../../../js/pointsman-policy.d.ts"));
/// What a build adds to that module. Unit tests in Node use it without.
const IN_COMPONENT: &str =
    "\nimport { log as writeLine } from \"pointsman:policy/log@0.1.1\";\ninComponent(writeLine);\n";
const COMPONENTIZE: &str = include_str!("componentize.mjs");
const SNAPSHOT: &str = include_str!("snapshot.mjs");

const HINT: &str = "a policy in JavaScript or TypeScript is built by Node 20 or later with npm, and componentize-js from npm";

/// Builds `policy.js` of the folder for a world of the contract.
pub(crate) fn javascript(job: &Job<'_>) -> Result<Vec<u8>, GuestBuildError> {
    let modules = npm(job, &[COMPONENTIZE_JS])?;
    let place = job.place("js", (JS_HELPER.0, &helper()))?;
    let build = Build { job, file: "policy.js", modules, sources: place.sources.clone(), place };
    build.run(|| build.check_syntax())
}

/// Returns the text of the helper module of a component.
fn helper() -> String {
    JS_HELPER.1.to_owned() + IN_COMPONENT
}

/// Checks and builds `policy.ts` of the folder for a world of the contract.
pub(crate) fn typescript(job: &Job<'_>) -> Result<Vec<u8>, GuestBuildError> {
    let (package, version) = TYPESCRIPT;
    let modules = npm(job, &[COMPONENTIZE_JS, &format!("{package}@{version}")])?;
    let place = job.place("ts", JS_HELPER)?;
    write(&place.sources.join(JS_HELPER_TYPES.0), JS_HELPER_TYPES.1)?;
    write(&place.sources.join(DECLARATIONS), declarations())?;
    let sources = place.sources.with_file_name("js");
    write(&place.sources.join("tsconfig.json"), TSCONFIG)?;
    let mut tsc = Command::new("node");
    tsc.current_dir(&place.sources).arg(modules.join("node_modules").join(package).join("bin/tsc"));
    job.run(tsc.arg("--outDir").arg(&sources), HINT)?;
    write(&sources.join(JS_HELPER.0), helper())?;
    Build { job, file: "policy.ts", modules, sources, place }.run(|| Ok(()))
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
fn npm(job: &Job<'_>, packages: &[&str]) -> Result<PathBuf, GuestBuildError> {
    let modules = job.tools.join("js-0.23");
    // The version follows the last `@`; a scope begins with one.
    let folder = |package: &str| package.rfind('@').and_then(|at| package.get(..at)).map(str::to_owned);
    let is_there = |package: &&str| {
        let folder = folder(package).unwrap_or_default();
        modules.join("node_modules").join(folder).join("package.json").is_file()
    };
    job.install(
        || packages.iter().all(is_there),
        || {
            write(&modules.join("package.json"), "{ \"private\": true }\n")?;
            let mut npm = Command::new("npm");
            npm.current_dir(&modules).args(["install", "--no-audit", "--no-fund", "--loglevel=error"]);
            job.run(npm.args(packages), HINT).map(drop)
        },
    )?;
    Ok(modules)
}

/// A build of `policy.js` in `sources`.
struct Build<'a> {
    job: &'a Job<'a>,
    /// The file that the author wrote.
    file: &'static str,
    modules: PathBuf,
    sources: PathBuf,
    place: Place,
}

impl Build<'_> {
    /// Makes the component. `check` tells what is wrong with the sources more clearly than the tool does.
    fn run(&self, check: impl FnOnce() -> Result<(), GuestBuildError>) -> Result<Vec<u8>, GuestBuildError> {
        let cache = self.job.cache.and_then(|cache| Some((cache, self.key()?)));
        let made = cache.as_ref().and_then(|(cache, key)| self.with_snapshot(cache, key));
        if let Some(component) = made {
            return Ok(component);
        }
        check()?;
        let script = self.modules.join("componentize.mjs");
        // Whole at any time: other builds with these tools run it, too.
        let written = script.with_extension(format!("{}.mjs", std::process::id()));
        write(&written, COMPONENTIZE)?;
        fs::rename(&written, &script).map_err(|source| at(&script, source))?;
        let mut node = Command::new("node");
        node.current_dir(&self.modules).arg(&script).arg(self.sources.join("policy.js"));
        node.arg(&self.place.wit).arg(self.job.world).arg(&self.place.output);
        let record = self.record();
        let made = self.job.run(if cache.is_some() { node.arg(&record) } else { &mut node }, HINT);
        made.map_err(|error| explain(error, self.file, self.job.world))?;
        let component = self.place.read()?;
        if let Some((cache, key)) = cache {
            // Without an entry the next build takes as long as this one, and nothing else.
            let _ = remember(cache, &key, &record, &component);
        }
        Ok(component)
    }

    /// Folder of the files that a build leaves for later ones.
    fn record(&self) -> PathBuf {
        self.place.root.join("record")
    }

    /// Returns what identifies the engine of this world: the contract and all packages, with their digests.
    fn key(&self) -> Option<Key> {
        let modules = self.modules.join("node_modules");
        let packages = fs::read(modules.join(".package-lock.json")).ok()?;
        let engine = modules.join("@bytecodealliance/componentize-js/lib/starlingmonkey_embedding.wasm");
        let bytes = fs::metadata(engine).ok()?.len().to_le_bytes();
        let scripts = [COMPONENTIZE.as_bytes(), SNAPSHOT.as_bytes()].concat();
        Some(Key::new("js", &[CONTRACT.as_bytes(), self.job.world.as_bytes(), &scripts, &packages, &bytes]))
    }

    /// Takes the snapshot with the engine of an earlier build, and puts it into that build's component.
    /// `None`: only the whole build can make the component, or say what is wrong.
    fn with_snapshot(&self, cache: &BuildCache, key: &Key) -> Option<Vec<u8>> {
        let [engine, bindings, call, component, code] = cache.get(key)?.try_into().ok()?;
        let record = self.record();
        for (file, bytes) in [ENGINE, BINDINGS, CALL].into_iter().zip([engine, bindings, call]) {
            write(&record.join(file), bytes).ok()?;
        }
        let script = record.join("snapshot.mjs");
        write(&script, SNAPSHOT).ok()?;
        let mut node = Command::new("node");
        node.current_dir(&self.modules).arg(script).arg(&record).arg(&self.sources).arg(&self.modules);
        self.job.run(&mut node, HINT).ok()?;
        let snapshot = read(&record.join(TAKEN)).ok()?;
        if code_of(&snapshot)? != code {
            return None;
        }
        with_snapshot(&component, &snapshot)
    }

    /// Finds syntax errors in the sources, with their place, which componentize-js does not tell.
    fn check_syntax(&self) -> Result<(), GuestBuildError> {
        // Node takes files of this folder for modules.
        write(&self.sources.join("package.json"), "{ \"type\": \"module\" }\n")?;
        for entry in fs::read_dir(&self.sources).map_err(|source| at(&self.sources, source))? {
            let path = entry.map_err(|source| at(&self.sources, source))?.path();
            if path.extension().is_none_or(|its| its != "js") {
                continue;
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let checked = self.job.run(Command::new("node").arg("--check").arg(&path), HINT);
            checked.map_err(|error| match error {
                GuestBuildError::Failed { package, output } => GuestBuildError::Failed {
                    package,
                    output: syntax_error(&name, &output).unwrap_or(output),
                },
                other => other,
            })?;
        }
        Ok(())
    }
}

/// Files of a record: the engine with the world's bindings, the bindings' script, the call that takes the
/// snapshot, and the snapshot.
const ENGINE: &str = "in.wasm";
const BINDINGS: &str = "sources/initializer.js";
const CALL: &str = "call.json";
const TAKEN: &str = "out.wasm";

/// Stores what later builds for this world start from.
fn remember(cache: &BuildCache, key: &Key, record: &Path, component: &[u8]) -> Option<()> {
    let snapshot = read(&record.join(TAKEN)).ok()?;
    // The tool could have changed more than it does today.
    if with_snapshot(component, &snapshot)? != component {
        return None;
    }
    let [engine, bindings, call] = [ENGINE, BINDINGS, CALL].map(|file| read(&record.join(file)));
    cache.put(key, &[&engine.ok()?, &bindings.ok()?, &call.ok()?, component, &code_of(&snapshot)?]).ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_syntax_error_of_a_javascript_policy_has_line_and_column() {
        let output = "/x/src/policy.js:5\nlet maxRequests = ;\n                  ^\n\nSyntaxError: Unexpected token ';'\n    \
                      at checkSyntax (node:internal/main/check_syntax:74:5)\n\nNode.js v20";
        let own =
            "policy.js:5:19: SyntaxError: Unexpected token ';'\nlet maxRequests = ;\n                  ^";
        assert_eq!(syntax_error("policy.js", output).as_deref(), Some(own));
        assert_eq!(syntax_error("policy.js", "node: bad option"), None);
    }

    /// A policy in `dir`, whose rule has `edit` in it.
    fn project(dir: &Path, edit: &str) -> PathBuf {
        let text = format!(
            "import {{ scorer }} from \"./pointsman-policy.js\";\nexport const {{ policy, scoring }} = scorer({{\n  \
             name: \"edited\", workerFacts: [\"active-requests\"],\n  score: (call, facts) => Array.from(\
             facts[\"active-requests\"], (requests) => requests * {edit}),\n}});\n"
        );
        write(&dir.join("policy.js"), text).expect("written");
        dir.to_owned()
    }

    /// Installs tools from npm.
    #[test]
    #[ignore = "needs npm and the network"]
    fn a_component_with_a_new_snapshot_is_what_the_whole_build_makes_of_that() {
        let dir = tempfile::tempdir().expect("a directory");
        let (tools, caches) =
            (dir.path().join("tools"), ["first", "second"].map(|name| dir.path().join(name)));
        let caches = caches.map(|dir| BuildCache::new(&dir));
        let [first, second] = ["1", "2 + 40"].map(|edit| project(&dir.path().join(edit), edit));
        let made = |folder: &Path, cache| {
            let job = Job { folder, tools: &tools, name: "edited", world: "scorer", cache: Some(cache) };
            let modules = npm(&job, &[COMPONENTIZE_JS]).expect("installed");
            let place = job.place("js", (JS_HELPER.0, &helper())).expect("a place");
            let sources = place.sources.clone();
            let build = Build { job: &job, file: "policy.js", modules, sources, place };
            let component = build.run(|| build.check_syntax()).expect("built");
            let snapshot = read(&build.record().join(TAKEN)).expect("a snapshot");
            (component, snapshot, build.key().expect("a key"))
        };
        let (old, _, key) = made(&first, &caches[0]);
        let (whole, snapshot, _) = made(&second, &caches[1]);
        assert!(whole != old && caches[0].get(&key).is_some_and(|parts| parts[3] == old));
        assert!(with_snapshot(&old, &snapshot).is_some_and(|component| component == whole));
        // A build from the cache takes another snapshot, and changes as little.
        let (fast, snapshot, _) = made(&second, &caches[0]);
        assert!(with_snapshot(&whole, &snapshot).is_some_and(|component| component == fast));
        assert!(caches[0].get(&key).is_some_and(|parts| parts[3] == old), "the whole build ran again");
    }
}
