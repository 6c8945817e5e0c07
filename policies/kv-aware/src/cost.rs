//! Computes the cost column by column. The passes have no branches, so that the compiler uses SIMD.

/// Router settings of the request, and its size.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// Input sequence length (ISL), tokens.
    pub prompt_tokens: u32,
    /// Tokens in a block; 0 counts as 1.
    pub block_size: u32,
    /// Credit for a block cached on the device.
    pub credit: f32,
    /// Credit for a block cached in host memory.
    pub host_credit: f32,
    /// Credit for a block cached on disk.
    pub disk_credit: f32,
    /// Weight of prefill load.
    pub load_scale: f32,
    /// Cost of an active request, blocks.
    pub request_weight: f32,
    /// Whether prefill tokens count as load.
    pub track_prefill_tokens: bool,
}

/// Worker facts, one slice for each fact, all of equal length.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// Prompt tokens whose prefill has not ended.
    pub prefill_tokens: &'a [u32],
    /// KV blocks in use, with this request.
    pub decode_blocks: &'a [u32],
    /// Active requests.
    pub requests: &'a [u32],
    /// Cached prefix blocks on the device.
    pub device: &'a [u32],
    /// Cached prefix blocks in host memory.
    pub host: &'a [u32],
    /// Cached prefix blocks on disk.
    pub disk: &'a [u32],
    /// Sum of the weights of preferred taints.
    pub preference: &'a [f32],
}

/// Returns the cost of each row, in blocks: `load_scale * max(0, (prefill_tokens + ISL) / block -
/// credit_blocks) + decode_blocks + request_weight * requests`. Without tracking of prefill tokens the first
/// term has no load, and with a credit above 0 `max(0, decode_blocks - credit_blocks)` replaces the first two
/// terms. Preferred taints multiply the cost by `exp(-tanh(sum))`.
#[must_use]
pub fn costs(weights: &Weights, columns: &Columns<'_>) -> Vec<f32> {
    let mut costs = credit_blocks(weights, columns);
    if weights.track_prefill_tokens {
        add_tracked(weights, columns, &mut costs);
    } else if weights.credit > 0.0 {
        for (cost, blocks) in costs.iter_mut().zip(columns.decode_blocks) {
            *cost = positive(single(*blocks) - *cost);
        }
    } else {
        for (cost, blocks) in costs.iter_mut().zip(columns.decode_blocks) {
            *cost = single(*blocks);
        }
    }
    for (cost, requests) in costs.iter_mut().zip(columns.requests) {
        *cost += weights.request_weight * single(*requests);
    }
    prefer(columns.preference, &mut costs);
    costs
}

fn credit_blocks(weights: &Weights, columns: &Columns<'_>) -> Vec<f32> {
    let tiers = columns.device.iter().zip(columns.host).zip(columns.disk);
    tiers
        .map(|((device, host), disk)| {
            weights.credit * single(*device)
                + weights.host_credit * single(*host)
                + weights.disk_credit * single(*disk)
        })
        .collect()
}

fn add_tracked(weights: &Weights, columns: &Columns<'_>, costs: &mut [f32]) {
    let per_token = 1.0 / single(weights.block_size.max(1));
    let isl = single(weights.prompt_tokens);
    let rows = costs.iter_mut().zip(columns.prefill_tokens).zip(columns.decode_blocks);
    for ((cost, tokens), blocks) in rows {
        let prefill = positive((single(*tokens) + isl) * per_token - *cost);
        *cost = weights.load_scale * prefill + single(*blocks);
    }
}

/// Applies preferred taints. Most requests have none, so that one pass without exponentials finds nothing to
/// do.
fn prefer(preference: &[f32], costs: &mut [f32]) {
    let bits = preference.iter().fold(0, |bits, sum| bits | sum.to_bits());
    // Zero of either sign means no preference.
    if bits << 1 == 0 {
        return;
    }
    for (cost, sum) in costs.iter_mut().zip(preference) {
        *cost *= (-sum.tanh()).exp();
    }
}

/// Returns `value` if it is above zero, else zero. `f32::max` handles NaN by a function call for each row.
fn positive(value: f32) -> f32 {
    if value > 0.0 { value } else { 0.0 }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24")]
fn single(count: u32) -> f32 {
    count as f32
}
