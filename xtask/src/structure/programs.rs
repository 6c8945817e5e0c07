//! The crates that are compiled into each program: their maximum number, and those that are forbidden.

use crate::sh;

/// Programs, and the maximum number of crates in the tree of each. A change that needs more crates raises the
/// number here and gives the reason in its commit.
const PROGRAMS: [(&str, usize); 5] = [
    (DAEMON, 420),
    ("pointsman-policy-tools", 290),
    ("pointsman-lab-cli", 391),
    ("pointsman-tools", 195),
    ("pointsman-sim", 135),
];

const DAEMON: &str = "pointsman-gateway";

/// Crates that the daemon must not contain, and the reason.
const FORBIDDEN: [(&str, &[&str]); 5] = [
    ("a simulator", &["pointsman-lab", "pointsman-lab-cli", "pointsman-sim", "pointsman-rig"]),
    ("an importer", &["pointsman-import", "saphyr-parser", "pointsman-tools"]),
    (
        "a registry client or an author tool",
        &["pointsman-policy-tools", "http-auth", "pointsman-policy-cases"],
    ),
    ("a terminal library", &["indicatif", "ratatui", "termion", "crossterm", "console"]),
    ("a plotting library", &["plotters", "charming", "poloto"]),
];

/// Asks cargo for each tree. Returns a line for each tree that is too large or contains a forbidden crate.
pub(super) fn broken() -> anyhow::Result<Vec<String>> {
    let mut broken = Vec::new();
    for (package, limit) in PROGRAMS {
        let crates = tree(package)?;
        sh::print(&format!("{package}: {} crates (limit {limit})", crates.len()));
        broken.extend(judge(package, limit, &crates));
    }
    Ok(broken)
}

fn judge(package: &str, limit: usize, crates: &[String]) -> Vec<String> {
    let mut broken = Vec::new();
    if crates.len() > limit {
        broken.push(format!("{package}: its tree has {} crates, limit {limit}", crates.len()));
    }
    if package == DAEMON {
        for (what, names) in FORBIDDEN {
            let found = names.iter().filter(|name| crates.iter().any(|own| own == *name));
            broken.extend(found.map(|name| format!("{package}: its tree has {name}, {what}")));
        }
    }
    broken
}

/// Returns the names of the crates of a package with its default features. Each version counts.
fn tree(package: &str) -> anyhow::Result<Vec<String>> {
    let mut cargo = sh::cargo();
    cargo.args(["tree", "--package", package, "--edges", "normal", "--locked", "--prefix", "none"]);
    // This variable is removed so that the tree has the features of this program only, not those of the
    // workspace.
    cargo.env_remove("CARGO_RESOLVER_FEATURE_UNIFICATION");
    Ok(names(&sh::output(&mut cargo)?))
}

fn names(text: &str) -> Vec<String> {
    let mut lines: Vec<&str> = text.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    lines.sort_unstable();
    lines.dedup();
    let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    lines.into_iter().filter(|line| !line.is_empty()).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_program_has_more_crates_than_its_limit_or_a_forbidden_one() {
        let broken = broken().unwrap();
        assert!(broken.is_empty(), "{}", broken.join("\n"));
    }

    #[test]
    fn a_crate_counts_once_and_a_forbidden_one_is_named_at_any_depth() {
        let crates = names("pointsman-gateway v1 (/a)\nserde v1\nserde v1 (*)\nserde v2\n\nratatui v3\n");
        assert_eq!(crates.len(), 4);
        assert_eq!(
            judge(DAEMON, 4, &crates),
            ["pointsman-gateway: its tree has ratatui, a terminal library"]
        );
        assert_eq!(judge("pointsman-tools", 3, &crates), ["pointsman-tools: its tree has 4 crates, limit 3"]);
    }
}
