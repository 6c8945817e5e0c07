//! The layer of an image: a compressed archive of its files.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};
use tar::{Builder, EntryType, Header};

use super::tree::Tree;
use crate::digest::sha256;

/// A layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) gzipped: Vec<u8>,
    /// Digest of the uncompressed archive.
    pub(super) diff_id: String,
}

/// Packs the files, all with the same time. `gzip` compresses the archive in a file of `work`.
pub(super) fn pack(files: &Tree, time: u64, work: &Path) -> anyhow::Result<Layer> {
    let tar = archive(files, time)?;
    let diff_id = format!("sha256:{}", sha256(&tar));
    let file = work.join("layer.tar");
    fs::write(&file, tar).with_context(|| format!("writing {}", file.display()))?;
    // The archive contains neither its name nor a time, and one thread compresses it.
    let gzip = Command::new("gzip").args(["--no-name", "--best", "--stdout"]).arg(&file).output();
    let gzip = gzip.context("could not start gzip: install it with `apt install gzip`")?;
    ensure!(gzip.status.success(), "gzip failed: {}", String::from_utf8_lossy(&gzip.stderr).trim());
    fs::remove_file(&file)?;
    Ok(Layer { gzipped: gzip.stdout, diff_id })
}

/// Returns the files as an archive, all with the same time.
pub(super) fn archive(files: &Tree, time: u64) -> anyhow::Result<Vec<u8>> {
    let mut archive = Builder::new(Vec::new());
    for (path, entry) in files.entries() {
        let mut header = Header::new_ustar();
        let content = entry.content.as_deref().unwrap_or_default();
        let is_dir = entry.content.is_none();
        header.set_entry_type(if is_dir { EntryType::Directory } else { EntryType::Regular });
        header.set_mode(entry.mode);
        header.set_uid(entry.owner);
        header.set_gid(entry.owner);
        header.set_mtime(time);
        header.set_size(content.len() as u64);
        let path = if is_dir { format!("{path}/") } else { path.to_owned() };
        archive.append_data(&mut header, &path, content).with_context(|| format!("packing {path}"))?;
    }
    Ok(archive.into_inner()?)
}

#[cfg(test)]
mod tests {
    use super::{Tree, archive};

    #[test]
    fn owners_modes_and_times_are_those_that_were_given() {
        let mut tree = Tree::default();
        tree.file("etc/b", "text", 0o644);
        tree.directory("cache", 0o700, 7);
        let bytes = archive(&tree, 42).unwrap();
        let mut read = tar::Archive::new(bytes.as_slice());
        let mut seen = Vec::new();
        for entry in read.entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.mtime().unwrap(), header.uid().unwrap()), (42, header.gid().unwrap()));
            let path = entry.path().unwrap().display().to_string();
            seen.push((path, header.mode().unwrap(), header.uid().unwrap(), header.size().unwrap()));
        }
        let expected = [("cache/", 0o700, 7, 0), ("etc/", 0o755, 0, 0), ("etc/b", 0o644, 0, 4)];
        assert_eq!(seen, expected.map(|(path, mode, uid, size)| (path.to_owned(), mode, uid, size)));
    }
}
