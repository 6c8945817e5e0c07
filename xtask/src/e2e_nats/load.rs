//! Requests that arrive at random times, each at a random gateway, many of them with a common beginning.

use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;

use crate::{client::Client, load::at_times};

/// Number of common beginnings.
const GROUPS: usize = 32;
/// Length of a common beginning, characters.
const COMMON: usize = 6_000;

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
    pub(super) problem: Option<String>,
}

/// Plans the requests of a seed.
pub(super) fn plan(seed: u64, rate: f64, time: Duration) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    let beginnings: Vec<String> = (0..GROUPS).map(|_| words(&mut random, COMMON)).collect();
    let (mut at, mut plan) = (0.0_f64, Vec::new());
    loop {
        at -= random.random_range(f64::MIN_POSITIVE..1.0).ln() / rate;
        if at > time.as_secs_f64() {
            return plan;
        }
        // Some common beginnings occur more often than others.
        let group = random.random_range(0..GROUPS).min(random.random_range(0..GROUPS));
        let own = random.random_range(200..800);
        let beginning = beginnings.get(group).map_or("", String::as_str);
        let prompt = format!("{beginning}{}", words(&mut random, own));
        let body = json!({
            "model": "tiny", "stream": true, "ignore_eos": true, "max_tokens": random.random_range(20..100),
            "messages": [{ "role": "user", "content": prompt }],
        });
        let draw = random.random_range(0..1_000_000);
        plan.push(Planned { at: Duration::from_secs_f64(at), draw, body: body.to_string() });
    }
}

fn words(random: &mut StdRng, length: usize) -> String {
    (0..length)
        .map(|place| if place % 7 == 6 { ' ' } else { char::from(b'a' + random.random_range(0..26_u8)) })
        .collect()
}

/// Sends the requests when they are due, and waits for all answers.
pub(super) async fn send(plan: &[Planned], gateways: &[Client]) -> Seen {
    let one = |place: usize| async move {
        let request = plan.get(place)?;
        let client = gateways.get(request.draw % gateways.len().max(1))?;
        Some(client.stream_chat(&[], request.body.clone()).await)
    };
    let mut seen = Seen::default();
    for streamed in at_times(plan.iter().map(|request| request.at), one).await.into_iter().flatten() {
        match streamed.ttft.filter(|_| streamed.complete) {
            Some(ttft) => seen.ttft.push(ttft.as_secs_f64() * 1_000.0),
            None => {
                seen.failed += 1;
                seen.problem = seen.problem.take().or(streamed.problem);
            }
        }
    }
    seen
}
