//! `[policies.slots.SLOT]` and `[models.NAME.slots.SLOT]`: what a slot runs, and its canary and shadow.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use pointsman_config_file::{Changes, section};
use pointsman_embedded_policies::{FORMULA_FILTER, by_name, default_of};
use pointsman_policy_runtime::{
    Access, FormulaSettings, Grant, InheritedBy, LaneSpec, Part, Rank, ScorerPart, SlotSpec, hash_tenants,
};
use pointsman_routing::{NativeMode, Normalize, OnFailure, Picker, SlotKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

mod check;

pub(super) use check::{is_folder_name, list_policies};

/// Content of a slot while its file does not exist, and the settings of its policies. See "Slots".
#[section]
pub struct SlotEntry {
    /// Selector of the host: "round-robin", "random", "power-of-two", "least-loaded", "kv" or "direct".
    #[key(example = "\"round-robin\"")]
    pub native: Option<NativeMode>,
    /// Built-in policy, such as "kv-aware" or "least-loaded".
    #[key(example = "\"least-loaded\"")]
    pub builtin: Option<String>,
    /// Policy by name: parts/NAME.wasm if the file exists, else the built-in one.
    #[key(example = "\"least-loaded\"")]
    pub policy: Option<String>,
    /// Filters, in order. They run before the slot's own file, too.
    #[key(example = "[{ policy = \"low-queue\" }]")]
    pub filters: Vec<PartEntry>,
    /// Scorers. The picker chooses by their weighted costs.
    #[key(example = "[{ policy = \"kv-aware\", weight = 2.0, normalize = \"min-max\" }]")]
    pub scorers: Vec<ScorerEntry>,
    /// How a candidate is chosen from the weighted costs; "min", "weighted-random" or softmax.
    #[key(example = "{ softmax = { temperature = 0.5 } }")]
    pub picker: Option<Picker>,
    /// Passed to `configure` of the policy in the slot's file, and of `builtin` or `policy`. See "Canary and
    /// shadow".
    #[key(example = "{ }")]
    #[schemars(with = "BTreeMap<String, Value>")]
    pub settings: toml::Table,
    /// Imports that its policies may use: "log", "wasi" and "state"; default: "log" and "wasi". See "Grants".
    #[key(example = "[\"log\", \"wasi\"]")]
    pub grants: Option<Vec<Grant>>,
    /// Whether the gateways of `[replicas]` share the memory of its policies; needs the grant "state".
    pub shared_state: bool,
    /// Effect of a failure of this slot's policies; default: policies.on_failure.
    #[key(example = "\"shed\"")]
    pub on_failure: Option<OnFailure>,
    /// Maximum number of candidates that its policies see, at least 8; default: all eligible ones. See
    /// tune.md.
    #[key(example = "64")]
    pub max_rows: Option<u32>,
    /// Policy that serves a share of requests. See "Canary and shadow".
    #[key(example = "{ share = 0.05, builtin = \"least-loaded\" }", nested)]
    pub canary: Option<TrialEntry>,
    /// Policy whose decisions are compared and dropped.
    #[key(example = "{ share = 1.0, builtin = \"least-loaded\" }", nested)]
    pub shadow: Option<TrialEntry>,
}

/// One filter of a slot.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartEntry {
    /// `parts/NAME.wasm` if the file exists, else the built-in policy of this name.
    pub policy: String,
    /// Argument of its `configure`.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, Value>")]
    pub settings: toml::Table,
}

/// One scorer of a slot.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScorerEntry {
    /// `parts/NAME.wasm` if the file exists, else the built-in policy of this name.
    pub policy: String,
    /// Factor of its normalized costs.
    #[serde(default = "one")]
    pub weight: f32,
    /// How its costs are normalized.
    #[serde(default)]
    pub normalize: Normalize,
    /// Argument of its `configure`.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, Value>")]
    pub settings: toml::Table,
}

/// A canary or a shadow. `<slot>.canary.wasm` or `<slot>.shadow.wasm` takes precedence while the file exists.
#[section]
pub struct TrialEntry {
    /// Share of requests; default: 0.05 for a canary, 1 for a shadow.
    #[key(range = 0.0..=1.0, reason = "is not a share")]
    pub share: Option<f64>,
    /// Same as in the slot.
    pub native: Option<NativeMode>,
    /// Same as in the slot.
    pub builtin: Option<String>,
    /// Same as in the slot.
    pub policy: Option<String>,
    /// Same as in the slot, whose value is the default.
    pub filters: Option<Vec<PartEntry>>,
    /// Same as in the slot.
    pub scorers: Vec<ScorerEntry>,
    /// Same as in the slot.
    pub picker: Option<Picker>,
    /// Same as in the slot, whose value is the default for the same policy.
    #[schemars(with = "BTreeMap<String, Value>")]
    pub settings: Option<toml::Table>,
}

