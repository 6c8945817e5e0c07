//! The crates that are compiled into the daemon.

use anyhow::ensure;

use crate::sh;

/// Crates that the daemon does without, and the reason: programs of their own have them.
const FORBIDDEN: [(&str, &str); 11] = [
    ("pointsman-import", "importers belong to pointsman-tools"),
    ("pointsman-lab", "simulations belong to pointsman-lab"),
    ("pointsman-lab-cli", "simulations belong to pointsman-lab"),
    ("pointsman-policy-tools", "author commands and registry clients belong to pointsman-policy"),
    ("pointsman-sim", "the simulated engine belongs to pointsman-lab and pointsman-sim"),
    ("pointsman-tools", "it is a program of its own"),
    ("http-auth", "registry clients belong to pointsman-policy"),
    ("indicatif", "the daemon has no terminal"),
    ("ratatui", "the daemon has no terminal"),
    ("termion", "the daemon has no terminal"),
    ("saphyr-parser", "importers belong to pointsman-tools"),
];

/// The crates of the daemon, by name; each version counts.
#[derive(Debug)]
pub(super) struct Tree(Vec<String>);

impl Tree {
    /// Asks cargo, with the default features of the daemon's crate.
    pub(super) fn read() -> anyhow::Result<Self> {
        let mut cargo = sh::cargo();
        cargo.args(["tree", "--package", "pointsman-gateway", "--edges", "normal", "--locked"]);
        // Of the daemon alone, also where builds take the features of the whole workspace.
        cargo.env_remove("CARGO_RESOLVER_FEATURE_UNIFICATION");
        let output = cargo.args(["--prefix", "none", "--format", "{p}"]).output()?;
        let problem = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`cargo tree` failed: {}", problem.trim());
        Ok(Self::of(&String::from_utf8_lossy(&output.stdout)))
    }

    fn of(text: &str) -> Self {
        let mut lines: Vec<&str> = text.lines().map(|line| line.trim_end_matches(" (*)")).collect();
        lines.sort_unstable();
        lines.dedup();
        let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        Self(lines.into_iter().filter(|line| !line.is_empty()).map(name).collect())
    }

    /// Number of crates.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// A line for each crate that must not be there.
    pub(super) fn broken(&self) -> Vec<String> {
        let found = FORBIDDEN.iter().filter(|(name, _)| self.0.iter().any(|own| own == name));
        found.map(|(name, why)| format!("pointsman-gateway: its tree has {name}; {why}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_counts_once_and_a_forbidden_one_is_named_at_any_depth() {
        let tree = Tree::of("pointsman-gateway v1 (/a)\nserde v1\nserde v1 (*)\nserde v2\n\nratatui v3\n");
        assert_eq!(tree.len(), 4);
        assert_eq!(tree.broken(), ["pointsman-gateway: its tree has ratatui; the daemon has no terminal"]);
        assert!(Tree::of("serde v1\n").broken().is_empty());
    }
}
