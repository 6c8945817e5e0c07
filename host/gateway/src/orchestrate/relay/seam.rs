//! Joins the events of a continuation to the stream that the client reads: one id, one time, one role, and
//! the usage of the whole answer (I14).

use std::{borrow::Cow, ops::Range, sync::Arc};

use crate::{
    openai::{
        chunk::{Chunk, ChunkUsage, place_in},
        continuation::Origin,
        endpoint::Format,
        seen, sse,
        token_ids::Lists,
        transcript::{Delivered, Names},
    },
    orchestrate::answer::first_event::error_in,
    upstream::CallError,
};

/// Where two answers meet.
#[derive(Debug)]
pub(super) struct Seam {
    is_chat: bool,
    names: Names,
    /// Output tokens that the client got before.
    tokens: u32,
    /// Tokens of the client's prompt, if the engine that failed reported them.
    prompt_tokens: Option<u32>,
    /// Cached prompt tokens that the first prefill leg reported.
    pub(super) cached_tokens: Option<u32>,
    /// Whether something of the continuation was passed on.
    begun: bool,
    /// From what its engine was asked to begin; `None` if it is the text.
    asked: Option<Asked>,
    /// Whether this engine told from which tokens it began.
    checked: bool,
    /// From what it began, until the relay takes it.
    began: Option<Began>,
    /// The text with which the continuation begins, because the client has it already.
    again: String,
}

/// The tokens from which an engine was asked to begin.
#[derive(Debug)]
struct Asked {
    /// A JSON list.
    ids: Arc<str>,
    /// Whether it may have begun from the text instead.
    or_text: bool,
}

/// From what a continuation began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Began {
    Tokens,
    Text,
}

/// Changes to an event: places, and what stands there instead.
type Changes<'a> = Vec<(Range<usize>, Cow<'a, str>)>;

impl Seam {
    pub(super) fn new(
        is_chat: bool,
        delivered: &Delivered<'_>,
        origin: Option<&Origin>,
        cached_tokens: Option<u32>,
    ) -> Self {
        Self {
            is_chat,
            names: delivered.names.clone(),
            tokens: origin.map_or(delivered.tokens, |origin| origin.kept),
            prompt_tokens: delivered.prompt_tokens,
            cached_tokens,
            begun: false,
            checked: false,
            asked: origin.map(|origin| Asked { ids: origin.ids.clone(), or_text: origin.or_text }),
            began: origin.is_none().then_some(Began::Text),
            again: origin.map(|origin| origin.again.clone()).unwrap_or_default(),
        }
    }

    /// From what the continuation began, once, when something of it was passed on.
    pub(super) fn began(&mut self) -> Option<Began> {
        self.began.take_if(|_| self.begun)
    }

    /// Whether something of the continuation was passed on.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    /// Returns whole events of the continuation as the client gets them, and what is wrong with the first
    /// that does not fit.
    pub(super) fn join(&mut self, events: &[u8]) -> (Vec<u8>, Option<CallError>) {
        let mut out = Vec::with_capacity(events.len() + 64);
        for place in sse::events(events) {
            let event = events.get(place).unwrap_or_default();
            let is_error = error_in(&seen::event(Format::OpenAi, event), event).is_some();
            let passes = !sse::has_data(event) || sse::is_done(event) || is_error;
            match if passes { Ok(true) } else { self.join_one(event, &mut out) } {
                Ok(true) => out.extend_from_slice(event),
                Ok(false) => {}
                Err(problem) => return (out, Some(problem)),
            }
        }
        (out, None)
    }

