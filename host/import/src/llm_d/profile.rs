//! Scheduling profiles: filters, scorers and the picker of a slot.

use super::{
    Import,
    config::{Entry, Plugin, Profile},
    filters, scorers,
    slot::{Picker, SlotPlan},
};
use crate::report::{Kind, Place, plain};

/// Types of pickers.
const PICKERS: [(&str, Picker); 3] = [
    ("max-score-picker", Picker::Max),
    ("random-picker", Picker::Random),
    ("weighted-random-picker", Picker::WeightedRandom),
];

/// Returns whether a plugin of this type does its work in a profile.
pub(super) fn is_part(kind: &str) -> bool {
    scorers::is_scorer(kind) || filters::is_filter(kind) || picker(kind).is_some()
}

fn picker(kind: &str) -> Option<Picker> {
    PICKERS.iter().find(|(name, _)| *name == kind).map(|(_, picker)| *picker)
}

impl Import<'_> {
    /// Translates a profile into slots. `legs` are the slots' names.
    pub(super) fn profile(&mut self, profile: &Profile<'_>, legs: &[&str]) -> anyhow::Result<()> {
        let config = self.config;
        let mut plan = SlotPlan::default();
        let mut pickers = 0;
        for entry in &profile.entries {
            let Some(plugin) = config.plugin(entry.plugin) else { continue };
            if let Some(picker) = picker(plugin.kind) {
                pickers += 1;
                self.picker(&mut plan, plugin, entry.place, picker)?;
            } else if scorers::is_scorer(plugin.kind) {
                self.scorer(&mut plan, plugin, entry, profile)?;
            } else if filters::is_filter(plugin.kind) {
                self.filter(&mut plan, plugin, entry.place, legs)?;
            } else {
                self.other(&mut plan, plugin, entry);
            }
            plugin.is_told.set(true);
        }
        if pickers == 0 {
            self.default_picker(&mut plan, profile)?;
        }
        let mut runs = "";
        for leg in legs {
            runs = plan.write(&mut self.draft, leg, profile.name);
        }
        let slots = legs.join(" and ");
        self.report.add(
            if plan.lost { Kind::Approximated } else { Kind::Translated },
            Place::Line(profile.line),
            format!("profile `{}`", plain(profile.name)),
            format!(
                "slot {slots}: {runs}{}",
                if plan.lost { ", without the scorers named below" } else { "" }
            ),
        );
        if plan.uses_engine_figures() {
            self.tell_of_figures();
        }
        Ok(())
    }

    /// Tells once how unknown figures of engines count.
    fn tell_of_figures(&mut self) {
        let theirs = "engine figures that are missing or old";
        if !self.report.mentions(theirs) {
            let ours = "llm-d reads them as an idle engine; here, after 30 s, a worker without figures gets \
                        the mean of the others (max-load-age-ms)";
            self.report.add(Kind::Approximated, Place::Default, theirs, ours);
        }
    }

    fn picker(
        &mut self,
        plan: &mut SlotPlan,
        plugin: &Plugin<'_>,
        place: Place,
        picker: Picker,
    ) -> anyhow::Result<()> {
        let theirs = format!("picker `{}`", plain(plugin.name));
        plan.picker = picker;
        plan.picker_source = format!("{theirs}, {place}");
        let several = plugin.count("maxNumOfEndpoints")?.is_some_and(|count| count > 1);
        let (kind, ours) = match picker {
            Picker::Max if several => {
                (Kind::Approximated, "picker = \"min\": one worker is chosen; retries choose again")
            }
            Picker::Max => (Kind::Translated, "picker = \"min\": the lowest cost, ties are drawn"),
            Picker::Random if several => {
                (Kind::Approximated, "native = \"random\": one worker is chosen; retries choose again")
            }
            Picker::Random => (Kind::Translated, "native = \"random\": the scores do not count"),
            Picker::WeightedRandom => (
                Kind::Approximated,
                "picker = \"weighted-random\": llm-d draws in proportion to the score, here in proportion \
                 to the lead over the worst candidate, which is never drawn",
            ),
        };
        self.report.add(kind, place, theirs, ours);
        Ok(())
    }

    /// Like llm-d, uses the picker that is defined, or else the highest score.
    fn default_picker(&mut self, plan: &mut SlotPlan, profile: &Profile<'_>) -> anyhow::Result<()> {
        let config = self.config;
        let mut defined = config.plugins.iter().filter_map(|plugin| Some((plugin, picker(plugin.kind)?)));
        match (defined.next(), defined.next()) {
            (Some((plugin, picker)), None) => {
                plugin.is_told.set(true);
                self.picker(plan, plugin, plugin.place, picker)
            }
            (None, _) => {
                plan.picker_source = "max-score-picker by default".to_owned();
                Ok(())
            }
            (Some(_), Some(_)) => {
                plan.picker_source = "max-score-picker".to_owned();
                self.report.add(
                    Kind::Approximated,
                    Place::Line(profile.line),
                    format!("picker of the profile `{}`", plain(profile.name)),
                    "picker = \"min\": the profile names none, and llm-d takes any of those that are defined",
                );
                Ok(())
            }
        }
    }

    /// A plugin that does nothing in a profile, or that is not known.
    fn other(&mut self, plan: &mut SlotPlan, plugin: &Plugin<'_>, entry: &Entry<'_>) {
        let theirs = format!("plugin `{}` in a profile", plain(plugin.name));
        plugin.read_all();
        let note = super::notes::of(plugin.kind);
        // It may be a scorer, so the workers are not all equal.
        plan.lost |= note.is_none();
        let (kind, ours) =
            note.unwrap_or((Kind::Missing, "its type is not known: write a policy, or leave it out"));
        self.report.add(kind, entry.place, theirs, ours);
    }
}
