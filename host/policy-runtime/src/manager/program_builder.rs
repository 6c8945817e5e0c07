//! Builds the program of a lane from its spec and the policy directory: read, check, load, compose. A lane
//! gets all of its parts or none. Knows no generations.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use pointsman_routing::{
    Digest, NativeMode, Normalize, Origin, Picker, Policy, Program, SlotKind, WeightedScorer, World,
};

use super::{
    command::SlotName,
    compiler::{Compiler, NotLoaded},
    folder::Folder,
    plan::{CheckedFile, Plan, PlannedRank, RankFile, Refused, ResolvedPart},
};
use crate::{
    access::Access,
    engine::PolicyEngine,
    formula::{FormulaComponents, FormulaSettings, MAX_FORMULA_FILE_BYTES, formula_file},
    loaded::digest,
    refusal::Refusal,
    spec::{InheritedBy, LaneSpec, Part, Rank, ScorerPart},
    trust::TrustRules,
};

mod combine;

use combine::{both, gather, gather_parts};

/// Parts that a message lists.
const MAX_NAMES: usize = 20;
/// Largest signature file, bytes.
const MAX_SIGNATURE_BYTES: usize = 64 * 1024;

pub(super) struct ProgramBuilder {
    pub(super) folder: Folder,
    pub(super) trust: TrustRules,
    pub(super) compiler: Compiler,
    pub(super) formulas: Option<FormulaComponents>,
    /// Names of the built-in policies, for messages.
    pub(super) built_in: &'static str,
    /// Digests of own files that turned out to be filters. Such a file needs the spec's rank beside it.
    filters: HashSet<Digest>,
}

/// Parts of a lane's own file.
#[derive(Default)]
struct OwnFile {
    /// The filter of a formula file that ranks, too.
    keep: Option<ResolvedPart>,
    main: Option<ResolvedPart>,
}

/// Reason why a program could not be built.
#[derive(Debug)]
pub(super) enum BuildError {
    Refused(Refused),
    /// A part is being compiled. The caller builds again when a job has finished.
    Pending,
}

impl From<Refused> for BuildError {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl ProgramBuilder {
    pub(super) fn new(engine: PolicyEngine, folder: Folder, trust: TrustRules) -> Self {
        let (compiler, filters) = (Compiler::new(engine), HashSet::new());
        Self { folder, trust, compiler, formulas: None, built_in: "none", filters }
    }

    /// Reads the lane's own `file` and what `spec` names. Returns `None` when both are empty.
    pub(super) fn plan(&self, file: Option<&Path>, spec: &LaneSpec) -> Result<Option<Plan>, Refused> {
        let (keep, own) = match file.map_or(Ok(OwnFile::default()), |file| self.read_own(file, spec)) {
            Ok(OwnFile { keep, main }) => (keep, Ok(main)),
            Err(refused) => (None, Err(refused)),
        };
        let needs_rank =
            |own: &Option<ResolvedPart>| own.as_ref().is_none_or(|own| self.filters.contains(&own.digest));
        let rank = match &spec.rank {
            Some(rank) if own.as_ref().is_ok_and(needs_rank) => self.plan_rank(rank).map(Some),
            _ => Ok(None),
        };
        if matches!((&own, &rank), (Ok(None), Ok(None))) {
            return Ok(None);
        }
        let filters = gather(spec.filters.iter().map(|part| self.resolve(part)));
        match (own, rank, filters) {
            (Ok(own), Ok(rank), Ok(filters)) => Ok(Some(Plan::new(own, (filters, keep), rank, &spec.grants))),
            (own, rank, filters) => {
                let mut refused = own.err().into_iter().chain(rank.err()).chain(filters.err());
                // There is at least one.
                refused.next().map_or(Ok(None), |first| Err(first.and(refused)))
            }
        }
    }

