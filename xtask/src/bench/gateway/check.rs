//! Checks before a measurement that counts tokens: every router does the same work.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::{
    clients::{LIMIT, headers},
    jwt::authorization,
    prompts::Bodies,
    routers::Running,
    scenario::Scenario,
};
use crate::client::CHAT;

/// How often a prompt is sent. A router that chose one of four workers at random would find the cache each
/// time after the first in one of 64 checks.
const REPEATS: u64 = 4;
/// Time in which an engine's event about a new prompt reaches the router.
const EVENT_DELAY: Duration = Duration::from_millis(300);

/// Sends one prompt several times. Each answer must have as many tokens as were asked for. Behind a router
/// that follows tokens, the engine must have the prompt in its cache from the second time on.
pub(super) async fn answers(scenario: &Scenario, router: &Running) -> anyhow::Result<()> {
    let body = Bodies::new(scenario).of(0, 0, 0);
    for time in 0..REPEATS {
        let header = authorization(router.issuer.as_deref(), 0, time)?;
        let answer = router.client.stream(CHAT, &headers(&header), body.clone()).await?;
        ensure!(answer.status == 200, "a request was answered with status {}", answer.status);
        let answer = timeout(LIMIT, answer.rest()).await.context("an answer did not end")??;
        let answer: Value = serde_json::from_str(&answer)?;
        let cached = usage(&answer, scenario.events.max(1).into())?;
        ensure!(
            time == 0 || cached > 0 || !router.kind.follows_tokens(),
            "the same prompt was sent {} times and went to a worker without it: the router does not follow tokens",
            time + 1
        );
        sleep(EVENT_DELAY).await;
    }
    Ok(())
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
