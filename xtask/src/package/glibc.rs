//! Finds the oldest glibc with which a program runs: the highest version of the symbols that it needs.

use std::{fmt, path::Path, process::Command, str::FromStr};

use anyhow::{Context as _, bail, ensure};

/// A version of glibc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Glibc {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// The first glibc with relative relocations, which have no versioned symbol.
const RELR: Glibc = Glibc { major: 2, minor: 36 };

impl FromStr for Glibc {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let numbers: Option<Vec<u32>> = text.split('.').map(|number| number.parse().ok()).collect();
        match numbers.as_deref() {
            Some([major, minor] | [major, minor, _]) => Ok(Self { major: *major, minor: *minor }),
            _ => bail!("`{text}` is not a version of glibc: expected 2.28, for example"),
        }
    }
}

impl fmt::Display for Glibc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Reads the version that a program needs.
pub(crate) fn needed(program: &Path) -> anyhow::Result<Glibc> {
    let shown = program.display();
    let readelf =
        Command::new("readelf").args(["--version-info", "--wide"]).arg(program).env("LC_ALL", "C").output();
    let readelf = readelf.context("could not start readelf: install it with `apt install binutils`")?;
    ensure!(readelf.status.success(), "`readelf {shown}` failed");
    let text = String::from_utf8_lossy(&readelf.stdout);
    highest(&text).with_context(|| format!("the versions of the symbols in {shown}"))
}

/// Returns the highest version in the section of needed versions.
fn highest(readelf: &str) -> anyhow::Result<Glibc> {
    let mut highest = None;
    for name in readelf.lines().filter_map(|line| line.split_once("Name: GLIBC_")) {
        let name = name.1.split_whitespace().next().unwrap_or_default();
        let version = if name == "ABI_DT_RELR" { RELR } else { name.parse()? };
        highest = highest.max(Some(version));
    }
    highest.context("it needs no symbol of glibc")
}

#[cfg(test)]
mod tests {
    use super::{Glibc, highest, needed};

    #[test]
    fn the_highest_version_counts() {
        let readelf = "Version needs section '.gnu.version_r' contains 2 entries:\n\
                       000000: Version: 1  File: libc.so.6  Cnt: 2\n\
                       0x0010:   Name: GLIBC_2.9  Flags: none  Version: 9\n\
                       0x0020:   Name: GLIBC_2.17  Flags: none  Version: 4\n\
                       0x0030:   Name: GLIBC_2.2.5  Flags: WEAK  Version: 3\n\
                       0x0040:   Name: GCC_3.0  Flags: none  Version: 2\n";
        assert_eq!(highest(readelf).unwrap(), "2.17".parse().unwrap());
        let packed = format!("{readelf}0x0050:   Name: GLIBC_ABI_DT_RELR  Flags: none  Version: 5\n");
        assert_eq!(highest(&packed).unwrap(), Glibc { major: 2, minor: 36 });
        assert!(highest("0x0010:   Name: GLIBC_PRIVATE  Flags: none").is_err());
        assert!(highest("").is_err());
        assert!("2".parse::<Glibc>().is_err());
    }

    #[test]
    fn this_program_needs_a_version() {
        let version = needed(&std::env::current_exe().unwrap()).unwrap();
        assert!(version >= "2.17".parse().unwrap(), "{version}");
    }
}
