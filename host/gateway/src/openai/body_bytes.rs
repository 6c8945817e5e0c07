//! Counts the bytes of bodies. All requests in flight together have a limit.

use crate::{budget::Share, openai::error::ApiError};

/// Largest body that may use the last eighth of the bytes in flight: large uploads cannot keep small
/// requests out.
const SMALL_BODY: usize = 256 * 1024;
/// Part of the bytes in flight that only small bodies may use.
const SMALL_BODIES_PART: usize = 8;

/// Counts bytes of a body that arrived.
///
/// # Errors
/// The bodies of all requests in flight take too much memory.
pub(crate) fn reserve(held: &mut Share, more: usize) -> Result<(), ApiError> {
    let is_small = held.amount() + more <= SMALL_BODY;
    let kept_free = if is_small { 0 } else { held.limit() / SMALL_BODIES_PART };
    if held.grow(more, kept_free) { Ok(()) } else { Err(ApiError::BodyBytesInFlight(held.limit())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;

    #[test]
    fn the_last_part_is_for_small_bodies() {
        let budget = Budget::new(SMALL_BODY * SMALL_BODIES_PART);
        let mut large = budget.share();
        assert_eq!(reserve(&mut large, SMALL_BODY * (SMALL_BODIES_PART - 1)), Ok(()));
        assert!(reserve(&mut large, 1).is_err());
        assert_eq!(reserve(&mut budget.share(), SMALL_BODY), Ok(()));
    }
}
