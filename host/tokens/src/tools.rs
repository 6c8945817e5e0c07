//! The `tools` of a request in the shape and key order that vLLM hands to a template.

use minijinja::Value;
use serde::Deserialize;

use crate::{
    error::EncodeError,
    template::json::{self, Json},
};

#[derive(Deserialize)]
struct Tool {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    function: Function,
    #[serde(default)]
    defer_loading: Option<bool>,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default)]
    parameters: Option<Json>,
    #[serde(default)]
    strict: Option<bool>,
    #[serde(default)]
    defer_loading: Option<bool>,
}

/// Reads the field; null is `None`.
///
/// vLLM parses tools into models and dumps them again: unknown keys fall away, known ones stand in the models' order, and
/// a description or parameters that are missing become null.
pub(crate) fn read(json: &str) -> Result<Option<Value>, EncodeError> {
    let tools: Option<Vec<Tool>> =
        serde_json::from_str(json).map_err(|error| EncodeError::invalid("tools", error))?;
    Ok(tools.map(|tools| json::list(tools.into_iter().map(shown))))
}

fn shown(tool: Tool) -> Value {
    let function = tool.function;
    let deferred = function.defer_loading.or(tool.defer_loading);
    let mut inner = vec![
        ("name", Value::from(function.name)),
        ("description", function.description.map_or(Value::from(()), Value::from)),
        ("parameters", function.parameters.map_or(Value::from(()), |Json(parameters)| parameters)),
    ];
    inner.extend(function.strict.map(|strict| ("strict", Value::from(strict))));
    inner.extend(deferred.map(|deferred| ("defer_loading", Value::from(deferred))));
    let kind = tool.kind.unwrap_or_else(|| "function".to_owned());
    let mut outer = vec![("type", Value::from(kind)), ("function", json::map(inner))];
    outer.extend(tool.defer_loading.map(|deferred| ("defer_loading", Value::from(deferred))));
    json::map(outer)
}
