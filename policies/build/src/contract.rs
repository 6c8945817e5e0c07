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
