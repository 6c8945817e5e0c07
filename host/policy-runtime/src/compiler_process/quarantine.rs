//! Files that ended a compiler process. They are not compiled again, also not after a restart when there is a
//! compile cache to remember them in, until they change, the limits are raised, or the release changes.

use std::{
    collections::VecDeque,
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use parking_lot::Mutex;
use pointsman_routing::Digest;
use pointsman_workers::unix_ms;
use serde::{Deserialize, Serialize};

use super::CompileLimits;
use crate::{guest_info::truncate, refusal::Refusal};

/// Name of the file in the compile cache.
pub(super) const FILE_NAME: &str = "quarantine.json";
/// Maximum number of remembered files. A new one evicts the oldest.
const MAX_ENTRIES: usize = 64;
/// Largest file of entries, bytes.
const MAX_FILE_BYTES: u64 = 128 * 1024;

#[derive(Debug)]
pub(super) struct Quarantine {
    file: Option<PathBuf>,
    entries: Mutex<VecDeque<Entry>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    /// SHA-256 of the file.
    digest: String,
    /// How the process ended.
    how: String,
    /// Milliseconds since the Unix epoch.
    at_ms: u64,
    /// Release and limits that the file was compiled with.
    release: String,
    memory_bytes: u64,
    cpu_ms: u64,
}

impl Quarantine {
    /// Reads the entries from `file`. Without one they last as long as the process.
    pub(super) fn load(file: Option<PathBuf>) -> Self {
        let quarantine = Self { file, entries: Mutex::default() };
        quarantine.refresh();
        quarantine
    }

    /// Reads the file again: an operator may have cleared it.
    fn refresh(&self) {
        let Some(file) = &self.file else { return };
        match read(file) {
            Ok(entries) => *self.entries.lock() = entries,
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "quarantine not read; its entries are those known before");
            }
        }
    }

    /// Refuses a file that ended a process of this release within the same or higher limits.
    pub(super) fn check(&self, digest: Digest, limits: &CompileLimits) -> Result<(), Refusal> {
        self.refresh();
        let digest = digest.to_string();
        let holds = |entry: &&Entry| {
            entry.digest == digest
                && entry.release == env!("CARGO_PKG_VERSION")
                && entry.memory_bytes >= limits.memory_bytes
                && entry.cpu_ms >= cpu_ms(limits)
        };
        match self.entries.lock().iter().find(holds) {
            Some(entry) => Err(Refusal::Quarantined(self.advised(entry))),
            None => Ok(()),
        }
    }

    /// Says how the file ended a process, and how to have it compiled again.
    fn advised(&self, entry: &Entry) -> String {
        let again = match self.file.as_deref().and_then(Path::parent) {
            Some(dir) => format!(
                "run `pointsman policy quarantine clear --dir {} {:.12}` and `pointsman policy reload`",
                dir.display(),
                entry.digest
            ),
            None => "restart the gateway".to_owned(),
        };
        format!(
            "compiling this file failed: {}; change it, raise `compile_cpu` or `compile_memory_bytes` in [policies], \
             or {again}",
            entry.how
        )
    }

    /// Remembers a file.
    pub(super) fn add(&self, digest: Digest, how: &str, limits: &CompileLimits) {
        let entry = Entry {
            digest: digest.to_string(),
            how: truncate(how.to_owned()),
            at_ms: unix_ms(),
            release: env!("CARGO_PKG_VERSION").to_owned(),
            memory_bytes: limits.memory_bytes,
            cpu_ms: cpu_ms(limits),
        };
        self.refresh();
        let mut entries = self.entries.lock();
        entries.retain(|old| old.digest != entry.digest);
        if entries.len() >= MAX_ENTRIES {
            entries.pop_front();
        }
        entries.push_back(entry);
        if let Some(file) = &self.file
            && let Err(error) = write(file, &entries)
        {
            tracing::warn!(file = %file.display(), %error, "quarantine not written; a restart forgets it");
        }
    }
}

/// A policy file that ended its compiler process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantinedFile {
    /// SHA-256 of the file: `sha256:` and 64 hex digits.
    pub digest: String,
    /// How the process ended.
    pub how: String,
    /// Time, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Release of the gateway that compiled it.
    pub release: String,
}

impl From<&Entry> for QuarantinedFile {
    fn from(Entry { digest, how, at_ms, release, .. }: &Entry) -> Self {
        Self { digest: digest.clone(), how: how.clone(), at_ms: *at_ms, release: release.clone() }
    }
}

