//! Why a file did not become a policy: one variant a step of admission, each naming the offending value.

use pointsman_routing::{Digest, Failure, SlotKind, World};

use crate::access::Grant;

/// Why a policy file was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// Larger than allowed.
    #[error("{size} bytes, allowed are {limit}")]
    TooLarge {
        /// Bytes it has.
        size: usize,
        /// Bytes it may have.
        limit: usize,
    },
    /// Not WebAssembly at all.
    #[error("not WebAssembly: begins with {0}")]
    NotWasm(String),
    /// A core module without embedded WIT metadata, or one that does not fit it.
    #[error("a core module that is no component: {0}")]
    NotAComponent(String),
    /// Does not parse.
    #[error("malformed: {0}")]
    Malformed(String),
    /// Exports no world of ours, or more than one.
    #[error("fills no world of pointsman:policy: exports {0}")]
    WrongWorld(String),
    /// Built against another version of the contract.
    #[error("built against {found}, this host serves pointsman:policy@0.1")]
    WrongVersion {
        /// The interface with its version.
        found: String,
    },
    /// Imports what no policy may have.
    #[error("imports `{0}`, which is not granted")]
    ForbiddenImport(String),
    /// Imports what its slot does not grant.
    #[error("imports `{import}`, and the slot does not grant `{}`", .grant.as_str())]
    NotGranted {
        /// The interface.
        import: String,
        /// What the operator would have to grant.
        grant: Grant,
    },
    /// Does not link: an import is missing, or a function has another type than the contract says.
    #[error("does not fit the contract: {0}")]
    Contract(String),
    /// Does not compile.
    #[error("does not compile: {0}")]
    Compile(String),
    /// Could not be instantiated within its limits.
    #[error("cannot be instantiated: {0}")]
    Instantiate(String),
    /// `describe` or `configure` failed, or ran past its deadline.
    #[error("configure: {0}")]
    Configure(String),
    /// Its name or version cannot be shown.
    #[error("its {what} `{text}` is no label: at most 64 letters, digits, `-`, `_`, `.` and `+`")]
    BadName {
        /// `name` or `version`.
        what: &'static str,
        /// The text, or its beginning.
        text: String,
    },
    /// Asks for more facts than a host hands over.
    #[error("asks for {asked} facts, allowed are {limit}")]
    TooManyFacts {
        /// Facts it asks for.
        asked: usize,
        /// Facts it may ask for.
        limit: usize,
    },
    /// Asks for a fact this host does not have.
    #[error("{0}")]
    UnknownFact(String),
    /// Gave no usable answer to made-up inputs.
    #[error("probe with {rows} rows: {failure}")]
    Probe {
        /// Candidate rows of the probe.
        rows: u32,
        /// What came.
        failure: Failure,
    },
    /// Answered the same question differently in a fresh instance.
    #[error("not deterministic: the same call with {rows} rows gave two answers")]
    NotDeterministic {
        /// Candidate rows of the probe.
        rows: u32,
    },
    /// Did not come to an end with made-up outcomes.
    #[error("observe: {0}")]
    Observe(Failure),
    /// Its world does not belong in the slot its file name says.
    #[error("a {world} cannot fill the slot {slot}")]
    WrongSlot {
        /// Its world.
        world: World,
        /// The slot.
        slot: SlotKind,
    },
    /// Its file name is no slot's.
    #[error("no slot has this file name; slots are {0}")]
    NoSlot(String),
    /// Was rolled back before.
    #[error("quarantined: {0}")]
    Quarantined(String),
    /// A part of the slot is neither in the folder nor built in.
    #[error("part `{0}` is not in the folder, and no policy of that name is built in")]
    MissingPart(String),
    /// A policy stands where its world does not belong.
    #[error("`{name}` is a {world}, and stands among the {among}")]
    Misplaced {
        /// The part.
        name: String,
        /// Its world.
        world: World,
        /// Where it stands.
        among: &'static str,
    },
    /// Signatures are required, and there is none beside the file.
    #[error("no signature: `.minisig` is missing beside it")]
    Unsigned,
    /// The signature file is none.
    #[error("the signature cannot be used: {0}")]
    BadSignature(String),
    /// Signed by a key that is not trusted.
    #[error("signed by a key that is not trusted")]
    UntrustedKey,
    /// The signature is by a trusted key, and not of these bytes.
    #[error("the content is not what was signed")]
    Tampered,
    /// Its digest is not the one that is written down.
    #[error("sha256 {found} is not the pinned {pinned}")]
    PinMismatch {
        /// Its digest.
        found: Digest,
        /// The digest of the configuration.
        pinned: Digest,
    },
}

impl Refusal {
    /// Stable label.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unreadable(_) => "unreadable",
            Self::TooLarge { .. } => "too_large",
            Self::NotWasm(_) => "not_wasm",
            Self::NotAComponent(_) => "not_a_component",
            Self::Malformed(_) => "malformed",
            Self::WrongWorld(_) => "wrong_world",
            Self::WrongVersion { .. } => "wrong_version",
            Self::ForbiddenImport(_) => "forbidden_import",
            Self::NotGranted { .. } => "not_granted",
            Self::Contract(_) => "contract",
            Self::Compile(_) => "compile",
            Self::Instantiate(_) => "instantiate",
            Self::Configure(_) => "configure",
            Self::BadName { .. } => "bad_name",
            Self::TooManyFacts { .. } => "too_many_facts",
            Self::UnknownFact(_) => "unknown_fact",
            Self::Probe { .. } => "probe",
            Self::NotDeterministic { .. } => "not_deterministic",
            Self::Observe(_) => "observe",
            Self::WrongSlot { .. } => "wrong_slot",
            Self::NoSlot(_) => "no_slot",
            Self::Quarantined(_) => "quarantined",
            Self::MissingPart(_) => "missing_part",
            Self::Misplaced { .. } => "misplaced",
            Self::Unsigned => "unsigned",
            Self::BadSignature(_) => "bad_signature",
            Self::UntrustedKey => "untrusted_key",
            Self::Tampered => "tampered",
            Self::PinMismatch { .. } => "pin_mismatch",
        }
    }
}
