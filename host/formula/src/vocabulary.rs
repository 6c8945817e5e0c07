//! The names that a formula can use: facts, and functions.

/// A fact as the host's table has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fact {
    pub(crate) name: &'static str,
    pub(crate) is_request: bool,
    pub(crate) ty: Type,
}

/// Type of a fact's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    U32,
    F32,
    U64,
}

/// The facts by name.
#[derive(Clone, Debug)]
pub struct Vocabulary(Vec<Fact>);

/// Facts that are 1 or 0: conditions.
pub(crate) const FLAGS: [&str; 10] = [
    "prompt-tokens-estimated",
    "assume-kv-reuse",
    "track-prefill-tokens",
    "explain",
    "lora-loaded",
    "session-bound",
    "local-prefill",
    "engine-running-known",
    "engine-queue-known",
    "kv-usage-known",
];

/// Facts with another fact that says whether they are known.
pub(crate) const WITH_KNOWN: [&str; 3] = ["engine-running", "engine-queue", "kv-usage"];

/// Facts that can be absent, with the value that stands for it.
pub(crate) const ABSENT: [(&str, u32); 34] = [
    ("n", 1),
    ("max-tokens", 0),
    ("expected-output-tokens", 0),
    ("ttft-target-us", 0),
    ("itl-target-us", 0),
    ("priority", 0),
    ("priority-jump-s", 0),
    ("session-hash", 0),
    ("lora-hash", 0),
    ("tenant-hash", 0),
    ("tenant-active-requests", 0),
    ("other-leg-worker-id", 0),
    ("other-leg-dp-rank", u32::MAX),
    ("queue-us", 0),
    ("program-hash", 0),
    ("program-turn", 0),
    ("program-idle-ms", u32::MAX),
    ("total-blocks", 0),
    ("cached-blocks-device", 0),
    ("cached-blocks-host", 0),
    ("cached-blocks-disk", 0),
    ("load-age-ms", u32::MAX),
    ("taint-preference", 0),
    ("topology-distance", 0),
    ("lora-loaded", 0),
    ("session-bound", 0),
    ("ttft-ewma-us", 0),
    ("itl-ewma-us", 0),
    ("error-ppm", 0),
    ("max-concurrency", 0),
    ("prefill-us-per-ktoken", 0),
    ("program-tokens", 0),
    ("running-program-tokens", 0),
    ("prefix-requests", 0),
];

/// Facts of load: an idle worker has 0, whatever the deployment.
pub(crate) const LOAD: [&str; 11] = [
    "active-requests",
    "active-prefill-tokens",
    "engine-running",
    "engine-queue",
    "kv-usage",
    "engine-running-known",
    "engine-queue-known",
    "kv-usage-known",
    "error-ppm",
    "running-program-tokens",
    "prefix-requests",
];

/// Functions with their arguments, for messages.
pub(crate) const FUNCTIONS: [(&str, &str); 13] = [
    ("min", "min(x) over the candidates, or min(a, b)"),
    ("max", "max(x) over the candidates, or max(a, b)"),
    ("sum", "sum(x) over the candidates"),
    ("mean", "mean(x) over the candidates"),
    ("ratio", "ratio(a, b)"),
    ("if", "if(condition, a, b)"),
    ("exp", "exp(x)"),
    ("log", "log(x)"),
    ("clamp", "clamp(x, low, high)"),
    ("known", "known(fact)"),
    ("taint", "taint('name')"),
    ("label", "label('key') == 'value'"),
    ("label_number", "label_number('key')"),
];

impl Vocabulary {
    /// Makes it from a table of facts: scope (`request` or `worker`), name, and type (`u32`, `f32`, `u64`).
    pub fn new<'a>(table: impl IntoIterator<Item = (&'a str, &'static str, &'a str)>) -> Self {
        let fact = |(scope, name, ty): (&str, &'static str, &str)| Fact {
            name,
            is_request: scope == "request",
            ty: match ty {
                "f32" => Type::F32,
                "u64" => Type::U64,
                _ => Type::U32,
            },
        };
        Self(table.into_iter().map(fact).collect())
    }

    /// Returns the fact of this name in a formula: `-` is written `_`, and `_hash` may be left out.
    pub(crate) fn fact(&self, name: &str) -> Option<Fact> {
        let fact = |wanted: &str| self.0.iter().find(|fact| fact.name == wanted).copied();
        let name = name.replace('_', "-");
        fact(&name).or_else(|| fact(&format!("{name}-hash")).filter(|fact| fact.ty == Type::U64))
    }

    /// Returns advice about a name that is not known.
    pub(crate) fn advice(&self, name: &str) -> String {
        let facts = self.0.iter().map(|fact| fact.name.replace('-', "_"));
        let functions = FUNCTIONS.iter().map(|(function, _)| (*function).to_owned());
        match closest(name, facts.chain(functions)) {
            Some(found) => format!("did you mean `{found}`?"),
            None => "see wit/facts.md for the names of facts, and write `_` for `-`".to_owned(),
        }
    }

    /// Returns the name as a formula writes it, when the text begins with a fact that has `-` in its name.
    pub(crate) fn with_dashes(&self, text: &str) -> Option<String> {
        let part = |letter: &char| letter.is_ascii_alphanumeric() || *letter == '-' || *letter == '_';
        let mut word: String = text.chars().take_while(part).collect();
        while word.contains('-') {
            if self.0.iter().any(|fact| fact.name == word) {
                return Some(word.replace('-', "_"));
            }
            word.truncate(word.rfind('-').unwrap_or(0));
        }
        None
    }
}

/// Returns the candidate that is most like `name`, if one is like it.
pub(crate) fn closest(name: &str, candidates: impl Iterator<Item = String>) -> Option<String> {
    let likeness = |other: &str| strsim::jaro_winkler(name, other);
    let best = candidates.max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&best) > 0.8).then_some(best)
}
