//! Facts of one decision: writes those that a policy asked for as one flat list, request facts first, then
//! worker facts column by column.
//!
//! The facts that most policies ask for (load, cached blocks, blocks after admission) are read once for each
//! decision, and only when a policy needs them: see [`crate::inputs`]. Everything else is read from the
//! columns of the pool, or computed once for each group of workers with the same description.

use pointsman_workers::{Candidate, Invariant, Leg, Pool, RankView, WorkerSpec};
use tokio::time::Instant;

use crate::{
    config::RouterConfig,
    cost::CostTerms,
    facts::{RequestFact, Wants, WorkerColumn, WorkerFact},
    inputs::Inputs,
    query::{CandidateId, Query},
};

/// Maximum number of groups of candidates with equal descriptions: one for each bit of a word. A constraint
/// on descriptions is evaluated once for each group; with more groups, once for each candidate.
pub(crate) const MAX_GROUPS: usize = u64::BITS as usize;

/// Facts of one decision, shared by all policies of the slot and by the native selectors.
pub(crate) struct DecisionFacts<'a> {
    pub(crate) query: &'a Query<'a>,
    pub(crate) config: RouterConfig,
    pub(crate) pool: &'a Pool,
    inputs: &'a Inputs,
    /// The taint that the prefill worker prefers in a decode worker (D3).
    topology: Option<(String, f32)>,
}

impl<'a> DecisionFacts<'a> {
    pub(crate) fn new(
        query: &'a Query<'a>,
        config: RouterConfig,
        pool: &'a Pool,
        inputs: &'a Inputs,
    ) -> Self {
        let prefill = if query.leg == Leg::Decode { query.peer() } else { None };
        let topology = prefill.and_then(WorkerSpec::preferred_transfer);
        Self { query, config, pool, inputs, topology }
    }

    /// Appends request facts, then the worker columns of `rows`, to `out`.
    pub(crate) fn write(&self, wants: &Wants, rows: &[u32], out: &mut Vec<u32>) {
        self.write_request(wants, out);
        self.write_workers(wants, rows, out);
    }

    /// Appends the request facts.
    pub(crate) fn write_request(&self, wants: &Wants, out: &mut Vec<u32>) {
        for fact in &wants.request {
            self.push_request(*fact, out);
        }
    }

    /// Appends the worker columns of `rows`.
    pub(crate) fn write_workers(&self, wants: &Wants, rows: &[u32], out: &mut Vec<u32>) {
        let words = wants.worker_width() * rows.len();
        let from = out.len();
        out.reserve(words);
        for column in &wants.worker {
            match column {
                WorkerColumn::Fact(WorkerFact::WorkerId) => {
                    let [low, high, _] = self.pool.ids().columns();
                    self.take(low, rows, out);
                    self.take(high, rows, out);
                }
                WorkerColumn::Fact(fact) => self.write_fact(*fact, rows, out),
                WorkerColumn::LabelIs { key, value } => self.describe(rows, out, |spec| {
                    let label = spec.labels.get(&**key);
                    u32::from(label.is_some_and(|label| **label == **value))
                }),
                WorkerColumn::LabelNumber { key } => self.describe(rows, out, |spec| {
                    let number = spec.labels.get(&**key).and_then(|label| label.parse::<f32>().ok());
                    number.filter(|number| number.is_finite()).unwrap_or(0.0).to_bits()
                }),
                WorkerColumn::TaintIs(name) => {
                    self.describe(rows, out, |spec| u32::from(spec.taints.contains(&**name)));
                }
            }
        }
        Invariant::FactWords.check(out.len() == from + words);
    }

    /// The terms of the native cost of the candidate at `row` of the pool.
    pub(crate) fn terms(&self, row: u32) -> CostTerms {
        let request = self.query.request;
        let mut terms = CostTerms {
            prompt_tokens: request.prompt_tokens,
            block_size: request.block_size,
            ..CostTerms::default()
        };
        if let Some(candidate) = self.pool.get(row as usize) {
            (terms.active_requests, terms.active_prefill_tokens) =
                self.inputs.load(row).unwrap_or_else(|| {
                    let load = candidate.load();
                    (load.active_requests(), load.active_prefill_tokens())
                });
            terms.decode_blocks = self.inputs.after_admission(row);
            terms.cached = self.inputs.cached(row);
            terms.taint_preference = self.preference(candidate.worker.spec());
        }
        terms
    }

