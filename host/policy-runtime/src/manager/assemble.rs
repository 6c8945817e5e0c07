//! From a recipe and the folder's files to a program: read, check, load, put together. All or nothing.
//!
//! Content has a fingerprint: the digests of all its parts with their settings and weights. It decides whether anything changed,
//! and what is quarantined; the same code with other settings is other content.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use pointsman_routing::{
    Digest, NativeMode, Normalize, Origin, Picker, Policy, Program, SlotKind, WeightedScorer, World,
};
use sha2::{Digest as _, Sha256};

use super::folder::Folder;
use crate::{
    access::{Access, Grant},
    engine::PolicyEngine,
    gate::Gate,
    loaded::{LoadedPolicy, compile, digest},
    recipe::{LaneRecipe, Part, Rank},
    refusal::Refusal,
};

/// Largest signature file, bytes.
const SIGNATURE: usize = 64 * 1024;

/// What programs are made with.
pub(super) struct Workshop {
    pub(super) engine: PolicyEngine,
    pub(super) folder: Folder,
    pub(super) gate: Gate,
    /// What is loaded now: a slot of which one part changed loads that part only.
    loaded: HashMap<Key, Weak<LoadedPolicy>>,
    /// Kept to the end of a scan.
    fresh: Vec<Arc<LoadedPolicy>>,
    /// Worlds of files that were loaded before: a filter in a slot's own file needs something else to rank.
    filters: std::collections::HashSet<Digest>,
}

/// Code and settings, and whose state they reach with which grants.
type Key = (Digest, String, usize, Arc<[Grant]>);

/// A refusal with the file it is about.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) file: PathBuf,
    pub(super) digest: Option<Digest>,
    pub(super) refusal: Box<Refusal>,
}

/// One part, read and let in.
#[derive(Clone)]
struct Piece {
    name: String,
    bytes: Arc<[u8]>,
    digest: Digest,
    settings: String,
    origin: Origin,
}

enum PlannedRank {
    Native(NativeMode),
    Policy(Piece),
    Scorers(Vec<(Piece, f32, Normalize)>, Picker),
}

/// A lane's content before anything of it is parsed.
pub(super) struct Planned {
    own: Option<Piece>,
    filters: Vec<Piece>,
    rank: Option<PlannedRank>,
    pub(super) fingerprint: Digest,
}

impl Planned {
    /// The digest of the file an operator would name: the lane's own, or that of the only ranking part.
    pub(super) fn main(&self) -> Option<Digest> {
        let ranking = match &self.rank {
            Some(PlannedRank::Policy(piece)) => Some(piece),
            _ => None,
        };
        self.own.as_ref().or(ranking).map(|piece| piece.digest)
    }

    pub(super) fn has_own(&self) -> bool {
        self.own.is_some()
    }
}

impl Workshop {
    pub(super) fn new(engine: PolicyEngine, folder: Folder, gate: Gate) -> Self {
        Self { engine, folder, gate, loaded: HashMap::new(), fresh: Vec::new(), filters: Default::default() }
    }

    /// Ends a scan: what no slot runs is dropped.
    pub(super) fn tidy(&mut self) {
        self.fresh.clear();
        self.loaded.retain(|_, policy| policy.strong_count() > 0);
    }

