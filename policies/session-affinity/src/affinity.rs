//! Where a session belongs: the bound row, its rendezvous home, or, without a session, the least loaded row.

use pointsman_policy_sdk::Rng;
use serde::Deserialize;

/// What the operator may set.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Active requests above which a row is passed over; 0: no limit.
    pub max_active_requests: u32,
}

/// A candidate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Requests booked.
    pub(crate) requests: u32,
    /// Whether the request's session is bound here.
    pub(crate) bound: bool,
    /// What stands for the candidate in rendezvous hashing; see [`key`].
    pub(crate) key: u64,
}

/// What decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The session is bound to the row.
    Bound,
    /// The row weighs most for the session.
    Home,
    /// There is no session: active requests.
    LeastLoaded,
}

impl Settings {
    /// The row that serves, and why; `session` is 0 when there is none. `None` without rows.
    pub(crate) fn choose(self, session: u64, rows: &[Row], rng: &mut Rng) -> Option<(usize, Why)> {
        let all_busy = rows.iter().all(|row| self.busy(row));
        let open = || rows.iter().enumerate().filter(|(_, row)| all_busy || !self.busy(row));
        let bound = open().filter(|(_, row)| row.bound).max_by_key(|(_, row)| weight(session, row.key));
        if let Some((row, _)) = bound {
            return Some((row, Why::Bound));
        }
        if session == 0 {
            return least(rows, rng).map(|row| (row, Why::LeastLoaded));
        }
        open().max_by_key(|(_, row)| weight(session, row.key)).map(|(row, _)| (row, Why::Home))
    }

    /// One cost a row that agrees with what was chosen: none is less than the chosen row's.
    pub(crate) fn costs(self, session: u64, rows: &[Row], chosen: usize, why: Why) -> Vec<f32> {
        let all_busy = rows.iter().all(|row| self.busy(row));
        let cost = |(place, row): (usize, &Row)| match why {
            Why::Bound => f32::from(u8::from(place != chosen)),
            Why::Home => {
                let passed_over = f32::from(u8::from(!all_busy && self.busy(row)));
                passed_over + 1.0 - unit(weight(session, row.key))
            }
            Why::LeastLoaded => single(row.requests),
        };
        rows.iter().enumerate().map(cost).collect()
    }

    fn busy(self, row: &Row) -> bool {
        self.max_active_requests > 0 && row.requests > self.max_active_requests
    }
}

impl Why {
    /// For the receipt.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Bound => "session bound here",
            Self::Home => "rendezvous home of the session",
            Self::LeastLoaded => "no session: least loaded",
        }
    }
}

/// What stands for a worker's rank in rendezvous hashing.
pub(crate) fn key(worker: u64, rank: u32) -> u64 {
    mix(worker ^ mix(u64::from(rank)))
}

/// The greatest weight among rows is the session's home.
fn weight(session: u64, key: u64) -> u64 {
    mix(session ^ key)
}

/// A one-to-one mix of 64 bits. Sessions move when it changes.
fn mix(word: u64) -> u64 {
    Rng::new(word).bits()
}

/// The row of fewest requests, ties uniform.
fn least(rows: &[Row], rng: &mut Rng) -> Option<usize> {
    let least = rows.iter().map(|row| row.requests).min()?;
    let ties = || rows.iter().enumerate().filter(|(_, row)| row.requests == least);
    ties().nth(rng.below(ties().count())).map(|(row, _)| row)
}

/// A weight's 24 highest bits, in [0, 1).
#[expect(clippy::cast_precision_loss, reason = "24 bits fit exactly")]
fn unit(weight: u64) -> f32 {
    (weight >> 40) as f32 / (1_u32 << 24) as f32
}

#[expect(clippy::cast_precision_loss, reason = "loads are far below 2^24")]
fn single(count: u32) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests;
