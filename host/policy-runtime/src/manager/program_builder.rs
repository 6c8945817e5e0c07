//! From a spec and the folder's files to a program: read, check, load, put together. All or nothing.
//!
//! Content has a fingerprint: the digests of all its parts with their settings and weights. It decides whether anything changed,
//! and what is quarantined; the same code with other settings is other content.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use pointsman_routing::{
    Digest, NativeMode, Normalize, Origin, Picker, Policy, Program, SlotKind, WeightedScorer, World,
};
use sha2::{Digest as _, Sha256};

use super::{
    compile_queue::{CompileQueue, Job, Key, Made},
    folder::Folder,
};
use crate::{
    access::{Access, Grant},
    engine::PolicyEngine,
    loaded::{LoadedPolicy, digest},
    refusal::Refusal,
    spec::{LaneSpec, Part, Rank},
    trust::TrustRules,
};

/// Largest signature file, bytes.
const SIGNATURE: usize = 64 * 1024;

/// What programs are made with.
pub(super) struct ProgramBuilder {
    pub(super) engine: PolicyEngine,
    pub(super) folder: Folder,
    pub(super) trust: TrustRules,
    /// What is loaded now: a slot of which one part changed loads that part only.
    loaded: HashMap<Key, Weak<LoadedPolicy>>,
    /// Compiles beside; until there is one, what is missing is loaded at once.
    pub(super) compile_queue: Option<CompileQueue>,
    /// What the compile_queue has been given.
    under_way: HashSet<Key>,
    /// What came of it, kept until nothing is under way: several lanes may have waited for it.
    made: HashMap<Key, Made>,
    /// Time that loading took of what the present program is made of.
    pub(super) took: Duration,
    /// Worlds of files that were loaded before: a filter in a slot's own file needs something else to rank.
    filters: HashSet<Digest>,
}

/// Why there is no program.
#[derive(Debug)]
pub(super) enum BuildError {
    Refused(Refused),
    /// A part is with the compile_queue: to be asked again when that has made something.
    Pending,
}

impl From<Refused> for BuildError {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

/// A refusal with the file it is about.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) file: PathBuf,
    pub(super) digest: Option<Digest>,
    pub(super) refusal: Box<Refusal>,
}

/// One part, read and let in.
#[derive(Clone)]
struct ResolvedPart {
    name: String,
    bytes: Arc<[u8]>,
    digest: Digest,
    settings: String,
    origin: Origin,
}

enum PlannedRank {
    Native(NativeMode),
    Policy(ResolvedPart),
    Scorers(Vec<(ResolvedPart, f32, Normalize)>, Picker),
}

/// A lane's content before anything of it is parsed.
pub(super) struct Planned {
    own: Option<ResolvedPart>,
    filters: Vec<ResolvedPart>,
    rank: Option<PlannedRank>,
    pub(super) fingerprint: Digest,
}

impl Planned {
    /// The digest of the file an operator would name: the lane's own, or that of the only ranking part.
    pub(super) fn main(&self) -> Option<Digest> {
        let ranking = match &self.rank {
            Some(PlannedRank::Policy(part)) => Some(part),
            _ => None,
        };
        self.own.as_ref().or(ranking).map(|part| part.digest)
    }

    pub(super) fn has_own(&self) -> bool {
        self.own.is_some()
    }
}

impl ProgramBuilder {
    pub(super) fn new(engine: PolicyEngine, folder: Folder, trust: TrustRules) -> Self {
        Self {
            engine,
            folder,
            trust,
            loaded: HashMap::new(),
            compile_queue: None,
            under_way: HashSet::new(),
            made: HashMap::new(),
            took: Duration::ZERO,
            filters: HashSet::new(),
        }
    }

    /// Whether nothing is being compiled.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Takes what the compile_queue made.
    pub(super) fn made(&mut self, key: Key, made: Made) {
        self.under_way.remove(&key);
        if let Ok(policy) = &made.outcome {
            self.loaded.insert(key.clone(), Arc::downgrade(policy));
        }
        self.made.insert(key, made);
    }

    /// Ends a scan: what no slot runs or waits for is dropped.
    pub(super) fn tidy(&mut self) {
        if self.is_idle() {
            self.made.clear();
        }
        self.loaded.retain(|_, policy| policy.strong_count() > 0);
    }

