//! CPU time and memory of processes, from `/proc`, and the clock that processes share.

use std::{collections::BTreeMap, fmt, fs};

use anyhow::Context as _;

/// Unit of the times in `/proc/PID/stat`: `USER_HZ` is 100.
const TICK_NANOS: u64 = 10_000_000;

/// Memory of a process, megabytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Everything that is resident, including pages of the binary and of libraries.
    pub resident: f64,
    /// Heap, stacks, guest memories and compiled guest code.
    pub anonymous: f64,
}

impl Memory {
    /// Reads the memory of one process now.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))
            .with_context(|| format!("could not read the memory of process {pid}"))?;
        Ok(Self { resident: megabytes(&status, "VmRSS:")?, anonymous: megabytes(&status, "RssAnon:")? })
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MB resident, {:.1} MB anonymous", self.resident, self.anonymous)
    }
}

/// Sets the peak of a process' resident memory to what is resident now.
pub fn reset_peak(pid: u32) -> anyhow::Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5")
        .with_context(|| format!("could not reset the peak of the memory of process {pid}"))
}

/// Largest resident memory of a process since [`reset_peak`], megabytes.
pub fn peak_mb(pid: u32) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))
        .with_context(|| format!("could not read the memory of process {pid}"))?;
    megabytes(&status, "VmHWM:")
}

/// CPU time that a process and its children used so far, nanoseconds: the scheduler's count of every live
/// thread.
pub fn cpu_nanos(pid: u32) -> u64 {
    family(pid).into_iter().map(threads_nanos).sum()
}

/// CPU time of a process and its children at one moment, in two counts.
#[derive(Clone, Debug, Default)]
pub struct CpuTime {
    /// Exact count of each thread that lives, by thread id.
    threads: BTreeMap<u32, u64>,
    /// With threads that ended, but rounded down.
    processes: u64,
    /// Largest amount by which `processes` may be too low.
    rounding: u64,
}

impl CpuTime {
    /// Reads the counts now.
    pub fn of(pid: u32) -> Self {
        let family = family(pid);
        let rounding = family.iter().map(|_| 2 * TICK_NANOS).sum();
        let processes = family.iter().copied().map(process_nanos).sum();
        Self { threads: family.into_iter().flat_map(threads).collect(), processes, rounding }
    }

    /// Nanoseconds used since an earlier moment: exact, unless threads that ended in between used more than
    /// the rounding in that time.
    pub fn since(&self, earlier: &Self) -> u64 {
        let used =
            |(thread, now): (&u32, &u64)| now.saturating_sub(*earlier.threads.get(thread).unwrap_or(&0));
        let threads = self.threads.iter().map(used).sum();
        let processes = self.processes.saturating_sub(earlier.processes);
        if processes > threads + self.rounding { processes } else { threads }
    }
}

/// Resident memory of a process and its children, megabytes.
pub fn resident_mb(pid: u32) -> f64 {
    family(pid).into_iter().filter_map(|pid| Some(Memory::of(pid).ok()?.resident)).sum()
}

/// A process and all its descendants, the deepest first.
pub fn descendants(pid: u32) -> Vec<u32> {
    let mut all: Vec<u32> = children(pid).into_iter().flat_map(descendants).collect();
    all.push(pid);
    all
}

/// Nanoseconds of the machine's monotonic clock, which all processes share.
pub fn monotonic_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or_default()
}

fn family(pid: u32) -> Vec<u32> {
    std::iter::once(pid).chain(children(pid)).collect()
}

fn children(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

fn threads_nanos(pid: u32) -> u64 {
    threads(pid).into_iter().map(|(_, nanos)| nanos).sum()
}

/// The scheduler's count of every live thread of a process.
fn threads(pid: u32) -> Vec<(u32, u64)> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let count = |thread: fs::DirEntry| {
        let stat = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        let id = thread.file_name().to_str()?.parse().ok()?;
        Some((id, stat.split_whitespace().next()?.parse().ok()?))
    };
    threads.filter_map(count).collect()
}

fn process_nanos(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    ticks(&stat).unwrap_or(0) * TICK_NANOS
}

/// Ticks of a process, of those below it, and of those that they waited for.
pub(crate) fn ticks_of_family(pid: u32) -> u64 {
    let of = |pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        all_ticks(&stat).unwrap_or_default()
    };
    descendants(pid).into_iter().map(of).sum()
}

/// Ticks in user and in kernel mode, also of children that ended.
fn all_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = fields.split_whitespace().skip(11).take(4).map(str::parse::<u64>);
    ticks.sum::<Result<u64, _>>().ok()
}

/// Ticks in user and in kernel mode. The second field, the name in parentheses, may contain anything.
fn ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    Some(fields.next()?.ok()? + fields.next()?.ok()?)
}

fn megabytes(status: &str, field: &str) -> anyhow::Result<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let value = line.with_context(|| format!("/proc/PID/status has no field {field}"))?;
    let kilobytes: f64 = value.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kilobytes * 1_024.0 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::{CpuTime, Memory, all_ticks, cpu_nanos, descendants, megabytes, resident_mb, ticks};

    #[test]
    fn kilobytes_become_megabytes() {
        let status = "Name:\tpointsman\nVmRSS:\t   2000 kB\nRssAnon:\t    1000 kB\n";
        assert_eq!(megabytes(status, "VmRSS:").unwrap(), 2.048);
        assert!(megabytes(status, "VmSwap:").is_err());
    }

    #[test]
    fn this_process_uses_memory_and_cpu() {
        let pid = std::process::id();
        assert!(cpu_nanos(pid) > 0);
        assert!(resident_mb(pid) >= Memory::of(pid).unwrap().anonymous);
        assert_eq!(descendants(pid).last(), Some(&pid));
    }

    #[test]
    fn ticks_follow_a_name_with_parentheses() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 9 0 0 0 31 11 5 6 20 0 1 0 99 0 0";
        assert_eq!((ticks(stat), all_ticks(stat)), (Some(42), Some(53)));
        assert_eq!(ticks(""), None);
        assert_eq!(ticks("7 (a) S 1"), None);
    }

    #[test]
    fn threads_that_ended_count_and_the_rounding_does_not() {
        let at = |threads: &[(u32, u64)], processes| CpuTime {
            threads: threads.iter().copied().collect(),
            processes,
            rounding: 20,
        };
        // One thread continued and one began.
        assert_eq!(at(&[(1, 100), (2, 5)], 110).since(&at(&[(1, 50)], 50)), 55);
        // A thread that had used 90 before the first moment ended without using more.
        assert_eq!(at(&[(1, 100)], 200).since(&at(&[(1, 50), (2, 90)], 140)), 50);
        // It used 70 more.
        assert_eq!(at(&[(1, 100)], 260).since(&at(&[(1, 50), (2, 90)], 140)), 120);
    }

    #[test]
    fn a_thread_that_ended_still_counts() {
        let before = CpuTime::of(std::process::id());
        let burn = || {
            let started = std::time::Instant::now();
            while started.elapsed() < std::time::Duration::from_millis(200) {
                std::hint::spin_loop();
            }
            CpuTime::of(std::process::id())
        };
        let while_alive = std::thread::spawn(burn).join().unwrap().since(&before);
        let used = CpuTime::of(std::process::id()).since(&before);
        assert!(used + 4 * super::TICK_NANOS >= while_alive, "{while_alive} {used}");
    }
}
