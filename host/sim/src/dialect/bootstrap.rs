//! SGLang's bootstrap handoff: both legs run concurrently and meet in a bootstrap room of the prefill engine.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;

use super::{Handshake, Incoming};
use crate::{
    config::{Role, SimConfig},
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

/// Host of a transfer without a partner, with which the engine warms up (`FAKE_BOOTSTRAP_HOST`).
const NO_PARTNER: &str = "2.2.2.2";
/// Largest number of a bootstrap room, which is a signed 64-bit integer in the engine.
const MAX_ROOM: u64 = i64::MAX as u64;

/// Link of a prefill: waits for its decode, computes, waits until the KV was transferred.
struct Giver {
    engine: Arc<Engine>,
    seat: PrefillSeat,
}

/// Link of a decode: waits for the prefill in its bootstrap room.
struct Taker {
    engine: Arc<Engine>,
    host: String,
    port: u16,
    room: u64,
    transfer_fails: bool,
}

impl Handshake for Bootstrap {
    fn leg(&self, engine: &Engine, body: &Body) -> Result<Leg, Failure> {
        for (name, rank) in
            [("routed_dp_rank", body.routed_dp_rank), ("disagg_prefill_dp_rank", body.disagg_prefill_dp_rank)]
        {
            // The rank belongs to the prefill engine, which may have more ranks than this one.
            if name == "routed_dp_rank" && rank.is_some_and(|rank| rank >= engine.config.dp_size) {
                let (rank, size) = (rank.unwrap_or_default(), engine.config.dp_size);
                return Err(Failure::bad(format!("{name} {rank} is out of range: dp_size is {size}")));
            }
        }
        let leg = match engine.config.role {
            Role::Prefill => Leg::Prefill,
            Role::Decode => Leg::Decode,
            Role::Aggregated => Leg::Aggregated,
        };
        match (&body.bootstrap_room, leg) {
            (Some(_), Leg::Aggregated) => {
                engine.counters.handoff(HandoffResult::Wrong);
                Err(Failure::bad("bootstrap_room came to an engine without disaggregation"))
            }
            (None, Leg::Prefill | Leg::Decode) => {
                engine.counters.handoff(HandoffResult::Missing);
                Err(Failure::bad(format!("a disaggregated {} engine needs bootstrap_room", leg.as_str())))
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
        let room = *item(body.bootstrap_room.as_ref(), "bootstrap_room", incoming.sequences, index)?
            .filter(|room| **room <= MAX_ROOM)
            .ok_or_else(|| Failure::bad("bootstrap_room is not within 0 and 2^63-1"))?;
        let host = item(body.bootstrap_host.as_ref(), "bootstrap_host", incoming.sequences, index)?
            .ok_or_else(|| Failure::bad("bootstrap_host is missing"))?;
        let port = item(body.bootstrap_port.as_ref(), "bootstrap_port", incoming.sequences, index)?;
        let engine = Arc::clone(incoming.engine);
        if leg == Leg::Prefill {
            let seat = PrefillSeat::take(&engine, room).map_err(|failure| failed(&engine, failure))?;
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
        // The first token is transferred with the KV. The requested output length concerns the decode engine
        // only.
        Some((1, Finish::Length))
    }
}

/// Returns the value of one sequence: the single value, or the element of an array with one value per
/// sequence.
fn item<'a, T>(
    values: Option<&'a OneOrMany<T>>,
    name: &str,
    sequences: usize,
    index: usize,
) -> Result<Option<&'a T>, Failure> {
    match values {
        None => Ok(None),
        Some(OneOrMany::One(one)) if sequences == 1 => Ok(Some(one)),
        Some(OneOrMany::Many(many)) if many.len() == sequences => Ok(many.get(index)),
        Some(OneOrMany::One(_)) => Err(Failure::bad(format!("{name}: one value for {sequences} sequences"))),
        Some(OneOrMany::Many(many)) => {
            Err(Failure::bad(format!("{name}: {} values for {sequences} sequences", many.len())))
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
            let name = self.seat.pin_name();
            let transfer = self.engine.with_core(|core| {
                core.pin(now, given.job, &name, given.prompt, lease);
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
