//! Content of one lane: what is active, what was refused, and which promotion holds. Knows no files and no
//! engine.

use std::{path::PathBuf, time::Duration};

use pointsman_routing::Digest;
use pointsman_workers::unix_ms;
use serde::Serialize;
use tokio::time::Instant;

use super::{compile_queue::PolicyKey, halves::Halves, record::RefusalRecord};
use crate::spec::InheritedBy;

/// Consecutive scans without a file after which its lane is emptied. A file may be replaced by removing it
/// first.
const MAX_MISSES: u8 = 2;

/// Time after which a scan looks again at what may be in the middle of a replacement: a file or the directory
/// that is missing, or a file that changed and may not be whole yet.
pub(super) const RESCAN: Duration = Duration::from_secs(1);

/// Time after which a file that keeps changing is judged although it may not be whole yet.
const LONGEST_COPY: Duration = Duration::from_secs(10);

/// Source of a lane's content.
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
    pub(super) halves: Halves,
}

pub(super) struct ManagedLane {
    /// The lane's own file, relative to the policy directory. A formula file may take its place.
    pub(super) file: PathBuf,
    /// The file that was there last: `file`, or the formula file in its place.
    pub(super) found: PathBuf,
    pub(super) content: Option<Content>,
    pub(super) since_ms: u64,
    pub(super) load_ms: u64,
    /// Fingerprint of what directory and configuration ask for now.
    pub(super) wanted: Option<Digest>,
    /// Fingerprint of what the last scan read; `None` if a part of it was missing or could not be used.
    pub(super) asked: Option<Digest>,
    /// Fingerprint that an operator's promotion overrides. The promotion stays while directory and
    /// configuration ask for it.
    pub(super) held: Option<Option<Digest>>,
    /// Fingerprint of the content that was refused last.
    refused: Option<Digest>,
    /// Refusals of what directory and configuration ask for now.
    pub(super) refusals: Vec<RefusalRecord>,
    /// Policies that it asks for, while one of them is being compiled.
    pub(super) waits_for: Vec<PolicyKey>,
    /// Time at which it began to wait for them, milliseconds since the Unix epoch.
    pub(super) waits_since_ms: u64,
    /// Digest of its own file at that time.
    waits_with: Option<Digest>,
    /// Digest of the lane's own file, as it was read last.
    pub(super) own: Option<Digest>,
    /// Whether the file existed and has not been given up since.
    seen: bool,
    /// Consecutive scans that missed the file.
    misses: u8,
    /// Identifies its files as the last scan read them.
    read: Option<Digest>,
    /// Time from which these are judged although they may not be whole: a copy may last.
    judged_from: Instant,
    /// The first change since the files were last judged.
    unjudged_since: Option<Instant>,
    /// Whether the last scan found that they may not be whole.
    is_unfinished: bool,
    /// Whether the next scan judges them at once.
    judges_at_once: bool,
    /// Which policy in the file gets the settings of the slot.
    pub(super) inherited_by: Option<InheritedBy>,
}

impl ManagedLane {
    pub(super) fn new(file: PathBuf, content: Option<Content>) -> Self {
        Self {
            found: file.clone(),
            file,
            content,
            since_ms: unix_ms(),
            load_ms: 0,
            wanted: content.map(|content| content.fingerprint),
            asked: None,
            held: None,
            refused: None,
            refusals: Vec::new(),
            waits_for: Vec::new(),
            waits_since_ms: 0,
            waits_with: None,
            own: None,
            seen: false,
            misses: 0,
            read: None,
            judged_from: Instant::now(),
            unjudged_since: None,
            is_unfinished: false,
            judges_at_once: true,
            inherited_by: None,
        }
    }

    /// Returns whether a missing file may only be in the middle of a replacement: it existed before, too few
    /// scans in a row missed it, and no other lane has it (`moved`).
    pub(super) fn may_come_back(&mut self, there: bool, moved: bool) -> bool {
        if there {
            (self.seen, self.misses) = (true, 0);
            return false;
        }
        if !self.seen {
            return false;
        }
        self.misses += 1;
        if self.misses < MAX_MISSES && !moved {
            // A reload that does not find the file does not judge what comes back.
            self.judges_at_once = false;
            return true;
        }
        (self.seen, self.misses, self.own) = (false, 0, None);
        false
    }

    /// Records what a scan read from its files.
    pub(super) fn set_read(&mut self, read: Option<Digest>) {
        let now = Instant::now();
        if std::mem::take(&mut self.judges_at_once) {
            self.judged_from = now;
        } else if self.read != read {
            let first = *self.unjudged_since.get_or_insert(now);
            self.judged_from = (now + RESCAN).min(first + LONGEST_COPY);
        }
        (self.read, self.is_unfinished) = (read, false);
    }

    /// Returns whether a refusal waits for the rest of a copy, or for a signature.
    pub(super) fn waits_for_the_rest(&mut self) -> bool {
        self.is_unfinished = self.may_be_unfinished();
        self.is_unfinished
    }

    /// Ends a scan. The next change begins a new copy if the files of this scan were judged.
    pub(super) fn end_scan(&mut self) {
        if self.waits_for.is_empty() {
            self.waits_since_ms = 0;
            if self.misses == 0 && !self.is_unfinished {
                self.unjudged_since = None;
            }
        }
    }

    /// Returns whether its files changed so lately that one may be in the middle of a copy, or without its
    /// signature.
    fn may_be_unfinished(&self) -> bool {
        Instant::now() < self.judged_from
    }

