//! Reads the policy directory, and reports that something in it changed.
//!
//! The directory is watched and not its files: renaming a file into place, rewriting it, and swapping a
//! symlink (as Kubernetes mounts do) all change the directory. The manager compares content to find what
//! changed.

use std::{
    collections::BTreeSet,
    fs::OpenOptions,
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use notify::{RecursiveMode, Watcher};
use pointsman_routing::SlotKind;
use tokio::sync::Notify;

use super::strays::{SlotFiles, is_source};
use crate::refusal::Refusal;

/// Subdirectory of the parts that slots name.
pub(super) const PARTS: &str = "parts";

/// Endings of files beside policies: signatures, copies that are being written, backups, and notes.
const NOT_POLICIES: [&str; 15] = [
    ".asc",
    ".bak",
    ".filepart",
    ".md",
    ".minisig",
    ".old",
    ".orig",
    ".part",
    ".partial",
    ".sha256",
    ".sig",
    ".swp",
    ".tmp",
    ".txt",
    "~",
];

/// Entries of one directory that are listed; the rest is ignored.
const MAX_ENTRIES: usize = 10_000;

pub(super) struct Folder {
    dir: Option<PathBuf>,
    /// Watches until it is dropped.
    watcher: Option<notify::RecommendedWatcher>,
    /// The directory that is watched.
    watched: Option<Identity>,
    /// Why it is not watched, as it was logged.
    not_watched: Option<String>,
}

impl Folder {
    /// Opens and watches `dir`. The returned signal says that something changed.
    pub(super) fn open(dir: Option<PathBuf>) -> io::Result<(Self, Arc<Notify>)> {
        let changes = Arc::new(Notify::new());
        let mut folder = Self { dir: None, watcher: None, watched: None, not_watched: None };
        let Some(dir) = dir else { return Ok((folder, changes)) };
        if !dir.is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotFound, not_a_directory(&dir)));
        }
        let signal = changes.clone();
        let handler = move |event: notify::Result<notify::Event>| {
            // The manager's own reads are events, too.
            if !event.is_ok_and(|event| event.kind.is_access()) {
                signal.notify_one();
            }
        };
        let watched = notify::recommended_watcher(handler).and_then(|mut watcher| {
            watcher.watch(&dir, RecursiveMode::Recursive)?;
            Ok(watcher)
        });
        // The periodic scans still find changes.
        folder.watcher = watched.map_err(|error| folder.warn_not_watched(&dir, &error)).ok();
        folder.watched = identity(&dir).ok();
        folder.dir = Some(dir);
        Ok((folder, changes))
    }

    /// Checks that files of the directory can be reached, and watches it again when another directory took
    /// its place: a watch follows the old one.
    ///
    /// # Errors
    /// The directory, and why its files cannot be reached.
    pub(super) fn check(&mut self) -> Result<(), (PathBuf, Refusal)> {
        let Some(dir) = self.dir.clone() else { return Ok(()) };
        let found = identity(&dir);
        let found = found.map_err(|error| (dir.clone(), Refusal::DirectoryGone(error.to_string())))?;
        if self.watched.replace(found) == Some(found) {
            return Ok(());
        }
        if let Some(watcher) = &mut self.watcher {
            // It fails when the old directory was deleted, and its watch with it.
            let _ = watcher.unwatch(&dir);
            match watcher.watch(&dir, RecursiveMode::Recursive) {
                Ok(()) => self.not_watched = None,
                Err(error) => {
                    self.warn_not_watched(&dir, &error);
                    self.watched = None;
                }
            }
        }
        Ok(())
    }

    /// Says once why the directory is not watched.
    fn warn_not_watched(&mut self, dir: &Path, error: &notify::Error) {
        let error = not_watched(error);
        if self.not_watched.as_ref() != Some(&error) {
            let dir = dir.display();
            tracing::warn!(%dir, error, "policy directory cannot be watched; changes wait for the next scan");
            self.not_watched = Some(error);
        }
    }

    /// Returns whether there is such a file, or a link that leads to no file.
    pub(super) fn has(&self, file: &Path) -> bool {
        self.dir.as_ref().map(|dir| dir.join(file)).is_some_and(|path| path.exists() || path.is_symlink())
    }

    /// Reads a file of at most `limit` bytes. `None` if there is no such file, or no directory. Pipes and
    /// devices are not read, since that could block, and neither is a file that is too large.
    pub(super) fn read(&self, file: &Path, limit: usize) -> Option<Result<Vec<u8>, Refusal>> {
        let path = self.dir.as_ref()?.join(file);
        match read(&path, limit) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => path
                .is_symlink()
                .then(|| Err(Refusal::Unreadable("it is a link to a file that does not exist".to_owned()))),
            Err(error) => Some(Err(Refusal::Unreadable(error.to_string()))),
            Ok(outcome) => Some(outcome),
        }
    }

    /// Lists the names of parts, sorted: those of the files in the directory of parts without `.wasm`.
    pub(super) fn parts(&self) -> Vec<String> {
        let entries = self.dir.as_ref().and_then(|dir| std::fs::read_dir(dir.join(PARTS)).ok());
        let names = entries.into_iter().flatten().take(MAX_ENTRIES).flatten().filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            Some(name.strip_suffix(".wasm").filter(|name| !name.starts_with('.'))?.to_owned())
        });
        names.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Lists files that seem to be policies and belong to no slot, sorted. Skips hidden files and directories
    /// (`..data` of a Kubernetes mount) and the directory of parts.
    pub(super) fn strays(&self, known: &SlotFiles) -> Vec<PathBuf> {
        let Some(dir) = &self.dir else { return Vec::new() };
        let own: BTreeSet<PathBuf> = known.all().collect();
        let mut found = BTreeSet::new();
        collect(dir, Path::new(""), known, &mut found);
        found.into_iter().filter(|file| !own.contains(file)).collect()
    }
}

