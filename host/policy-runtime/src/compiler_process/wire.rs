//! Protocol between daemon and compiler process. The request is an argument. The answer is one line of JSON
//! on stdout, followed by the bytes of the parts that the process made of the file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{CompileLimits, Target};
use crate::{guest_info::truncate, outline::Outline, refusal::Refusal};

/// Job of the process, and its limits.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Kind of the bytes on stdin.
    pub(crate) task: Task,
    /// Process that waits for the answer.
    pub(crate) parent: u32,
    /// Largest file, bytes.
    pub(crate) file_bytes: usize,
    /// Maximum linear memory of an instance, bytes.
    pub(crate) memory_bytes: usize,
    /// Address space of a memory, bytes.
    pub(crate) reservation: Option<u64>,
    /// Directory of wasmtime's cache, for this process only.
    pub(crate) cache: PathBuf,
    /// Maximum address space of the process, bytes.
    pub(crate) address_space: u64,
    /// Maximum CPU time of the process, seconds.
    pub(crate) cpu_seconds: u64,
    /// Whether the process lowers its priority.
    pub(crate) yields: bool,
}

/// Kind of input of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Task {
    /// A policy file. It is compiled when that is wanted and it is not in parts.
    File { compile: bool },
    /// A part of a file, and nothing else of it. It is compiled.
    Part,
}

impl Request {
    pub(super) fn new(
        task: Task,
        target: Target,
        limits: &CompileLimits,
        cache: PathBuf,
        yields: bool,
    ) -> Self {
        Self {
            task,
            parent: std::process::id(),
            file_bytes: target.file_bytes,
            memory_bytes: target.memory_bytes,
            reservation: target.reservation,
            cache,
            address_space: limits.memory_bytes,
            cpu_seconds: limits.cpu.as_secs().max(1),
            yields,
        }
    }
}

/// Answer of the process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The file is a policy.
    File {
        outline: Outline,
        /// Whether it was compiled.
        compiled: bool,
        /// Number of bytes of the component that follow. 0: the file itself is the component.
        component_bytes: usize,
        /// Number of bytes of each module that follows the component, which imports it.
        module_bytes: Vec<usize>,
    },
    /// The part was compiled.
    Part,
    /// The file is refused.
    Refused(WireRefusal),
}

/// A refusal of those that the process makes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum WireRefusal {
    TooLarge { size: usize, limit: usize },
    ExceedsLimit { what: String, found: u64, limit: u64 },
    Text { kind: String, text: String },
}

impl From<Refusal> for WireRefusal {
    fn from(refusal: Refusal) -> Self {
        let kind = refusal.kind().to_owned();
        let text = match refusal {
            Refusal::TooLarge { size, limit } => return Self::TooLarge { size, limit },
            Refusal::ExceedsLimit { what, found, limit } => {
                return Self::ExceedsLimit { what: what.into_owned(), found, limit };
            }
            Refusal::NotWasm(text)
            | Refusal::NotAComponent(text)
            | Refusal::Malformed(text)
            | Refusal::WrongWorld(text)
            | Refusal::WrongVersion { found: text }
            | Refusal::ForbiddenImport(text)
            | Refusal::Contract(text)
            | Refusal::Compile(text) => text,
            other => other.to_string(),
        };
        Self::Text { kind, text: truncate(text) }
    }
}

impl From<WireRefusal> for Refusal {
    fn from(refusal: WireRefusal) -> Self {
        match refusal {
            WireRefusal::TooLarge { size, limit } => Self::TooLarge { size, limit },
            WireRefusal::ExceedsLimit { what, found, limit } => {
                Self::ExceedsLimit { what: what.into(), found, limit }
            }
            WireRefusal::Text { kind, text } => match kind.as_str() {
                "not_wasm" => Self::NotWasm(text),
                "not_a_component" => Self::NotAComponent(text),
                "malformed" => Self::Malformed(text),
                "wrong_world" => Self::WrongWorld(text),
                "wrong_version" => Self::WrongVersion { found: text },
                "forbidden_import" => Self::ForbiddenImport(text),
                "contract" => Self::Contract(text),
                _ => Self::Compile(text),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_of_the_process_arrives_as_it_was_sent() {
        let text = || "text".to_owned();
        let refusals = [
            Refusal::TooLarge { size: 3, limit: 2 },
            Refusal::ExceedsLimit { what: "types".into(), found: 3, limit: 2 },
            Refusal::NotWasm(text()),
            Refusal::NotAComponent(text()),
            Refusal::Malformed(text()),
            Refusal::WrongWorld(text()),
            Refusal::WrongVersion { found: text() },
            Refusal::ForbiddenImport(text()),
            Refusal::Contract(text()),
            Refusal::Compile(text()),
        ];
        for refusal in refusals {
            let sent = serde_json::to_string(&WireRefusal::from(refusal.clone())).expect("JSON");
            let received: WireRefusal = serde_json::from_str(&sent).expect("a refusal");
            assert_eq!(Refusal::from(received), refusal);
        }
    }
}
