//! Converts the messages of a request to the form that vLLM passes to a template.
//!
//! Follows `vllm/renderers/chat_utils.py` of vLLM 0.32: which keys remain, their order, and how parts are
//! joined.

mod known;
mod part;
mod value;

use minijinja::{Value, value::ValueKind};
use serde::Deserialize;

pub(crate) use self::known::{KnownMessage, KnownMessages};
use self::{
    part::{Part, read_part},
    value::MessageValue,
};
use crate::{
    content_format::ContentFormat,
    error::EncodeError,
    json::{self, Json},
};

/// A message in template form.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    role: String,
    content: Content,
    /// Keys other than role and content, in the order in which templates see them.
    rest: Vec<(&'static str, Value)>,
}

#[derive(Clone, Debug)]
enum Content {
    Text(Value),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Message {
    role: String,
    #[serde(default)]
    content: Option<Json>,
    #[serde(default)]
    name: Option<Json>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCall>>,
    #[serde(default)]
    tool_call_id: Option<Json>,
    #[serde(default)]
    reasoning: Option<Json>,
    #[serde(default)]
    reasoning_content: Option<Json>,
    #[serde(default)]
    task: Option<Json>,
    #[serde(default)]
    tools: Option<Json>,
}

#[derive(Deserialize)]
struct ToolCall {
    #[serde(default)]
    id: Option<Json>,
    function: Function,
    #[serde(rename = "type", default)]
    kind: Option<String>,
}

#[derive(Deserialize)]
struct Function {
    #[serde(default)]
    arguments: Option<Json>,
    name: String,
}

/// Parses the `messages` of a request.
pub(crate) fn read(json: &str, format: ContentFormat) -> Result<Vec<Turn>, EncodeError> {
    let messages: Vec<Message> =
        serde_json::from_str(json).map_err(|error| EncodeError::invalid("messages", error))?;
    messages.into_iter().map(|message| turn(message, format)).collect()
}

/// Parses one message; `None` if it is not valid.
fn read_one(json: &str, format: ContentFormat) -> Option<Turn> {
    turn(serde_json::from_str(json).ok()?, format).ok()
}

/// Replaces the role `developer` by `system`, and moves all system messages to the front. For templates
/// without `developer`.
pub(crate) fn without_developer(turns: Vec<Turn>) -> Vec<Turn> {
    if !turns.iter().any(Turn::is_developer) {
        return turns;
    }
    let mut turns = turns;
    for turn in turns.iter_mut().filter(|turn| turn.is_developer()) {
        turn.role = "system".to_owned();
        turn.rest.retain(|(key, _)| *key != "tools");
    }
    if turns.iter().skip(1).all(|turn| turn.role != "system") {
        return turns;
    }
    let (system, others): (Vec<Turn>, Vec<Turn>) = turns.into_iter().partition(|turn| turn.role == "system");
    let texts: Vec<String> =
        system.iter().map(|turn| turn.content.joined()).filter(|text| !text.is_empty()).collect();
    let content = Content::Text(Value::from(texts.join("\n\n")));
    std::iter::once(Turn { role: "system".to_owned(), content, rest: Vec::new() }).chain(others).collect()
}

/// Appends `tag` to the text of the last message. Returns the text without it.
pub(crate) fn tag_last(turns: &mut [Turn], tag: &str) -> Result<String, EncodeError> {
    const FIELD: &str = "continue_final_message";
    let last = turns.last_mut().ok_or_else(|| EncodeError::invalid(FIELD, "there is no message"))?;
    let text = match &mut last.content {
        Content::Text(text) => Some(text),
        Content::Parts(parts) => parts.iter_mut().rev().find_map(Part::text_mut),
    };
    let text = text.ok_or_else(|| EncodeError::invalid(FIELD, "the last message has no text"))?;
    let whole = text.as_str().unwrap_or_default().to_owned();
    *text = Value::from(format!("{whole}{tag}"));
    Ok(whole)
}

impl From<&Turn> for Value {
    fn from(turn: &Turn) -> Self {
        let content = match &turn.content {
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => json::list(parts.iter().cloned().map(Value::from)),
        };
        MessageValue::of(Value::from(&turn.role), content, turn.rest.clone())
    }
}

impl Turn {
    /// Returns whether the role is `developer`.
    pub(crate) fn is_developer(&self) -> bool {
        self.role == "developer"
    }