    /// Returns whether the next scan decides whether its file is gone, or not whole.
    pub(super) fn may_be_in_replacement(&self) -> bool {
        self.misses > 0 || self.may_be_unfinished()
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
            self.refused = None;
            self.refusals.clear();
            return true;
        }
        self.refused == Some(fingerprint)
    }

    /// Returns whether its files and settings ask for this content, and it runs something else.
    pub(super) fn lacks(&self, fingerprint: Digest) -> bool {
        let runs = self.content.map(|content| content.fingerprint);
        self.asked == Some(fingerprint) && runs != Some(fingerprint)
    }

    /// Forgets why content did not run here.
    pub(super) fn allow(&mut self, fingerprint: Digest) {
        if self.held == Some(Some(fingerprint)) {
            self.held = None;
        }
        if self.wanted == Some(fingerprint) {
            (self.wanted, self.refused) = (None, None);
            self.refusals.clear();
        }
    }

    /// Records that `content` runs now.
    pub(super) fn set_content(&mut self, content: Content) {
        self.clear();
        self.content = Some(content);
    }

    /// Records that nothing runs here any more.
    pub(super) fn clear(&mut self) {
        (self.content, self.refused, self.since_ms) = (None, None, unix_ms());
        self.refusals.clear();
    }

    /// Waits for policies to be compiled.
    pub(super) fn wait_for(&mut self, policies: Vec<PolicyKey>) {
        if self.waits_since_ms == 0 || self.waits_with != self.own {
            (self.waits_since_ms, self.waits_with) = (unix_ms(), self.own);
        }
        self.waits_for = policies;
    }

    /// Lets the next scan refuse at once what may not be whole.
    pub(super) fn judge_at_once(&mut self) {
        self.judges_at_once = true;
    }

    /// Forgets that content was refused because its compiler ended, and lets the next scan judge at once.
    pub(super) fn prepare_reload(&mut self) {
        self.judge_at_once();
        if self.refusals.iter().any(|refusal| ["quarantined", "compiler_died"].contains(&refusal.kind)) {
            self.refused = None;
        }
    }

    /// Records refusals. Returns `false` for a repetition of the last ones.
    pub(super) fn refuse(&mut self, fingerprint: Option<Digest>, records: Vec<RefusalRecord>) -> bool {
        self.refused = fingerprint;
        let same = |(last, record): (&RefusalRecord, &RefusalRecord)| {
            (&last.file, last.digest, &last.message) == (&record.file, record.digest, &record.message)
        };
        if self.refusals.len() == records.len() && self.refusals.iter().zip(&records).all(same) {
            return false;
        }
        self.refusals = records;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n7_a_file_that_a_reload_did_not_find_may_be_updated_when_it_comes_back() {
        let mut lane = ManagedLane::new(PathBuf::from("prefill.wasm"), None);
        let read = |content| Some(Digest([content; 32]));
        assert!(!lane.may_come_back(true, false));
        lane.set_read(read(1));
        assert!(!lane.may_be_unfinished(), "the start judges what it finds");
        lane.prepare_reload();
        assert!(lane.may_come_back(false, false) && !lane.may_come_back(true, false));
        lane.set_read(read(2));
        // N7.26
        assert!(lane.may_be_unfinished());
        lane.prepare_reload();
        lane.set_read(read(3));
        assert!(!lane.may_be_unfinished(), "a reload judges what it finds");
    }

    #[tokio::test(start_paused = true)]
    async fn n7_a_file_that_keeps_changing_is_judged_in_the_end() {
        let mut lane = ManagedLane::new(PathBuf::from("prefill.wasm"), None);
        lane.judges_at_once = false;
        let mut scan = |content: u8| {
            lane.set_read(Some(Digest([content; 32])));
            let waits = lane.waits_for_the_rest();
            lane.end_scan();
            waits
        };
        for change in 0..25 {
            // N7.31
            assert_eq!(scan(change), change != 20, "change {change}, every half second");
            tokio::time::advance(Duration::from_millis(500)).await;
        }
        tokio::time::advance(RESCAN).await;
        assert!(!scan(24), "it stopped changing");
        tokio::time::advance(LONGEST_COPY).await;
        assert!(scan(25), "a later change is another copy");
    }

    #[tokio::test(start_paused = true)]
    async fn n7_a_file_that_comes_and_goes_is_judged_in_the_end() {
        let mut lane = ManagedLane::new(PathBuf::from("prefill.wasm"), None);
        lane.judges_at_once = false;
        for change in 0..=10 {
            assert!(!lane.may_come_back(true, false));
            lane.set_read(Some(Digest([change; 32])));
            // N7.31
            assert_eq!(lane.waits_for_the_rest(), change < 10, "{change}");
            lane.end_scan();
            assert!(lane.may_come_back(false, false));
            lane.end_scan();
            tokio::time::advance(RESCAN).await;
        }
    }

    #[test]
    fn o1_another_file_is_compiled_from_now_on() {
        let mut lane = ManagedLane::new(PathBuf::from("prefill.wasm"), None);
        let mut wait_with = |content| {
            lane.own = Some(Digest([content; 32]));
            lane.wait_for(Vec::new());
            std::mem::replace(&mut lane.waits_since_ms, 1)
        };
        wait_with(1);
        assert_eq!(wait_with(1), 1);
        // O1.30
        assert!(wait_with(2) > 1);
    }
}
