//! ZMTP greeting: the first 64 bytes from each side, with signature, version and mechanism.

/// Length of a greeting in bytes.
pub const LENGTH: usize = 64;
const VERSION: usize = 10;
const MECHANISM: std::ops::Range<usize> = 12..32;
const NULL: &[u8] = b"NULL";

/// Why a peer's greeting is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GreetingError {
    /// The signature does not match ZMTP's.
    #[error("the peer does not speak ZMTP")]
    Signature,
    /// The version is older than 3.0.
    #[error("the peer speaks ZMTP {0}: expected 3")]
    Version(u8),
    /// The security mechanism is not `NULL`.
    #[error("the peer requires the mechanism `{0}`: expected NULL")]
    Mechanism(String),
}

/// Returns the own greeting: ZMTP 3.1, NULL.
#[must_use]
pub fn ours() -> [u8; LENGTH] {
    let mut greeting = [0; LENGTH];
    let head = [0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1].into_iter().chain(NULL.iter().copied());
    greeting.iter_mut().zip(head).for_each(|(byte, value)| *byte = value);
    greeting
}

/// Returns the minor version of the greeting in `bytes`, or `None` if it is incomplete. Errors are reported
/// as early as possible.
///
/// # Errors
/// [`GreetingError`].
pub fn check(bytes: &[u8]) -> Result<Option<u8>, GreetingError> {
    let wrong = |at: usize, right: fn(u8) -> bool| bytes.get(at).is_some_and(|byte| !right(*byte));
    if wrong(0, |byte| byte == 0xff) || wrong(9, |byte| byte & 1 == 1) {
        return Err(GreetingError::Signature);
    }
    if let Some(version) = bytes.get(VERSION).filter(|version| **version < 3) {
        return Err(GreetingError::Version(*version));
    }
    if let Some(mechanism) = bytes.get(MECHANISM) {
        let name = mechanism.split(|byte| *byte == 0).next().unwrap_or_default();
        if name != NULL || mechanism.iter().skip(NULL.len()).any(|byte| *byte != 0) {
            return Err(GreetingError::Mechanism(name.escape_ascii().to_string()));
        }
    }
    Ok(bytes.get(..LENGTH).and_then(|whole| whole.get(VERSION + 1)).copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_judged_as_it_comes() {
        let ours = ours();
        assert_eq!(ours[..12], [0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1]);
        assert_eq!(check(&ours), Ok(Some(1)));
        assert!((0..LENGTH).all(|cut| check(&ours[..cut]) == Ok(None)));
        assert_eq!(check(b"H"), Err(GreetingError::Signature));
        assert_eq!(check(b"\xff\0\0\0\0\0\0\0\0\x7e"), Err(GreetingError::Signature));
        assert_eq!(check(&[0xff, 0, 0, 0, 0, 0, 0, 0, 5, 0x7f, 1]), Err(GreetingError::Version(1)));
        for (name, told) in
            [(b"PLAIN\0".as_slice(), "PLAIN"), (b"NULLS", "NULLS"), (b"NULL\0x", "NULL"), (b"\x07", "\\x07")]
        {
            let mut other = ours;
            other[12..16].fill(0);
            other[12..12 + name.len()].copy_from_slice(name);
            assert_eq!(check(&other[..32]), Err(GreetingError::Mechanism(told.to_owned())));
        }
    }
}
