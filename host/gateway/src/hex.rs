//! Ids in hexadecimal digits. Every leg writes several, and std's formatter takes more instructions.

use std::fmt;

/// `N` digits of an id, with leading zeros.
#[derive(Clone, Copy)]
pub(crate) struct Hex<const N: usize>([u8; N]);

impl Hex<32> {
    pub(crate) fn of_u128(id: u128) -> Self {
        Self::of_bytes(&id.to_be_bytes())
    }
}

impl Hex<16> {
    pub(crate) fn of_u64(id: u64) -> Self {
        Self::of_bytes(&id.to_be_bytes())
    }
}

impl Hex<2> {
    pub(crate) fn of_u8(number: u8) -> Self {
        Self::of_bytes(&[number])
    }
}

impl<const N: usize> Hex<N> {
    fn of_bytes(bytes: &[u8]) -> Self {
        let digit = |value: u8| if value < 10 { b'0' + value } else { b'a' - 10 + value };
        let mut digits = [b'0'; N];
        let (pairs, _) = digits.as_chunks_mut::<2>();
        for (pair, byte) in pairs.iter_mut().zip(bytes) {
            *pair = [digit(byte >> 4), digit(byte & 0xF)];
        }
        Self(digits)
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl<const N: usize> fmt::Display for Hex<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_those_of_the_formatter() {
        for id in [0, 1, 0xF0, 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef, u128::MAX] {
            let (half, low) = ((id >> 64) as u64, (id & 0xFF) as u8);
            assert_eq!(Hex::of_u128(id).to_string(), format!("{id:032x}"));
            assert_eq!(Hex::of_u64(half).to_string(), format!("{half:016x}"));
            assert_eq!(Hex::of_u8(low).to_string(), format!("{low:02x}"));
        }
    }
}
