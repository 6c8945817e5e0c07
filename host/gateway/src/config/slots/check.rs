//! What is wrong with the entry of a slot, all of it, each with its dotted path.

use pointsman_embedded_policies::by_name;
use pointsman_routing::{Picker, SlotKind};

use super::{Ranking, SlotEntry};

impl SlotEntry {
    /// What is wrong with the entry at `path`; `dir`: whether there is a policy folder.
    pub(in crate::config) fn problems(&self, path: &str, kind: SlotKind, dir: bool) -> Vec<String> {
        let mut problems = self.ranking().problems(path, kind, dir);
        for (name, trial) in [("canary", &self.canary), ("shadow", &self.shadow)] {
            let Some(trial) = trial else { continue };
            let path = format!("{path}.{name}");
            if let Some(share) = trial.share.filter(|share| !(0.0..=1.0).contains(share)) {
                problems.push(format!("{path}.share: `{share}` is not within 0 to 1"));
            }
            problems.extend(trial.ranking().problems(&path, kind, dir));
        }
        problems
    }
}

impl Ranking<'_> {
    fn problems(&self, path: &str, kind: SlotKind, dir: bool) -> Vec<String> {
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
            problems.push(format!("{path}: {} are given, one of them is enough", given.join(" and ")));
        }
        if let Some(name) = self.builtin.filter(|name| by_name(name).is_none()) {
            problems.push(format!("{path}.builtin: `{name}` is not built in"));
        }
        if self.picker.is_some() && self.scorers.is_empty() {
            problems.push(format!("{path}.picker: there are no `scorers` to pick by"));
        }
        if let Some(Picker::Softmax { temperature }) = self.picker
            && !(temperature.is_finite() && temperature > 0.0)
        {
            problems.push(format!("{path}.picker.softmax.temperature: `{temperature}` is not above 0"));
        }
        if kind == SlotKind::DecodeOverride {
            self.misfits(path, &mut problems);
        } else if self.native.is_some() && !self.filters.is_empty() {
            problems.push(format!("{path}.filters: a native selector takes no filters"));
        }
        self.bad_parts(path, dir, &mut problems);
        problems
    }

    /// What has no place in the decode-override slot.
    fn misfits(&self, path: &str, problems: &mut Vec<String>) {
        if self.native.is_some() {
            problems.push(format!(
                "{path}.native: this slot takes no selector; leave it out for the native override"
            ));
        }
        for (key, given) in [("filters", !self.filters.is_empty()), ("scorers", !self.scorers.is_empty())] {
            if given {
                problems.push(format!("{path}.{key}: this slot takes one decode override"));
            }
        }
    }

    fn bad_parts(&self, path: &str, dir: bool, problems: &mut Vec<String>) {
        let mut check = |place: String, name: &str| {
            if !is_plain(name) {
                problems.push(format!("{place}: `{name}` cannot be the name of a file"));
            } else if !dir && by_name(name).is_none() {
                problems.push(format!("{place}: `{name}` is not built in, and there is no `policies.dir`"));
            }
        };
        if let Some(name) = self.policy {
            check(format!("{path}.policy"), name);
        }
        for (place, filter) in self.filters.iter().enumerate() {
            check(format!("{path}.filters[{place}].policy"), &filter.policy);
        }
        for (place, scorer) in self.scorers.iter().enumerate() {
            check(format!("{path}.scorers[{place}].policy"), &scorer.policy);
        }
        for (place, scorer) in self.scorers.iter().enumerate() {
            let weight = scorer.weight;
            if !weight.is_finite() || weight < 0.0 {
                problems.push(format!(
                    "{path}.scorers[{place}].weight: `{weight}` is not a finite number of 0 or more"
                ));
            }
        }
    }
}

/// Whether a model of this name may have a folder of its own: plain names, one slash at most.
pub(in crate::config) fn is_folder_name(name: &str) -> bool {
    let mut names = name.split('/');
    names.clone().count() <= 2 && names.clone().all(is_plain) && names.next() != Some("parts")
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}
