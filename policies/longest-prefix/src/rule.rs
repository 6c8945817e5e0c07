//! Chooses by cached blocks or by load. Knows columns of numbers and no facts.

/// Worker facts, one slice for each fact, all of equal length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns<'a> {
    /// Active requests.
    pub(crate) requests: &'a [u32],
    /// Cached prefix blocks on the device.
    pub(crate) device: &'a [u32],
    /// Cached prefix blocks in host memory, beyond the device's.
    pub(crate) host: &'a [u32],
    /// Cached prefix blocks on disk, beyond the host's.
    pub(crate) disk: &'a [u32],
}

/// A row with the reason of its choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The longest cached prefix; the last of equal rows.
    LongestPrefix(usize),
    /// Nothing is cached: the fewest active requests; the first of equal rows.
    FewestRequests(usize),
}

impl Columns<'_> {
    /// Returns the choice; `None` without rows.
    pub(crate) fn choose(&self) -> Option<Choice> {
        // `max_by_key` keeps the last of equal elements and `min_by_key` the first, as in the original.
        let (row, most) = self.cached().enumerate().max_by_key(|(_, blocks)| *blocks)?;
        if most > 0 {
            return Some(Choice::LongestPrefix(row));
        }
        let fewest = self.requests.iter().enumerate().min_by_key(|(_, requests)| **requests);
        fewest.map(|(row, _)| Choice::FewestRequests(row))
    }

    /// Returns the blocks that each row has cached, on any tier.
    pub(crate) fn cached(&self) -> impl Iterator<Item = u32> {
        let rows = self.device.iter().zip(self.host).zip(self.disk);
        rows.map(|((device, host), disk)| device.saturating_add(*host).saturating_add(*disk))
    }
}

impl Choice {
    /// Returns the row.
    pub(crate) fn row(self) -> usize {
        match self {
            Self::LongestPrefix(row) | Self::FewestRequests(row) => row,
        }
    }

    /// Returns the reason for the receipt.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::LongestPrefix(_) => "longest cached prefix",
            Self::FewestRequests(_) => "nothing cached: fewest active requests",
        }
    }

    /// Returns the costs that decided: cached blocks below the most, or active requests.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24")]
    pub(crate) fn costs(self, columns: &Columns<'_>) -> Vec<f32> {
        match self {
            Self::LongestPrefix(_) => {
                let most = columns.cached().max().unwrap_or(0);
                columns.cached().map(|blocks| (most - blocks) as f32).collect()
            }
            Self::FewestRequests(_) => columns.requests.iter().map(|requests| *requests as f32).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns<'a>(requests: &'a [u32], device: &'a [u32]) -> Columns<'a> {
        const NONE: &[u32] = &[0; 8];
        Columns { requests, device, host: &NONE[..device.len()], disk: &NONE[..device.len()] }
    }

    #[test]
    fn the_costs_are_least_at_the_chosen_row() {
        for (requests, device) in [(&[9, 0, 3], &[2, 0, 7]), (&[9, 2, 3], &[0, 0, 0])] {
            let columns = columns(requests, device);
            let choice = columns.choose().unwrap();
            let costs = choice.costs(&columns);
            assert_eq!(costs.iter().copied().reduce(f32::min), Some(costs[choice.row()]), "{costs:?}");
        }
    }

    #[test]
    fn counts_at_their_limit_do_not_overflow() {
        let whole = [u32::MAX; 2];
        let columns = Columns { requests: &[0, 0], device: &whole, host: &whole, disk: &whole };
        assert_eq!(columns.choose(), Some(Choice::LongestPrefix(1)));
    }

    #[test]
    fn no_rows_have_no_choice() {
        assert_eq!(columns(&[], &[]).choose(), None);
    }
}
