//! Describes in sentences what a reload, a rollback or a promotion did.

use pointsman_admin_cli::text::clean;
use serde::Deserialize;

/// The gateway's answer. Unknown keys are ignored, so that a command reads the answers of a later release.
#[derive(Debug, Deserialize)]
pub struct Report {
    changed: Vec<Change>,
    refused: Vec<Refusal>,
    compiling: Vec<String>,
    strays: Vec<String>,
    #[serde(default)]
    stray_problems: Vec<String>,
    #[serde(default)]
    more_strays: usize,
    slots: Vec<Slot>,
    undone: Option<Undone>,
}

/// A rollback that was undone.
#[derive(Debug, Deserialize)]
struct Undone {
    /// Label of the slot: `prefill`, or `model/prefill`.
    slot: String,
    policy: String,
}

#[derive(Debug, Deserialize)]
struct Change {
    slot: String,
    model: Option<String>,
    lane: String,
    result: String,
    reason: String,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    file: String,
    kind: String,
    message: String,
}

#[derive(Debug, Deserialize)]
struct Slot {
    slot: String,
    model: Option<String>,
    active: Option<Lane>,
    canary: Option<Lane>,
    shadow: Option<Lane>,
    /// The rollback that an undo would end now.
    #[serde(default)]
    undo: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Deserialize)]
struct Lane {
    policy: String,
    generation: u64,
}

impl Report {
    /// Returns one line for each change, refusal and compile.
    #[must_use]
    pub fn sentences(&self) -> String {
        let mut lines: Vec<String> = self.undone.iter().map(Undone::sentence).collect();
        lines.extend(self.changed.iter().map(|change| self.sentence(change)));
        lines.extend(self.undone.iter().filter_map(|undone| self.still_runs(undone)));
        if lines.is_empty() {
            lines.push("nothing changed".to_owned());
        }
        let compiling = self.compiling.iter();
        lines.extend(
            compiling.map(|lane| format!("still compiling: {lane}; it is installed when it is ready")),
        );
        let refused = self.refused.iter();
        lines.extend(refused.map(|one| format!("refused: {} ({}): {}", one.file, one.kind, one.message)));
        let problems = self.stray_problems.iter().map(|problem| format!(": {problem}"));
        let strays = self.strays.iter().zip(problems.chain(std::iter::repeat(String::new())));
        lines.extend(strays.map(|(file, problem)| format!("of no slot: {file}{problem}")));
        lines.extend((self.more_strays > 0).then(|| format!("of no slot: {} more files", self.more_strays)));
        lines.iter().map(|line| format!("{}\n", clean(line))).collect()
    }

    fn sentence(&self, change: &Change) -> String {
        let model = change.model.as_ref().map(|model| format!("{model}/")).unwrap_or_default();
        let slot = format!("{model}{}", change.slot);
        let (lane, now) = (&change.lane, self.now(change));
        match change.result.as_str() {
            "installed" => format!("{slot}: the {lane} lane runs {now}"),
            "kept" => format!("{slot}: the {lane} lane continues with {now}"),
            "promoted" => format!("{slot}: {now} is active now; it was the {}", change.reason),
            "rolled_back" => {
                format!("{slot}: {now} is active again; what ran before {}", self.undo_hint(change))
            }
            "withdrawn" => format!("{slot}: the {lane} has ended"),
            "removed" => format!("{slot}: the {lane} lane has no file any more and runs {now}"),
            "refused" => format!("{slot}: the {lane} lane continues with {now}; its file was refused"),
            other => format!("{slot}: {lane}: {other} ({})", change.reason),
        }
    }

    /// Says what serves until the content of an undone rollback is compiled.
    fn still_runs(&self, undone: &Undone) -> Option<String> {
        let slot = self.slots.iter().find(|slot| slot.label() == undone.slot && self.changed.is_empty())?;
        let active = slot.active.as_ref()?;
        Some(format!("{}: {} serves until it is compiled", undone.slot, active.label()))
    }

    /// Says how what was rolled back can run again.
    fn undo_hint(&self, change: &Change) -> String {
        let model = change.model.as_ref().map(|model| format!(" --model {model}")).unwrap_or_default();
        let undo = format!("`pointsman policy rollback {}{model} --undo` lets it run again", change.slot);
        match self.slot(change).is_some_and(|slot| slot.undo.is_some()) {
            true => format!("stays out until its file or settings change; {undo}"),
            false => format!(
                "stays out, and no usable file or setting asks for it: put its file or settings back, then {undo}"
            ),
        }
    }

    fn slot(&self, change: &Change) -> Option<&Slot> {
        self.slots.iter().find(|slot| (&slot.slot, &slot.model) == (&change.slot, &change.model))
    }

    /// Names the policy that the lane of a change runs now.
    fn now(&self, change: &Change) -> String {
        let slot = self.slot(change);
        let lane = slot.and_then(|slot| match change.lane.as_str() {
            "canary" => slot.canary.as_ref(),
            "shadow" => slot.shadow.as_ref(),
            _ => slot.active.as_ref(),
        });
        lane.map_or("nothing".to_owned(), Lane::label)
    }
}

