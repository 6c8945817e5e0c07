//! Formulas: costs and conditions over facts that operators write instead of policies.
//!
//! The syntax is that of CEL. Every operation has a finite result: formulas cannot fail once they are
//! compiled (docs/formulas.md defines overflow and division by zero). A formula is evaluated one operation
//! at a time, each over the column of all candidates.
//!
//! The built-in policy `formula` is this crate in a component. The host uses the same code to check files
//! and to find the names whose hashes it passes to the component.

mod columns;
mod compile;
mod evaluate;
mod parse;
mod position;
mod trial;
mod vocabulary;

use std::collections::BTreeMap;

pub use compile::{Asked, Formula, Role};
pub use evaluate::Inputs;
pub use position::{Mistake, position};
pub use trial::try_out;
pub use vocabulary::Vocabulary;

/// Longest formula, bytes.
pub const MAX_LENGTH: usize = 4_096;
/// Deepest nesting of parentheses, calls, signs and conditionals.
pub const MAX_DEPTH: usize = 32;
/// Maximum number of operations in a formula. `exp` and `log` count as eight operations.
pub(crate) const MAX_OPERATIONS: usize = 256;
/// Maximum work of a call: operations of the formula times candidates.
pub const MAX_WORK: usize = 1 << 19;

/// Hashes by which policies know sessions, LoRA adapters and tenants, by name.
pub type Names = BTreeMap<String, u64>;

/// Returns the texts in a formula: names of which the component needs hashes. A formula that cannot be parsed
/// has none.
#[must_use]
pub fn texts(formula: &str) -> Vec<String> {
    let mut texts = Vec::new();
    if let Ok(node) = parse::parse(formula) {
        node.texts(&mut texts);
    }
    texts
}
