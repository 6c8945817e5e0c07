//! Models all engines as one machine, to bound how long prompts wait when no capacity is left unused.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

/// A prompt that the machine computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Job {
    /// Number of the request.
    pub(super) number: usize,
    /// Earliest start.
    pub(super) release: Duration,
    /// Number of tokens to compute, at least 1.
    pub(super) tokens: u32,
}

/// A job that has started, with its remaining tokens.
#[derive(Debug)]
struct Open {
    tokens: u32,
    place: usize,
    /// Release, milliseconds from the start of the busy period.
    release: f64,
    left: f64,
    /// Integral of the time since the release over the tokens that are computed already.
    moment: f64,
}

/// Runs the jobs on a machine that computes `rate` tokens a millisecond, always the shortest job first.
/// Returns the busy periods. Each busy period has its jobs, with the mean time from the release of a job to
/// the computation of its tokens, milliseconds.
///
/// Times count from the start of a busy period: in a long trace, rounding errors of absolute times would be
/// larger than the waits.
///
/// Of all schedules, this one has the smallest sum of these mean times, as an exchange argument shows
/// (Goemans, 1997; Chou, Queyranne and Simchi-Levi, 2006, for machines in parallel).
pub(super) fn busy_periods(mut jobs: Vec<Job>, rate: f64) -> Vec<Vec<(Job, f64)>> {
    jobs.sort_by_key(|job| (job.release, job.number));
    let mut periods = Vec::new();
    let mut period: Vec<(Job, f64)> = Vec::new();
    let mut open: BinaryHeap<Reverse<Open>> = BinaryHeap::new();
    let (mut next, mut now, mut start) = (0, 0.0_f64, Duration::ZERO);
    loop {
        let release = jobs.get(next).map(|job| milliseconds(job.release.saturating_sub(start)));
        let Some(Reverse(mut job)) = open.pop() else {
            if !period.is_empty() {
                periods.push(std::mem::take(&mut period));
            }
            let Some(first) = jobs.get(next) else { return periods };
            (start, now) = (first.release, 0.0);
            admit(&jobs, &mut next, start, now, &mut open);
            continue;
        };
        let end = now + job.left / rate;
        let until = release.map_or(end, |release| release.min(end));
        let done = (until - now) * rate;
        job.moment += done * ((now + until) / 2.0 - job.release);
        job.left -= done;
        now = until;
        if until >= end {
            if let Some(over) = jobs.get(job.place) {
                period.push((*over, job.moment / f64::from(job.tokens)));
            }
        } else {
            open.push(Reverse(job));
        }
        admit(&jobs, &mut next, start, now, &mut open);
    }
}

/// Opens the jobs that are released by `now`, in a busy period that began at `start`.
fn admit(jobs: &[Job], next: &mut usize, start: Duration, now: f64, open: &mut BinaryHeap<Reverse<Open>>) {
    while let Some(job) = jobs.get(*next) {
        let release = milliseconds(job.release.saturating_sub(start));
        if release > now {
            return;
        }
        let (tokens, left) = (job.tokens, f64::from(job.tokens));
        open.push(Reverse(Open { tokens, place: *next, release, left, moment: 0.0 }));
        *next += 1;
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.tokens, self.place).cmp(&(other.tokens, other.place))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Open {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers of the jobs in each busy period with their mean times. Releases are in
    /// milliseconds.
    fn run(jobs: &[(u64, u32)], rate: f64) -> Vec<Vec<(usize, f64)>> {
        let job = |(number, (release, tokens)): (usize, &(u64, u32))| Job {
            number,
            release: Duration::from_millis(*release),
            tokens: *tokens,
        };
        let periods = busy_periods(jobs.iter().enumerate().map(job).collect(), rate);
        let shown = |period: Vec<(Job, f64)>| period.iter().map(|(job, mean)| (job.number, *mean)).collect();
        periods.into_iter().map(shown).collect()
    }

    #[test]
    fn the_shortest_job_interrupts_a_longer_one_and_idle_time_ends_a_period() {
        // Job 0 runs from 0 to 2 and from 4 to 6, job 1 from 2 to 4, job 2 much later.
        let periods = run(&[(0, 8), (2, 4), (50, 2)], 2.0);
        assert_eq!(periods, [vec![(1, 1.0), (0, 3.0)], vec![(2, 0.5)]]);
        assert!(run(&[], 1.0).is_empty());
    }

    #[test]
    fn the_times_of_a_period_do_not_depend_on_when_it_begins() {
        let jobs = |start: u64| -> Vec<(u64, u32)> {
            (0..200).map(|number| (start + number * 7, 100 + (number as u32 * 37) % 900)).collect()
        };
        let year_ms = 366 * 86_400_000;
        assert_eq!(run(&jobs(year_ms), 61.7), run(&jobs(0), 61.7));
    }
}
