//! CPU time and memory of processes, from /proc: nanoseconds, children included.

use std::fs;

/// CPU time of a process and its children so far, nanoseconds: the scheduler's own count for every thread.
pub(super) fn nanos(pid: u32) -> u64 {
    family(pid).into_iter().map(of_one).sum()
}

/// Resident memory of a process and its children, megabytes.
pub(super) fn rss_mb(pid: u32) -> f64 {
    let kilobytes = |pid: u32| -> f64 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
    };
    family(pid).into_iter().map(kilobytes).sum::<f64>() / 1024.0
}

fn family(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    std::iter::once(pid).chain(children.split_whitespace().filter_map(|child| child.parse().ok())).collect()
}

fn of_one(pid: u32) -> u64 {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let on_cpu = |stat: String| stat.split_whitespace().next()?.parse::<u64>().ok();
    threads
        .flatten()
        .filter_map(|thread| fs::read_to_string(thread.path().join("schedstat")).ok().and_then(on_cpu))
        .sum()
}
