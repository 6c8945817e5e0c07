//! One request on its way to the log, and its logged form.

use std::sync::Arc;

use pointsman_decision_log::{LoggedBlocks, LoggedDecision, LoggedOutcome, LoggedRequest, LoggedShadow};
use pointsman_routing::{
    Decider, DecisionId, Generation, Lane, Normalize, Picker, PolicySummary, ProgramSummary, Receipt,
    RefusedDecision, RoutingRequest, ShadowAnswer, ShadowResult, SlotKind,
};
use prefix_index::Prefix;
use tokio::time::Duration;

use super::salt::{Domain, Salt};

/// Number of bytes that an entry takes besides its prefix.
const BASE_BYTES: usize = 1_024;

/// A request with its decisions and outcome. It shares data with the request, or takes data over from it.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// Time of arrival, microseconds since the Unix epoch.
    pub arrived_at_us: u64,
    pub endpoint: &'static str,
    /// Name of a model that a worker serves, or `other`.
    pub model: Arc<str>,
    pub tenant_hash: Option<u64>,
    pub session_hash: Option<u64>,
    pub priority: f32,
    pub prompt_tokens: u32,
    pub prompt_tokens_estimated: bool,
    pub output_tokens: u32,
    pub choices: Option<u32>,
    pub prompts: Option<u32>,
    pub max_tokens: Option<u32>,
    pub prefix: Prefix,
    pub decode_override: Option<OverrideEntry>,
    pub receipts: Vec<Receipt>,
    pub refusals: Vec<RefusedDecision>,
    pub status: u16,
    pub code: &'static str,
    pub ttft: Option<Duration>,
    pub itl: Option<Duration>,
    pub duration: Duration,
    pub prompt_reported: Option<u32>,
    pub cached_predicted: Option<u32>,
    pub cached_reported: Option<u32>,
}

/// Decision of a decode override's policy.
#[derive(Clone, Debug)]
pub(crate) struct OverrideEntry {
    pub id: Option<DecisionId>,
    pub lane: Lane,
    pub generation: Generation,
    pub program: Arc<ProgramSummary>,
    pub fallback: Option<&'static str>,
    /// `remote`, `local` or `shed`.
    pub verdict: &'static str,
    pub shadow: Option<ShadowResult>,
}

impl Entry {
    /// Begins the entry of a request, once its prompt was measured.
    pub(crate) fn of(request: &RoutingRequest) -> Self {
        Self {
            tenant_hash: request.tenant_hash,
            session_hash: request.session_hash,
            priority: request.priority,
            prompt_tokens: request.prompt_tokens,
            prompt_tokens_estimated: request.prompt_tokens_estimated,
            max_tokens: request.max_tokens,
            prefix: request.prefix.clone(),
            ..Self::default()
        }
    }

    /// Estimated memory of the entry, bytes.
    pub(super) fn bytes(&self) -> usize {
        BASE_BYTES
            + self.prefix.hashes().len() * size_of::<u64>()
            + self.receipts.len() * size_of::<Receipt>()
    }

    /// Returns the entry as it is written: hashes and block ids are salted.
    pub(super) fn logged(&self, salt: &Salt) -> LoggedRequest {
        let own = self.decode_override.iter().map(OverrideEntry::logged);
        let receipts = self.receipts.iter().enumerate().map(|(place, receipt)| {
            let mut later = self.receipts.iter().skip(place + 1);
            decision(receipt, later.any(|other| other.leg == receipt.leg))
        });
        let decisions = own.chain(receipts).chain(self.refusals.iter().map(refusal)).collect();
        LoggedRequest {
            arrived_at_us: self.arrived_at_us,
            endpoint: self.endpoint.to_owned(),
            model: self.model.to_string(),
            tenant_hash: self.tenant_hash.map(|hash| salt.id(Domain::Tenant, hash)),
            session_hash: self.session_hash.map(|hash| salt.id(Domain::Session, hash)),
            priority: self.priority,
            input_tokens: self.prompt_tokens,
            input_estimated: self.prompt_tokens_estimated,
            output_tokens: self.output_tokens,
            choices: self.choices,
            prompts: self.prompts,
            max_tokens: self.max_tokens,
            blocks: LoggedBlocks::of(&self.prefix, |hash| salt.id(Domain::Block, hash)),
            decisions,
            outcome: LoggedOutcome {
                status: self.status,
                code: self.code.to_owned(),
                ttft_ms: self.ttft.map(millis),
                itl_ms: self.itl.map(millis),
                e2e_ms: millis(self.duration),
                prompt_reported: self.prompt_reported,
                cached_predicted: self.cached_predicted,
                cached_reported: self.cached_reported,
            },
        }
    }
}

