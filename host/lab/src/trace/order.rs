//! Finds the requests of a trace that wait for the answers to others: the turns of a session, the forks of a
//! session, and the turns that wait for forks.

use std::{collections::HashMap, time::Duration};

use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

use super::Trace;
use crate::arrivals::{ArrivalUnit, Arrivals, interval};

/// The requests that wait, by number. A request waits only for requests before it in the trace, so there are
/// no cycles.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// For each request, the requests that wait for it.
    followers: HashMap<usize, Vec<usize>>,
    /// Number of answers that a request still waits for.
    missing: HashMap<usize, usize>,
}

impl Order {
    /// Finds the requests that each request of a trace waits for.
    pub(crate) fn of(trace: &Trace) -> Self {
        let mut order = Self::default();
        // The newest request of each session, and the sessions that were forked after it.
        let mut newest: HashMap<&str, usize> = HashMap::new();
        let mut forked: HashMap<&str, Vec<&str>> = HashMap::new();
        for (number, request) in trace.requests.iter().enumerate() {
            let Some(session) = request.session.as_deref() else { continue };
            if let Some(before) = newest.get(session).copied() {
                if request.delay.is_some() || request.join {
                    order.wait(number, before);
                }
                for child in forked.remove(session).into_iter().flatten().filter(|_| request.join) {
                    newest.get(child).into_iter().for_each(|last| order.wait(number, *last));
                }
            } else if let Some(parent) = request.parent.as_deref()
                && let Some(before) = newest.get(parent).copied()
            {
                order.wait(number, before);
                forked.entry(parent).or_default().push(session);
            }
            newest.insert(session, number);
        }
        order
    }

    fn wait(&mut self, number: usize, before: usize) {
        self.followers.entry(before).or_default().push(number);
        *self.missing.entry(number).or_default() += 1;
    }

    /// Whether a request waits for an answer.
    pub(crate) fn waits(&self, number: usize) -> bool {
        self.missing.contains_key(&number)
    }

    /// Returns each request that waits, each time with one request that it waits for. That one comes first in
    /// the pair.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.followers
            .iter()
            .flat_map(|(before, followers)| followers.iter().map(|number| (*before, *number)))
    }

    /// Ends a request. Returns the requests that waited for no other answer than this one's.
    pub(crate) fn end(&mut self, number: usize) -> Vec<usize> {
        let mut followers = self.followers.remove(&number).unwrap_or_default();
        followers.retain(|follower| {
            let missing = self.missing.entry(*follower).or_default();
            *missing = missing.saturating_sub(1);
            *missing == 0
        });
        followers
    }
}

impl Trace {
    /// Returns the arrivals that `speed` scales: those of the requests that do not wait for an answer, or of
    /// all requests with a fixed schedule.
    pub(crate) fn arrivals(&self, fixed_schedule: bool) -> Arrivals {
        let order = Order::of(self);
        let unit = match (order.missing.is_empty(), fixed_schedule) {
            (true, _) => ArrivalUnit::Requests,
            (false, true) => ArrivalUnit::ScheduledRequests,
            (false, false) => ArrivalUnit::SessionStarts,
        };
        let is_start = |number: usize| unit != ArrivalUnit::SessionStarts || !order.waits(number);
        let starts = self.requests.iter().enumerate().filter(|(number, _)| is_start(*number));
        let (count, last) =
            starts.fold((0, Duration::ZERO), |(count, last), (_, request)| (count + 1, last.max(request.at)));
        Arrivals { unit, count, seconds: last.as_secs_f64() }
    }

    /// Starts `rate` sessions a second, at random times. The other requests keep their distance from the
    /// start of their session. A request without a session counts as a session of its own.
    #[must_use]
    pub(crate) fn with_starts(mut self, rate: f64, seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut next = 0.0;
        // The old and the new start of each session. A fork has that of its parent.
        let mut starts: HashMap<String, (Duration, Duration)> = HashMap::new();
        for request in &mut self.requests {
            let names = [&request.session, &request.parent];
            let known = names.into_iter().flatten().find_map(|name| starts.get(name)).copied();
            let (old, new) = known.unwrap_or_else(|| {
                let start = Duration::from_secs_f64(next);
                next += interval(&mut rng, rate, 1.0);
                (request.at, start)
            });
            request.at = new + request.at.saturating_sub(old);
            if let Some(session) = request.session.as_ref().filter(|name| !starts.contains_key(*name)) {
                starts.insert(session.clone(), (old, new));
            }
        }
        self.sort();
        self
    }

    /// Gives each request one of these targets for its first token, at random.
    #[must_use]
    pub(crate) fn with_ttft_targets(mut self, targets: &[Duration], seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        if !targets.is_empty() {
            let mut one = || targets.get(rng.random_range(0..targets.len())).copied();
            self.requests.iter_mut().for_each(|request| request.targets.ttft = one());
        }
        self
    }
}

#[cfg(test)]
mod tests;
