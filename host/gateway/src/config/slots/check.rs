//! Validation of a slot's entry: reports everything that is wrong, each with its dotted path.

use pointsman_embedded_policies::{NAMES, by_name};
use pointsman_policy_runtime::Grant;
use pointsman_routing::{MIN_ROWS, Picker, SlotKind};

use super::{Ranking, SlotEntry};
use crate::config::Problem;

/// The problem of settings that no policy gets.
const NO_POLICY: &str = "no policy gets them: name one with `builtin` or `policy`, set `policies.dir` to run a file, \
                         or remove them";

impl SlotEntry {
    /// Returns what is wrong with the entry at `path`; `has_dir`: there is a directory of policies.
    pub(in crate::config) fn problems(&self, path: &str, kind: SlotKind, has_dir: bool) -> Vec<Problem> {
        let mut problems = self.ranking().problems(path, kind, has_dir);
        if self.shared_state && !self.grants.as_ref().is_some_and(|grants| grants.contains(&Grant::State)) {
            let message = "needs the grant `state`: add `state` to `grants` of this slot";
            problems.push(Problem::new(format!("{path}.shared_state"), message));
        }
        if !has_dir && self.settings_need_file() {
            problems.push(Problem::new(format!("{path}.settings"), NO_POLICY));
        }
        if let Some(rows) = self.max_rows.filter(|rows| *rows < MIN_ROWS) {
            let message = format!("`{rows}` is too few: expected at least {MIN_ROWS}");
            problems.push(Problem::new(format!("{path}.max_rows"), message));
        }
        if self.max_rows.is_some() && kind == SlotKind::DecodeOverride {
            let message = "this slot sees all candidates: remove the key";
            problems.push(Problem::new(format!("{path}.max_rows"), message));
        }
        for (name, trial) in [("canary", &self.canary), ("shadow", &self.shadow)] {
            let Some(trial) = trial else { continue };
            let path = format!("{path}.{name}");
            let unnamed = trial.builtin.is_none() && trial.policy.is_none();
            if !has_dir && unnamed && trial.settings.as_ref().is_some_and(|settings| !settings.is_empty()) {
                problems.push(Problem::new(format!("{path}.settings"), NO_POLICY));
            }
            if let Some(share) = trial.share.filter(|share| !(0.0..=1.0).contains(share)) {
                let message = format!("`{share}` is not a share: expected 0 to 1");
                problems.push(Problem::new(format!("{path}.share"), message));
            }
            problems.extend(trial.ranking().problems(&path, kind, has_dir));
        }
        problems
    }
}

impl Ranking<'_> {
    fn problems(&self, path: &str, kind: SlotKind, has_dir: bool) -> Vec<Problem> {
        let mut problems = Vec::new();
        let given = [
            ("native", self.native.is_some()),
            ("builtin", self.builtin.is_some()),
            ("policy", self.policy.is_some()),
            ("scorers", !self.scorers.is_empty()),
        ];
        let given: Vec<String> =
            given.iter().filter(|(_, given)| *given).map(|(key, _)| format!("`{key}`")).collect();
        if given.len() > 1 {
            let message = format!("{} exclude each other: keep one of them", given.join(" and "));
            problems.push(Problem::new(path, message));
        }
        let mut add = |key: &str, message: String| {
            problems.push(Problem::new(format!("{path}.{key}"), message));
        };
        if let Some(name) = self.builtin.filter(|name| by_name(name).is_none()) {
            add("builtin", format!("`{name}` is not a built-in policy: expected {NAMES}"));
        }
        if self.picker.is_some() && self.scorers.is_empty() {
            add("picker", "a picker needs `scorers`: add them or remove the key".to_owned());
        }
        if let Some(Picker::Softmax { temperature }) = self.picker
            && !(temperature.is_finite() && temperature > 0.0)
        {
            let message = format!("`{temperature}` is not a temperature: expected more than 0");
            add("picker.softmax.temperature", message);
        }
        if kind == SlotKind::DecodeOverride {
            self.check_decode_override(&mut add);
        } else if self.native.is_some() && !self.filters.is_empty() {
            add("filters", "a native selector takes no filters: remove one of the two keys".to_owned());
        }
        self.check_parts(has_dir, &mut add);
        problems
    }

    /// Reports keys that the decode-override slot does not have.
    fn check_decode_override(&self, add: &mut impl FnMut(&str, String)) {
        if self.native.is_some() {
            let message = "this slot takes no selector: remove the key to use the native override";
            add("native", message.to_owned());
        }
        for (key, given) in [("filters", !self.filters.is_empty()), ("scorers", !self.scorers.is_empty())] {
            if given {
                add(
                    key,
                    "this slot takes one decode override: name it with `policy` or `builtin`".to_owned(),
                );
            }
        }
    }

    fn check_parts(&self, has_dir: bool, add: &mut impl FnMut(&str, String)) {
        let mut check = |key: &str, name: &str| {
            // Files of the directory are found, or listed, when the slot is built.
            let file = if has_dir {
                "or the name of a file in `parts/`"
            } else {
                "or set `policies.dir` to use a file"
            };
            if name.is_empty() {
                add(key, format!("no policy is named: expected {NAMES}, {file}"));
            } else if !is_plain(name) {
                add(
                    key,
                    format!("`{name}` cannot name a file: expected a name without `/` or a leading `.`"),
                );
            } else if !has_dir && by_name(name).is_none() {
                add(key, format!("`{name}` is not a built-in policy: expected {NAMES}, {file}"));
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
        for (index, scorer) in self.scorers.iter().enumerate() {
            let weight = scorer.weight;
            if !weight.is_finite() || weight < 0.0 {
                let message = format!("`{weight}` is not a weight: expected a finite number of 0 or more");
                add(&format!("scorers[{index}].weight"), message);
            }
        }
    }
}

/// Whether a model of this name may have a directory of its own: plain names, at most one slash.
pub(in crate::config) fn is_folder_name(name: &str) -> bool {
    let mut names = name.split('/');
    names.clone().count() <= 2 && names.clone().all(is_plain) && names.next() != Some("parts")
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}
