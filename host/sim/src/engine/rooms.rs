//! SGLang's bootstrap rooms, in which the prefill leg and the decode leg of one request meet. The prefill
//! engine manages the rooms.
//!
//! A bootstrap room may be used once. If a second leg of the same kind arrives, or a room is reused, all legs
//! of the room fail, because this crashes both schedulers of the real engine.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::{Engine, verdict::Verdict};
use crate::core::{Ask, Pull};

/// The legs of a bootstrap room that have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Meeting {
    prefill: bool,
    decode: bool,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Open,
    /// The KV is ready; transferring it takes this long.
    Ready(Duration),
    Pulled,
    Failed(RoomFailure),
}

/// Reason for which the legs did not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoomFailure {
    Duplicate,
    PrefillLeft,
    DecodeLeft,
    WrongPrompt,
    TimedOut,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Prefill,
    Decode,
}

#[derive(Default)]
pub(crate) struct Rooms {
    inner: Mutex<Inner>,
    duplicates: AtomicU64,
    stranded: AtomicU64,
}

#[derive(Default)]
struct Inner {
    live: HashMap<u64, (watch::Sender<Meeting>, u8)>,
    used: HashSet<u64>,
    used_order: VecDeque<u64>,
}

struct Seat {
    engine: Arc<Engine>,
    room: u64,
    side: Side,
    meeting: watch::Sender<Meeting>,
}

/// Guard of a prefill in a bootstrap room. Dropping it before the KV was pulled fails the decode.
pub(crate) struct PrefillSeat(Seat);

impl Rooms {
    /// Number of ended bootstrap rooms to keep.
    const REMEMBERED: usize = 65_536;

    pub(crate) fn duplicates(&self) -> u64 {
        self.duplicates.load(Ordering::Relaxed)
    }

    pub(crate) fn stranded(&self) -> u64 {
        self.stranded.load(Ordering::Relaxed)
    }

    fn duplicate(&self, room: u64) -> RoomFailure {
        tracing::error!(room, "bootstrap room used twice");
        self.duplicates.fetch_add(1, Ordering::Relaxed);
        RoomFailure::Duplicate
    }
}

impl Inner {
    fn remember(&mut self, room: u64) {
        if self.used_order.len() >= Rooms::REMEMBERED
            && let Some(oldest) = self.used_order.pop_front()
        {
            self.used.remove(&oldest);
        }
        self.used_order.push_back(room);
        self.used.insert(room);
    }
}

impl Seat {
    fn claim(engine: &Arc<Engine>, room: u64, side: Side) -> Result<Self, RoomFailure> {
        let mut inner = engine.rooms.inner.lock();
        if inner.used.contains(&room) {
            return Err(engine.rooms.duplicate(room));
        }
        let (meeting, seats) =
            inner.live.entry(room).or_insert_with(|| (watch::Sender::new(Meeting::default()), 0));
        let now = *meeting.borrow();
        let taken = if side == Side::Prefill { now.prefill } else { now.decode };
        if taken {
            meeting.send_modify(|meeting| meeting.phase = Phase::Failed(RoomFailure::Duplicate));
            return Err(engine.rooms.duplicate(room));
        }
        *seats += 1;
        meeting.send_modify(|meeting| match side {
            Side::Prefill => meeting.prefill = true,
            Side::Decode => meeting.decode = true,
        });
        let meeting = meeting.clone();
        drop(inner);
        Ok(Self { engine: Arc::clone(engine), room, side, meeting })
    }

    /// Waits until `done` or failure, at most for the wait limit of a bootstrap room.
    async fn wait(&self, done: impl FnMut(&Meeting) -> bool) -> Result<Meeting, RoomFailure> {
        let mut done = done;
        let mut seen = self.meeting.subscribe();
        let met = seen.wait_for(|meeting| matches!(meeting.phase, Phase::Failed(_)) || done(meeting));
        let waited = tokio::select! {
            met = met => met.map(|meeting| *meeting).ok(),
            () = self.engine.clock.sleep(self.engine.config.room_wait) => None,
        };
        match waited {
            Some(Meeting { phase: Phase::Failed(failure), .. }) => Err(failure),
            Some(meeting) => Ok(meeting),
            None => Err(RoomFailure::TimedOut),
        }
    }

