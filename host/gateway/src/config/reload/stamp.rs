//! What a look finds of a file, and whether the next look has to read it again.
//!
//! A file that changes gets another time of change, which `rsync -t` cannot keep. Two changes within a tick
//! of the file system's clock get the same one. So a reading counts for later looks if it came long after the
//! file was first seen with these times:
//!
//! ```text
//!  first seen with these times      read          next look: the same times
//!  ----|------------------------------|----------------|--->
//!      |<--------- SETTLED ---------->|
//! ```

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use pointsman_config_file::secret_files;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use crate::config::{SECRET_KEYS, credentials::MAX_FILE_BYTES};

/// Longer than a tick of any file system's clock: 2 s in FAT.
const SETTLED: Duration = Duration::from_secs(3);
/// How long a reading counts. Network file systems tell times from a cache, and some file systems change them
/// late or never.
const MAX_AGE: Duration = Duration::from_mins(1);

/// A file at one time. Two are equal if the content is.
#[derive(Clone, Debug, Default)]
pub(super) struct Stamp {
    /// SHA-256 of the content; `None` if it cannot be read.
    digest: Option<[u8; 32]>,
    /// Files that the content names for secrets.
    named: BTreeSet<PathBuf>,
    reading: Option<Reading>,
}

/// A reading of a file.
#[derive(Clone, Copy, Debug)]
struct Reading {
    identity: Identity,
    /// When a look first found this identity.
    first_seen: Instant,
    at: Instant,
}

/// What differs once the content has changed, except within a tick of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl PartialEq for Stamp {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Stamp {}

impl Stamp {
    /// Looks at a file, which was `before`, and reads it if it may have changed.
    pub(super) fn of(file: &Path, before: Option<&Self>) -> Self {
        Self::look(file, before).unwrap_or_default()
    }

    /// Returns the files that the content names for secrets.
    pub(super) fn named(&self) -> &BTreeSet<PathBuf> {
        &self.named
    }

    fn look(file: &Path, before: Option<&Self>) -> io::Result<Self> {
        let identity = Identity::of(file)?;
        let at = Instant::now();
        let known = before.and_then(|before| Some((before, before.reading?)));
        let known = known.filter(|(_, reading)| reading.identity == identity);
        if let Some((before, reading)) = known
            && reading.counts(at)
        {
            return Ok(before.clone());
        }
        let first_seen = known.map_or(at, |(_, reading)| reading.first_seen);
        let content = content(file)?;
        let reading = Some(Reading { identity, first_seen, at });
        Ok(Self { digest: Some(Sha256::digest(&content).into()), named: named(&content), reading })
    }
}

impl Reading {
    /// Returns whether a file of the same identity has the content that was read.
    fn counts(&self, now: Instant) -> bool {
        self.at - self.first_seen >= SETTLED && now - self.at < MAX_AGE
    }
}

impl Identity {
    /// # Errors
    /// The file is missing, or not a regular one.
    fn of(file: &Path) -> io::Result<Self> {
        let found = fs::metadata(file)?;
        if !found.is_file() {
            // Opening a pipe would wait for somebody who writes to it.
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            device: found.dev(),
            inode: found.ino(),
            size: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// Reads a file, up to its largest size.
fn content(file: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    fs::File::open(file)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut content)?;
    Ok(content)
}

fn named(content: &[u8]) -> BTreeSet<PathBuf> {
    let text = String::from_utf8_lossy(content);
    // Most name none: parsing thousands of them would take long.
    if text.contains("file") { secret_files(&text, &SECRET_KEYS, &[]) } else { BTreeSet::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at one file.
    struct Looks {
        dir: tempfile::TempDir,
        stamp: Stamp,
    }

    impl Looks {
        fn start(content: &str) -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("key"), content).unwrap();
            let mut looks = Self { dir, stamp: Stamp::default() };
            looks.again();
            looks
        }

        fn file(&self) -> PathBuf {
            self.dir.path().join("key")
        }

        fn again(&mut self) -> Option<[u8; 32]> {
            self.stamp = Stamp::of(&self.file(), Some(&self.stamp));
            self.stamp.digest
        }

        /// Replaces what the last look found: only a reading finds the content again.
        fn forge(&mut self) {
            self.stamp.digest = Some([7; 32]);
        }
    }

    fn digest(content: &str) -> Option<[u8; 32]> {
        Some(Sha256::digest(content).into())
    }

    #[tokio::test(start_paused = true)]
    async fn k1_a_settled_file_is_read_once_a_minute() {
        let mut looks = Looks::start("key-1");
        for _ in 0..3 {
            looks.forge();
            // K1.13: a change could have the same times
            assert_eq!(looks.again(), digest("key-1"));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(looks.again(), digest("key-1"));
        looks.forge();
        for _ in 0..59 {
            // K1.13
            assert_eq!(looks.again(), Some([7; 32]));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(looks.again(), digest("key-1"));
    }

    #[tokio::test(start_paused = true)]
    async fn k1_a_file_that_changes_with_its_time_and_length_kept_is_read_again() {
        let mut looks = Looks::start("key-1");
        tokio::time::advance(SETTLED).await;
        looks.again();
        let modified = fs::metadata(looks.file()).unwrap().modified().unwrap();
        // The clock of files ticks every few milliseconds.
        std::thread::sleep(Duration::from_millis(50));
        fs::write(looks.file(), "key-2").unwrap();
        fs::File::options().write(true).open(looks.file()).unwrap().set_modified(modified).unwrap();
        // K1.6
        assert_eq!(looks.again(), digest("key-2"));
        fs::remove_file(looks.file()).unwrap();
        assert_eq!(looks.again(), None);
    }
}
