//! Behaviour G against the oracle's table, as `host/routing/tests/oracle.rs` has it for the native cost.

use policy_kv_aware::cost::{Columns, Weights, costs};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    weights: Given,
    rows: Vec<Row>,
    costs: Vec<f32>,
    chosen: usize,
}

#[derive(Deserialize)]
struct Given {
    credits: [f32; 3],
    load_scale: f32,
    request_weight: f32,
    track: bool,
    prompt_tokens: u32,
    block_size: u32,
}

/// Prefill tokens, decode blocks, requests, cached blocks by tier, sum of taint weights.
type Row = (u32, u32, u32, [u32; 3], f32);

#[test]
fn g_costs_and_choices_are_those_of_the_oracle() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../../../tests/fixtures/oracle_cost.json")).unwrap();
    assert!(cases.len() >= 200);
    for (number, case) in cases.iter().enumerate() {
        let ours = ours(case);
        let near = |(ours, theirs): (&f32, &f32)| (ours - theirs).abs() < 1e-5 * theirs + 1e-3;
        assert!(ours.iter().zip(&case.costs).all(near), "case {number}: {ours:?} {:?}", case.costs);
        let least = ours.iter().copied().reduce(f32::min).unwrap();
        assert_eq!(ours[case.chosen], least, "case {number}");
    }
}

fn ours(Case { weights, rows, .. }: &Case) -> Vec<f32> {
    let column = |of: fn(&Row) -> u32| rows.iter().map(of).collect::<Vec<u32>>();
    let [credit, host_credit, disk_credit] = weights.credits;
    let weights = Weights {
        prompt_tokens: weights.prompt_tokens,
        block_size: weights.block_size,
        credit,
        host_credit,
        disk_credit,
        load_scale: weights.load_scale,
        request_weight: weights.request_weight,
        track_prefill_tokens: weights.track,
    };
    let columns = Columns {
        prefill_tokens: &column(|row| row.0),
        decode_blocks: &column(|row| row.1),
        requests: &column(|row| row.2),
        device: &column(|row| row.3[0]),
        host: &column(|row| row.3[1]),
        disk: &column(|row| row.3[2]),
        preference: &rows.iter().map(|row| row.4).collect::<Vec<f32>>(),
    };
    costs(&weights, &columns)
}
