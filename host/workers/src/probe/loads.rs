//! Load of an SGLang engine by its own endpoint. Its metrics are off unless it was started with
//! `--enable-metrics`. No I/O.

use serde::Deserialize;

use super::{figures::Figures, load_figures::LoadFigures};

/// Where SGLang tells its load.
pub(super) const LOADS: &str = "/v1/loads?include=core";

#[derive(Deserialize)]
struct Loads {
    loads: Vec<RankLoad>,
}

/// Load of one data-parallel rank.
#[derive(Deserialize)]
struct RankLoad {
    dp_rank: Option<u32>,
    num_running_reqs: Option<u32>,
    num_waiting_reqs: Option<u32>,
    num_used_tokens: Option<u64>,
    token_usage: Option<f32>,
}

impl RankLoad {
    fn figures(&self) -> LoadFigures {
        LoadFigures {
            running: self.num_running_reqs,
            waiting: self.num_waiting_reqs,
            kv_usage: self.token_usage.filter(|usage| *usage >= 0.0),
            kv_tokens: self.num_used_tokens,
            ..LoadFigures::default()
        }
    }
}

/// Reads the load of each rank and of all together: requests and tokens, and the highest use of a cache.
/// `None`: the answer has another form.
pub(super) fn figures_of_loads(body: &[u8]) -> Option<Figures> {
    let Loads { loads } = serde_json::from_slice(body).ok()?;
    let of_ranks = || loads.iter().map(RankLoad::figures);
    let add = |all: u32, rank| all.saturating_add(rank);
    let whole = LoadFigures {
        running: of_ranks().filter_map(|rank| rank.running).reduce(add),
        waiting: of_ranks().filter_map(|rank| rank.waiting).reduce(add),
        kv_usage: of_ranks().filter_map(|rank| rank.kv_usage).reduce(f32::max),
        kv_tokens: of_ranks().filter_map(|rank| rank.kv_tokens).reduce(u64::saturating_add),
        ..LoadFigures::default()
    };
    let ranks = loads.iter().filter_map(|rank| Some((rank.dp_rank?, rank.figures()))).collect();
    Some(Figures { whole, ranks, ..Figures::default() })
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
            (read.whole.running, read.whole.waiting, read.whole.kv_usage, read.whole.kv_tokens),
            (Some(0), Some(0), Some(0.0), Some(0))
        );
        let ranks = br#"{"loads":[
            {"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":1,"num_used_tokens":700,"token_usage":0.25},
            {"dp_rank":1,"num_running_reqs":4,"num_waiting_reqs":0,"num_used_tokens":90,"token_usage":0.5}]}"#;
        let read = figures_of_loads(ranks).unwrap();
        assert_eq!(
            (read.whole.running, read.whole.waiting, read.whole.kv_usage, read.whole.kv_tokens),
            (Some(7), Some(1), Some(0.5), Some(790))
        );
        // B8.2
        let second = read.of_rank(1, 0);
        assert_eq!((second.running, second.waiting, second.kv_usage), (Some(4), Some(0), Some(0.5)));
        for other in ["", "{}", "[]", r#"{"loads":[{"num_running_reqs":-1}]}"#] {
            assert_eq!(figures_of_loads(other.as_bytes()), None, "{other}");
        }
    }
}
