//! Until when gateways of a fleet keep a binding for their requests.

use std::cmp::Reverse;

use tokio::time::Instant;

/// Maximum number of promises of one binding. Beyond it, the one that ends first is forgotten.
const MAX_PROMISES: usize = 8;

/// When and by whom a binding was made. The larger one wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Microseconds since 1970, on the writer's clock.
    pub at_us: u64,
    /// The gateway, as a hash of its name.
    pub writer: u64,
}

/// The promises of several gateways about one binding. It holds until the last one ends. Each gateway
/// changes only its own promise, so a short request does not shorten what a longer one elsewhere needs.
#[derive(Clone, Debug, Default)]
pub struct Promises(Vec<Promise>);

/// What one gateway promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// Stamp of the gateway's last dispatch of the session.
    pub stamp: Stamp,
    /// When the promise ends.
    pub until: Instant,
}

impl Promises {
    /// Notes a promise. It replaces the one of the same gateway, unless that belongs to a later dispatch.
    pub fn note(&mut self, promise: Promise, now: Instant) {
        let writer = promise.stamp.writer;
        self.0.retain(|known| known.until > now);
        match self.0.iter_mut().find(|known| known.stamp.writer == writer) {
            Some(known) if known.stamp > promise.stamp => {}
            Some(known) => *known = promise,
            None => {
                if self.0.len() >= MAX_PROMISES {
                    self.0.sort_unstable_by_key(|known| Reverse(known.until));
                    self.0.pop();
                }
                self.0.push(promise);
            }
        }
    }

    /// Forgets the promise of a gateway.
    pub fn forget(&mut self, writer: u64) {
        self.0.retain(|known| known.stamp.writer != writer);
    }

    /// Returns when the last promise ends.
    #[must_use]
    pub fn end(&self) -> Option<Instant> {
        self.0.iter().map(|promise| promise.until).max()
    }

    /// Returns the promises.
    pub fn iter(&self) -> impl Iterator<Item = &Promise> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn promise(at_us: u64, writer: u64, until: Instant) -> Promise {
        Promise { stamp: Stamp { at_us, writer }, until }
    }

    #[test]
    fn q6_a_binding_holds_until_the_last_promise_ends() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut promises = Promises::default();
        promises.note(promise(5, 1, now + 9 * second), now);
        promises.note(promise(6, 2, now + second), now);
        // Q6.9
        assert_eq!(promises.end(), Some(now + 9 * second));
        promises.note(promise(4, 1, now + 2 * second), now);
        // Q6.9: a message that comes late changes nothing
        assert_eq!(promises.end(), Some(now + 9 * second));
        promises.note(promise(5, 1, now + 2 * second), now);
        // Q6.9
        assert_eq!(promises.end(), Some(now + 2 * second));
        promises.forget(1);
        assert_eq!(promises.end(), Some(now + second));
    }

    #[test]
    fn q6_promises_are_bounded() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut promises = Promises::default();
        (1..100).for_each(|writer| promises.note(promise(1, writer.into(), now + second * writer), now));
        // Q6.9
        assert_eq!((promises.iter().count(), promises.end()), (MAX_PROMISES, Some(now + 99 * second)));
        promises.note(promise(1, 200, now + 200 * second), now + 150 * second);
        assert_eq!(promises.iter().count(), 1);
    }
}
