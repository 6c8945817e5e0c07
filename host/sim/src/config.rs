//! What an engine is told at its start. Plain data with sane defaults (8B on an H100); nothing here does anything.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    core::{Limits, TimeModel},
    faults::Fault,
};

/// The engine whose HTTP is spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// vLLM; prefill and decode by NIXL parameters (completed handoff).
    #[default]
    Vllm,
    /// SGLang; prefill and decode by bootstrap room.
    Sglang,
    /// Any OpenAI-compatible server; aggregated only.
    Openai,
}

/// What the engine serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill legs.
    Prefill,
    /// Decode legs.
    Decode,
    /// Whole requests.
    #[default]
    Aggregated,
}

/// What a request turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// Computes the prompt for another engine.
    Prefill,
    /// Takes the prompt's KV from another engine.
    Decode,
    /// Does both.
    Aggregated,
}

/// All settings of one engine. Times are on the engine's own clock, which `speedup` makes faster than the wall's.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The HTTP it speaks.
    pub dialect: Dialect,
    /// What it serves.
    pub role: Role,
    /// Where it listens; port 0 is any.
    pub listen: SocketAddr,
    /// The host that handoffs tell other engines; default: the listening address.
    pub advertise_host: Option<String>,
    /// Name of its only model.
    pub model: String,
    /// Longest prompt plus answer, tokens.
    pub max_model_len: u32,
    /// SGLang prefill: port of the bootstrap server, 0 is any. Decode: the port assumed when a request names none.
    pub bootstrap_port: u16,
    /// vLLM: port of the side channel, 0 is any.
    pub side_port: u16,
    /// Data-parallel ranks it claims to have.
    pub dp_size: u32,
    /// Fixed part of a prefill.
    pub overhead: Duration,
    /// Prefill of one token that is not cached.
    pub prefill_per_token: Duration,
    /// Inter-token latency of a sequence alone.
    pub itl: Duration,
    /// KV transfer of one prompt token.
    pub transfer_per_token: Duration,
    /// How much slower a full batch is than a sequence alone.
    pub load_factor: f64,
    /// Share by which a decode step is slower while a prompt is computed beside it.
    pub interference: f64,
    /// Standard deviation of all times, as a share.
    pub jitter: f64,
    /// Seed of jitter and of faults with a share.
    pub seed: u64,
    /// Sequences admitted at once.
    pub max_num_seqs: u32,
    /// Sequences that may wait; one more is refused with 503.
    pub max_waiting: u32,
    /// KV blocks.
    pub blocks: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// How long pinned blocks wait to be pulled.
    pub lease: Duration,
    /// How long an SGLang leg waits for the other one.
    pub room_wait: Duration,
    /// How many times faster than the wall the engine's clock runs.
    pub speedup: f64,
    /// Tokens after which the model ends by itself, unless `ignore_eos`.
    pub natural_len: u32,
    /// A decode with incomplete parameters is refused instead of killing the engine.
    pub tolerant: bool,
    /// Keep this many of the last requests for [`SimHandle::recorded`](crate::SimHandle::recorded).
    pub record: usize,
    /// Adds the time of its write to every event, and writes each event on its own.
    pub stamp: bool,
    /// Serves every endpoint below any first path segment too.
    pub any_prefix: bool,
    /// Faults in force from the start.
    pub faults: Vec<Fault>,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            dialect: Dialect::Vllm,
            role: Role::Aggregated,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            advertise_host: None,
            model: "tiny".to_owned(),
            max_model_len: 131_072,
            bootstrap_port: 0,
            side_port: 0,
            dp_size: 1,
            overhead: Duration::from_millis(30),
            prefill_per_token: Duration::from_micros(200),
            itl: Duration::from_millis(12),
            transfer_per_token: Duration::from_micros(5),
            load_factor: 2.0,
            interference: 0.0,
            jitter: 0.1,
            seed: 0,
            max_num_seqs: 256,
            max_waiting: 1024,
            blocks: 28_000,
            block_size: 16,
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
    /// SGLang's bootstrap port when nobody names one.
    pub const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

    /// An engine whose prefill, decode and transfer take no time: for tests of protocol, not of timing.
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

    /// Every value that makes no sense, named; empty when all is well.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let checks = [
            (self.speedup > 0.0 && self.speedup.is_finite(), "speedup", self.speedup.to_string()),
            (self.block_size > 0, "block-size", self.block_size.to_string()),
            (self.blocks > 0, "blocks", self.blocks.to_string()),
            (self.max_num_seqs > 0, "max-num-seqs", self.max_num_seqs.to_string()),
            (self.dp_size > 0, "dp-size", self.dp_size.to_string()),
            (
                self.load_factor >= 1.0 && self.load_factor.is_finite(),
                "load-factor",
                self.load_factor.to_string(),
            ),
            ((0.0..=10.0).contains(&self.jitter), "jitter", self.jitter.to_string()),
            ((0.0..=100.0).contains(&self.interference), "interference", self.interference.to_string()),
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

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            max_num_seqs: self.max_num_seqs,
            max_waiting: self.max_waiting,
            blocks: self.blocks,
            block_size: self.block_size,
        }
    }

    pub(crate) fn time_model(&self) -> TimeModel {
        TimeModel {
            overhead: self.overhead,
            prefill_per_token: self.prefill_per_token,
            itl: self.itl,
            transfer_per_token: self.transfer_per_token,
            load_factor: self.load_factor,
            max_num_seqs: self.max_num_seqs,
            jitter: self.jitter,
            interference: self.interference,
        }
    }
}

impl Role {
    /// Its label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
        }
    }
}

impl Leg {
    /// Its label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
        }
    }
}

impl Dialect {
    /// Its label, which is also what `/v1/models` says in `owned_by`.
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
    fn all_problems_are_named_at_once_with_their_values() {
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
