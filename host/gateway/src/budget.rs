//! A limit on something that many requests use together, such as bytes, connections or places in a queue.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Largest body that may use the last eighth of the bytes in flight: large uploads cannot keep small
/// requests out.
const SMALL_BODY: usize = 256 * 1024;
/// Part of the bytes in flight that only small bodies may use.
const SMALL_BODIES_PART: usize = 8;
/// Largest answer, or buffer of a stream's event, that does not count among the bytes in flight. Answers with
/// the parameters of a handoff are that small: without them, its blocks would be lost.
pub(crate) const UNCOUNTED: usize = 64 * 1024;

/// A tenant may take this many times the room that is left, so that it leaves some for every other one.
const TIMES_WHAT_IS_LEFT: usize = 2;
/// Number of counters of tenants. Tenants whose hashes have the same counter share their part.
const COUNTERS: usize = 256;

/// Shared limit of a resource, and the amount in use.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicUsize,
    used: AtomicUsize,
    /// Part of `used` that tenants took.
    by_tenant: [AtomicUsize; COUNTERS],
}

/// Amount that one user took from a [`Budget`]. Dropping it gives the amount back.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    amount: usize,
    /// Counter of the tenant for which it was taken.
    counter: Option<u8>,
}

impl Budget {
    /// Returns an unused budget.
    #[must_use]
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: AtomicUsize::new(limit),
            used: AtomicUsize::new(0),
            by_tenant: [const { AtomicUsize::new(0) }; COUNTERS],
        })
    }

    /// Changes the limit. Parts in use stay in use.
    pub(crate) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Relaxed);
    }

    #[must_use]
    pub(crate) fn limit(&self) -> usize {
        self.limit.load(Relaxed)
    }

    /// Returns how much is in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Returns a share that is still empty.
    #[must_use]
    pub(crate) fn share(self: &Arc<Self>) -> Share {
        Share { budget: self.clone(), amount: 0, counter: None }
    }

    /// Like [`Budget::share`], for the bodies of a tenant, by its salted hash.
    #[must_use]
    pub(crate) fn share_of(self: &Arc<Self>, tenant: Option<u64>) -> Share {
        let counter = tenant.map(|tenant| (tenant % COUNTERS as u64) as u8);
        Share { budget: self.clone(), amount: 0, counter }
    }

    /// Takes `amount`; `None` when the limit does not allow it.
    #[must_use]
    pub(crate) fn reserve(self: &Arc<Self>, amount: usize) -> Option<Share> {
        let mut share = self.share();
        share.grow(amount, 0).then_some(share)
    }
}

impl Share {
    /// Takes `more`, if `kept_free` of the budget stays free for others. Returns whether it was taken.
    #[must_use]
    pub(crate) fn grow(&mut self, more: usize, kept_free: usize) -> bool {
        let limit = self.budget.limit().saturating_sub(kept_free);
        let fits = |used: usize| used.checked_add(more).filter(|sum| *sum <= limit);
        let taken = self.budget.used.fetch_update(Relaxed, Relaxed, fits).is_ok();
        if taken {
            self.amount += more;
            self.of_tenant().inspect(|of_tenant| _ = of_tenant.fetch_add(more, Relaxed));
        }
        taken
    }

    /// Takes bytes of a body. Returns whether they were taken.
    #[must_use]
    pub(crate) fn grow_body(&mut self, more: usize) -> bool {
        let is_small = self.amount + more <= SMALL_BODY;
        let kept_free = if is_small { 0 } else { self.limit() / SMALL_BODIES_PART };
        self.leaves_room(more, kept_free) && self.grow(more, kept_free)
    }

    /// Returns whether its tenant leaves room for others with `more` bytes. A tenant's only body may have any
    /// size that fits.
    fn leaves_room(&self, more: usize, kept_free: usize) -> bool {
        let Some(of_tenant) = self.of_tenant().map(|of_tenant| of_tenant.load(Relaxed)) else { return true };
        let taken = self.budget.used().saturating_add(more).saturating_add(kept_free);
        let left = self.limit().saturating_sub(taken);
        of_tenant == self.amount || of_tenant.saturating_add(more) <= left.saturating_mul(TIMES_WHAT_IS_LEFT)
    }