/// Reports what a reload changes in the slots of a model. One that only one of two configurations has needs a
/// restart.
pub(super) fn changes(
    before: &BTreeMap<SlotKind, SlotEntry>,
    after: &BTreeMap<SlotKind, SlotEntry>,
    path: &str,
    changes: &mut Changes,
) {
    let kinds: BTreeSet<&SlotKind> = before.keys().chain(after.keys()).collect();
    let only_one = kinds.into_iter().filter(|kind| before.contains_key(kind) != after.contains_key(kind));
    only_one.for_each(|kind| changes.add(format!("{path}.{kind}"), true));
    if before.iter().any(|(kind, entry)| after.get(kind).is_some_and(|new| new != entry)) {
        changes.add(path.to_owned(), false);
    }
}

/// The built-in policy of which a part is a filter.
const FORMULA: &str = "formula";

/// The keys for the content that ranks candidates. At most one of the first four is given.
struct Ranking<'a> {
    native: Option<NativeMode>,
    builtin: Option<&'a String>,
    policy: Option<&'a String>,
    scorers: &'a [ScorerEntry],
    picker: Option<Picker>,
    filters: &'a [PartEntry],
}

impl SlotEntry {
    /// Returns the content that the slot should run. `salt` is the salt of the tenant hashes that policies
    /// see.
    #[must_use]
    pub fn spec(&self, kind: SlotKind, salt: u64) -> SlotSpec {
        let settings = json(&self.settings, salt);
        let (keep, rank) = self.ranking().rank(&settings, salt);
        let rank = rank.unwrap_or_else(|| stock(kind));
        let grants = self.grants.clone().unwrap_or_else(|| Access::DEFAULT.to_vec());
        let own = parts(&self.filters, salt);
        let filters = own.iter().cloned().chain(keep).collect();
        let active = LaneSpec { filters, grants, settings, hash_salt: salt, ..LaneSpec::of(rank) };
        let trial = |entry: &Option<TrialEntry>, share: f64| {
            let entry = entry.clone().unwrap_or_default();
            let own_settings = entry.settings.as_ref().map(|own| json(own, salt));
            let inherited_by = self.inherited_by().filter(|_| own_settings.is_none());
            let settings = own_settings.clone().unwrap_or_else(|| active.settings.clone());
            let filters = entry.filters.as_deref();
            let named = if self.names_same(&entry) { Some(settings.clone()) } else { own_settings };
            let (keep, rank) = entry.ranking().rank(named.as_deref().unwrap_or("{}"), salt);
            let filters = filters.map_or_else(|| own.clone(), |own| parts(own, salt));
            let filters = filters.into_iter().chain(keep).collect();
            let grants = active.grants.clone();
            let share = entry.share.unwrap_or(share);
            LaneSpec { settings, inherited_by, grants, filters, rank, share, hash_salt: salt }
        };
        SlotSpec {
            canary: trial(&self.canary, SlotSpec::CANARY_SHARE),
            shadow: trial(&self.shadow, 1.0),
            active,
            on_failure: self.on_failure,
            max_rows: self.max_rows,
            shared_state: self.shared_state,
        }
    }

    /// Returns whether only policies in files of the slot get the settings.
    #[must_use]
    pub(crate) fn settings_need_file(&self) -> bool {
        !self.settings.is_empty() && self.named().is_none()
    }

    /// Returns the policy that `builtin` or `policy` names. The settings are meant for it.
    fn named(&self) -> Option<&String> {
        self.builtin.as_ref().or(self.policy.as_ref())
    }

    /// Returns whether a trial names the policy that the slot names.
    fn names_same(&self, trial: &TrialEntry) -> bool {
        self.named().is_some_and(|name| trial.builtin.as_ref().or(trial.policy.as_ref()) == Some(name))
    }

    /// Returns the policy in a trial's file that gets the slot's settings; `None` if there are no settings.
    fn inherited_by(&self) -> Option<InheritedBy> {
        let any_or_named = self.named().map_or(InheritedBy::Any, |name| InheritedBy::Named(name.clone()));
        (!self.settings.is_empty()).then_some(any_or_named)
    }

