//! How much memory this process may use, and how much of it bodies may take.

use std::{fs, path::Path};

use crate::config::{Config, Limits};

/// Directory under which the control groups are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";
/// Part of the memory limit that bodies in flight may have by default: a quarter, because of their copies.
const BODIES_PART: usize = 4;
/// Largest memory of a body, in its size: the body, and a copy for the engine of each leg.
const BODY_COPIES: usize = 3;
/// Memory beside the index, bodies and decisions, bytes: code, buffers, policies and their compiler.
const BASE: usize = 128 * 1024 * 1024;

/// Returns the limit of bodies in flight: the configured one, or less than the default if the memory limit
/// does not suffice. Warns if the settings may need more memory than there is.
pub(crate) fn body_limit(config: &Config) -> usize {
    let configured = config.limits.body_bytes_in_flight;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(memory) = memory_limit(&groups, Path::new(CGROUPS)) else { return configured };
    let mut limit = configured;
    if configured == Limits::default().body_bytes_in_flight {
        limit = configured.min(bodies_within(memory, config.server.max_body_bytes));
    }
    if limit < configured {
        tracing::info!(
            limit,
            memory,
            "the memory limit of the control group limits limits.body_bytes_in_flight"
        );
    }
    let needed = [config.index.byte_budget, limit.saturating_mul(BODY_COPIES), config.decisions.bytes];
    let needed = needed.into_iter().fold(BASE, usize::saturating_add);
    if needed > memory {
        tracing::warn!(
            needed,
            memory,
            "the gateway may need more memory than its control group has: raise that limit, or lower \
             index.byte_budget, limits.body_bytes_in_flight or decisions.bytes"
        );
    }
    limit
}

/// Returns how many bytes of bodies may be in flight by default, at least one body of `max_body` bytes: large
/// bodies use at most seven eighths.
fn bodies_within(memory: usize, max_body: usize) -> usize {
    (memory / BODIES_PART).max(max_body.div_ceil(7).saturating_mul(8))
}

/// Returns the smallest memory limit of the control groups that `groups` names, as `/proc/self/cgroup` does,
/// and of those above them. `root` has the hierarchy of version 2, and in `memory` that of version 1. In a
/// container the path may be the host's and lead nowhere: then the limit is at the top.
fn memory_limit(groups: &str, root: &Path) -> Option<usize> {
    let limits = groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let file = match controllers {
            "" => Some((root.to_owned(), "memory.max")),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some((root.join("memory"), "memory.limit_in_bytes"))
            }
            _ => None,
        };
        let above = Path::new(path.trim_start_matches('/')).ancestors();
        above.filter_map(move |group| {
            let (top, name) = file.as_ref()?;
            fs::read_to_string(top.join(group).join(name)).ok()?.trim().parse().ok()
        })
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l6_the_smallest_limit_above_the_own_control_group_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write = |file: &str, limit: &str| {
            let file = dir.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{limit}\n")).unwrap();
        };
        let limit = |groups: &str| memory_limit(groups, dir.path());
        assert_eq!([limit(""), limit("0::/\n"), limit("nonsense")], [None; 3]);
        write("pod/memory.max", "1000");
        write("pod/gateway/memory.max", "max");
        write("pod/gateway/inner/memory.max", "2000");
        write("memory/memory.limit_in_bytes", "9223372036854771712");
        write("memory/docker/memory.limit_in_bytes", "700");
        // L6.1
        assert_eq!(limit("0::/pod/gateway/inner\n"), Some(1000));
        assert_eq!(limit("0::/other\n"), None);
        assert_eq!(limit("5:cpu:/docker\n4:memory:/docker/a\n0::/pod\n"), Some(700));
        assert_eq!(limit("4:cpu,memory:/other\n"), Some(9_223_372_036_854_771_712));
        write("memory.max", "500");
        assert_eq!(limit("0::/of/the/host\n"), Some(500));
    }

    #[test]
    fn l6_a_quarter_of_the_memory_is_for_bodies_and_one_always_fits() {
        // L6.1
        assert_eq!([400, 100, 0].map(|memory| bodies_within(memory, 70)), [100, 80, 80]);
        assert_eq!(bodies_within(0, 71), 88);
        let default = Config::default();
        let (budget, body) = (bodies_within(0, default.server.max_body_bytes), default.server.max_body_bytes);
        assert!(budget / 8 * 7 >= body, "as the configuration demands");
    }
}