    fn plan_rank(&self, rank: &Rank) -> Result<PlannedRank, Refused> {
        Ok(match rank {
            Rank::Native(mode) => PlannedRank::Native(*mode),
            Rank::Policy(part) => PlannedRank::Policy(self.resolve(part)?),
            Rank::Scorers { scorers, picker } => {
                let resolve =
                    |scorer: &ScorerPart| Ok((self.resolve(&scorer.part)?, scorer.weight, scorer.normalize));
                PlannedRank::Scorers(gather(scorers.iter().map(resolve))?, *picker)
            }
            Rank::File { file, lane } => {
                let OwnFile { keep, main } = self.read_own(file, lane)?;
                let missing = || Refused::new(file.clone(), None, self.missing(&file.display().to_string()));
                let (main, grants) = (main.ok_or_else(missing)?, lane.grants.clone());
                PlannedRank::File(Box::new(RankFile { keep, main, grants }))
            }
        })
    }

    /// Returns whether a lane's own `file` is there and ranks. One that cannot be used counts: its refusal is
    /// that of the plan. A filter is known once it was loaded.
    pub(super) fn ranks(&self, file: &Path, spec: &LaneSpec) -> bool {
        let own = self.read_own(file, spec).map(|own| own.main);
        own.map_or(true, |own| own.is_some_and(|own| !self.filters.contains(&own.digest)))
    }

    /// Returns the content of a part: its file's while that exists, else the built-in one.
    fn resolve(&self, part: &Part) -> Result<ResolvedPart, Refused> {
        if let Some(file) = &part.file
            && let Some(resolved) = self.read(file, &part.settings)?
        {
            return Ok(ResolvedPart { name: part.name.clone(), ..resolved });
        }
        let Some(bytes) = part.embedded else {
            let file = part.file.clone().unwrap_or_default();
            return Err(Refused::new(file, None, self.missing(&part.name)));
        };
        let digest = digest(bytes);
        Ok(ResolvedPart {
            name: part.name.clone(),
            bytes: Arc::from(bytes),
            code: digest,
            digest,
            is_built_in: true,
            settings: part.settings.clone(),
            settings_for: None,
            origin: Origin::Embedded,
            signed: None,
        })
    }

    /// Returns the name that a ranking policy gives itself, once it was loaded.
    pub(super) fn name_of(&self, rank: &Rank) -> Option<&str> {
        let Rank::Policy(part) = rank else { return None };
        self.compiler.name(self.resolve(part).ok()?.digest)
    }

    /// Returns the refusal of a part that is nowhere, with the names that there are.
    fn missing(&self, name: &str) -> Refusal {
        let parts = self.folder.parts();
        let more = parts.len().saturating_sub(MAX_NAMES);
        let mut found = parts.into_iter().take(MAX_NAMES).collect::<Vec<_>>().join(", ");
        if more > 0 {
            found.push_str(&format!(" and {more} more"));
        }
        Refusal::MissingPart {
            name: name.to_owned(),
            found: if found.is_empty() { "nothing".to_owned() } else { found },
            built_in: self.built_in,
        }
    }

    /// Returns whether the lane's own file exists, as a component or as formulas.
    pub(super) fn has(&self, file: &Path) -> bool {
        self.find(file).is_some()
    }

    /// Returns the lane's own file, or the formula file in its place, if one of them exists.
    pub(super) fn find(&self, file: &Path) -> Option<PathBuf> {
        if self.folder.has(file) {
            return Some(file.to_owned());
        }
        Some(formula_file(file)).filter(|formula| self.formulas.is_some() && self.folder.has(formula))
    }

