//! Converts the `tools` of a request to the form and key order that vLLM passes to a template.

use minijinja::Value;
use serde::Deserialize;

use crate::{
    error::EncodeError,
    json::{self, Json},
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

/// Parses the field; null becomes `None`.
///
/// vLLM parses tools into data models and serialises them again. So unknown keys are dropped, known ones
/// follow the models' order, and a missing description or missing parameters become null.
pub(crate) fn read(json: &str) -> Result<Option<Value>, EncodeError> {
    let tools: Option<Vec<Tool>> =
        serde_json::from_str(json).map_err(|error| EncodeError::invalid("tools", error))?;
    Ok(tools.map(|tools| json::list(tools.into_iter().map(tool_value))))
}

fn tool_value(tool: Tool) -> Value {
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
