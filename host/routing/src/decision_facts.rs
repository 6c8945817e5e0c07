//! Facts of one decision: writes those that a policy asked for as one flat list, request facts first, then
//! worker facts column by column.
//!
//! Expensive inputs (cached blocks, blocks after admission) are computed once per decision, and only when a
//! policy needs them. Everything else is read directly from the candidates.

use pointsman_workers::{Candidate, Leg, Overlaps, PrefixIndex, WorkerSpec};

use crate::{
    config::RouterConfig,
    cost::CostTerms,
    facts::{RequestFact, Wants, WorkerColumn, WorkerFact},
    query::{CandidateId, Query},
    slot::{NativeMode, Program},
};

/// Facts of one decision, shared by all policies of the slot and by the native selectors.
pub(crate) struct DecisionFacts<'a> {
    pub(crate) query: &'a Query<'a>,
    pub(crate) config: RouterConfig,
    pub(crate) pool: &'a [Candidate],
    inputs: &'a Inputs,
    /// The taint that the prefill worker prefers in a decode worker (D3).
    topology: Option<(String, f32)>,
}

/// Reusable buffers of the expensive inputs, indexed by pool position.
#[derive(Default)]
pub(crate) struct Inputs {
    overlaps: Overlaps,
    cached: Vec<[u32; 3]>,
    after_admission: Vec<u32>,
}

/// The expensive inputs that a decision needs.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    pub(crate) cached: bool,
    pub(crate) after_admission: bool,
}

impl Needs {
    pub(crate) const ALL: Self = Self { cached: true, after_admission: true };

    pub(crate) fn of(wants: &Wants) -> Self {
        let mut needs = Self::default();
        for column in &wants.worker {
            match column {
                WorkerColumn::Fact(
                    WorkerFact::CachedBlocksDevice
                    | WorkerFact::CachedBlocksHost
                    | WorkerFact::CachedBlocksDisk,
                ) => needs.cached = true,
                WorkerColumn::Fact(WorkerFact::DecodeBlocks) => needs.after_admission = true,
                _ => {}
            }
        }
        needs
    }

    /// The expensive inputs that a program needs.
    pub(crate) fn of_program(program: &Program) -> Self {
        match program {
            Program::Native(NativeMode::Kv) => Self::ALL,
            Program::DecodeOverride(_) => Self::default(),
            _ => program
                .policies()
                .map(|policy| Self::of(&policy.info().wants))
                .fold(Self::default(), Self::or),
        }
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            cached: self.cached || other.cached,
            after_admission: self.after_admission || other.after_admission,
        }
    }
}

impl Inputs {
    /// Computes what `needs` names for the `rows` of `pool`; the rest reads as 0.
    pub(crate) fn compute(
        &mut self,
        needs: Needs,
        query: &Query<'_>,
        config: &RouterConfig,
        pool: &[Candidate],
        rows: &[u32],
        index: &PrefixIndex,
    ) {
        self.cached.clear();
        self.cached.resize(pool.len(), [0; 3]);
        self.after_admission.clear();
        self.after_admission.resize(pool.len(), 0);
        let request = query.request;
        if needs.cached {
            index.matches(request.prefix.hashes(), &mut self.overlaps);
        }
        let reuse = config.assume_kv_reuse;
        let mut overlaps = self.overlaps.reader();
        for row in rows.iter().map(|row| *row as usize) {
            let Some(candidate) = pool.get(row) else { continue };
            if let Some(cached) = self.cached.get_mut(row).filter(|_| needs.cached) {
                let matched = overlaps.get(candidate.worker_id(), candidate.rank);
                *cached =
                    [matched.device, matched.host, matched.disk].map(|marks| request.prefix.blocks(marks));
                if let [device @ 1..=u32::MAX, 0, 0] = cached {
                    // An engine with larger blocks reuses whole ones only. Few candidates hold any, and only
                    // of these the worker is looked at.
                    *device -= *device % candidate.worker.blocks_at_once(request.block_size);
                }
            }
            if let Some(blocks) = self.after_admission.get_mut(row).filter(|_| needs.after_admission) {
                *blocks =
                    candidate.load().blocks_after_admission(&request.prefix, request.request_blocks(), reuse);
            }
        }
    }

    /// Cached blocks (device, host, disk) of the candidate at `row` of the pool.
    pub(crate) fn cached(&self, row: usize) -> [u32; 3] {
        self.cached.get(row).copied().unwrap_or_default()
    }
}

impl<'a> DecisionFacts<'a> {
    pub(crate) fn new(
        query: &'a Query<'a>,
        config: RouterConfig,
        pool: &'a [Candidate],
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
        out.reserve(wants.worker_width() * rows.len());
        for column in &wants.worker {
            match column {
                WorkerColumn::Fact(WorkerFact::WorkerId) => {
                    self.column(rows, out, |_, candidate| low(candidate.worker_id().0));
                    self.column(rows, out, |_, candidate| high(candidate.worker_id().0));
                }
                WorkerColumn::Fact(fact) => self.write_fact(*fact, rows, out),
                WorkerColumn::LabelIs { key, value } => self.column(rows, out, |_, candidate| {
                    let label = candidate.worker.spec().labels.get(&**key);
                    u32::from(label.is_some_and(|label| **label == **value))
                }),
                WorkerColumn::LabelNumber { key } => self.column(rows, out, |_, candidate| {
                    let number = candidate
                        .worker
                        .spec()
                        .labels
                        .get(&**key)
                        .and_then(|label| label.parse::<f32>().ok());
                    number.filter(|number| number.is_finite()).unwrap_or(0.0).to_bits()
                }),
            }
        }
    }

