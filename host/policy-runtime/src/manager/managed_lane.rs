//! One lane of a slot under management: what is in force there, what was refused, what holds.

use std::path::PathBuf;

use pointsman_routing::Digest;
use serde::Serialize;

use crate::guest_info::truncate;

use super::{now_ms, program_builder::Refused, status::RefusalRecord};

/// Scans in a row that must miss a file before its lane does without: a file may be replaced by removing it first.
const MISSES: u8 = 2;

/// Where content in force came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// What the configuration names.
    Default,
    /// The lane's own file.
    File,
    /// A trial that an operator promoted. It holds until what the active lane's file and configuration say changes.
    Promoted,
}

/// Content that was made a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) fingerprint: Digest,
    /// The digest to show for it.
    pub(super) main: Option<Digest>,
    pub(super) source: Source,
}

pub(super) struct ManagedLane {
    /// Relative to the folder.
    pub(super) file: PathBuf,
    pub(super) in_force: Option<Content>,
    pub(super) since_ms: u64,
    pub(super) load_ms: u64,
    /// What folder and configuration say now.
    pub(super) wanted: Option<Digest>,
    /// While folder and configuration say this, an operator's promotion stands.
    pub(super) held: Option<Option<Digest>>,
    /// The content that was refused last, and the refusal that stands.
    refused: Option<Digest>,
    pub(super) refusal: Option<RefusalRecord>,
    /// Something that it wants is being compiled.
    pub(super) pending: bool,
    seen: bool,
    misses: u8,
}

impl ManagedLane {
    pub(super) fn new(file: PathBuf, in_force: Option<Content>) -> Self {
        Self {
            file,
            in_force,
            since_ms: now_ms(),
            load_ms: 0,
            wanted: in_force.map(|content| content.fingerprint),
            held: None,
            refused: None,
            refusal: None,
            pending: false,
            seen: false,
            misses: 0,
        }
    }

    /// Whether a file that is not there now may only be on its way: it was there, and is missed for the first time.
    pub(super) fn may_come_back(&mut self, there: bool) -> bool {
        if there {
            (self.seen, self.misses) = (true, 0);
            return false;
        }
        if !self.seen {
            return false;
        }
        self.misses += 1;
        if self.misses < MISSES {
            return true;
        }
        (self.seen, self.misses) = (false, 0);
        false
    }

    /// Whether there is nothing to do about this content.
    pub(super) fn is_settled(&mut self, fingerprint: Digest) -> bool {
        self.wanted = Some(fingerprint);
        if self.held == Some(Some(fingerprint)) {
            return true;
        }
        self.held = None;
        if self.in_force.is_some_and(|content| content.fingerprint == fingerprint) {
            (self.refused, self.refusal) = (None, None);
            return true;
        }
        self.refused == Some(fingerprint)
    }

    pub(super) fn took_over(&mut self, content: Content) {
        self.in_force = Some(content);
        (self.refused, self.refusal, self.since_ms) = (None, None, now_ms());
    }

    pub(super) fn emptied(&mut self) {
        (self.in_force, self.refusal, self.refused, self.since_ms) = (None, None, None, now_ms());
    }

    /// Takes a refusal; `None` when it is the one that stands already.
    pub(super) fn refuse(&mut self, fingerprint: Option<Digest>, refused: &Refused) -> Option<RefusalRecord> {
        self.refused = fingerprint;
        let record = RefusalRecord {
            file: refused.file.display().to_string(),
            digest: refused.digest,
            kind: refused.refusal.kind(),
            message: truncate(refused.refusal.to_string()),
            at_ms: now_ms(),
        };
        let same = |last: &RefusalRecord| {
            (&last.file, last.digest, &last.message) == (&record.file, record.digest, &record.message)
        };
        if self.refusal.as_ref().is_some_and(same) {
            return None;
        }
        self.refusal = Some(record.clone());
        Some(record)
    }
}
