//! Why a file does not become a policy: one variant for each check, with the offending value.

use std::borrow::Cow;

use pointsman_routing::{Digest, Failure, SlotKind, World};

use crate::access::Grant;

/// The quantity of [`Refusal::ExceedsLimit`] whose limit is a setting.
pub(crate) const DECLARED_MEMORY: &str = "bytes of declared memory";

/// Why a policy file is refused. The message is shown behind the file's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The file cannot be read.
    #[error("the file cannot be read: {0}; check its type and permissions")]
    Unreadable(String),
    /// The policy directory cannot be read.
    #[error("the policy directory cannot be read: {0}; the slots keep what they run until it can")]
    DirectoryGone(String),
    /// The file is larger than a policy may be.
    #[error("the file has {size} bytes; the limit is {limit}")]
    TooLarge {
        /// Size of the file, bytes.
        size: usize,
        /// Largest permitted size, bytes.
        limit: usize,
    },
    /// The file holds more of something than a policy may.
    #[error("the file has {found} {what}; the limit is {limit}; {}", exceeded_advice(.what))]
    ExceedsLimit {
        /// Name of the limited quantity, plural.
        what: Cow<'static, str>,
        /// Number that the file has. Counting ends at the limit.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// The file does not begin as WebAssembly does.
    #[error(
        "not WebAssembly: the file is {0}; expected a component or a core module with WIT metadata: `pointsman policy \
         build` makes one"
    )]
    NotWasm(String),
    /// A core module without embedded WIT metadata, or with metadata that does not fit it.
    #[error("the core module cannot be made a component: {0}; build it with `pointsman policy build`")]
    NotAComponent(String),
    /// The component cannot be parsed.
    #[error("malformed component: {0}; build the file again, or copy it again if it was truncated")]
    Malformed(String),
    /// The exports fit no world of the contract, or more than one.
    #[error(
        "exports {0}, which fit no world of pointsman:policy; export `policy` and one of filtering, scoring, \
         selecting, disaggregation"
    )]
    WrongWorld(String),
    /// Built against another version of the contract.
    #[error("built against {found}; this host serves pointsman:policy@0.1, so build it against that")]
    WrongVersion {
        /// The interface with its version.
        found: String,
    },
    /// Imports an interface that no policy may import.
    #[error("imports `{0}`, which no policy may import; remove the import")]
    ForbiddenImport(String),
    /// Imports an interface that its slot does not grant.
    #[error(
        "imports `{import}`, and the slot does not grant it; add \"{}\" to the slot's `grants`",
        .grant.as_str()
    )]
    NotGranted {
        /// The interface.
        import: String,
        /// The grant that would permit it.
        grant: Grant,
    },
    /// Does not link: an import is missing, or a function has another type than in the contract.
    #[error(
        "does not fit the contract pointsman:policy@0.1: {0}; build it against the `wit/policy.wit` of this release"
    )]
    Contract(String),
    /// Does not compile.
    #[error("compiling failed: {0}")]
    Compile(String),
    /// The process that compiles the file ended before its answer.
    #[error(
        "compiling failed: {0}; make the policy smaller, or see `compile_memory_bytes` and `compile_cpu` in [policies]"
    )]
    CompilerDied(String),
    /// The machine, and not the file, is the reason why it was not compiled.
    #[error("the file was not compiled: {0}; the gateway tries again after `policies.rescan`")]
    NotCompiled(String),
    /// An instance could not be created within the limits.
    #[error("instantiating failed: {0}{advice}", advice = instantiate_advice(.0))]
    Instantiate(String),
    /// `describe` or `configure` failed, or exceeded its deadline.
    #[error("configure failed: {0}")]
    Configure(String),
    /// The name or version cannot be used as a label.
    #[error("the {what} `{text}` is not a valid label; use 1 to 64 letters, digits, `-`, `_`, `.` and `+`")]
    BadName {
        /// `name` or `version`.
        what: &'static str,
        /// The text, or its beginning.
        text: String,
    },
    /// Asks for more facts than the host passes.
    #[error("asks for {asked} facts; the limit is {limit}")]
    TooManyFacts {
        /// Number of facts it asks for.
        asked: usize,
        /// Largest permitted number.
        limit: usize,
    },
    /// Asks for a fact that this host does not have.
    #[error("{0}")]
    UnknownFact(String),
    /// A call with made-up facts failed, or its result cannot be used.
    #[error("a trial call with {} failed: {failure}", candidates(.rows))]
    Probe {
        /// Candidate rows of the call.
        rows: u32,
        /// The failure of the call.
        failure: Failure,
    },
    /// Two instances gave different answers to the same call.
    #[error(
        "not deterministic: the same trial call with {} gave two answers; take time and randomness from the call \
         only", candidates(.rows)
    )]
    NotDeterministic {
        /// Candidate rows of the call.
        rows: u32,
    },
    /// `observe` failed on made-up outcomes.
    #[error("observe failed on made-up outcomes: {0}")]
    Observe(Failure),
    /// The world does not fit the slot that the file name selects.
    #[error("a {world} cannot fill the slot {slot}; rename the file after a slot that runs a {world}")]
    WrongSlot {
        /// The policy's world.
        world: World,
        /// The slot.
        slot: SlotKind,
    },
    /// A formula file for a slot that runs no formula.
    #[error(
        "the slot {0} takes no formula; write a component (`pointsman policy new NAME --world {0}`), or rename the file \
         after another slot"
    )]
    NoFormula(SlotKind),
    /// The world of the policy that the configuration names does not fit the slot.
    #[error(
        "a {world} cannot fill the slot {slot}; name a policy of another world in `policy` or `builtin` of the slot's \
         table ([policies.slots.{slot}] or [models.NAME.slots.{slot}])"
    )]
    WrongNamed {
        /// The policy's world.
        world: World,
        /// The slot.
        slot: SlotKind,
    },
    /// A filter, and nothing ranks the candidates that it keeps.
    #[error(
        "a filter ranks no candidates, and no policy of the slot {0} does; set `policy`, `builtin` or `scorers` in the \
         slot's table ([policies.slots.{0}] or [models.NAME.slots.{0}])"
    )]
    NoRank(SlotKind),
    /// The file name selects no slot.
    #[error("the file name selects no slot; {}", name_advice(.near.as_deref(), .expected))]
    NoSlot {
        /// The name of a slot's file that is most like it.
        near: Option<String>,
        /// Names of the files of all slots.
        expected: String,
    },
    /// The file is the source of a policy.
    #[error(
        "the file is source code, which the gateway does not build; build it with `pointsman policy build FOLDER`, and \
         copy the .wasm file here"
    )]
    Source,
    /// The file is named after a slot that its model does not have.
    #[error(
        "the model `{model}` has no slot {slot} of its own; add [models.\"{model}\".slots.{slot}] to the configuration \
         and restart; models that have it: {models}"
    )]
    NoModelSlot {
        /// The model, after the folder of the file.
        model: String,
        /// The slot.
        slot: SlotKind,
        /// Names of the models that have this slot.
        models: String,
    },
    /// The formula file cannot be used.
    #[error("{0}")]
    Formula(String),
    /// A lane has a component and a formula file.
    #[error("`{0}` is there, too, and a slot runs one of them; remove one")]
    TwoFiles(String),
    /// This content was rolled back before.
    #[error("quarantined: {0}")]
    Quarantined(String),
    /// A part of the slot is neither in the directory nor built in.
    #[error(
        "`{name}` is neither built in nor a file of the policy directory; built in: {built_in}; in `parts/`: \
         {found}; name one of these, or add `parts/{name}.wasm`"
    )]
    MissingPart {
        /// The part.
        name: String,
        /// Names of the files in the directory of parts.
        found: String,
        /// Names of the built-in policies.
        built_in: &'static str,
    },
    /// A policy is configured where its world does not fit.
    #[error("`{name}` is a {world} and cannot be one of the {among}; move it, or name another policy there")]
    Misplaced {
        /// The part.
        name: String,
        /// World of the part.
        world: World,
        /// Key that names the part: `filters` or `scorers`.
        among: &'static str,
    },
    /// Signatures are required, and the file is not signed.
    #[error("the file is not signed; put its `.minisig` beside it")]
    Unsigned,
    /// The signature file cannot be decoded.
    #[error("the signature cannot be used: {0}; sign the file again with minisign")]
    BadSignature(String),
    /// The signing key is not trusted.
    #[error("the signing key is not trusted; add it to `trusted_keys`, or sign with one of those")]
    UntrustedKey,
    /// The signature is by a trusted key, for other bytes.
    #[error("the content differs from what was signed; sign the file again")]
    Tampered,
    /// The signature is for another path or an older version.
    #[error(
        "the signature does not fit: {problem}; sign the file with `minisign -S -t 'slot={name} version=N'` and a \
         version that is not smaller"
    )]
    NotBound {
        /// Path of the file without `.wasm`.
        name: String,
        /// The part that does not fit.
        problem: String,
    },
    /// The digest differs from the pinned one.
    #[error("sha256 {found} differs from the pinned {pinned}; change the pin or restore the file")]
    PinMismatch {
        /// Digest of the file.
        found: Digest,
        /// Digest in the configuration.
        pinned: Digest,
    },
}

