//! Finds the legs that ran on each engine, from logged requests.

use std::collections::HashMap;

use pointsman_decision_log::{LoggedDecision, LoggedRequest};
use pointsman_sim::core::PromptKv;
use pointsman_workers::Role;

use crate::calibrate::{Sample, replay::Arrival};

/// Share of the time to first token that must lie between the two decisions of a pair for the second decision
/// to count as made after the end of the prefill.
const SEQUENTIAL_SHARE: f64 = 0.05;

/// A leg that ran on an engine.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Leg {
    /// Time at which the engine got it, microseconds since the Unix epoch. For a leg that received KV, the
    /// time of the first token.
    pub(super) at_us: u64,
    pub(super) end_us: u64,
    pub(super) isl: u32,
    pub(super) osl: u32,
    pub(super) kv: PromptKv,
    /// Time from its start to its first token, ms.
    pub(super) ttft_ms: Option<f64>,
    /// Time from its first to its last token, ms.
    pub(super) decode_ms: Option<f64>,
    /// Whether it is of a streamed request. Another one only counts as load, with the times of its decisions.
    pub(super) is_measured: bool,
    /// Whether the leg is fitted. Otherwise it only counts as load.
    pub(super) is_fitted: bool,
}

impl Leg {
    pub(super) fn arrival(&self, start_us: u64) -> Arrival {
        Arrival { at_ms: millis(start_us, self.at_us), isl: self.isl, osl: self.osl, kv: self.kv }
    }
}

/// An engine, and the legs that ran on it.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    pub(super) role: Role,
    pub(super) legs: Vec<Leg>,
    /// Intervals in which the engine worked on something of unknown size, microseconds.
    unknown: Vec<(u64, u64)>,
}

/// Positions of an engine and of a leg on it.
pub(super) type Place = (usize, usize);

/// A request with known times.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    pub(super) at_us: u64,
    pub(super) measured: Sample,
    /// The leg that computed the prompt.
    pub(super) prompt: Place,
    /// The leg that received its KV.
    pub(super) decode: Option<Place>,
    /// Time from the end of the prefill to the first token, ms.
    pub(super) handoff_ms: Option<f64>,
}

/// Requests that are not fitted, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut {
    uncounted: u64,
    /// Number of requests that are fitted with an estimate of their prompt tokens.
    estimated: u64,
    unknown_end: u64,
    beside_unknown: u64,
    /// Number of requests that only count as load.
    not_streamed: u64,
    /// Number of requests with several prompts or choices. They only count as load.
    several: u64,
}

/// Everything that ran on the engines.
#[derive(Clone, Debug, Default)]
pub(super) struct Load {
    pub(super) engines: Vec<Engine>,
    pub(super) requests: Vec<Observed>,
    pub(super) left_out: LeftOut,
    /// First arrival, microseconds since the Unix epoch.
    pub(super) start_us: u64,
    /// Whether prompt tokens that were estimated from bytes are used.
    takes_estimates: bool,
    /// Workers of pairs. They may serve requests alone, too.
    roles: HashMap<u64, Role>,
    places: HashMap<(Role, u64, u32), usize>,
}

impl Load {
    pub(super) fn of(requests: &[LoggedRequest]) -> Self {
        let start_us = requests.iter().map(|request| request.arrived_at_us).min().unwrap_or_default();
        // If most prompts that can be fitted were not counted, estimates are used. An answer that is not
        // streamed has counted tokens.
        let streamed = || requests.iter().filter(|request| request.outcome.ttft_ms.is_some());
        let counted = streamed().filter(|request| request.counted_tokens().is_some()).count();
        let takes_estimates = counted * 2 < streamed().count();
        let roles = requests.iter().flat_map(|request| &request.decisions).filter_map(pair_role).collect();
        let mut load = Self { start_us, takes_estimates, roles, ..Self::default() };
        requests.iter().for_each(|request| load.add_request(request));
        load.set_aside();
        load.requests.sort_by_key(|request| request.at_us);
        load
    }

    /// Returns the engines of a role, none if no streamed request ran on them.
    pub(super) fn engines_of(&self, role: Role) -> Vec<&Engine> {
        let of_role = || self.engines.iter().filter(|engine| engine.role == role && !engine.legs.is_empty());
        let is_measured = of_role().flat_map(|engine| &engine.legs).any(|leg| leg.is_measured);
        of_role().filter(|_| is_measured).collect()
    }

    /// Returns the time from which requests are kept for the check.
    pub(super) fn boundary_us(&self, share: f64) -> u64 {
        let place = to_usize(f64::from(u32::try_from(self.requests.len()).unwrap_or(u32::MAX)) * share);
        self.requests.get(place).map_or(u64::MAX, |request| request.at_us)
    }

    fn engine(&mut self, decision: &LoggedDecision) -> Option<usize> {
        let worker = decision.worker?;
        let role = match decision.slot.as_str() {
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            "aggregated" => self.roles.get(&worker).copied().unwrap_or(Role::Aggregated),
            _ => return None,
        };
        let key = (role, worker, decision.rank.unwrap_or_default());
        let next = self.engines.len();
        let place = *self.places.entry(key).or_insert(next);
        if place == next {
            self.engines.push(Engine { role, legs: Vec::new(), unknown: Vec::new() });
        }
        Some(place)
    }