    fn fail(&self, failure: RoomFailure) -> RoomFailure {
        self.meeting.send_if_modified(|meeting| {
            let open = !matches!(meeting.phase, Phase::Pulled | Phase::Failed(_));
            if open {
                meeting.phase = Phase::Failed(failure);
            }
            open
        });
        failure
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.fail(match self.side {
            Side::Prefill => RoomFailure::PrefillLeft,
            Side::Decode => RoomFailure::DecodeLeft,
        });
        let mut inner = self.engine.rooms.inner.lock();
        let Some((meeting, seats)) = inner.live.get_mut(&self.room) else { return };
        *seats -= 1;
        if *seats > 0 {
            return;
        }
        let met = *meeting.borrow();
        inner.live.remove(&self.room);
        // The other leg may still arrive later, and must then fail.
        if met.prefill && met.decode {
            inner.remember(self.room);
        }
    }
}

impl PrefillSeat {
    pub(crate) fn claim(engine: &Arc<Engine>, room: u64) -> Result<Self, RoomFailure> {
        Seat::claim(engine, room, Side::Prefill).map(Self)
    }

    /// Waits for the decode leg. Counts a stranded handoff if it does not arrive in time.
    pub(crate) async fn decode_joined(&self) -> Result<(), RoomFailure> {
        let seat = &self.0;
        let lease = seat.engine.clock.sleep(seat.engine.config.lease);
        let joined = tokio::select! {
            joined = seat.wait(|meeting| meeting.decode) => joined,
            () = lease => Err(RoomFailure::TimedOut),
        };
        if joined == Err(RoomFailure::TimedOut) {
            seat.engine.rooms.stranded.fetch_add(1, Ordering::Relaxed);
        }
        joined.map(|_| ())
    }

    /// Returns the id under which the core pins the blocks of this bootstrap room.
    pub(crate) fn pin_name(&self) -> String {
        pin_name(self.0.room)
    }

    /// Announces the KV, and waits until it was pulled and transferred.
    pub(crate) async fn hand_over(&self, transfer: Duration) -> Result<(), RoomFailure> {
        let seat = &self.0;
        seat.meeting.send_if_modified(|meeting| {
            let open = meeting.phase == Phase::Open;
            if open {
                meeting.phase = Phase::Ready(transfer);
            }
            open
        });
        seat.wait(|meeting| meeting.phase == Phase::Pulled).await?;
        seat.engine.clock.sleep(transfer).await;
        Ok(())
    }
}

/// Joins a bootstrap room for a decode engine: waits for the prefill, then pulls its KV.
pub(super) async fn join(engine: &Arc<Engine>, room: u64, fingerprint: u64) -> Result<Verdict, RoomFailure> {
    let seat = Seat::claim(engine, room, Side::Decode)?;
    let met =
        seat.wait(|meeting| matches!(meeting.phase, Phase::Ready(_))).await.map_err(|f| seat.fail(f))?;
    let Phase::Ready(transfer) = met.phase else { return Err(RoomFailure::PrefillLeft) };
    let ask = Ask { block_ids: None, fingerprint, transfer };
    let now = engine.clock.now();
    match engine.with_core(|core| core.pull(now, &pin_name(room), &ask)) {
        Pull::Pulled => {
            seat.meeting.send_modify(|meeting| meeting.phase = Phase::Pulled);
            Ok(Verdict::Pulled)
        }
        Pull::Wrong(_) => Err(seat.fail(RoomFailure::WrongPrompt)),
        Pull::Reused => Ok(Verdict::Reused),
        Pull::Expired | Pull::Unknown => Err(seat.fail(RoomFailure::TimedOut)),
    }
}

fn pin_name(room: u64) -> String {
    format!("room-{room}")
}

impl RoomFailure {
    pub(crate) fn message(self) -> &'static str {
        match self {
            Self::Duplicate => "bootstrap room is in use or was used before",
            Self::PrefillLeft => "the prefill of this bootstrap room failed",
            Self::DecodeLeft => "the decode of this bootstrap room left",
            Self::WrongPrompt => "prefill and decode of this bootstrap room have different prompts",
            Self::TimedOut => "no peer joined this bootstrap room in time",
        }
    }
}
