//! How much of the machine others use while something is measured.

use std::fs;

use crate::proc;

/// Largest share of the machine that others may use while it counts as idle.
const IDLE_SHARE: f64 = 0.05;

/// Use of all processors up to a moment, in ticks of `/proc/stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineUse {
    /// All time, idle or not.
    total: u64,
    /// Time of programs and of the kernel for them.
    busy: u64,
    /// Time that the hypervisor gave to other machines.
    stolen: u64,
    /// Time of this process and of those that it started.
    own: u64,
}

/// Shares of the machine that the measurement did not have, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OthersUse {
    /// Used by other processes.
    pub processes: f64,
    /// Taken by the hypervisor.
    pub hypervisor: f64,
}

impl MachineUse {
    /// Reads the use up to now; all zero where there is no `/proc/stat`.
    #[must_use]
    pub fn now() -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let own = proc::ticks_of_family(std::process::id());
        Self { own, ..Self::parse(&stat).unwrap_or_default() }
    }

    /// Returns what others have used since.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "numbers of ticks stay below 2^53")]
    pub fn by_others_since(self) -> OthersUse {
        let Self { total, busy, stolen, own } = Self::now();
        let total = total.saturating_sub(self.total).max(1) as f64;
        let others = busy.saturating_sub(self.busy).saturating_sub(own.saturating_sub(self.own));
        OthersUse {
            processes: others as f64 / total,
            hypervisor: stolen.saturating_sub(self.stolen) as f64 / total,
        }
    }

    /// Reads the first line: user, nice, system, idle, iowait, irq, softirq and steal. The times of guests
    /// are part of user and nice.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).take(8).collect();
        let [user, nice, system, _idle, _iowait, _irq, _softirq, stolen] = ticks[..] else { return None };
        Some(Self { total: ticks.iter().sum(), busy: user + nice + system, stolen, own: 0 })
    }
}

impl OthersUse {
    /// Returns a sentence for a reader of the figures; `None` if the machine was idle.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let Self { processes, hypervisor } = self;
        (processes + hypervisor > IDLE_SHARE).then(|| {
            format!(
                "The machine was not idle: other processes used {:.0} % of it, the hypervisor took {:.0} %. \
                 Compare ratios within a round, not times.",
                processes * 100.0,
                hypervisor * 100.0
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_of_stat_has_what_was_used_and_what_was_taken() {
        let stat = "cpu  100 5 20 700 30 1 4 40 9 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n";
        let read = MachineUse { total: 900, busy: 125, stolen: 40, own: 0 };
        assert_eq!(MachineUse::parse(stat), Some(read));
        for broken in ["", "cpu 1 2", "cpu  a b", "intr 5"] {
            assert_eq!(MachineUse::parse(broken), None, "{broken}");
        }
    }

    #[test]
    fn work_of_this_process_and_of_its_children_is_not_that_of_others() {
        let before = MachineUse::now();
        let mut child = std::process::Command::new("sh")
            .args(["-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"])
            .spawn()
            .unwrap();
        child.wait().unwrap();
        let after = MachineUse::now();
        assert!(after.own > before.own, "{before:?} {after:?}");
        assert!(after.total > before.total && after.busy >= before.busy);
    }

    #[test]
    fn only_a_busy_machine_is_told() {
        assert_eq!(OthersUse { processes: 0.03, hypervisor: 0.01 }.warning(), None);
        let warning = OthersUse { processes: 0.38, hypervisor: 0.02 }.warning().unwrap();
        assert!(warning.contains("other processes used 38 % of it, the hypervisor took 2 %"), "{warning}");
    }
}
