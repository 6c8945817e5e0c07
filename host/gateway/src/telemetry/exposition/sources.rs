//! Metrics of the sources that workers are discovered from.

use std::{fmt, time::Duration};

use pointsman_discovery::{Fleet, SourceState, SourceStatus};

use super::families::{Families, Labels};

/// Writes the metrics of all sources. The configuration determines the number of sources.
pub(super) fn encode(out: &mut Families<'_>, fleet: &Fleet) -> fmt::Result {
    let status = fleet.status();
    let sources = || {
        status
            .sources
            .iter()
            .map(|source| -> (Labels, &SourceStatus) { (vec![("source", source.name.to_string())], source) })
    };
    let present = sources().map(|(labels, source)| (labels, u64::from(source.state == SourceState::Present)));
    let help = "1 if the source of workers was read at the last attempt, else 0: its last workers stay";
    out.gauges("pointsman_discovery_source_present", help, present)?;
    let age = sources()
        .filter_map(|(labels, source)| Some((labels, Duration::from_millis(source.age_ms?).as_secs_f64())));
    out.gauges(
        "pointsman_discovery_source_age_seconds",
        "Time since the source was last read in seconds",
        age,
    )?;
    let workers = sources().map(|(labels, source)| (labels, source.workers as u64));
    let help = "Number of workers that the source lists, or listed when their removal began to wait";
    out.gauges("pointsman_discovery_workers", help, workers)?;
    let held = sources().map(|(labels, source)| (labels, source.held as u64));
    let help = "Number of workers whose removal waits for a second confirmation";
    out.gauges("pointsman_discovery_held_workers", help, held)?;
    let refused = sources().map(|(labels, source)| (labels, source.refused_count as u64));
    let help = "Number of entries of the source that are not used; GET /discovery says why";
    out.gauges("pointsman_discovery_refused_entries", help, refused)?;
    let away = sources().map(|(labels, source)| (labels, source.times_away));
    out.counters(
        "pointsman_discovery_source_away",
        "Number of times that the source could not be read any more",
        away,
    )?;
    out.gauge(
        "pointsman_discovery_leaving_workers",
        "Number of workers that leave when their requests have ended",
        status.leaving as u64,
    )
}
