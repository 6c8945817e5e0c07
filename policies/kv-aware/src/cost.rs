//! The cost, column by column: passes without branches, which the compiler turns into SIMD.

/// The router config in force and the request's size.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// ISL, tokens.
    pub prompt_tokens: u32,
    /// Tokens in a block; 0 counts as 1.
    pub block_size: u32,
    /// Credit for a block on the device.
    pub credit: f32,
    /// Credit for a block in host memory.
    pub host_credit: f32,
    /// Credit for a block on disk.
    pub disk_credit: f32,
    /// Weight of the prefill term.
    pub load_scale: f32,
    /// Cost of an active request, blocks.
    pub request_weight: f32,
    /// Whether prefill tokens count as load.
    pub track_prefill_tokens: bool,
}

/// Worker facts, one slice a fact, all of one length.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// Tokens whose prefill has not completed.
    pub prefill_tokens: &'a [u32],
    /// Blocks booked after admission.
    pub decode_blocks: &'a [u32],
    /// Requests booked.
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

/// One cost a row, in blocks: `load_scale * max(0, (prefill_tokens + ISL) / block - credit_blocks) + decode_blocks +
/// request_weight * requests`. Not tracking prefill tokens, the first term has no load; with a credit above 0
/// `max(0, decode_blocks - credit_blocks)` stands for both. Preferred taints multiply by `exp(-tanh(sum))`.
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

/// Most requests prefer nothing: one pass that only looks, and no exponentials.
fn prefer(preference: &[f32], costs: &mut [f32]) {
    let bits = preference.iter().fold(0, |bits, sum| bits | sum.to_bits());
    // Neither sign of zero prefers anything.
    if bits << 1 == 0 {
        return;
    }
    for (cost, sum) in costs.iter_mut().zip(preference) {
        *cost *= (-sum.tanh()).exp();
    }
}

/// What is above zero. `f32::max` has rules for what is no number, and a call for each row to keep them.
fn positive(value: f32) -> f32 {
    if value > 0.0 { value } else { 0.0 }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24")]
fn single(count: u32) -> f32 {
    count as f32
}
