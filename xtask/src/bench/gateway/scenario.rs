//! Load shapes that routers are measured under.

use std::time::Duration;

/// What stands behind the router.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    /// Workers that serve whole requests.
    Aggregated { workers: usize },
    /// Two prefill and two decode workers.
    Disaggregated(Handshake),
}

/// How the engines of a pair find each other's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handshake {
    Vllm,
    Sglang,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Load {
    /// By this many clients, each as soon as its last request ended.
    Closed(u32),
    /// This many a second, independent of answers.
    Open(u32),
}

/// One scenario.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    pub(super) shape: Shape,
    /// Time between events of a stream.
    pub(super) pace: Duration,
    /// Events of a stream; 0: the answer is not streamed.
    pub(super) events: u32,
    pub(super) load: Load,
    pub(super) requests: u64,
    pub(super) prompt_bytes: usize,
    /// The gateway counts tokens, which requires `--tokenizer`.
    pub(super) tokens: bool,
    /// Every prompt consists of new random words.
    pub(super) unique: bool,
}

const BASE: Scenario = Scenario {
    name: "",
    description: "",
    shape: Shape::Aggregated { workers: 4 },
    pace: Duration::ZERO,
    events: 0,
    load: Load::Closed(16),
    requests: 0,
    prompt_bytes: 60,
    tokens: false,
    unique: false,
};

const ALL: [Scenario; 10] = [
    Scenario { name: "a", description: "tiny, not streamed, closed loop 16", requests: 20_000, ..BASE },
    Scenario {
        name: "b",
        description: "128 events at full speed, closed loop 8",
        events: 128,
        load: Load::Closed(8),
        requests: 1_000,
        ..BASE
    },
    Scenario {
        name: "c",
        description: "64 events at 10 ms, open loop 30/s",
        events: 64,
        pace: Duration::from_millis(10),
        load: Load::Open(30),
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
        name: "dt",
        description: "220 KB prompts in tokens, the same 16 prompts over and over, closed loop 16",
        requests: 1_000,
        prompt_bytes: 220_000,
        tokens: true,
        ..BASE
    },
    Scenario {
        name: "dc",
        description: "220 KB prompts in tokens, each of new random words, closed loop 4",
        load: Load::Closed(4),
        requests: 100,
        prompt_bytes: 220_000,
        tokens: true,
        unique: true,
        ..BASE
    },
    Scenario {
        name: "e",
        description: "P/D vLLM style, 32 events, closed loop 8 (nginx relays the calls of both legs)",
        shape: Shape::Disaggregated(Handshake::Vllm),
        events: 32,
        load: Load::Closed(8),
        requests: 2_000,
        ..BASE
    },
    Scenario {
        name: "e2",
        description: "P/D SGLang style, 32 events, closed loop 8 (nginx relays the calls of both legs)",
        shape: Shape::Disaggregated(Handshake::Sglang),
        events: 32,
        load: Load::Closed(8),
        requests: 2_000,
        ..BASE
    },
    Scenario {
        name: "f",
        description: "500 streams of 25 events at 200 ms",
        events: 25,
        pace: Duration::from_millis(200),
        load: Load::Closed(500),
        requests: 500,
        ..BASE
    },
    Scenario {
        name: "g",
        description: "1,000 workers, tiny, not streamed, closed loop 16",
        shape: Shape::Aggregated { workers: 1_000 },
        requests: 10_000,
        ..BASE
    },
];

/// Scenarios by name, all when no name is given; those that count tokens only with a tokenizer.
pub(super) fn choose(names: &[String], tokenizer: bool) -> Vec<&'static Scenario> {
    const SCENARIOS: &[Scenario] = &ALL;
    let wanted = |one: &&Scenario| {
        (!one.tokens || tokenizer) && (names.is_empty() || names.iter().any(|name| name == one.name))
    };
    SCENARIOS.iter().filter(wanted).collect()
}

/// Names of all scenarios.
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
        assert_eq!(names(&["a", "dc"], false), ["a"]);
        assert_eq!(names(&["a", "dc"], true), ["a", "dc"]);
        assert_eq!(names(&[], true).len(), 10);
        assert!(names(&["z"], true).is_empty());
    }
}
