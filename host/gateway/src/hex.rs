//! Ids in hexadecimal digits. Every leg writes several, and std's formatter takes more instructions.

use std::fmt;

/// `N` digits of an id, with leading zeros.
#[derive(Clone, Copy)]
pub(crate) struct Hex<const N: usize>([u8; N]);

impl Hex<32> {
    pub(crate) fn of_u128(id: u128) -> Self {
        let ([first, second], mut digits) = ([(id >> 64) as u64, id as u64].map(digits), [0; 32]);
        let (left, right) = digits.split_at_mut(16);
        left.copy_from_slice(&first);
        right.copy_from_slice(&second);
        Self(digits)
    }
}

impl Hex<16> {
    pub(crate) fn of_u64(id: u64) -> Self {
        Self(digits(id))
    }
}

impl<const N: usize> Hex<N> {
    pub(crate) fn as_bytes(&self) -> &[u8; N] {
        &self.0
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

/// Makes all digits at once: each byte of two words is one.
fn digits(id: u64) -> [u8; 16] {
    let half = |half: u64| {
        let mut nibbles = (half | half << 16) & 0x0000_FFFF_0000_FFFF;
        nibbles = (nibbles | nibbles << 8) & 0x00FF_00FF_00FF_00FF;
        nibbles = (nibbles | nibbles << 4) & 0x0F0F_0F0F_0F0F_0F0F;
        // 1 in each byte that is a letter.
        let letters = (nibbles + 0x0606_0606_0606_0606) >> 4 & 0x0101_0101_0101_0101;
        nibbles + 0x3030_3030_3030_3030 + letters * u64::from(b'a' - b'0' - 10)
    };
    let (left, right) = (half(id >> 32), half(id & 0xFFFF_FFFF));
    (u128::from(left) << 64 | u128::from(right)).to_be_bytes()
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
            let half = (id >> 64) as u64;
            assert_eq!(Hex::of_u128(id).to_string(), format!("{id:032x}"));
            assert_eq!(Hex::of_u64(half).to_string(), format!("{half:016x}"));
        }
    }
}
