//! Names and values of facts in a case, checked against the fact table, and their encoding for a call.

use std::{collections::BTreeMap, fmt};

use serde::Deserialize;

/// Type of a fact, which sets its encoding in the flat `list<u32>` of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactType {
    /// One word: an unsigned integer.
    U32,
    /// One word: the bits of an IEEE 754 single.
    F32,
    /// Two words, low half first.
    U64,
}

/// Encoded values by fact name: the low and the high word. The high word is 0 unless the fact is a `u64`.
pub type Values = BTreeMap<String, (u32, u32)>;

/// Names and types of all facts.
#[derive(Clone, Debug, Default)]
pub struct FactTable {
    request: BTreeMap<String, FactType>,
    worker: BTreeMap<String, FactType>,
}

/// A number as written in the file. Whole numbers keep all 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a number")]
pub enum Number {
    /// A whole number of 0 or more.
    Whole(u64),
    /// Any other number.
    Other(f64),
}

/// The value of a fact as written in the file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a number")]
pub(crate) enum Value {
    Number(Number),
    /// Name of a tenant, session, adapter or agent program, of which a policy knows the hash.
    Name(String),
}

impl Value {
    /// Encodes the value as the low and the high word of a fact.
    pub(crate) fn words(
        self,
        fact: &str,
        ty: FactType,
        hash: &dyn Fn(&str) -> u64,
    ) -> Result<(u32, u32), String> {
        match self {
            Self::Number(number) => number.words(ty),
            Self::Name(name) if fact.ends_with("-hash") => {
                // Settings write it like this.
                let tenant = name.strip_prefix("tenant:").filter(|_| fact == "tenant-hash");
                Number::Whole(hash(tenant.unwrap_or(&name))).words(ty)
            }
            // Such as the id of a worker, which may be above what a number of TOML holds.
            Self::Name(digits) if ty == FactType::U64 => {
                let number = digits.parse().map(Number::Whole);
                number.map_err(|_| "expected a whole number, or its digits in quotes".to_owned())?.words(ty)
            }
            Self::Name(_) => Err("expected a number".to_owned()),
        }
    }
}

impl FactTable {
    /// Builds the table from rows of scope (`request` or `worker`), name and type (`u32`, `f32` or `u64`).
    #[must_use]
    pub fn new<'a>(rows: impl IntoIterator<Item = (&'a str, &'a str, &'a str)>) -> Self {
        let mut table = Self::default();
        for (scope, name, ty) in rows {
            let facts = if scope == "request" { &mut table.request } else { &mut table.worker };
            let ty = match ty {
                "f32" => FactType::F32,
                "u64" => FactType::U64,
                _ => FactType::U32,
            };
            facts.insert(name.to_owned(), ty);
        }
        table
    }

    /// Returns the type of a request fact.
    ///
    /// # Errors
    /// Says that the fact is unknown and suggests the closest name.
    pub fn request(&self, name: &str) -> Result<FactType, String> {
        self.request.get(name).copied().ok_or_else(|| unknown("request", name, &self.request))
    }

    /// Returns the type of a worker fact, which may also be `label-is/KEY=VALUE`, `label-number/KEY`
    /// or `taint-is/NAME`.
    ///
    /// # Errors
    /// Says that the fact is unknown and suggests the closest name.
    pub fn worker(&self, name: &str) -> Result<FactType, String> {
        if name.strip_prefix("taint-is/").is_some_and(|taint| !taint.is_empty()) {
            return Ok(FactType::U32);
        }
        let label_is = name.strip_prefix("label-is/").and_then(|label| label.split_once('='));
        if label_is.is_some_and(|(key, _)| !key.is_empty()) {
            return Ok(FactType::U32);
        }
        if name.strip_prefix("label-number/").is_some_and(|key| !key.is_empty()) {
            return Ok(FactType::F32);
        }
        self.worker.get(name).copied().ok_or_else(|| unknown("worker", name, &self.worker))
    }
}

fn unknown(scope: &str, name: &str, facts: &BTreeMap<String, FactType>) -> String {
    let known = facts.keys().map(String::as_str);
    let labels = &["label-is/KEY=VALUE", "label-number/KEY", "taint-is/NAME"][..];
    let labels = if scope == "worker" { labels } else { &[] };
    let hint = closest(name, known.chain(labels.iter().copied()));
    let hint = hint.map(|name| format!("; did you mean \"{name}\"?"));
    format!(
        "unknown {scope} fact{}",
        hint.unwrap_or_else(|| "; `pointsman policy facts` lists all".to_owned())
    )
}

