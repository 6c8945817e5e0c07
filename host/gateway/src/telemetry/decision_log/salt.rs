//! The secret with which ids in the log are hashed. Without the salt, a reader of the log could hash a known
//! prompt and find out whether a client sent it.

use std::{
    fs::{self, OpenOptions},
    io::{self, ErrorKind, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use sha2::{Digest as _, Sha256};

/// Name of the file with the salt.
const FILE: &str = "salt";
/// Number of bits of an id. Every JSON reader keeps integers of 53 bits exactly.
const ID_BITS: u32 = 53;

/// A salt, 32 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Salt([u8; 32]);

/// Kind of an id. Equal hashes of different things have different ids.
#[derive(Clone, Copy, Debug)]
pub(super) enum Domain {
    Block,
    Session,
    Tenant,
}

impl Salt {
    /// Derives a salt from a configured text.
    pub(super) fn configured(text: &str) -> Self {
        Self(Sha256::digest(text.as_bytes()).into())
    }

    /// Reads the salt of a directory, or creates one and writes it there.
    ///
    /// # Errors
    /// The file can be neither read nor written, or does not contain a salt.
    pub(super) fn of_dir(dir: &Path) -> io::Result<Self> {
        if let Some(salt) = Self::read(dir)? {
            return Ok(salt);
        }
        let salt = Self(rand::random());
        salt.keep(dir)?;
        // Another gateway may have been faster.
        Ok(Self::read(dir)?.unwrap_or(salt))
    }

    /// Reads the salt of a directory; `None` without one. The file may be empty: a full disk, or a
    /// machine that stopped, left it so.
    fn read(dir: &Path) -> io::Result<Option<Self>> {
        let path = dir.join(FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) if !text.is_empty() => text,
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => return Ok(None),
        };
        Self::parse(text.trim()).map(Some).ok_or_else(|| {
            let path = path.display();
            let problem =
                format!("{path} does not hold 64 hexadecimal digits: remove it, and a new one is made");
            io::Error::new(ErrorKind::InvalidData, problem)
        })
    }

    /// Writes the salt to the directory, unless the directory has one. Its file is whole or absent.
    ///
    /// # Errors
    /// The file cannot be written. A partly written file is removed.
    pub(super) fn keep(&self, dir: &Path) -> io::Result<()> {
        let path = dir.join(FILE);
        match fs::metadata(&path) {
            Ok(found) if found.len() > 0 => return Ok(()),
            Ok(_) => fs::remove_file(&path)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let text: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let new = dir.join(format!("{FILE}.{:016x}", rand::random::<u64>()));
        let written = write(&new, &text).and_then(|()| match fs::hard_link(&new, &path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            // The file system has no links.
            Err(_) => fs::rename(&new, &path),
            linked => linked,
        });
        let _ = fs::remove_file(&new);
        written
    }

    /// Returns the id of a hash.
    pub(super) fn id(&self, domain: Domain, hash: u64) -> u64 {
        let mut digest = Sha256::new();
        digest.update(self.0);
        digest.update([domain as u8]);
        digest.update(hash.to_le_bytes());
        let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = digest.finalize().into();
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) >> (u64::BITS - ID_BITS)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut salt = [0; 32];
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
        if pairs.len() != salt.len() {
            return None;
        }
        for (byte, pair) in salt.iter_mut().zip(pairs) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(salt))
    }
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
