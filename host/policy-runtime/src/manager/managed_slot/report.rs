//! Reports a slot's status: what each of its lanes runs, with the figures of its programs.

use std::collections::VecDeque;

use pointsman_routing::{Digest, Lane, Policy, Program, Trial, World};
use pointsman_workers::unix_ms;

use super::{
    super::{
        managed_lane::{ManagedLane, Source},
        record::RefusalRecord,
        status::{LaneStatus, LaneSummary, MemoryStatus, PartStatus, SlotStatus, SlotSummary},
    },
    ManagedSlot,
};
use crate::spec::LaneSpec;

/// Number of refusals in the status.
const MAX_REFUSALS: usize = 16;

impl ManagedSlot {
    /// Returns the name of the policy that a lane runs.
    pub(in super::super) fn policy(&self, lane: Lane) -> Option<String> {
        self.running(lane).map(|handle| program_name(&handle.program))
    }

    /// Writes a log line about what a lane runs now.
    pub(super) fn log_content(&self, lane: Lane, event: &'static str) {
        let Some(handle) = self.running(lane) else { return };
        let (kind, model) = self.name();
        let info = handle.program.ranker();
        let digests: Vec<String> =
            handle.program.policies().map(|policy| policy.info().digest.to_string()).collect();
        tracing::info!(
            slot = %kind,
            model = model.as_ref().map(|model| model.as_str()),
            %lane,
            policy = program_name(&handle.program),
            version = info.map(|info| &*info.version),
            generation = handle.generation.0,
            digest = Some(digests.join("+")).filter(|digests| !digests.is_empty()),
            load_ms = self.lane_of(lane).load_ms,
            "{event}"
        );
    }

    /// Returns a record of a refusal now.
    pub(super) fn refusal(
        &self,
        lane: Lane,
        file: String,
        digest: Option<Digest>,
        kind: &'static str,
        message: String,
    ) -> RefusalRecord {
        let (slot, model) = self.name();
        let model = model.map(|model| model.to_string());
        RefusalRecord { slot, model, lane, file, digest, kind, message, at_ms: unix_ms(), in_force: true }
    }

    pub(super) fn remember(&mut self, record: RefusalRecord) {
        self.refusals.push_back(record);
        if self.refusals.len() > MAX_REFUSALS {
            self.refusals.pop_front();
        }
    }

    /// Returns what its lanes run now, in short.
    pub(in super::super) fn summary(&self) -> SlotSummary {
        let (slot, model) = self.name();
        let of = |lane| {
            let handle = self.running(lane)?;
            let digest = handle.program.ranker().map(|info| info.digest);
            let policy = program_name(&handle.program);
            Some(LaneSummary { policy, generation: handle.generation, digest })
        };
        SlotSummary {
            slot,
            model: model.map(|model| model.to_string()),
            state: self.state,
            source: self.active.content.map_or(Source::Default, |content| content.source),
            active: of(Lane::Active),
            canary: of(Lane::Canary),
            shadow: of(Lane::Shadow),
            undo: self.undoable(),
        }
    }

    /// Returns the last refusals. Those end that are not among the refusals of their lane any more: a file
    /// was removed or replaced, perhaps by one that still compiles.
    pub(in super::super) fn refusals(&self) -> VecDeque<RefusalRecord> {
        let marked = |record: &RefusalRecord| {
            let lane = self.lane_of(record.lane);
            let is_replaced = lane.found.as_os_str() == record.file.as_str()
                && lane.own.is_some_and(|own| record.digest.is_some_and(|digest| digest != own));
            let in_force = lane.refusals.contains(record) && !is_replaced;
            RefusalRecord { in_force, ..record.clone() }
        };
        self.refusals.iter().map(marked).collect()
    }

