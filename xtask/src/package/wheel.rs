//! A wheel with the programs, which pip and uv install without a compiler.
//!
//! maturin accepts existing programs, but always builds one itself, and its tag ignores the needs of the
//! other programs (version 1.16 gave the tag `manylinux_2_28` to a wheel with a program for 2.34). This
//! module therefore writes the wheel itself.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, ensure};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use sha2::{Digest as _, Sha256};

use super::{
    commit::{Commit, Contents},
    glibc::{self, Glibc},
};

/// Files of the wheel, in the order of the archive: path, content, and whether the file is a program.
type Files = Vec<(String, Vec<u8>, bool)>;

/// Writes the wheel into a directory and returns its path. Its tag names the oldest glibc with which all
/// programs run.
pub(crate) fn write(contents: Contents<'_>, dir: &Path) -> anyhow::Result<PathBuf> {
    let needed = contents.programs.iter().map(|program| glibc::needed(program));
    let needed = needed.collect::<anyhow::Result<Vec<_>>>()?.into_iter().max();
    let tag = tag(needed.context("the wheel has no programs")?);
    let version = &contents.commit.version;
    let stage = dir.join("wheel");
    let files = files(contents, &tag).context("collecting the files of the wheel")?;
    for (path, content, is_program) in &files {
        let file = stage.join(path);
        fs::create_dir_all(file.parent().unwrap_or(&stage))?;
        fs::write(&file, content).with_context(|| format!("writing {}", file.display()))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(if *is_program { 0o755 } else { 0o644 }))?;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(contents.commit.time);
        fs::File::options().write(true).open(&file)?.set_modified(time)?;
    }
    let wheel = dir.join(format!("pointsman-{version}-{tag}.whl"));
    let names: Vec<&str> = files.iter().map(|(path, ..)| path.as_str()).collect();
    zip(&stage, &names, &wheel)?;
    fs::remove_dir_all(&stage)?;
    Ok(wheel)
}

/// Returns the tag of a wheel for any Python 3, and for machines with this glibc or a later one.
fn tag(glibc: Glibc) -> String {
    format!("py3-none-manylinux_{}_{}_{}", glibc.major, glibc.minor, std::env::consts::ARCH)
}

fn files(contents: Contents<'_>, tag: &str) -> anyhow::Result<Files> {
    let read = |file: &Path| fs::read(file).with_context(|| format!("could not read {}", file.display()));
    let named = |file: &Path| file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Commit { version, .. } = contents.commit;
    let (data, info) = (format!("pointsman-{version}.data"), format!("pointsman-{version}.dist-info"));
    let mut files = Files::new();
    for program in contents.programs {
        files.push((format!("{data}/scripts/{}", named(program)), read(program)?, true));
    }
    let readme = read(&contents.source.join("xtask/src/package/wheel/README.md"))?;
    let metadata = [metadata(version).into_bytes(), readme].concat();
    files.push((format!("{info}/METADATA"), metadata, false));
    let wheel =
        format!("Wheel-Version: 1.0\nGenerator: cargo xtask package\nRoot-Is-Purelib: false\nTag: {tag}\n");
    files.push((format!("{info}/WHEEL"), wheel.into_bytes(), false));
    files.push((format!("{info}/licenses/LICENSE"), read(&contents.source.join("LICENSE"))?, false));
    for document in contents.documents {
        files.push((format!("{info}/sboms/{}", named(document)), read(document)?, false));
    }
    let record = record(&files, &format!("{info}/RECORD"));
    files.push((format!("{info}/RECORD"), record.into_bytes(), false));
    Ok(files)
}

fn metadata(version: &str) -> String {
    format!(
        "Metadata-Version: 2.4\nName: pointsman\nVersion: {version}\n\
         Summary: Gateway for disaggregated LLM serving\n\
         License-Expression: Apache-2.0\nLicense-File: LICENSE\n\
         Classifier: Operating System :: POSIX :: Linux\nRequires-Python: >=3.8\n\
         Description-Content-Type: text/markdown\n\n"
    )
}

/// Returns the list of files with digest and size. The list's own entry has neither.
fn record(files: &Files, own: &str) -> String {
    let line = |(path, content, _): &(String, Vec<u8>, bool)| {
        let digest = BASE64_URL_SAFE_NO_PAD.encode(Sha256::digest(content));
        format!("{path},sha256={digest},{}\n", content.len())
    };
    let lines: String = files.iter().map(line).collect();
    format!("{lines}{own},,\n")
}

/// Packs files of a directory, in their order, without their owners.
fn zip(dir: &Path, names: &[&str], output: &Path) -> anyhow::Result<()> {
    let list = dir.with_extension("list");
    fs::write(&list, names.join("\n"))?;
    let mut zip = Command::new("zip");
    // An archive contains local times.
    zip.current_dir(dir).env("TZ", "UTC").args(["-X", "-9", "--quiet", "--names-stdin"]).arg(output);
    let zip = zip.stdin(Stdio::from(fs::File::open(&list)?)).output();
    let zip = zip.context("could not start zip: install it with `apt install zip`")?;
    ensure!(zip.status.success(), "zip failed: {}", String::from_utf8_lossy(&zip.stdout).trim());
    Ok(fs::remove_file(list)?)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::{
        super::commit::{Commit, Contents},
        record, tag, write,
    };
    use crate::sh;

    #[test]
    fn the_tag_and_the_record_are_those_of_the_standard() {
        let tag = tag("2.28".parse().unwrap());
        assert_eq!(tag, format!("py3-none-manylinux_2_28_{}", std::env::consts::ARCH));
        let files = vec![("a/WHEEL".to_owned(), b"".to_vec(), false)];
        let expected = "a/WHEEL,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\na/RECORD,,\n";
        assert_eq!(record(&files, "a/RECORD"), expected);
    }

    #[test]
    fn equal_programs_give_equal_wheels() {
        if !sh::succeeds(std::process::Command::new("zip").arg("--version")) {
            sh::status("skipped: zip is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (programs, source) = ([PathBuf::from("/bin/true")], sh::root());
        let commit = &Commit::of_head().unwrap();
        let contents = Contents { programs: &programs, documents: &[], source: &source, commit };
        let made = ["one", "other"].map(|name| {
            let dir = dir.path().join(name);
            fs::create_dir(&dir).unwrap();
            fs::read(write(contents, &dir).unwrap()).unwrap()
        });
        assert!(made[0] == made[1] && made[0].starts_with(b"PK"));
    }

    /// The project does not own this name in PyPI, so anyone could publish a package under it.
    #[test]
    fn no_document_installs_a_package_of_that_name_from_an_index() {
        for file in sh::tracked_files(".md").unwrap() {
            let text = fs::read_to_string(sh::root().join(&file)).unwrap();
            for command in
                ["pip install ", "pip3 install ", "pipx install ", "tool install ", "uvx ", "--from "]
            {
                let named = text.split(command).skip(1).find(|rest| rest.starts_with("pointsman"));
                let named = named.map(|rest| rest.lines().next().unwrap_or_default());
                assert_eq!(named, None, "{}: `{command}`", file.display());
            }
        }
    }
}
