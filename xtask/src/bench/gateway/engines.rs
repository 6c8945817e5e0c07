//! Simulated engines behind the routers: they need no model time, and add the time of its write to every
//! event.

use std::path::Path;

use super::scenario::{Handshake, Scenario, Shape};
use crate::fleet::{EngineSpec, Process};

/// Engines of a scenario.
#[derive(Debug)]
pub(super) struct Engines {
    pub(super) prefill: Vec<Engine>,
    /// Decode engines of pairs, or engines that serve whole requests.
    pub(super) serving: Vec<Engine>,
    /// Engines for clients that make the calls of both legs themselves; empty unless the scenario has pairs.
    pub(super) relayed: Vec<Engine>,
}

/// A running engine and the `--worker` flag that registers it.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) address: String,
    pub(super) bootstrap_port: u64,
    pub(super) flag: String,
    /// Port on which it publishes the content of its cache, or 0.
    pub(super) kv_events_port: u64,
    _process: Process,
}

impl Engines {
    pub(super) fn start(scenario: &Scenario, bin: &Path, dir: &Path) -> anyhow::Result<Self> {
        Self::with_flags(scenario, bin, dir, "")
    }

    /// Starts engines that report the tokens of a prompt and the content of their caches to routers, as vLLM
    /// does with `--enable-scale-out` and KV events.
    pub(super) fn with_tokens(scenario: &Scenario, bin: &Path, dir: &Path) -> anyhow::Result<Self> {
        Self::with_flags(scenario, bin, dir, "--scale-out --kv-events-port 0 --kv-events-topic=")
    }

    fn with_flags(scenario: &Scenario, bin: &Path, dir: &Path, more: &str) -> anyhow::Result<Self> {
        let pace = scenario.pace.as_millis();
        let flags = format!(
            "--threads 1 --stamp --jitter 0 --load-factor 1 --overhead-ms 0 --prefill-ms-per-token 0 \
             --kv-transfer-us-per-token 0 --itl-ms {pace} --max-num-seqs 1024 --max-model-len 1000000 \
             --blocks 200000 --natural-len 4096 --lease-s 5 {more}"
        );
        let mut place = 0;
        let mut start =
            |count: usize, dialect: &str, role: &str, more: &str| -> anyhow::Result<Vec<Engine>> {
                let spec = EngineSpec::new(dialect, role, &format!("{flags} {more}"));
                let engines = (0..count).map(|_| {
                    place += 1;
                    let process = spec.start(bin, dir, place)?;
                    Ok(Engine {
                        address: process.listening(),
                        bootstrap_port: process.announced["bootstrap_port"].as_u64().unwrap_or(0),
                        kv_events_port: process.announced["kv_events_port"].as_u64().unwrap_or(0),
                        flag: spec.worker_flag(place, &process.announced),
                        _process: process,
                    })
                });
                engines.collect()
            };
        let none = Vec::new;
        Ok(match scenario.shape {
            // One engine with a thousand paths acts as a thousand workers.
            Shape::Aggregated { workers } if workers > 16 => Self {
                prefill: none(),
                serving: start(1, "vllm", "aggregated", "--any-prefix")?,
                relayed: none(),
            },
            Shape::Aggregated { workers } => {
                Self { prefill: none(), serving: start(workers, "vllm", "aggregated", "")?, relayed: none() }
            }
            Shape::Disaggregated(handshake) => {
                let dialect = if handshake == Handshake::Vllm { "vllm" } else { "sglang" };
                Self {
                    prefill: start(2, dialect, "prefill", "")?,
                    serving: start(2, dialect, "decode", "")?,
                    relayed: start(2, dialect, "aggregated", "")?,
                }
            }
        })
    }

    /// Returns the engines to which a router without knowledge of legs relays.
    pub(super) fn relay_targets(&self) -> &[Engine] {
        if self.relayed.is_empty() { &self.serving } else { &self.relayed }
    }

    /// Returns the `--worker` flags of the gateway.
    pub(super) fn worker_flags(&self, shape: Shape) -> Vec<String> {
        match (shape, self.serving.first()) {
            (Shape::Aggregated { workers }, Some(engine)) if workers > 16 => (0..workers)
                .map(|n| format!("role=aggregated,engine=vllm,url=http://{}/w{n}", engine.address))
                .collect(),
            _ => self.prefill.iter().chain(&self.serving).map(|engine| engine.flag.clone()).collect(),
        }
    }
}