fn instantiate_advice(error: &str) -> &'static str {
    if error.contains("Cannot allocate memory") {
        "; raise the limit of this process's address space (RLIMIT_AS, `ulimit -v`), or give the machine more memory"
    } else if error.contains("(policies.") {
        "; raise this limit, or make the policy start with less"
    } else {
        ""
    }
}

fn exceeded_advice(what: &str) -> &'static str {
    if what == DECLARED_MEMORY {
        "raise `policies.memory_bytes` (`--memory-bytes` of `pointsman policy`), or make the policy need less"
    } else {
        "make the policy smaller or simpler"
    }
}

fn candidates(rows: &u32) -> String {
    format!("{rows} made-up candidate{}", if *rows == 1 { "" } else { "s" })
}

fn name_advice(near: Option<&str>, expected: &str) -> String {
    near.map_or_else(|| format!("expected one of {expected}"), |near| format!("did you mean `{near}`?"))
}

impl Refusal {
    /// Returns whether the same file may be accepted later, although nobody changes it or its settings.
    #[must_use]
    pub(crate) fn may_pass_by_itself(&self) -> bool {
        matches!(self, Self::NotCompiled(_))
    }

    /// Returns whether a file is refused so while it, or its signature, is being copied.
    #[must_use]
    pub(crate) fn may_end_with_a_copy(&self) -> bool {
        matches!(
            self,
            Self::NotWasm(_)
                | Self::NotAComponent(_)
                | Self::Malformed(_)
                | Self::Unsigned
                | Self::Tampered
                | Self::PinMismatch { .. }
        )
    }

