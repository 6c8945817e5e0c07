//! `[models.NAME]`, and thresholds beyond which workers are busy.

use std::{collections::BTreeMap, time::Duration};

use pointsman_routing::{BusyByLeg, RouterConfig};

use super::Problems;
use crate::config::{Model, settings::ModelSettings, slots::is_folder_name};

impl Problems {
    pub(super) fn model(&mut self, name: &str, model: &Model, has_dir: bool) -> ModelSettings {
        let settings = ModelSettings::of(model);
        if !settings.slots.is_empty() && !is_folder_name(name) {
            self.add(
                format!("models.{name}.slots"),
                format!("`{name}` cannot name a directory of policies: expected NAME or OWNER/NAME"),
            );
        }
        for (kind, entry) in &settings.slots {
            self.0.extend(entry.problems(&format!("models.{name}.slots.{kind}"), *kind, has_dir));
        }
        self.busy(&format!("models.{name}.busy"), &settings.busy);
        settings
    }

    /// Checks the values of thresholds. `path` is that of their table.
    pub(super) fn busy(&mut self, path: &str, busy: &BusyByLeg) {
        for (leg, thresholds) in busy {
            if let Err((key, problem)) = thresholds.check() {
                self.add(format!("{path}.{leg}.{key}"), problem);
            }
        }
    }

    /// Checks the parameters of the native cost.
    pub(super) fn cost(&mut self, cost: &RouterConfig) {
        for (key, problem) in cost.problems() {
            self.add(format!("routing.cost.{key}"), problem);
        }
    }

    /// Refuses thresholds of the engines' load figures when these are never read.
    pub(super) fn busy_without_load(
        &mut self,
        busy: &BusyByLeg,
        models: &BTreeMap<String, Model>,
        load_interval: Duration,
    ) {
        if !load_interval.is_zero() {
            return;
        }
        self.without_load("routing.busy", busy);
        for (name, model) in models {
            self.without_load(&format!("models.{name}.busy"), &model.busy);
        }
    }

    fn without_load(&mut self, path: &str, busy: &BusyByLeg) {
        for (leg, thresholds) in busy {
            let keys = [
                ("kv_usage", thresholds.kv_usage.is_some()),
                ("engine_queue", thresholds.engine_queue.is_some()),
            ];
            for (key, _) in keys.into_iter().filter(|(_, is_set)| *is_set) {
                let problem = "the load of engines is never read: set probe.load_interval to more than 0";
                self.add(format!("{path}.{leg}.{key}"), problem);
            }
        }
    }
}
