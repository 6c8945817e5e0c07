//! `GET /events`: workers, slots, the newest decisions and the load as server-sent events. Each kind
//! is sent only when it changed, and computed only while somebody reads it.
//!
//! One publisher serves all readers, and runs only while there are any. It keeps the newest event of each
//! kind: a slow reader misses the events in between, and costs no more than a fast one.

use std::{collections::HashMap, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Extension, Query, State as Extract, rejection::QueryRejection},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::{future::select_all, stream};
use parking_lot::Mutex;
use pointsman_routing::{DecisionId, DecisionSummary, Decisions};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::{sync::watch, time::MissedTickBehavior};

use super::{fleet, guard::MayChange, refuse::invalid, status, workers};
use crate::{
    big_numbers::with_texts,
    http::request_id,
    openai::{error, stream_headers::ACCEL_BUFFERING},
    state::{SharedState, State},
    version::VERSION,
};

/// Time between two polls: at most one event of a kind is sent in this time.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Number of decisions in an event.
const NEWEST_DECISIONS: usize = 100;
/// Maximum number of concurrent readers.
const MAX_READERS: usize = 32;
/// Time without an event after which a comment is sent, so that a closed connection is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The kinds of events, in the order of the channels.
const KINDS: [&str; 6] = ["workers", "slots", "decisions", "stats", "fleet", "hour"];
/// Kinds of large events: they are sent with one of so many polls.
const LARGE: [&str; 2] = ["decisions", "fleet"];
const LARGE_POLLS: u64 = 2;
/// Number of the first kinds, which a reader gets that asks for none.
const DEFAULT_KINDS: usize = 4;

/// The query string.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    /// Kinds of events, separated by commas.
    kinds: Option<String>,
}

/// The newest event of each kind; empty before the first.
#[derive(Debug)]
pub(super) struct Feed {
    channels: [watch::Sender<Bytes>; KINDS.len()],
    /// Has one receiver for each reader.
    readers: watch::Sender<()>,
    /// Whether the publisher runs.
    running: Mutex<bool>,
}

/// One reader: what it gets first, and the channels.
struct Reader {
    hello: Option<Bytes>,
    channels: Vec<watch::Receiver<Bytes>>,
    _counted: watch::Receiver<()>,
    state: Arc<State>,
}

/// Decisions that were copied, so that each is copied once when it is made and once when its request is over.
type Known = HashMap<DecisionId, DecisionSummary>;

impl Default for Feed {
    fn default() -> Self {
        Self {
            channels: KINDS.map(|_| watch::Sender::new(Bytes::new())),
            readers: watch::Sender::new(()),
            running: Mutex::new(false),
        }
    }
}

/// Streams events until the reader leaves or the daemon drains.
pub(super) async fn stream(
    Extract(shared): Extract<SharedState>,
    Extension(feed): Extension<Arc<Feed>>,
    Extension(MayChange(may_change)): Extension<MayChange>,
    query: Result<Query<Wanted>, QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let state = shared.get();
    let kinds = match query.map_err(|error| error.body_text()).and_then(|Query(wanted)| wanted.kinds()) {
        Ok(kinds) => kinds,
        Err(problem) => return invalid(&headers, &problem),
    };
    let refuse = |code, message| {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        (status, Json(error::body(status, code, message, &request_id(&headers)))).into_response()
    };
    if state.draining.is_cancelled() {
        return refuse("draining", "this daemon is draining; connect to another one");
    }
    let Some((channels, counted)) = feed.subscribe(&kinds, &shared) else {
        return refuse("too_many_readers", "too many event readers (limit 32); close one and connect again");
    };
    let hello = json!({
        "version": VERSION, "token": state.settings.operators_are_known,
        "may_change": may_change,
    });
    let reader = Reader { hello: event("hello", &hello), channels, _counted: counted, state };
    let events = stream::unfold(reader, async |mut reader| {
        let event = reader.next().await?;
        Some((Ok::<_, Infallible>(event), reader))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
        (ACCEL_BUFFERING, "no"),
    ];
    (headers, Body::from_stream(events)).into_response()
}

impl Wanted {
    /// Returns which kinds are asked for, in the order of [`KINDS`].
    fn kinds(&self) -> Result<[bool; KINDS.len()], String> {
        let Some(text) = &self.kinds else {
            return Ok(std::array::from_fn(|place| place < DEFAULT_KINDS));
        };
        let mut wanted = [false; KINDS.len()];
        for name in text.split(',') {
            let place = KINDS.iter().position(|kind| *kind == name);
            let shown: String = name.chars().take(40).collect();
            let problem = || format!("kinds: unknown value `{shown}`: expected some of {}", KINDS.join(","));
            let place = place.and_then(|place| wanted.get_mut(place)).ok_or_else(problem)?;
            *place = true;
        }
        Ok(wanted)
    }
}

impl Reader {
    /// The next event; `None` when the daemon drains.
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(hello) = self.hello.take() {
            return Some(hello);
        }
        let changed = select_all(self.channels.iter_mut().map(|channel| Box::pin(channel.changed())));
        let place = tokio::select! {
            (Ok(()), place, _) = changed => place,
            () = tokio::time::sleep(KEEP_ALIVE) => return Some(Bytes::from_static(b":\n\n")),
            () = self.state.draining.cancelled() => return None,
        };
        Some(self.channels.get_mut(place)?.borrow_and_update().clone())
    }
}

