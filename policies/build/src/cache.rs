//! Intermediate results that later builds of scripts start from: one file each, below one directory.
//!
//! An entry is replaced by renaming a complete file over it, so that builds at the same time do not disturb
//! each other. Its digest is checked each time it is read.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use sha2::{Digest as _, Sha256};

/// Bytes of all entries above which the oldest are removed: those of some twenty worlds.
const MAX_BYTES: u64 = 512 << 20;
/// Age of a file that a killed build did not rename.
const ABANDONED: Duration = Duration::from_secs(3_600);
/// Start of each entry. Its number has to change with the format.
const MAGIC: &[u8] = b"pointsman build 1\n";
const DIGEST_BYTES: usize = 32;

/// A directory with results of earlier builds. A program that can write there can change what is built.
#[derive(Clone, Debug)]
pub struct BuildCache {
    dir: PathBuf,
    max_bytes: u64,
}

/// Identifies an entry: a kind, and the digest of all that went into the result.
#[derive(Clone, Debug)]
pub(crate) struct Key(String);

impl Key {
    pub(crate) fn new(kind: &str, inputs: &[&[u8]]) -> Self {
        Self(format!("{kind}-{:x}", digest(inputs.iter().copied())))
    }
}

impl BuildCache {
    /// Uses `dir`, which is created with the first entry. It has at most 512 MiB.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), max_bytes: MAX_BYTES }
    }

    /// Returns the parts of an entry. `None`: the cache has no such entry, or it was damaged and was removed.
    pub(crate) fn get(&self, key: &Key) -> Option<Vec<Vec<u8>>> {
        let path = self.dir.join(&key.0);
        let bytes = fs::read(&path).ok()?;
        let parts = decoded(key, &bytes);
        let _ = match parts {
            // So that it is not the oldest one while it is used.
            Some(_) => renew(&path),
            None => fs::remove_file(&path),
        };
        parts
    }

    /// Stores an entry in place of one of the same key.
    ///
    /// # Errors
    /// The file cannot be written: the next build has to do all of the work again.
    pub(crate) fn put(&self, key: &Key, parts: &[&[u8]]) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.dir)?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.dir.join(format!(".{}.{}.{number}", key.0, process::id()));
        let stored = fs::write(&unfinished, encoded(key, parts))
            .and_then(|()| fs::rename(&unfinished, self.dir.join(&key.0)));
        if stored.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        self.remove_oldest();
        stored
    }

    /// Removes the oldest entries while all together are too large, and the remains of killed builds.
    fn remove_oldest(&self) {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let Ok(found) = entry.metadata() else { continue };
            let Ok(modified) = found.modified() else { continue };
            if !entry.file_name().to_string_lossy().starts_with('.') {
                entries.push((modified, found.len(), entry.path()));
            } else if SystemTime::now().duration_since(modified).is_ok_and(|age| age > ABANDONED) {
                let _ = fs::remove_file(entry.path());
            }
        }
        let mut bytes: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        entries.sort_unstable();
        for (_, size, path) in entries {
            if bytes <= self.max_bytes {
                return;
            }
            if fs::remove_file(path).is_ok() {
                bytes = bytes.saturating_sub(size);
            }
        }
    }
}

/// Returns the SHA-256 of parts and of their lengths.
pub(crate) fn digest<'a>(parts: impl Iterator<Item = &'a [u8]>) -> sha2::digest::Output<Sha256> {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(length(part));
        hash.update(part);
    }
    hash.finalize()
}

fn length(part: &[u8]) -> [u8; 8] {
    u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes()
}

fn renew(path: &Path) -> io::Result<()> {
    fs::File::options().append(true).open(path)?.set_modified(SystemTime::now())
}

/// The magic, the digest of the key and of all parts, and each part behind its length.
fn encoded(key: &Key, parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(sealed(key, parts.iter().copied()));
    for part in parts {
        bytes.extend(length(part));
        bytes.extend(*part);
    }
    bytes
}

fn decoded(key: &Key, bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (seal, mut rest) = bytes.strip_prefix(MAGIC)?.split_at_checked(DIGEST_BYTES)?;
    let mut parts = Vec::new();
    while let Some((length, behind)) = rest.split_first_chunk() {
        let (part, behind) = behind.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        parts.push(part);
        rest = behind;
    }
    let is_whole = rest.is_empty() && *sealed(key, parts.iter().copied()) == *seal;
    is_whole.then(|| parts.into_iter().map(<[u8]>::to_vec).collect())
}