/// Device, inode and time of creation: a new directory may get the inode of the old one.
type Identity = (u64, u64, Option<SystemTime>);

/// Identifies a directory. The dot makes it an error if files in it cannot be reached.
fn identity(dir: &Path) -> io::Result<Identity> {
    let metadata = std::fs::metadata(dir.join("."))?;
    Ok((metadata.dev(), metadata.ino(), metadata.created().ok()))
}

/// Returns why a directory cannot be watched, and which limit to raise.
fn not_watched(error: &notify::Error) -> String {
    match &error.kind {
        notify::ErrorKind::MaxFilesWatch => {
            "this user has no inotify watches left; raise `sysctl fs.inotify.max_user_watches`".to_owned()
        }
        notify::ErrorKind::Io(error) if error.raw_os_error() == Some(libc::EMFILE) => format!(
            "{error}: no inotify instance is left; raise `sysctl fs.inotify.max_user_instances`, or the limit of open \
             files"
        ),
        _ => error.to_string(),
    }
}

/// Returns what is wrong with a path that is not a directory.
fn not_a_directory(dir: &Path) -> String {
    if dir.exists() {
        format!("`{}` is not a directory; name one", dir.display())
    } else {
        format!("`{}` does not exist; create it", dir.display())
    }
}

fn read(path: &Path, limit: usize) -> io::Result<Result<Vec<u8>, Refusal>> {
    if !std::fs::metadata(path)?.is_file() {
        return Ok(Err(Refusal::Unreadable("it is not a regular file".to_owned())));
    }
    // The path may be a pipe by now. Opening one without a writer must not block, and what was opened is
    // checked again.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Ok(Err(Refusal::Unreadable("it is not a regular file".to_owned())));
    }
    let size = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
    if size > limit {
        return Ok(Err(Refusal::TooLarge { size, limit }));
    }
    // Files of the kernel, such as /proc/kmsg, have no size, and reading them can block.
    if size == 0 {
        return Ok(Ok(Vec::new()));
    }
    // The file can grow while it is read.
    let mut bytes = Vec::with_capacity(size);
    file.take(limit as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > limit {
        return Ok(Err(Refusal::TooLarge { size: bytes.len(), limit }));
    }
    Ok(Ok(bytes))
}