    /// Adds an event; `true` if it is to be added as it is.
    fn join_one(&mut self, event: &[u8], out: &mut Vec<u8>) -> Result<bool, CallError> {
        // What is not an event at all is found later.
        let Some(chunk) = Chunk::read(sse::object(event)) else { return Ok(true) };
        if chunk.model != self.names.model {
            let (new, old) = (chunk.model, &self.names.model);
            let problem = format!("the rest of the answer comes from the model {new}, and began as {old}");
            return Err(CallError::Protocol(problem));
        }
        let piece = chunk.piece(self.is_chat).map_err(|reason| {
            let problem =
                format!("the rest of the answer has an event that does not belong to it ({reason})");
            CallError::Protocol(problem)
        })?;
        if piece.is_some() {
            self.check_origin(event)?;
        }
        let again = piece.as_ref().and_then(|piece| piece.text).map(|text| self.skip(text)).transpose();
        let again = again.map_err(CallError::Protocol)?;
        let mut changes = Changes::new();
        let mut set = |part: &str, value: Cow<'_, str>| {
            if let Some(place) = place_in(event, part).filter(|_| part != value) {
                changes.push((place, Cow::Owned(value.into_owned())));
            }
        };
        set(chunk.id, Cow::Borrowed(&self.names.id));
        set(chunk.created, Cow::Borrowed(&self.names.created));
        if let Some(usage) = &chunk.usage {
            self.correct(usage, &mut set);
        }
        if let Some(piece) = piece {
            if piece.role.is_some() {
                if self.begun {
                    let problem = "the rest of the answer has a role in the middle of the text";
                    return Err(CallError::Protocol(problem.to_owned()));
                }
                if piece.text.is_none_or(str::is_empty) {
                    // The client has the role.
                    return Ok(false);
                }
            }
            if let Some(role) = piece.role {
                set(role, Cow::Borrowed("null"));
            }
            if let (Some(text), Some(Some(rest))) = (piece.text, again) {
                set(text, Cow::Owned(rest));
            }
            self.begun = true;
        }
        apply(event, changes, out);
        Ok(false)
    }

    /// Another engine generates the rest, no token of which arrived.
    pub(super) fn asks_again(&mut self) {
        (self.begun, self.checked) = (false, false);
        if self.asked.is_some() {
            self.began = None;
        }
    }

    /// Frees the tokens, once the engine showed from what it began: no other one will be asked to begin from
    /// them.
    pub(super) fn forget_origin(&mut self) {
        if self.checked {
            self.asked = None;
        }
    }

    /// Checks that the engine began from the tokens that it was given: it lists those of its prompt.
    fn check_origin(&mut self, event: &[u8]) -> Result<(), CallError> {
        let Some(asked) = self.asked.as_ref().filter(|_| !self.checked) else { return Ok(()) };
        self.checked = true;
        let list = Lists::of(event).prompt.and_then(|place| event.get(place)).unwrap_or_default();
        let written = list.iter().filter(|byte| !byte.is_ascii_whitespace());
        self.began = Some(match (written.eq(asked.ids.as_bytes()), asked.or_text) {
            (true, _) => Began::Tokens,
            (false, true) => Began::Text,
            (false, false) => return Err(CallError::OtherPrompt),
        });
        Ok(())
    }

    /// Takes what the client has already from the beginning of a text, JSON without its quotes. Returns
    /// what is left if that is less.
    fn skip(&mut self, text: &str) -> Result<Option<String>, String> {
        if self.again.is_empty() || text.is_empty() {
            return Ok(None);
        }
        let new: String = serde_json::from_str(&format!("\"{text}\"")).map_err(|error| error.to_string())?;
        let rest = match (new.strip_prefix(&*self.again), self.again.strip_prefix(&*new)) {
            (Some(rest), _) => {
                let rest = rest.to_owned();
                self.again.clear();
                rest
            }
            (None, Some(again)) => {
                self.again = again.to_owned();
                String::new()
            }
            (None, None) => {
                return Err("the rest of the answer begins with another text than the client has".to_owned());
            }
        };
        let quoted = serde_json::to_string(&rest).map_err(|error| error.to_string())?;
        Ok(quoted.get(1..quoted.len() - 1).map(str::to_owned))
    }

    /// Turns the counts of the rest into those of the whole: its prompt contains what was delivered.
    fn correct(&self, usage: &ChunkUsage<'_>, set: &mut impl FnMut(&str, Cow<'_, str>)) {
        let Some((prompt, output)) = usage.counts() else { return };
        let prompt = self.prompt_tokens.unwrap_or(prompt.saturating_sub(self.tokens));
        let output = output.saturating_add(self.tokens);
        let cached = usage.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens);
        let capped =
            cached.and_then(|cached| cached.get().parse().ok()).map(|cached: u32| cached.min(prompt));
        let counts = [
            (usage.prompt_tokens, Some(prompt)),
            (usage.completion_tokens, Some(output)),
            (usage.total_tokens, Some(prompt.saturating_add(output))),
            (cached, capped),
        ];
        for (raw, count) in counts {
            if let (Some(raw), Some(count)) = (raw, count) {
                set(raw.get(), Cow::Owned(count.to_string()));
            }
        }
    }
}

