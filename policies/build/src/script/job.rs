//! One build of a script: its folders, and the calls of tools.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{BuildCache, GuestBuildError, contract::CONTRACT};

/// Inputs of a build.
pub(crate) struct Job<'a> {
    /// Folder of the project.
    pub(crate) folder: &'a Path,
    /// Folder of tools and intermediate files.
    pub(crate) tools: &'a Path,
    /// Name of the policy.
    pub(crate) name: &'a str,
    /// World of the contract.
    pub(crate) world: &'a str,
    /// Results of earlier builds. `None`: the tools do all of the work.
    pub(crate) cache: Option<&'a BuildCache>,
}

/// Directory of one build.
pub(super) struct Place {
    /// Folder of all of this build's files.
    pub(super) root: PathBuf,
    pub(super) sources: PathBuf,
    pub(super) wit: PathBuf,
    pub(super) output: PathBuf,
    /// Held while the build runs: another one of this policy waits.
    _lock: fs::File,
}

impl Job<'_> {
    /// Copies the sources of the language, the contract and the helper into a folder of this build.
    pub(super) fn place(
        &self,
        extension: &str,
        (helper, text): (&str, &str),
    ) -> Result<Place, GuestBuildError> {
        let root = self.tools.join("build").join(format!("{extension}-{}", self.name));
        let lock = lock(&root.with_extension("lock"))?;
        // A file that was deleted from the project must not linger.
        if root.exists() {
            fs::remove_dir_all(&root).map_err(|source| at(&root, source))?;
        }
        let (sources, wit, output) = (root.join("src"), root.join("wit"), root.join("policy.wasm"));
        let place = Place { root, sources, wit, output, _lock: lock };
        write(&place.wit.join("policy.wit"), CONTRACT)?;
        copy(self.folder, &place.sources, extension)?;
        // The project may have a copy of another release, for its unit tests.
        write(&place.sources.join(helper), text)?;
        Ok(place)
    }

    /// Installs tools unless `are_there`. Another build that needs them waits.
    pub(super) fn install(
        &self,
        are_there: impl Fn() -> bool,
        install: impl FnOnce() -> Result<(), GuestBuildError>,
    ) -> Result<(), GuestBuildError> {
        if are_there() {
            return Ok(());
        }
        let _lock = lock(&self.tools.join("install.lock"))?;
        if are_there() { Ok(()) } else { install() }
    }

    pub(super) fn run(&self, command: &mut Command, hint: &'static str) -> Result<String, GuestBuildError> {
        let output = command.output().map_err(|error| GuestBuildError::MissingTool {
            tool: command.get_program().to_string_lossy().into_owned(),
            problem: error.to_string(),
            hint,
        })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let words = [output.stdout, output.stderr].concat();
        let output = own_words(String::from_utf8_lossy(&words).trim());
        Err(GuestBuildError::Failed { package: self.name.to_owned(), output })
    }
}

impl Place {
    pub(super) fn read(&self) -> Result<Vec<u8>, GuestBuildError> {
        read(&self.output)
    }
}

/// Waits until no other build has the file locked.
fn lock(path: &Path) -> Result<fs::File, GuestBuildError> {
    let locked = || {
        fs::create_dir_all(path.parent().unwrap_or(path))?;
        let file = fs::File::options().create(true).append(true).open(path)?;
        file.lock().map(|()| file)
    };
    locked().map_err(|source| at(path, source))
}

/// Copies sources of a language, with their folders, except hidden files and the output of builds.
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
            write(&to.join(name), read(&path)?)?;
        }
    }
    Ok(())
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, GuestBuildError> {
    fs::read(path).map_err(|source| at(path, source))
}

pub(super) fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<(), GuestBuildError> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|source| at(parent, source))?;
    }
    fs::write(path, text).map_err(|source| at(path, source))
}

pub(super) fn at(path: &Path, source: std::io::Error) -> GuestBuildError {
    GuestBuildError::Artifact { path: path.to_owned(), source }
}

/// Returns what a tool wrote that is about the policy: without the frames of the tool itself.
fn own_words(output: &str) -> String {
    // componentize-py raises the error of the policy as one of its own, and adds its native frames.
    let own = output.split_once("\nAssertionError: ").map_or(output, |(_, own)| own);
    let own = own.split("\nCaused by:").next().unwrap_or(own);
    own.replace("File \"/0/", "File \"").trim_end().to_owned()
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
}
