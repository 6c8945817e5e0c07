//! The files of an image, in the order of their paths.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::Context as _;

/// Files and directories by path, without the leading slash.
#[derive(Debug, Default)]
pub(super) struct Tree {
    entries: BTreeMap<String, Entry>,
}

/// A file or a directory of an image.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Content of a file; `None` for a directory.
    pub(super) content: Option<Vec<u8>>,
    pub(super) mode: u32,
    /// Number of the owning user and group.
    pub(super) owner: u64,
}

impl Tree {
    /// Adds a directory and its parent directories.
    pub(super) fn directory(&mut self, path: &str, mode: u32, owner: u64) {
        self.parents(path);
        self.entries.insert(path.to_owned(), Entry { content: None, mode, owner });
    }

    /// Adds a file that root owns, and its parent directories.
    pub(super) fn file(&mut self, path: &str, content: impl Into<Vec<u8>>, mode: u32) {
        self.parents(path);
        self.entries.insert(path.to_owned(), Entry { content: Some(content.into()), mode, owner: 0 });
    }

    /// Adds a file of this machine, under its own name.
    pub(super) fn copy(&mut self, dir: &str, from: &Path, mode: u32) -> anyhow::Result<()> {
        let name = from.file_name().unwrap_or_default().to_string_lossy();
        let content = fs::read(from).with_context(|| format!("could not read {}", from.display()))?;
        self.file(&format!("{dir}/{name}"), content, mode);
        Ok(())
    }

    /// Returns every entry. A directory comes before its contents.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    fn parents(&mut self, path: &str) {
        for (end, _) in path.match_indices('/') {
            let above = path.get(..end).unwrap_or_default().to_owned();
            self.entries.entry(above).or_insert(Entry { content: None, mode: 0o755, owner: 0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Tree;

    #[test]
    fn directories_come_before_their_files_and_keep_their_mode() {
        let mut tree = Tree::default();
        tree.directory("tmp", 0o1777, 0);
        tree.file("usr/bin/b", "x", 0o755);
        tree.file("tmp/a", "x", 0o644);
        let paths: Vec<_> = tree.entries().map(|(path, entry)| (path, entry.mode)).collect();
        let expected =
            [("tmp", 0o1777), ("tmp/a", 0o644), ("usr", 0o755), ("usr/bin", 0o755), ("usr/bin/b", 0o755)];
        assert_eq!(paths, expected);
    }
}
