//! Load of an SGLang engine by its own endpoint. Its metrics are off unless it was started with
//! `--enable-metrics`. No I/O.

use serde::Deserialize;

use super::figures::Figures;

/// Where SGLang tells its load.
pub(super) const LOADS: &str = "/v1/loads?include=core";

#[derive(Deserialize)]
struct Loads {
    loads: Vec<RankLoad>,
}

/// Load of one data-parallel rank.
#[derive(Deserialize)]
struct RankLoad {
    num_running_reqs: Option<u32>,
    num_waiting_reqs: Option<u32>,
    num_used_tokens: Option<u64>,
    token_usage: Option<f32>,
}

/// Reads the load of all ranks: requests and tokens together, and the highest use of a cache. `None`: the
/// answer has another form.
pub(super) fn figures_of_loads(body: &[u8]) -> Option<Figures> {
    let Loads { loads } = serde_json::from_slice(body).ok()?;
    let sum = |of: fn(&RankLoad) -> Option<u32>| {
        loads.iter().filter_map(of).reduce(|all, rank| all.saturating_add(rank))
    };
    let usage = loads.iter().filter_map(|rank| rank.token_usage).filter(|usage| *usage >= 0.0);
    let tokens = loads.iter().filter_map(|rank| rank.num_used_tokens);
    Some(Figures {
        running: sum(|rank| rank.num_running_reqs),
        waiting: sum(|rank| rank.num_waiting_reqs),
        kv_usage: usage.reduce(f32::max),
        kv_tokens: tokens.reduce(|all, rank| all.saturating_add(rank)),
        ..Figures::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b8_the_load_of_a_real_sglang_is_read() {
        let real = include_bytes!("../../../../tests/fixtures/engines/sglang-0.5.23/prefill-loads.json");
        let read = figures_of_loads(real).unwrap();
        // B8.3
        assert_eq!(
            (read.running, read.waiting, read.kv_usage, read.kv_tokens),
            (Some(0), Some(0), Some(0.0), Some(0))
        );
        let ranks = br#"{"loads":[
            {"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":1,"num_used_tokens":700,"token_usage":0.25},
            {"dp_rank":1,"num_running_reqs":4,"num_waiting_reqs":0,"num_used_tokens":90,"token_usage":0.5}]}"#;
        let read = figures_of_loads(ranks).unwrap();
        assert_eq!(
            (read.running, read.waiting, read.kv_usage, read.kv_tokens),
            (Some(7), Some(1), Some(0.5), Some(790))
        );
        for other in ["", "{}", "[]", r#"{"loads":[{"num_running_reqs":-1}]}"#] {
            assert_eq!(figures_of_loads(other.as_bytes()), None, "{other}");
        }
    }
}
