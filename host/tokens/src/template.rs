//! Chat templates: compiled once, rendered in the same way as transformers.

mod clock;
mod sums;

use std::{sync::Arc, time::SystemTime};

use minijinja::{Environment, Error, ErrorKind, Value, value::ValueKind};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::{
    content_format::ContentFormat,
    error::EncodeError,
    json,
    messages::{self, KnownMessage, Turn},
    options::ChatOptions,
    python,
    rendered::{Printer, Rendered},
};

/// Name of the only template of an environment. It has no file extension, so that minijinja escapes nothing.
const NAME: &str = "chat";

/// Appended to the last message while rendering, to find its end. The trailing space shows whether the
/// template trims.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A compiled chat template.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    format: ContentFormat,
    /// Whether the template uses the role `developer`.
    developer: bool,
    /// Whether the template uses `content`.
    content: bool,
    /// Whether the template uses the clock.
    clock: bool,
}

/// Message of a template's `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Compiles a template. `format` overrides the detected form of content.
    pub(crate) fn compile(source: &str, format: Option<ContentFormat>) -> Result<Self, Error> {
        let plain = without_generation_tags(source);
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(|out, _, value| python::print(value, out));
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", |value: &Value| python::text(value));
        environment.add_filter("trim", sums::trim);
        environment.add_filter(sums::TEXT_FILTER, sums::text);
        // Jinja tests follow Python: none is not iterable, and strings and maps are sequences.
        environment.add_test("iterable", |value: &Value| !scalar(value));
        environment
            .add_test("sequence", |value: &Value| !scalar(value) && value.kind() != ValueKind::Iterable);
        environment.add_function("raise_exception", raise);
        let format = match format {
            Some(format) => format,
            None => ContentFormat::detect(&plain)?,
        };
        environment.add_template_owned(NAME, sums::printed_apart(&plain))?;
        Ok(Self {
            environment,
            format,
            developer: source.contains("\"developer\"") || source.contains("'developer'"),
            content: source.contains("content"),
            clock: source.contains("strftime_now"),
        })
    }

    /// Returns the form of content that the template expects.
    pub(crate) fn format(&self) -> ContentFormat {
        self.format
    }

    /// Returns whether the text may depend on the time.
    pub(crate) fn shows_time(&self) -> bool {
        self.clock
    }

    /// Renders a conversation. The request's variables override those of `base`.
    pub(crate) fn render(
        &self,
        messages: Vec<Arc<KnownMessage>>,
        options: &ChatOptions,
        base: &[(Value, Value)],
    ) -> Result<Rendered, EncodeError> {
        if !self.developer && messages.iter().any(|message| message.turn.is_developer()) {
            let turns = messages.iter().map(|message| message.turn.clone()).collect();
            let turns = messages::without_developer(turns).into_iter();
            return self.continued(turns.map(|turn| Arc::new(turn.into())).collect(), options, base);
        }
        self.continued(messages, options, base)
    }

    fn continued(
        &self,
        mut messages: Vec<Arc<KnownMessage>>,
        options: &ChatOptions,
        base: &[(Value, Value)],
    ) -> Result<Rendered, EncodeError> {
        if !options.continue_final_message {
            return self.run(&messages, options, base);
        }
        if !self.content {
            return Err(EncodeError::invalid(
                "continue_final_message",
                "the chat template ignores the content of messages",
            ));
        }
        let mut last: Vec<Turn> = messages.pop().iter().map(|message| message.turn.clone()).collect();
        let text = messages::tag_last(&mut last, TAG)?;
        messages.extend(last.into_iter().map(|turn| Arc::new(turn.into())));
        Ok(cut_at_tag(self.run(&messages, options, base)?.from(0).into_owned(), &text)?.into())
    }

    fn run(
        &self,
        messages: &[Arc<KnownMessage>],
        options: &ChatOptions,
        base: &[(Value, Value)],
    ) -> Result<Rendered, EncodeError> {
        let context = context(messages, options, base);
        let mut printer = Printer::new(messages.iter().flat_map(|message| message.texts.iter().cloned()));
        let template = self.environment.get_template(NAME);
        template
            .and_then(|template| template.render_captured_to(&context, &mut printer).map(drop))
            .map_err(|error| failure(&error))?;
        printer.finish().ok_or_else(|| EncodeError::Template("the text is not UTF-8".to_owned()))
    }
}

/// Returns the variables of a template. If several have the same name, the last one counts.
fn context(messages: &[Arc<KnownMessage>], options: &ChatOptions, base: &[(Value, Value)]) -> Value {
    let none = || Value::from(());
    let mut variables = vec![("tools", none()), ("documents", none())];
    let tools = options.tools.clone().map(|tools| ("tools", tools));
    let mut own = vec![("add_generation_prompt", Value::from(options.add_generation_prompt))];
    own.extend(options.documents.clone().map(|documents| ("documents", documents)));
    if let Some(effort) = options.reasoning_effort.clone() {
        if !options.kwargs.iter().any(|(key, _)| key.as_str() == Some("enable_thinking")) {
            own.push(("enable_thinking", Value::from(effort.as_str() != Some("none"))));
        }
        own.push(("reasoning_effort", effort));
    }
    own.push(("messages", json::list(messages.iter().map(|message| message.value.clone()))));
    own.push(("strftime_now", now_function(options.now)));
    let keyed = |(key, value)| (Value::from(key), value);
    let variables = variables.drain(..).map(keyed).chain(base.iter().cloned());
    let variables = variables.chain(tools.map(keyed)).chain(options.kwargs.iter().cloned());
    variables.chain(own.into_iter().map(keyed)).collect()
}

fn now_function(now: SystemTime) -> Value {
    Value::from_function(move |format: &str| clock::format(now, format))
}

fn scalar(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number)
}

fn raise(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message.to_owned())))
}

fn failure(error: &Error) -> EncodeError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return EncodeError::Refused(message.clone());
        }
        cause = current.source();
    }
    EncodeError::Template(error.to_string())
}

/// Returns the text up to the tag, without trailing white space if the template trimmed the message.
fn cut_at_tag(mut text: String, last: &str) -> Result<String, EncodeError> {
    let found = text.rfind(TAG.trim_end()).filter(|_| text.contains(last.trim()));
    let Some(at) = found else {
        let problem = "the template does not show the last message as it is";
        return Err(EncodeError::invalid("continue_final_message", problem));
    };
    let kept = text.get(at..).is_some_and(|rest| rest.starts_with(TAG));
    text.truncate(at);
    if !kept {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

/// Replaces `{% generation %}` blocks, which only mark text for training, by `{% with %}` blocks.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((text, tag, after)) = next_tag(rest) {
        out.push_str(text);
        let word = tag.trim_matches(|c: char| matches!(c, '{' | '%' | '}' | '-' | '+') || c.is_whitespace());
        if matches!(word, "generation" | "endgeneration") {
            out.push_str(&tag.replace("generation", "with"));
        } else {
            out.push_str(tag);
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Returns the text before the next block tag, the tag, and the text after it.
fn next_tag(source: &str) -> Option<(&str, &str, &str)> {
    let start = source.find("{%")?;
    let end = start + source.get(start..)?.find("%}")? + 2;
    Some((source.get(..start)?, source.get(start..end)?, source.get(end..)?))
}

#[cfg(test)]
mod tests;