    fn add_request(&mut self, request: &LoggedRequest) {
        let arrived = request.arrived_at_us;
        let end_us = add_milliseconds(arrived, request.outcome.e2e_ms);
        let (mut prefill, mut serving) = (None, None);
        for (place, decision) in request.decisions.iter().enumerate() {
            let Some(engine) = self.engine(decision) else { continue };
            let at_us = decision.at_us.unwrap_or(arrived).max(arrived);
            let mut later = request.decisions.iter().skip(place + 1);
            if decision.retried || later.any(|other| other.slot == decision.slot) {
                // The work that the engine did before it failed, or the stream left it, is not known.
                self.mark(engine, at_us, end_us);
            } else if decision.slot == "prefill" {
                prefill = Some((engine, at_us));
            } else {
                serving = Some((engine, at_us, decision.at_us.is_some()));
            }
        }
        // Another engine generated the beginning of the answer.
        let is_rest = serving
            .zip(request.outcome.ttft_ms)
            .is_some_and(|((_, at_us, _), ttft_ms)| add_milliseconds(arrived, ttft_ms) < at_us);
        let estimate = Some(request.input_tokens).filter(|tokens| self.takes_estimates && *tokens > 0);
        let counted = request.counted_tokens();
        let tokens = counted.or(estimate);
        let reason = if tokens.is_none() {
            Some(&mut self.left_out.uncounted)
        } else if request.output_tokens == 0 || serving.is_none() || is_rest {
            Some(&mut self.left_out.unknown_end)
        } else {
            None
        };
        if let Some(count) = reason {
            *count += 1;
            for (engine, at_us) in
                prefill.into_iter().chain(serving.map(|(engine, at_us, _)| (engine, at_us)))
            {
                self.mark(engine, at_us, end_us);
            }
            return;
        }
        let (Some(serving), Some(isl)) = (serving, tokens) else { return };
        let several = request.choices.is_some() || request.prompts.is_some();
        let Some(ttft_ms) = request.outcome.ttft_ms.filter(|_| !several) else {
            *(if several { &mut self.left_out.several } else { &mut self.left_out.not_streamed }) += 1;
            self.add_load(request, isl, prefill, (serving.0, serving.1), end_us);
            return;
        };
        self.left_out.estimated += u64::from(counted.is_none());
        self.observe(request, isl, prefill, serving, add_milliseconds(arrived, ttft_ms));
    }

    /// Adds a request of known lengths that is not fitted. A leg that received KV counts from its decision.
    /// Several prompts count as equally long. All choices of a prompt but the first find it in the cache.
    fn add_load(
        &mut self,
        request: &LoggedRequest,
        isl: u32,
        prefill: Option<(usize, u64)>,
        (engine, at_us): (usize, u64),
        end_us: u64,
    ) {
        let (prompts, choices) = (request.prompts.unwrap_or(1).max(1), request.choices.unwrap_or(1).max(1));
        let osl = request.output_tokens.div_ceil(prompts.saturating_mul(choices));
        let kv = match prompt_kv(request, isl) {
            PromptKv::Cached(tokens) => PromptKv::Cached(tokens / prompts),
            kv => kv,
        };
        let isl = isl.div_ceil(prompts);
        let (ttft_ms, decode_ms, is_measured, is_fitted) = (None, None, false, false);
        let leg = Leg { at_us, end_us, isl, osl, kv, ttft_ms, decode_ms, is_measured, is_fitted };
        for _ in 0..prompts {
            if let Some((prefill, began)) = prefill {
                self.put(prefill, Leg { at_us: began, osl: 1, ..leg });
            }
            let kv = if prefill.is_some() { PromptKv::Received } else { kv };
            self.put(engine, Leg { kv, ..leg });
            for _ in 1..choices {
                self.put(engine, Leg { kv: PromptKv::Cached(isl.saturating_sub(1)), ..leg });
            }
        }
    }