    /// Returns how an operator repeats what failed; empty if there is no command for it.
    #[must_use]
    pub(crate) fn how_to_repeat(&self) -> &'static str {
        match self {
            Self::Probe { .. } => {
                "; to repeat it: `pointsman policy inspect FILE` with the slot's `--settings` and, as in [policies], \
                 `--deadline-ms` and `--memory-bytes`"
            }
            _ => "",
        }
    }

    /// Returns the stable label for metrics, `/policies` and log lines.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unreadable(_) => "unreadable",
            Self::DirectoryGone(_) => "directory_gone",
            Self::TooLarge { .. } => "too_large",
            Self::ExceedsLimit { .. } => "exceeds_limit",
            Self::NotWasm(_) => "not_wasm",
            Self::NotAComponent(_) => "not_a_component",
            Self::Malformed(_) => "malformed",
            Self::WrongWorld(_) => "wrong_world",
            Self::WrongVersion { .. } => "wrong_version",
            Self::ForbiddenImport(_) => "forbidden_import",
            Self::NotGranted { .. } => "not_granted",
            Self::Contract(_) => "contract",
            Self::Compile(_) => "compile",
            Self::CompilerDied(_) => "compiler_died",
            Self::NotCompiled(_) => "not_compiled",
            Self::Instantiate(_) => "instantiate",
            Self::Configure(_) => "configure",
            Self::BadName { .. } => "bad_name",
            Self::TooManyFacts { .. } => "too_many_facts",
            Self::UnknownFact(_) => "unknown_fact",
            Self::Probe { .. } => "probe",
            Self::NotDeterministic { .. } => "not_deterministic",
            Self::Observe(_) => "observe",
            Self::WrongSlot { .. } | Self::NoFormula(_) | Self::WrongNamed { .. } | Self::NoRank(_) => {
                "wrong_slot"
            }
            Self::NoSlot { .. } | Self::Source | Self::NoModelSlot { .. } => "no_slot",
            Self::Formula(_) => "formula",
            Self::TwoFiles(_) => "two_files",
            Self::Quarantined(_) => "quarantined",
            Self::MissingPart { .. } => "missing_part",
            Self::Misplaced { .. } => "misplaced",
            Self::Unsigned => "unsigned",
            Self::BadSignature(_) => "bad_signature",
            Self::UntrustedKey => "untrusted_key",
            Self::Tampered => "tampered",
            Self::NotBound { .. } => "signature_not_bound",
            Self::PinMismatch { .. } => "pin_mismatch",
        }
    }
}
