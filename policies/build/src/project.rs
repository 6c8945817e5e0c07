//! A policy's folder in any supported language: which one it is, and its build into one component.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::{BuildCache, GuestBuild, GuestBuildError, Target, has_target, script};

/// A language that policies are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// A cargo package: `Cargo.toml`.
    Rust,
    /// `policy.py`, made a component by componentize-py.
    Python,
    /// `policy.js`, made a component by componentize-js.
    JavaScript,
    /// `policy.ts`, checked and made JavaScript by TypeScript's compiler.
    TypeScript,
}

/// A folder that holds a policy.
#[derive(Clone, Debug)]
pub struct Project {
    folder: PathBuf,
    language: Language,
    /// The manifest of the language: `Cargo.toml`, or `policy.toml` of a script.
    manifest: toml::Table,
    tools: PathBuf,
    shows_progress: bool,
}

/// A component with the name of its project.
#[derive(Clone, Debug)]
pub struct Built {
    /// The project's name.
    pub name: String,
    /// The component.
    pub bytes: Vec<u8>,
    /// Whether nothing of the policy ran while it was built, as it does where a script is built without a
    /// cache. The caller then has to try the component, and to build again without a cache when it fails.
    pub is_untried: bool,
}

impl Language {
    /// The language of the project in `folder`, by the file that each must have.
    #[must_use]
    pub fn of(folder: &Path) -> Option<Self> {
        // TypeScript first: its compiler may have left a policy.js.
        let files = [
            (Self::Rust, "Cargo.toml"),
            (Self::Python, "policy.py"),
            (Self::TypeScript, "policy.ts"),
            (Self::JavaScript, "policy.js"),
        ];
        files.into_iter().find(|(_, file)| folder.join(file).is_file()).map(|(language, _)| language)
    }

    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rust => "Rust",
            Self::Python => "Python",
            Self::JavaScript => "JavaScript",
            Self::TypeScript => "TypeScript",
        }
    }
}

/// Keys of policy.toml.
const SCRIPT_KEYS: [&str; 3] = ["name", "world", "state"];

impl Project {
    /// Reads the project in `folder`. Tools and intermediate files go to `tools` [default: target/tools in
    /// the folder].
    ///
    /// # Errors
    /// [`GuestBuildError::Project`] when the folder is not a project, naming what is missing.
    pub fn open(folder: &Path, tools: Option<&Path>) -> Result<Self, GuestBuildError> {
        let problem = |problem: String| GuestBuildError::Project { folder: folder.to_owned(), problem };
        let absolute = folder.canonicalize().map_err(|error| problem(error.to_string()))?;
        let language = Language::of(&absolute)
            .ok_or_else(|| problem("has none of Cargo.toml, policy.py, policy.ts, policy.js".to_owned()))?;
        let file = if language == Language::Rust { "Cargo.toml" } else { "policy.toml" };
        let text = std::fs::read_to_string(absolute.join(file))
            .map_err(|error| problem(format!("{file}: {error}")))?;
        let manifest: toml::Table = text.parse().map_err(|error| problem(format!("{file}: {error}")))?;
        let is_unknown = |key: &&String| !SCRIPT_KEYS.contains(&key.as_str());
        if let Some(key) = manifest.keys().find(is_unknown).filter(|_| language != Language::Rust) {
            let message = format!("{file}: unknown key `{key}`: expected `name`, `world` or `state`");
            return Err(problem(message));
        }
        let tools = match tools {
            Some(tools) => std::path::absolute(tools).map_err(|error| problem(error.to_string()))?,
            None => absolute.join("target/tools"),
        };
        Ok(Self { folder: absolute, language, manifest, tools, shows_progress: false })
    }

    /// Lets cargo write its progress and messages to standard error, which must be a terminal.
    #[must_use]
    pub fn showing_progress(self) -> Self {
        Self { shows_progress: true, ..self }
    }

