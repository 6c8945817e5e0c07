//! Limits, timeouts, retries and health checks.

use super::Import;
use crate::report::{Kind, Place};

/// The routers' limit of a body, bytes.
const MAX_PAYLOAD: i64 = 512 * 1024 * 1024;
/// The gateway's own limits of the bodies in flight, bytes.
const BODIES_IN_FLIGHT: i64 = 512 * 1024 * 1024;

impl Import<'_> {
    /// Translates what bounds requests.
    pub(super) fn limits(&mut self) -> anyhow::Result<()> {
        self.bodies()?;
        self.times()?;
        self.retries()?;
        self.queue()?;
        self.probes()
    }

    fn bodies(&mut self) -> anyhow::Result<()> {
        let (bytes, source, given) = self.number("max-payload-size", MAX_PAYLOAD)?;
        anyhow::ensure!(bytes > 0, "--max-payload-size: `{bytes}` is not a size");
        self.draft.set("server", "max_body_bytes", bytes, &source);
        // Large bodies use at most seven eighths of the room.
        let needed = (bytes / 7 + 1).saturating_mul(8);
        if needed > BODIES_IN_FLIGHT {
            let why = "at least 8/7 of server.max_body_bytes";
            self.draft.set("limits", "body_bytes_in_flight", needed, why);
        }
        self.tell_number("max-payload-size", given, "server.max_body_bytes");
        Ok(())
    }

    fn times(&mut self) -> anyhow::Result<()> {
        let (seconds, source, given) = self.number("request-timeout-secs", 1_800)?;
        anyhow::ensure!(seconds > 0, "--request-timeout-secs: `{seconds}` is not a time");
        self.draft.table("timeouts").set("request", format!("{seconds}s"), &source).set(
            "whole_head",
            format!("{seconds}s"),
            format!("{source}: answers that are not streamed"),
        );
        let ours = "timeouts.request and whole_head; streams have shorter limits besides (timeouts.head, \
                    event_idle, prefill_head)";
        match given {
            Some(given) => self.note_translation(given, Kind::Approximated, ours),
            None => self.report.add(Kind::Approximated, Place::Default, "--request-timeout-secs", ours),
        }
        if let Some(given) = self.line.last("shutdown-grace-period-secs") {
            let (seconds, source, _) = self.number("shutdown-grace-period-secs", 180)?;
            self.draft.set("timeouts", "drain", format!("{}s", seconds.max(0)), source);
            self.note_translation(given, Kind::Translated, "timeouts.drain");
        }
        Ok(())
    }

    fn retries(&mut self) -> anyhow::Result<()> {
        let (attempts, source, given) = self.number("retry-max-retries", 5)?;
        anyhow::ensure!(attempts >= 0, "--retry-max-retries: `{attempts}` is not a number of attempts");
        let disabled = self.line.last("disable-retries");
        let retries = if disabled.is_some() { 0 } else { (attempts - 1).clamp(0, 100) };
        let source = disabled.map_or(source, |given| given.flag().to_owned());
        self.draft.set("routing", "retries", retries, format!("{source}: the first attempt is not a retry"));
        self.tell_number(
            "retry-max-retries",
            given,
            "routing.retries, one less: the first attempt does not count",
        );
        if let Some(given) = disabled {
            self.note_translation(given, Kind::Translated, "routing.retries = 0");
        }
        Ok(())
    }

    fn queue(&mut self) -> anyhow::Result<()> {
        let default = if self.flavor == super::Flavor::Vllm { 32_768 } else { -1 };
        let (most, source, given) = self.number("max-concurrent-requests", default)?;
        let flags = ["queue-size", "queue-timeout-secs", "rate-limit-tokens-per-second"];
        if most <= 0 {
            if let Some(given) = given {
                self.note_translation(given, Kind::Translated, "no limit: no [queue]");
            }
            for given in flags.iter().filter_map(|flag| self.line.last(flag)) {
                self.note_translation(
                    given,
                    Kind::Translated,
                    "left out: it has no effect without --max-concurrent-requests",
                );
            }
            return Ok(());
        }
        let (limit, limit_source, size) = self.number("queue-size", 100)?;
        let (wait, wait_source, timeout) = self.number("queue-timeout-secs", 60)?;
        self.draft
            .table("queue")
            .set("max_inflight", most, source)
            .set("limit", limit.max(0), limit_source)
            .set("timeout", format!("{}s", wait.max(1)), wait_source);
        let ours = "queue.max_inflight: a strict bound of the requests in flight; the router's bucket also \
                    refills by time";
        match given {
            Some(given) => self.note_translation(given, Kind::Approximated, ours),
            None => self.report.add(Kind::Approximated, Place::Default, "--max-concurrent-requests", ours),
        }
        if let Some(given) = size {
            self.note_translation(given, Kind::Translated, "queue.limit");
        }
        if let Some(given) = timeout {
            self.note_translation(given, Kind::Translated, "queue.timeout");
        }
        if let Some(given) = self.line.last("rate-limit-tokens-per-second") {
            let ours = "left out: requests in flight are bounded, not requests a second; \
                        server.requests_per_second or [tenants] bound these";
            self.note_translation(given, Kind::Missing, ours);
        }
        Ok(())
    }

    fn probes(&mut self) -> anyhow::Result<()> {
        for (flag, key, default) in
            [("health-check-interval-secs", "interval", 60), ("health-check-timeout-secs", "timeout", 5)]
        {
            let Some(given) = self.line.last(flag) else { continue };
            let (seconds, source, _) = self.number(flag, default)?;
            self.draft.set("probe", key, format!("{}s", seconds.max(1)), source);
            self.note_translation(given, Kind::Translated, format!("probe.{key}"));
        }
        if let Some(given) = self.line.last("health-check-endpoint") {
            let known = given.value() == "/health";
            let ours = if known { "built in" } else { "engines are asked at /health: let them answer there" };
            self.note_translation(given, if known { Kind::Translated } else { Kind::Missing }, ours);
        }
        Ok(())
    }
}
