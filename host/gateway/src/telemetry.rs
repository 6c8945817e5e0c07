//! The gateway's reports about itself: metrics, the access log, live statistics and prediction checks.

pub(crate) mod account;
pub(crate) mod decision_log;
pub(crate) mod decision_stats;
pub(crate) mod exposition;
#[cfg(feature = "ext-proc")]
pub(crate) mod ext_proc_metrics;
pub(crate) mod family;
pub(crate) mod histogram;
pub(crate) mod hour;
pub(crate) mod labels;
pub(crate) mod live_stats;
pub(crate) mod metrics;
pub(crate) mod prediction_checks;
pub(crate) mod tenant_metrics;
pub(crate) mod tenants;
pub(crate) mod tls_metrics;
pub(crate) mod traces;
pub(crate) mod unrouted;
