//! The faults that simulated engines inject into their own answers.

use serde_json::{Value, json};

/// Returns the name under which an engine counts a fault.
pub(super) fn label(fault: &Value) -> String {
    let kind = fault["kind"].as_str().unwrap_or_default();
    fault["status"].as_u64().map_or_else(|| kind.to_owned(), |status| format!("{kind}-{status}"))
}

/// Returns every kind of fault, each with an equal part of `share`.
pub(super) fn faults(share: f64) -> Vec<Value> {
    let mut kinds = vec![
        json!({ "kind": "refuse" }),
        json!({ "kind": "status", "status": 500 }),
        json!({ "kind": "status", "status": 503 }),
        json!({ "kind": "status", "status": 429 }),
        json!({ "kind": "hang-before-headers" }),
        json!({ "kind": "hang-after-headers" }),
        json!({ "kind": "stall", "after_tokens": 2 }),
        json!({ "kind": "cut", "after_tokens": 2 }),
        json!({ "kind": "garbage", "after_tokens": 1 }),
        json!({ "kind": "wrong-content-type" }),
        json!({ "kind": "first-token-eos" }),
        json!({ "kind": "partial-params" }),
        json!({ "kind": "transfer-fail" }),
    ];
    let each = share / kinds.len() as f64;
    kinds.iter_mut().for_each(|kind| kind["share"] = json!(each));
    kinds.push(json!({ "kind": "slow-health", "ms": 400, "share": share, "leg": "health" }));
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_divided_among_the_faults_of_requests() {
        let faults = faults(0.13);
        let requests = faults.iter().filter(|fault| fault["leg"].is_null());
        let total: f64 = requests.filter_map(|fault| fault["share"].as_f64()).sum();
        assert!((total - 0.13).abs() < 1e-9, "{total}");
        let labels: Vec<String> = faults.iter().map(label).collect();
        assert_eq!(labels[..2], ["refuse", "status-500"]);
    }
}
