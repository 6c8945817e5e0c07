//! The oracle: chooses workers with knowledge that no router has.

use pointsman_sim::core::{PromptKv, Sequence};
use pointsman_workers::{Leg, WorkerId};
use tokio::time::Duration;

use super::{Lab, flight::Part, serving::step_duration};
use crate::{engines, engines::RANK};

/// Tag of the sequence in a prediction. No request uses it.
const PROBE: u64 = u64::MAX;

impl Lab<'_> {
    /// Returns the worker of a leg that no policy chooses.
    pub(super) fn pinned(&self, number: usize, leg: Leg) -> Option<WorkerId> {
        if self.oracle {
            return self.earliest(number, leg);
        }
        let place = self.assigned.get(number)?;
        let engine = if leg == Leg::Prefill { place.prefill } else { place.decode };
        usize::try_from(engine).ok().map(engines::id)
    }

    /// Returns the worker on which a leg would finish first, if no further request arrived.
    ///
    /// The oracle knows the true content of every cache, every queue, the remaining tokens of every sequence
    /// and the output length of this request. It runs a copy of each engine's model until the leg has its
    /// last token; for a prefill leg it adds the transfer, after the transfers that wait for the same link.
    /// It minimises the finish time of each leg in turn. The wait for a link depends only on the prefill
    /// engine, and the transferred blocks only on the decode engine, so choosing the legs one after the other
    /// is hardly worse than choosing them together.
    ///
    /// The choice is not optimal. The oracle does not know later arrivals, ignores what a request costs other
    /// requests, and never delays a request. A policy can be better, above all under high load.
    fn earliest(&self, number: usize, leg: Leg) -> Option<WorkerId> {
        let (request, flight) = (self.trace.requests.get(number)?, self.flights.get(&number)?);
        let tried = flight.attempts.tried();
        let gateway = self.gateways.of(number);
        let pool = gateway.snapshot.pool(&self.model, leg);
        let thresholds = gateway.router.busy().of(&self.model, leg, &gateway.snapshot);
        let allowed = flight.request.allowed_workers.as_ref();
        let candidates = pool.iter().filter(|candidate| {
            candidate.ineligible().is_none()
                && allowed.is_none_or(|allowed| allowed.contains(&candidate.worker.id()))
                && thresholds.exceeded(candidate.load().view()).is_none()
                && !tried.contains(&(candidate.worker.id(), RANK))
        });
        let part = match leg {
            Leg::Prefill => Part::Prefill,
            Leg::Decode => Part::Decode,
            Leg::Aggregated => Part::Whole,
        };
        let sequence = Sequence {
            tag: PROBE,
            prompt: flight.chain.clone(),
            isl: request.input_tokens,
            osl: if part == Part::Prefill { 1 } else { request.output_tokens },
            kv: if part == Part::Decode { PromptKv::Received } else { PromptKv::Computed },
            keeps_blocks: false,
        };
        let sender = flight.held.filter(|_| part == Part::Decode);
        let sender = sender.and_then(|held| self.engines.get(held.engine));
        let submit_at = |engine: &engines::Engine| {
            let cached = engine.core.cached_tokens(&flight.chain, request.input_tokens);
            let transfer = || self.fleet.transfer(request.input_tokens, cached);
            sender.map_or(self.now, |sender| sender.link_free.max(self.now) + transfer())
        };
        // Engines with few sequences come first: their early finish times limit the predictions for the other
        // engines.
        let mut places: Vec<(u32, usize, WorkerId)> = candidates
            .filter_map(|candidate| {
                let id = candidate.worker.id();
                let place = engines::position(id);
                let (running, waiting) = self.engines.get(place)?.core.sequences();
                Some((running + waiting, place, id))
            })
            .collect();
        places.sort_unstable();
        let mut best: Option<(Duration, WorkerId)> = None;
        for (_, place, id) in places {
            let Some(engine) = self.engines.get(place) else { continue };
            let is_prefill = part == Part::Prefill;
            let after =
                if is_prefill { self.fleet.transfer(request.input_tokens, 0) } else { Duration::ZERO };
            let limit = best.map_or(Duration::MAX, |(at, _)| at);
            let submit_at = submit_at(engine) + engine.request_overhead;
            let Some(finish) = engine.finish_of(&sequence, self.now, submit_at, limit) else { continue };
            let done = if is_prefill { finish.max(engine.link_free) } else { finish } + after;
            if done < limit {
                best = Some((done, id));
            }
        }
        best.map(|(_, id)| id)
    }
}

impl engines::Engine {
    /// Returns the time at which the engine would emit the last token of a sequence that is submitted at
    /// `submit_at`, if nothing else arrives. Returns `None` if the sequence does not end before `limit`.
    fn finish_of(
        &self,
        sequence: &Sequence,
        now: Duration,
        submit_at: Duration,
        limit: Duration,
    ) -> Option<Duration> {
        let mut core = self.core.clone();
        let mut waits = Some(sequence.clone());
        let (mut at, mut ends) = (now, self.step_ends);
        let mut tokens = Vec::new();
        loop {
            let end = ends.take();
            at = end.unwrap_or(at);
            if submit_at <= at {
                waits.take().into_iter().for_each(|sequence| core.submit(sequence));
            }
            if end.is_some() {
                tokens.clear();
                core.end_step(&mut tokens);
                if tokens.iter().any(|token| token.tag == PROBE && token.last) {
                    return Some(at);
                }
            }
            if at >= limit {
                return None;
            }
            // KV that other sequences await arrives at once.
            core.receive_all();
            let step = core.begin_step().or_else(|| {
                core.receive_all();
                core.begin_step()
            });
            match step {
                Some(milliseconds) => ends = Some(at + step_duration(milliseconds)),
                // The engine has nothing to do before the sequence arrives.
                None if waits.is_some() => at = submit_at,
                None => return None,
            }
        }
    }
}