    /// Reads what `spec` and the lane's own file name. `None` when that is nothing.
    pub(super) fn plan(&self, file: Option<&Path>, spec: &LaneSpec) -> Result<Option<Planned>, Refused> {
        let own = file.map_or(Ok(None), |file| self.read(file, &spec.settings))?;
        let needs_rank = own.as_ref().is_none_or(|own| self.filters.contains(&own.digest));
        let rank = match &spec.rank {
            Some(rank) if needs_rank => Some(self.plan_rank(rank)?),
            _ => None,
        };
        if own.is_none() && rank.is_none() {
            return Ok(None);
        }
        let filters = spec.filters.iter().map(|part| self.part(part)).collect::<Result<Vec<_>, _>>()?;
        let fingerprint = fingerprint(own.as_ref(), &filters, rank.as_ref(), &spec.grants);
        Ok(Some(Planned { own, filters, rank, fingerprint }))
    }

    fn plan_rank(&self, rank: &Rank) -> Result<PlannedRank, Refused> {
        Ok(match rank {
            Rank::Native(mode) => PlannedRank::Native(*mode),
            Rank::Policy(part) => PlannedRank::Policy(self.part(part)?),
            Rank::Scorers { scorers, picker } => {
                let one = |scorer: &crate::ScorerPart| {
                    Ok((self.part(&scorer.part)?, scorer.weight, scorer.normalize))
                };
                PlannedRank::Scorers(scorers.iter().map(one).collect::<Result<_, _>>()?, *picker)
            }
        })
    }

    fn part(&self, part: &Part) -> Result<ResolvedPart, Refused> {
        if let Some(file) = &part.file
            && let Some(part) = self.read(file, &part.settings)?
        {
            return Ok(ResolvedPart { name: part.name.clone(), ..part });
        }
        let Some(bytes) = part.embedded else {
            let file = part.file.clone().unwrap_or_default();
            let refusal = Box::new(Refusal::MissingPart(part.name.clone()));
            return Err(Refused { file, digest: None, refusal });
        };
        Ok(ResolvedPart {
            name: part.name.clone(),
            bytes: Arc::from(bytes),
            digest: digest(bytes),
            settings: part.settings.clone(),
            origin: Origin::Embedded,
        })
    }

    /// A file's content, once its signature and digest are as they must be.
    fn read(&self, file: &Path, settings: &str) -> Result<Option<ResolvedPart>, Refused> {
        let refused = |digest, refusal| Refused { file: file.to_owned(), digest, refusal: Box::new(refusal) };
        let bytes = match self.folder.read(file, self.engine.limits().file_bytes) {
            None => return Ok(None),
            Some(Err(refusal)) => return Err(refused(None, refusal)),
            Some(Ok(bytes)) => bytes,
        };
        let digest = digest(&bytes);
        let signature = || {
            let mut name = file.as_os_str().to_owned();
            name.push(".minisig");
            String::from_utf8(self.folder.read(Path::new(&name), SIGNATURE)?.ok()?).ok()
        };
        self.trust
            .check(file, &bytes, digest, signature)
            .map_err(|refusal| refused(Some(digest), refusal))?;
        Ok(Some(ResolvedPart {
            name: file.display().to_string(),
            bytes: Arc::from(bytes),
            digest,
            settings: settings.to_owned(),
            origin: Origin::File(file.to_owned()),
        }))
    }