    /// Reads what `recipe` and the lane's own file name. `None` when that is nothing.
    pub(super) fn plan(&self, file: Option<&Path>, recipe: &LaneRecipe) -> Result<Option<Planned>, Refused> {
        let own = file.map_or(Ok(None), |file| self.read(file, &recipe.settings))?;
        let needs_rank = own.as_ref().is_none_or(|own| self.filters.contains(&own.digest));
        let rank = match &recipe.rank {
            Some(rank) if needs_rank => Some(self.plan_rank(rank)?),
            _ => None,
        };
        if own.is_none() && rank.is_none() {
            return Ok(None);
        }
        let filters = recipe.filters.iter().map(|part| self.part(part)).collect::<Result<Vec<_>, _>>()?;
        let fingerprint = fingerprint(own.as_ref(), &filters, rank.as_ref(), &recipe.grants);
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

    fn part(&self, part: &Part) -> Result<Piece, Refused> {
        if let Some(file) = &part.file
            && let Some(piece) = self.read(file, &part.settings)?
        {
            return Ok(Piece { name: part.name.clone(), ..piece });
        }
        let Some(bytes) = part.embedded else {
            let file = part.file.clone().unwrap_or_default();
            let refusal = Box::new(Refusal::MissingPart(part.name.clone()));
            return Err(Refused { file, digest: None, refusal });
        };
        Ok(Piece {
            name: part.name.clone(),
            bytes: Arc::from(bytes),
            digest: digest(bytes),
            settings: part.settings.clone(),
            origin: Origin::Embedded,
        })
    }

    /// A file's content, once its signature and digest are as they must be.
    fn read(&self, file: &Path, settings: &str) -> Result<Option<Piece>, Refused> {
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
        self.gate.check(file, &bytes, digest, signature).map_err(|refusal| refused(Some(digest), refusal))?;
        Ok(Some(Piece {
            name: file.display().to_string(),
            bytes: Arc::from(bytes),
            digest,
            settings: settings.to_owned(),
            origin: Origin::File(file.to_owned()),
        }))
    }

    /// Loads what was planned. Slow: compiles what is new. The plan may grow: a filter in the own file needs `recipe`'s rank.
    pub(super) fn assemble(
        &mut self,
        slot: SlotKind,
        planned: &mut Planned,
        recipe: &LaneRecipe,
        access: &Access,
    ) -> Result<Program, Refused> {
        let access = &access.granting(&recipe.grants);
        let mut filters = Vec::new();
        for piece in &planned.filters {
            filters.push(self.load_as(piece, access, World::Filter, "filters")?);
        }
        if let Some(own) = &planned.own {
            let policy = self.load(own, access)?;
            if policy.info().world != World::Filter {
                return program(slot, filters, policy).map_err(|refusal| own.refused(refusal));
            }
            let wrong = Refusal::WrongSlot { world: World::Filter, slot };
            let Some(rank) = recipe.rank.as_ref().filter(|_| slot != SlotKind::DecodeOverride) else {
                return Err(own.refused(wrong));
            };
            if matches!(rank, Rank::Native(_)) {
                return Err(own.refused(wrong));
            }
            if self.filters.insert(own.digest) || planned.rank.is_none() {
                planned.rank = Some(self.plan_rank(rank)?);
                planned.fingerprint =
                    fingerprint(Some(own), &planned.filters, planned.rank.as_ref(), &recipe.grants);
            }
            filters.push(policy);
        }
        match &planned.rank {
            Some(PlannedRank::Native(mode)) => Ok(Program::Native(*mode)),
            Some(PlannedRank::Policy(piece)) => {
                let policy = self.load(piece, access)?;
                program(slot, filters, policy).map_err(|refusal| piece.refused(refusal))
            }
            Some(PlannedRank::Scorers(pieces, picker)) => {
                let mut scorers = Vec::new();
                for (piece, weight, normalize) in pieces {
                    let policy = self.load_as(piece, access, World::Scorer, "scorers")?;
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
        piece: &Piece,
        access: &Access,
        world: World,
        among: &'static str,
    ) -> Result<Arc<dyn Policy>, Refused> {
        let policy = self.load(piece, access)?;
        let found = policy.info().world;
        if found == world {
            return Ok(policy);
        }
        Err(piece.refused(Refusal::Misplaced { name: piece.name.clone(), world: found, among }))
    }

    fn load(&mut self, piece: &Piece, access: &Access) -> Result<Arc<dyn Policy>, Refused> {
        let state = Arc::as_ptr(access.state()) as usize;
        let key = (piece.digest, piece.settings.clone(), state, access.granted().clone());
        if let Some(policy) = self.loaded.get(&key).and_then(Weak::upgrade)
            && policy.info().origin == piece.origin
        {
            return Ok(policy);
        }
        let policy = compile(&self.engine, &piece.bytes, access)
            .and_then(|compiled| compiled.configure(piece.origin.clone(), &piece.settings))
            .map_err(|refusal| piece.refused(refusal))?;
        let policy = Arc::new(policy);
        self.loaded.insert(key, Arc::downgrade(&policy));
        self.fresh.push(policy.clone());
        Ok(policy)
    }
}

impl Piece {
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
    own: Option<&Piece>,
    filters: &[Piece],
    rank: Option<&PlannedRank>,
    grants: &[Grant],
) -> Digest {
    let mut hash = Sha256::new();
    hash.update(format!("{grants:?}\n"));
    let mut add = |label: &str, piece: &Piece| {
        hash.update(format!("{label}:{}:{}:{}\n", piece.digest, piece.settings.len(), piece.settings));
    };
    filters.iter().for_each(|piece| add("filter", piece));
    own.into_iter().for_each(|piece| add("own", piece));
    match rank {
        // Its own file or the only part: the same content, wherever it lies.
        Some(PlannedRank::Policy(piece)) => add("own", piece),
        Some(PlannedRank::Scorers(pieces, picker)) => {
            for (piece, weight, normalize) in pieces {
                add(&format!("scorer {weight} {normalize:?}"), piece);
            }
            hash.update(format!("{picker:?}"));
        }
        Some(PlannedRank::Native(mode)) => hash.update(format!("{mode:?}")),
        None => {}
    }
    Digest(hash.finalize().into())
}
