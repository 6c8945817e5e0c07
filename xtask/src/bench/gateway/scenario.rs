//! Load shapes with which routers are measured.

use std::time::Duration;

use crate::load::Arrivals;

/// Engines behind the router.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    /// Workers that serve whole requests.
    Aggregated { workers: usize },
    /// Two prefill and two decode workers.
    Disaggregated(Handshake),
}

/// Way in which the engines of a pair find each other's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handshake {
    Vllm,
    Sglang,
}

/// Relation between the prompts of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prompts {
    /// The same 16 prompts are repeated. The index and a cache of tokens contain them.
    Repeated,
    /// Each prompt begins with new words, so none of its blocks is known. The text after these words is
    /// always the same.
    Distinct,
    /// Each prompt consists of new random words.
    NewWords,
    /// Each client has conversations of 20 turns. Every turn repeats the earlier ones and adds to them.
    Conversations,
}

/// One scenario.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    pub(super) shape: Shape,
    /// Time between two events of a stream.
    pub(super) pace: Duration,
    /// Number of events of a stream; 0 if the answer is not streamed.
    pub(super) events: u32,
    pub(super) load: Arrivals,
    pub(super) requests: u64,
    pub(super) prompt_bytes: usize,
    pub(super) prompts: Prompts,
    /// Whether the gateway counts tokens, which requires `--tokenizer`.
    pub(super) tokens: bool,
    /// Whether long new prompts fill the gateway's prefix index up to its limit before the measurement.
    pub(super) fill: bool,
}

const BASE: Scenario = Scenario {
    name: "",
    description: "",
    shape: Shape::Aggregated { workers: 4 },
    pace: Duration::ZERO,
    events: 0,
    load: Arrivals::Clients(16),
    requests: 0,
    prompt_bytes: 60,
    prompts: Prompts::Distinct,
    tokens: false,
    fill: false,
};

const ALL: [Scenario; 16] = [
    Scenario { name: "a", description: "tiny, not streamed, closed loop 16", requests: 20_000, ..BASE },
    Scenario {
        name: "b",
        description: "128 events at full speed, closed loop 8",
        events: 128,
        load: Arrivals::Clients(8),
        requests: 1_000,
        ..BASE
    },
    Scenario {
        name: "c",
        description: "64 events at 10 ms, open loop 30/s",
        events: 64,
        pace: Duration::from_millis(10),
        load: Arrivals::Rate(30.0),
        requests: 240,
        ..BASE
    },
    Scenario {
        name: "d",
        description: "220 KB prompts, closed loop 16",
        requests: 3_000,
        prompt_bytes: 220_000,
        ..BASE
    },
    Scenario {
        name: "dr",
        description: "220 KB prompts, the same 16 over and over, closed loop 16",
        requests: 3_000,
        prompt_bytes: 220_000,
        prompts: Prompts::Repeated,
        ..BASE
    },
    Scenario {
        name: "dt",
        description: "220 KB prompts in tokens, the same 16 over and over, closed loop 16",
        requests: 1_000,
        prompt_bytes: 220_000,
        prompts: Prompts::Repeated,
        tokens: true,
        ..BASE
    },
    Scenario {
        name: "dn",
        description: "220 KB prompts in tokens, each of new random words, closed loop 4",
        load: Arrivals::Clients(4),
        requests: 100,
        prompt_bytes: 220_000,
        prompts: Prompts::NewWords,
        tokens: true,
        ..BASE
    },
    Scenario {
        name: "conv",
        description: "conversations of 20 turns in tokens, from 40 KB by 2.5 KB a turn, closed loop 4",
        load: Arrivals::Clients(4),
        requests: 800,
        prompt_bytes: 40_000,
        prompts: Prompts::Conversations,
        tokens: true,
        ..BASE
    },
    Scenario {
        name: "e",
        description: "P/D vLLM style, 32 events, closed loop 8 (nginx relays the calls of both legs)",
        shape: Shape::Disaggregated(Handshake::Vllm),
        events: 32,
        load: Arrivals::Clients(8),
        requests: 2_000,
        ..BASE
    },
    Scenario {
        name: "e2",
        description: "P/D SGLang style, 32 events, closed loop 8 (nginx relays the calls of both legs)",
        shape: Shape::Disaggregated(Handshake::Sglang),
        events: 32,
        load: Arrivals::Clients(8),
        requests: 2_000,
        ..BASE
    },
    Scenario {
        name: "f",
        description: "500 streams of 25 events at 200 ms, begun within 5 s",
        events: 25,
        pace: Duration::from_millis(200),
        load: Arrivals::Ramped(500, Duration::from_secs(5)),
        requests: 1_000,
        ..BASE
    },
    Scenario {
        name: "f0",
        description: "500 streams of 25 events at 200 ms, begun in one instant",
        events: 25,
        pace: Duration::from_millis(200),
        load: Arrivals::Clients(500),
        requests: 500,
        ..BASE
    },
    Scenario {
        name: "ff",
        description: "as f, after the index is full",
        events: 25,
        pace: Duration::from_millis(200),
        load: Arrivals::Ramped(500, Duration::from_secs(5)),
        requests: 1_000,
        fill: true,
        ..BASE
    },
    Scenario {
        name: "g",
        description: "1,000 workers, tiny, not streamed, closed loop 16",
        shape: Shape::Aggregated { workers: 1_000 },
        requests: 10_000,
        ..BASE
    },
    Scenario {
        name: "g4",
        description: "4,096 workers, tiny, not streamed, closed loop 16",
        shape: Shape::Aggregated { workers: 4_096 },
        requests: 5_000,
        ..BASE
    },
    Scenario {
        name: "g10",
        description: "10,000 workers, tiny, not streamed, closed loop 16",
        shape: Shape::Aggregated { workers: 10_000 },
        requests: 5_000,
        ..BASE
    },
];

/// Returns scenarios by name, or all if no name is given. Those that count tokens need a tokenizer.
pub(super) fn choose(names: &[String], tokenizer: bool) -> Vec<&'static Scenario> {
    const SCENARIOS: &[Scenario] = &ALL;
    let wanted = |one: &&Scenario| {
        (!one.tokens || tokenizer) && (names.is_empty() || names.iter().any(|name| name == one.name))
    };
    SCENARIOS.iter().filter(wanted).collect()
}

/// Returns the names of all scenarios.
pub(super) fn names() -> String {
    ALL.map(|scenario| scenario.name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn scenarios_are_chosen_by_name_and_tokenizer() {
        let names = |names: &[&str], tokenizer| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            choose(&names, tokenizer).iter().map(|one| one.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&["a", "dn"], false), ["a"]);
        assert_eq!(names(&["a", "dn"], true), ["a", "dn"]);
        assert_eq!(names(&[], true).len(), 16);
        assert!(names(&["z"], true).is_empty());
    }
}