fn apply(event: &[u8], mut changes: Changes<'_>, out: &mut Vec<u8>) {
    changes.sort_by_key(|(place, _)| place.start);
    let mut from = 0;
    for (place, text) in changes {
        out.extend_from_slice(event.get(from..place.start).unwrap_or_default());
        out.extend_from_slice(text.as_bytes());
        from = place.end;
    }
    out.extend_from_slice(event.get(from..).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seam() -> Seam {
        let names = Names { id: "\"one\"".to_owned(), created: "7".to_owned(), model: "\"tiny\"".to_owned() };
        let (json, ids) = (" a b", Err("text"));
        let delivered =
            Delivered { json, tokens: 2, held_back: false, prompt_tokens: None, names: &names, ids };
        Seam::new(true, &delivered, None, None)
    }

    fn chunk(delta: &str, more: &str) -> String {
        format!(
            "data: {{\"id\":\"other\",\"created\":9,\"model\":\"tiny\",\"choices\":[{{\"index\":0,\"delta\":{delta},\
             \"finish_reason\":null}}]{more}}}\n\n"
        )
    }

    fn joined(seam: &mut Seam, events: &str) -> String {
        let (out, problem) = seam.join(events.as_bytes());
        assert!(problem.is_none(), "{problem:?}");
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn i14_the_rest_has_the_names_of_the_beginning_and_no_role() {
        let mut seam = seam();
        let role = chunk(r#"{"role":"assistant","content":""}"#, "");
        // I14.5
        assert_eq!(joined(&mut seam, &format!(": ping\n\n{role}")), ": ping\n\n");
        let text = chunk(r#"{"content":" c"}"#, "");
        let expected = text.replace("\"other\"", "\"one\"").replace("\"created\":9", "\"created\":7");
        assert_eq!(joined(&mut seam, &(text + "data: [DONE]\n\n")), expected + "data: [DONE]\n\n");
    }

    #[test]
    fn i14_the_usage_is_that_of_the_whole() {
        let usage = r#","usage":{"prompt_tokens":12,"total_tokens":15,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":12}}"#;
        let text = joined(&mut seam(), &chunk(r#"{"content":"x"}"#, usage));
        // I14.6
        let whole = r#""usage":{"prompt_tokens":10,"total_tokens":15,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":10}}"#;
        assert!(text.contains(whole), "{text}");
    }

    #[test]
    fn i14_a_rest_that_does_not_fit_is_refused() {
        let wrong = [
            (chunk(r#"{"content":" c"}"#, "").replace("tiny", "huge"), "model"),
            (chunk(r#"{"reasoning_content":"hm"}"#, ""), "other_content"),
            (chunk(r#"{"content":" c"}"#, "").replace("\"index\":0", "\"index\":1"), "choices"),
        ];
        for (event, word) in wrong {
            // I14.10
            let (out, problem) = seam().join(event.as_bytes());
            assert!(out.is_empty() && problem.unwrap().to_string().contains(word), "{event}");
        }
        let (text, role) = (chunk(r#"{"content":" c"}"#, ""), chunk(r#"{"role":"assistant"}"#, ""));
        let (out, problem) = seam().join((text + &role).as_bytes());
        // What came before is passed on.
        assert!(!out.is_empty() && problem.unwrap().to_string().contains("role"));
    }

    /// A seam to a rest that begins from the tokens 7, 1 and 2.
    fn exact(again: &str, or_text: bool) -> Seam {
        let names = Names { id: "\"one\"".to_owned(), created: "7".to_owned(), model: "\"tiny\"".to_owned() };
        let (json, ids) = ("a b", Err("text"));
        let delivered =
            Delivered { json, tokens: 3, held_back: false, prompt_tokens: Some(1), names: &names, ids };
        let (ids, again) = ("[7,1,2]".into(), again.to_owned());
        Seam::new(true, &delivered, Some(&Origin { ids, tokens: 3, kept: 2, again, or_text }), None)
    }

    fn role(prompt: &str) -> String {
        chunk(r#"{"role":"assistant","content":""}"#, &format!(r#","prompt_token_ids":{prompt}"#))
    }

    #[test]
    fn i14_an_engine_says_from_which_tokens_it_began() {
        let text = chunk(r#"{"content":"c"}"#, "");
        let began = |or_text, prompt: &str| {
            let mut seam = exact("", or_text);
            let (out, problem) = seam.join((role(prompt) + &text).as_bytes());
            assert_eq!(problem.is_none(), !out.is_empty());
            match problem {
                Some(problem) => Err(problem.to_string()),
                None => seam.began().ok_or_else(String::new),
            }
        };
        // I14.12
        assert_eq!(began(false, "[7, 1,2]"), Ok(Began::Tokens));
        assert_eq!(began(true, "[7,1,2]"), Ok(Began::Tokens));
        for other in ["null", "[7,1]", "[]", "[7,1,2,3]"] {
            assert_eq!(began(true, other), Ok(Began::Text));
            // I14.10
            assert!(began(false, other).unwrap_err().contains("does not begin from the token ids"));
        }
        let mut seam = exact("", false);
        assert!(seam.join(text.as_bytes()).1.is_some(), "it says nothing");
        let mut seam = exact("", false);
        joined(&mut seam, &role("[7,1,2]"));
        assert!(!seam.has_begun() && seam.began().is_none(), "the client has nothing of it");
    }

    #[test]
    fn i14_text_that_is_generated_again_is_not_sent_again() {
        let part = |text: &str| chunk(&format!("{{\"content\":\"{text}\"}}"), "");
        let sent = |again: &str, texts: &[&str]| {
            let mut seam = exact(again, false);
            joined(&mut seam, &role("[7,1,2]"));
            let (out, problem) =
                seam.join(texts.iter().map(|text| part(text)).collect::<String>().as_bytes());
            let out = String::from_utf8(out).unwrap();
            let content =
                |event: &str| Some(event.split("\"content\":\"").nth(1)?.split("\"}").next()?.to_owned());
            let problem = problem.map(|problem| problem.to_string());
            (out.split("\n\n").filter_map(content).collect::<Vec<_>>().join("|"), problem)
        };
        // I14.5
        assert_eq!(sent("äb", &["ä", "", "bc", "d"]), ("||c|d".to_owned(), None));
        assert_eq!(sent("äb", &["\\u00e4b"]), (String::new(), None));
        assert_eq!(sent("a\n", &["a\\n\\\"x"]), ("\\\"x".to_owned(), None));
        // I14.10
        let (out, problem) = sent("ab", &["a", "x"]);
        assert!(out.is_empty() && problem.unwrap().to_string().contains("another text"));
    }

    #[test]
    fn an_error_of_the_engine_passes_to_the_relay() {
        let error = "data: {\"error\":{\"message\":\"dead\",\"code\":500}}\n\n";
        assert_eq!(joined(&mut seam(), error), error);
    }
}
