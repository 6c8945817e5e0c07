//! `[upstream]` and `[probe]`: calls to workers.

use super::Problems;
use crate::config::{
    Probe, Upstream,
    settings::{ProbeSettings, UpstreamSettings},
};

impl Problems {
    pub(super) fn upstream(&mut self, upstream: &Upstream) -> UpstreamSettings {
        let Upstream { idle_timeout, idle_connections, forward_authorization, ref tls } = *upstream;
        let idle_timeout = self.limit("upstream.idle_timeout", idle_timeout);
        tls.check(&mut self.0);
        UpstreamSettings { idle_timeout, idle_connections, forward_authorization, tls: tls.clone() }
    }

    pub(super) fn probe(&mut self, probe: &Probe) -> ProbeSettings {
        let Probe { interval, timeout, health_timeout, load_interval, max_per_second, wedge_after } = *probe;
        if max_per_second == 0 {
            self.add("probe.max_per_second", "`0` would never check a worker: expected 1 or more");
        }
        ProbeSettings {
            interval: self.limit("probe.interval", interval),
            timeout: self.limit("probe.timeout", timeout),
            health_timeout: self.limit("probe.health_timeout", health_timeout),
            load_interval,
            max_per_second,
            wedge_after,
        }
    }
}
