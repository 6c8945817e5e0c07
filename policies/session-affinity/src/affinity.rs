//! Finds the row of a session: the bound one, else its rendezvous home. Without a session: the least loaded
//! row.

use pointsman_policy_sdk::Rng;
use serde::Deserialize;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Active requests above which a row is skipped; 0: no limit.
    pub max_active_requests: u32,
}

/// A candidate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Active requests.
    pub(crate) requests: u32,
    /// Whether the request's session is bound to the row.
    pub(crate) bound: bool,
    /// Key of the candidate in rendezvous hashing; see [`key`].
    pub(crate) key: u64,
}

/// Reason of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The session is bound to the row.
    Bound,
    /// The row has the largest weight for the session.
    Home,
    /// There is no session, so that active requests decide.
    LeastLoaded,
}

impl Settings {
    /// Returns the row and the reason. `session` is 0 when there is none. `None`: there are no rows.
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

    /// Returns a cost for each row that agrees with the choice: the chosen row has the lowest.
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
    /// Returns the reason for the receipt.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Bound => "session bound here",
            Self::Home => "rendezvous home of the session",
            Self::LeastLoaded => "no session: least loaded",
        }
    }
}

/// Returns the key of a worker's rank in rendezvous hashing.
pub(crate) fn key(worker: u64, rank: u32) -> u64 {
    mix(worker ^ mix(u64::from(rank)))
}

/// Returns the weight of a row for a session. The row with the largest weight is the session's home.
fn weight(session: u64, key: u64) -> u64 {
    mix(session ^ key)
}

/// Mixes 64 bits, one to one. A change of this function moves sessions.
fn mix(word: u64) -> u64 {
    Rng::new(word).bits()
}

/// Returns the row with the fewest requests. Ties are drawn uniformly.
fn least(rows: &[Row], rng: &mut Rng) -> Option<usize> {
    let least = rows.iter().map(|row| row.requests).min()?;
    let ties = || rows.iter().enumerate().filter(|(_, row)| row.requests == least);
    ties().nth(rng.below(ties().count())).map(|(row, _)| row)
}

/// Maps the 24 highest bits of a weight to [0, 1).
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