    /// Returns the language of the project.
    #[must_use]
    pub fn language(&self) -> Language {
        self.language
    }

    /// Builds it, with the tools of its language alone.
    ///
    /// # Errors
    /// [`GuestBuildError`]; the tool's own words when the tool fails.
    pub fn build(&self) -> Result<Built, GuestBuildError> {
        self.build_from(None)
    }

    /// Builds the project. A script's build reuses parts of earlier builds, and leaves parts for later ones.
    ///
    /// # Errors
    /// Same as [`Self::build`].
    pub fn build_with(&self, cache: &BuildCache) -> Result<Built, GuestBuildError> {
        self.build_from(Some(cache))
    }

    fn build_from(&self, cache: Option<&BuildCache>) -> Result<Built, GuestBuildError> {
        let name = self.name()?;
        let (bytes, is_untried) = match self.language {
            Language::Rust => (self.cargo()?, false),
            language => {
                let Self { folder, tools, .. } = self;
                let world = self.world()?;
                let job = script::Job { folder, tools, name: &name, world: &world, cache };
                match language {
                    Language::JavaScript => (script::javascript(&job)?, false),
                    Language::TypeScript => (script::typescript(&job)?, false),
                    _ => {
                        let made = script::python(&job)?;
                        (made.bytes, made.is_untried)
                    }
                }
            }
        };
        Ok(Built { name, bytes, is_untried })
    }

    fn cargo(&self) -> Result<Vec<u8>, GuestBuildError> {
        // Without imports where possible: the Rust standard library of wasip2 brings WASI in.
        let target = if has_target(Target::Unknown)? || !has_target(Target::Wasip2)? {
            Target::Unknown
        } else {
            Target::Wasip2
        };
        let alone = self.manifest.contains_key("workspace");
        let place = match env::var_os("CARGO_TARGET_DIR") {
            Some(target) => PathBuf::from(target),
            None => self.root(alone).join("target"),
        };
        let profile = if alone { "release" } else { "guest" };
        let build = GuestBuild::new(&self.folder, &self.package()?).target(target);
        build.place(&place.join("guests"), profile).showing_progress(self.shows_progress).build()
    }

    /// The workspace's folder; that of the project when it is one by itself.
    fn root(&self, alone: bool) -> &Path {
        let mut above = self.folder.ancestors().skip(1);
        let found = if alone { None } else { above.find(|folder| folder.join("Cargo.lock").is_file()) };
        found.unwrap_or(&self.folder)
    }

    fn package(&self) -> Result<String, GuestBuildError> {
        let package = self.manifest.get("package").and_then(|package| package.get("name")?.as_str());
        package.map(str::to_owned).ok_or_else(|| self.lacks("Cargo.toml: no `package.name`"))
    }

    /// The package's name without the prefix `policy-`, or `name` of policy.toml.
    fn name(&self) -> Result<String, GuestBuildError> {
        if self.language == Language::Rust {
            let package = self.package()?;
            return Ok(package.strip_prefix("policy-").map_or(package.clone(), str::to_owned));
        }
        let name = self.manifest.get("name").and_then(toml::Value::as_str);
        name.map(str::to_owned).ok_or_else(|| self.lacks("policy.toml: no `name`"))
    }

    /// The WIT world of a script; other languages say it in their code.
    fn world(&self) -> Result<String, GuestBuildError> {
        let world = self.manifest.get("world").and_then(toml::Value::as_str);
        let world = world.ok_or_else(|| self.lacks("policy.toml: no `world`"))?;
        let state = self.manifest.get("state").and_then(toml::Value::as_bool).unwrap_or(false);
        Ok(if state { format!("stateful-{world}") } else { world.to_owned() })
    }

    fn lacks(&self, problem: &str) -> GuestBuildError {
        GuestBuildError::Project { folder: self.folder.clone(), problem: problem.to_owned() }
    }
}