impl Undone {
    fn sentence(&self) -> String {
        format!("{}: the rollback of `{}` is undone", self.slot, self.policy)
    }
}

impl Slot {
    fn label(&self) -> String {
        self.model.as_ref().map_or_else(|| self.slot.clone(), |model| format!("{model}/{}", self.slot))
    }
}

impl Lane {
    fn label(&self) -> String {
        format!("`{}` (generation {})", self.policy, self.generation)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Report;

    #[test]
    fn each_result_has_a_sentence_and_control_characters_none() {
        let change = |lane: &str, result: &str, reason: &str| {
            json!({ "slot": "prefill", "model": null, "lane": lane, "result": result, "reason": reason,
                    "generation": 3 })
        };
        let report: Report = serde_json::from_value(json!({
            "changed": [
                change("active", "promoted", "canary"), change("active", "rolled_back", "command"),
                change("shadow", "withdrawn", "command"), change("shadow", "removed", "file_gone"),
                change("active", "later_release", "reason"),
            ],
            "refused": [{ "file": "decode.wasm", "kind": "not_wasm", "message": "garbage \u{1b}[2J" }],
            "compiling": ["aggregated"], "strays": ["x.wasm"], "stray_problems": ["it is no slot"],
            "more_strays": 3,
            "slots": [{ "slot": "prefill", "model": null, "active": { "policy": "kv-aware", "generation": 3 },
                        "canary": null, "shadow": null, "undo": {} }],
        }))
        .expect("a report");
        let lines = [
            "prefill: `kv-aware` (generation 3) is active now; it was the canary",
            "prefill: `kv-aware` (generation 3) is active again; what ran before stays out until its file or \
             settings change; `pointsman policy rollback prefill --undo` lets it run again",
            "prefill: the shadow has ended",
            "prefill: the shadow lane has no file any more and runs nothing",
            "prefill: active: later_release (reason)",
            "still compiling: aggregated; it is installed when it is ready",
            "refused: decode.wasm (not_wasm): garbage \u{fffd}[2J",
            "of no slot: x.wasm: it is no slot",
            "of no slot: 3 more files",
        ];
        // O1.11
        assert_eq!(report.sentences(), lines.map(|line| format!("{line}\n")).concat());
    }

    #[test]
    fn a_rollback_names_its_undo_where_a_file_asks_for_what_ran() {
        let report = |undo: serde_json::Value| {
            let change = json!({ "slot": "prefill", "model": "tiny", "lane": "active", "result": "rolled_back",
                                 "reason": "command", "generation": 3 });
            let slot = json!({ "slot": "prefill", "model": "tiny", "active": null, "undo": undo });
            let report =
                json!({ "changed": [change], "refused": [], "compiling": [], "strays": [], "slots": [slot] });
            serde_json::from_value::<Report>(report).expect("a report").sentences()
        };
        let undo = "`pointsman policy rollback prefill --model tiny --undo` lets it run again\n";
        // O1.11
        assert_eq!(
            report(json!({ "policy": "shortest", "digest": "sha256:77" })),
            format!(
                "tiny/prefill: nothing is active again; what ran before stays out until its file or settings change; {undo}"
            )
        );
        // O1.11
        assert_eq!(
            report(json!(null)),
            format!(
                "tiny/prefill: nothing is active again; what ran before stays out, and no usable file or setting asks \
                 for it: put its file or settings back, then {undo}"
            )
        );
    }

    #[test]
    fn an_undo_says_what_it_undid_and_what_serves() {
        let report = |changed: serde_json::Value, compiling: &[&str], policy: &str| {
            let active = json!({ "policy": policy, "generation": 4 });
            let slot = json!({ "slot": "prefill", "model": "tiny", "active": active });
            let report = json!({
                "changed": changed, "refused": [], "compiling": compiling, "strays": [], "slots": [slot],
                "undone": { "slot": "tiny/prefill", "policy": "least-loaded", "digest": "sha256:77" },
            });
            serde_json::from_value::<Report>(report).expect("a report").sentences()
        };
        let change = json!({ "slot": "prefill", "model": "tiny", "lane": "active", "result": "installed",
                             "reason": "changed", "generation": 4 });
        // O1.12
        assert_eq!(
            report(json!([change]), &[], "least-loaded"),
            "tiny/prefill: the rollback of `least-loaded` is undone\n\
             tiny/prefill: the active lane runs `least-loaded` (generation 4)\n"
        );
        assert_eq!(
            report(json!([]), &["tiny/prefill"], "kv-aware"),
            "tiny/prefill: the rollback of `least-loaded` is undone\n\
             tiny/prefill: `kv-aware` (generation 4) serves until it is compiled\n\
             still compiling: tiny/prefill; it is installed when it is ready\n"
        );
    }
}
