//! `package`: builds the files of a release: the programs, a Debian package, an image, a wheel, lists of the
//! crates in the programs (SBOM), and digests.
//!
//! It builds the checked-out commit in a clone, so that changed files have no effect. Paths of the machine
//! are mapped to fixed ones, and times are those of the commit. Each build of a commit therefore has the same
//! bytes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use crate::{digest::sha256, fleet, profile, setup, sh, table::Checks};

mod build;
mod commit;
mod glibc;
mod image;
mod wheel;
mod zig;

use build::{Build, Files};
use commit::{Commit, Contents};
use glibc::Glibc;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory to write the files to [default: `package` in the target directory].
    #[arg(long)]
    output: Option<PathBuf>,
    /// Build a second time, in another directory and with another cargo home, and check that every file has
    /// the same bytes.
    #[arg(long)]
    verify: bool,
    /// Profile of the build. `dev` takes a third of the time, for a test of the command itself.
    #[arg(long, default_value = "dist")]
    profile: String,
    /// Counts of an earlier run with the same sources. The compiler uses them to lay out the hot
    /// path (profile-guided optimisation). The same bytes need the same file [default: count now].
    #[arg(long, value_name = "FILE", conflicts_with = "no_profile")]
    profile_data: Option<PathBuf>,
    /// Build without counts. This takes half of the time and gives a program that needs up to a third more
    /// CPU time.
    #[arg(long)]
    no_profile: bool,
    /// Link for this glibc instead of this machine's, for example 2.28, with zig (from PyPI).
    #[arg(long, value_name = "VERSION")]
    glibc: Option<Glibc>,
}

/// Builds the files and prints a table. Returns an error when a check fails.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    for (program, install) in [
        ("cargo-deb", "cargo install --locked cargo-deb"),
        ("cargo-cyclonedx", "cargo install --locked cargo-cyclonedx"),
        ("dpkg-shlibdeps", "apt install dpkg-dev"),
        ("gzip", "apt install gzip"),
        ("ldd", "apt install libc-bin"),
        ("readelf", "apt install binutils"),
        ("zip", "apt install zip"),
    ] {
        ensure!(sh::is_installed(program), "`{program}` is missing; install it with `{install}`");
    }
    setup::run()?;
    let target = fleet::target_dir();
    fs::create_dir_all(&target)?;
    let target = target.canonicalize()?;
    let output = args.output.clone().unwrap_or_else(|| target.join("package"));
    let commit = Commit::of_head()?;
    let work = target.join("package-build");
    let counts = counts(args).await?;
    let linker = args.glibc.map(|glibc| zig::linker(&target, glibc)).transpose()?;
    let build = Build {
        commit: &commit,
        profile: &args.profile,
        counts: counts.as_deref(),
        linker: linker.as_deref(),
    };
    let files = build.run(&work.join("first"), None)?;
    let mut checks = Checks::default();
    check(&files, &commit, args.glibc, &mut checks)?;
    if args.verify {
        // A second build that reused files of the first one would prove less.
        let second = work.join("a-second-one/in-a-directory-of-another-length");
        remove(&second)?;
        let home = second.join("cargo-home");
        build::link_cargo_home(&home)?;
        let again = build.run(&second, Some(&home))?;
        for (first, second) in files.all().into_iter().zip(again.all()) {
            let (first, second) = (digest(first)?, digest(second)?);
            checks.check(&format!("both builds: {}", first.name), &first.hex[..24], first.hex == second.hex);
        }
    }
    let of_counts = counts.map(|counts| [profile::sources_file(&counts), counts]);
    let all = files.all().into_iter().map(Path::to_owned).chain(of_counts.into_iter().flatten());
    collect(&all.collect::<Vec<_>>(), &output)?;
    sh::print(&format!("{} is in {}", commit.version, output.display()));
    checks.finish()
}

/// Programs of an image.
pub(crate) const IMAGE_PROGRAMS: [&str; 2] = build::IMAGE_PROGRAMS;

/// Programs of a wheel.
pub(crate) fn wheel_programs() -> Vec<&'static str> {
    build::PROGRAMS.iter().map(|(name, ..)| *name).collect()
}

/// Copies programs from a directory into another one, without symbols.
pub(crate) fn strip(programs: &[&str], bin: &Path, to: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let strip = |name: &&str| {
        let program = to.join(name);
        let mut strip = Command::new("strip");
        sh::run(strip.arg("-o").arg(&program).arg(bin.join(name)))
            .context("install it with `apt install binutils`")?;
        Ok(program)
    };
    programs.iter().map(strip).collect()
}

