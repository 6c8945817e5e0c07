//! The token ids of an answer so far, and where an engine can begin with the rest of it.

use super::grow;
use crate::{
    budget::Share,
    openai::{chunk::Reason, token_ids},
};

/// Maximum number of ids that are kept of one stream, prompt and answer together.
const MAX_IDS: usize = 128 * 1024;

/// How far texts lag behind tokens because of the request's stop strings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StopRules {
    /// Characters that may be the beginning of a stop string: one less than the longest one has.
    pub(crate) overlap: u32,
    /// Whether engines send these characters at once, because stop strings are part of the output.
    pub(crate) sent_at_once: bool,
}

/// Ids of the prompt and of the answer so far.
#[derive(Debug)]
pub(super) struct Ids {
    stop: StopRules,
    pub(super) prompt: Vec<u32>,
    pub(super) output: Vec<u32>,
    /// The ends of the events with a text: only there, no token's text is incomplete. Without stop strings
    /// the last one is enough.
    marks: Vec<Mark>,
    /// Characters of all texts.
    chars: u32,
}

/// The end of an event.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// Tokens up to there.
    ids: u32,
    /// Characters up to there.
    chars: u32,
}

/// Where the rest of an answer begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Start {
    /// Output tokens that the engine is told.
    pub(crate) kept: u32,
    /// Characters of the text after these tokens that the client has already.
    pub(crate) again: u32,
}

impl Ids {
    pub(super) fn new(stop: StopRules) -> Self {
        Self { stop, prompt: Vec::new(), output: Vec::new(), marks: Vec::new(), chars: 0 }
    }

    /// Notes the prompt's ids, unless those of an earlier answer are known.
    pub(super) fn note_prompt(&mut self, list: &[u8], share: &mut Share) -> Result<(), Reason> {
        if !self.prompt.is_empty() {
            return Ok(());
        }
        let count = token_ids::count(list) as usize;
        if count > MAX_IDS {
            return Err("too_long");
        }
        grow(&mut self.prompt, count, share)?;
        if token_ids::read(list, &mut self.prompt) { Ok(()) } else { Err("token_ids") }
    }

    /// Notes a list of the answer's ids.
    pub(super) fn note(&mut self, list: &[u8], share: &mut Share) -> Result<(), Reason> {
        let count = token_ids::count(list) as usize;
        if self.prompt.len() + self.output.len() + count > MAX_IDS {
            return Err("too_long");
        }
        grow(&mut self.output, count, share)?;
        if token_ids::read(list, &mut self.output) { Ok(()) } else { Err("token_ids") }
    }

    /// Notes the text of the event whose ids were noted.
    pub(super) fn note_text(&mut self, chars: u32, share: &mut Share) -> Result<(), Reason> {
        if chars == 0 {
            return Ok(());
        }
        self.chars += chars;
        if self.stop.overlap == 0 {
            self.marks.clear();
        }
        let ids = u32::try_from(self.output.len()).unwrap_or(u32::MAX);
        grow(&mut self.marks, 1, share)?;
        self.marks.push(Mark { ids, chars: self.chars });
        Ok(())
    }

    /// Returns where the rest of the answer begins: far enough before its end that a stop string across the
    /// seam is found. What an engine holds back for stop strings is behind its last text.
    pub(super) fn start(&self) -> Start {
        let StopRules { overlap, sent_at_once } = self.stop;
        let held_back = if sent_at_once { 0 } else { overlap };
        let fits = |mark: &&Mark| mark.chars + overlap <= self.chars;
        match self.marks.iter().rev().find(fits) {
            Some(mark) => Start { kept: mark.ids, again: self.chars - mark.chars - held_back },
            None => Start { kept: 0, again: self.chars },
        }
    }

    /// Forgets the tokens after a start: they are generated again.
    pub(super) fn go_back(&mut self, start: Start) {
        self.output.truncate(start.kept as usize);
        self.marks.retain(|mark| mark.ids <= start.kept);
    }
}
