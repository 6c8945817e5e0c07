//! Checks the module rules of ARCHITECTURE.md, and the crates of each program. Parses the sources and asks
//! cargo for dependency trees; builds nothing.

use std::path::Path;

use anyhow::ensure;

use crate::sh;

mod graph;
mod modules;
mod programs;
mod rules;
mod standalone;
mod syntax;

/// Checks every rule; prints each one that is broken, and the number of crates of each program.
pub(crate) fn check() -> anyhow::Result<()> {
    let root = sh::root();
    let mut broken = rules::broken(&root, &modules::crates(&root)?)?;
    broken.extend(programs::broken()?);
    broken.iter().for_each(|line| sh::print(line));
    ensure!(broken.is_empty(), "the source tree breaks {} module rules; see ARCHITECTURE.md", broken.len());
    sh::print("module rules: all hold");
    Ok(())
}

/// Returns the path of `file` relative to `root`, for messages.
fn shown(root: &Path, file: &Path) -> String {
    file.strip_prefix(root).unwrap_or(file).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_tree_keeps_the_module_rules() {
        let root = sh::root();
        let broken = rules::broken(&root, &modules::crates(&root).unwrap()).unwrap();
        assert!(broken.is_empty(), "{}", broken.join("\n"));
    }
}