/// Returns the quarantined files of a compile cache, oldest first.
///
/// # Errors
/// The list cannot be read.
pub fn quarantined_files(cache: &Path) -> std::io::Result<Vec<QuarantinedFile>> {
    Ok(read(&cache.join(FILE_NAME))?.iter().map(QuarantinedFile::from).collect())
}

/// Removes the files that are `chosen` from the quarantine of a compile cache. Returns their number. A
/// gateway that uses the cache compiles them when it is asked to reload its policies.
///
/// # Errors
/// The list cannot be read or written.
pub fn clear_quarantine(cache: &Path, chosen: impl Fn(&QuarantinedFile) -> bool) -> std::io::Result<usize> {
    let file = cache.join(FILE_NAME);
    let mut entries = read(&file)?;
    let before = entries.len();
    entries.retain(|entry| !chosen(&entry.into()));
    let cleared = before - entries.len();
    if cleared > 0 {
        write(&file, &entries)?;
    }
    Ok(cleared)
}

/// Reads a list of entries; a missing file is an empty one.
fn read(file: &Path) -> std::io::Result<VecDeque<Entry>> {
    let opened = match fs::File::open(file) {
        Ok(opened) => opened,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(VecDeque::new()),
        Err(error) => return Err(error),
    };
    let mut text = String::new();
    opened.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

fn cpu_ms(limits: &CompileLimits) -> u64 {
    u64::try_from(limits.cpu.as_millis()).unwrap_or(u64::MAX)
}

fn write(file: &Path, entries: &VecDeque<Entry>) -> std::io::Result<()> {
    let staged = file.with_extension("json.new");
    if let Some(dir) = file.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::write(&staged, serde_json::to_vec_pretty(entries)?)?;
    fs::rename(staged, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Digest = Digest([7; 32]);

    #[test]
    fn a_file_stays_quarantined_after_a_restart_until_limits_are_raised() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = || Some(dir.path().join("cache").join("quarantine.json"));
        let limits = CompileLimits::default();
        let before = Quarantine::load(file());
        assert_eq!(before.check(FILE, &limits), Ok(()));
        before.add(FILE, "ended by signal 6", &limits);
        let after = Quarantine::load(file());
        let refusal = after.check(FILE, &limits).expect_err("quarantined");
        assert_eq!(refusal.kind(), "quarantined");
        assert!(refusal.to_string().contains("ended by signal 6"), "{refusal}");
        assert_eq!(after.check(Digest([8; 32]), &limits), Ok(()), "other content");
        let more = CompileLimits { memory_bytes: limits.memory_bytes + 1, ..limits };
        assert_eq!(after.check(FILE, &more), Ok(()), "more memory");
    }

    #[test]
    fn a_cleared_file_is_compiled_again_without_a_restart() {
        let dir = tempfile::tempdir().expect("a directory");
        let limits = CompileLimits::default();
        assert_eq!(quarantined_files(dir.path()).expect("read"), []);
        let quarantine = Quarantine::load(Some(dir.path().join(FILE_NAME)));
        quarantine.add(FILE, "ended by signal 6", &limits);
        quarantine.add(Digest([8; 32]), "ended by signal 9", &limits);
        let files = quarantined_files(dir.path()).expect("read");
        assert_eq!((files.len(), &*files[0].how), (2, "ended by signal 6"));
        let cleared = clear_quarantine(dir.path(), |file| file.digest == FILE.to_string());
        assert_eq!(cleared.expect("written"), 1);
        assert_eq!(quarantine.check(FILE, &limits), Ok(()));
        assert!(quarantine.check(Digest([8; 32]), &limits).is_err());
        // Later events do not bring it back.
        quarantine.add(Digest([9; 32]), "ended by signal 9", &limits);
        assert_eq!(quarantine.check(FILE, &limits), Ok(()));
    }

    #[test]
    fn the_file_is_bounded_and_a_broken_one_is_ignored() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("quarantine.json");
        fs::write(&file, "not JSON").expect("written");
        let quarantine = Quarantine::load(Some(file.clone()));
        let limits = CompileLimits::default();
        for number in 0..=MAX_ENTRIES {
            quarantine.add(Digest([u8::try_from(number).expect("small"); 32]), &"x".repeat(9_000), &limits);
        }
        let size = fs::metadata(&file).expect("a file").len();
        assert!(size < MAX_FILE_BYTES, "{size}");
        let again = Quarantine::load(Some(file));
        assert_eq!(again.check(Digest([0; 32]), &limits), Ok(()), "the oldest gave way");
        assert!(again.check(Digest([64; 32]), &limits).is_err());
    }
}