    fn ranking(&self) -> Ranking<'_> {
        Ranking {
            native: self.native,
            builtin: self.builtin.as_ref(),
            policy: self.policy.as_ref(),
            scorers: &self.scorers,
            picker: self.picker,
            filters: &self.filters,
        }
    }
}

impl TrialEntry {
    fn ranking(&self) -> Ranking<'_> {
        Ranking {
            native: self.native,
            builtin: self.builtin.as_ref(),
            policy: self.policy.as_ref(),
            scorers: &self.scorers,
            picker: self.picker,
            filters: self.filters.as_deref().unwrap_or_default(),
        }
    }
}

impl Ranking<'_> {
    /// Returns what ranks candidates, and the filter that belongs to it; `None` when no key names it.
    fn rank(&self, settings: &str, salt: u64) -> (Option<Part>, Option<Rank>) {
        if self.native.is_some() || self.builtin.or(self.policy).is_none() {
            return (None, self.rank_without_filter(settings, salt));
        }
        match self.builtin.or(self.policy).map(String::as_str) {
            Some(FORMULA) => {
                let formulas = FormulaSettings::of(&serde_json::from_str(settings).unwrap_or_default(), salt);
                let keep = formulas.keep.map(|keep| Part::embedded(FORMULA, FORMULA_FILTER, keep));
                let rank = formulas.rank.unwrap_or_else(|| "{}".to_owned());
                (keep, self.rank_without_filter(&rank, salt))
            }
            _ => (None, self.rank_without_filter(settings, salt)),
        }
    }

    fn rank_without_filter(&self, settings: &str, salt: u64) -> Option<Rank> {
        if let Some(mode) = self.native {
            return Some(Rank::Native(mode));
        }
        if let Some(name) = self.builtin {
            return Some(Rank::Policy(Part::embedded(name, by_name(name)?, settings.to_owned())));
        }
        if let Some(name) = self.policy {
            return Some(Rank::Policy(part(name, settings.to_owned())));
        }
        let one = |entry: &ScorerEntry| ScorerPart {
            part: part(&entry.policy, json(&entry.settings, salt)),
            weight: entry.weight,
            normalize: entry.normalize,
        };
        let scorers: Vec<ScorerPart> = self.scorers.iter().map(one).collect();
        let picker = self.picker.unwrap_or_default();
        (!scorers.is_empty()).then_some(Rank::Scorers { scorers, picker })
    }
}

fn one() -> f32 {
    1.0
}

fn part(name: &str, settings: String) -> Part {
    let file = Some(PathBuf::from(format!("parts/{name}.wasm")));
    Part { name: name.to_owned(), file, embedded: by_name(name), settings }
}

fn parts(entries: &[PartEntry], salt: u64) -> Vec<Part> {
    entries.iter().map(|entry| filter(&entry.policy, json(&entry.settings, salt), salt)).collect()
}

fn filter(name: &str, settings: String, salt: u64) -> Part {
    let part = part(name, settings);
    if name != FORMULA {
        return part;
    }
    let formulas = FormulaSettings::of(&serde_json::from_str(&part.settings).unwrap_or_default(), salt);
    let settings = match formulas {
        FormulaSettings { keep: Some(keep), rank: None } => keep,
        // The component refuses what it does not have.
        _ => part.settings,
    };
    Part { embedded: Some(FORMULA_FILTER), settings, ..part }
}

/// Returns what a slot runs without any key.
fn stock(kind: SlotKind) -> Rank {
    let name = default_of(kind.as_str());
    // The slot's settings are meant for a file of the operator or a policy that is named, not for the
    // default.
    let part = |bytes| Rank::Policy(Part::embedded(name, bytes, "{}".to_owned()));
    by_name(name).map_or(Rank::Native(NativeMode::Kv), part)
}

/// Returns the argument of `configure`. Policies know tenants by their salted hash: `tenant:NAME`, as a
/// string or as a key of a table, becomes the decimal hash of the tenant NAME.
fn json(settings: &toml::Table, salt: u64) -> String {
    let mut settings = serde_json::to_value(settings).unwrap_or_else(|_| serde_json::json!({}));
    hash_tenants(&mut settings, salt);
    settings.to_string()
}

#[cfg(test)]
mod tests;
