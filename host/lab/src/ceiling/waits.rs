//! Finds the requests of a trace that wait for the end of other requests.

use std::collections::HashMap;

use crate::trace::{Order, Trace};

/// The requests that wait for others. A request waits only for earlier requests of the trace.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// For each request, the requests that wait for it.
    followers: HashMap<usize, Vec<usize>>,
    /// For each request, the last request that it waits for, and the number of requests that it waits for.
    before: HashMap<usize, (usize, u32)>,
    /// Root of each request's tree. The parent of a request is the last request that it waits for.
    roots: Vec<usize>,
    /// Positions of the requests of the trees in depth-first order, and the sizes of their subtrees.
    starts: Vec<usize>,
    sizes: Vec<usize>,
}

impl Waits {
    pub(crate) fn of(trace: &Trace) -> Self {
        let mut waits = Self::default();
        for (before, number) in Order::of(trace).pairs() {
            waits.followers.entry(before).or_default().push(number);
            let (last, count) = waits.before.entry(number).or_insert((before, 0));
            (*last, *count) = (before.max(*last), *count + 1);
        }
        waits.followers.values_mut().for_each(|followers| followers.sort_unstable());
        waits.grow_trees(trace.requests.len());
        waits
    }

    fn grow_trees(&mut self, requests: usize) {
        (self.roots, self.sizes) = ((0..requests).collect(), vec![1; requests]);
        let parent = |number: usize| self.before.get(&number).map(|(parent, _)| *parent);
        for number in (0..requests).rev() {
            let size = self.sizes.get(number).copied().unwrap_or_default();
            if let Some(of_parent) = parent(number).and_then(|parent| self.sizes.get_mut(parent)) {
                *of_parent += size;
            }
        }
        // `free` is the next free position in each subtree, and `next` the next free position for a new tree.
        let (mut free, mut next) = (vec![0; requests], 0);
        self.starts = vec![0; requests];
        for number in 0..requests {
            let place = parent(number).and_then(|parent| free.get_mut(parent)).unwrap_or(&mut next);
            let start = *place;
            *place += self.sizes.get(number).copied().unwrap_or_default();
            let root = parent(number).and_then(|parent| self.roots.get(parent)).copied().unwrap_or(number);
            let own = (self.starts.get_mut(number), self.roots.get_mut(number), free.get_mut(number));
            if let (Some(own), Some(own_root), Some(free)) = own {
                (*own, *own_root, *free) = (start, root, start + 1);
            }
        }
    }

    /// Whether no request waits for another.
    pub(crate) fn is_empty(&self) -> bool {
        self.before.is_empty()
    }

    /// Whether a request waits for another.
    pub(crate) fn waits(&self, number: usize) -> bool {
        self.before.contains_key(&number)
    }

    /// Returns the number of requests that a request waits for.
    pub(crate) fn count(&self, number: usize) -> u32 {
        self.before.get(&number).map_or(0, |(_, count)| *count)
    }

    pub(crate) fn followers(&self, number: usize) -> &[usize] {
        self.followers.get(&number).map_or(&[], Vec::as_slice)
    }

    /// Returns the root of the request's tree. No request of the tree arrives before the root.
    pub(crate) fn root(&self, number: usize) -> usize {
        self.roots.get(number).copied().unwrap_or(number)
    }

    /// Whether `number` arrives after the end of `before`, whatever the policy decides. `true` is certain,
    /// `false` is not.
    pub(crate) fn is_after(&self, number: usize, before: usize) -> bool {
        let of = |values: &[usize], number: usize| values.get(number).copied().unwrap_or_default();
        let start = of(&self.starts, before);
        (start + 1..start + of(&self.sizes, before)).contains(&of(&self.starts, number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_of_a_tree_come_after_those_that_they_wait_for() {
        // Request 2 waits for 0, 3 waits for 2, 5 waits for 0 and 2, and 4 waits for 1.
        let mut waits = Waits::default();
        for (number, last, count) in [(2, 0, 1), (3, 2, 1), (5, 2, 2), (4, 1, 1)] {
            waits.before.insert(number, (last, count));
        }
        waits.grow_trees(6);
        assert_eq!(waits.roots, [0, 1, 0, 0, 1, 0]);
        let after =
            |before: usize| (0..6).filter(|number| waits.is_after(*number, before)).collect::<Vec<_>>();
        assert_eq!([after(0), after(1), after(2), after(3)], [vec![2, 3, 5], vec![4], vec![3, 5], vec![]]);
    }
}
