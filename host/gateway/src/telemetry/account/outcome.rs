//! Reports a request that ended to its decisions, to policies that learn, and to the histograms of lengths.

use pointsman_routing::{
    DecisionSource, Lane, ObservedOutcome, Outcome as Recorded, ProgramSummary, Receipt, SlotKind,
};
use pointsman_workers::{Leg, unix_ms};
use tokio::time::Duration;

use super::Account;
use crate::telemetry::{
    decision_stats::{Decided, compared_generation},
    metrics::SourceLabels,
};

impl Account {
    /// Reports the end of the request, which took so long, to the record of decisions, to policies that
    /// learn, and to the statistics.
    pub(super) fn report_decisions(&self, took: Duration) {
        self.record(took);
        self.queue_outcome(took);
        self.count_decisions(took);
    }

    /// Adds the outcome to each recorded decision of this request.
    fn record(&self, took: Duration) {
        let is_recorded = self.is_recorded();
        // While decisions are not recorded, a successful request costs nothing here.
        if !is_recorded && self.outcome.code == "ok" {
            return;
        }
        let outcome = Recorded {
            status: self.outcome.status,
            code: self.outcome.code,
            retried: false,
            moved: false,
            ttft: self.first_token.map(|first| first - self.started),
            itl: self.itl(),
            output_tokens: self.tokens,
            output_source: self.output_source(),
            ended_at_ms: unix_ms(),
            duration: took,
            cached_predicted: self.predicted.then_some(self.predicted_tokens),
            cached_reported: self.usage.and_then(|usage| usage.cached_tokens),
            prompt_tokens: self.prompt_tokens,
            times: self.times,
            run: None,
            stream_failed: None,
            continues: None,
        };
        if !is_recorded {
            self.metrics.unrouted.push(&self.request_id, &self.model, &outcome);
        }
        let Some(decisions) = &self.decisions else { return };
        for id in self.refusals.iter().filter_map(|refused| refused.id) {
            decisions.outcome(id, outcome);
        }
        if let Some(plan) = self.decode_override.as_ref().and_then(|decided| decided.id) {
            decisions.outcome(plan, outcome);
        }
        for (place, (receipt, retried)) in Receipt::with_retried(&self.receipts).enumerate() {
            if let Some(id) = receipt.id {
                let (moved, (stream_failed, continues)) = (receipt.moved, self.stream_failure(place));
                let run = receipt.run;
                decisions.outcome(id, Recorded { retried, moved, run, stream_failed, continues, ..outcome });
            }
        }
    }

    /// Whether any decision of this request is recorded.
    fn is_recorded(&self) -> bool {
        let plan = self.decode_override.as_ref().and_then(|decided| decided.id);
        let legs = || self.receipts.iter().any(|receipt| receipt.id.is_some());
        plan.is_some() || legs() || self.refusals.iter().any(|refused| refused.id.is_some())
    }

    /// Queues the outcome for policies that learn.
    fn queue_outcome(&self, took: Duration) {
        let Some(learning) = &self.learning else { return };
        let asked = |slot, lane| {
            let (model, parent) = (self.model.clone(), self.parent.clone());
            DecisionSource { slot, model, parent, lane }
        };
        let decided = Receipt::with_retried(&self.receipts).enumerate();
        for (place, (receipt, retried)) in decided.filter(|(_, (receipt, _))| receipt.learns) {
            let observed = self.observed(receipt, retried, took);
            // The worker of a rest did not generate the first token.
            let ttft = observed.ttft.filter(|_| place < self.first_decisions);
            learning.submit(asked(receipt.slot, receipt.lane), ObservedOutcome { ttft, ..observed });
        }
        // A decode override is judged by the leg that answered, or that would have answered.
        let answering = self.receipts.iter().rev().find(|receipt| receipt.leg != Leg::Prefill);
        let learning_override = self.decode_override.as_ref().filter(|decided| decided.learns);
        if let (Some(decided), Some(receipt)) = (learning_override, answering) {
            let observed = ObservedOutcome {
                decision: decided.id,
                seed: decided.seed,
                by_policy: decided.by_policy,
                ..self.observed(receipt, false, took)
            };
            learning.submit(asked(SlotKind::DecodeOverride, decided.lane), observed);
        }
    }

