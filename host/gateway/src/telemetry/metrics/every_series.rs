//! One series of each family, so that a scrape shows every metric with its labels.

use super::{
    DecisionLabels, ListenerLabels, Metrics, NATIVE, Name, OTHER, ReasonLabels, RequestLabels, ResultLabels,
    RetryLabels,
};

impl Metrics {
    /// Creates a series of each family that has none yet, for the table of metrics in the documentation.
    #[doc(hidden)]
    pub fn create_every_series(&self) {
        let labels =
            RequestLabels { endpoint: "completions", model: Name(OTHER.clone()), status: 404, code: "x" };
        drop(self.requests.get_or_create(&labels));
        let (slot, lane) = ("prefill", "active");
        let labels = DecisionLabels { slot, policy: Name(NATIVE.clone()), lane, decider: "native" };
        drop(self.decisions.get_or_create(&labels));
        self.leg_ended("prefill", "vllm", "ok", std::time::Duration::ZERO);
        self.expect_fixed();
        self.fell_back(pointsman_routing::SlotKind::Prefill, "abstain");
        self.continued("x", "failure");
        self.admin_change(Name(OTHER.clone()), 200);
        self.tenants.ended(self.tenants.named([]).of(None), "ok", 0, 0);
        self.tls.failed("clients", "x");
        self.tls.reloaded("clients", "x");
        self.tls.expires("clients", Some(32_503_680_000));
        self.tls.in_force("clients", Some(true));
        #[cfg(feature = "ext-proc")]
        {
            self.ext_proc.picked("picked");
            self.ext_proc.served("picked");
        }
        let reasons = [&self.connections_ended, &self.not_tokenized, &self.decision_log_dropped];
        reasons.into_iter().for_each(|family| drop(family.get_or_create(&ReasonLabels { reason: "x" })));
        let results = [&self.poison_requests, &self.predictions, &self.key_set_fetches];
        results.into_iter().for_each(|family| drop(family.get_or_create(&ResultLabels { result: "x" })));
        drop(self.retries.get_or_create(&RetryLabels { leg: "x" }));
        drop(self.wrong_keys.get_or_create(&ListenerLabels { listener: "x" }));
    }
}
