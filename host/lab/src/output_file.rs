//! Files that commands write.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, BufWriter, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};

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

/// Checks the files that a command is about to write, before its work: each is in a directory that exists, is
/// not a directory itself, and is neither one of the files that the command reads, which are named, nor
/// another one that it writes.
pub(crate) fn check_outputs<'a>(
    read: &[(&str, &Path)],
    written: impl IntoIterator<Item = &'a PathBuf>,
) -> anyhow::Result<()> {
    let file = |path: &Path| path.metadata().ok().map(|file| (file.dev(), file.ino()));
    let mut before: Vec<(FilePlace, &Path)> = Vec::new();
    for path in written {
        let output = path.display();
        ensure!(!path.is_dir(), "cannot write {output}: it is a directory; name a file");
        let is_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
        ensure!(!is_folder, "cannot write {output}: it ends with `/`; name a file");
        let exists = folder(path).is_none_or(Path::is_dir);
        ensure!(exists, "cannot write {output}: its directory does not exist");
        let is_same = |(_, read): &&(&str, &Path)| file(read).is_some() && file(read) == file(path);
        if let Some((what, _)) = read.iter().find(is_same) {
            bail!("cannot write {output}: it is {what} that is read; name another file");
        }
        let Some(place) = place(path) else { continue };
        if let Some((_, other)) = before.iter().find(|(other, _)| *other == place) {
            bail!("cannot write {output}: {} is the same file; name two files", other.display());
        }
        before.push((place, path));
    }
    Ok(())
}

/// Device and number of a file, or those of its directory and its name if it does not exist yet.
type FilePlace = (u64, u64, Option<OsString>);

/// Returns the place of a file; `None` if it is a device or a pipe, to which more than one output may go.
fn place(path: &Path) -> Option<FilePlace> {
    match path.metadata() {
        Ok(file) => file.is_file().then(|| (file.dev(), file.ino(), None)),
        Err(_) => {
            let folder = folder(path).unwrap_or(Path::new(".")).metadata().ok()?;
            Some((folder.dev(), folder.ino(), path.file_name().map(OsStr::to_owned)))
        }
    }
}

/// Returns the directory that a path names, if it names one.
fn folder(path: &Path) -> Option<&Path> {
    path.parent().filter(|folder| !folder.as_os_str().is_empty())
}
