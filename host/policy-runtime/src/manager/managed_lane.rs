//! Content of one lane: what is active, what was refused, and which promotion holds. Knows no files and no
//! engine.

use std::path::PathBuf;

use pointsman_routing::Digest;
use serde::Serialize;

use crate::guest_info::truncate;

use super::{now_ms, plan::Refused, record::RefusalRecord};

/// Consecutive scans without a file after which its lane is emptied. A file may be replaced by removing it
/// first.
const MAX_MISSES: u8 = 2;

/// Where the content of a lane comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The configuration.
    Default,
    /// The lane's own file.
    File,
    /// A trial that an operator promoted. It stays until the active lane's file or configuration changes.
    Promoted,
}

/// Content that runs as a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) fingerprint: Digest,
    /// Digest to show for it: of the lane's own file, or of its only policy.
    pub(super) main: Option<Digest>,
    pub(super) source: Source,
}

pub(super) struct ManagedLane {
    /// The lane's own file, relative to the policy directory.
    pub(super) file: PathBuf,
    pub(super) content: Option<Content>,
    pub(super) since_ms: u64,
    pub(super) load_ms: u64,
    /// Fingerprint of what directory and configuration ask for now.
    pub(super) wanted: Option<Digest>,
    /// Fingerprint that an operator's promotion overrides. The promotion stays while directory and
    /// configuration ask for it.
    pub(super) held: Option<Option<Digest>>,
    /// Fingerprint of the content that was refused last.
    refused: Option<Digest>,
    /// Refusal of what directory and configuration ask for now.
    pub(super) refusal: Option<RefusalRecord>,
    /// Whether a policy that it asks for is being compiled.
    pub(super) pending: bool,
    /// Whether the file existed and has not been given up since.
    seen: bool,
    /// Consecutive scans that missed the file.
    misses: u8,
}

impl ManagedLane {
    pub(super) fn new(file: PathBuf, content: Option<Content>) -> Self {
        Self {
            file,
            content,
            since_ms: now_ms(),
            load_ms: 0,
            wanted: content.map(|content| content.fingerprint),
            held: None,
            refused: None,
            refusal: None,
            pending: false,
            seen: false,
            misses: 0,
        }
    }

    /// Whether a missing file may only be in the middle of a replacement: it existed before, and too few
    /// scans in a row missed it.
    pub(super) fn may_come_back(&mut self, there: bool) -> bool {
        if there {
            (self.seen, self.misses) = (true, 0);
            return false;
        }
        if !self.seen {
            return false;
        }
        self.misses += 1;
        if self.misses < MAX_MISSES {
            return true;
        }
        (self.seen, self.misses) = (false, 0);
        false
    }

    /// Records what the lane is asked to run. Returns whether that runs already, was refused already, or is
    /// overridden by a promotion.
    pub(super) fn is_settled(&mut self, fingerprint: Digest) -> bool {
        self.wanted = Some(fingerprint);
        if self.held == Some(Some(fingerprint)) {
            return true;
        }
        self.held = None;
        if self.content.is_some_and(|content| content.fingerprint == fingerprint) {
            (self.refused, self.refusal) = (None, None);
            return true;
        }
        self.refused == Some(fingerprint)
    }

    /// Records that `content` runs now.
    pub(super) fn set_content(&mut self, content: Content) {
        self.content = Some(content);
        (self.refused, self.refusal, self.since_ms) = (None, None, now_ms());
    }

    /// Records that nothing runs here any more.
    pub(super) fn clear(&mut self) {
        (self.content, self.refusal, self.refused, self.since_ms) = (None, None, None, now_ms());
    }

    /// Records a refusal. Returns `None` for a repetition of the last one.
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
