//! One slot under management: which content serves, which came before, what is refused and what is quarantined.

use std::{collections::VecDeque, path::Path, sync::Arc};

use pointsman_routing::{
    Digest, Failure, Origin, Picker, Policy, PolicyInfo, Program, Slot, SlotEvent, SlotKind, WeightedScorer,
    World,
};
use tokio::time::Instant;

use super::{
    Probation, SlotConfig,
    folder::Folder,
    now_ms,
    status::{RefusalRecord, SlotState, SlotStatus},
};
use crate::{
    access::Access,
    engine::PolicyEngine,
    loaded::{compile, digest},
    refusal::Refusal,
};

/// Refusals kept for the status.
const KEPT: usize = 16;
/// Scans in a row that must miss a file before its slot goes back to the default: a file may be replaced by removing it
/// first.
const MISSES: u8 = 2;

/// Where the content in force came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Default,
    File(Digest),
}

pub(super) struct Managed {
    slot: Arc<Slot>,
    file: std::path::PathBuf,
    settings: String,
    access: Access,
    default: Program,
    source: Source,
    previous: Source,
    state: SlotState,
    refused: Option<Digest>,
    quarantined: Vec<Digest>,
    misses: u8,
    since_ms: u64,
    load_ms: u64,
    rollbacks: u64,
    refusals: VecDeque<RefusalRecord>,
}

/// A reload's result and reason, for the counters.
type Outcome = (&'static str, &'static str);

