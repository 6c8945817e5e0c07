//! The token ids that an engine lists in the events of a stream when it is asked for them. The gateway asks
//! for itself: no client gets them (I14.13).

use std::{ops::Range, sync::LazyLock};

use memchr::memmem::Finder;

/// The end of both keys, `token_ids` and `prompt_token_ids`. It is not found within a text, whose quotes are
/// escaped.
static KEY_END: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("token_ids\":"));

/// A chunk of a chat without content, as vLLM writes it. A parser makes one of a token that it holds back,
/// only because ids were asked for.
static NO_DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"delta\":{}"));
static NOT_FINISHED: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"finish_reason\":null"));

/// Where an event lists token ids, each with its brackets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lists {
    /// Those of the output.
    pub(crate) output: Option<Range<usize>>,
    /// Those of the prompt.
    pub(crate) prompt: Option<Range<usize>>,
}

impl Lists {
    /// Finds the lists of an event.
    pub(crate) fn of(event: &[u8]) -> Self {
        let mut lists = Self::default();
        for at in KEY_END.find_iter(event) {
            let behind = at + KEY_END.needle().len();
            let value = event.get(behind..).unwrap_or_default();
            let blanks = value.iter().take_while(|byte| **byte == b' ').count();
            let list = value.get(blanks..).filter(|list| list.starts_with(b"["));
            let Some(length) = list.and_then(|list| memchr::memchr(b']', list)) else { continue };
            let place = behind + blanks..behind + blanks + length + 1;
            let key = event.get(..at).unwrap_or_default();
            if key.ends_with(b"\"prompt_") {
                lists.prompt = Some(place);
            } else if key.ends_with(b"\"") {
                lists.output = Some(place);
            }
        }
        lists
    }

    /// Returns whether the event has no list.
    pub(crate) fn is_empty(&self) -> bool {
        self.output.is_none() && self.prompt.is_none()
    }

    /// Returns whether an engine would not have sent the event without ids.
    pub(crate) fn is_only_ids(&self, event: &[u8]) -> bool {
        self.output.is_some() && NO_DELTA.find(event).is_some() && NOT_FINISHED.find(event).is_some()
    }

    /// Passes the parts of an event on as a client gets them: null in the place of a list.
    pub(crate) fn hide(&self, event: &[u8], mut push: impl FnMut(&[u8])) {
        let (first, second) = match (&self.prompt, &self.output) {
            (Some(prompt), Some(output)) if output.start < prompt.start => (Some(output), Some(prompt)),
            (prompt, output) => (prompt.as_ref(), output.as_ref()),
        };
        let mut from = 0;
        for place in first.into_iter().chain(second) {
            push(event.get(from..place.start).unwrap_or_default());
            push(b"null");
            from = place.end;
        }
        push(event.get(from..).unwrap_or_default());
    }
}

/// Adds the ids of a list to `ids`; `false` if it is not a list of ids.
pub(crate) fn read(list: &[u8], ids: &mut Vec<u32>) -> bool {
    let Some(inner) = list.strip_prefix(b"[").and_then(|list| list.strip_suffix(b"]")) else { return false };
    if inner.trim_ascii().is_empty() {
        return true;
    }
    inner.split(|byte| *byte == b',').all(|id| {
        let id = std::str::from_utf8(id.trim_ascii()).ok().and_then(|id| id.parse().ok());
        id.inspect(|id| ids.push(*id)).is_some()
    })
}

/// Returns the number of elements of a list.
pub(crate) fn count(list: &[u8]) -> u32 {
    let is_empty = list.iter().all(|byte| matches!(byte, b'[' | b']' | b' '));
    let commas = u32::try_from(memchr::memchr_iter(b',', list).count()).unwrap_or(u32::MAX);
    if is_empty { 0 } else { commas.saturating_add(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden(event: &str) -> String {
        let mut out = Vec::new();
        Lists::of(event.as_bytes()).hide(event.as_bytes(), |part| out.extend_from_slice(part));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn i14_lists_of_ids_become_null_and_text_stays() {
        let cases = [
            (r#"{"token_ids":[1,22]}"#, r#"{"token_ids":null}"#),
            (
                r#"{"prompt_token_ids":[3],"token_ids": [1]}"#,
                r#"{"prompt_token_ids":null,"token_ids": null}"#,
            ),
            (r#"{"token_ids":[1],"prompt_token_ids":[3]}"#, r#"{"token_ids":null,"prompt_token_ids":null}"#),
            (
                r#"{"prompt_token_ids":null,"token_ids":null}"#,
                r#"{"prompt_token_ids":null,"token_ids":null}"#,
            ),
            (r#"{"text":"\"token_ids\":[1]"}"#, r#"{"text":"\"token_ids\":[1]"}"#),
            (r#"{"stop_token_ids":[1]}"#, r#"{"stop_token_ids":[1]}"#),
        ];
        for (event, expected) in cases {
            // I14.13
            assert_eq!(hidden(event), expected);
        }
    }

    #[test]
    fn ids_are_read_as_far_as_they_are_numbers() {
        let read_all = |list: &str| {
            let mut ids = Vec::new();
            read(list.as_bytes(), &mut ids).then_some(ids)
        };
        assert_eq!(read_all("[1, 22,333]"), Some(vec![1, 22, 333]));
        assert_eq!(read_all("[]"), Some(Vec::new()));
        for wrong in ["[1,]", "[-1]", "[1.0]", "[null]", "[[1]", "1", "[4294967296]"] {
            assert_eq!(read_all(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_event_that_only_ids_made_is_told_apart() {
        let of = |delta: &str, finish: &str| {
            let event = format!(
                r#"{{"choices":[{{"index":0,"delta":{delta},"finish_reason":{finish},"token_ids":[7]}}]}}"#
            );
            Lists::of(event.as_bytes()).is_only_ids(event.as_bytes())
        };
        assert!(of("{}", "null"));
        assert!(!of("{}", "\"stop\"") && !of(r#"{"content":""}"#, "null"));
    }
}
