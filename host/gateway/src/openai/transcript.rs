//! What a client got of a streamed chat or completion so far: the text, what its events have in common, and
//! the token ids if the engine was asked for them.
//!
//! Streams that live pay a comparison and a copy of their text for an event, and allocate nothing for it:
//! most events of an answer differ in their text and ids only, and are recognised by what is around these.
//! The relay does not search such an event for keys. Any other event is read whole. What is not plain text of
//! a single choice makes the transcript unusable.

use std::sync::{Arc, LazyLock};

use memchr::memmem::Finder;

use crate::{
    budget::{Budget, Share},
    openai::{
        chunk::{Chunk, Piece, Reason, place_in},
        sse::{self, Seen},
        token_ids::{self, Lists},
    },
};

mod ids;

use ids::Ids;
pub(crate) use ids::{Start, StopRules};

/// Limit of the text that is kept of one stream, bytes of JSON.
const MAX_TEXT: usize = 256 * 1024;
/// Bytes that a transcript takes before it has a text.
const BEGINS_WITH: usize = 1_024;
/// Maximum size of the JSON around a text, and of the names that all events share, bytes.
const MAX_AROUND: usize = 4_096;
static CHOICES_END: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("}]"));
/// Fewest elements by which a list grows.
const GROWS_BY: usize = 64;

/// The part of a stream that its client has.
#[derive(Debug)]
pub(crate) struct Transcript {
    is_chat: bool,
    /// The bytes of an event that has one token and nothing else: before its text, after it, and after its
    /// ids.
    before: Vec<u8>,
    behind: Vec<u8>,
    behind_ids: Vec<u8>,
    /// Whether `behind` is only the beginning of what is behind the text: the rest changes, as a time does.
    end_changes: bool,
    /// The text, as it stands between the quotes of JSON.
    text: Vec<u8>,
    tokens: u32,
    /// Whether a token arrived without a text.
    held_back: bool,
    /// Whether a finish reason arrived: the answer is not continued, and only its tokens are counted.
    finished: bool,
    names: Option<Names>,
    /// Prompt and output tokens, as an event reported them.
    usage: Option<(u32, u32)>,
    /// Token ids, or why they are not kept.
    ids: Result<Ids, Reason>,
    /// What it takes of the memory of all transcripts, or why it is not kept.
    kept: Result<Share, Reason>,
}

/// What all events of an answer share, as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) id: String,
    pub(crate) created: String,
    pub(crate) model: String,
}

/// What a client got of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delivered<'a> {
    /// The text, as it stands between the quotes of JSON.
    pub(crate) json: &'a str,
    pub(crate) tokens: u32,
    /// Whether a token arrived without a text: its text may not have been sent.
    pub(crate) held_back: bool,
    /// Prompt tokens, if they are known.
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) names: &'a Names,
    /// Token ids, or why they are not known.
    pub(crate) ids: Result<DeliveredIds<'a>, Reason>,
}

/// The token ids of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeliveredIds<'a> {
    pub(crate) prompt: &'a [u32],
    pub(crate) output: &'a [u32],
    /// Where the rest begins.
    pub(crate) start: Start,
}

impl Transcript {
    /// Begins the transcript of a chat, or of a completion. `ids`: the engine was asked for token ids, or
    /// why it was not. `None` when `memory` is used up.
    pub(crate) fn new(
        is_chat: bool,
        ids: Result<StopRules, Reason>,
        memory: &Arc<Budget>,
    ) -> Option<Box<Self>> {
        let share = memory.reserve(BEGINS_WITH)?;
        Some(Box::new(Self {
            is_chat,
            before: Vec::new(),
            behind: Vec::new(),
            behind_ids: Vec::new(),
            end_changes: false,
            text: Vec::new(),
            tokens: 0,
            held_back: false,
            finished: false,
            names: None,
            usage: None,
            ids: ids.map(Ids::new),
            kept: Ok(share),
        }))
    }

    /// Notes an event that differs from one before in its text and ids only, and returns what [`sse::look`]
    /// sees in it. `None` for any other event: [`Self::note`] reads it. `lists`: where it has token ids.
    pub(crate) fn note_known(&mut self, event: &[u8], lists: &Lists) -> Option<Seen> {
        let text = self.text_of_known(event, lists)?;
        let seen = if text.is_empty() {
            sse::look(event)
        } else {
            let ids = lists.output.clone().and_then(|place| event.get(place));
            Seen { token: true, tokens: ids.map_or(1, token_ids::count), ..Seen::default() }
        };
        if let Err(reason) = self.note_text(text, 1, event, lists) {
            self.give_up(reason);
        }
        Some(seen)
    }

