//! Writes a result to a file, and never over another one unless asked.

use std::{fs::OpenOptions, io::Write as _, os::unix::fs::OpenOptionsExt as _, path::Path};

use anyhow::{Context as _, bail};

/// Writes the text. Only the owner may read the file: it may have keys of engines.
///
/// # Errors
/// The file exists and `force` is not set, or it cannot be written.
pub(crate) fn write_file(path: &Path, text: &str, force: bool) -> anyhow::Result<()> {
    let shown = path.display();
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    let opened =
        if force { options.create(true).truncate(true) } else { options.create_new(true) }.open(path);
    let mut file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            bail!("`{shown}` exists: give another file, or `--force` to replace it")
        }
        Err(error) => return Err(error).with_context(|| format!("cannot create `{shown}`")),
    };
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write `{shown}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s1_a_file_is_replaced_only_by_force_and_is_the_owner_s() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.toml");
        write_file(&path, "first and longer", false).unwrap();
        let refused = write_file(&path, "second", false).unwrap_err().to_string();
        // S1.4
        assert!(refused.contains("exists") && refused.contains("--force"), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "first and longer");
        write_file(&path, "third", true).unwrap();
        // S1.4
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "third");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let missing = write_file(&dir.path().join("none/p.toml"), "", false).unwrap_err().to_string();
        assert!(missing.starts_with("cannot create `"), "{missing}");
    }
}