impl Managed {
    pub(super) fn new(config: SlotConfig) -> Self {
        Self {
            slot: config.slot,
            file: config.file,
            settings: config.settings,
            access: config.access,
            default: config.default,
            source: Source::Default,
            previous: Source::Default,
            state: SlotState::Default,
            refused: None,
            quarantined: Vec::new(),
            misses: 0,
            since_ms: now_ms(),
            load_ms: 0,
            rollbacks: 0,
            refusals: VecDeque::new(),
        }
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    pub(super) fn is_of(&self, event: &SlotEvent) -> bool {
        self.slot.kind() == event.slot && self.slot.model() == event.model.as_ref()
    }

    /// Reads the file; `None` when nothing changed.
    pub(super) fn scan(&mut self, folder: &Folder, engine: &PolicyEngine) -> Option<Outcome> {
        let bytes = match folder.read(&self.file) {
            None => return self.missing(),
            Some(Err(error)) => return self.refuse(None, &Refusal::Unreadable(error.to_string())),
            Some(Ok(bytes)) => bytes,
        };
        self.misses = 0;
        let digest = digest(&bytes);
        let known = self.source == Source::File(digest) || self.refused == Some(digest);
        if known || self.quarantined.contains(&digest) {
            return None;
        }
        let started = Instant::now();
        let origin = Origin::File(self.file.clone());
        let loaded =
            compile(engine, &bytes, &self.access).and_then(|policy| policy.configure(origin, &self.settings));
        let loaded = loaded.and_then(|policy| self.program(Arc::new(policy)));
        let took = started.elapsed();
        match loaded {
            Err(refusal) => self.refuse(Some(digest), &refusal),
            Ok(program) => {
                self.load_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
                self.install(program, Source::File(digest), SlotState::Active);
                Some(("installed", "changed"))
            }
        }
    }

    /// Judges a failure of the generation in force; `true` when it was rolled back.
    pub(super) fn failed(&mut self, event: &SlotEvent, probation: Probation) -> bool {
        let Source::File(digest) = self.source else { return false };
        let fresh = event.generation == self.slot.pin().generation && event.calls <= probation.calls;
        let stopped = event.failure == Failure::Timeout;
        #[expect(clippy::cast_precision_loss, reason = "calls of a probation are few")]
        let often =
            event.failures >= 3 && event.failures as f64 > probation.failure_share * event.calls as f64;
        if !fresh || !(stopped || often) {
            return false;
        }
        let Some(generation) = self.slot.rollback() else { return false };
        self.source = std::mem::replace(&mut self.previous, Source::Default);
        self.state = SlotState::RolledBack;
        self.since_ms = now_ms();
        self.rollbacks += 1;
        self.quarantined.push(digest);
        let record =
            RefusalRecord::rolled_back(Some(digest), event.calls, event.failures, &event.failure, now_ms());
        tracing::warn!(slot = %self.slot.kind(), digest = digest.short(), %generation, message = record.message);
        self.remember(record);
        true
    }

    pub(super) fn status(&self) -> SlotStatus {
        let active = self.slot.pin();
        let info = info_of(&active.program);
        SlotStatus {
            slot: self.slot.kind(),
            model: self.slot.model().map(ToString::to_string),
            file: self.file.display().to_string(),
            state: self.state,
            generation: active.generation,
            policy: info.map_or_else(|| native_name(&active.program), |info| info.name.to_string()),
            version: info.map(|info| info.version.to_string()),
            digest: info.map(|info| info.digest),
            world: info.map(|info| info.world),
            origin: info.map(|info| info.origin.clone()),
            calls: active.calls(),
            failures: active.failures(),
            breaker_open: active.breaker.is_open(),
            since_ms: self.since_ms,
            load_ms: self.load_ms,
            rollbacks: self.rollbacks,
            quarantined: self.quarantined.clone(),
            refusals: self.refusals.clone(),
        }
    }

    fn missing(&mut self) -> Option<Outcome> {
        self.refused = None;
        if self.source == Source::Default {
            return None;
        }
        self.misses += 1;
        if self.misses < MISSES {
            return None;
        }
        self.misses = 0;
        self.install(self.default.clone(), Source::Default, SlotState::Default);
        Some(("removed", "file_gone"))
    }

    fn install(&mut self, program: Program, source: Source, state: SlotState) {
        let generation = self.slot.install(program);
        self.previous = std::mem::replace(&mut self.source, source);
        (self.state, self.refused, self.since_ms) = (state, None, now_ms());
        let status = self.status();
        tracing::info!(slot = %self.slot.kind(), %generation, policy = status.policy, load_ms = self.load_ms, "policy installed");
    }

    fn refuse(&mut self, digest: Option<Digest>, refusal: &Refusal) -> Option<Outcome> {
        let message = refusal.to_string();
        let again = self.refusals.back().is_some_and(|last| last.digest == digest && last.message == message);
        self.refused = digest;
        if again {
            return None;
        }
        tracing::warn!(slot = %self.slot.kind(), file = %self.file.display(), kind = refusal.kind(), message, "policy refused");
        self.remember(RefusalRecord { digest, kind: refusal.kind(), message, at_ms: now_ms() });
        Some(("refused", refusal.kind()))
    }

    fn remember(&mut self, record: RefusalRecord) {
        self.refusals.push_back(record);
        if self.refusals.len() > KEPT {
            self.refusals.pop_front();
        }
    }

    /// What a policy of some world runs as in this slot.
    fn program(&self, policy: Arc<dyn Policy>) -> Result<Program, Refusal> {
        let (world, slot) = (policy.info().world, self.slot.kind());
        match (world, slot) {
            (World::DecodeOverride, SlotKind::DecodeOverride) => Ok(Program::DecodeOverride(policy)),
            (World::DecodeOverride, _) | (_, SlotKind::DecodeOverride) => {
                Err(Refusal::WrongSlot { world, slot })
            }
            (World::Selector, _) => Ok(Program::Selector { filters: Vec::new(), selector: policy }),
            (World::Scorer, _) => {
                let scorers = vec![WeightedScorer { policy, weight: 1.0, normalize: Default::default() }];
                Ok(Program::Scorers { filters: Vec::new(), scorers, picker: Picker::Min })
            }
            // A filter alone narrows what the slot's default then ranks.
            (World::Filter, _) => match &self.default {
                Program::Selector { selector, .. } => {
                    Ok(Program::Selector { filters: vec![policy], selector: selector.clone() })
                }
                Program::Scorers { scorers, picker, .. } => {
                    Ok(Program::Scorers { filters: vec![policy], scorers: scorers.clone(), picker: *picker })
                }
                Program::Native(_) | Program::DecodeOverride(_) => Err(Refusal::WrongSlot { world, slot }),
            },
        }
    }
}

fn info_of(program: &Program) -> Option<&PolicyInfo> {
    match program {
        Program::Native(_) => None,
        Program::Selector { filters, selector } => Some(filters.first().unwrap_or(selector).info()),
        Program::Scorers { filters, scorers, .. } => {
            filters.first().or(scorers.first().map(|scorer| &scorer.policy)).map(|policy| policy.info())
        }
        Program::DecodeOverride(policy) => Some(policy.info()),
    }
}

fn native_name(program: &Program) -> String {
    match program {
        Program::Native(mode) => {
            let name = serde_json::to_value(mode).ok().and_then(|name| name.as_str().map(str::to_owned));
            format!("native:{}", name.unwrap_or_default())
        }
        _ => String::new(),
    }
}
