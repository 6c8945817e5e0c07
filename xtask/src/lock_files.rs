//! The lock files of the workspaces that no other quick check resolves. A crate that gains a dependency makes
//! them stale, and the checks that compile these workspaces come last, or only at night.

use std::path::Path;

use anyhow::bail;

use crate::sh;

/// Directories of workspaces of their own.
const WORKSPACES: [&str; 3] = ["fuzz", "tests/models", "tests/oracle"];

/// Checks that each lock file fits the manifests, with what cargo has in its cache. Returns a line for each
/// one that could not be checked.
pub(crate) fn check() -> anyhow::Result<Vec<String>> {
    let mut unchecked = Vec::new();
    for workspace in WORKSPACES {
        if !is_checked(&sh::root().join(workspace))? {
            unchecked.push(format!("not checked: {workspace}/Cargo.lock (cargo's cache lacks its crates)"));
        }
    }
    Ok(unchecked)
}

/// Returns whether the lock file of a workspace could be checked.
///
/// # Errors
/// It is stale.
fn is_checked(workspace: &Path) -> anyhow::Result<bool> {
    let manifest = workspace.join("Cargo.toml");
    let mut cargo = sh::cargo();
    cargo.args(["metadata", "--format-version", "1", "--locked", "--offline", "--manifest-path"]);
    match sh::output(cargo.arg(&manifest)) {
        Ok(_) => Ok(true),
        Err(error) if error.to_string().contains("--locked was passed") => bail!(
            "{}/Cargo.lock does not fit the manifests: run `cargo metadata --manifest-path {} > /dev/null` and commit it",
            workspace.display(),
            manifest.display()
        ),
        Err(_) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_lock_file_that_lacks_a_dependency_is_stale() {
        let workspace = tempfile::TempDir::new().unwrap();
        let package =
            |name| format!("[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n");
        let root = |more| format!("{}{more}[workspace]\n", package("own"));
        let write = |path: &str, text: &str| {
            let path = workspace.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("src/lib.rs", "");
        write("Cargo.toml", &root(""));
        write("Cargo.lock", "version = 4\n\n[[package]]\nname = \"own\"\nversion = \"0.0.0\"\n");
        assert!(is_checked(workspace.path()).unwrap());
        write("added/src/lib.rs", "");
        write("added/Cargo.toml", &package("added"));
        write("Cargo.toml", &root("[dependencies]\nadded = { path = \"added\" }\n"));
        let error = is_checked(workspace.path()).unwrap_err().to_string();
        assert!(error.contains("does not fit the manifests"), "{error}");
        // Offline, with an empty cache of this name.
        write("Cargo.toml", &root("[dependencies]\npointsman-no-such-crate = \"1\"\n"));
        assert!(!is_checked(workspace.path()).unwrap());
    }
}
