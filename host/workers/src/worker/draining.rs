//! Workers that get no new request: an operator drains them, or discovery has them leave. Their running
//! streams may move to other workers.
//!
//! A stream asks at each of its events whether it is to move, which costs one load. The rest of the state is
//! behind a lock that only drains, moves and their readers take.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::time::{Duration, Instant};

use super::Worker;

/// Streams of one worker that move at the same time. Each has its prompt computed elsewhere: eight keep the
/// others busy, and a worker with 1,000 streams does not stop their decoding with 1,000 prefills.
const MAX_MOVES_AT_ONCE: usize = 8;
/// A move that takes longer does not count any more: the connection of its client may stand still.
const LONGEST_MOVE: Duration = Duration::from_secs(10);

/// Who has a worker drain. Either may ask that its streams move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drainer {
    /// An operator.
    Operator,
    /// Discovery, which does not list the worker any more.
    Discovery,
}

/// The streams of a worker that drains, since its streams were asked to move.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MoveCounts {
    /// Streams that continue on another worker.
    pub moved: u32,
    /// Streams that are moving now.
    pub moving: u32,
    /// Streams that ended with an error while they moved.
    pub failed: u32,
    /// Requests that stay until their end, by reason.
    pub stayed: BTreeMap<&'static str, u32>,
}

/// The moves of a worker's streams.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// Number of the drain that asks streams to move; 0: none does.
    asked: AtomicU32,
    track: Mutex<Track>,
}

#[derive(Debug, Default)]
struct Track {
    by_operator: bool,
    by_discovery: bool,
    /// Number of drains that asked streams to move.
    drains: u32,
    /// When each move that runs began.
    begun: Vec<Instant>,
    counts: MoveCounts,
}

/// The move of one stream. Dropping it ends it.
#[derive(Debug)]
pub struct StreamMove {
    moves: Arc<Moves>,
    begun: Instant,
}

impl Moves {
    fn set(&self, drainer: Drainer, moves: bool) {
        let mut track = self.track.lock();
        match drainer {
            Drainer::Operator => track.by_operator = moves,
            Drainer::Discovery => track.by_discovery = moves,
        }
        let moves = track.by_operator || track.by_discovery;
        let moved = self.asked.load(Ordering::Relaxed) != 0;
        if moves && !moved {
            track.drains = track.drains.wrapping_add(1).max(1);
            track.counts = MoveCounts::default();
        }
        self.asked.store(if moves { track.drains } else { 0 }, Ordering::Release);
    }

    fn begin(self: &Arc<Self>) -> Option<StreamMove> {
        let mut track = self.track.lock();
        let now = Instant::now();
        track.forget_long(now);
        if self.asked.load(Ordering::Relaxed) == 0 || track.begun.len() >= MAX_MOVES_AT_ONCE {
            return None;
        }
        track.begun.push(now);
        Some(StreamMove { moves: self.clone(), begun: now })
    }
}

impl Track {
    fn forget_long(&mut self, now: Instant) {
        self.begun.retain(|begun| now.saturating_duration_since(*begun) < LONGEST_MOVE);
    }
}

impl StreamMove {
    /// Notes that the stream continues on another worker.
    pub fn succeeded(self) {
        self.moves.track.lock().counts.moved += 1;
    }

    /// Notes that the stream ended with an error.
    pub fn failed(self) {
        self.moves.track.lock().counts.failed += 1;
    }
}

impl Drop for StreamMove {
    fn drop(&mut self) {
        let begun = &mut self.moves.track.lock().begun;
        if let Some(place) = begun.iter().position(|begun| *begun == self.begun) {
            begun.swap_remove(place);
        }
    }
}

impl Worker {
    /// Returns whether an operator drains the worker.
    #[must_use]
    pub fn draining(&self) -> bool {
        self.state.draining.load(Ordering::Acquire)
    }

    /// Returns whether the worker leaves when its requests have ended. Then it drains, too.
    #[must_use]
    pub fn leaving(&self) -> bool {
        self.state.leaving.load(Ordering::Acquire)
    }