    /// Adds each decision to the statistics of its slot and lane, together with the shadow's decision.
    fn count_decisions(&self, took: Duration) {
        let Some(stats) = &self.stats else { return };
        let models = (&self.model, self.parent.as_ref());
        let is_served = self.outcome.code == "ok";
        let ttft = self.first_token.map(|first| first - self.started);
        let times = [ttft, self.itl(), Some(took)];
        for (receipt, retried) in Receipt::with_retried(&self.receipts) {
            // A shadow decision beside a canary does not compare with the active generation.
            let shadow = receipt.shadow.as_ref().filter(|_| receipt.lane == Lane::Active);
            let prompt = self.prompt_tokens / self.block_tokens.max(1);
            let blocks = |cached: [u32; 3]| (prompt, cached.iter().sum::<u32>().min(prompt));
            let decided = Decided {
                by_fallback: receipt.decider.fallback().is_some(),
                is_shed: false,
                agrees: shadow.map(|shadow| shadow.agrees),
                blocks: receipt.cached_known.then(|| blocks(receipt.cached_blocks)),
                is_failed: self.outcome.status >= 500,
                // A stream that moved counts once.
                times: if is_served && !retried && !receipt.served_until_move {
                    times
                } else {
                    Default::default()
                },
            };
            stats.note(models, receipt.slot, (receipt.lane, receipt.generation), &decided);
            if let Some(shadow) = shadow {
                let blocks = shadow.cached_blocks.map(blocks);
                let decided = Decided { blocks, ..Decided::by_shadow(shadow) };
                let generation = compared_generation(shadow.generation, receipt.generation);
                stats.note(models, receipt.slot, (Lane::Shadow, generation), &decided);
            }
        }
        for refused in &self.refusals {
            let decided = Decided { is_shed: true, ..Decided::default() };
            let ProgramSummary { slot, lane, generation, .. } = *refused.program;
            stats.note(models, slot, (lane, generation), &decided);
        }
        if let Some(decided) = self.decode_override.as_ref().and_then(|decided| decided.entry.as_ref()) {
            let shadow = decided.shadow.as_ref().filter(|_| decided.lane == Lane::Active);
            let agrees = shadow.map(|shadow| shadow.agrees);
            let (by_fallback, is_shed) = (decided.fallback.is_some(), decided.verdict == "shed");
            let own = Decided { by_fallback, is_shed, agrees, ..Decided::default() };
            let generation = decided.generation;
            stats.note(models, SlotKind::DecodeOverride, (decided.lane, generation), &own);
            if let Some(shadow) = shadow {
                let by_shadow = Decided::by_shadow(shadow);
                let by_shadow = Decided { is_shed: by_shadow.is_shed && !is_shed, ..by_shadow };
                let generation = compared_generation(shadow.generation, generation);
                stats.note(models, SlotKind::DecodeOverride, (Lane::Shadow, generation), &by_shadow);
            }
        }
    }

    fn observed(&self, receipt: &Receipt, retried: bool, took: Duration) -> ObservedOutcome {
        ObservedOutcome {
            status: self.outcome.status,
            ttft: self.first_token.map(|first| first - self.started),
            itl: self.itl(),
            duration: took,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.tokens,
            cached_predicted: self.predicted.then_some(self.predicted_tokens),
            cached_reported: self.usage.and_then(|usage| usage.cached_tokens),
            ..receipt.outcome(retried)
        }
    }

    /// Returns the source of the number of output tokens, or `None` if there is no output.
    pub(super) fn output_source(&self) -> Option<&'static str> {
        if self.counted {
            return Some("counted");
        }
        self.usage?.completion_tokens.map(|_| "usage")
    }

    /// Returns the length of the prompt and the source of this number. Returns `None` if neither the engine
    /// nor the gateway measured the prompt.
    pub(super) fn prompt_length(&self) -> Option<(u32, &'static str)> {
        let reported = self.usage.map(|usage| usage.prompt_tokens).filter(|tokens| *tokens > 0);
        let measured = Some(self.prompt_tokens).filter(|tokens| *tokens > 0);
        let own = if self.prompt_tokens_estimated { "estimate" } else { "tokens" };
        reported.map(|tokens| (tokens, "usage")).or_else(|| Some((measured?, own)))
    }

    /// Adds to the histograms the lengths of a request for which a worker was chosen, and the share of its
    /// prompt that was cached.
    pub(super) fn observe_lengths(&self) {
        if self.receipts.is_empty() {
            return;
        }
        let metrics = &self.metrics;
        let usage = self.usage.filter(|usage| usage.prompt_tokens > 0);
        let counted = if self.prompt_tokens_estimated { "estimate" } else { "tokens" };
        let (prompt, source) =
            usage.map_or((self.prompt_tokens, counted), |usage| (usage.prompt_tokens, "usage"));
        metrics.isl.get_or_create(&SourceLabels { source }).observe(f64::from(prompt));
        if let Some(source) = self.output_source() {
            metrics.osl.get_or_create(&SourceLabels { source }).observe(f64::from(self.tokens));
        }
        let reported = usage.and_then(|usage| Some((usage.cached_tokens?, "usage")));
        let predicted = self.predicted.then_some((self.predicted_tokens, "predicted"));
        if let Some((cached, source)) =
            reported.or(predicted).filter(|_| prompt > 0 && self.outcome.code == "ok")
        {
            let share = f64::from(cached) / f64::from(prompt);
            metrics.hit_rate.get_or_create(&SourceLabels { source }).observe(share.min(1.0));
        }
    }
}
