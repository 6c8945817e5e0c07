//! Behaviour G against the oracle's table: what the default selector of `dynamo-kv-router` has candidates
//! cost and takes. The README of `tests/oracle` says how the table is written again.

use pointsman_routing::{CostTerms, RouterConfig, cost, pick::minimum};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    weights: Weights,
    /// Prefill tokens, decode blocks, requests, cached blocks by tier, sum of taint weights.
    rows: Vec<(u32, u32, u32, [u32; 3], f32)>,
    costs: Vec<f32>,
    chosen: usize,
}

#[derive(Deserialize)]
struct Weights {
    credits: [f64; 3],
    load_scale: f64,
    request_weight: f64,
    track: bool,
    prompt_tokens: u32,
    block_size: u32,
}

#[test]
fn g_costs_and_choices_are_those_of_the_oracle() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../../../tests/fixtures/oracle_cost.json")).unwrap();
    assert!(cases.len() >= 200);
    for (number, Case { weights, rows, costs, chosen }) in cases.iter().enumerate() {
        let [overlap_score_credit, host_cache_credit, disk_cache_credit] = weights.credits;
        let config = RouterConfig {
            overlap_score_credit,
            host_cache_credit,
            disk_cache_credit,
            prefill_load_scale: weights.load_scale,
            active_request_weight: weights.request_weight,
            track_prefill_tokens: weights.track,
            ..RouterConfig::default()
        };
        let ours: Vec<f32> = rows
            .iter()
            .map(|(prefill, decode, requests, cached, preference)| CostTerms {
                prompt_tokens: weights.prompt_tokens,
                block_size: weights.block_size,
                active_prefill_tokens: *prefill,
                decode_blocks: *decode,
                active_requests: *requests,
                cached: *cached,
                taint_preference: *preference,
            })
            .map(|terms| cost(&terms, &config))
            .collect();
        let near = |(ours, theirs): (&f32, &f32)| (ours - theirs).abs() < 1e-5 * theirs + 1e-3;
        // G1.1
        assert!(ours.iter().zip(costs).all(near), "case {number}: {ours:?} {costs:?}");
        assert_eq!(minimum(&ours, 1), Some(*chosen), "case {number}");
    }
}