    /// The native cost terms of each of `rows`.
    pub(crate) fn all_terms(&self, rows: &[u32]) -> Vec<(CandidateId, CostTerms)> {
        rows.iter().filter_map(|row| Some((self.candidate_id(*row)?, self.terms(*row)))).collect()
    }

    /// The candidate at `row` of the pool.
    pub(crate) fn candidate_id(&self, row: u32) -> Option<CandidateId> {
        let candidate = self.pool.get(row as usize)?;
        Some((candidate.worker_id(), candidate.rank))
    }

    fn has_preference(&self) -> bool {
        self.topology.is_some() || !self.query.request.preferred_taints.is_empty()
    }

    fn preference(&self, spec: &WorkerSpec) -> f32 {
        if !self.has_preference() {
            return 0.0;
        }
        // The prefill worker's preference overrides the client's for the same taint (D3).
        let topology = self.topology.as_ref();
        let own = |taint: &String| topology.is_some_and(|(other, _)| other == taint);
        let client = self.query.request.preferred_taints.iter().filter(|(taint, _)| !own(taint));
        let client = client.map(|(taint, weight)| (taint, *weight));
        let all = client.chain(topology.map(|(taint, weight)| (taint, *weight)));
        all.filter(|(taint, _)| spec.taints.contains(*taint)).map(|(_, weight)| weight).sum()
    }

    /// Appends the values of `rows` from a column of the whole pool.
    fn take(&self, column: &[u32], rows: &[u32], out: &mut Vec<u32>) {
        if rows.len() == self.pool.len() && column.len() == rows.len() {
            // Rows rise, so these are all.
            out.extend_from_slice(column);
        } else {
            check_rows(rows, column.len());
            out.extend(rows.iter().map(|row| column.get(*row as usize).copied().unwrap_or(0)));
        }
    }