    fn of_tenant(&self) -> Option<&AtomicUsize> {
        self.budget.by_tenant.get(usize::from(self.counter?))
    }

    /// Takes the bytes that a stream buffers, or gives all back while they are few. Returns whether there is
    /// room for them.
    #[must_use]
    pub(crate) fn hold_events(&mut self, bytes: usize) -> bool {
        if bytes <= UNCOUNTED {
            self.give_back();
            return true;
        }
        bytes <= self.amount || self.grow_body(bytes - self.amount)
    }

    /// Gives back what was taken.
    fn give_back(&mut self) {
        let amount = std::mem::take(&mut self.amount);
        // Almost always, a stream has nothing to give back.
        if amount > 0 {
            self.budget.used.fetch_sub(amount, Relaxed);
            self.of_tenant().inspect(|of_tenant| _ = of_tenant.fetch_sub(amount, Relaxed));
        }
    }

    /// Returns how much was taken.
    #[must_use]
    pub(crate) fn amount(&self) -> usize {
        self.amount
    }

    /// Returns the limit of the budget.
    #[must_use]
    pub(crate) fn limit(&self) -> usize {
        self.budget.limit()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_bounded_together_and_given_back() {
        let budget = Budget::new(10);
        let (mut one, two) = (budget.share(), budget.reserve(4).unwrap());
        assert!(one.grow(6, 0) && !one.grow(1, 0) && budget.reserve(1).is_none());
        drop(two);
        assert!(!one.grow(3, 2), "two have to stay free");
        assert!(one.grow(2, 2) && !one.grow(usize::MAX, 0));
        assert_eq!((one.amount(), budget.used()), (8, 8));
        budget.set_limit(5);
        assert!(!one.grow(1, 0));
        drop(one);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn l1_a_tenant_leaves_room_for_the_bodies_of_others() {
        let budget = Budget::new(800 * SMALL_BODY);
        let take = |tenant: u64, bytes: usize| {
            let mut share = budget.share_of(Some(tenant));
            share.grow_body(bytes).then_some(share)
        };
        for bytes in [SMALL_BODY, 4 * SMALL_BODY] {
            let first: Vec<Share> = std::iter::from_fn(|| take(7, bytes)).collect();
            // L1.14: two thirds of what bodies of this size may use.
            assert_eq!(first.len() * bytes / SMALL_BODY, if bytes == SMALL_BODY { 533 } else { 464 });
            assert!(take(7, bytes).is_none());
            drop(first);
            // L1.14: its only body.
            assert!(take(7, 699 * SMALL_BODY).is_some());
            let first: Vec<Share> = std::iter::from_fn(|| take(7, bytes)).collect();
            let second: Vec<Share> = std::iter::from_fn(|| take(8, bytes)).collect();
            // L1.14
            assert!(second.len() * bytes >= 100 * SMALL_BODY && take(9, bytes).is_some());
            drop((first, second));
            assert_eq!(budget.used(), 0);
        }
        assert!(budget.by_tenant.iter().all(|tenant| tenant.load(Relaxed) == 0));
    }

    #[test]
    fn buffered_events_count_while_they_are_large() {
        let budget = Budget::new(10 * UNCOUNTED);
        let mut events = budget.share();
        assert!(events.hold_events(UNCOUNTED) && budget.used() == 0);
        assert!(events.hold_events(3 * UNCOUNTED) && events.hold_events(2 * UNCOUNTED));
        assert!(!events.hold_events(11 * UNCOUNTED));
        assert_eq!((events.amount(), budget.used()), (3 * UNCOUNTED, 3 * UNCOUNTED));
        assert!(events.hold_events(1) && budget.used() == 0);
    }

    #[test]
    fn the_last_part_is_for_small_bodies() {
        let budget = Budget::new(SMALL_BODY * SMALL_BODIES_PART);
        let mut large = budget.share();
        assert!(large.grow_body(SMALL_BODY * (SMALL_BODIES_PART - 1)));
        assert!(!large.grow_body(1));
        assert!(budget.share().grow_body(SMALL_BODY));
    }
}