    /// Notes an event that the client gets, and in which [`sse::look`] sees `seen`.
    pub(crate) fn note(&mut self, event: &[u8], seen: &Seen, lists: &Lists) {
        if self.kept.is_err() || seen.done || !sse::has_data(event) {
            return;
        }
        self.finished |= seen.finish;
        if self.finished {
            self.tokens += seen.tokens;
            let reported = seen.usage.and_then(|usage| Some((usage.prompt_tokens, usage.completion_tokens?)));
            self.usage = reported.or(self.usage);
            return;
        }
        if let Err(reason) = self.read(event, seen, lists) {
            self.give_up(reason);
        }
    }

    /// Returns what the client got.
    pub(crate) fn delivered(&self) -> Result<Delivered<'_>, Reason> {
        self.kept.as_ref().map_err(|reason| *reason)?;
        let names = self.names.as_ref().ok_or("no_text")?;
        let json = std::str::from_utf8(&self.text).map_err(|_| "not_text")?;
        let tokens = self.usage.map_or(self.tokens, |(_, output)| output);
        let ids = match &self.ids {
            Ok(ids) if ids.prompt.is_empty() => Err("no_token_ids"),
            Ok(Ids { prompt, output, .. }) => Ok(DeliveredIds { prompt, output, start: self.start() }),
            Err(reason) => Err(*reason),
        };
        let known = ids.ok().and_then(|ids| u32::try_from(ids.prompt.len()).ok());
        let prompt_tokens = known.or(self.usage.map(|(prompt, _)| prompt));
        Ok(Delivered { json, tokens, held_back: self.held_back, prompt_tokens, names, ids })
    }

    fn start(&self) -> Start {
        self.ids.as_ref().map_or(Start::default(), Ids::start)
    }

    /// The engine of the rest begins at `start`, and generates the tokens after it again.
    pub(crate) fn goes_back(&mut self, start: Start) {
        self.tokens = start.kept;
        self.usage = None;
        if let Ok(ids) = &mut self.ids {
            ids.go_back(start);
        }
    }

    /// Keeps the text only: its engine divided it into tokens of its own.
    pub(crate) fn forget_ids(&mut self) {
        self.ids = Err("text");
    }

    /// The text of an event that differs from one before in its text and ids only.
    fn text_of_known<'a>(&self, event: &'a [u8], lists: &Lists) -> Option<&'a [u8]> {
        if self.before.is_empty() || lists.prompt.is_some() {
            return None;
        }
        let (head, tail) = around(event, lists);
        let text = head.strip_prefix(&self.before[..])?;
        if self.end_changes {
            let end = memchr::memchr2(b'"', b'\\', text)?;
            let rest = text.get(end..)?.strip_prefix(&self.behind[..])?;
            // Another line may name the event.
            let is_one_line = memchr::memchr2(b'\n', b'\r', rest.trim_ascii_end()).is_none();
            return (is_one_line && !sse::has_known_key(rest)).then(|| text.get(..end)).flatten();
        }
        let text = text.strip_suffix(&self.behind[..])?;
        let is_text = tail == self.behind_ids && memchr::memchr2(b'"', b'\\', text).is_none();
        is_text.then_some(text)
    }

    fn read(&mut self, event: &[u8], seen: &Seen, lists: &Lists) -> Result<(), Reason> {
        let chunk = Chunk::read(sse::object(event)).ok_or("not_a_chunk")?;
        if self.names.is_none() {
            let names = [chunk.id, chunk.created, chunk.model];
            if names.iter().map(|name| name.len()).sum::<usize>() > MAX_AROUND {
                return Err("too_long");
            }
            let [id, created, model] = names.map(str::to_owned);
            self.names = Some(Names { id, created, model });
        }
        let usage = chunk.usage.as_ref().and_then(|usage| usage.counts());
        self.usage = usage.or(self.usage);
        self.with_ids(|ids, share| {
            let list = lists.prompt.clone().and_then(|place| event.get(place));
            list.map_or(Ok(()), |list| ids.note_prompt(list, share))
        })?;
        let Some(piece) = chunk.piece(self.is_chat)? else { return Ok(()) };
        let Some(text) = piece.text else {
            return self.note_text(b"", piece.tokens, event, lists);
        };
        self.note_text(text.as_bytes(), piece.tokens, event, lists)?;
        let has_only_a_token = *seen == Seen { token: true, tokens: seen.tokens, ..Seen::default() };
        if has_only_a_token && usage.is_none() && piece.tokens == 1 && piece.is_only_text {
            self.learn(event, lists, &piece);
        }
        Ok(())
    }

    /// Remembers what is around the text of an event that is a token and nothing else.
    fn learn(&mut self, event: &[u8], lists: &Lists, piece: &Piece<'_>) {
        let place = piece.text.and_then(|text| place_in(event, text));
        let Some(place) = place.filter(|_| lists.prompt.is_none()) else { return };
        let (head, tail) = around(event, lists);
        let (before, behind) = (head.get(..place.start), head.get(place.end..));
        if let (Some(before), Some(behind)) = (before, behind)
            && before.len() + behind.len() + tail.len() <= MAX_AROUND
        {
            let same = self.behind.iter().zip(behind).take_while(|(one, other)| one == other).count();
            let same = behind.get(..same).unwrap_or_default();
            // The list of choices has ended: what differs is not a part of the answer. It begins with a key.
            let end = CHOICES_END.find(same).filter(|_| self.before == before && tail.is_empty());
            let key = end.and_then(|end| memchr::memrchr(b',', same).filter(|comma| *comma > end));
            self.end_changes = key.is_some();
            self.behind = key.and_then(|key| same.get(..key)).unwrap_or(behind).to_vec();
            (self.before, self.behind_ids) = (before.to_vec(), tail.to_vec());
        }
    }

    /// Notes the text of an event, as JSON, and its ids. `tokens`: their number if it lists no ids.
    fn note_text(&mut self, text: &[u8], tokens: u32, event: &[u8], lists: &Lists) -> Result<(), Reason> {
        if self.text.len() + text.len() > MAX_TEXT {
            return Err("too_long");
        }
        let share = self.kept.as_mut().map_err(|reason| *reason)?;
        grow(&mut self.text, text.len(), share)?;
        self.text.extend_from_slice(text);
        self.held_back |= text.is_empty() && tokens > 0;
        let list = lists.output.clone().and_then(|place| event.get(place));
        self.tokens += list.map_or(tokens, token_ids::count);
        self.with_ids(|ids, share| {
            match list {
                Some(list) => ids.note(list, share)?,
                None if tokens > 0 => return Err("no_token_ids"),
                None => {}
            }
            ids.note_text(characters(text), share)
        })
    }

    /// Notes ids. The text is kept without them if they cannot be, unless the memory is used up.
    fn with_ids(
        &mut self,
        note: impl FnOnce(&mut Ids, &mut Share) -> Result<(), Reason>,
    ) -> Result<(), Reason> {
        let (Ok(ids), Ok(share)) = (&mut self.ids, &mut self.kept) else { return Ok(()) };
        match note(ids, share) {
            Err("memory") => Err("memory"),
            Err(reason) => {
                self.ids = Err(reason);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn give_up(&mut self, reason: Reason) {
        (self.kept, self.ids) = (Err(reason), Err(reason));
        self.text = Vec::new();
        (self.before, self.behind, self.behind_ids) = (Vec::new(), Vec::new(), Vec::new());
    }
}

/// The parts of an event before the ids of its output and after them.
fn around<'a>(event: &'a [u8], lists: &Lists) -> (&'a [u8], &'a [u8]) {
    let Some(place) = &lists.output else { return (event, &[]) };
    (event.get(..place.start).unwrap_or_default(), event.get(place.end..).unwrap_or_default())
}

/// Makes room for `more` elements of a list, if the memory of all transcripts allows it.
fn grow<T>(list: &mut Vec<T>, more: usize, share: &mut Share) -> Result<(), Reason> {
    let wanted = list.len() + more;
    if wanted <= list.capacity() {
        return Ok(());
    }
    let wanted = wanted.max(list.capacity() * 2).max(GROWS_BY);
    if !share.grow((wanted - list.capacity()) * size_of::<T>(), 0) {
        return Err("memory");
    }
    list.reserve_exact(wanted - list.len());
    Ok(())
}

/// Number of characters of a text, as it stands between the quotes of JSON.
fn characters(json: &[u8]) -> u32 {
    let count = if memchr::memchr(b'\\', json).is_none() {
        json.iter().filter(|byte| **byte & 0xc0 != 0x80).count()
    } else {
        // Seldom: most texts have no escapes.
        let quoted = [b"\"", json, b"\""].concat();
        serde_json::from_slice::<String>(&quoted).map_or(0, |text| text.chars().count())
    };
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
