//! Checks, before a measurement that counts tokens, that every router does the same work.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::{prompts::Bodies, routers::Running, scenario::Scenario};
use crate::client::{CHAT, LIMIT};

/// Number of prompts that are sent twice.
const PROMPTS: u64 = 6;
/// Number of prompts whose second answer must come from a worker that has the prompt in its cache. One event
/// may be late on a busy machine. A router that chose one of four workers at random would pass one check in
/// 200.
const FOUND: usize = 5;
/// Maximum time until an engine's event about a new prompt reaches the router.
const EVENT_DELAY: Duration = Duration::from_millis(300);

/// Sends new prompts twice each. Each answer must have the requested number of tokens. Behind a router that
/// follows tokens, the second answer must come from an engine that has the prompt in its cache.
pub(super) async fn answers(scenario: &Scenario, router: &Running) -> anyhow::Result<()> {
    let (bodies, wanted) = (Bodies::new(scenario), u64::from(scenario.events.max(1)));
    let mut found = 0;
    for place in 0..PROMPTS {
        let body = bodies.of(place, place, 0);
        usage(&answer(router, body.clone()).await?, wanted)?;
        sleep(EVENT_DELAY).await;
        found += usize::from(usage(&answer(router, body).await?, wanted)? > 0);
    }
    ensure!(
        found >= FOUND || !router.kind.follows_tokens(),
        "{found} of {PROMPTS} prompts went to a worker that had them: the router does not follow tokens"
    );
    Ok(())
}

async fn answer(router: &Running, body: Bytes) -> anyhow::Result<Value> {
    let answer = router.client.stream(CHAT, &[], body).await?;
    ensure!(answer.status == 200, "a request was answered with status {}", answer.status);
    let text = timeout(LIMIT, answer.rest()).await.context("an answer did not end")??;
    Ok(serde_json::from_str(&text)?)
}

/// Returns the number of cached tokens of an answer that has `wanted` tokens.
fn usage(answer: &Value, wanted: u64) -> anyhow::Result<u64> {
    let usage = &answer["usage"];
    let tokens = &usage["completion_tokens"];
    ensure!(*tokens == wanted, "an answer of {tokens} tokens instead of {wanted} cannot be compared");
    Ok(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::usage;

    #[test]
    fn an_answer_of_another_length_is_refused() {
        let answer = |tokens| json!({ "usage": { "completion_tokens": tokens, "prompt_tokens_details": { "cached_tokens": 9 } } });
        assert_eq!(usage(&answer(1), 1).unwrap(), 9);
        assert_eq!(usage(&json!({ "usage": { "completion_tokens": 1 } }), 1).unwrap(), 0);
        let error = usage(&answer(2), 1).unwrap_err().to_string();
        assert_eq!(error, "an answer of 2 tokens instead of 1 cannot be compared");
        assert!(usage(&json!({}), 1).is_err());
    }
}