/// Digest of an entry's parts and its key, so that an entry under another key's name is not accepted.
fn sealed<'a>(key: &'a Key, parts: impl Iterator<Item = &'a [u8]>) -> sha2::digest::Output<Sha256> {
    digest(std::iter::once(key.0.as_bytes()).chain(parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, BuildCache) {
        let dir = tempfile::tempdir().expect("a directory");
        let cache = BuildCache::new(&dir.path().join("builds"));
        (dir, cache)
    }

    #[test]
    fn an_entry_is_found_by_what_went_into_it() {
        let (_dir, cache) = cache();
        let key = Key::new("js", &[b"wit", b"world"]);
        assert!(cache.get(&key).is_none());
        cache.put(&key, &[b"one", b""]).expect("stored");
        assert_eq!(cache.get(&key), Some(vec![b"one".to_vec(), Vec::new()]));
        for other in [Key::new("js", &[b"wi", b"tworld"]), Key::new("python", &[b"wit", b"world"])] {
            assert!(cache.get(&other).is_none(), "{other:?}");
        }
        cache.put(&key, &[b"two"]).expect("stored");
        assert_eq!(cache.get(&key), Some(vec![b"two".to_vec()]));
    }

    #[test]
    fn a_damaged_entry_is_removed() {
        let (_dir, cache) = cache();
        let (key, other) = (Key::new("js", &[b"a"]), Key::new("js", &[b"b"]));
        cache.put(&key, &[b"component", b"code"]).expect("stored");
        let path = cache.dir.join(&key.0);
        let whole = fs::read(&path).expect("an entry");
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, damaged).expect("written");
            assert!(cache.get(&key).is_none() && !path.exists(), "byte {at}");
            fs::write(&path, &whole[..at]).expect("written");
            assert!(cache.get(&key).is_none() && !path.exists(), "{at} bytes");
        }
        fs::write(&path, &whole).expect("written");
        fs::copy(&path, cache.dir.join(&other.0)).expect("copied");
        assert!(cache.get(&other).is_none() && cache.get(&key).is_some());
    }

    #[test]
    fn the_entries_that_were_not_used_longest_make_room() {
        let (_dir, mut cache) = cache();
        cache.max_bytes = 3_500;
        let keys: Vec<_> = (0..4_u8).map(|number| Key::new("js", &[&[number]])).collect();
        for (key, age) in keys.iter().zip([30, 20, 10, 0]) {
            cache.put(key, &[&[7; 1_000]]).expect("stored");
            let at = SystemTime::now() - Duration::from_secs(age);
            let file = fs::File::options().append(true).open(cache.dir.join(&key.0));
            file.and_then(|file| file.set_modified(at)).expect("aged");
            assert!(cache.get(&keys[0]).is_some());
        }
        let kept: Vec<_> = keys.iter().map(|key| cache.dir.join(&key.0).exists()).collect();
        assert_eq!(kept, [true, false, true, true]);
        let left = cache.dir.join(".js-1.1.1");
        fs::write(&left, "half").expect("written");
        cache.put(&keys[3], &[b"x"]).expect("stored");
        assert!(left.exists());
        let old = SystemTime::now() - 2 * ABANDONED;
        fs::File::options().append(true).open(&left).and_then(|file| file.set_modified(old)).expect("aged");
        cache.put(&keys[3], &[b"x"]).expect("stored");
        assert!(!left.exists());
    }

    #[test]
    fn builds_at_the_same_time_read_whole_entries() {
        let (_dir, cache) = cache();
        let key = Key::new("python", &[b"x"]);
        cache.put(&key, &[&[0; 10_000]]).expect("stored");
        std::thread::scope(|scope| {
            for writer in 1..4_u8 {
                let (cache, key) = (&cache, &key);
                scope.spawn(move || {
                    for _ in 0..50 {
                        cache.put(key, &[&[writer; 10_000]]).expect("stored");
                        let parts = cache.get(key).expect("a whole entry");
                        assert!(parts[0].iter().all(|byte| *byte == parts[0][0]));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(&cache.dir).expect("listed").count(), 1);
    }
}
