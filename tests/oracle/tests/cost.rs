//! Compares our costs with the oracle's, and our softmax with its random choices (G).

use pointsman_oracle::cost::{Case, Question, Row, Weights, table};
use pointsman_routing::{CostTerms, RouterConfig, cost, pick::softmax};

const FILE: &str = include_str!("../../fixtures/oracle_cost.json");

fn ours(weights: &Weights, row: &Row) -> f32 {
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
    let (active_prefill_tokens, decode_blocks, active_requests, cached, taint_preference) = *row;
    let terms = CostTerms {
        prompt_tokens: weights.prompt_tokens,
        block_size: weights.block_size,
        active_prefill_tokens,
        decode_blocks,
        active_requests,
        cached,
        taint_preference,
    };
    cost(&terms, &config)
}

#[test]
fn g_the_committed_table_equals_the_oracle_s() {
    let committed: Vec<Case> = serde_json::from_str(FILE).unwrap();
    assert!(committed.len() >= 200);
    assert_eq!(committed, table(committed.len()).unwrap());
}

#[test]
fn g_our_draws_are_distributed_as_the_oracles() {
    let committed: Vec<Case> = serde_json::from_str(FILE).unwrap();
    const DRAWS: u64 = 4_000;
    for (number, case) in committed.iter().step_by(12).enumerate() {
        let temperature = [0.1, 0.4, 1.0][number % 3];
        let costs: Vec<f32> = case.rows.iter().map(|row| ours(&case.weights, row)).collect();
        let question = Question::new(&case.weights, &case.rows, temperature, 7);
        let (mut our, mut their) = (vec![0.0; costs.len()], vec![0.0; costs.len()]);
        for seed in 0..DRAWS {
            our[softmax(&costs, temperature as f32, seed).unwrap()] += 1.0 / DRAWS as f64;
            their[question.choose().unwrap() as usize] += 1.0 / DRAWS as f64;
        }
        // Five standard errors of the difference of two fractions.
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 5.0 * (2.0 * 0.25 / DRAWS as f64).sqrt();
        assert!(our.iter().zip(&their).all(near), "case {number}, T {temperature}: {our:?} {their:?}");
    }
}

#[test]
fn g_our_costs_are_the_oracles() {
    let committed: Vec<Case> = serde_json::from_str(FILE).unwrap();
    for (number, case) in committed.iter().enumerate() {
        for (row, theirs) in case.rows.iter().zip(&case.costs) {
            let ours = f64::from(ours(&case.weights, row));
            assert!((ours - theirs).abs() < 1e-5 * theirs + 1e-4, "case {number}: {ours} {theirs}");
        }
    }
}
