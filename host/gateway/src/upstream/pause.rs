//! How long an engine may pause before and within an answer.

use std::pin::Pin;

use pointsman_workers::Worker;
use tokio::time::{Duration, Instant};

/// Setting that bounds a pause of a worker that makes progress.
pub(crate) const EVENT_IDLE_MAX: &str = "event_idle_max";
/// Setting that bounds the wait for an answer that is not streamed, of a worker that makes progress.
pub(crate) const REQUEST: &str = "request";

/// Part of an answer that an engine did not send in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("waiting for the {what}: nothing came within {limit:?}, the limit of timeouts.{key}")]
pub(crate) struct Silence {
    /// Part of the answer that was awaited.
    pub(crate) what: &'static str,
    /// The setting in `[timeouts]`.
    pub(crate) key: &'static str,
    /// Value of that setting.
    pub(crate) limit: Duration,
}

impl Silence {
    /// Returns whether the worker made progress until the end of the wait. Then it has not failed: it works
    /// on other requests, or on a long one.
    #[must_use]
    pub(crate) fn worker_made_progress(&self) -> bool {
        [EVENT_IDLE_MAX, REQUEST].contains(&self.key)
    }

    /// Returns what a client may do instead of waiting longer.
    pub(crate) fn advice(&self) -> &'static str {
        match self.key {
            "whole_head" => "ask for a stream (`stream: true`)",
            _ => "send the request again",
        }
    }
}

/// Limits of a pause. A worker that makes progress may pause for longer: it may hold back a tool call, or
/// serve others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PauseLimits {
    /// Longest pause while the worker makes no progress.
    pub(crate) idle: Duration,
    /// Longest pause in any case; used if it is longer than `idle`.
    pub(crate) most: Duration,
}

impl PauseLimits {
    /// Returns when a pause has to end that began at `from`, as far as is known now.
    pub(crate) fn end(self, from: Instant, worker: Option<&Worker>) -> Instant {
        self.end_after(from, worker.map(Worker::alive_at))
    }

    /// Like [`PauseLimits::end`], of a pause between two events: a model may think. The bytes of a whole
    /// answer come one after another.
    pub(crate) fn end_between_events(self, from: Instant, worker: Option<&Worker>) -> Instant {
        self.end_after(from, worker.map(Worker::works_at))
    }

    fn end_after(self, from: Instant, sign: Option<Instant>) -> Instant {
        let quiet = sign.map_or(from, |sign| sign.max(from));
        (quiet + self.idle).min(from + self.most.max(self.idle))
    }

    /// Returns when the engine's figures should be read, so that the end is judged by new ones.
    pub(crate) fn half(self, from: Instant) -> Instant {
        from + self.idle / 2
    }

    /// Like [`PauseLimits::silence`], of the next event: at the longest pause, too, a worker without progress
    /// is told from one that works on others.
    pub(crate) fn silence_between_events(self, from: Instant, worker: Option<&Worker>) -> Silence {
        const WHAT: &str = "next event of the stream";
        let (now, progress) = (Instant::now(), worker.map_or(from, |worker| worker.alive_at().max(from)));
        if now >= progress + self.idle {
            return Silence { what: WHAT, key: "event_idle", limit: self.idle };
        }
        self.silence(WHAT, from, now)
    }

    /// Like [`PauseLimits::end`], of the head or the first event of a stream. Another worker may still serve
    /// the request, so one that is stuck is not waited for.
    pub(crate) fn end_before(self, from: Instant, worker: Option<&Worker>) -> Instant {
        self.end(from, worker.filter(|worker| worker.stuck().is_none()))
    }

    /// Like [`PauseLimits::silence_between_events`], of the head or the first event of an answer. `silence`
    /// names it, and the setting of `idle`; `most_key` is the setting of `most`.
    pub(crate) fn silence_before(
        self,
        silence: Silence,
        most_key: &'static str,
        from: Instant,
        worker: Option<&Worker>,
    ) -> Silence {
        let works = worker.filter(|worker| worker.stuck().is_none());
        let progress = works.map_or(from, |worker| worker.alive_at().max(from));
        if self.most > self.idle && Instant::now() < progress + self.idle {
            return Silence { key: most_key, limit: self.most, ..silence };
        }
        silence
    }

    /// Says what was not sent before the end.
    pub(crate) fn silence(self, what: &'static str, from: Instant, now: Instant) -> Silence {
        if self.most > self.idle && now >= from + self.most {
            return Silence { what, key: EVENT_IDLE_MAX, limit: self.most };
        }
        Silence { what, key: "event_idle", limit: self.idle }
    }
}

/// The wait for the head of an answer. The engine may work on a long prompt, or on requests before this one.
pub(crate) struct HeadWait<'a> {
    /// What is awaited. Its limit counts while the worker makes no progress.
    pub(crate) silence: Silence,
    /// Longest wait in any case, with its setting; used if it is longer.
    pub(crate) most: (&'static str, Duration),
    pub(crate) worker: &'a Worker,
    /// Hash of the request's id.
    pub(crate) request: u64,
}

impl HeadWait<'_> {
    /// Waits for the outcome of `call`.
    ///
    /// # Errors
    /// That of the call, or [`Silence`].
    pub(crate) async fn of<T, E: From<Silence>>(
        self,
        mut call: Pin<&mut impl Future<Output = Result<T, E>>>,
    ) -> Result<T, E> {
        let Self { silence, most: (most_key, most), worker, request } = self;
        let (limits, from) = (PauseLimits { idle: silence.limit, most }, Instant::now());
        let mut until = limits.half(from);
        loop {
            if let Ok(outcome) = tokio::time::timeout_at(until, call.as_mut()).await {
                return outcome;
            }
            worker.read_figures();
            // So long a wait needs figures that move: any request that hangs runs.
            let works = Some(worker).filter(|worker| most_key != REQUEST || worker.counts_its_work());
            let (now, end) = (Instant::now(), limits.end_before(from, works));
            if now >= from + limits.idle {
                worker.note_deadline(request);
            }
            if now >= end {
                return Err(limits.silence_before(silence, most_key, from, works).into());
            }
            until = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use pointsman_workers::WorkerSpec;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pause_ends_without_progress_and_always_at_its_bound() {
        let second = Duration::from_secs(1);
        let limits = PauseLimits { idle: 60 * second, most: 360 * second };
        let worker =
            Worker::new(WorkerSpec::parse_flag("role=aggregated,engine=vllm,url=http://a:1").unwrap());
        tokio::time::advance(100 * second).await;
        let from = Instant::now();
        assert_eq!(limits.end(from, Some(&worker)), from + 60 * second, "what was before does not count");
        assert_eq!(limits.end(from, None), from + 60 * second);
        let key = |after: u32| limits.silence("event", from, from + second * after).key;
        assert_eq!((key(60), key(359), key(360)), ("event_idle", "event_idle", "event_idle_max"));
        tokio::time::advance(360 * second).await;
        // A worker that only answers health checks made no progress: the stream continues on another worker.
        assert_eq!(limits.silence_between_events(from, Some(&worker)).key, "event_idle");
        let longer = PauseLimits { idle: 600 * second, ..limits };
        assert_eq!(longer.end(from, None), from + 600 * second, "a longer event_idle stays as it is");
        assert_eq!(longer.silence("event", from, from + 600 * second).key, "event_idle");
    }
}
