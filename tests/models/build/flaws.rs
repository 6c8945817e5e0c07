//! The rules of the host's files, each broken once. The named model has to fail.

/// A broken rule.
pub(crate) struct Flaw {
    /// The file that is changed.
    pub(crate) file: &'static str,
    /// The rule, as it is broken.
    pub(crate) what: &'static str,
    /// The model that has to fail, one of the file's.
    pub(crate) model: &'static str,
    /// Replacements. Each old text occurs exactly once in the file, so a flaw that no longer applies is a
    /// build error.
    changes: &'static [(&'static str, &'static str)],
}

impl Flaw {
    /// Returns the changed text of the file.
    pub(crate) fn apply(&self, path: &str, text: &str) -> Result<String, String> {
        let mut text = text.to_owned();
        for (from, to) in self.changes {
            match text.matches(from).count() {
                1 => text = text.replace(from, to),
                count => {
                    return Err(format!(
                        "cannot apply the flaw \"{}\": {path} contains `{from}` {count} times, expected once; \
                         adapt tests/models/build/flaws.rs",
                        self.what
                    ));
                }
            }
        }
        Ok(text)
    }
}

const fn flaw(
    file: &'static str,
    what: &'static str,
    model: &'static str,
    changes: &'static [(&'static str, &'static str)],
) -> Flaw {
    Flaw { file, what, model, changes }
}

/// All flaws.
pub(crate) const FLAWS: &[Flaw] = &[
    flaw(
        "lockfree_map",
        "the reader does not load the reuse count again",
        "comes_back",
        &[("if self.reuse_count.0.load(Relaxed) == reuse_count {", "if reuse_count < u64::MAX {")],
    ),
    flaw(
        "lockfree_map",
        "the reader loads the key again instead of the reuse count",
        "comes_back",
        &[(
            "if self.reuse_count.0.load(Relaxed) == reuse_count {",
            "if reuse_count < u64::MAX && cell.key.load(Acquire) == key {",
        )],
    ),
    flaw(
        "lockfree_map",
        "the reuse count is never incremented",
        "comes_back",
        &[("self.map.count_reuse();", "")],
    ),
    flaw(
        "lockfree_map",
        "the reuse of a swept cell is not counted",
        "swept",
        &[("if std::mem::take(&mut self.removed) {", "if tombstone && std::mem::take(&mut self.removed) {")],
    ),
    flaw(
        "lockfree_map",
        "the reuse count is stored without release",
        "comes_back",
        &[(
            "self.reuse_count.0.load(Relaxed) + 1, Release)",
            "self.reuse_count.0.load(Relaxed) + 1, Relaxed)",
        )],
    ),
    flaw(
        "lockfree_map",
        "the reuse count is loaded without acquire",
        "comes_back",
        &[(
            "let reuse_count = self.reuse_count.0.load(Acquire)",
            "let reuse_count = self.reuse_count.0.load(Relaxed)",
        )],
    ),
    flaw(
        "lockfree_map",
        "values are stored without release",
        "comes_back",
        &[("cell.value.store(value, Release)", "cell.value.store(value, Relaxed)")],
    ),
    flaw(
        "lockfree_map",
        "values are loaded without acquire",
        "comes_back",
        &[("cell.value.load(Acquire)", "cell.value.load(Relaxed)")],
    ),
    flaw(
        "lockfree_map",
        "a key is stored before its value",
        "comes_back",
        &[(
            "cell.value.store(value, Release);\n            cell.key.store(key, Release);",
            "cell.key.store(key, Release);\n            cell.value.store(value, Release);",
        )],
    ),
    flaw(
        "lockfree_map",
        "keys are stored without release",
        "comes_back",
        &[(
            "cell.value.store(value, Release);\n            cell.key.store(key, Release);",
            "cell.value.store(value, Release);\n            cell.key.store(key, Relaxed);",
        )],
    ),
    flaw(
        "lockfree_map",
        "keys are loaded without acquire",
        "comes_back",
        &[("cell.key.load(Acquire)", "cell.key.load(Relaxed)")],
    ),
    flaw(
        "lockfree_map",
        "a removed key becomes an empty cell while others lie behind it",
        "leaves",
        &[("self.map.set_key(at, TOMBSTONE);", "self.map.set_key(at, EMPTY);")],
    ),
    flaw(
        "tree",
        "a rebuilt map of heads is not published",
        "splits",
        &[("if change(map) {", "if !change(map) {")],
    ),
    flaw(
        "tree",
        "a segment is shortened before its end is published",
        "splits",
        &[
            (
                "let depth = self.depth(slot) + at;\n        let end = self.insert(new, Some(slot), depth);",
                "let depth = self.depth(slot) + at;\n        self.renew(slot, 0..at, at, 0);\n        \
                 let end = self.insert(new, Some(slot), depth);",
            ),
            (
                "        self.renew(slot, 0..at, at, 0);\n        true",
                "        true",
            ),
        ],
    ),
    flaw(
        "tree",
        "words of trimmed hashes are used again",
        "replaced",
        &[("if node.shown > len || new > node.segment.capacity() {", "if new > node.segment.capacity() {")],
    ),
    flaw(
        "segments",
        "the hashes of a segment are not compared",
        "passes_on",
        &[("blocks.get(at) == Some(&hash)", "hash.0 > 0")],
    ),
    flaw(
        "lookup",
        "holders that are reassigned during a lookup are not ignored",
        "holder_is_reassigned",
        &[("if after.version() == version {", "if after.version() >= version {")],
    ),
    flaw(
        "lookup",
        "blocks behind a gap count",
        "gap",
        &[("if (from..to).contains(&(*end as usize)) {", "if from < usize::MAX && to > *end as usize {")],
    ),
    flaw(
        "ticker",
        "the clock only loads the guests",
        "wakes",
        &[("self.guests.fetch_add(0, Ordering::AcqRel)", "self.guests.load(Ordering::Acquire)")],
    ),
    flaw(
        "ticker",
        "the clock announces its sleep after it has looked for guests",
        "wakes",
        &[(
            "self.asleep.store(true, Ordering::Release);\n            if self.guests.fetch_add(0, Ordering::AcqRel) == guests {",
            "if self.guests.fetch_add(0, Ordering::AcqRel) == guests {\n            self.asleep.store(true, Ordering::Release);",
        )],
    ),
    flaw(
        "ticker",
        "a starting guest does not acquire what the clock released",
        "wakes",
        &[("self.guests.fetch_add(START, Ordering::AcqRel)", "self.guests.fetch_add(START, Ordering::Release)")],
    ),
    flaw(
        "breaker",
        "a success looks only at the count of failures",
        "closes",
        &[(
            "if self.consecutive.load(Ordering::Relaxed) != 0 || self.is_open() {",
            "if self.consecutive.load(Ordering::Relaxed) != 0 {",
        )],
    ),
    flaw(
        "breaker",
        "every caller may try after the pause",
        "lets_one_through",
        &[(
            "self.retry_at_ms.compare_exchange(retry_at, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()",
            "self.retry_at_ms.store(next, Ordering::Release);\n        true",
        )],
    ),
    flaw(
        "breaker",
        "a success on probation looks only at the count of failures",
        "closes_probation",
        &[(
            "if self.consecutive.load(Ordering::Relaxed) != 0 || self.is_open() {",
            "if self.consecutive.load(Ordering::Relaxed) != 0 {",
        )],
    ),
];
