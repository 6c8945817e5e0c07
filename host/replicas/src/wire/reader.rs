//! Reads values of a message within bounds.

use super::WireError;
use crate::names::MAX_NAME;

/// The bytes that were not read yet.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn read_bytes(&mut self, length: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(WireError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8, WireError> {
        self.read_bytes(1)?.first().copied().ok_or(WireError::Short)
    }

    /// Reads a number of 8 bytes.
    pub(super) fn word(&mut self) -> Result<u64, WireError> {
        let bytes = self.read_bytes(8)?.try_into().map_err(|_| WireError::Short)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads a LEB128 number.
    pub(super) fn number(&mut self) -> Result<u64, WireError> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return Err(WireError::Range("number"));
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(WireError::Range("number"))
    }

    /// Reads a LEB128 number of at most 32 bits.
    pub(super) fn small(&mut self, what: &'static str) -> Result<u32, WireError> {
        u32::try_from(self.number()?).map_err(|_| WireError::Range(what))
    }

    /// Reads a count and this many numbers of 8 bytes.
    pub(super) fn words(&mut self, most: usize) -> Result<impl Iterator<Item = u64> + use<'a>, WireError> {
        let count = self.small("number of hashes")? as usize;
        if count > most {
            return Err(WireError::Range("number of hashes"));
        }
        let bytes = self.read_bytes(count * 8)?;
        Ok(bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)))
    }

    /// Reads a name.
    pub(super) fn text(&mut self) -> Result<String, WireError> {
        let length = usize::from(self.byte()?);
        if length > MAX_NAME {
            return Err(WireError::Range("length of a name"));
        }
        String::from_utf8(self.read_bytes(length)?.to_vec()).map_err(|_| WireError::Range("name"))
    }
}
