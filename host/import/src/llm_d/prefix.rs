//! Where the knowledge of cached prefixes comes from, and how much of a prompt counts.

use super::{
    Import,
    config::{Config, Plugin},
    slot::SlotPlan,
};
use crate::report::{Kind, Place, plain};

/// llm-d's defaults: tokens and blocks of a prompt that are matched, and tokens in a block.
const MAX_TOKENS: u32 = 131_072;
const MAX_BLOCKS: u32 = 2_048;
const BLOCK_TOKENS: u32 = 16;
/// Port at which llm-d expects the KV events of a pod.
const EVENTS_PORT: u32 = 5_557;

/// Producers of prefix matches.
const APPROXIMATE: &str = "approx-prefix-cache-producer";
const PRECISE: &str = "precise-prefix-cache-producer";

impl Import<'_> {
    /// Sets how many blocks of a prompt the prefix score looks at. Returns whether it fits another scorer's.
    pub(super) fn prefix_limit(&mut self, plan: &mut SlotPlan, plugin: &Plugin<'_>) -> anyhow::Result<bool> {
        let (blocks, source) = self.max_blocks(plugin)?;
        Ok(plan.option("max-prefix-blocks", i64::from(blocks), source))
    }

    /// Reports a prefix scorer.
    pub(super) fn prefix_score(
        &mut self,
        plugin: &Plugin<'_>,
        setting: &str,
    ) -> anyhow::Result<(Kind, String)> {
        let length = plugin.number("matchLengthWeight")?.unwrap_or(0.0);
        plugin.param("matchLengthScaleTokens");
        let precise = self.is_precise(plugin);
        let source = if precise {
            "cached blocks come from KV events: give each worker kv_events"
        } else {
            "cached blocks are predicted from decisions, for index.ttl and within index.byte_budget, and \
             come from KV events where a worker has kv_events"
        };
        let more =
            if length > 0.0 { "; the length of the match (matchLengthWeight) does not count" } else { "" };
        Ok((Kind::Approximated, format!("{setting}: {source}{more}")))
    }

    /// Returns whether the scorer reads the engines' KV events.
    fn is_precise(&self, plugin: &Plugin<'_>) -> bool {
        plugin.kind == "precise-prefix-cache-scorer"
            || producer(self.config, plugin).is_some_and(|it| it.kind == PRECISE)
    }

    /// Keeps the workers that have most of a prompt cached, while they have not much more to do than others.
    pub(super) fn cache_affinity(
        &mut self,
        plan: &mut SlotPlan,
        plugin: &Plugin<'_>,
        place: Place,
    ) -> anyhow::Result<(Kind, String)> {
        match producer(self.config, plugin) {
            Some(producer) if producer.kind == PRECISE => self.precise(producer)?,
            Some(producer) if producer.kind == APPROXIMATE => self.approximate(producer).map(drop)?,
            _ => {}
        }
        let share = plugin.number("affinityThreshold")?.unwrap_or(0.8);
        let penalty_ms = plugin.number("maxTTFTPenaltyMs")?.unwrap_or(18_000.0);
        let speed = plugin.number("peakPrefillThroughput")?.unwrap_or(15_928.0);
        // An earlier version had a limit of tokens instead of a speed.
        let tokens = plugin.number("maxTokensInFlightPenalty")?;
        let limit = tokens.unwrap_or(penalty_ms / 1_000.0 * speed).round();
        let mut without = Vec::new();
        if plugin.number("explorationProbability")?.is_some_and(|probability| probability > 0.0) {
            without.push("explorationProbability");
        }
        if plugin.text("ttftSource") == Some("latencyPredictor") {
            without.push("the predictor of ttftSource");
        }
        if plugin.text("prefillCalibrationFile").is_some() {
            without.push("prefillCalibrationFile");
        }
        for key in [
            "prefillCalibrationFingerprint",
            "prefillCalibrationRequired",
            "latencyPredictionInfoProducerName",
            "inFlightLoadProducerName",
        ] {
            plugin.param(key);
        }
        if share <= 0.0 {
            return Ok((Kind::Translated, "left out: with a threshold of 0 it keeps all workers".to_owned()));
        }
        plan.keep(has_most(share, limit), format!("{}, {place}", plain(plugin.name)));
        let until = match limit {
            limit if limit > 0.0 => format!(
                ", until the best of them has {limit} prompt tokens in flight more than the best other one (llm-d's \
                 time at its speed); tokens count until the prefill ended"
            ),
            _ => String::new(),
        };
        let without = match without.as_slice() {
            [] => String::new(),
            names => format!("; without {}", names.join(", ")),
        };
        let ours = format!(
            "filter `formula`: workers with {share} of the prompt's blocks cached, if there are some{until}{without}"
        );
        Ok((Kind::Approximated, ours))
    }

    /// Returns the number of blocks, 0 for all, and what it comes from.
    fn max_blocks(&mut self, plugin: &Plugin<'_>) -> anyhow::Result<(u32, &'static str)> {
        let config = self.config;
        let producer = producer(config, plugin);
        if plugin.kind == "precise-prefix-cache-scorer" {
            self.precise(plugin)?;
            return Ok((0, "KV events: all blocks"));
        }
        // Earlier versions had the producer's parameters on the scorer.
        let own = plugin.count("maxPrefixBlocksToMatch")?;
        let holder = match producer {
            Some(producer) if producer.kind == PRECISE => {
                self.precise(producer)?;
                return Ok((0, "KV events: all blocks"));
            }
            Some(producer) if producer.kind == APPROXIMATE => producer,
            _ => plugin,
        };
        let size = self.approximate(holder)?;
        let tokens = holder.count("maxPrefixTokensToMatch")?;
        let blocks = holder.count("maxPrefixBlocksToMatch")?;
        Ok(match (tokens, own.or(blocks)) {
            (Some(0), blocks) => (blocks.unwrap_or(MAX_BLOCKS), "maxPrefixBlocksToMatch"),
            (Some(tokens), _) => ((tokens / size).max(1), "maxPrefixTokensToMatch / block size"),
            // A scorer of an earlier version, which had blocks only.
            (None, Some(blocks)) if own.is_some() => (blocks, "maxPrefixBlocksToMatch"),
            (None, _) => (MAX_TOKENS / size, "llm-d's default: 131072 tokens / block size"),
        })
    }

    /// Reads a producer that predicts caches from decisions, once. Returns the tokens in a block.
    fn approximate(&mut self, holder: &Plugin<'_>) -> anyhow::Result<u32> {
        let size = holder.count("blockSizeTokens")?.filter(|size| *size > 0);
        for key in ["autoTune", "blockSize", "hashBlockSize"] {
            holder.param(key);
        }
        let capacity = holder.count("lruCapacityPerServer")?;
        if let Some(size) = size {
            let source = format!("blockSizeTokens of {}", plain(holder.name));
            self.block_size(size, holder, &source);
        }
        if !holder.is_told.get() && (holder.kind == APPROXIMATE || capacity.is_some()) {
            let limit = capacity
                .map_or_else(String::new, |blocks| format!(", and not {blocks} blocks for each worker"));
            let ours = format!("the prefix index: index.ttl and index.byte_budget bound it{limit}");
            self.note_translation(holder, Kind::Approximated, ours);
        }
        Ok(size.unwrap_or(BLOCK_TOKENS))
    }

    fn block_size(&mut self, tokens: u32, producer: &Plugin<'_>, source: &str) {
        if !self.draft.set("routing", "block_size", i64::from(tokens), source) {
            let ours = "another producer gave another size, and the index has one (routing.block_size)";
            self.report.add(Kind::Approximated, producer.place, format!("{tokens} tokens in a block"), ours);
        }
    }

    /// Reads a producer that follows the engines' KV events, once.
    fn precise(&mut self, producer: &Plugin<'_>) -> anyhow::Result<()> {
        if producer.is_told.get() {
            return Ok(());
        }
        let processor = producer.param("tokenProcessorConfig");
        let size = processor.and_then(|it| it.get("blockSizeTokens").or_else(|| it.get("blockSize")));
        if let Some(size) = size {
            let tokens = super::config::count(size, "blockSize")?;
            if tokens > 0 {
                let source = format!("tokenProcessorConfig of {}", plain(producer.name));
                self.block_size(tokens, producer, &source);
            }
        }
        for key in ["indexerConfig", "speculativeIndexing", "speculativeTTL"] {
            producer.param(key);
        }
        let events = producer.param("kvEventsConfig");
        let of_pods = events.and_then(|events| events.get("podDiscoveryConfig"));
        if let Some(of_pods) = of_pods {
            let port = of_pods
                .get("socketPort")
                .map_or(Ok(EVENTS_PORT), |it| super::config::count(it, "socketPort"))?;
            self.kv_events = Some(format!("tcp://{{host}}:{port}"));
        }
        let address = self.kv_events.as_deref().unwrap_or("tcp://{host}:5557");
        let mut ours = format!(
            "the prefix index follows the KV events of each worker with kv_events = \"{address}\" (in the \
             defaults of their source); hash seeds need not agree; decisions are predicted, too"
        );
        if of_pods.is_none() && events.is_some_and(|events| events.get("zmqEndpoint").is_some()) {
            ours.push_str(". Engines have to listen (--kv-events-config with tcp://*:5557), not to connect");
        }
        self.note_translation(producer, Kind::Approximated, ours);
        if self.config.of_kind("token-producer").is_none() && self.config.of_kind("tokenizer").is_none() {
            self.report.add(
                Kind::Approximated,
                Place::Default,
                "tokens of prompts",
                "prompts are measured in bytes: set models.NAME.tokenizer, so that blocks match the engines'",
            );
        }
        Ok(())
    }
}

/// The producer of prefix matches that a plugin names, or the one that it has by default.
fn producer<'a>(config: &'a Config<'a>, plugin: &Plugin<'_>) -> Option<&'a Plugin<'a>> {
    match plugin.text("prefixMatchInfoProducerName") {
        Some(name) => config.plugin(name),
        None => config.of_kind(APPROXIMATE).or_else(|| config.of_kind(PRECISE)),
    }
}

/// Returns the formula for candidates that have a share of the prompt's blocks cached. It holds for all while
/// none has, or while the best of them has so many tokens more in flight than the best other one.
fn has_most(share: f64, limit: f64) -> String {
    let cached = "cached_blocks_device + cached_blocks_host + cached_blocks_disk";
    let has = format!("ratio({cached}, request_blocks) >= {share}");
    let always = format!("max({has}) == 0 || {has}");
    if limit <= 0.0 {
        return always;
    }
    let (own, other) = (
        format!("min(if({has}, active_prefill_tokens, 1000000000))"),
        format!("min(if({has}, 1000000000, active_prefill_tokens))"),
    );
    format!("{always} || {own} - {other} > {limit}")
}
