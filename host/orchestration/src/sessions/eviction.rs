//! Which bindings are evicted when there are too many.

use std::collections::HashMap;

use tokio::time::Instant;

use super::{Binding, Bindings, MAX_BINDINGS};

/// Number of bindings that an eviction leaves. An eviction reads all of them, so it must be rare.
const KEPT: usize = MAX_BINDINGS / 4 * 3;

/// Evicts a quarter of the bindings when there are too many. Those that expired go first. Then each tenant
/// keeps as many as the others, or all if it has fewer: one that makes up keys takes nothing from another. A
/// tenant loses those that no request holds before the others, and of each those that expire first.
pub(super) fn limit<K>(bound: &mut Bindings<K>, now: Instant) {
    if bound.len() <= MAX_BINDINGS {
        return;
    }
    bound.retain(|_, binding| binding.holders > 0 || binding.end() > now);
    let mut counts: HashMap<u64, usize> = HashMap::new();
    bound.values().for_each(|binding| *counts.entry(binding.owner).or_default() += 1);
    let share = fair_share(counts.into_values().collect());
    // More tenants than bindings that may stay count as one.
    let (share, are_one) = if share == 0 { (KEPT, true) } else { (share, false) };
    let owner = |binding: &Binding| if are_one { 0 } else { binding.owner };
    let worth = |binding: &Binding| (binding.holders > 0, binding.end());
    let mut of_owners: HashMap<u64, Vec<(bool, Instant)>> = HashMap::new();
    bound.values().for_each(|binding| of_owners.entry(owner(binding)).or_default().push(worth(binding)));
    let last_evicted = |(owner, mut order): (u64, Vec<_>)| {
        let evicted = order.len().checked_sub(share + 1)?;
        Some((owner, *order.select_nth_unstable(evicted).1))
    };
    let last: HashMap<u64, (bool, Instant)> = of_owners.into_iter().filter_map(last_evicted).collect();
    bound.retain(|_, binding| last.get(&owner(binding)).is_none_or(|last| worth(binding) > *last));
}

/// Returns how many bindings each tenant may keep, so that all keep [`KEPT`] together.
fn fair_share(mut counts: Vec<usize>) -> usize {
    counts.sort_unstable();
    let (mut left, mut tenants) = (KEPT, counts.len());
    for count in counts {
        if count.saturating_mul(tenants) > left {
            return left / tenants;
        }
        (left, tenants) = (left - count, tenants - 1);
    }
    KEPT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_with_few_keep_all_and_the_others_the_same_number() {
        assert_eq!(fair_share(vec![]), KEPT);
        assert_eq!(fair_share(vec![MAX_BINDINGS + 1]), KEPT);
        assert_eq!(fair_share(vec![100_000, 1_000, 2_000]), KEPT - 3_000);
        assert_eq!(fair_share(vec![40_000, 1_000, 60_000]), (KEPT - 1_000) / 2);
        assert_eq!(fair_share(vec![1; MAX_BINDINGS + 1]), 0);
        assert_eq!(fair_share(vec![10, 20]), KEPT);
    }
}