    /// Returns the texts that templates mostly print as they are.
    fn texts(&self) -> impl Iterator<Item = &Value> {
        let (one, parts) = match &self.content {
            Content::Text(text) => (Some(text), [].as_slice()),
            Content::Parts(parts) => (None, parts.as_slice()),
        };
        let rest = self.rest.iter().map(|(_, value)| value);
        one.into_iter().chain(parts.iter().filter_map(Part::text_value)).chain(rest)
    }
}

impl Content {
    fn joined(&self) -> String {
        match self {
            Self::Text(text) => text.as_str().unwrap_or_default().to_owned(),
            Self::Parts(parts) => parts.iter().filter_map(Part::text).collect::<Vec<_>>().join("\n"),
        }
    }
}

fn turn(message: Message, format: ContentFormat) -> Result<Turn, EncodeError> {
    let mut parts = match message.content {
        None => Vec::new(),
        Some(Json(content)) if content.as_str().is_some() => vec![Part::of_text(content)],
        Some(Json(content)) => content
            .try_iter()
            .map_err(|_| EncodeError::invalid("messages", "content is neither text nor a list"))?
            .filter_map(|part| read_part(&part).transpose())
            .collect::<Result<_, _>>()?,
    };
    if message.role == "system" {
        parts = parts.into_iter().filter_map(Part::without_billing).collect();
    }
    let mut rest = Vec::new();
    let (assistant, tool) = (message.role == "assistant", message.role == "tool");
    if assistant {
        if let Some(calls) = message.tool_calls.filter(|calls| !calls.is_empty()) {
            rest.push(("tool_calls", json::list(calls.into_iter().map(call))));
        }
        if let Some(Json(reasoning)) = message.reasoning.or(message.reasoning_content) {
            rest.extend([("reasoning", reasoning.clone()), ("reasoning_content", reasoning)]);
        }
    } else if tool {
        rest.extend(message.tool_call_id.map(|Json(id)| ("tool_call_id", id)));
    }
    let text = |Json(value): &Json| value.as_str().is_some();
    rest.extend(message.name.filter(text).map(|Json(name)| ("name", name)));
    rest.extend(message.task.filter(text).map(|Json(task)| ("task", task)));
    if message.role == "developer" {
        rest.push(("tools", message.tools.map_or(Value::from(()), |Json(tools)| tools)));
    }
    let flat = format == ContentFormat::Text || (tool && parts.iter().all(|part| part.text().is_some()));
    let content = if flat { Content::Text(part::join(parts)) } else { Content::Parts(parts) };
    Ok(Turn { role: message.role, content, rest })
}

/// Converts a tool call. Arguments that are not a JSON object become an empty object.
fn call(call: ToolCall) -> Value {
    let Json(parsed) = match call.function.arguments {
        Some(Json(arguments)) => match arguments.as_str() {
            Some(text) => serde_json::from_str(text).unwrap_or_default(),
            None => Json(arguments),
        },
        None => Json::default(),
    };
    let object = parsed.kind() == ValueKind::Map;
    let arguments = if object { parsed } else { json::map(Vec::<(Value, Value)>::new()) };
    let function = json::map([("arguments", arguments), ("name", Value::from(call.function.name))]);
    let id = call.id.map(|Json(id)| ("id", id));
    let kind = call.kind.map(|kind| ("type", Value::from(kind)));
    json::map(id.into_iter().chain([("function", function)]).chain(kind))
}

#[cfg(test)]
mod tests;
