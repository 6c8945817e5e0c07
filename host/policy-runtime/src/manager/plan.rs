//! Content of a lane before any of it is parsed: bytes, settings and weights, and the fingerprint of all of
//! them.
//!
//! The fingerprint decides whether anything changed, and what is quarantined. The same code with other
//! settings is other content.

use std::{path::PathBuf, sync::Arc};

use pointsman_routing::{Digest, NativeMode, Normalize, Origin, Picker};
use sha2::{Digest as _, Sha256};

use super::{
    compile_queue::{CompileJob, NO_SETTINGS},
    halves::Halves,
    managed_lane::{Content, Source},
};
use crate::{
    access::{Access, Grant},
    refusal::Refusal,
    trust::SignedVersion,
};

/// Content of a lane: what its own file holds, and what its spec names.
pub(super) struct Plan {
    /// The policy in the lane's own file.
    pub(super) own: Option<ResolvedPart>,
    /// Filters that the configuration names, and then `keep` of a formula file that ranks, too.
    pub(super) filters: Vec<ResolvedPart>,
    /// Number of filters that the configuration names.
    configured: usize,
    pub(super) rank: Option<PlannedRank>,
    pub(super) fingerprint: Digest,
    halves: Halves,
}

pub(super) enum PlannedRank {
    Native(NativeMode),
    Policy(ResolvedPart),
    Scorers(Vec<(ResolvedPart, f32, Normalize)>, Picker),
    /// The file of the active lane, behind a filter.
    File(Box<RankFile>),
}

/// A file that ranks, with the grants of its lane.
pub(super) struct RankFile {
    /// The filter of a formula file that ranks, too.
    pub(super) keep: Option<ResolvedPart>,
    pub(super) main: ResolvedPart,
    pub(super) grants: Vec<Grant>,
}

/// Bytes and settings of one policy, with signature and pin checked.
#[derive(Clone)]
pub(super) struct ResolvedPart {
    pub(super) name: String,
    pub(super) bytes: Arc<[u8]>,
    /// Digest of the bytes.
    pub(super) code: Digest,
    /// Identifies the content: the digest of the file that it comes from.
    pub(super) digest: Digest,
    /// Whether the bytes belong to a built-in policy.
    pub(super) is_built_in: bool,
    pub(super) settings: String,
    /// Name of the policy that gets the settings, while the name of this one is not known; another policy
    /// gets `{}`.
    pub(super) settings_for: Option<String>,
    pub(super) origin: Origin,
    /// What its signature names, if signatures have to name something.
    pub(super) signed: Option<SignedVersion>,
}

/// A file whose signature and pin are right.
pub(super) struct CheckedFile {
    pub(super) bytes: Vec<u8>,
    pub(super) digest: Digest,
    /// As in [`ResolvedPart`].
    pub(super) signed: Option<SignedVersion>,
}

/// A refusal with the file that it is about.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) file: PathBuf,
    pub(super) digest: Option<Digest>,
    pub(super) refusal: Box<Refusal>,
    /// Refusals of other files of the same lane.
    pub(super) others: Vec<Refused>,
}

impl Refused {
    pub(super) fn new(file: PathBuf, digest: Option<Digest>, refusal: Refusal) -> Self {
        Self { file, digest, refusal: Box::new(refusal), others: Vec::new() }
    }

    /// Adds refusals of other files.
    pub(super) fn and(mut self, others: impl IntoIterator<Item = Self>) -> Self {
        self.others.extend(others);
        self
    }

    /// Returns whether the rest of a copy, or a signature, may be what a file lacks.
    pub(super) fn is_unfinished(&self) -> bool {
        self.all().into_iter().any(|one| one.refusal.may_end_with_a_copy())
    }

    /// Returns whether the same files may be accepted later.
    pub(super) fn may_pass_by_itself(&self) -> bool {
        self.all().into_iter().any(|one| one.refusal.may_pass_by_itself())
    }

    /// Returns this refusal and those of the other files.
    pub(super) fn all(&self) -> Vec<&Self> {
        std::iter::once(self).chain(self.others.iter().flat_map(Self::all)).collect()
    }
}

/// Identifies the files that were read for a plan.
pub(super) fn read(plan: &Result<Option<Plan>, Refused>) -> Option<Digest> {
    match plan {
        Ok(plan) => plan.as_ref().map(|plan| plan.fingerprint),
        Err(refused) => refused.digest,
    }
}

impl Plan {
    /// `keep`: that of a formula file that ranks, too.
    pub(super) fn new(
        own: Option<ResolvedPart>,
        (mut filters, keep): (Vec<ResolvedPart>, Option<ResolvedPart>),
        rank: Option<PlannedRank>,
        grants: &[Grant],
    ) -> Self {
        let configured = filters.len();
        filters.extend(keep);
        let (none, fingerprint) = (Digest([0; 32]), Digest([0; 32]));
        let halves = Halves { filter_count: configured, filters: none, rest: none };
        let mut plan = Self { own, filters, configured, rank, fingerprint, halves };
        plan.identify(grants);
        plan
    }

