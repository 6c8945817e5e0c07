//! Rules of a slot's entry.

use pointsman_config_file::{Problem, Report};
use pointsman_embedded_policies::{NAMES, by_name};
use pointsman_policy_runtime::Grant;
use pointsman_routing::{MIN_ROWS, Picker, SlotKind};

use super::{Ranking, SlotEntry};

/// The problem of settings that no policy gets.
const NO_POLICY: &str = "no policy gets them: name one with `builtin` or `policy`, set `policies.dir` to run a file, \
                         or remove them";

/// Lists the policies where a filter or scorer names none.
pub(in crate::config) fn list_policies(problem: &mut Problem) {
    if problem.message == "missing field `policy`" {
        problem.message = format!("no policy is named: expected {NAMES}, or the name of a file in `parts/`");
    }
}

impl SlotEntry {
    /// Reports what is wrong with the entry; `has_dir`: there is a directory of policies.
    pub(in crate::config) fn check_content(&self, kind: SlotKind, has_dir: bool, report: &mut Report<'_>) {
        self.ranking().check(kind, has_dir, report);
        if self.shared_state && !self.grants.as_ref().is_some_and(|grants| grants.contains(&Grant::State)) {
            report.add("shared_state", "needs the grant `state`: add `state` to `grants` of this slot");
        }
        if !has_dir && self.settings_need_file() {
            report.add("settings", NO_POLICY);
        }
        if let Some(rows) = self.max_rows.filter(|rows| *rows < MIN_ROWS) {
            report.add("max_rows", format!("`{rows}` is too few: expected at least {MIN_ROWS}"));
        }
        if self.max_rows.is_some() && kind == SlotKind::DecodeOverride {
            report.add("max_rows", "this slot sees all candidates: remove the key");
        }
        for (name, trial) in [("canary", &self.canary), ("shadow", &self.shadow)] {
            let Some(trial) = trial else { continue };
            let mut report = report.at(name);
            let unnamed = trial.builtin.is_none() && trial.policy.is_none();
            if !has_dir && unnamed && trial.settings.as_ref().is_some_and(|settings| !settings.is_empty()) {
                report.add("settings", NO_POLICY);
            }
            trial.ranking().check(kind, has_dir, &mut report);
        }
    }
}

impl Ranking<'_> {
    fn check(&self, kind: SlotKind, has_dir: bool, report: &mut Report<'_>) {
        let given = [
            ("native", self.native.is_some()),
            ("builtin", self.builtin.is_some()),
            ("policy", self.policy.is_some()),
            ("scorers", !self.scorers.is_empty()),
        ];
        let given: Vec<String> =
            given.iter().filter(|(_, given)| *given).map(|(key, _)| format!("`{key}`")).collect();
        if given.len() > 1 {
            report.add("", format!("{} exclude each other: keep one of them", given.join(" and ")));
        }
        if let Some(name) = self.builtin.filter(|name| by_name(name).is_none()) {
            report.add("builtin", format!("`{name}` is not a built-in policy: expected {NAMES}"));
        }
        if self.picker.is_some() && self.scorers.is_empty() {
            report.add("picker", "a picker needs `scorers`: add them or remove the key");
        }
        if let Some(Picker::Softmax { temperature }) = self.picker
            && !(temperature.is_finite() && temperature > 0.0)
        {
            let message = format!("`{temperature}` is not a temperature: expected more than 0");
            report.add("picker.softmax.temperature", message);
        }
        if kind == SlotKind::DecodeOverride {
            self.check_decode_override(report);
        } else if self.native.is_some() && !self.filters.is_empty() {
            report.add("filters", "a native selector takes no filters: remove one of the two keys");
        }
        self.check_parts(has_dir, report);
    }

    /// Reports keys that the decode-override slot does not have.
    fn check_decode_override(&self, report: &mut Report<'_>) {
        if self.native.is_some() {
            report.add("native", "this slot takes no selector: remove the key to use the native override");
        }
        for (key, given) in [("filters", !self.filters.is_empty()), ("scorers", !self.scorers.is_empty())] {
            if given {
                report.add(key, "this slot takes one decode override: name it with `policy` or `builtin`");
            }
        }
    }

    fn check_parts(&self, has_dir: bool, report: &mut Report<'_>) {
        let mut check = |key: &str, name: &str| {
            // Files of the directory are found, or listed, when the slot is built.
            let file = if has_dir {
                "or the name of a file in `parts/`"
            } else {
                "or set `policies.dir` to use a file"
            };
            if name.is_empty() {
                report.add(key, format!("no policy is named: expected {NAMES}, {file}"));
            } else if !is_plain(name) {
                let message =
                    format!("`{name}` cannot name a file: expected a name without `/` or a leading `.`");
                report.add(key, message);
            } else if !has_dir && by_name(name).is_none() {
                report.add(key, format!("`{name}` is not a built-in policy: expected {NAMES}, {file}"));
            }
        };
        if let Some(name) = self.policy {
            check("policy", name);
        }
        for (index, filter) in self.filters.iter().enumerate() {
            check(&format!("filters[{index}].policy"), &filter.policy);
        }
        for (index, scorer) in self.scorers.iter().enumerate() {
            check(&format!("scorers[{index}].policy"), &scorer.policy);
        }
        for (index, weight) in self.scorers.iter().map(|scorer| scorer.weight).enumerate() {
            if !weight.is_finite() || weight < 0.0 {
                let message = format!("`{weight}` is not a weight: expected a finite number of 0 or more");
                report.add(&format!("scorers[{index}].weight"), message);
            }
        }
    }
}

/// Returns whether a model of this name may have a directory of its own: plain names, at most one slash.
pub(in crate::config) fn is_folder_name(name: &str) -> bool {
    let mut names = name.split('/');
    names.clone().count() <= 2 && names.clone().all(is_plain) && names.next() != Some("parts")
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}