/// Returns whether a file with this name may have been meant as a policy. `is_of_slots`: slots have files in
/// its directory.
fn is_policy(name: &str, is_of_slots: bool) -> bool {
    let name = name.to_ascii_lowercase();
    // A formula may lack a part of its ending; deeper, such a file belongs to a project.
    name.ends_with(".wasm")
        || name.ends_with(if is_of_slots { ".toml" } else { ".formula.toml" })
        || (is_of_slots && begins_as_slot(&name) && !is_beside_policies(&name))
        || (is_of_slots && is_source(&name))
}

/// Returns whether a file is a companion of one with a shorter name, or for other readers.
fn is_beside_policies(name: &str) -> bool {
    [".wasm.", ".toml."].iter().any(|ending| name.contains(ending))
        || NOT_POLICIES.iter().any(|ending| name.ends_with(ending))
}

/// Returns whether the name of a slot is the first part of a file's name.
fn begins_as_slot(name: &str) -> bool {
    SlotKind::ALL.into_iter().any(|slot| {
        let rest = name.strip_prefix(slot.to_string().as_str());
        rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
    })
}

fn collect(dir: &Path, relative: &Path, known: &SlotFiles, found: &mut BTreeSet<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(dir.join(relative)) else { return };
    let depth = relative.components().count();
    let is_of_slots = depth == 0 || known.has_folder(relative);
    for entry in entries.take(MAX_ENTRIES).flatten() {
        let name = entry.file_name();
        let path = relative.join(&name);
        if name.to_string_lossy().starts_with('.') || path == Path::new(PARTS) {
            continue;
        }
        if entry.path().is_dir() {
            // `<model>/<slot>.wasm`; a model's name may have one slash.
            if depth < 2 {
                collect(dir, &path, known, found);
            }
        } else if is_policy(&name.to_string_lossy(), is_of_slots) {
            found.insert(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn n7_a_directory_that_cannot_be_watched_names_the_limit_to_raise() {
        let io = |code| notify::Error::io(io::Error::from_raw_os_error(code));
        let watches = notify::Error::new(notify::ErrorKind::MaxFilesWatch).add_path("policies.d".into());
        // N7.28
        assert!(not_watched(&watches).ends_with("raise `sysctl fs.inotify.max_user_watches`"));
        assert!(not_watched(&io(libc::EMFILE)).contains("raise `sysctl fs.inotify.max_user_instances`"));
        assert!(not_watched(&io(libc::EACCES)).starts_with("Permission denied"));
    }

    #[test]
    fn n7_each_file_that_begins_with_the_name_of_a_slot_and_is_no_slot_s_is_listed() {
        let dir = tempfile::tempdir().expect("a directory");
        let strays = [
            "aggregated.formula.tml",
            "decode-override",
            "decode.formula",
            "org/tiny/policy.js",
            "org/tiny/prefill.component",
            "policy.py",
            "prefil.formula.toml",
            "prefill.wat",
            "project/shortest.wasm",
        ];
        let others = [
            ".prefill.wat",
            "README.md",
            "decoder.txt",
            "decode.formula.toml.Ab12Cd34",
            "decode.formula.toml~",
            "org/tiny/prefill.txt",
            "org/tiny/prefill.wasm",
            "parts/policy.py",
            "parts/prefill.wat",
            "prefill-notes.md",
            "prefill.old",
            "prefill.wasm",
            "prefill.wasm.Ab12Cd34",
            "prefill.wasm.filepart",
            "prefill.wasm.minisig",
            "prefill.wasm.sha256",
            "prefill.wasm.tmp",
            "project/decode.rs",
        ];
        for file in strays.iter().chain(&others).map(|file| dir.path().join(file)) {
            fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            fs::write(file, "x").expect("written");
        }
        let (folder, _) = Folder::open(Some(dir.path().to_owned())).expect("opened");
        let known = ["prefill.wasm", "org/tiny/prefill.wasm"].map(Path::new);
        // N7.20
        assert_eq!(folder.strays(&SlotFiles::new(known.into_iter())), strays.map(PathBuf::from));
    }
}
