//! Finds the shared libraries of programs, the loader, and the Debian packages that they come from.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail, ensure};

/// Package of the root certificates.
const CERTIFICATES: &str = "ca-certificates";

/// A Debian package.
#[derive(Debug)]
pub(super) struct Package {
    pub(super) name: String,
    /// Fields of the package: name, version, source.
    pub(super) status: Vec<u8>,
    pub(super) copyright: Vec<u8>,
}

/// Returns the libraries that the programs link, and the loader.
pub(super) fn of(programs: &[PathBuf]) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut libraries = BTreeSet::new();
    for program in programs {
        let ldd = Command::new("ldd").arg(program).env("LC_ALL", "C").output();
        let ldd = ldd.context("could not start ldd, which names the libraries of a program")?;
        let problem = String::from_utf8_lossy(&ldd.stderr);
        if problem.contains("not a dynamic executable") {
            continue;
        }
        let shown = program.display();
        ensure!(ldd.status.success(), "`ldd {shown}` failed: {}", problem.trim());
        let found = parse(&String::from_utf8_lossy(&ldd.stdout));
        libraries.extend(found.with_context(|| format!("the libraries of {shown}"))?);
    }
    Ok(libraries)
}

/// Returns the paths in the output of `ldd`.
fn parse(ldd: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for line in ldd.lines().map(str::trim) {
        let found = line.split_once(" => ").map_or(line, |(_, found)| found);
        if found.starts_with("not found") {
            bail!("ldd does not find one: `{line}`");
        }
        // The kernel's own library has no path, and for a static program ldd prints a sentence.
        if let Some(path) = found.split(" (").next().filter(|path| path.starts_with('/')) {
            paths.push(PathBuf::from(path));
        }
    }
    Ok(paths)
}

/// Returns the packages of libraries and of the root certificates, in the order of their names.
pub(super) fn packages(libraries: &BTreeSet<PathBuf>) -> anyhow::Result<Vec<Package>> {
    let mut names = BTreeSet::from([CERTIFICATES.to_owned()]);
    for library in libraries {
        names.insert(owner(library)?);
    }
    names.into_iter().map(|name| package(&name)).collect()
}

/// Returns the package that a library comes from, with its architecture: `libc6:amd64`.
fn owner(library: &Path) -> anyhow::Result<String> {
    // If /lib is a link, the package names only one of the two paths.
    let paths = [library.to_owned(), library.canonicalize()?];
    let found = paths.iter().find_map(|path| query(&["--search"], path.as_os_str()).ok());
    let found = found.with_context(|| {
        format!("{} is of no Debian package: build the image on Debian", library.display())
    })?;
    let found = String::from_utf8_lossy(&found);
    let owner = found.split(": ").next().filter(|owner| !owner.contains([',', ' ']));
    owner.map(str::to_owned).with_context(|| format!("{} is of several packages", library.display()))
}

fn package(name: &str) -> anyhow::Result<Package> {
    let status = query(&["--status"], name.as_ref())?;
    let short = name.split(':').next().unwrap_or(name).to_owned();
    let copyright = format!("/usr/share/doc/{short}/copyright");
    let copyright = fs::read(&copyright).with_context(|| format!("could not read {copyright}"))?;
    Ok(Package { name: short, status, copyright })
}

fn query(arguments: &[&str], of: &std::ffi::OsStr) -> anyhow::Result<Vec<u8>> {
    let output = Command::new("dpkg-query").args(arguments).arg(of).env("LC_ALL", "C").output();
    let output = output.context("could not start dpkg-query: build the image on Debian")?;
    ensure!(
        output.status.success(),
        "`dpkg-query {} {}` failed: {}",
        arguments.join(" "),
        of.to_string_lossy(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::parse;

    #[test]
    fn libraries_and_the_loader_have_paths() {
        let ldd = "\tlinux-vdso.so.1 (0x00007fc1c79ec000)\n\
                   \tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007fc1c1720000)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x00007fc1c79ee000)\n";
        let expected = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse(ldd).unwrap(), expected);
        assert!(parse("\tstatically linked\n").unwrap().is_empty());
        let error = parse("\tlibz.so.1 => not found\n").unwrap_err().to_string();
        assert_eq!(error, "ldd does not find one: `libz.so.1 => not found`");
    }
}
