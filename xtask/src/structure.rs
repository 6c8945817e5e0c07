//! `structure`: sizes of the source tree, and the module rules of ARCHITECTURE.md.
//!
//! Reads sources as text and syntax, and asks cargo for the daemon's crates; builds nothing.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::ensure;

use crate::sh;

mod daemon;
mod graph;
mod modules;
mod rules;
mod sizes;
mod standalone;
mod syntax;

use modules::Crate;

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Measure another checkout instead, without the rules.
    #[arg(long, value_name = "DIR")]
    of: Option<PathBuf>,
}

/// Prints the sizes; fails when the tree breaks a rule.
///
/// # Errors
/// A source file that cannot be read or parsed, or a broken rule.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let own = sh::root();
    let root = args.of.as_deref().unwrap_or(&own);
    let crates = modules::crates(root)?;
    report(root, &crates);
    if args.of.is_some() {
        return Ok(());
    }
    let tree = daemon::Tree::read()?;
    sh::print(&format!("crates in the daemon: {}", tree.len()));
    let mut broken = rules::broken(root, &crates)?;
    broken.extend(tree.broken());
    broken.iter().for_each(|line| sh::print(line));
    ensure!(broken.is_empty(), "the source tree breaks {} module rules; see ARCHITECTURE.md", broken.len());
    sh::print("module rules: all hold");
    Ok(())
}

fn report(root: &Path, crates: &[Crate]) {
    let mut sizes = sizes::Sizes::default();
    let mut lines_by_crate = BTreeMap::new();
    let (mut file_circles, mut sibling_circles) = (Vec::<Vec<String>>::new(), 0);
    for krate in crates {
        let lines = krate.modules.iter().map(|module| sizes.add(module)).sum::<usize>();
        *lines_by_crate.entry(krate.name.as_str()).or_insert(0) += lines;
        let imports = graph::imports(krate);
        let names = |circle: Vec<usize>| {
            circle
                .iter()
                .filter_map(|at| krate.modules.get(*at))
                .map(|module| shown(root, &module.file))
                .collect()
        };
        file_circles.extend(graph::file_circles(krate, &imports).into_iter().map(names));
        sibling_circles += graph::sibling_circles(krate, &imports).len();
    }
    for (name, lines) in lines_by_crate {
        sh::print(&format!("{name:<32} {lines:>6} lines"));
    }
    sh::print(&sizes.table());
    file_circles.sort_unstable_by_key(|circle| std::cmp::Reverse(circle.len()));
    let sizes: Vec<usize> = file_circles.iter().map(Vec::len).collect();
    sh::print(&format!("import circles, by number of files: {sizes:?}"));
    for circle in file_circles {
        sh::print(&format!("    {}", circle.join(", ")));
    }
    sh::print(&format!("circles between sibling modules: {sibling_circles}"));
}

/// The path of `file` below `root`, for messages.
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
