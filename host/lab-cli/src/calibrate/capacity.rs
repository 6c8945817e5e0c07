//! Limits of an engine's scheduler and cache, from the engine's report, the arguments or the defaults.

use pointsman_cli::print;
use pointsman_lab::calibrate::{Capacity, KnownCapacity};
use pointsman_workers::{EngineFacts, probe};
use serde_json::Value;

use super::target::{Target, TargetError};

/// Limits from the command line, which override those that the engine reports.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(super) struct CapacityArgs {
    /// Number of KV blocks of an engine [default: the engine's report].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    blocks: Option<u32>,
    /// Number of tokens in a KV block [default: the engine's report].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    block_tokens: Option<u32>,
    /// Maximum number of sequences that run at once [default: the engine's report].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    max_num_seqs: Option<u32>,
    /// Maximum number of tokens in one step [default: the engine's report].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    max_batched_tokens: Option<u32>,
}

/// Values that an engine reports.
#[derive(Debug, Default)]
struct Reported {
    facts: EngineFacts,
    max_num_seqs: Option<u32>,
    max_batched_tokens: Option<u32>,
}

impl CapacityArgs {
    /// Returns the limits from the command line.
    pub(super) fn given(self) -> KnownCapacity {
        let Self { blocks, block_tokens, max_num_seqs, max_batched_tokens } = self;
        KnownCapacity { block_tokens, blocks, max_num_seqs, max_batched_tokens }
    }

    /// Finds the limits of an engine. Prints a warning for each limit that is assumed.
    pub(super) async fn find(self, target: &Target) -> anyhow::Result<Capacity> {
        let reported = Reported::read(target).await?;
        let mut guesses = String::new();
        let url = target.url();
        let known = KnownCapacity {
            block_tokens: self.block_tokens.or(reported.facts.block_size),
            blocks: self.blocks.or(reported.facts.total_blocks),
            max_num_seqs: self.max_num_seqs.or(reported.max_num_seqs),
            max_batched_tokens: self.max_batched_tokens.or(reported.max_batched_tokens),
        };
        let capacity = known.or_assumed(&mut |flag, assumed| {
            guesses.push_str(&format!("warning: {url}: does not report {flag}; {assumed} is assumed\n"));
        });
        if let Some(ranks) = reported.facts.dp_size.filter(|ranks| *ranks > 1) {
            guesses.push_str(&format!(
                "warning: {url}: has {ranks} data-parallel ranks, which share the requests of a burst, so that the fitted \
                 step is too short: calibrate an engine with one rank, and set `count` to the number of ranks\n"
            ));
        }
        print(&guesses)?;
        Ok(capacity)
    }
}

impl Reported {
    /// Asks the engine in the ways of vLLM and of SGLang. Values that the engine does not report stay
    /// unknown.
    async fn read(target: &Target) -> Result<Self, TargetError> {
        let mut found = Self::default();
        if let Some(body) = target.get("/metrics").await? {
            found.facts = probe::facts_of_vllm_metrics(&body);
        }
        // vLLM's /server_info needs VLLM_SERVER_DEV_MODE=1. /get_server_info is SGLang's old name.
        for path in ["/server_info?config_format=json", "/get_server_info"] {
            let Ok(Some(body)) = target.get(path).await else { continue };
            let info: Value = serde_json::from_slice(&body).unwrap_or_default();
            let number = |place: &str| {
                let number = info.pointer(place).and_then(Value::as_u64);
                number.and_then(|number| u32::try_from(number).ok()).filter(|number| *number > 0)
            };
            let scheduler = "/vllm_config/scheduler_config";
            found.max_num_seqs = found.max_num_seqs.or(number(&format!("{scheduler}/max_num_seqs")));
            found.max_batched_tokens = found
                .max_batched_tokens
                .or(number(&format!("{scheduler}/max_num_batched_tokens")))
                .or(number("/chunked_prefill_size"));
            if let Ok(facts) = probe::facts_of_sglang_info(&body) {
                found.max_num_seqs = found.max_num_seqs.or(facts.max_running_requests);
                found.facts = found.facts.or(&facts);
            }
        }
        Ok(found)
    }
}