/// Writes an image of programs into an empty directory, as `package` does, and returns its path.
pub(crate) fn write_image(programs: &[PathBuf], dir: &Path) -> anyhow::Result<PathBuf> {
    let (commit, source) = (&Commit::of_head()?, sh::root());
    let output = dir.join(image::file_name(commit));
    let contents = Contents { programs, documents: &[], source: &source, commit };
    image::write(contents, dir, &output)?;
    Ok(output)
}

/// Writes a wheel of programs into an empty directory, as `package` does, and returns its path.
pub(crate) fn write_wheel(programs: &[PathBuf], dir: &Path) -> anyhow::Result<PathBuf> {
    let (commit, source) = (&Commit::of_head()?, sh::root());
    wheel::write(Contents { programs, documents: &[], source: &source, commit }, dir)
}

/// Writes the same programs twice, into directories of their own, and checks that the files are equal.
/// Returns one.
pub(crate) fn write_twice(
    write: fn(&[PathBuf], &Path) -> anyhow::Result<PathBuf>,
    programs: &[PathBuf],
    dir: &Path,
    checks: &mut Checks,
) -> anyhow::Result<PathBuf> {
    let written = |name: &str| {
        let dir = dir.join(name);
        fs::create_dir(&dir)?;
        write(programs, &dir)
    };
    let (one, other) = (written("one")?, written("other")?);
    checks.check("two files of the same programs are equal", "", fs::read(&one)? == fs::read(other)?);
    Ok(one)
}

/// Returns the file with the counts that the compiler uses to lay out the hot path.
async fn counts(args: &Args) -> anyhow::Result<Option<PathBuf>> {
    if args.no_profile {
        return Ok(None);
    }
    let file = match &args.profile_data {
        Some(file) => file.clone(),
        None => profile::count(&args.profile).await?,
    };
    let file =
        file.canonicalize().with_context(|| format!("--profile-data: could not find {}", file.display()))?;
    profile::check(&file)?;
    let emptied = args.output.as_ref().and_then(|output| output.canonicalize().ok());
    let is_emptied = emptied.is_some_and(|output| file.starts_with(output));
    ensure!(
        !is_emptied,
        "--profile-data: {} is in the directory of --output, which is emptied",
        file.display()
    );
    Ok(Some(file))
}

/// Checks the version of the programs, and that they contain no directory of this machine.
fn check(files: &Files, commit: &Commit, glibc: Option<Glibc>, checks: &mut Checks) -> anyhow::Result<()> {
    for program in &files.programs {
        let name = name(program);
        let told = Command::new(program).arg("--version").output();
        let told = told.with_context(|| format!("starting {name}"))?;
        let told = String::from_utf8_lossy(&told.stdout).trim().to_owned();
        let expected = format!("{name} {}", commit.version);
        checks.check(&format!("version of {name}"), &told, told == expected);
        let needed = glibc::needed(program)?;
        checks.check(&format!("glibc of {name}"), needed, glibc.is_none_or(|glibc| needed <= glibc));
        let bytes = fs::read(program)?;
        let named = files.mapped.iter().filter(|path| contains(&bytes, path.as_os_str().as_encoded_bytes()));
        checks.none(&format!("directories of this machine in {name}"), named.count() as u64);
    }
    for file in files.all() {
        let kib = fs::metadata(file)?.len() / 1024;
        checks.show(&format!("size of {}", name(file)), format!("{kib} KiB"));
    }
    Ok(())
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

/// A file's name with the SHA-256 of its content.
struct NamedDigest {
    name: String,
    hex: String,
}

fn digest(file: &Path) -> anyhow::Result<NamedDigest> {
    let content = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    Ok(NamedDigest { name: name(file), hex: sha256(&content) })
}

/// Copies the files into the output directory and writes `SHA256SUMS`, which `sha256sum --check` reads.
fn collect(files: &[PathBuf], output: &Path) -> anyhow::Result<()> {
    remove(output)?;
    fs::create_dir_all(output)?;
    let mut sums = String::new();
    for file in files {
        let NamedDigest { name, hex } = digest(file)?;
        fs::copy(file, output.join(&name))?;
        sums.push_str(&format!("{hex}  {name}\n"));
    }
    fs::write(output.join("SHA256SUMS"), sums)?;
    Ok(())
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Removes a directory if it exists.
fn remove(dir: &Path) -> anyhow::Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("removing {}", dir.display()))?;
    }
    Ok(())
}