    /// Reads the lane's own `file`, or the formula file in its place.
    fn read_own(&self, file: &Path, spec: &LaneSpec) -> Result<OwnFile, Refused> {
        let main = self.read(file, &spec.settings)?.map(|main| match &spec.inherited_by {
            Some(InheritedBy::Named(name)) => {
                let digest = main.digest;
                let main = ResolvedPart { settings_for: Some(name.clone()), ..main };
                match self.compiler.name(digest) {
                    Some(own) => main.named(own),
                    None => main,
                }
            }
            _ => main,
        });
        let formula = formula_file(file);
        let Some(components) = self.formulas.filter(|_| self.folder.has(&formula)) else {
            return Ok(OwnFile { keep: None, main });
        };
        let refused = |digest, refusal| Refused::new(formula.clone(), digest, refusal);
        if main.is_some() {
            return Err(refused(None, Refusal::TwoFiles(file.display().to_string())));
        }
        let Some(CheckedFile { bytes, digest, signed }) =
            self.read_checked(&formula, MAX_FORMULA_FILE_BYTES)?
        else {
            return Ok(OwnFile::default());
        };
        let text =
            std::str::from_utf8(&bytes).map_err(|_| "the file is not UTF-8; write it as text".to_owned());
        let settings = text.and_then(|text| FormulaSettings::of_file(text, spec.hash_salt));
        let settings = settings.map_err(|why| refused(Some(digest), Refusal::Formula(why)))?;
        let part = |component: &'static [u8], settings: String| ResolvedPart {
            name: formula.display().to_string(),
            bytes: Arc::from(component),
            code: crate::loaded::digest(component),
            digest,
            is_built_in: true,
            settings,
            settings_for: None,
            origin: Origin::File(formula.clone()),
            signed: signed.clone(),
        };
        let keep = settings.keep.map(|settings| part(components.filter, settings));
        Ok(match settings.rank.map(|settings| part(components.selector, settings)) {
            Some(rank) => OwnFile { keep, main: Some(rank) },
            None => OwnFile { keep: None, main: keep },
        })
    }

    /// Reads a file and checks its signature and pin. Returns `None` when it does not exist.
    fn read(&self, file: &Path, settings: &str) -> Result<Option<ResolvedPart>, Refused> {
        let limit = self.compiler.engine.limits().file_bytes;
        let checked = self.read_checked(file, limit)?;
        Ok(checked.map(|CheckedFile { bytes, digest, signed }| ResolvedPart {
            name: file.display().to_string(),
            bytes: Arc::from(bytes),
            code: digest,
            digest,
            is_built_in: false,
            settings: settings.to_owned(),
            settings_for: None,
            origin: Origin::File(file.to_owned()),
            signed,
        }))
    }

    /// Reads the bytes of a file, and checks signature and pin. Returns `None` when it does not exist.
    fn read_checked(&self, file: &Path, limit: usize) -> Result<Option<CheckedFile>, Refused> {
        let refused = |digest, refusal| Refused::new(file.to_owned(), digest, refusal);
        let bytes = match self.folder.read(file, limit) {
            None => return Ok(None),
            Some(Err(refusal)) => return Err(refused(None, refusal)),
            Some(Ok(bytes)) => bytes,
        };
        let digest = digest(&bytes);
        let signature = || {
            let mut name = file.as_os_str().to_owned();
            name.push(".minisig");
            String::from_utf8(self.folder.read(Path::new(&name), MAX_SIGNATURE_BYTES)?.ok()?).ok()
        };
        let checked = self.trust.check(file, &bytes, digest, signature);
        let signed = checked.map_err(|refusal| refused(Some(digest), refusal))?;
        Ok(Some(CheckedFile { bytes, digest, signed }))
    }