impl OverrideEntry {
    fn logged(&self) -> LoggedDecision {
        let ranker = self.program.ranker();
        LoggedDecision {
            id: self.id.map(|id| id.to_string()),
            slot: SlotKind::DecodeOverride.as_str().to_owned(),
            slot_model: self.program.model.as_ref().map(ToString::to_string),
            lane: self.lane.as_str().to_owned(),
            generation: self.generation.0,
            policy: ranker.map(|ranker| ranker.name.to_string()),
            digest: ranker.map(|ranker| ranker.digest.to_string()),
            settings_digest: settings(ranker),
            decider: if self.fallback.is_some() { "fallback" } else { "policy" }.to_owned(),
            reason: self.fallback.map(str::to_owned),
            verdict: Some(self.verdict.to_owned()),
            shadow: self.shadow.as_ref().map(|answer| shadow(answer, None)),
            ..LoggedDecision::default()
        }
    }
}

fn decision(receipt: &Receipt, retried: bool) -> LoggedDecision {
    let reason = match &receipt.decider {
        Decider::Fallback { reason, .. } => Some((*reason).to_owned()),
        Decider::Native { mode } => {
            serde_json::to_value(mode).ok().and_then(|mode| Some(mode.as_str()?.to_owned()))
        }
        _ => None,
    };
    LoggedDecision {
        id: receipt.id.map(|id| id.to_string()),
        slot: receipt.slot.as_str().to_owned(),
        slot_model: receipt.slot_model.as_ref().map(ToString::to_string),
        lane: receipt.lane.as_str().to_owned(),
        generation: receipt.generation.0,
        policy: receipt.policy.as_ref().map(ToString::to_string),
        digest: receipt.digest.map(|digest| digest.to_string()),
        settings_digest: receipt.settings_digest.map(|digest| digest.to_string()),
        filter: filter(&receipt.program),
        scorers: scorers(&receipt.program),
        decider: receipt.decider.label().to_owned(),
        reason,
        attempt: receipt.attempt,
        retried,
        worker: Some(receipt.worker.0),
        rank: Some(receipt.rank.0),
        at_us: Some(receipt.now_us),
        candidates: receipt.candidates,
        cached_blocks: receipt.cached_known.then_some(receipt.cached_blocks),
        verdict: None,
        shadow: receipt.shadow.as_ref().map(|answer| shadow(answer, receipt.shadow_program.as_deref())),
    }
}

fn filter(program: &ProgramSummary) -> Option<String> {
    program.filter().map(|filter| filter.name.to_string())
}

/// Names the scorers, unless the least cost of a single one counts as it is.
fn scorers(program: &ProgramSummary) -> Option<String> {
    let picker = program.picker?;
    let weighted = || program.policies.iter().filter_map(|one| Some((&one.name, one.weight?)));
    let is_plain = weighted().count() == 1
        && picker == Picker::Min
        && weighted().all(|(_, weight)| weight == (1.0, Normalize::None));
    let scorers = weighted()
        .map(|(name, (weight, normalize))| format!("{name} (weight {weight}, normalize {normalize:?})"));
    (!is_plain).then(|| format!("{}, picker {picker:?}", scorers.collect::<Vec<_>>().join(", ")))
}

fn settings(ranker: Option<&PolicySummary>) -> Option<String> {
    ranker?.settings_digest.map(|digest| digest.to_string())
}

