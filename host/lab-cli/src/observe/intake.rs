//! Takes copies of requests, within bounds.
//!
//! Every copy is answered with 200 as soon as its body has come: nobody reads the answer, but a mirror may
//! wait for it. A body beyond a bound is discarded as it comes. To close its connection instead would make
//! nginx count a failure, and send no copies for a while.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::{
    HeaderMap, Method, Request,
    body::{Body as _, Incoming},
    header,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{Duration, Instant, timeout},
};

use super::{
    answers::Answers,
    counts::{Counts, Missed},
    request::{Arrived, Endpoint, Measure},
};

/// How long a body may take.
pub(super) const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// A copy whose body is complete. Its memory is returned when it is dropped.
#[derive(Debug)]
pub(super) struct Copied {
    pub(super) number: u64,
    pub(super) arrived: Arrived,
    pub(super) body: Bytes,
    _memory: Option<OwnedSemaphorePermit>,
}

/// A copy that is arriving. When its connection ends before it has come to an end, it is counted as missed.
struct Arriving<'a> {
    counts: &'a Counts,
    is_open: bool,
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.counts.miss(Missed::Incomplete);
        }
    }
}

/// Bounds of bodies, and where complete ones go.
#[derive(Debug)]
pub(super) struct Intake {
    pub(super) counts: Arc<Counts>,
    pub(super) measure: Arc<Measure>,
    /// Longest body, bytes.
    pub(super) max_body: usize,
    /// A permit for each byte of the bodies that are being read or wait.
    pub(super) memory: Arc<Semaphore>,
    /// Complete copies; full when the writer is slow.
    pub(super) queue: mpsc::Sender<Copied>,
    pub(super) answers: Arc<Answers>,
    /// Start of the observation.
    pub(super) start: Instant,
}

/// A body that is being read.
#[derive(Debug, Default)]
pub(super) struct Body {
    bytes: BytesMut,
    memory: Option<OwnedSemaphorePermit>,
}

impl Body {
    /// Reserves memory for this many bytes in all.
    fn reserve(&mut self, intake: &Intake, total: usize) -> Result<(), Missed> {
        if total > intake.max_body {
            return Err(Missed::TooLarge);
        }
        let reserved = self.memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = u32::try_from(total.saturating_sub(reserved)).map_err(|_| Missed::TooLarge)?;
        let more = Arc::clone(&intake.memory).try_acquire_many_owned(missing).map_err(|_| Missed::Memory)?;
        match &mut self.memory {
            Some(memory) => memory.merge(more),
            None => self.memory = Some(more),
        }
        Ok(())
    }

    /// Adds bytes within the bounds.
    pub(super) fn add(&mut self, intake: &Intake, bytes: &[u8]) -> Result<(), Missed> {
        self.reserve(intake, self.bytes.len() + bytes.len())?;
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the copy of which this is the whole body.
    pub(super) fn copied(self, number: u64, arrived: Arrived) -> Copied {
        Copied { number, arrived, body: self.bytes.freeze(), _memory: self.memory }
    }
}

/// Whether the body after these headers is not compressed.
pub(super) fn is_readable(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_ENCODING).is_none_or(|coding| coding == "identity")
}

impl Intake {
    /// Takes a copy.
    pub(super) async fn take(&self, request: Request<Incoming>) {
        let endpoint = Endpoint::of(request.uri().path()).filter(|_| request.method() == Method::POST);
        if endpoint.is_none() && request.method() == Method::POST {
            self.counts.pass_by(request.uri().path());
        }
        let arrived = endpoint.map(|endpoint| {
            let head = self.measure.head(self.start.elapsed(), endpoint, request.headers());
            (self.counts.arrive(), head)
        });
        let mut arriving = Arriving { counts: &self.counts, is_open: arrived.is_some() };
        let is_readable = is_readable(request.headers());
        let mut body = request.into_body();
        let taken = timeout(BODY_TIMEOUT, async {
            let taken = match &arrived {
                Some(_) if is_readable => self.body(&mut body).await,
                _ => Err(Missed::Unreadable),
            };
            if taken.is_err() {
                // Without the rest, the connection would be closed.
                while let Some(Ok(_)) = body.frame().await {}
            }
            taken
        });
        let taken = taken.await.unwrap_or(Err(Missed::Incomplete));
        arriving.is_open = false;
        let Some((number, arrived)) = arrived else { return };
        match taken {
            Ok(body) => {
                self.send(body.copied(number, arrived));
            }
            Err(why) => self.counts.miss(why),
        }
    }

    /// Gives a copy to the writer. Returns false when that is too slow; the copy is then counted as missed.
    pub(super) fn send(&self, copied: Copied) -> bool {
        let is_sent = self.queue.try_send(copied).is_ok();
        if !is_sent {
            self.counts.miss(Missed::Busy);
        }
        is_sent
    }

    /// Reads a body within the bounds.
    async fn body(&self, body: &mut Incoming) -> Result<Body, Missed> {
        let mut taken = Body::default();
        taken.reserve(self, usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX))?;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Missed::Incomplete)?.into_data() else { continue };
            taken.add(self, &data)?;
        }
        Ok(taken)
    }
}
