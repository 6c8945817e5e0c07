//! The decisions of a request in one line: for the `x-pointsman-decision` header and the access log.

use pointsman_routing::{DecisionId, Receipt, RefusedDecision};

use super::Account;

impl Account {
    /// Returns the decisions so far: `leg=worker/rank id=ID policy@generation by`. A refusal at the end has
    /// `-` for the worker and its code for what decided. Empty: nothing was decided.
    #[must_use]
    pub(crate) fn decisions(&self) -> String {
        let mut all: Vec<String> = self.receipts.iter().map(chosen).collect();
        all.extend(self.refusals.last().filter(|_| self.ends_refused).map(refused));
        let plan = self.decode_override.as_ref();
        all.extend(plan.and_then(|plan| {
            let entry = plan.entry.as_ref().filter(|entry| entry.verdict == "shed")?;
            let (policy, generation) = (&entry.program.name, entry.generation);
            Some(format!("decode-override=-{} {policy}@{generation} shed", id(plan.id)))
        }));
        all.join(", ")
    }
}

fn chosen(receipt: &Receipt) -> String {
    let Receipt { leg, worker, rank, generation, program, .. } = receipt;
    let (policy, by) = (&program.name, receipt.decider.fallback().unwrap_or(receipt.decider.label()));
    format!("{leg}={worker}/{rank}{} {policy}@{generation} {by}", id(receipt.id))
}

fn refused(decision: &RefusedDecision) -> String {
    let RefusedDecision { program, code, .. } = decision;
    format!("{}=-{} {}@{} {code}", program.slot, id(decision.id), program.name, program.generation)
}

fn id(id: Option<DecisionId>) -> String {
    id.map(|id| format!(" id={id}")).unwrap_or_default()
}
