//! What the next routing of a request waits for.

use pointsman_workers::Leg;
use tokio::{sync::futures::OwnedNotified, time::Instant};

use crate::admission_queue::{Place, WorkerWait};

/// Why a leg is not routed at once.
#[derive(Debug)]
pub enum Waiting {
    /// A leg failed a moment ago, and the pause ends then.
    Pause(Instant, Leg),
    /// Every eligible worker is busy (F7), until the queue timeout.
    Queue(Place, Leg, Instant),
    /// No worker is left that can serve the model (F7.9), until this time.
    Worker(Box<WorkerWait>, Leg, Instant),
}

impl Waiting {
    /// Resolves when the wait is over.
    pub async fn over(&self) {
        match self {
            Self::Pause(until, _) => tokio::time::sleep_until(*until).await,
            Self::Queue(place, _, until) => place.turn(*until).await,
            Self::Worker(wait, _, until) => wait.woken(*until).await,
        }
    }

    /// When the leg is routed again at the latest.
    #[must_use]
    pub fn latest(&self) -> Instant {
        match self {
            Self::Pause(until, _) => *until,
            Self::Queue(_, _, until) | Self::Worker(_, _, until) => Place::retry_at(*until),
        }
    }

    /// Resolves when capacity was released for this request; `None` if it does not wait for that.
    #[must_use]
    pub fn woken(&self) -> Option<OwnedNotified> {
        match self {
            Self::Pause(..) | Self::Worker(..) => None,
            Self::Queue(place, ..) => Some(place.woken()),
        }
    }
}
