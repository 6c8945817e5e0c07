//! Prompt blocks pinned for another engine, until they are pulled or their lease expires.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use super::BlockId;

/// Request of another engine to pull a handoff.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Blocks to read; `None` if the dialect does not name blocks.
    pub block_ids: Option<&'a [u32]>,
    /// Hash of the prompt.
    pub fingerprint: u64,
    /// Duration of the transfer. The blocks stay pinned that long.
    pub transfer: Duration,
}

/// Result of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pull {
    /// Pulled for the first time.
    Pulled,
    /// The handoff was pulled before.
    Reused,
    /// The lease had expired.
    Expired,
    /// The handoff is unknown.
    Unknown,
    /// The request does not match the handoff, which stays pinned. Describes the difference.
    Wrong(&'static str),
}

#[derive(Debug)]
struct Pin {
    blocks: Vec<BlockId>,
    fingerprint: u64,
    pulled: bool,
    until: Duration,
}

/// Pinned handoffs of an engine, and the results of recent ones.
#[derive(Debug, Default)]
pub struct Pins {
    live: HashMap<Arc<str>, Pin>,
    deadlines: BTreeSet<(Duration, Arc<str>)>,
    gone: HashMap<Arc<str>, Pull>,
    gone_order: VecDeque<Arc<str>>,
    blocks: usize,
}

impl Pins {
    /// Number of ended handoffs to keep, to distinguish a second pull from an unknown handoff.
    const REMEMBERED: usize = 65_536;

    /// Pins a handoff until `until`.
    pub fn pin(&mut self, name: &str, blocks: Vec<BlockId>, fingerprint: u64, until: Duration) {
        let name: Arc<str> = Arc::from(name);
        self.blocks += blocks.len();
        self.deadlines.insert((until, Arc::clone(&name)));
        self.live.insert(name, Pin { blocks, fingerprint, pulled: false, until });
    }

    /// Pulls a handoff. Its blocks are released when the transfer has ended.
    pub fn pull(&mut self, now: Duration, name: &str, ask: &Ask<'_>) -> Pull {
        let Some((name, pin)) =
            self.live.get_key_value(name).map(|(key, _)| Arc::clone(key)).and_then(|key| {
                let pin = self.live.get_mut(&key)?;
                Some((key, pin))
            })
        else {
            return self.gone.get(name).copied().unwrap_or(Pull::Unknown);
        };
        if pin.pulled {
            return Pull::Reused;
        }
        if pin.until <= now {
            return Pull::Expired;
        }
        if ask.block_ids.is_some_and(|ids| !ids.iter().copied().eq(names(&pin.blocks))) {
            return Pull::Wrong("block ids");
        }
        if ask.fingerprint != pin.fingerprint {
            return Pull::Wrong("prompt");
        }
        self.deadlines.remove(&(pin.until, Arc::clone(&name)));
        pin.pulled = true;
        pin.until = now + ask.transfer;
        self.deadlines.insert((pin.until, name));
        Pull::Pulled
    }

    /// Ends a handoff that was not pulled. Returns its blocks.
    pub fn release(&mut self, name: &str) -> Option<Vec<BlockId>> {
        if self.live.get(name)?.pulled {
            return None;
        }
        let (name, pin) = self.live.remove_entry(name)?;
        self.deadlines.remove(&(pin.until, Arc::clone(&name)));
        self.blocks -= pin.blocks.len();
        self.remember(name, Pull::Expired);
        Some(pin.blocks)
    }

    /// Ends the leases and transfers that have expired at `now`. Returns their blocks, and whether these were
    /// never pulled.
    pub fn expire(&mut self, now: Duration) -> Vec<(Vec<BlockId>, bool)> {
        let mut over = Vec::new();
        while self.deadlines.first().is_some_and(|(until, _)| *until <= now) {
            let Some((_, name)) = self.deadlines.pop_first() else { break };
            let Some(pin) = self.live.remove(&name) else { continue };
            self.blocks -= pin.blocks.len();
            self.remember(name, if pin.pulled { Pull::Reused } else { Pull::Expired });
            over.push((pin.blocks, !pin.pulled));
        }
        over
    }

    /// Returns the time of the next expiry.
    #[must_use]
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(until, _)| *until)
    }

    /// Returns the number of pinned blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.blocks).unwrap_or(u32::MAX)
    }

    fn remember(&mut self, name: Arc<str>, answer: Pull) {
        if self.gone_order.len() >= Self::REMEMBERED
            && let Some(oldest) = self.gone_order.pop_front()
        {
            self.gone.remove(&oldest);
        }
        self.gone_order.push_back(Arc::clone(&name));
        self.gone.insert(name, answer);
    }
}

/// Returns the block numbers that other engines see. Block 0 is the null block of the engines, so numbers
/// start at 1.
pub(super) fn names(blocks: &[BlockId]) -> impl Iterator<Item = u32> {
    blocks.iter().map(|id| id + 1)
}