/// Returns the known name that is closest to a misspelt one, if at most half of its letters differ.
pub(crate) fn closest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known.map(|known| (strsim::normalized_damerau_levenshtein(name, known), known));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= 0.5).then_some(best.1)
}

/// Values of the facts that a case may leave out and that are not 0 then: the value of an absent fact
/// (`wit/facts.md`), or the gateway's default.
pub const LEFT_OUT: [(&str, u32); 13] = [
    ("n", 1),
    ("block-size", 16),
    ("overlap-score-credit", 1.0_f32.to_bits()),
    ("host-cache-credit", 0.75_f32.to_bits()),
    ("disk-cache-credit", 0.25_f32.to_bits()),
    ("prefill-load-scale", 1.0_f32.to_bits()),
    ("assume-kv-reuse", 1),
    ("track-prefill-tokens", 1),
    ("other-leg-dp-rank", u32::MAX),
    ("program-idle-ms", u32::MAX),
    ("engine-running-known", 1),
    ("engine-queue-known", 1),
    ("kv-usage-known", 1),
];

/// Returns the words of a fact that a case leaves out.
fn left_out(name: &str) -> (u32, u32) {
    let own = LEFT_OUT.iter().find(|(fact, _)| *fact == name);
    (own.map_or(0, |(_, value)| *value), 0)
}

/// Encodes the request facts that a policy asked for, in its order. Facts that are not given are as
/// [`LEFT_OUT`] says, otherwise 0.
pub fn request_words<'a>(wanted: impl IntoIterator<Item = (&'a str, FactType)>, values: &Values) -> Vec<u32> {
    let mut words = Vec::new();
    for (name, ty) in wanted {
        let (low, high) = values.get(name).copied().unwrap_or_else(|| left_out(name));
        words.push(low);
        words.extend((ty == FactType::U64).then_some(high));
    }
    words
}

/// Encodes the worker facts that a policy asked for, one column (two for `u64`) per fact. Facts that
/// are not given are as [`LEFT_OUT`] says, otherwise 0.
pub fn worker_words<'a>(wanted: impl IntoIterator<Item = (&'a str, FactType)>, rows: &[Values]) -> Vec<u32> {
    let mut words = Vec::new();
    for (name, ty) in wanted {
        let missing = left_out(name);
        let values = || rows.iter().map(|row| row.get(name).copied().unwrap_or(missing));
        words.extend(values().map(|(low, _)| low));
        if ty == FactType::U64 {
            words.extend(values().map(|(_, high)| high));
        }
    }
    words
}

impl Number {
    /// Encodes the number as the low and the high word of a fact.
    ///
    /// # Errors
    /// Says why the number does not fit the type.
    pub fn words(self, ty: FactType) -> Result<(u32, u32), String> {
        match ty {
            FactType::F32 => Ok((self.single().to_bits(), 0)),
            FactType::U32 => {
                let value = self.whole().and_then(|value| u32::try_from(value).ok());
                let value =
                    value.ok_or_else(|| format!("{self} is not a whole number from 0 to 4294967295"))?;
                Ok((value, 0))
            }
            FactType::U64 => {
                let value =
                    self.whole().ok_or_else(|| format!("{self} is not a whole number of 0 or more"))?;
                let low = u32::try_from(value & 0xffff_ffff).unwrap_or_default();
                Ok((low, u32::try_from(value >> 32).unwrap_or_default()))
            }
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value is whole, not negative and below 2^53"
    )]
    fn whole(self) -> Option<u64> {
        match self {
            Self::Whole(value) => Some(value),
            Self::Other(value) => {
                let exact = value.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&value);
                exact.then_some(value as u64)
            }
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "the fact itself is a single"
    )]
    fn single(self) -> f32 {
        match self {
            Self::Whole(value) => value as f32,
            Self::Other(value) => value as f32,
        }
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::Other(value)
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(value) => value.fmt(f),
            Self::Other(value) => value.fmt(f),
        }
    }
}