    /// Lets the worker leave, or keeps it. This is independent of the draining that an operator asks for.
    pub fn set_leaving(&self, leaving: bool) {
        self.state.leaving.store(leaving, Ordering::Release);
        self.tell_ranks();
        if !leaving {
            self.move_streams(Drainer::Discovery, false);
        }
    }

    /// Starts or ends draining. Running streams stay until their ends, see [`Worker::move_streams`].
    pub fn set_draining(&self, draining: bool) {
        self.state.draining.store(draining, Ordering::Release);
        self.tell_ranks();
        if !draining {
            self.move_streams(Drainer::Operator, false);
        }
    }

    /// Asks the streams of a worker that drains to move to other workers at their next event, or no longer
    /// asks them to.
    pub fn move_streams(&self, drainer: Drainer, moves: bool) {
        self.state.moves.set(drainer, moves);
    }

    /// Returns the number of the drain that asks the worker's streams to move; 0: none does.
    #[must_use]
    pub fn asks_to_move(&self) -> u32 {
        self.state.moves.asked.load(Ordering::Relaxed)
    }

    /// Begins the move of a stream; `None` while too many move.
    #[must_use]
    pub fn begin_move(&self) -> Option<StreamMove> {
        self.state.moves.begin()
    }

    /// Notes that a request stays until its end although the worker's streams were asked to move.
    pub fn note_stays(&self, reason: &'static str) {
        *self.state.moves.track.lock().counts.stayed.entry(reason).or_default() += 1;
    }

    /// Returns how many streams left the worker or stayed; `None` if they are not asked to move.
    #[must_use]
    pub fn move_counts(&self) -> Option<MoveCounts> {
        let mut track = self.state.moves.track.lock();
        track.forget_long(Instant::now());
        let moving = u32::try_from(track.begun.len()).unwrap_or(u32::MAX);
        (self.asks_to_move() != 0).then(|| MoveCounts { moving, ..track.counts.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorkerSpec;

    fn worker() -> Worker {
        Worker::new(WorkerSpec::parse_flag("id=1,role=decode,engine=vllm,url=http://a:1").unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn i15_a_few_streams_move_at_a_time_and_one_whose_client_stands_still_holds_up_none() {
        let worker = worker();
        assert!(worker.begin_move().is_none() && worker.move_counts().is_none());
        worker.set_draining(true);
        assert_eq!(worker.asks_to_move(), 0, "a drain alone moves nothing");
        worker.move_streams(Drainer::Operator, true);
        let mut moves: Vec<StreamMove> = std::iter::from_fn(|| worker.begin_move()).collect();
        // I15.6
        assert_eq!(moves.len(), MAX_MOVES_AT_ONCE);
        moves.pop().unwrap().succeeded();
        moves.pop().unwrap().failed();
        drop(moves.pop());
        worker.note_stays("tools");
        let counts = worker.move_counts().unwrap();
        let stayed = BTreeMap::from([("tools", 1)]);
        assert_eq!(counts, MoveCounts { moved: 1, moving: 5, failed: 1, stayed });
        tokio::time::advance(LONGEST_MOVE).await;
        let late: Vec<StreamMove> = std::iter::from_fn(|| worker.begin_move()).collect();
        // I15.6: the five do not end
        assert_eq!(late.len(), MAX_MOVES_AT_ONCE);
        drop(moves);
        assert_eq!(worker.move_counts().unwrap().moving, 8);
    }

    #[test]
    fn i15_streams_move_while_either_drainer_asks_and_each_drain_counts_anew() {
        let worker = worker();
        worker.set_leaving(true);
        worker.move_streams(Drainer::Discovery, true);
        let first = worker.asks_to_move();
        worker.note_stays("tools");
        worker.set_draining(true);
        worker.move_streams(Drainer::Operator, true);
        worker.set_leaving(false);
        assert_eq!((worker.asks_to_move(), worker.move_counts().unwrap().stayed.len()), (first, 1));
        worker.set_draining(false);
        // I15.7
        assert!(worker.asks_to_move() == 0 && worker.begin_move().is_none());
        worker.set_draining(true);
        worker.move_streams(Drainer::Operator, true);
        assert_ne!(worker.asks_to_move(), first);
        assert_eq!(worker.move_counts().unwrap(), MoveCounts::default());
    }
}