    /// The terms of the native cost of the candidate at `row` of the pool.
    pub(crate) fn terms(&self, row: u32) -> CostTerms {
        let request = self.query.request;
        let mut terms = CostTerms {
            prompt_tokens: request.prompt_tokens,
            block_size: request.block_size,
            ..CostTerms::default()
        };
        let position = row as usize;
        if let Some(candidate) = self.pool.get(position) {
            let load = candidate.load();
            terms.active_prefill_tokens = load.active_prefill_tokens();
            terms.active_requests = load.active_requests();
            terms.decode_blocks = self.after_admission(position);
            terms.cached = self.inputs.cached(position);
            terms.taint_preference = self.preference(candidate);
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

    fn after_admission(&self, position: usize) -> u32 {
        self.inputs.after_admission.get(position).copied().unwrap_or(0)
    }

    fn preference(&self, candidate: &Candidate) -> f32 {
        if self.topology.is_none() && self.query.request.preferred_taints.is_empty() {
            return 0.0;
        }
        let taints = &candidate.worker.spec().taints;
        // The prefill worker's preference overrides the client's for the same taint (D3).
        let topology = self.topology.as_ref();
        let own = |taint: &String| topology.is_some_and(|(other, _)| other == taint);
        let client = self.query.request.preferred_taints.iter().filter(|(taint, _)| !own(taint));
        let client = client.map(|(taint, weight)| (taint, *weight));
        let all = client.chain(topology.map(|(taint, weight)| (taint, *weight)));
        all.filter(|(taint, _)| taints.contains(*taint)).map(|(_, weight)| weight).sum()
    }

    fn column(&self, rows: &[u32], out: &mut Vec<u32>, value: impl Fn(usize, &Candidate) -> u32) {
        out.extend(rows.iter().map(|row| {
            let position = *row as usize;
            self.pool.get(position).map_or(0, |candidate| value(position, candidate))
        }));
    }

    fn write_fact(&self, fact: WorkerFact, rows: &[u32], out: &mut Vec<u32>) {
        use WorkerFact as F;
        let request = self.query.request;
        match fact {
            // Takes two columns, which the caller writes.
            F::WorkerId => {}
            F::DpRank => self.column(rows, out, |_, c| c.rank.0),
            F::ActiveRequests => self.column(rows, out, |_, c| c.load().active_requests()),
            F::ActivePrefillTokens => self.column(rows, out, |_, c| c.load().active_prefill_tokens()),
            F::DecodeBlocks => self.column(rows, out, |position, _| self.after_admission(position)),
            F::TotalBlocks => {
                self.column(rows, out, |_, c| c.worker.capacity_in_blocks(request.block_size).unwrap_or(0))
            }
            F::CachedBlocksDevice => self.cached_column(rows, out, 0),
            F::CachedBlocksHost => self.cached_column(rows, out, 1),
            F::CachedBlocksDisk => self.cached_column(rows, out, 2),
            F::EngineRunning => {
                self.column(rows, out, |_, c| c.worker.engine_load().map_or(0, |l| l.running))
            }
            F::EngineQueue => self.column(rows, out, |_, c| c.worker.engine_load().map_or(0, |l| l.waiting)),
            F::KvUsage => {
                self.column(rows, out, |_, c| c.worker.engine_load().map_or(0.0, |l| l.kv_usage).to_bits())
            }
            F::LoadAgeMs => self.column(rows, out, |_, c| {
                c.worker
                    .engine_load()
                    .map_or(u32::MAX, |l| u32::try_from(l.read_at.elapsed().as_millis()).unwrap_or(u32::MAX))
            }),
            F::TaintPreference => self.column(rows, out, |_, c| self.preference(c).to_bits()),
            F::TopologyDistance => {
                let peer = self.query.peer();
                self.column(rows, out, |_, c| peer.map_or(0, |peer| distance(peer, c.worker.spec())));
            }
            F::SessionBound => {
                self.column(rows, out, |_, c| u32::from(self.query.session == Some((c.worker_id(), c.rank))))
            }
            F::LoraLoaded => self.column(rows, out, |_, c| {
                u32::from(
                    request
                        .lora
                        .as_deref()
                        .is_some_and(|lora| c.worker.spec().loras.iter().any(|l| l == lora)),
                )
            }),
            F::TtftEwmaUs => self.column(rows, out, |_, c| c.load().ttft_ewma_us()),
            F::ItlEwmaUs => self.column(rows, out, |_, c| c.load().itl_ewma_us()),
            F::ErrorPpm => self.column(rows, out, |_, c| c.load().error_ppm()),
            F::LocalPrefill => self.column(rows, out, |_, c| u32::from(c.worker.spec().local_prefill)),
            F::MaxConcurrency => self.column(rows, out, |_, c| c.worker.spec().max_concurrency.unwrap_or(0)),
            F::PrefillUsPerKtoken => self.column(rows, out, |_, c| c.load().prefill_us_per_ktoken()),
        }
    }

    /// Cached prefix blocks at a candidate: device, host, disk.
    pub(crate) fn cached(&self, row: u32) -> [u32; 3] {
        self.inputs.cached(row as usize)
    }

    fn cached_column(&self, rows: &[u32], out: &mut Vec<u32>, tier: usize) {
        self.column(rows, out, |position, _| self.inputs.cached(position).get(tier).copied().unwrap_or(0));
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
        };
        out.push(value);
    }
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