fn shadow(shadow: &ShadowResult, program: Option<&ProgramSummary>) -> LoggedShadow {
    let ranker = program.and_then(ProgramSummary::ranker);
    let (status, kind) = match &shadow.answer {
        ShadowAnswer::Refused { status, .. } => (Some(*status), None),
        ShadowAnswer::Failed { kind, .. } => (None, Some((*kind).to_owned())),
        ShadowAnswer::Chose | ShadowAnswer::Abstained | ShadowAnswer::NobodyLeft => (None, None),
    };
    LoggedShadow {
        generation: shadow.generation.0,
        policy: ranker.map(|ranker| ranker.name.to_string()),
        digest: ranker.map(|ranker| ranker.digest.to_string()),
        settings_digest: settings(ranker),
        filter: program.and_then(filter),
        scorers: program.and_then(scorers),
        answer: Some(shadow.answer.label().to_owned()),
        status,
        kind,
        worker: shadow.choice.map(|(worker, _)| worker.0),
        rank: shadow.choice.map(|(_, rank)| rank.0),
        cached_blocks: shadow.cached_blocks,
        agrees: shadow.agrees,
    }
}

fn refusal(refused: &RefusedDecision) -> LoggedDecision {
    let program = &refused.program;
    let ranker = program.ranker();
    LoggedDecision {
        id: refused.id.map(|id| id.to_string()),
        slot: program.slot.as_str().to_owned(),
        slot_model: program.model.as_ref().map(ToString::to_string),
        lane: program.lane.as_str().to_owned(),
        generation: program.generation.0,
        policy: ranker.map(|ranker| ranker.name.to_string()),
        digest: ranker.map(|ranker| ranker.digest.to_string()),
        settings_digest: settings(ranker),
        filter: filter(program),
        scorers: scorers(program),
        decider: if ranker.is_some() { "policy" } else { "native" }.to_owned(),
        verdict: Some(refused.code.to_owned()),
        ..LoggedDecision::default()
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use pointsman_routing::{Digest, World, facts::Wants};

    use super::*;

    fn step((name, world): (&str, World)) -> PolicySummary {
        PolicySummary {
            name: name.into(),
            version: "1".into(),
            digest: Digest([7; 32]),
            settings_digest: None,
            world,
            wants: Wants::default(),
            weight: None,
        }
    }

    /// Returns a decision of a program with these policies, as it is logged.
    fn logged(policies: Vec<PolicySummary>, picker: Option<Picker>) -> LoggedDecision {
        let program = Arc::new(ProgramSummary {
            slot: SlotKind::Aggregated,
            model: None,
            generation: Generation(1),
            lane: Lane::Active,
            name: "name".into(),
            policies,
            picker,
        });
        refusal(&RefusedDecision { id: None, program, code: "shed" })
    }

    #[test]
    fn i10_22_the_filter_is_that_of_the_program_and_not_a_part_of_a_name() {
        let (one, two, last) =
            (("a+b", World::Filter), ("c", World::Filter), ("prefix+load", World::Selector));
        for (policies, filter, policy) in [
            (vec![last], None, Some("prefix+load")),
            (vec![one, last], Some("a+b"), Some("prefix+load")),
            (vec![one, two, last], Some("c"), Some("prefix+load")),
            (vec![one], Some("a+b"), None),
        ] {
            let logged = logged(policies.into_iter().map(step).collect(), None);
            // I10.22
            assert_eq!((logged.filter.as_deref(), logged.policy.as_deref()), (filter, policy));
        }
    }

    #[test]
    fn i10_23_scorers_are_logged_unless_the_least_cost_of_one_counts_as_it_is() {
        let scorer = |name: &str, weight: f32| PolicySummary {
            weight: Some((weight, Normalize::None)),
            ..step((name, World::Scorer))
        };
        let plain = || vec![step(("f", World::Filter)), scorer("a", 1.0)];
        let scorers = |policies: Vec<PolicySummary>, picker| logged(policies, Some(picker)).scorers;
        // I10.23
        assert_eq!(scorers(plain(), Picker::Min), None);
        let told = scorers(plain(), Picker::WeightedRandom);
        // I10.23
        assert_eq!(told.as_deref(), Some("a (weight 1, normalize None), picker WeightedRandom"));
        let told = scorers(vec![scorer("a", 1.0), scorer("b", 0.5)], Picker::Min);
        let expected = "a (weight 1, normalize None), b (weight 0.5, normalize None), picker Min";
        // I10.23
        assert_eq!(told.as_deref(), Some(expected));
    }
}
