//! What the gateway says about itself: metrics, the access log, live statistics and prediction checks.

pub(crate) mod account;
pub(crate) mod exposition;
pub(crate) mod labels;
pub(crate) mod live_stats;
pub(crate) mod metrics;
pub(crate) mod prediction_checks;
