//! Formulas of operators: files, and settings of the built-in policy `formula`.
//!
//! The built-in policy has two components: a filter for `keep`, and a selector for `cost` and `shed`. What an
//! operator writes in one place becomes the settings of both.

use std::path::{Path, PathBuf};

use pointsman_formula::{Asked, Formula, Names, Role, Vocabulary, position, texts, try_out};
use pointsman_routing::facts::{FactType, RequestFact, WorkerFact};
use pointsman_workers::name_hash;
use serde::Deserialize;
use serde_json::{Value, json};
use toml::Spanned;

/// End of the name of a formula file.
pub const FORMULA_SUFFIX: &str = ".formula.toml";
/// Largest formula file, bytes.
pub const MAX_FORMULA_FILE_BYTES: usize = 64 * 1024;

/// Returns the formula file that may be in the place of a lane's `file`.
pub(crate) fn formula_file(file: &Path) -> PathBuf {
    file.with_extension(FORMULA_SUFFIX.trim_start_matches('.'))
}

/// The components of the built-in policy `formula`.
#[derive(Clone, Copy, Debug)]
pub struct FormulaComponents {
    /// Chooses by `cost`, and rejects by `shed`.
    pub selector: &'static [u8],
    /// Keeps candidates by `keep`.
    pub filter: &'static [u8],
}

/// Settings of the two components: JSON objects for `configure`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FormulaSettings {
    /// Settings of the filter; `None` without `keep`.
    pub keep: Option<String>,
    /// Settings of the selector; `None` without `cost`.
    pub rank: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    cost: Option<Spanned<String>>,
    keep: Option<Spanned<String>>,
    shed: Option<Shed>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table such as { when = \"min(engine_queue) > 8\" }")]
struct Shed {
    when: Spanned<String>,
    status: Option<Spanned<i64>>,
    reason: Option<String>,
}

impl FormulaSettings {
    /// Splits the settings of a slot, a JSON object. The selector gets the keys that are unknown, and refuses
    /// them. `salt` is the salt of the name hashes that policies see.
    #[must_use]
    pub fn of(settings: &Value, salt: u64) -> Self {
        let mut settings = settings.as_object().cloned().unwrap_or_default();
        let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
        let when = settings.get("shed").and_then(|shed| shed.get("when"));
        let names = |formulas: &[String]| json!(names(formulas.iter().map(String::as_str), salt));
        let rank_names = names(&[text(settings.get("cost")), text(when)]);
        let keep = settings.remove("keep").map(|keep| {
            let names = names(&[text(Some(&keep))]);
            json!({ "keep": keep, "names": names }).to_string()
        });
        let rank = (!settings.is_empty() || keep.is_none()).then(|| {
            settings.insert("names".to_owned(), rank_names);
            Value::Object(settings).to_string()
        });
        Self { keep, rank }
    }

    /// Reads and checks a formula file.
    ///
    /// # Errors
    /// The first mistake, with its line and column in the file.
    pub fn of_file(text: &str, salt: u64) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| {
            let (line, column) = position(text, error.span().map_or(0, |span| span.start));
            format!("line {line}, column {column}: {}", error.message().trim_end())
        })?;
        file.check(text, salt)?;
        Ok(Self::of(&file.settings(), salt))
    }
}

impl File {
    /// Returns the keys that are there, as settings in the configuration.
    fn settings(&self) -> Value {
        let text = |formula: &Spanned<String>| json!(formula.get_ref());
        let shed = self.shed.as_ref().map(|Shed { when, status, reason }| {
            let status = status.as_ref().map(|status| json!(status.get_ref()));
            let reason = reason.as_ref().map(|reason| json!(reason));
            object([("when", Some(text(when))), ("status", status), ("reason", reason)])
        });
        let (cost, keep) = (self.cost.as_ref().map(text), self.keep.as_ref().map(text));
        object([("cost", cost), ("keep", keep), ("shed", shed)])
    }

