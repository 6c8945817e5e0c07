//! A canary of a deployment's health checks: token ids and `_HEALTH_CHECK`, without model and prompt [A1]. It
//! is turned into a completion, which the engines know.

use bytes::Bytes;
use json_splice::JsonBody;
use serde_json::Value;

/// The key of the probe flag.
const FLAG: &str = "_HEALTH_CHECK";

/// Returns the completion that a canary stands for; `None` if the body is something else. `model` names the
/// model when the canary does not.
pub(crate) fn completion(
    canary: &JsonBody,
    model: impl FnOnce(&JsonBody) -> Option<String>,
) -> Option<Bytes> {
    let is_canary = canary.get(FLAG) == Some("true")
        && ["prompt", "messages"].iter().all(|key| canary.get(key).is_none());
    let ids = canary.get("token_ids").filter(|_| is_canary)?;
    let named = canary.get("model").map(str::to_owned);
    let model = named.or_else(|| model(canary).map(|model| Value::from(model).to_string()))?;
    let inner = |object: &str, key: &str| {
        let object = canary.object(object)?.ok()?;
        object.get(key).map(str::to_owned)
    };
    let tokens = inner("stop_conditions", "max_tokens").unwrap_or_else(|| "1".to_owned());
    let temperature = inner("sampling_options", "temperature").unwrap_or_else(|| "0".to_owned());
    let stream = canary.get("stream").unwrap_or("false");
    let hints = canary.get("nvext").unwrap_or("{}");
    let text = format!(
        r#"{{"model":{model},"prompt":{ids},"max_tokens":{tokens},"temperature":{temperature},"stream":{stream},"nvext":{hints},"{FLAG}":true}}"#
    );
    Some(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a1_a_canary_of_token_ids_becomes_a_completion() {
        let expand = |body: &'static str| {
            completion(&JsonBody::parse(body.into()).unwrap(), |_| Some("m\"".to_owned()))
        };
        let minimal = expand(r#"{"token_ids":[1,2],"_HEALTH_CHECK":true}"#).unwrap();
        let expected = r#"{"model":"m\"","prompt":[1,2],"max_tokens":1,"temperature":0,"stream":false,"nvext":{},"_HEALTH_CHECK":true}"#;
        assert_eq!(minimal, expected);
        let whole = r#"{"model":"x","token_ids":[1],"stop_conditions":{"max_tokens":3,"ignore_eos":true},"sampling_options":{"temperature":0.5},"eos_token_ids":[],"mdc_sum":"a","_HEALTH_CHECK":true}"#;
        let whole = expand(whole).unwrap();
        assert!(
            whole.starts_with(br#"{"model":"x","prompt":[1],"max_tokens":3,"temperature":0.5,"#),
            "{whole:?}"
        );
        for other in [
            r#"{"model":"x","prompt":"_HEALTH_CHECK"}"#,
            r#"{"token_ids":[1],"_HEALTH_CHECK":false}"#,
            r#"{"prompt":[1],"token_ids":[1],"_HEALTH_CHECK":true}"#,
            r#"{"_HEALTH_CHECK":true}"#,
            "{}",
        ] {
            assert_eq!(expand(other), None, "{other}");
        }
    }
}