    /// Adds a request whose times and lengths are known.
    fn observe(
        &mut self,
        request: &LoggedRequest,
        isl: u32,
        prefill: Option<(usize, u64)>,
        (engine, at_us, is_timed): (usize, u64, bool),
        first_us: u64,
    ) {
        let osl = request.output_tokens;
        let cached = cached_tokens(request, isl);
        let decode_ms = request.outcome.itl_ms.filter(|_| osl > 1).map(|itl| itl * f64::from(osl - 1));
        let end_us = add_milliseconds(first_us, decode_ms.unwrap_or_default());
        let kv = prompt_kv(request, isl);
        let began = prefill.map_or(at_us, |(_, at_us)| at_us);
        let ttft_ms = millis(began, first_us);
        let (is_measured, is_fitted) = (true, true);
        let first_ms = Some(ttft_ms);
        let leg = Leg { at_us, end_us, isl, osl, kv, ttft_ms: first_ms, decode_ms, is_measured, is_fitted };
        let (prompt, decode, handoff_ms) = match prefill {
            None => (self.put(engine, leg), None, None),
            Some((prefill, began)) => {
                let until_decode = millis(began, at_us);
                let is_sequential = is_timed && until_decode >= SEQUENTIAL_SHARE * ttft_ms;
                let (ends, own) = if is_sequential { (at_us, until_decode) } else { (first_us, ttft_ms) };
                let first =
                    Leg { at_us: began, end_us: ends, osl: 1, ttft_ms: Some(own), decode_ms: None, ..leg };
                let second = Leg { at_us: first_us, kv: PromptKv::Received, ttft_ms: None, ..leg };
                let handoff_ms = is_sequential.then(|| millis(at_us, first_us));
                (self.put(prefill, first), Some(self.put(engine, second)), handoff_ms)
            }
        };
        let e2e_ms = ttft_ms + decode_ms.unwrap_or_default();
        // Without a time between tokens, only one output token is known.
        let osl = if decode_ms.is_some() { osl } else { 1 };
        let measured = Sample { at_ms: millis(self.start_us, began), isl, cached, osl, ttft_ms, e2e_ms };
        self.requests.push(Observed { at_us: began, measured, prompt, decode, handoff_ms });
    }

    fn put(&mut self, engine: usize, leg: Leg) -> Place {
        let Some(found) = self.engines.get_mut(engine) else { return (engine, 0) };
        found.legs.push(leg);
        (engine, found.legs.len() - 1)
    }

    fn mark(&mut self, engine: usize, from_us: u64, to_us: u64) {
        if let Some(engine) = self.engines.get_mut(engine) {
            engine.unknown.push((from_us, to_us.max(from_us)));
        }
    }

    /// Excludes from the fit every leg that ran together with something of unknown size.
    fn set_aside(&mut self) {
        for engine in &mut self.engines {
            let unknown = merged(std::mem::take(&mut engine.unknown));
            for leg in &mut engine.legs {
                let next = unknown.partition_point(|(_, to)| *to < leg.at_us);
                let overlaps = unknown.get(next).is_some_and(|(from, _)| *from <= leg.end_us);
                self.left_out.beside_unknown += u64::from(overlaps && leg.is_fitted);
                leg.is_fitted &= !overlaps;
            }
        }
    }
}

/// Returns a worker that served a leg of a pair, and its role.
fn pair_role(decision: &LoggedDecision) -> Option<(u64, Role)> {
    let role = match decision.slot.as_str() {
        "prefill" => Role::Prefill,
        "decode" => Role::Decode,
        _ => return None,
    };
    Some((decision.worker?, role))
}

fn cached_tokens(request: &LoggedRequest, isl: u32) -> u32 {
    let cached = request.outcome.cached_reported.or(request.outcome.cached_predicted).unwrap_or_default();
    cached.min(isl.saturating_sub(1))
}

fn prompt_kv(request: &LoggedRequest, isl: u32) -> PromptKv {
    match cached_tokens(request, isl) {
        0 => PromptKv::Computed,
        cached => PromptKv::Cached(cached),
    }
}

/// Joins intervals that overlap.
fn merged(mut times: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    times.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (from, to) in times {
        match joined.last_mut() {
            Some(last) if last.1 >= from => last.1 = last.1.max(to),
            _ => joined.push((from, to)),
        }
    }
    joined
}

impl LeftOut {
    /// Returns warnings about the requests that are fitted and those that are not.
    pub(super) fn warnings(self) -> Vec<String> {
        let estimated = (self.estimated > 0).then(|| {
            format!(
                "{} requests are fitted with prompt tokens that were estimated from their bytes; for exact ones, set \
                 `models.NAME.tokenizer`, or let clients ask for usage (`stream_options.include_usage`)",
                self.estimated
            )
        });
        estimated.into_iter().chain(self.reasons()).collect()
    }

    /// Returns why requests are not fitted.
    pub(super) fn reasons(self) -> Vec<String> {
        let Self { uncounted, unknown_end, beside_unknown, not_streamed, several, .. } = self;
        let counts = [
            (uncounted, "requests have no counted prompt tokens (no tokenizer), and are not fitted"),
            (unknown_end, "requests failed or have no output tokens, and are not fitted"),
            (beside_unknown, "legs ran beside requests of unknown size, and are not fitted"),
            (
                not_streamed,
                "requests were not streamed: they have no time to first token, and only count as load",
            ),
            (several, "requests have several prompts or choices, and only count as load"),
        ];
        counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect()
    }
}

fn add_milliseconds(start_us: u64, milliseconds: f64) -> u64 {
    let time = std::time::Duration::try_from_secs_f64(milliseconds / 1e3).unwrap_or_default();
    start_us.saturating_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

/// Returns the milliseconds from one time in microseconds to another, or 0 if the second is not later.
#[expect(clippy::cast_precision_loss, reason = "microseconds of a log stay below 2^53")]
fn millis(from_us: u64, to_us: u64) -> f64 {
    to_us.saturating_sub(from_us) as f64 / 1e3
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place in a list")]
fn to_usize(value: f64) -> usize {
    value as usize
}
