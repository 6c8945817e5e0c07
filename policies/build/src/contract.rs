//! The contract as text, and the table of facts that its document has.

/// `wit/policy.wit`.
pub const CONTRACT: &str = include_str!("../../../wit/policy.wit");
/// `wit/facts.md`.
pub const FACTS: &str = include_str!("../../../wit/facts.md");

/// Subject of a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The request: one value.
    Request,
    /// Each candidate: one column.
    Worker,
}

/// A row of `wit/facts.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Subject of the fact.
    pub scope: Scope,
    /// Name by which policies ask for it. Names made from labels have `<key>` and `<value>` in them.
    pub name: &'static str,
    /// `u32`, `f32` or `u64`.
    pub ty: &'static str,
    /// Meaning of the number.
    pub meaning: &'static str,
    /// Unit and range.
    pub unit: &'static str,
    /// The value that stands for "not known" or "not given". `None`: the value is always known.
    pub absent: Option<&'static str>,
}

impl Scope {
    /// Its name in messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Worker => "worker",
        }
    }
}

/// Returns all facts, in the document's order.
pub fn facts() -> impl Iterator<Item = Fact> {
    let mut scope = None;
    FACTS.lines().filter_map(move |line| {
        if let Some(heading) = line.strip_prefix("## ") {
            scope = match heading {
                "Request facts" => Some(Scope::Request),
                "Worker facts" => Some(Scope::Worker),
                _ => None,
            };
        }
        let mut cells = line.strip_prefix("| `")?.trim_end_matches([' ', '|']).split(" | ");
        let name = cells.next()?.strip_suffix('`')?;
        let (ty, meaning, unit) = (cells.next()?, cells.next()?, cells.next()?);
        let absent = cells.next().filter(|absent| *absent != "–");
        Some(Fact { scope: scope?, name, ty, meaning, unit, absent })
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// Returns the facts as the helpers write them, by scope and type, without the last line.
    fn helper_table(indent: &str) -> String {
        let mut text = "{\n".to_owned();
        for (scope, key) in [(Scope::Request, "request"), (Scope::Worker, "worker")] {
            text += &format!("{indent}\"{key}\": {{\n");
            for ty in ["u32", "f32", "u64"] {
                text += &format!("{0}\"{ty}\": [\n", indent.repeat(2));
                let mut line = String::new();
                for fact in facts().filter(|fact| (fact.scope, fact.ty) == (scope, ty)) {
                    let name = format!(" \"{}\",", fact.name);
                    if line.len() + name.len() > 100 {
                        text += &format!("{}{}\n", indent.repeat(3), std::mem::take(&mut line).trim_start());
                    }
                    line += &name;
                }
                text += &format!("{}{}\n{}],\n", indent.repeat(3), line.trim_start(), indent.repeat(2));
            }
            text += &format!("{indent}}},\n");
        }
        text.trim_end().to_owned()
    }

    #[test]
    fn the_helpers_in_python_and_javascript_have_the_table_of_facts() {
        for (file, indent) in [("python/pointsman_policy.py", "    "), ("js/pointsman-policy.js", "  ")] {
            let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(file);
            let text = fs::read_to_string(&path).expect("a file");
            let (before, rest) = text.split_once("FACTS = ").expect("a table");
            let (found, after) = rest.split_once("\n}").expect("its end");
            let table = helper_table(indent);
            if std::env::var_os("UPDATE_DOCS").is_some() {
                fs::write(&path, format!("{before}FACTS = {table}\n}}{after}")).expect("written");
                continue;
            }
            let advice = "write it: UPDATE_DOCS=1 cargo test -p pointsman-guest-build the_helpers";
            assert_eq!(found, table, "the table of {file} is stale; {advice}");
        }
    }
}
