//! Settings of an engine. Plain data; the defaults model an 8B model on an H100.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{
    core::{BatchLimits, CoreConfig, Jitter, StepTime},
    faults::Fault,
    leg::Leg,
};

/// Engine whose HTTP interface is modelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// vLLM; handoff by NIXL parameters after the prefill has completed.
    #[default]
    Vllm,
    /// SGLang; handoff by bootstrap room.
    Sglang,
    /// Any other OpenAI-compatible server; aggregated only.
    Openai,
}

/// Kind of requests that the engine serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill legs.
    Prefill,
    /// Decode legs.
    Decode,
    /// Complete requests.
    #[default]
    Aggregated,
}

/// Settings of one engine. Durations are in engine time, which runs `speedup` times faster than wall-clock
/// time.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// HTTP dialect.
    pub dialect: Dialect,
    /// Kind of requests that the engine serves.
    pub role: Role,
    /// Address to listen on; port 0 for any free port.
    pub listen: SocketAddr,
    /// Name of the only model.
    pub model: String,
    /// Maximum length of prompt plus output, tokens.
    pub max_model_len: u32,
    /// SGLang: port of a prefill engine's bootstrap server, 0 for any; for a decode engine, the port to use
    /// when a request names none.
    pub bootstrap_port: u16,
    /// vLLM: port of the side channel, 0 for any.
    pub side_port: u16,
    /// SGLang: whether `/pd_role_switch` may change the role of an engine of a pair.
    pub role_switch: bool,
    /// Number of data-parallel ranks that the engine reports.
    pub dp_size: u32,
    /// Fixed duration of a prefill.
    pub overhead: Duration,
    /// Additional duration for each token that is not cached.
    pub prefill_per_token: Duration,
    /// Inter-token latency of a single sequence.
    pub itl: Duration,
    /// Duration of the KV transfer for each prompt token.
    pub transfer_per_token: Duration,
    /// Slowdown factor of a full batch compared with a single sequence.
    pub load_factor: f64,
    /// Duration of a step, instead of the one that follows from the latencies above.
    pub step_time: Option<StepTime>,
    /// Relative standard deviation of all durations.
    pub jitter: f64,
    /// Seed of the jitter, and of faults that affect a share of the requests.
    pub seed: u64,
    /// Maximum number of admitted sequences.
    pub max_num_seqs: u32,
    /// Maximum number of tokens of a step; longer prompts are computed in chunks.
    pub max_batched_tokens: u32,
    /// Maximum number of waiting sequences; further ones are refused with 503.
    pub max_waiting: u32,
    /// Number of KV blocks.
    pub blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Keep the blocks of prompts for later prompts with the same prefix.
    pub prefix_caching: bool,
    /// Publish KV events.
    pub kv_events: bool,
    /// Port of the KV events, 0 for any.
    pub kv_events_port: u16,
    /// Topic of the KV events.
    pub kv_events_topic: String,
    /// Version that the engine reports; by default a version of its dialect's engine.
    pub version: Option<String>,
    /// SGLang: serve `/ready`, as newer versions do.
    pub ready: bool,
    /// Serve `/v1/chat/completions/render`.
    pub scale_out: bool,
    /// Lease of pinned blocks.
    pub lease: Duration,
    /// Time that an SGLang leg waits for the other leg.
    pub room_wait: Duration,
    /// Speed of the engine's clock relative to wall-clock time.
    pub speedup: f64,
    /// Output tokens after which the model generates EOS, unless `ignore_eos` is set.
    pub natural_len: u32,
    /// Refuse a decode with incomplete parameters instead of stopping the engine.
    pub tolerant: bool,
    /// Number of requests to keep for [`SimHandle::recorded`](crate::SimHandle::recorded).
    pub record: usize,
    /// Adds the time at which it is written to every event, and writes each event separately.
    pub stamp: bool,
    /// Serves every endpoint below any first path segment too.
    pub any_prefix: bool,
    /// Faults that are active from the start.
    pub faults: Vec<Fault>,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            dialect: Dialect::Vllm,
            role: Role::Aggregated,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            model: "tiny".to_owned(),
            max_model_len: 131_072,
            bootstrap_port: 0,
            side_port: 0,
            role_switch: false,
            dp_size: 1,
            overhead: Duration::from_millis(30),
            prefill_per_token: Duration::from_micros(200),
            itl: Duration::from_millis(12),
            transfer_per_token: Duration::from_micros(5),
            load_factor: 2.0,
            step_time: None,
            jitter: 0.1,
            seed: 0,
            max_num_seqs: 256,
            max_batched_tokens: 8_192,
            max_waiting: 1024,
            blocks: 28_000,
            block_size: 16,
            prefix_caching: true,
            kv_events: false,
            kv_events_port: 0,
            kv_events_topic: "kv-events".to_owned(),
            version: None,
            ready: true,
            scale_out: false,
            lease: Duration::from_secs(30),
            room_wait: Duration::from_secs(300),
            speedup: 1.0,
            natural_len: 256,
            tolerant: false,
            record: 0,
            stamp: false,
            any_prefix: false,
            faults: Vec::new(),
        }
    }
}

