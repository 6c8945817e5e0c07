//! SGLang's bootstrap handoff: both legs run concurrently and meet in a bootstrap room of the prefill engine.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;

use super::{Handshake, Incoming};
use crate::{
    config::SimConfig,
    core::{Prompt, PromptKv},
    engine::{
        Engine, Finish, Given, HandoffResult, Link, Local, PrefillSeat, RoomFailure, Source, Verdict,
        side::Ask,
    },
    failure::Failure,
    faults::FaultKind,
    leg::Leg,
    request::{Body, OneOrMany},
};

pub(super) struct Bootstrap;

/// Host name that marks a transfer without a partner, which the engine uses for its warm-up
/// (`FAKE_BOOTSTRAP_HOST`).
const NO_PARTNER: &str = "2.2.2.2";
/// Largest number of a bootstrap room, which is a signed 64-bit integer in the engine.
const MAX_ROOM: u64 = i64::MAX as u64;

/// A prefill sequence's part of the handoff: waits for its decode leg, computes, and waits until the KV was
/// transferred.
struct Giver {
    engine: Arc<Engine>,
    seat: PrefillSeat,
}

/// A decode sequence's part of the handoff: waits for the prefill leg in its bootstrap room.
struct Taker {
    engine: Arc<Engine>,
    host: String,
    port: u16,
    room: u64,
    transfer_fails: bool,
}

/// Pinned blocks of a prefill whose transfer has not ended. Dropping this releases the blocks, as the engine
/// does when one of the legs is aborted or fails (`disaggregation/prefill.py`,
/// `handle_inflight_transfer_failure`).
struct Pinned {
    engine: Arc<Engine>,
    name: String,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.engine.with_core(|core| core.unpin(&self.name));
    }
}

impl Handshake for Bootstrap {
    fn leg(&self, engine: &Engine, body: &Body) -> Result<Leg, Failure> {
        // `disagg_prefill_dp_rank` belongs to the prefill engine, which may have more ranks than this one.
        let size = engine.config.dp_size;
        if let Some(rank) = body.routed_dp_rank.filter(|rank| *rank >= size) {
            return Err(Failure::bad(format!("routed_dp_rank={rank} out of range [0, {size})")));
        }
        let leg = engine.role().leg();
        match (&body.bootstrap_room, leg) {
            // The engine ignores the room. A gateway that sends one has an error, which the counter shows.
            (Some(_), Leg::Aggregated) => {
                engine.counters.handoff(HandoffResult::Wrong);
                Ok(leg)
            }
            (None, Leg::Prefill | Leg::Decode) => {
                engine.counters.handoff(HandoffResult::Missing);
                let id = body.item_ids().into_iter().next().unwrap_or_default();
                Err(Failure::bad(format!(
                    "Invalid request: Disaggregated request received without bootstrap room id. req.rid='{id}'"
                )))
            }
            _ => Ok(leg),
        }
    }

    fn link(&self, leg: Leg, incoming: &Incoming<'_>, index: usize) -> Result<Box<dyn Link>, Failure> {
        if leg == Leg::Aggregated {
            return Ok(Box::new(Local));
        }
        let body = incoming.body;
        if matches!(&body.bootstrap_host, Some(OneOrMany::One(host)) if host == NO_PARTNER) {
            return Ok(Box::new(Local));
        }
        let first = item(body.bootstrap_room.as_ref(), index)?.copied();
        // A single room is the room of the first item of a batch.
        let next = if matches!(body.bootstrap_room, Some(OneOrMany::One(_))) { index as u64 } else { 0 };
        let room = first
            .and_then(|room| room.checked_add(next))
            .filter(|room| *room <= MAX_ROOM)
            .ok_or_else(|| Failure::bad("bootstrap_room is not within 0 and 2^63-1"))?;
        let host = item(body.bootstrap_host.as_ref(), index)?
            .ok_or_else(|| Failure::bad("bootstrap_host is missing"))?;
        let port = item(body.bootstrap_port.as_ref(), index)?;
        let engine = Arc::clone(incoming.engine);
        if leg == Leg::Prefill {
            let seat = PrefillSeat::claim(&engine, room).map_err(|failure| failed(&engine, failure))?;
            return Ok(Box::new(Giver { engine, seat }));
        }
        let assumed = match engine.config.bootstrap_port {
            0 => SimConfig::DEFAULT_BOOTSTRAP_PORT,
            port => port,
        };
        Ok(Box::new(Taker {
            host: host.clone(),
            port: port.copied().flatten().unwrap_or(assumed),
            room,
            transfer_fails: incoming.faults.has(&FaultKind::TransferFail),
            engine,
        }))
    }