    /// Compiles and tries the formulas, as the components do.
    fn check(&self, text: &str, salt: u64) -> Result<(), String> {
        let at = |place: usize| {
            let (line, column) = position(text, place);
            format!("line {line}, column {column}")
        };
        let vocabulary = vocabulary();
        let compile = |key: &str, formula: &Spanned<String>, role, asked: &mut Asked| {
            let source = formula.get_ref();
            let names = names([source.as_str()], salt);
            Formula::new(source, role, &vocabulary, &names, asked).map_err(|mistake| {
                match place(text, formula, mistake.at) {
                    Some(place) => format!("{}: {key}: {mistake}", at(place)),
                    // The text in the file has escapes.
                    None => format!("{}: {key}: {}", at(formula.span().start), mistake.describe(source)),
                }
            })
        };
        let begin = |formula: &Spanned<String>| at(formula.span().start);
        let mut asked = Asked::default();
        if let Some(keep) = &self.keep {
            let formula = compile("keep", keep, Role::Keep, &mut asked)?;
            try_out(&[&formula], &asked).map_err(|why| format!("{}: {why}", begin(keep)))?;
        }
        let mut asked = Asked::default();
        let Some(cost) = &self.cost else {
            return match (&self.shed, &self.keep) {
                (Some(shed), _) => {
                    Err(format!("{}: `shed` needs a formula `cost` beside it", begin(&shed.when)))
                }
                (None, None) => {
                    Err("line 1, column 1: neither `cost` nor `keep` is there; write one".to_owned())
                }
                (None, Some(_)) => Ok(()),
            };
        };
        let cost_formula = compile("cost", cost, Role::Cost, &mut asked)?;
        let mut tried = vec![(cost, cost_formula)];
        if let Some(shed) = &self.shed {
            tried.push((&shed.when, compile("shed.when", &shed.when, Role::Shed, &mut asked)?));
            if let Some(status) =
                shed.status.as_ref().filter(|status| ![429, 503, 529].contains(status.get_ref()))
            {
                let (place, value) = (at(status.span().start), status.get_ref());
                return Err(format!(
                    "{place}: shed.status: {value} is not a status of a rejection; use 429, 503 or 529"
                ));
            }
        }
        for (source, formula) in &tried {
            try_out(&[formula], &asked).map_err(|why| format!("{}: {why}", begin(source)))?;
        }
        Ok(())
    }
}

fn object<const N: usize>(entries: [(&str, Option<Value>); N]) -> Value {
    entries.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// Returns the hashes of the names in formulas.
fn names<'a>(formulas: impl IntoIterator<Item = &'a str>, salt: u64) -> Names {
    let texts = formulas.into_iter().flat_map(texts);
    texts.map(|name| (name_hash(name.as_bytes(), salt), name)).map(|(hash, name)| (name, hash)).collect()
}

/// Returns the offset in the file of a byte of a formula. `None`: the file writes it with escapes.
fn place(text: &str, formula: &Spanned<String>, at: usize) -> Option<usize> {
    let written = text.get(formula.span())?;
    let quotes = if written.starts_with("\"\"\"") || written.starts_with("'''") { 3 } else { 1 };
    let inner = written.get(quotes..written.len().checked_sub(quotes)?)?;
    let body = inner
        .strip_prefix("\r\n")
        .or_else(|| inner.strip_prefix('\n'))
        .filter(|_| quotes == 3)
        .unwrap_or(inner);
    let begin = formula.span().start + quotes + (inner.len() - body.len());
    (body == formula.get_ref()).then_some(begin + at)
}

fn vocabulary() -> Vocabulary {
    let name = |ty| match ty {
        FactType::U32 => "u32",
        FactType::F32 => "f32",
        FactType::U64 => "u64",
    };
    let request = RequestFact::ALL.iter().map(|fact| ("request", fact.name(), name(fact.ty())));
    let worker = WorkerFact::ALL.iter().map(|fact| ("worker", fact.name(), name(fact.ty())));
    Vocabulary::new(request.chain(worker))
}

#[cfg(test)]
mod tests;
