//! How many file descriptors this process may use, and how many of them connections of clients may take.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Part of the descriptors that connections of clients may take: half. The others are for engines, files
/// and operators.
const CLIENTS_PART: usize = 2;

/// Raises the soft limit of open files to the hard limit: common soft limits are far below what a gateway
/// needs.
pub(crate) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, ?current, ?maximum, "limit of open files not raised");
    }
}

/// Returns the limit of open connections: the configured one, or less if the descriptors do not suffice.
pub(crate) fn connection_limit(configured: usize) -> usize {
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok());
    let possible = files.map_or(usize::MAX, |files| (files / CLIENTS_PART).max(1));
    if possible < configured {
        tracing::warn!(
            configured,
            limit = possible,
            "limits.connections exceeds the file descriptor limit: raise it (ulimit -n)"
        );
    }
    configured.min(possible)
}