impl Feed {
    /// The channels of a further reader; `None` when there are too many.
    fn subscribe(
        self: &Arc<Self>,
        kinds: &[bool; KINDS.len()],
        shared: &SharedState,
    ) -> Option<(Vec<watch::Receiver<Bytes>>, watch::Receiver<()>)> {
        let mut running = self.running.lock();
        if self.readers.receiver_count() >= MAX_READERS {
            return None;
        }
        let each = |channel: &watch::Sender<Bytes>| {
            let mut receiver = channel.subscribe();
            // The present state is new to this reader.
            if !channel.borrow().is_empty() {
                receiver.mark_changed();
            }
            receiver
        };
        let wanted = self.channels.iter().zip(kinds).filter(|(_, wanted)| **wanted);
        let channels = wanted.map(|(channel, _)| each(channel)).collect();
        let counted = self.readers.subscribe();
        if !*running {
            *running = true;
            shared.get().tracker.spawn(self.clone().publish(shared.clone()));
        }
        Some((channels, counted))
    }

    async fn publish(self: Arc<Self>, shared: SharedState) {
        let draining = shared.get().draining.clone();
        let mut looks = tokio::time::interval(POLL_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut known = Known::new();
        for poll in 0_u64.. {
            tokio::select! {
                _ = looks.tick() => {}
                () = draining.cancelled() => return,
            }
            let mut running = self.running.lock();
            if self.readers.receiver_count() == 0 {
                // A later reader must not get old events.
                self.channels.iter().for_each(|channel| drop(channel.send_replace(Bytes::new())));
                *running = false;
                return;
            }
            drop(running);
            let state = shared.get();
            for (kind, channel) in KINDS.into_iter().zip(&self.channels) {
                if channel.receiver_count() == 0 {
                    // A later reader must not get an old event.
                    channel.send_replace(Bytes::new());
                    continue;
                }
                if LARGE.contains(&kind) && poll % LARGE_POLLS > 0 && !channel.borrow().is_empty() {
                    continue;
                }
                let event = current_event(kind, &state, &mut known);
                channel.send_if_modified(|last| match event {
                    Some(event) if event != *last => {
                        *last = event;
                        true
                    }
                    _ => false,
                });
            }
        }
    }
}

/// The event of a kind as of now.
fn current_event(kind: &str, state: &State, known: &mut Known) -> Option<Bytes> {
    match kind {
        "workers" => event(kind, &with_texts(workers::describe(state, false, None))),
        "slots" => event(kind, &*state.policies.status()),
        "decisions" => event(kind, &with_texts(newest(state, known))),
        "stats" => event(kind, &status::stats(state)),
        "fleet" => event(kind, &fleet::describe(state)),
        "hour" => event(kind, &json!({ "minutes": state.hour.minutes() })),
        _ => None,
    }
}

/// The newest decisions, newest first, and the newest requests without any. Those of requests that are
/// over are not copied again.
fn newest(state: &State, known: &mut Known) -> serde_json::Value {
    let decisions: &Decisions = state.router.decisions();
    let mut now = Known::with_capacity(NEWEST_DECISIONS);
    let mut list = Vec::with_capacity(NEWEST_DECISIONS);
    for id in decisions.newest(NEWEST_DECISIONS) {
        let old = known.remove(&id);
        let over = old.as_ref().is_some_and(|brief| brief.outcome.is_some());
        let fresh = || decisions.get(id, |head, _| old.is_none() || head.outcome.is_some());
        let fresh = if over { None } else { fresh().map(|record| record.summary()) };
        if let Some(brief) = fresh.or(old) {
            list.push(json!(brief));
            now.insert(id, brief);
        }
    }
    *known = now;
    let unrouted = state.metrics.unrouted.newest();
    json!({ "on": decisions.is_on(), "lost": decisions.lost(), "decisions": list, "unrouted": unrouted })
}

/// An event's bytes; JSON has no line breaks of its own.
fn event(kind: &str, data: &impl Serialize) -> Option<Bytes> {
    let mut text = format!("event: {kind}\ndata: ").into_bytes();
    serde_json::to_writer(&mut text, data).ok()?;
    text.extend(b"\n\n");
    Some(Bytes::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_names_the_kinds_that_it_wants() {
        let of = |text: &str| Wanted { kinds: Some(text.to_owned()) }.kinds();
        assert_eq!(Wanted::default().kinds(), Ok([true, true, true, true, false, false]));
        assert_eq!(of("fleet,slots"), Ok([false, true, false, false, true, false]));
        let expected =
            "kinds: unknown value `cars`: expected some of workers,slots,decisions,stats,fleet,hour";
        assert_eq!(of("fleet,cars"), Err(expected.to_owned()));
        assert!(of("").is_err());
    }
}
