//! Reports that a policy was saved. Files that builds and editors write beside it do not count.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::{sync::mpsc, time::Instant};

/// Directories of a project that are watched.
const MAX_DIRS: usize = 2_000;
/// Directories with built or installed files.
const SKIPPED_DIRS: [&str; 3] = ["target", "node_modules", "__pycache__"];
/// Endings of files that are not sources: components, signatures, and files of editors.
const SKIPPED_ENDINGS: [&str; 6] = [".wasm", ".minisig", ".swp", ".swx", ".tmp", "~"];
/// Files that builds write, and one that vim tries out.
const SKIPPED_FILES: [&str; 2] = ["Cargo.lock", "4913"];

/// Paths whose changes count as saves.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    /// Directory of a project, with all below it.
    pub(super) tree: Option<PathBuf>,
    /// Single files elsewhere.
    pub(super) files: Vec<PathBuf>,
}

/// Watches until it is dropped.
pub(super) struct Watch {
    watcher: RecommendedWatcher,
    sources: Sources,
    watched: BTreeSet<PathBuf>,
}

impl Watch {
    /// Watches the sources. The receiver gets the time of a save; further saves are dropped until it is read.
    pub(super) fn start(sources: Sources) -> anyhow::Result<(Self, mpsc::Receiver<Instant>)> {
        let (sender, saves) = mpsc::channel(1);
        let own = sources.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            let saved = match event {
                Ok(event) => !event.kind.is_access() && event.paths.iter().any(|path| own.contain(path)),
                // Some events were lost: a save may be among them.
                Err(_) => true,
            };
            if saved {
                let _ = sender.try_send(Instant::now());
            }
        });
        let watcher = watcher.context("watching files is not possible")?;
        let mut watch = Self { watcher, sources, watched: BTreeSet::new() };
        watch.refresh()?;
        Ok((watch, saves))
    }

    /// Watches directories that are new.
    pub(super) fn refresh(&mut self) -> anyhow::Result<()> {
        let mut dirs = BTreeSet::new();
        if let Some(tree) = &self.sources.tree {
            collect(tree, &mut dirs)?;
        }
        dirs.extend(self.sources.files.iter().filter_map(|file| file.parent()).map(Path::to_owned));
        self.watched.retain(|dir| dirs.contains(dir));
        for dir in dirs {
            if self.watched.contains(&dir) {
                continue;
            }
            self.watcher.watch(&dir, RecursiveMode::NonRecursive).with_context(|| {
                format!("watching {}: raise fs.inotify.max_user_watches where it is used up", dir.display())
            })?;
            self.watched.insert(dir);
        }
        Ok(())
    }
}

impl Sources {
    /// Returns whether a change of this path is a save.
    fn contain(&self, path: &Path) -> bool {
        if self.files.iter().any(|file| file == path) {
            return true;
        }
        let Some(below) = self.tree.as_ref().and_then(|tree| path.strip_prefix(tree).ok()) else {
            return false;
        };
        !below.as_os_str().is_empty() && below.iter().all(is_source)
    }
}

/// Returns whether a file or directory of this name may hold sources.
fn is_source(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let skipped = SKIPPED_DIRS.contains(&&*name) || SKIPPED_FILES.contains(&&*name);
    !skipped && !name.starts_with(['.', '#']) && !SKIPPED_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

fn collect(dir: &Path, found: &mut BTreeSet<PathBuf>) -> anyhow::Result<()> {
    found.insert(dir.to_owned());
    if found.len() > MAX_DIRS {
        bail!("more than {MAX_DIRS} directories to watch; name the directory of one policy");
    }
    let entries = fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    for entry in entries.flatten() {
        // Links are not followed: they may lead in circles.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && is_source(&entry.file_name()) {
            collect(&entry.path(), found)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_told_from_what_builds_and_editors_write() {
        let sources = Sources { tree: Some("/p".into()), files: vec!["/q/cases.toml".into()] };
        for path in ["/p/src/lib.rs", "/p/policy.py", "/p/new", "/p/cases.toml", "/q/cases.toml"] {
            assert!(sources.contain(Path::new(path)), "{path}");
        }
        for path in [
            "/p",
            "/p/target/x.rs",
            "/p/.git/index",
            "/p/a/node_modules/x.js",
            "/p/Cargo.lock",
            "/p/src/.lib.rs.swp",
            "/p/src/lib.rs~",
            "/p/shortest.wasm",
            "/p/#lib.rs#",
            "/q/other.toml",
            "/elsewhere/lib.rs",
        ] {
            assert!(!sources.contain(Path::new(path)), "{path}");
        }
    }
}
