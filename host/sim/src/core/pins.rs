//! Prompt blocks that wait for a remote engine: pinned until pulled, or until their lease ends.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use super::cache::Hold;

/// What a remote engine says when it comes for a handoff.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The blocks it was told to read; `None` when its dialect does not name blocks.
    pub block_ids: Option<&'a [u32]>,
    /// Hash of the prompt it was given.
    pub fingerprint: u64,
    /// How long its reading takes; the blocks stay that long.
    pub transfer: Duration,
}

/// How a pull ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pull {
    /// Taken, for the first and only time.
    Pulled,
    /// It was taken before.
    Reused,
    /// The lease was over.
    Expired,
    /// No such handoff.
    Unknown,
    /// The handoff is there, but not this one; it stays pinned. Says what differs.
    Wrong(&'static str),
}

#[derive(Debug)]
struct Pin {
    hold: Hold,
    block_ids: Vec<u32>,
    fingerprint: u64,
    pulled: bool,
    until: Duration,
}

/// The pinned handoffs of an engine, and what became of recent ones.
#[derive(Debug, Default)]
pub struct Pins {
    live: HashMap<Arc<str>, Pin>,
    deadlines: BTreeSet<(Duration, Arc<str>)>,
    gone: HashMap<Arc<str>, Pull>,
    gone_order: VecDeque<Arc<str>>,
    blocks: usize,
}

impl Pins {
    /// Handoffs that are remembered after their end, to tell a second use from an unknown one.
    const REMEMBERED: usize = 65_536;

    /// Pins a handoff until `until`.
    pub fn pin(&mut self, name: &str, hold: Hold, block_ids: Vec<u32>, fingerprint: u64, until: Duration) {
        let name: Arc<str> = Arc::from(name);
        self.blocks += block_ids.len();
        self.deadlines.insert((until, Arc::clone(&name)));
        self.live.insert(name, Pin { hold, block_ids, fingerprint, pulled: false, until });
    }

    /// Takes a handoff; its blocks are released when the transfer is over.
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
        if ask.block_ids.is_some_and(|ids| ids != pin.block_ids) {
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

    /// Ends what is over at `now`: the blocks, and whether nobody ever came for them.
    pub fn expire(&mut self, now: Duration) -> Vec<(Hold, bool)> {
        let mut over = Vec::new();
        while self.deadlines.first().is_some_and(|(until, _)| *until <= now) {
            let Some((_, name)) = self.deadlines.pop_first() else { break };
            let Some(pin) = self.live.remove(&name) else { continue };
            self.blocks -= pin.block_ids.len();
            self.remember(name, if pin.pulled { Pull::Reused } else { Pull::Expired });
            over.push((pin.hold, !pin.pulled));
        }
        over
    }

    /// When something ends next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(until, _)| *until)
    }

    /// Blocks pinned now.
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