    /// Loads all parts of the plan and composes the program. The plan may grow: a filter in the lane's own
    /// file adds the rank of `spec`. `access`: that of the slot.
    pub(super) fn build(
        &mut self,
        (slot, model): SlotName,
        plan: &mut Plan,
        spec: &LaneSpec,
        access: &Access,
    ) -> Result<Program, BuildError> {
        self.compiler.begin(model);
        let (of_slot, access) = (access, &access.granting(&spec.grants));
        let filters = plan.filters.iter().map(|part| self.load_as(part, access, World::Filter, "filters"));
        let mut filters = gather_parts(filters);
        if let Some(own) = plan.own.clone() {
            let (mut behind, policy) = both(filters, self.load(&own, access))?;
            plan.settle_settings(&policy.info().name, &spec.grants);
            if policy.info().world != World::Filter {
                return program(slot, behind, policy).map_err(|refusal| own.refused(refusal).into());
            }
            if slot == SlotKind::DecodeOverride {
                return Err(own.refused(Refusal::WrongSlot { world: World::Filter, slot }).into());
            }
            let Some(rank) = spec.rank.as_ref().filter(|rank| !matches!(rank, Rank::Native(_))) else {
                return Err(own.refused(Refusal::NoRank(slot)).into());
            };
            if self.filters.insert(own.digest) || plan.rank.is_none() {
                plan.add_rank(self.plan_rank(rank)?, &spec.grants);
            }
            behind.push(policy);
            filters = Ok(behind);
        }
        match &plan.rank {
            Some(PlannedRank::Native(mode)) => filters.map(|_| Program::Native(*mode)),
            Some(PlannedRank::Policy(part)) => {
                let (filters, policy) = both(filters, self.load(part, access))?;
                program(slot, filters, policy).map_err(|refusal| {
                    let refusal = match refusal {
                        Refusal::WrongSlot { world, slot } => Refusal::WrongNamed { world, slot },
                        other => other,
                    };
                    part.refused(refusal).into()
                })
            }
            Some(PlannedRank::Scorers(parts, picker)) => {
                let load = |(part, weight, normalize): &(ResolvedPart, f32, Normalize)| {
                    let policy = self.load_as(part, access, World::Scorer, "scorers")?;
                    Ok(WeightedScorer { policy, weight: *weight, normalize: *normalize })
                };
                let (filters, scorers) = both(filters, gather_parts(parts.iter().map(load)))?;
                Ok(Program::Scorers { filters, scorers, picker: *picker })
            }
            Some(PlannedRank::File(file)) => {
                let RankFile { keep, main, grants } = &**file;
                let access = &of_slot.granting(grants);
                let keep = gather_parts(keep.iter().map(|part| self.load(part, access)));
                let (mut filters, (keep, policy)) = both(filters, both(keep, self.load(main, access)))?;
                filters.extend(keep);
                program(slot, filters, policy).map_err(|refusal| main.refused(refusal).into())
            }
            // Unreachable: a plan without an own file has a rank.
            None => Ok(Program::Native(NativeMode::Kv)),
        }
    }

    /// Returns the refusal of every part that `spec` names, each loaded by itself.
    pub(super) fn refused_parts(&mut self, spec: &LaneSpec, access: &Access) -> Vec<Refused> {
        let ranking: Vec<&Part> = match &spec.rank {
            Some(Rank::Policy(part)) => vec![part],
            Some(Rank::Scorers { scorers, .. }) => scorers.iter().map(|scorer| &scorer.part).collect(),
            Some(Rank::Native(_) | Rank::File { .. }) | None => Vec::new(),
        };
        let access = access.granting(&spec.grants);
        let mut refused = Vec::new();
        for part in spec.filters.iter().chain(ranking) {
            let loaded =
                self.resolve(part).map_err(BuildError::from).and_then(|part| self.load(&part, &access));
            if let Err(BuildError::Refused(error)) = loaded {
                refused.push(error);
            }
        }
        refused
    }

    fn load_as(
        &mut self,
        part: &ResolvedPart,
        access: &Access,
        world: World,
        among: &'static str,
    ) -> Result<Arc<dyn Policy>, BuildError> {
        let policy = self.load(part, access)?;
        let found = policy.info().world;
        if found == world {
            return Ok(policy);
        }
        Err(part.refused(Refusal::Misplaced { name: part.name.clone(), world: found, among }).into())
    }

    fn load(&mut self, part: &ResolvedPart, access: &Access) -> Result<Arc<dyn Policy>, BuildError> {
        match self.compiler.load(part.job(access)) {
            Ok(policy) => Ok(policy),
            Err(NotLoaded::Refused(refusal)) => Err(part.refused(refusal).into()),
            Err(NotLoaded::Pending) => Err(BuildError::Pending),
        }
    }
}

/// Composes the program of a policy that ranks or decides, after `filters`.
fn program(
    slot: SlotKind,
    filters: Vec<Arc<dyn Policy>>,
    policy: Arc<dyn Policy>,
) -> Result<Program, Refusal> {
    match (policy.info().world, slot) {
        (World::DecodeOverride, SlotKind::DecodeOverride) => Ok(Program::DecodeOverride(policy)),
        (World::Selector, kind) if kind != SlotKind::DecodeOverride => {
            Ok(Program::Selector { filters, selector: policy })
        }
        (World::Scorer, kind) if kind != SlotKind::DecodeOverride => {
            let scorers = vec![WeightedScorer { policy, weight: 1.0, normalize: Normalize::None }];
            Ok(Program::Scorers { filters, scorers, picker: Picker::Min })
        }
        (world, slot) => Err(Refusal::WrongSlot { world, slot }),
    }
}