    pub(in super::super) fn status(&self) -> SlotStatus {
        let snapshot = self.slot.snapshot();
        let active = &snapshot.active;
        let info = active.program.ranker();
        SlotStatus {
            slot: self.slot.kind(),
            model: self.slot.model().map(ToString::to_string),
            file: self.active.found.display().to_string(),
            state: self.state,
            source: self.active.content.map_or(Source::Default, |content| content.source),
            generation: active.generation,
            policy: program_name(&active.program),
            version: info.map(|info| info.version.to_string()),
            digest: info.map(|info| info.digest),
            world: info.map(|info| info.world),
            origin: info.map(|info| info.origin.clone()),
            parts: parts(&active.program),
            calls: active.calls(),
            failures: active.failures(),
            breaker_open: active.breaker.is_open(),
            last_failure: active.last_failure(),
            only_choice: active.choices.only_choice(),
            since_ms: self.active.since_ms,
            load_ms: self.active.load_ms,
            can_roll_back: self.previous.is_some(),
            previous: self.slot.previous().filter(|_| self.previous.is_some()).as_ref().map(program_name),
            rollbacks: self.rollbacks,
            quarantined: self.quarantined(),
            undo: self.undoable(),
            refusals: self.refusals(),
            grants: grants(&self.spec.active),
            memory: self.grants_state().then(|| MemoryStatus::of(self.memory())),
            canary: snapshot
                .canary
                .as_ref()
                .map(|trial| trial_status(trial, &self.canary, &self.spec.canary)),
            shadow: snapshot
                .shadow
                .as_ref()
                .map(|trial| trial_status(trial, &self.shadow, &self.spec.shadow)),
        }
    }
}

fn grants(spec: &LaneSpec) -> Vec<&'static str> {
    spec.grants.iter().map(|grant| grant.as_str()).collect()
}

fn trial_status(trial: &Trial, lane: &ManagedLane, spec: &LaneSpec) -> LaneStatus {
    let active = &trial.handle;
    let info = active.program.ranker();
    let mut status = LaneStatus {
        generation: active.generation,
        share: trial.share,
        policy: program_name(&active.program),
        version: info.map(|info| info.version.to_string()),
        digest: info.map(|info| info.digest),
        grants: grants(spec),
        parts: parts(&active.program),
        calls: 0,
        failures: 0,
        breaker_open: false,
        last_failure: None,
        only_choice: None,
        since_ms: lane.since_ms,
        agree: 0,
        disagree: 0,
        failed: 0,
        shed: 0,
    };
    status.update(active);
    status
}

fn parts(program: &Program) -> Vec<PartStatus> {
    let weights: Vec<f32> = match program {
        Program::Scorers { scorers, .. } => scorers.iter().map(|scorer| scorer.weight).collect(),
        _ => Vec::new(),
    };
    let mut weights = weights.into_iter();
    let one = |policy: &std::sync::Arc<dyn Policy>| {
        let info = policy.info();
        PartStatus {
            world: info.world,
            policy: info.name.to_string(),
            version: info.version.to_string(),
            digest: info.digest,
            settings_digest: info.settings_digest,
            origin: info.origin.clone(),
            weight: if info.world == World::Scorer { weights.next() } else { None },
            remembers: info.remembers,
            learns: info.learns,
        }
    };
    program.policies().map(one).collect()
}

pub(super) fn program_name(program: &Program) -> String {
    match program {
        Program::Native(mode) => {
            let name = serde_json::to_value(mode).ok().and_then(|name| name.as_str().map(str::to_owned));
            format!("native:{}", name.unwrap_or_default())
        }
        // The filter comes first: it may be the file that an operator added.
        Program::Selector { filters, .. } | Program::Scorers { filters, .. } => {
            let filter = filters.last().map(|filter| filter.info());
            let named = program.ranker();
            let names = filter.into_iter().chain(named).map(|info| &*info.name);
            names.collect::<Vec<_>>().join("+")
        }
        Program::DecodeOverride(policy) => policy.info().name.to_string(),
    }
}
