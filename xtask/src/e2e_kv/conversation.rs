//! A conversation with several turns, each of which repeats all earlier ones.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::client::{CHAT, Client};

const SUBJECTS: [&str; 7] = ["trains", "points", "signals", "sidings", "junctions", "yards", "sheds"];

/// Kind of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    ChatWithTools,
    Completion,
}

/// Runs a conversation with this number of turns. It begins like the other conversations on its subject.
pub(super) async fn hold(
    client: &Client,
    seed: u64,
    turns: usize,
    requests: &AtomicU64,
) -> anyhow::Result<()> {
    let subject = SUBJECTS[usize::try_from(seed % 7).unwrap_or(0)];
    let kind = match seed % 3 {
        0 => Kind::Chat,
        1 => Kind::ChatWithTools,
        _ => Kind::Completion,
    };
    let beginning = format!("You know all about {subject}. ").repeat(12);
    let mut text = beginning.clone();
    let mut messages = vec![json!({ "role": "system", "content": beginning })];
    for turn in 0..turns {
        let base = (seed + 13 * turn as u64) * 31;
        let question: String = (0..40).map(|word| format!("{subject} {} ", base + word)).collect();
        text.push_str(&question);
        messages.push(json!({ "role": "user", "content": question }));
        let (path, body) = request(kind, subject, &text, &messages);
        let answer: Value = serde_json::from_str(&client.post(path, body.to_string()).await?)?;
        requests.fetch_add(1, Ordering::Relaxed);
        let choice = &answer["choices"][0];
        let reply = choice["text"].as_str().or(choice["message"]["content"].as_str());
        let reply = reply.with_context(|| format!("the answer has no text: {answer}"))?;
        text.push_str(reply);
        messages.push(json!({ "role": "assistant", "content": reply }));
        if kind == Kind::ChatWithTools {
            let call = json!({ "name": format!("set_{subject}"), "arguments": "{\"to\": \"four\"}" });
            messages.push(json!({ "role": "assistant", "content": null,
                "tool_calls": [{ "id": "call-1", "type": "function", "function": call }] }));
            messages.push(json!({ "role": "tool", "tool_call_id": "call-1", "content": "set" }));
        }
        // This is the time in which a user reads the answer. The engine's KV events arrive in it.
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    Ok(())
}

fn request(kind: Kind, subject: &str, text: &str, messages: &[Value]) -> (&'static str, Value) {
    let mut body = json!({ "model": "tiny", "max_tokens": 16, "temperature": 0, "ignore_eos": true });
    if kind == Kind::Completion {
        body["prompt"] = json!(text);
        return ("/v1/completions", body);
    }
    body["messages"] = json!(messages);
    if kind == Kind::ChatWithTools {
        let parameters = json!({ "type": "object", "properties": { "to": { "type": "string" } } });
        body["tools"] = json!([{ "type": "function", "function": {
            "name": format!("set_{subject}"), "description": "Sets points.", "parameters": parameters,
        } }]);
        body["tool_choice"] = json!("none");
    }
    (CHAT, body)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Kind, request};

    #[test]
    fn requests_by_kind() {
        let messages = [json!({ "role": "user", "content": "x" })];
        let (path, body) = request(Kind::Completion, "points", "text", &messages);
        assert_eq!((path, &body["prompt"]), ("/v1/completions", &json!("text")));
        let (path, body) = request(Kind::ChatWithTools, "points", "text", &messages);
        assert_eq!(path, "/v1/chat/completions");
        assert_eq!(body["tools"][0]["function"]["name"], "set_points");
        assert!(request(Kind::Chat, "points", "", &messages).1["tools"].is_null());
    }
}
