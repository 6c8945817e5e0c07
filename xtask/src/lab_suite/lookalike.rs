//! Traces that resemble Mooncake's public ones, so that the matrix needs only files of the repository.
//!
//! | trace | requests/hour | mean prompt | mean answer | cached by an unlimited cache |
//! | --- | --- | --- | --- | --- |
//! | conversation, public | 12,031 | 12,035 | 343 | 0.40 |
//! | synthetic, public | 3,993 | 15,325 | 149 | 0.66 |
//!
//! A test compares the generated traces with these figures (Mooncake, FAST '25, table 3).

use std::fmt::Write as _;

use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

/// Number of tokens in a block.
pub(super) const BLOCK: u32 = 512;
/// Maximum number of tokens of a prompt.
const MAX_PROMPT: u32 = 120_000;

/// Sessions whose prompts begin with the prompt and the answer of the previous turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lookalike {
    /// Number of blocks at the beginning of every prompt.
    shared_blocks: u32,
    /// Range of the number of tokens of a session's first prompt. Small numbers come more often, as in the
    /// other ranges (log-uniform).
    first: (f64, f64),
    /// Range of the number of tokens that a later turn adds to the previous answer.
    more: (f64, f64),
    answer: (f64, f64),
    /// Mean number of turns (geometric).
    turns: f64,
    /// Mean time between two turns, seconds (exponential).
    pause_s: f64,
}

pub(super) const CONVERSATION: Lookalike = Lookalike {
    shared_blocks: 1,
    first: (500.0, 40_000.0),
    more: (50.0, 16_000.0),
    answer: (20.0, 1_500.0),
    turns: 1.7,
    pause_s: 30.0,
};

pub(super) const SYNTHETIC: Lookalike = Lookalike {
    shared_blocks: 0,
    first: (2_000.0, 45_000.0),
    more: (20.0, 2_000.0),
    answer: (10.0, 600.0),
    turns: 3.2,
    pause_s: 20.0,
};

impl Lookalike {
    /// Returns a trace as Mooncake's JSONL, with `requests` requests at a mean rate of `rate` a second. Equal
    /// seeds give equal traces.
    pub(super) fn generate(&self, requests: usize, rate: f64, seed: u64) -> Result<String, std::fmt::Error> {
        let mut rng = SmallRng::seed_from_u64(seed);
        let (mut start, mut lines, mut fresh) = (0.0, Vec::new(), u64::from(self.shared_blocks));
        // There must be so many sessions that no turn of a later session can be among the first requests.
        while lines.len() < 2 * requests {
            self.session(&mut rng, start, &mut fresh, &mut lines);
            start += exponential(&mut rng, self.turns / rate);
        }
        lines.sort_by(|one: &Line, other| one.at.total_cmp(&other.at));
        let mut text = String::new();
        for line in lines.iter().take(requests) {
            let Line { at, input, output, blocks } = line;
            let timestamp = at * 1e3;
            write!(text, r#"{{"timestamp":{timestamp:.3},"input_length":{input},"output_length":{output},"#)?;
            writeln!(text, r#""hash_ids":{blocks:?}}}"#)?;
        }
        Ok(text)
    }

    fn session(&self, rng: &mut SmallRng, start: f64, fresh: &mut u64, lines: &mut Vec<Line>) {
        let mut blocks: Vec<u64> = (0..u64::from(self.shared_blocks)).collect();
        let (mut at, mut input) = (start, self.shared_blocks * BLOCK + between(rng, self.first));
        while input <= MAX_PROMPT {
            let output = between(rng, self.answer);
            // In the next turn, the last block contains further tokens, so it is not shared.
            let full = (input / BLOCK) as usize;
            while blocks.len() < full {
                blocks.push(next(fresh));
            }
            let partial = (input % BLOCK > 0).then(|| next(fresh));
            let all = blocks.iter().copied().chain(partial).collect();
            lines.push(Line { at, input, output, blocks: all });
            if rng.random::<f64>() < 1.0 / self.turns {
                return;
            }
            input += output + between(rng, self.more);
            at += exponential(rng, self.pause_s);
        }
    }
}

/// One request.
struct Line {
    /// Time of arrival, seconds.
    at: f64,
    input: u32,
    output: u32,
    blocks: Vec<u64>,
}

fn next(fresh: &mut u64) -> u64 {
    *fresh += 1;
    *fresh
}

/// Returns a whole number from `low` to `high`; small numbers come more often (log-uniform).
fn between(rng: &mut SmallRng, (low, high): (f64, f64)) -> u32 {
    (low.ln() + (high / low).ln() * rng.random::<f64>()).exp() as u32
}

fn exponential(rng: &mut SmallRng, mean: f64) -> f64 {
    -mean * (1.0 - rng.random::<f64>()).ln()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use serde_json::Value;

    use super::*;

    fn parse(text: &str) -> Vec<Value> {
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_trace_has_the_lengths_and_the_reuse_of_the_public_one() {
        for (kind, prompt, answer, cached) in
            [(CONVERSATION, 12_035.0, 343.0, 0.40), (SYNTHETIC, 15_325.0, 149.0, 0.66)]
        {
            let lines = parse(&kind.generate(8_000, 3.0, 5).unwrap());
            let mean = |key: &str| {
                let sum: f64 = lines.iter().map(|line| line[key].as_f64().unwrap()).sum();
                sum / lines.len() as f64
            };
            let (mut seen, mut hits, mut all) = (HashSet::new(), 0, 0);
            for line in &lines {
                let blocks: Vec<u64> =
                    line["hash_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
                let tokens = line["input_length"].as_u64().unwrap();
                assert_eq!(blocks.len() as u64, tokens.div_ceil(u64::from(BLOCK)));
                hits += blocks.iter().filter(|block| !seen.insert(**block)).count();
                all += blocks.len();
            }
            let near = |value: f64, public: f64| (value / public - 1.0).abs() < 0.2;
            let hit_rate = hits as f64 / all as f64;
            let found = (mean("input_length"), mean("output_length"), hit_rate);
            let similar = near(found.0, prompt) && near(found.1, answer) && near(found.2, cached);
            assert!(similar, "{found:?}, public: {prompt} {answer} {cached}");
        }
    }

    #[test]
    fn equal_seeds_give_equal_traces_at_the_asked_rate() {
        let trace = |seed| SYNTHETIC.generate(5_000, 10.0, seed).unwrap();
        assert_eq!(trace(1), trace(1));
        assert_ne!(trace(1), trace(2));
        let last = parse(&trace(1)).last().unwrap()["timestamp"].as_f64().unwrap() / 1e3;
        assert!((450.0..600.0).contains(&last), "{last}");
    }
}
