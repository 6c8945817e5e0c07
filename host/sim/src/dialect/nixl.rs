//! vLLM's handoff with NIXL: the prefill response contains parameters, and the decode engine pulls the blocks
//! that they name.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Handshake, Incoming};
use crate::{
    core::{Prompt, PromptKv},
    engine::{Engine, Finish, Given, HandoffResult, Link, Local, Source, Verdict, random_hex, side::Ask},
    failure::Failure,
    leg::Leg,
    request::Body,
};

pub(super) struct Nixl;

/// `kv_transfer_params` of a prefill response. All but the first two are opaque to the gateway.
#[derive(Debug, Serialize, Deserialize)]
struct Params {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_block_ids: Option<Vec<Vec<u32>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_engine_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_request_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_port: Option<u16>,
    #[serde(default = "one")]
    tp_size: u32,
    #[serde(default = "one")]
    dcp_size: u32,
    #[serde(default = "one")]
    pp_size: u32,
    #[serde(default)]
    remote_num_tokens: u32,
    #[serde(default)]
    remote_blocks_expiry_time: Option<f64>,
    #[serde(default)]
    transfer_mode: String,
    #[serde(default)]
    remote_prefill_cached_tokens: u32,
}

/// A prefill sequence's part of the handoff: pins its blocks, and returns parameters if the response can
/// contain them.
struct Giver {
    engine: Arc<Engine>,
    request_id: String,
    /// Whether the response contains the parameters. A stream, or one of several sequences, returns none but
    /// still pins its blocks.
    tells: bool,
    missing_field: Option<String>,
}

/// A decode sequence's part of the handoff: pulls the blocks.
struct Taker {
    engine: Arc<Engine>,
    host: String,
    port: u16,
    engine_id: String,
    request_id: String,
    block_ids: Vec<u32>,
    transfer_fails: bool,
}

impl Handshake for Nixl {
    fn leg(&self, engine: &Engine, body: &Body) -> Result<Leg, Failure> {
        let flag = |name| {
            body.kv_transfer_params.as_ref().and_then(|params| params.get(name)).and_then(Value::as_bool)
        };
        let wants = (flag("do_remote_decode").unwrap_or(false), flag("do_remote_prefill").unwrap_or(false));
        let leg = match wants {
            (false, false) => return Ok(Leg::Aggregated),
            (true, true) => {
                return Err(Failure::bad(
                    "kv_transfer_params: do_remote_decode and do_remote_prefill are both true",
                ));
            }
            (true, false) => Leg::Prefill,
            (false, true) => Leg::Decode,
        };
        if engine.role().leg() != leg {
            engine.counters.handoff(HandoffResult::Wrong);
            let (leg, role) = (leg.as_str(), engine.role().as_str());
            return Err(Failure::bad(format!("a {leg} leg came to an engine whose role is {role}")));
        }
        Ok(leg)
    }

    fn link(&self, leg: Leg, incoming: &Incoming<'_>, index: usize) -> Result<Box<dyn Link>, Failure> {
        match leg {
            Leg::Aggregated => Ok(Box::new(Local)),
            Leg::Prefill => Ok(Box::new(Giver {
                engine: Arc::clone(incoming.engine),
                request_id: format!("{}-{index}-{}", incoming.id, random_hex(8)),
                tells: !incoming.body.stream && incoming.sequences == 1,
                missing_field: incoming.faults.missing_field().map(str::to_owned),
            })),
            Leg::Decode => match taker(incoming) {
                Some(taker) => Ok(Box::new(taker)),
                None => {
                    incoming.engine.counters.handoff(HandoffResult::Missing);
                    incoming.engine.die();
                    Err(Failure::engine_dead())
                }
            },
        }
    }
}

/// Returns `None` if a parameter that NIXL needs is missing.
fn taker(incoming: &Incoming<'_>) -> Option<Taker> {
    let params = incoming.body.kv_transfer_params.as_ref()?;
    let params = Params::deserialize(params).ok()?;
    Some(Taker {
        engine: Arc::clone(incoming.engine),
        host: params.remote_host?,
        port: params.remote_port?,
        engine_id: params.remote_engine_id?,
        request_id: params.remote_request_id?,
        block_ids: params.remote_block_ids?.concat(),
        transfer_fails: incoming.faults.has(&crate::faults::FaultKind::TransferFail),
    })
}

