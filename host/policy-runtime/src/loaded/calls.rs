//! Calls of a loaded policy: each borrows a warm instance.

use pointsman_routing::{
    Call, Decision, DecisionContext, Failure, Moment, ObservedOutcome, Plan, Policy, PolicyInfo,
    RouterConfigOverride,
};

use super::LoadedPolicy;

impl Policy for LoadedPolicy {
    fn info(&self) -> &PolicyInfo {
        &self.info
    }

    fn keep(
        &self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
        kept: &mut Vec<u32>,
    ) -> Result<(), Failure> {
        *kept = self.pool.call(|instance| instance.keep(context, call, facts))?;
        Ok(())
    }

    fn score(
        &self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
        costs: &mut Vec<f32>,
    ) -> Result<(), Failure> {
        *costs = self.pool.call(|instance| instance.score(context, call, facts))?;
        Ok(())
    }

    fn select(
        &self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
    ) -> Result<Decision, Failure> {
        self.pool.call(|instance| instance.select(context, call, facts))
    }

    fn decide(
        &self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        request: &[u32],
        decode: &[u32],
        prefill: &[u32],
    ) -> Result<Plan, Failure> {
        self.pool.call(|instance| instance.decide(context, call, request, decode, prefill))
    }

    fn decode_config(
        &self,
        context: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
    ) -> Result<RouterConfigOverride, Failure> {
        self.pool.call(|instance| instance.decode_config(context, call, facts))
    }

    fn observe(
        &self,
        context: &mut DecisionContext<'_>,
        moment: Moment,
        outcomes: &[ObservedOutcome],
    ) -> Result<(), Failure> {
        self.pool.observe(|instance| instance.observe(context, moment, outcomes))
    }
}
