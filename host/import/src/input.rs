//! Reads a source with a bound.

use std::{fs::File, io::Read as _, path::Path};

use anyhow::{Context as _, bail};

/// Maximum size of a source, bytes: the same as for an object in Kubernetes.
pub(crate) const MAX_BYTES: u64 = 1024 * 1024;

/// Reads a file, or stdin for `-`.
///
/// # Errors
/// The file cannot be read, is larger than [`MAX_BYTES`], or is not UTF-8.
pub(crate) fn read(path: &Path) -> anyhow::Result<String> {
    let shown = path.display();
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_BYTES + 1).read_to_end(&mut bytes)
    } else {
        let file = File::open(path)
            .with_context(|| format!("cannot open `{shown}`; check the path and its permissions"))?;
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes)
    };
    read.with_context(|| format!("cannot read `{shown}`"))?;
    if bytes.len() as u64 > MAX_BYTES {
        bail!("`{shown}` is larger than {MAX_BYTES} bytes: give the file of the configuration alone");
    }
    String::from_utf8(bytes).map_err(|_| anyhow::anyhow!("`{shown}` is not UTF-8 text"))
}