impl Giver {
    fn params(&self, given: &Given<'_>, block_ids: Vec<u32>) -> Option<String> {
        let (host, port) = &self.engine.advertised;
        let params = Params {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: Some(vec![block_ids]),
            remote_engine_id: Some(self.engine.id.clone()),
            remote_request_id: Some(self.request_id.clone()),
            remote_host: Some(host.clone()),
            remote_port: Some(*port),
            tp_size: 1,
            dcp_size: 1,
            pp_size: 1,
            remote_num_tokens: given.prompt.isl(),
            remote_blocks_expiry_time: None,
            transfer_mode: "pull".to_owned(),
            remote_prefill_cached_tokens: given.cached,
        };
        let Some(field) = &self.missing_field else { return serde_json::to_string(&params).ok() };
        let mut params = serde_json::to_value(&params).ok()?;
        params.as_object_mut()?.remove(field);
        serde_json::to_string(&params).ok()
    }
}

impl Link for Giver {
    fn gives(&self) -> bool {
        true
    }

    fn fetch<'a>(&'a mut self, _: &'a Prompt, _: Duration) -> BoxFuture<'a, Result<Source, Failure>> {
        Box::pin(std::future::ready(Ok(Source::Compute)))
    }

    fn give<'a>(&'a mut self, given: Given<'a>) -> BoxFuture<'a, Result<Option<String>, Failure>> {
        if given.finish != Finish::Length {
            return Box::pin(std::future::ready(Ok(None)));
        }
        let (now, lease) = (self.engine.clock.now(), self.engine.config.lease);
        let pinned =
            self.engine.with_core(|core| core.pin(now, given.job, &self.request_id, given.prompt, lease));
        let params = pinned.filter(|_| self.tells).and_then(|pinned| self.params(&given, pinned.block_ids));
        Box::pin(std::future::ready(Ok(params)))
    }
}

impl Link for Taker {
    fn kv(&self) -> PromptKv {
        PromptKv::Awaited
    }

    /// The decode engine reads the blocks that its prefix cache lacks, at least the last one
    /// (`nixl/pull_scheduler.py`, `get_num_new_matched_tokens` and `update_state_after_alloc`).
    fn transferred(&self, isl: u32, cached: u32) -> u32 {
        isl.saturating_sub(cached)
    }

    fn decides_status(&self) -> bool {
        true
    }

    fn fetch<'a>(
        &'a mut self,
        prompt: &'a Prompt,
        transfer: Duration,
    ) -> BoxFuture<'a, Result<Source, Failure>> {
        Box::pin(async move {
            let ask = Ask::Pull {
                version: self.engine.config.version().to_owned(),
                engine_id: self.engine_id.clone(),
                request_id: self.request_id.clone(),
                block_ids: self.block_ids.clone(),
                fingerprint: prompt.fingerprint(),
                transfer_us: u64::try_from(transfer.as_micros()).unwrap_or(u64::MAX),
            };
            let reply = self.engine.side.ask(&self.host, self.port, &ask).await;
            let result = match &reply {
                Ok(_) if self.transfer_fails => HandoffResult::Failed,
                Ok(reply) => reply.verdict.into(),
                Err(_) => HandoffResult::Failed,
            };
            self.engine.counters.handoff(result);
            match reply {
                Ok(reply) if reply.verdict == Verdict::Pulled && !self.transfer_fails => {
                    Ok(Source::Transfer { first_token: false })
                }
                Ok(reply) => {
                    tracing::error!(request = %self.request_id, verdict = ?reply.verdict, reason = %reply.message, "handoff failed");
                    Err(Failure::transfer())
                }
                Err(error) => {
                    tracing::error!(host = %self.host, port = self.port, %error, "side channel unreachable");
                    Err(Failure::transfer())
                }
            }
        })
    }

    fn give<'a>(&'a mut self, _: Given<'a>) -> BoxFuture<'a, Result<Option<String>, Failure>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

fn one() -> u32 {
    1
}