    /// Makes a program of what was planned, once all of it is loaded. The plan may grow: a filter in the own file needs `spec`'s
    /// rank.
    pub(super) fn assemble(
        &mut self,
        slot: SlotKind,
        planned: &mut Planned,
        spec: &LaneSpec,
        access: &Access,
    ) -> Result<Program, BuildError> {
        self.took = Duration::ZERO;
        let access = &access.granting(&spec.grants);
        let mut filters = Vec::new();
        for part in &planned.filters {
            filters.push(self.load_as(part, access, World::Filter, "filters")?);
        }
        if let Some(own) = &planned.own {
            let policy = self.load(own, access)?;
            if policy.info().world != World::Filter {
                return program(slot, filters, policy).map_err(|refusal| own.refused(refusal).into());
            }
            let wrong = Refusal::WrongSlot { world: World::Filter, slot };
            let Some(rank) = spec.rank.as_ref().filter(|_| slot != SlotKind::DecodeOverride) else {
                return Err(own.refused(wrong).into());
            };
            if matches!(rank, Rank::Native(_)) {
                return Err(own.refused(wrong).into());
            }
            if self.filters.insert(own.digest) || planned.rank.is_none() {
                planned.rank = Some(self.plan_rank(rank)?);
                planned.fingerprint =
                    fingerprint(Some(own), &planned.filters, planned.rank.as_ref(), &spec.grants);
            }
            filters.push(policy);
        }
        match &planned.rank {
            Some(PlannedRank::Native(mode)) => Ok(Program::Native(*mode)),
            Some(PlannedRank::Policy(part)) => {
                let policy = self.load(part, access)?;
                program(slot, filters, policy).map_err(|refusal| part.refused(refusal).into())
            }
            Some(PlannedRank::Scorers(parts, picker)) => {
                let mut scorers = Vec::new();
                for (part, weight, normalize) in parts {
                    let policy = self.load_as(part, access, World::Scorer, "scorers")?;
                    scorers.push(WeightedScorer { policy, weight: *weight, normalize: *normalize });
                }
                Ok(Program::Scorers { filters, scorers, picker: *picker })
            }
            // Planning ends with something to run, or with `None`.
            None => Ok(Program::Native(NativeMode::Kv)),
        }
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
        let job = part.job(access);
        let key = job.key();
        if let Some(policy) = self.loaded.get(&key).and_then(Weak::upgrade) {
            self.took += self.made.get(&key).map_or(Duration::ZERO, |made| made.took);
            return Ok(policy);
        }
        if self.under_way.contains(&key) {
            return Err(BuildError::Pending);
        }
        let Some(Made { outcome, took }) = self.made.remove(&key) else {
            return self.order(part, job);
        };
        self.took += took;
        match outcome {
            Ok(policy) => Ok(policy),
            Err(refusal) => Err(part.refused(refusal).into()),
        }
    }

    fn order(&mut self, part: &ResolvedPart, job: Job) -> Result<Arc<dyn Policy>, BuildError> {
        let key = job.key();
        if let Some(compile_queue) = &self.compile_queue {
            compile_queue.take(job);
            self.under_way.insert(key);
            return Err(BuildError::Pending);
        }
        let made = job.run(&self.engine);
        self.took += made.took;
        let outcome = made.outcome.clone();
        self.made(key, made);
        match outcome {
            Ok(policy) => Ok(policy),
            Err(refusal) => Err(part.refused(refusal).into()),
        }
    }
}

impl ResolvedPart {
    fn job(&self, access: &Access) -> Job {
        Job {
            digest: self.digest,
            bytes: self.bytes.clone(),
            settings: self.settings.clone(),
            origin: self.origin.clone(),
            access: access.clone(),
        }
    }

    fn refused(&self, refusal: Refusal) -> Refused {
        let file = match &self.origin {
            Origin::File(file) => file.clone(),
            Origin::Embedded => PathBuf::from(&self.name),
        };
        Refused { file, digest: Some(self.digest), refusal: Box::new(refusal) }
    }
}

/// What a policy that ranks by itself runs as.
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

fn fingerprint(
    own: Option<&ResolvedPart>,
    filters: &[ResolvedPart],
    rank: Option<&PlannedRank>,
    grants: &[Grant],
) -> Digest {
    let mut hash = Sha256::new();
    hash.update(format!("{grants:?}\n"));
    let mut add = |label: &str, part: &ResolvedPart| {
        hash.update(format!("{label}:{}:{}:{}\n", part.digest, part.settings.len(), part.settings));
    };
    filters.iter().for_each(|part| add("filter", part));
    own.into_iter().for_each(|part| add("own", part));
    match rank {
        // Its own file or the only part: the same content, wherever it lies.
        Some(PlannedRank::Policy(part)) => add("own", part),
        Some(PlannedRank::Scorers(parts, picker)) => {
            for (part, weight, normalize) in parts {
                add(&format!("scorer {weight} {normalize:?}"), part);
            }
            hash.update(format!("{picker:?}"));
        }
        Some(PlannedRank::Native(mode)) => hash.update(format!("{mode:?}")),
        None => {}
    }
    Digest(hash.finalize().into())
}