    fn prefill_answer(&self) -> Option<(u32, Finish)> {
        // The first token is transferred with the KV. The requested output length applies only to the decode
        // engine.
        Some((1, Finish::Length))
    }
}

/// Returns the value for one prompt: the single value, or an element of an array. The array may be longer
/// than the batch.
fn item<T>(values: Option<&OneOrMany<T>>, index: usize) -> Result<Option<&T>, Failure> {
    match values {
        None => Ok(None),
        Some(OneOrMany::One(one)) => Ok(Some(one)),
        Some(OneOrMany::Many(many)) => {
            many.get(index).map(Some).ok_or_else(|| Failure::internal("list index out of range"))
        }
    }
}

fn failed(engine: &Engine, failure: RoomFailure) -> Failure {
    engine.counters.handoff(match failure {
        RoomFailure::Duplicate => HandoffResult::Reused,
        RoomFailure::WrongPrompt => HandoffResult::Wrong,
        RoomFailure::TimedOut => HandoffResult::Expired,
        RoomFailure::PrefillLeft | RoomFailure::DecodeLeft => HandoffResult::Failed,
    });
    Failure::internal(failure.message())
}

impl Link for Giver {
    fn gives(&self) -> bool {
        true
    }

    fn defers(&self) -> bool {
        true
    }

    fn arrive(&mut self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async { self.seat.decode_joined().await.map_err(|failure| failed(&self.engine, failure)) })
    }

    fn fetch<'a>(&'a mut self, _: &'a Prompt, _: Duration) -> BoxFuture<'a, Result<Source, Failure>> {
        Box::pin(std::future::ready(Ok(Source::Compute)))
    }

    fn give<'a>(&'a mut self, given: Given<'a>) -> BoxFuture<'a, Result<Option<String>, Failure>> {
        Box::pin(async move {
            let (now, lease) = (self.engine.clock.now(), self.engine.config.lease);
            let pinned = Pinned { engine: Arc::clone(&self.engine), name: self.seat.pin_name() };
            let transfer = self.engine.with_core(|core| {
                core.pin(now, given.job, &pinned.name, given.prompt, lease);
                core.transfer(given.prompt.isl())
            });
            let handed = self.seat.hand_over(transfer).await;
            handed.map_err(|failure| failed(&self.engine, failure)).map(|()| None)
        })
    }
}

impl Link for Taker {
    fn kv(&self) -> PromptKv {
        PromptKv::Awaited
    }

    fn fetch<'a>(&'a mut self, prompt: &'a Prompt, _: Duration) -> BoxFuture<'a, Result<Source, Failure>> {
        Box::pin(async move {
            let ask = Ask::Join { room: self.room, fingerprint: prompt.fingerprint() };
            let reply = self.engine.side.ask(&self.host, self.port, &ask).await;
            if self.room == 0 {
                // The engine uses this number to mark metadata that have not arrived.
                self.engine.clock.sleep(self.engine.config.room_wait).await;
            }
            let (result, failure) = match reply {
                Ok(reply) if reply.verdict == Verdict::Pulled && !self.transfer_fails => {
                    self.engine.counters.handoff(HandoffResult::Pulled);
                    return Ok(Source::Transfer { first_token: true });
                }
                Ok(_) if self.transfer_fails => {
                    (HandoffResult::Failed, Failure::internal("KV transfer failed"))
                }
                Ok(reply) => (reply.verdict.into(), Failure::internal(reply.message)),
                Err(error) => {
                    let (host, port) = (&self.host, self.port);
                    let message = format!("bootstrap server {host}:{port} is unreachable: {error}");
                    (HandoffResult::Failed, Failure::internal(message))
                }
            };
            tracing::error!(room = self.room, reason = %failure.message, "handoff failed");
            self.engine.counters.handoff(result);
            Err(failure)
        })
    }

    fn give<'a>(&'a mut self, _: Given<'a>) -> BoxFuture<'a, Result<Option<String>, Failure>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}
