//! Accesses of a policy to its slot's state during one call, noted in their order for the decision record.

use crate::encoding::write_bytes;

/// Bytes of keys and values noted for one call; later accesses are dropped and the record says so.
pub(crate) const MAX_NOTED_BYTES: usize = 8_192;

/// The key was missing.
pub(crate) const MISSING: u32 = 0;
/// The key had this value.
pub(crate) const VALUE: u32 = 1;
/// The policy wrote the key. Later reads of the key say nothing about the state before the call.
pub(crate) const WRITTEN: u32 = 2;

/// Keys that one policy call read and wrote. Empty buffers are reused: noting allocates nothing in steady
/// state.
#[derive(Debug, Default)]
pub struct StateAccesses {
    words: Vec<u32>,
    count: u32,
    truncated: bool,
}

impl StateAccesses {
    /// Notes a read and what it found; `None` if the key was missing.
    pub fn note_read(&mut self, key: &str, found: Option<&[u8]>) {
        let kind = if found.is_some() { VALUE } else { MISSING };
        self.note(kind, key, found.unwrap_or_default());
    }

    /// Notes a write.
    pub fn note_write(&mut self, key: &str) {
        self.note(WRITTEN, key, &[]);
    }

    fn note(&mut self, kind: u32, key: &str, value: &[u8]) {
        if self.words.len() * size_of::<u32>() + key.len() + value.len() > MAX_NOTED_BYTES {
            self.truncated = true;
            return;
        }
        self.count += 1;
        self.words.push(kind);
        write_bytes(key.as_bytes(), &mut self.words);
        write_bytes(value, &mut self.words);
    }

    /// Moves the accesses to the end of `out`, as those of the stage with this number. Returns whether there
    /// were any.
    pub(crate) fn move_to(&mut self, stage: u32, out: &mut Vec<u32>) -> bool {
        let any = self.count > 0 || self.truncated;
        if any {
            out.extend([stage, u32::from(self.truncated), self.count]);
            out.append(&mut self.words);
            (self.count, self.truncated) = (0, false);
        }
        any
    }
}
