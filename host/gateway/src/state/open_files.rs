//! How many file descriptors this process may use, and how many of them connections of clients may take.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Limits;

/// Descriptors for listeners, operators, files and probes.
const RESERVED: usize = 128;
/// Descriptors of a data thread without connections: those of its runtime, and of its listeners.
const OF_THREAD: usize = 6;
/// Part of the others that connections of clients may take: a third. A request of a pair has two connections
/// to engines beside that of its client.
const CLIENTS_PART: usize = 3;

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
    let possible = files.map_or(usize::MAX, connections_within);
    if possible < configured {
        if configured == Limits::default().connections {
            tracing::info!(
                limit = possible,
                "the file descriptor limit (ulimit -n) limits connections of clients"
            );
        } else {
            tracing::warn!(
                configured,
                limit = possible,
                "limits.connections exceeds the file descriptor limit: raise it (ulimit -n)"
            );
        }
    }
    configured.min(possible)
}

/// Returns why so many data threads cannot run, if they cannot.
pub(crate) fn too_many_threads(threads: usize) -> Option<String> {
    let most = getrlimit(Resource::Nofile).maximum.and_then(|files| usize::try_from(files).ok())?;
    too_many_for(threads, most)
}

fn too_many_for(threads: usize, most: usize) -> Option<String> {
    let needed = threads.saturating_mul(OF_THREAD).saturating_add(RESERVED);
    (needed > most).then(|| {
        let advice = match most.saturating_sub(RESERVED) / OF_THREAD {
            0 => format!("raise the limit to {needed} or more"),
            fitting => format!("write at most {fitting}, or `0` for one for every two cores"),
        };
        format!(
            "`{threads}` threads need {needed} file descriptors, and this process may have {most} (ulimit -Hn): \
             {advice}"
        )
    })
}

/// Returns how many connections of clients leave descriptors for what they cause.
fn connections_within(files: usize) -> usize {
    (files.saturating_sub(RESERVED) / CLIENTS_PART).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n7_a_limit_that_suffices_for_no_thread_is_to_be_raised() {
        let advice = |threads, most| {
            too_many_for(threads, most).map(|text| text.split_once("): ").unwrap().1.to_owned())
        };
        // N7.24
        assert_eq!(advice(1, 64).unwrap(), "raise the limit to 134 or more");
        assert_eq!(advice(4, 140).unwrap(), "write at most 2, or `0` for one for every two cores");
        assert_eq!(advice(2, 140), None);
    }

    #[test]
    fn l4_each_connection_of_a_client_leaves_two_descriptors_for_engines() {
        // L4.3
        assert_eq!([1_024, 128, 0].map(connections_within), [298, 1, 1]);
        assert!(3 * connections_within(65_536) + RESERVED <= 65_536);
    }
}