    /// Computes the fingerprint anew.
    fn identify(&mut self, grants: &[Grant]) {
        let (configured, keep) = self.filters.split_at(self.configured);
        self.halves = Halves {
            filter_count: self.configured,
            filters: match configured {
                [] => Digest([0; 32]),
                _ => fingerprint(None, configured, None, grants),
            },
            rest: fingerprint(self.own.as_ref(), keep, self.rank.as_ref(), grants),
        };
        self.fingerprint = self.halves.whole();
    }

    /// Identifies the content that this makes.
    pub(super) fn content(&self, source: Source) -> Content {
        Content { fingerprint: self.fingerprint, main: self.main_digest(), source, halves: self.halves }
    }

    /// Adds the rank of the spec, which a filter in the lane's own file needs.
    pub(super) fn add_rank(&mut self, rank: PlannedRank, grants: &[Grant]) {
        self.rank = Some(rank);
        self.identify(grants);
    }

    /// Settles which settings the policy in the lane's own file gets, now that it is called `name`.
    pub(super) fn settle_settings(&mut self, name: &str, grants: &[Grant]) {
        if let Some(own) = self.own.take_if(|own| own.settings_for.is_some()) {
            self.own = Some(own.named(name));
            self.identify(grants);
        }
    }

    /// Returns the digest to show for the content: that of the lane's own file, or of its only ranking
    /// policy.
    pub(super) fn main_digest(&self) -> Option<Digest> {
        let ranking = match &self.rank {
            Some(PlannedRank::Policy(part)) => Some(part),
            _ => None,
        };
        self.own.as_ref().or(ranking).map(|part| part.digest)
    }

    /// Returns the lane's own file, if it is there.
    pub(super) fn own_file(&self) -> Option<&PathBuf> {
        match &self.own.as_ref()?.origin {
            Origin::File(file) => Some(file),
            Origin::Embedded => None,
        }
    }

    /// Returns what the signatures of its files name.
    pub(super) fn signed(&self) -> impl Iterator<Item = &SignedVersion> {
        let rank: Vec<&ResolvedPart> = match &self.rank {
            Some(PlannedRank::Policy(part)) => vec![part],
            Some(PlannedRank::Scorers(parts, _)) => parts.iter().map(|(part, ..)| part).collect(),
            Some(PlannedRank::File(file)) => vec![&file.main],
            Some(PlannedRank::Native(_)) | None => Vec::new(),
        };
        let parts = self.own.iter().chain(&self.filters).chain(rank);
        parts.filter_map(|part| part.signed.as_ref())
    }

    pub(super) fn has_own_file(&self) -> bool {
        self.own.is_some()
    }
}

impl ResolvedPart {
    /// Takes the settings away that are for a policy of another name.
    pub(super) fn named(mut self, name: &str) -> Self {
        if self.settings_for.take().is_some_and(|meant| meant != name) {
            self.settings = NO_SETTINGS.to_owned();
        }
        self
    }

    pub(super) fn job(&self, access: &Access) -> CompileJob {
        CompileJob {
            digest: self.digest,
            bytes: self.bytes.clone(),
            code: self.code,
            is_built_in: self.is_built_in,
            settings: self.settings.clone(),
            settings_for: self.settings_for.clone(),
            origin: self.origin.clone(),
            // Nothing that a built-in policy imports needs the operator's consent.
            access: if self.is_built_in { access.granting(&Access::ALL) } else { access.clone() },
        }
    }

    pub(super) fn refused(&self, refusal: Refusal) -> Refused {
        let file = match &self.origin {
            Origin::File(file) => file.clone(),
            Origin::Embedded => PathBuf::from(&self.name),
        };
        let is_formula = self.is_built_in && matches!(self.origin, Origin::File(_));
        let refusal = match refusal {
            Refusal::WrongSlot { slot, .. } if is_formula => Refusal::NoFormula(slot),
            other => other,
        };
        Refused::new(file, Some(self.digest), refusal)
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
        if let Some(name) = &part.settings_for {
            hash.update(format!("for {name}\n"));
        }
    };
    filters.iter().for_each(|part| add("filter", part));
    own.into_iter().for_each(|part| add("own", part));
    match rank {
        // The lane's own file and its only policy have the same label: content does not change by moving from
        // one to the other.
        Some(PlannedRank::Policy(part)) => add("own", part),
        Some(PlannedRank::Scorers(parts, picker)) => {
            for (part, weight, normalize) in parts {
                add(&format!("scorer {weight} {normalize:?}"), part);
            }
            hash.update(format!("{picker:?}"));
        }
        Some(PlannedRank::File(file)) => {
            file.keep.iter().for_each(|part| add("keep", part));
            add("rank", &file.main);
            hash.update(format!("{:?}", file.grants));
        }
        Some(PlannedRank::Native(mode)) => hash.update(format!("{mode:?}")),
        None => {}
    }
    Digest(hash.finalize().into())
}
