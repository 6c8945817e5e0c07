//! Rules of the host's rooms, each broken once: the model named has to notice.

/// A rule that is broken.
pub(crate) struct Flaw {
    /// Whose.
    pub(crate) room: &'static str,
    /// What is wrong.
    pub(crate) what: &'static str,
    /// What is written instead of what.
    pub(crate) changes: &'static [(&'static str, &'static str)],
    /// Who notices, of the room's models.
    pub(crate) model: &'static str,
}

const fn flaw(
    room: &'static str,
    what: &'static str,
    model: &'static str,
    changes: &'static [(&'static str, &'static str)],
) -> Flaw {
    Flaw { room, what, changes, model }
}

/// All of them.
pub(crate) const FLAWS: &[Flaw] = &[
    flaw(
        "cells",
        "the reader does not look at the turns again",
        "comes_back",
        &[("if self.turns.0.load(Relaxed) == turns {", "if turns < u64::MAX {")],
    ),
    flaw(
        "cells",
        "the reader asks again for the key instead of the turns",
        "comes_back",
        &[(
            "if self.turns.0.load(Relaxed) == turns {",
            "if turns < u64::MAX && cell.key.load(Acquire) == key {",
        )],
    ),
    flaw("cells", "no turn comes", "comes_back", &[("self.cells.next_turn();", "")]),
    flaw(
        "cells",
        "an emptied cell counts as never used",
        "swept",
        &[("if std::mem::take(&mut self.left) {", "if used && std::mem::take(&mut self.left) {")],
    ),
    flaw(
        "cells",
        "turns are stored without release",
        "comes_back",
        &[("self.turns.0.load(Relaxed) + 1, Release)", "self.turns.0.load(Relaxed) + 1, Relaxed)")],
    ),
    flaw(
        "cells",
        "turns are read without acquire",
        "comes_back",
        &[("let turns = self.turns.0.load(Acquire)", "let turns = self.turns.0.load(Relaxed)")],
    ),
    flaw(
        "cells",
        "values are stored without release",
        "comes_back",
        &[("cell.value.store(value, Release)", "cell.value.store(value, Relaxed)")],
    ),
    flaw(
        "cells",
        "values are read without acquire",
        "comes_back",
        &[("cell.value.load(Acquire)", "cell.value.load(Relaxed)")],
    ),
    flaw(
        "cells",
        "a key is stored before its value",
        "comes_back",
        &[(
            "cell.value.store(value, Release);\n            cell.key.store(key, Release);",
            "cell.key.store(key, Release);\n            cell.value.store(value, Release);",
        )],
    ),
    flaw(
        "cells",
        "keys are stored without release",
        "comes_back",
        &[(
            "cell.value.store(value, Release);\n            cell.key.store(key, Release);",
            "cell.value.store(value, Release);\n            cell.key.store(key, Relaxed);",
        )],
    ),
    flaw(
        "cells",
        "keys are read without acquire",
        "comes_back",
        &[("cell.key.load(Acquire)", "cell.key.load(Relaxed)")],
    ),
    flaw(
        "cells",
        "a key is emptied that others lie behind",
        "leaves",
        &[("self.cells.set_key(at, GONE);", "self.cells.set_key(at, EMPTY);")],
    ),
    flaw(
        "shards",
        "a table written anew is not published",
        "grows",
        &[(
            "if owner.set(block.0, new.packed()) {\n                shard.cells.store(owner.cells().clone());\n            }",
            "owner.set(block.0, new.packed());",
        )],
    ),
    flaw(
        "shards",
        "the place of a list is not asked for again under the lock",
        "lists",
        &[
            ("Some(_) => {\n                let several", "Some(seen) => {\n                let several"),
            ("match find() {\n                    None", "match Some(seen) {\n                    None"),
        ],
    ),
    flaw(
        "lookup",
        "a slot's candidate may change meanwhile",
        "slot_goes_on",
        &[("if names.version() == before {", "if names.version() >= before {")],
    ),
    flaw("lookup", "holes are not minded", "hole", &[("self.mind_holes(shards, blocks);", "")]),
    flaw(
        "ticker",
        "the clock only looks whether somebody runs",
        "wakes",
        &[("self.running.fetch_add(0, Ordering::AcqRel)", "self.running.load(Ordering::Acquire)")],
    ),
    flaw(
        "ticker",
        "the clock says too late that it sleeps",
        "wakes",
        &[(
            "self.asleep.store(true, Ordering::Release);\n            if self.running.fetch_add(0, Ordering::AcqRel) == 0 {",
            "if self.running.fetch_add(0, Ordering::AcqRel) == 0 {\n            self.asleep.store(true, Ordering::Release);",
        )],
    ),
    flaw(
        "ticker",
        "the guest takes nothing over from the clock",
        "wakes",
        &[("self.running.fetch_add(1, Ordering::AcqRel)", "self.running.fetch_add(1, Ordering::Release)")],
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
