//! Files that commands write.

use std::{
    fs::File,
    io::{self, BufWriter, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};

/// Reads the name of a file to write to.
///
/// # Errors
/// It is `-`, with which other programs mean standard output.
pub fn output_file(text: &str) -> Result<PathBuf, String> {
    match text {
        "-" => Err("name a file: standard output gets a summary of it".to_owned()),
        _ => Ok(text.into()),
    }
}

/// Writes a file. The error names it.
pub(crate) fn write_file(
    path: &Path,
    content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> anyhow::Result<()> {
    let write = || {
        let mut out = BufWriter::new(File::create(path)?);
        content(&mut out)?;
        out.flush()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// Refuses to write a file that is read.
pub(crate) fn check_is_other_file(read: &Path, written: &Path) -> anyhow::Result<()> {
    let id = |path: &Path| path.metadata().ok().map(|file| (file.dev(), file.ino()));
    let is_same = id(read).is_some() && id(read) == id(written);
    ensure!(
        !is_same,
        "cannot write {}: it is the trace that is read; name another file with -o",
        written.display()
    );
    Ok(())
}
