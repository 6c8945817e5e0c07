//! Finds the causes of an error of a call, such as the operating system's error.

use std::{error::Error, io, iter};

/// Returns whether an error, or one that caused it, says that this host has run out of something: file
/// descriptors, ports or memory for a connection. It says nothing about the worker.
#[must_use]
pub fn is_local_shortage(error: &(dyn Error + 'static)) -> bool {
    // `ENOMEM`, `ENFILE`, `EMFILE`, `EADDRNOTAVAIL`, `ENOBUFS` of Linux.
    any_code(error, |code| matches!(code, 12 | 23 | 24 | 99 | 105))
}

/// Returns whether an error, or one that caused it, says that no process listens at the address.
pub(crate) fn is_refused(error: &(dyn Error + 'static)) -> bool {
    any_code(error, |code| code == 111)
}

fn any_code(error: &(dyn Error + 'static), wanted: impl Fn(i32) -> bool) -> bool {
    causes(error)
        .any(|error| error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error).is_some_and(&wanted))
}

/// Returns an error and those that caused it.
pub(crate) fn causes<'a>(
    error: &'a (dyn Error + 'static),
) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |&error| {
        // `source` of an error that `io::Error::other` wraps is the source of the wrapped one.
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        wrapped.map(|inner| inner as &'a (dyn Error + 'static)).or_else(|| error.source())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_found_behind_other_errors() {
        let error = |code| io::Error::other(io::Error::from_raw_os_error(code));
        assert!(is_local_shortage(&error(24)) && is_local_shortage(&io::Error::from_raw_os_error(99)));
        assert!(is_refused(&error(111)) && !is_refused(&error(24)));
        assert!(!is_local_shortage(&error(111)) && !is_local_shortage(&io::Error::other("x")));
    }
}