impl SimConfig {
    /// SGLang's default bootstrap port.
    pub(crate) const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

    /// Returns settings with which prefill, decode and transfer take no time, for tests of protocols.
    #[must_use]
    pub fn instant(dialect: Dialect, role: Role) -> Self {
        Self {
            dialect,
            role,
            overhead: Duration::ZERO,
            prefill_per_token: Duration::ZERO,
            itl: Duration::ZERO,
            transfer_per_token: Duration::ZERO,
            jitter: 0.0,
            ..Self::default()
        }
    }

    /// Returns all invalid values with their problems; empty if all are valid.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let checks = [
            (self.speedup > 0.0 && self.speedup.is_finite(), "speedup", self.speedup.to_string()),
            (self.block_size > 0, "block-size", self.block_size.to_string()),
            (self.blocks > 0, "blocks", self.blocks.to_string()),
            (self.max_num_seqs > 0, "max-num-seqs", self.max_num_seqs.to_string()),
            (self.max_batched_tokens > 0, "max-batched-tokens", self.max_batched_tokens.to_string()),
            (self.dp_size > 0, "dp-size", self.dp_size.to_string()),
            (
                self.load_factor >= 1.0 && self.load_factor.is_finite(),
                "load-factor",
                self.load_factor.to_string(),
            ),
            ((0.0..=10.0).contains(&self.jitter), "jitter", self.jitter.to_string()),
        ];
        let bad = checks.into_iter().filter(|(fine, ..)| !fine);
        let mut problems: Vec<String> =
            bad.map(|(_, name, value)| format!("{name} `{value}` is out of range")).collect();
        if self.dialect == Dialect::Openai && self.role != Role::Aggregated {
            problems.push(format!("a plain OpenAI server cannot be `{}`", self.role.as_str()));
        }
        for fault in &self.faults {
            problems.extend(fault.problem());
        }
        problems
    }

    /// Returns the version that the engine reports.
    pub(crate) fn version(&self) -> &str {
        self.version.as_deref().unwrap_or(match self.dialect {
            Dialect::Vllm | Dialect::Openai => "0.32.0",
            Dialect::Sglang => "0.5.23",
        })
    }

    pub(crate) fn core(&self) -> CoreConfig {
        CoreConfig {
            limits: BatchLimits {
                max_num_seqs: self.max_num_seqs,
                max_batched_tokens: self.max_batched_tokens,
                blocks: self.blocks,
                block_size: self.block_size,
                prefill_only: self.role == Role::Prefill,
            },
            max_waiting: self.max_waiting,
            prefix_caching: self.prefix_caching,
            step_time: self.step_time.unwrap_or_else(|| self.latencies()),
            jitter: Jitter(self.jitter),
            transfer_per_token: self.transfer_per_token,
        }
    }

    /// Returns the step time that gives a lone request the configured latencies.
    fn latencies(&self) -> StepTime {
        let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
        StepTime::Latencies {
            overhead: milliseconds(self.overhead),
            per_token: milliseconds(self.prefill_per_token),
            itl: milliseconds(self.itl),
            slowdown: (self.load_factor - 1.0) / f64::from(self.max_num_seqs.saturating_sub(1).max(1)),
        }
    }
}

impl Role {
    /// Returns the leg that the engine serves.
    pub(crate) fn leg(self) -> Leg {
        match self {
            Self::Prefill => Leg::Prefill,
            Self::Decode => Leg::Decode,
            Self::Aggregated => Leg::Aggregated,
        }
    }

    /// Returns the label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.leg().as_str()
    }
}

impl Dialect {
    /// Returns the label, which is also `owned_by` in `/v1/models`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Openai => "openai",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_reported_at_once_with_their_values() {
        assert_eq!(SimConfig::default().problems(), Vec::<String>::new());
        let bad = SimConfig {
            dialect: Dialect::Openai,
            role: Role::Decode,
            speedup: 0.0,
            load_factor: 0.5,
            ..SimConfig::default()
        };
        let want = [
            "speedup `0` is out of range",
            "load-factor `0.5` is out of range",
            "a plain OpenAI server cannot be `decode`",
        ];
        assert_eq!(bad.problems(), want);
    }
}
