//! Bodies of the requests of a run.

use bytes::Bytes;

use super::scenario::{Prompts, Scenario};

/// Number of turns of a conversation.
const TURNS: u64 = 20;
/// Number of bytes that a turn adds, once for the question and once for the answer.
const TURN_BYTES: usize = 1_250;
/// Number of bytes at the start of a prompt that make it distinct. A block of text is longer.
const NEW_START: usize = 48;
/// Text after which the prompt of a body begins.
const START: &str = "prompt ";
/// Text between two messages of a conversation, and after the last one.
const END: &str = r#""}]}"#;

/// Returns the body of each request.
#[derive(Debug)]
pub(super) struct Bodies {
    prompts: Prompts,
    /// Bodies whose prompts differ in their first words.
    written: Vec<Bytes>,
    /// Seed that gives each run other new words.
    seed: u64,
    /// Number of bytes of a conversation's first turn.
    first_turn: usize,
}

impl Bodies {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let stream = scenario.events > 0;
        let write = |turn| body(&prompt(turn, scenario.prompt_bytes), stream, scenario.events);
        let written = match scenario.prompts {
            Prompts::Repeated => (0..16).map(write).collect(),
            _ => vec![write(0)],
        };
        Self { prompts: scenario.prompts, written, seed: rand::random(), first_turn: scenario.prompt_bytes }
    }

    /// Returns long prompts that no earlier run sent, to fill a prefix index.
    pub(super) fn to_fill() -> Self {
        Self {
            prompts: Prompts::Distinct,
            written: vec![body(&prompt(0, 220_000), false, 1)],
            seed: rand::random(),
            first_turn: 0,
        }
    }

    /// Returns the body of request `turn` of a run, which is the `own`th request of `client`.
    pub(super) fn of(&self, turn: u64, client: u64, own: u64) -> Bytes {
        let place = usize::try_from(turn).unwrap_or(0) % self.written.len().max(1);
        let written = self.written.get(place).cloned().unwrap_or_default();
        match self.prompts {
            Prompts::Repeated => written,
            Prompts::Distinct => with_random_words(&written, self.seed ^ turn << 8, NEW_START),
            Prompts::NewWords => with_random_words(&written, self.seed ^ turn << 8, usize::MAX),
            Prompts::Conversations => self.turn(client, own),
        }
    }

    fn turn(&self, client: u64, own: u64) -> Bytes {
        // The twenty turns of a conversation share their text. No other conversation has this text.
        let seed = self.seed ^ (client << 40) ^ (own / TURNS) << 8;
        let (text, ends) = conversation(self.first_turn, seed);
        let end = ends.get(usize::try_from(own % TURNS).unwrap_or(0)).copied().unwrap_or(text.len());
        let mut body = text.get(..end).unwrap_or_default().as_bytes().to_vec();
        body.extend_from_slice(END.as_bytes());
        body.into()
    }
}

pub(super) fn body(prompt: &str, stream: bool, events: u32) -> Bytes {
    let tokens = events.max(1);
    let message = format!(r#"[{{"role":"user","content":"{prompt}"}}]"#);
    format!(r#"{{"model":"tiny","stream":{stream},"max_tokens":{tokens},"messages":{message}}}"#).into()
}

pub(super) fn prompt(turn: usize, bytes: usize) -> String {
    let mut text = format!("{START}{turn} ");
    while text.len() < bytes {
        text.push_str("the quick brown fox jumps over the lazy dog ");
    }
    text.truncate(bytes);
    text
}

/// Returns a body of `first` bytes and twenty turns, whose text consists of English words, and the ends of
/// its turns.
fn conversation(first: usize, seed: u64) -> (String, Vec<usize>) {
    let mut words = Words(seed);
    let mut text =
        r#"{"model":"tiny","stream":false,"max_tokens":1,"messages":[{"role":"user","content":""#.to_owned();
    text.push_str(START);
    words.add(&mut text, first);
    let mut ends = vec![text.len()];
    for _ in 1..TURNS {
        for role in ["assistant", "user"] {
            text.push_str(&format!(r#""}},{{"role":"{role}","content":""#));
            words.add(&mut text, TURN_BYTES);
        }
        ends.push(text.len());
    }
    (text, ends)
}

/// Words in a random order, which depends only on the number.
#[derive(Debug)]
struct Words(u64);

impl Words {
    const LIST: &str = "the of and a to in is you that it he was for on are as with his they at be this have from \
        or one had by word but not what all were we when your can said there use an each which she do how their \
        if will up other about out many then them these so some her would make like him into time has look two \
        more write go see number no way could people my than first water been call who oil its now find long \
        down day did get come made may part request engine decode prefill memory latency gateway scheduler";

    fn add(&mut self, text: &mut String, bytes: usize) {
        let list: Vec<&str> = Self::LIST.split_whitespace().collect();
        let end = text.len() + bytes;
        while text.len() < end {
            let place = usize::try_from(next(&mut self.0) >> 40).unwrap_or(0) % list.len();
            text.push_str(list.get(place).copied().unwrap_or_default());
            text.push(' ');
        }
    }
}

/// A linear congruential generator (Knuth, MMIX): it is fast without optimisation, and random enough for
/// letters.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state
}

/// Replaces at most the first `most` bytes of a body's prompt with random words of the same length.
fn with_random_words(body: &[u8], seed: u64, most: usize) -> Bytes {
    let mut body = body.to_vec();
    let start = body.windows(START.len()).position(|window| window == START.as_bytes()).unwrap_or(0);
    let end = body.len().saturating_sub(END.len()).min(start.saturating_add(most));
    let mut state = seed | 1;
    for (place, letter) in body.get_mut(start..end).unwrap_or_default().iter_mut().enumerate() {
        let letters = (next(&mut state) >> 40) % 26;
        *letter = if place % 6 == 5 { b' ' } else { b'a' + u8::try_from(letters).unwrap_or(0) };
    }
    body.into()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{Bodies, body, prompt, with_random_words};
    use crate::bench::gateway::scenario::choose;

    #[test]
    fn bodies_with_random_words_stay_json_and_differ() {
        let original = body(&prompt(3, 500), true, 8);
        for most in [48, usize::MAX] {
            let [one, other] = [1_u64 << 8, 2 << 8].map(|seed| with_random_words(&original, seed, most));
            assert_ne!(one, other);
            for body in [&original, &one, &other] {
                let json: Value = serde_json::from_slice(body).unwrap();
                assert_eq!(json["max_tokens"], 8);
                assert_eq!(json["messages"][0]["content"].as_str().map(str::len), Some(500));
            }
        }
    }

    #[test]
    fn a_turn_repeats_the_one_before_and_another_conversation_begins_otherwise() {
        let scenario = choose(&["conv"], true).unwrap().remove(0);
        let bodies = Bodies::new(&scenario);
        let contents = |body: &[u8]| -> Vec<String> {
            let json: Value = serde_json::from_slice(body).unwrap();
            let messages = json["messages"].as_array().unwrap().iter();
            messages.map(|message| message["content"].as_str().unwrap().to_owned()).collect()
        };
        let turns: Vec<_> = (0..21).map(|own| contents(&bodies.of(0, 3, own))).collect();
        for (place, turn) in turns.iter().take(20).enumerate() {
            assert_eq!(turn.len(), 1 + 2 * place);
            assert_eq!(turn[..], turns[19][..turn.len()]);
        }
        assert_eq!(turns[20].len(), 1);
        assert_ne!(turns[20][0], turns[0][0]);
        assert_ne!(contents(&bodies.of(0, 4, 0)), turns[0]);
    }
}