    /// Appends a value of each row that the columns of the pool have.
    fn read(&self, rows: &[u32], out: &mut Vec<u32>, value: impl Fn(RankView<'_>) -> u32) {
        if rows.len() == self.pool.len() {
            self.pool.for_all(rows, |_, load| out.push(value(load)));
        } else {
            self.pool.for_each(rows, |_, load| out.push(value(load)));
        }
    }

    /// Appends a value of each row's description. It is computed once for each group, unless there are many.
    fn describe(&self, rows: &[u32], out: &mut Vec<u32>, value: impl Fn(&WorkerSpec) -> u32) {
        if self.pool.group_count() > MAX_GROUPS {
            check_rows(rows, self.pool.len());
            let value = |candidate: &Candidate| value(candidate.worker.spec());
            return out.extend(rows.iter().map(|row| self.pool.get(*row as usize).map_or(0, value)));
        }
        check_rows(rows, self.pool.len());
        let mut values = [0; MAX_GROUPS];
        values.iter_mut().zip(self.pool.groups()).for_each(|(cell, spec)| *cell = value(spec));
        let groups = self.pool.group_of_rows();
        let of_group = |group: &u32| values.get(*group as usize).copied().unwrap_or(0);
        if rows.len() == groups.len() {
            // Rows rise, so these are all.
            out.extend(groups.iter().map(of_group));
        } else {
            out.extend(rows.iter().map(|row| groups.get(*row as usize).map_or(0, of_group)));
        }
    }

    /// Appends the values of a few candidates, and 0 for the others.
    fn sparse(&self, rows: &[u32], out: &mut Vec<u32>, values: impl IntoIterator<Item = (CandidateId, u32)>) {
        let start = out.len();
        out.resize(start + rows.len(), 0);
        for ((worker, rank), value) in values {
            let row = self.pool.row_of(worker, rank);
            let position = row.and_then(|row| rows.binary_search(&row).ok());
            if let Some(cell) = position.and_then(|position| out.get_mut(start + position)) {
                *cell = value;
            }
        }
    }

    fn write_fact(&self, fact: WorkerFact, rows: &[u32], out: &mut Vec<u32>) {
        use WorkerFact as F;
        let request = self.query.request;
        let zeros = |out: &mut Vec<u32>| out.resize(out.len() + rows.len(), 0);
        match fact {
            // Takes two columns, which the caller writes.
            F::WorkerId => {}
            F::DpRank => {
                let [_, _, ranks] = self.pool.ids().columns();
                self.take(ranks, rows, out);
            }
            F::ActiveRequests => match self.inputs.requests() {
                Some(column) => self.take(column, rows, out),
                None => self.read(rows, out, |load| load.active_requests()),
            },
            F::ActivePrefillTokens => match self.inputs.prefill_tokens() {
                Some(column) => self.take(column, rows, out),
                None => self.read(rows, out, |load| load.active_prefill_tokens()),
            },
            F::PrefixRequests => self.take(self.inputs.like_column(), rows, out),
            F::DecodeBlocks => self.take(self.inputs.after_admission_column(), rows, out),
            F::TotalBlocks => {
                let size = request.block_size;
                self.read(rows, out, |load| load.capacity_in_blocks(size).unwrap_or(0));
            }
            F::CachedBlocksDevice => self.take(self.inputs.cached_column(0), rows, out),
            F::CachedBlocksHost => self.take(self.inputs.cached_column(1), rows, out),
            F::CachedBlocksDisk => self.take(self.inputs.cached_column(2), rows, out),
            F::EngineRunning => self.read(rows, out, |load| running(load).unwrap_or(0)),
            F::EngineRunningKnown => self.read(rows, out, |load| running(load).is_some().into()),
            F::EngineQueue => self.read(rows, out, |load| waiting(load).unwrap_or(0)),
            F::EngineQueueKnown => self.read(rows, out, |load| waiting(load).is_some().into()),
            F::KvUsage => self.read(rows, out, |load| kv_usage(load).map_or(0, f32::to_bits)),
            F::KvUsageKnown => self.read(rows, out, |load| kv_usage(load).is_some().into()),
            F::LoadAgeMs => {
                let now = Instant::now();
                self.read(rows, out, |load| load.engine_load().map_or(u32::MAX, |engine| engine.age_ms(now)));
            }
            F::TaintPreference if !self.has_preference() => zeros(out),
            F::TaintPreference => self.describe(rows, out, |spec| self.preference(spec).to_bits()),
            F::TopologyDistance => match self.query.peer() {
                Some(peer) => self.describe(rows, out, |spec| distance(peer, spec)),
                None => zeros(out),
            },
            F::SessionBound => self.sparse(rows, out, self.query.session.map(|bound| (bound, 1))),
            F::ProgramTokens => self.sparse(rows, out, request.held_tokens()),
            F::RunningProgramTokens => self.read(rows, out, |load| load.program_tokens()),
            F::LoraLoaded => match request.lora.as_deref() {
                Some(lora) => {
                    let has = |spec: &WorkerSpec| spec.loras.iter().any(|loaded| loaded == lora);
                    self.describe(rows, out, |spec| u32::from(has(spec)));
                }
                None => zeros(out),
            },
            F::TtftEwmaUs => self.read(rows, out, |load| load.ttft_ewma_us()),
            F::ItlEwmaUs => self.read(rows, out, |load| load.itl_ewma_us()),
            F::ErrorPpm => self.read(rows, out, |load| load.error_ppm()),
            F::LocalPrefill => self.describe(rows, out, |spec| u32::from(spec.local_prefill)),
            F::MaxConcurrency => self.describe(rows, out, |spec| spec.max_concurrency.unwrap_or(0)),
            F::PrefillUsPerKtoken => self.read(rows, out, |load| load.prefill_us_per_ktoken()),
        }
    }

    /// Cached prefix blocks at a candidate: device, host, disk.
    pub(crate) fn cached(&self, row: u32) -> [u32; 3] {
        self.inputs.cached(row)
    }

    fn push_request(&self, fact: RequestFact, out: &mut Vec<u32>) {
        use RequestFact as F;
        let (request, config) = (self.query.request, &self.config);
        let value = match fact {
            F::PromptTokens => request.prompt_tokens,
            F::PromptTokensEstimated => u32::from(request.prompt_tokens_estimated),
            F::RequestBlocks => request.request_blocks(),
            F::BlockSize => request.block_size,
            F::N => request.n,
            F::MaxTokens => request.max_tokens.unwrap_or(0),
            F::ExpectedOutputTokens => request.expected_output_tokens.unwrap_or(0),
            F::TtftTargetUs => request.ttft_target_us.unwrap_or(0),
            F::ItlTargetUs => request.itl_target_us.unwrap_or(0),
            F::Priority => request.priority.to_bits(),
            F::PriorityJump => request.priority_jump_s.to_bits(),
            F::SessionHash => return push_u64(request.session_hash.unwrap_or(0), out),
            F::LoraHash => return push_u64(request.lora_hash.unwrap_or(0), out),
            F::TenantHash => return push_u64(request.tenant_hash.unwrap_or(0), out),
            F::TenantActiveRequests => request.tenant_active_requests,
            F::OverlapScoreCredit => single(config.overlap_score_credit),
            F::HostCacheCredit => single(config.host_cache_credit),
            F::DiskCacheCredit => single(config.disk_cache_credit),
            F::PrefillLoadScale => single(config.prefill_load_scale),
            F::ActiveRequestWeight => single(config.active_request_weight),
            F::Temperature => single(config.temperature),
            F::AssumeKvReuse => u32::from(config.assume_kv_reuse),
            F::TrackPrefillTokens => u32::from(config.track_prefill_tokens),
            F::SharedCacheMultiplier => single(config.shared_cache_multiplier),
            F::OtherLegWorkerId => {
                return push_u64(self.query.other_leg.map_or(0, |(worker, _)| worker.0), out);
            }
            F::OtherLegDpRank => self.query.other_leg.map_or(u32::MAX, |(_, rank)| rank.0),
            F::Explain => u32::from(self.query.explain),
            F::QueueUs => self.query.queue_us,
            F::ProgramHash => {
                return push_u64(request.program.as_ref().map_or(0, |program| program.hash), out);
            }
            F::ProgramTurn => request.program.as_ref().map_or(0, |program| program.turn),
            F::ProgramIdleMs => {
                request.program.as_ref().and_then(|program| program.idle_ms).unwrap_or(u32::MAX)
            }
        };
        out.push(value);
    }
}

fn running(load: RankView<'_>) -> Option<u32> {
    load.engine_load()?.running
}

fn waiting(load: RankView<'_>) -> Option<u32> {
    load.engine_load()?.waiting
}

fn kv_usage(load: RankView<'_>) -> Option<f32> {
    load.engine_load()?.kv_usage
}

/// Checks that a column of `length` values has one for each row. Rows rise.
fn check_rows(rows: &[u32], length: usize) {
    Invariant::FactRows.check(rows.last().is_none_or(|last| (*last as usize) < length));
}

/// Number of topology domains in which the two workers differ.
fn distance(peer: &WorkerSpec, spec: &WorkerSpec) -> u32 {
    let apart = peer.topology.iter().filter(|(domain, value)| spec.topology.get(*domain) != Some(value));
    u32::try_from(apart.count()).unwrap_or(u32::MAX)
}

fn push_u64(value: u64, out: &mut Vec<u32>) {
    out.extend([low(value), high(value)]);
}

fn low(value: u64) -> u32 {
    value as u32
}

fn high(value: u64) -> u32 {
    (value >> 32) as u32
}

fn single(value: f64) -> u32 {
    (value as f32).to_bits()
}

#[cfg(test)]
mod tests;
