//! What the gateway says about itself: metrics, the access log, live statistics and prediction checks.

pub mod account;
pub mod live_stats;
pub mod metrics;
pub mod prediction_checks;
pub(crate) mod scrape;
