//! Requests that arrive at random times, each at a random gateway: prompts with common beginnings, or turns
//! of agents' conversations.

use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;
use tokio::time::Instant;

use super::churn::Gateways;
use crate::load::at_times;

/// Number of common beginnings.
const GROUPS: usize = 32;
/// Length of a common beginning, characters.
const COMMON: usize = 6_000;
/// Text that a turn of a conversation adds, characters.
const TURN: std::ops::Range<usize> = 400..1_600;
/// Turns of a conversation, after which another one begins.
const TURNS: usize = 12;
/// Shortest time between two turns of a conversation, seconds. The answer of the first has ended by then.
const PAUSE: f64 = 8.0;

/// One request.
pub(super) struct Planned {
    at: Duration,
    /// Random number that chooses the gateway.
    draw: usize,
    body: String,
}

/// Results of the clients.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Times to the first token, milliseconds.
    pub(super) ttft: Vec<f64>,
    pub(super) failed: u64,
    /// Requests whose gateway was killed.
    pub(super) cut: u64,
    pub(super) problem: Option<String>,
}

/// A conversation that continues.
struct Conversation {
    text: String,
    turns: usize,
    /// Time of its last turn, seconds.
    last: f64,
}

/// Plans the requests of a seed.
pub(super) fn plan(seed: u64, rate: f64, time: Duration, agents: bool) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    let beginnings: Vec<String> = (0..GROUPS).map(|_| words(&mut random, COMMON)).collect();
    let mut conversations: Vec<Conversation> = Vec::new();
    let (mut at, mut plan) = (0.0_f64, Vec::new());
    loop {
        at -= random.random_range(f64::MIN_POSITIVE..1.0).ln() / rate;
        if at > time.as_secs_f64() {
            return plan;
        }
        // Some common beginnings occur more often than others.
        let group = random.random_range(0..GROUPS).min(random.random_range(0..GROUPS));
        let beginning = beginnings.get(group).map_or("", String::as_str);
        let prompt = if agents {
            turn(&mut random, &mut conversations, beginning, at)
        } else {
            let own = random.random_range(200..800);
            format!("{beginning}{}", words(&mut random, own))
        };
        let body = json!({
            "model": "tiny", "stream": true, "ignore_eos": true, "max_tokens": random.random_range(20..100),
            "messages": [{ "role": "user", "content": prompt }],
        });
        let draw = random.random_range(0..1_000_000);
        plan.push(Planned { at: Duration::from_secs_f64(at), draw, body: body.to_string() });
    }
}

/// Returns the prompt of the next turn of the conversation that waits longest, or of a new one if none waits.
fn turn(random: &mut StdRng, all: &mut Vec<Conversation>, beginning: &str, at: f64) -> String {
    all.retain(|one| one.turns < TURNS);
    let waits = |one: &&mut Conversation| one.last + PAUSE <= at;
    let longest = all.iter_mut().filter(waits).min_by(|one, other| one.last.total_cmp(&other.last));
    let added = random.random_range(TURN);
    let added = words(random, added);
    if let Some(one) = longest {
        one.text.push_str(&added);
        (one.turns, one.last) = (one.turns + 1, at);
        return one.text.clone();
    }
    let text = format!("{beginning}{added}");
    all.push(Conversation { text: text.clone(), turns: 1, last: at });
    text
}

fn words(random: &mut StdRng, length: usize) -> String {
    (0..length)
        .map(|place| if place % 7 == 6 { ' ' } else { char::from(b'a' + random.random_range(0..26_u8)) })
        .collect()
}

/// Sends the requests when they are due, and waits for all answers.
pub(super) async fn send(plan: &[Planned], gateways: &Gateways) -> Seen {
    let one = |place: usize| async move {
        let request = plan.get(place)?;
        let (gateway, client) = gateways.choose(request.draw)?;
        let begun = Instant::now();
        let streamed = client.stream_chat(&[], request.body.clone()).await;
        let was_cut = gateways.was_killed_since(gateway, begun);
        Some((streamed, was_cut))
    };
    let mut seen = Seen::default();
    for (streamed, was_cut) in
        at_times(plan.iter().map(|request| request.at), one).await.into_iter().flatten()
    {
        match streamed.ttft.filter(|_| streamed.complete) {
            Some(ttft) => seen.ttft.push(ttft.as_secs_f64() * 1_000.0),
            None if was_cut => seen.cut += 1,
            None => {
                seen.failed += 1;
                seen.problem = seen.problem.take().or(streamed.problem);
            }
        }
    }
    seen
}
