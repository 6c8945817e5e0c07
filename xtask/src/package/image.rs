//! An OCI image without a base image: it contains the programs, their libraries, root certificates and the
//! configuration. No container daemon is needed, and equal programs give equal bytes.

use std::{fs, path::Path};

use anyhow::Context as _;

mod config;
mod layer;
mod layout;
mod libraries;
mod tree;

use super::commit::{Commit, Contents};
use tree::Tree;

/// Root certificates of Debian's `ca-certificates`. Certificates that an administrator added to the build
/// machine are in another directory, so no image trusts them.
const CERTIFICATES: &str = "/usr/share/ca-certificates/mozilla";

/// File that names the distribution of this machine, from which the libraries come.
const OS_RELEASE: &str = "/etc/os-release";

/// Numeric user and group of the process.
const USER: u64 = 65532;

/// Writes the image as the archive of an OCI layout. `work` is a directory for temporary files.
pub(crate) fn write(contents: Contents<'_>, work: &Path, output: &Path) -> anyhow::Result<()> {
    let files = files(contents).context("collecting the files of the image")?;
    let layer = layer::pack(&files, contents.commit.time, work).context("packing the image's layer")?;
    let config = config::config(contents.commit, &layer.diff_id);
    let archive = layout::archive(layer.gzipped, &config, contents.commit)?;
    fs::write(output, archive).with_context(|| format!("writing {}", output.display()))
}

/// Returns the name of the image's file.
pub(crate) fn file_name(commit: &Commit) -> String {
    format!("pointsman_{}_{}.oci.tar", commit.version, config::architecture())
}

fn files(contents: Contents<'_>) -> anyhow::Result<Tree> {
    let mut tree = Tree::default();
    for program in contents.programs {
        tree.copy("usr/bin", program, 0o755)?;
    }
    let libraries = libraries::of(contents.programs)?;
    for library in &libraries {
        let dir = library.parent().unwrap_or(Path::new("/")).to_string_lossy();
        tree.copy(dir.trim_start_matches('/'), library, 0o755)?;
    }
    let certificates = certificates(Path::new(CERTIFICATES))?;
    tree.file("etc/ssl/certs/ca-certificates.crt", certificates, 0o644);
    // Scanners use this file to choose the list of vulnerabilities.
    tree.copy("etc", Path::new(OS_RELEASE), 0o644)?;
    for package in libraries::packages(&libraries)? {
        tree.file(&format!("usr/share/doc/{}/copyright", package.name), package.copyright, 0o644);
        // Scanners read the versions of packages here, because the image has no package manager.
        tree.file(&format!("var/lib/dpkg/status.d/{}", package.name), package.status, 0o644);
    }
    for document in contents.documents {
        tree.copy("usr/share/doc/pointsman", document, 0o644)?;
    }
    let deploy = contents.source.join("deploy");
    tree.copy("usr/share/doc/pointsman", &deploy.join("debian/copyright"), 0o644)?;
    tree.copy("etc/pointsman", &deploy.join("etc/pointsman.toml"), 0o644)?;
    tree.copy("etc/pointsman/policies.d", &deploy.join("etc/policies.d/README"), 0o644)?;
    let users = format!(
        "root:x:0:0:root:/root:/usr/sbin/nologin\n\
         pointsman:x:{USER}:{USER}:Pointsman:/nonexistent:/usr/sbin/nologin\n"
    );
    tree.file("etc/passwd", users, 0o644);
    tree.file("etc/group", format!("root:x:0:\npointsman:x:{USER}:\n"), 0o644);
    tree.file("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n", 0o644);
    tree.directory("tmp", 0o1777, 0);
    // The process writes only compiled policies, in this directory. If the root is read-only, a tmpfs or a
    // volume is mounted over it.
    tree.directory("var/cache/pointsman", 0o700, USER);
    // A runtime mounts at these directories, which it cannot create in a read-only root.
    for mounted in ["dev", "proc", "sys"] {
        tree.directory(mounted, 0o755, 0);
    }
    Ok(tree)
}

/// Returns the certificates of a directory in one file, in the order of their names.
fn certificates(dir: &Path) -> anyhow::Result<String> {
    let missing =
        || format!("could not read {}: install it with `apt install ca-certificates`", dir.display());
    let entries = fs::read_dir(dir).with_context(missing)?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "crt"));
    files.sort();
    let texts = files.iter().map(|file| Ok(format!("{}\n", fs::read_to_string(file)?.trim_end())));
    texts.collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Path, PathBuf},
    };

    use super::{
        super::commit::{Commit, Contents},
        CERTIFICATES, certificates, files, write,
    };
    use crate::sh;

    #[test]
    fn certificates_are_joined_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [("b.crt", "B\n\n"), ("a.crt", "A"), ("c.txt", "C")] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        assert_eq!(certificates(dir.path()).unwrap(), "A\nB\n");
        let error = certificates(&dir.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("apt install ca-certificates"), "{error}");
    }

    #[test]
    fn equal_programs_give_equal_bytes() {
        if !sh::succeeds(std::process::Command::new("dpkg-query").arg("--version")) {
            sh::status("skipped: dpkg-query is not installed");
            return;
        }
        if !Path::new(CERTIFICATES).is_dir() {
            sh::status("skipped: ca-certificates is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let programs = [PathBuf::from("/bin/true")];
        let source = sh::root();
        let commit = &Commit::of_head().unwrap();
        let contents = Contents { programs: &programs, documents: &[], source: &source, commit };
        let made = ["one", "other"].map(|name| {
            let work = dir.path().join(name);
            fs::create_dir(&work).unwrap();
            write(contents, &work, &work.join("image")).unwrap();
            fs::read(work.join("image")).unwrap()
        });
        assert!(made[0] == made[1] && made[0].len() > 100_000);
        let files = files(contents).unwrap();
        assert!(files.entries().any(|(path, _)| path == "etc/os-release"));
    }
}
