//! A build of a commit.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use super::{Commit, commit::Contents, image, name, remove, wheel};
use crate::sh;

/// The commit, the profile and the settings of a build.
pub(super) struct Build<'a> {
    pub(super) commit: &'a Commit,
    pub(super) profile: &'a str,
    /// Counts for profile-guided optimisation.
    pub(super) counts: Option<&'a Path>,
    /// Linker that replaces the default one.
    pub(super) linker: Option<&'a Path>,
}

/// The programs of a release: name, package, and directory of the manifest. The first one starts the others,
/// and writes the manual pages and completions of all.
pub(super) const PROGRAMS: [(&str, &str, &str); 4] = [
    ("pointsman", "pointsman-gateway", "host/gateway"),
    ("pointsman-lab", "pointsman-lab-cli", "host/lab-cli"),
    ("pointsman-policy", "pointsman-policy-tools", "host/policy-tools"),
    ("pointsman-tools", "pointsman-tools", "host/tools"),
];

/// Programs of the image, as in `deploy/container/Dockerfile`.
pub(super) const IMAGE_PROGRAMS: [&str; 2] = ["pointsman", "pointsman-policy"];

/// Files that a build made.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) programs: Vec<PathBuf>,
    deb: PathBuf,
    image: PathBuf,
    wheel: PathBuf,
    sboms: Vec<PathBuf>,
    /// Directories of this machine that must not occur in any file.
    pub(super) mapped: Vec<PathBuf>,
}

/// Directories of one build.
struct Dirs {
    source: PathBuf,
    target: PathBuf,
    cargo_home: PathBuf,
    /// Directory of the changelog and of the manual pages and completions that the programs wrote.
    generated: PathBuf,
}

impl Files {
    /// Returns the files to publish, in the order of `SHA256SUMS`.
    pub(super) fn all(&self) -> Vec<&Path> {
        self.programs
            .iter()
            .chain([&self.deb, &self.image, &self.wheel])
            .chain(&self.sboms)
            .map(PathBuf::as_path)
            .collect()
    }
}

impl Build<'_> {
    /// Clones the commit into a directory and builds it there. `home` is cargo's home, if it is not the
    /// default one.
    pub(super) fn run(&self, dir: &Path, home: Option<&Path>) -> anyhow::Result<Files> {
        let (source, target) = (dir.join("source"), dir.join("target"));
        remove(&source)?;
        fs::create_dir_all(dir)?;
        let mut clone = Command::new("git");
        clone.args(["clone", "--quiet", "--shared", "--no-checkout"]).arg(sh::root()).arg(&source);
        sh::run(&mut clone)?;
        let mut checkout = Command::new("git");
        checkout.arg("-C").arg(&source).args(["checkout", "--quiet", "--detach", &self.commit.hash]);
        sh::run(&mut checkout)?;
        let cargo_home = home.map_or_else(usual_cargo_home, |home| Ok(home.to_owned()))?;
        // This is the only profile whose directory has another name.
        let profile_dir = target.join(if self.profile == "dev" { "debug" } else { self.profile });
        let dirs = Dirs { source, target, cargo_home, generated: profile_dir.join("package") };
        let mapped = self.mapped(&dirs)?;
        let mut build = self.cargo(&dirs, &mapped);
        build.args(["build", "--locked", "--profile", self.profile]);
        sh::run(build.args(PROGRAMS.iter().flat_map(|(_, package, _)| ["--package", package])))?;
        let programs: Vec<PathBuf> = PROGRAMS.iter().map(|(name, _, _)| profile_dir.join(name)).collect();
        remove(&dirs.generated)?;
        self.generate(&profile_dir.join("pointsman"), &dirs)?;
        let sboms = PROGRAMS.iter().map(|(name, _, manifest)| self.sbom(name, manifest, &dirs, &mapped));
        let sboms = sboms.collect::<anyhow::Result<Vec<_>>>()?;
        let deb = self.deb(&dirs, &mapped)?;
        let image = self.image(&programs, &sboms, &dirs)?;
        let wheel = self.wheel(&programs, &sboms, &dirs)?;
        Ok(Files {
            programs,
            deb,
            image,
            wheel,
            sboms,
            mapped: mapped.into_iter().map(|(path, _)| path).collect(),
        })
    }

    /// Returns directories, and the text that replaces each in the files. rustc uses the last one that
    /// matches.
    fn mapped(&self, dirs: &Dirs) -> anyhow::Result<Vec<(PathBuf, String)>> {
        let rustc = |arguments: &[&str]| -> anyhow::Result<String> {
            let mut rustc = command("rustc", &dirs.source);
            let output = rustc.args(arguments).output().context("could not start rustc")?;
            ensure!(output.status.success(), "`rustc {}` failed", arguments.join(" "));
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let sysroot = PathBuf::from(rustc(&["--print", "sysroot"])?.trim());
        let verbose = rustc(&["--version", "--verbose"])?;
        let commit = verbose.lines().find_map(|line| line.strip_prefix("commit-hash: ")).unwrap_or("unknown");
        Ok(vec![
            (dirs.source.clone(), "/usr/src/pointsman".to_owned()),
            (dirs.target.clone(), "/usr/src/target".to_owned()),
            (dirs.cargo_home.clone(), "/usr/src/cargo".to_owned()),
            (sysroot.join("lib/rustlib/src/rust"), format!("/rustc/{commit}")),
        ])
    }

    /// Returns a cargo command in the clone, whose output depends only on the commit and the toolchain.
    fn cargo(&self, dirs: &Dirs, mapped: &[(PathBuf, String)]) -> Command {
        let each = |flag: &str| -> Vec<String> {
            mapped.iter().map(|(from, to)| format!("{flag}={}={to}", from.display())).collect()
        };
        let mut flags = each("--remap-path-prefix");
        flags.extend(self.counts.map(|counts| format!("-Cprofile-use={}", counts.display())));
        let mut cargo = command("cargo", &dirs.source);
        cargo
            .env("CARGO_HOME", &dirs.cargo_home)
            .env("CARGO_TARGET_DIR", &dirs.target)
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
            .env("CFLAGS", each("-ffile-prefix-map").join(" "))
            .env("POINTSMAN_VERSION", &self.commit.version);
        if let Some(linker) = self.linker {
            let target = format!("{}_unknown_linux_gnu", env::consts::ARCH).to_uppercase();
            cargo.env(format!("CARGO_TARGET_{target}_LINKER"), linker);
        }
        self.dated(&mut cargo);
        cargo
    }

    fn dated<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("SOURCE_DATE_EPOCH", self.commit.time.to_string())
            .env("TZ", "UTC")
            .env("LC_ALL", "C.UTF-8")
    }

    /// Writes the files of the package that are neither programs nor files of the repository.
    fn generate(&self, binary: &Path, dirs: &Dirs) -> anyhow::Result<()> {
        let generated = &dirs.generated;
        let pointsman = |arguments: &[&str]| -> anyhow::Result<Vec<u8>> {
            let mut command = Command::new(binary);
            let output = self.dated(command.args(arguments).current_dir(generated)).output();
            let output = output.with_context(|| format!("could not start {}", binary.display()))?;
            ensure!(output.status.success(), "`pointsman {}` failed", arguments.join(" "));
            Ok(output.stdout)
        };
        fs::create_dir_all(generated.join("completions"))?;
        pointsman(&["man", "man"])?;
        for (shell, file) in [("bash", "pointsman"), ("zsh", "_pointsman"), ("fish", "pointsman.fish")] {
            fs::write(generated.join("completions").join(file), pointsman(&["completions", shell])?)?;
        }
        fs::write(generated.join("example.toml"), pointsman(&["config", "example"])?)?;
        let Commit { deb_version, date, .. } = self.commit;
        let changelog = format!(
            "pointsman ({deb_version}) unstable; urgency=medium\n\n  * /usr/share/doc/pointsman/changelog.gz tells what \
             changed.\n\n -- {MAINTAINER}  {date}\n"
        );
        fs::write(generated.join("changelog.Debian"), changelog)?;
        fs::copy(dirs.source.join("CHANGELOG.md"), generated.join("changelog"))?;
        let mut gzip = Command::new("gzip");
        gzip.args(["--best", "--no-name", "--recursive", "man", "changelog", "changelog.Debian"]);
        sh::run(gzip.current_dir(generated))
    }

    /// Lists the crates in a program with versions and licences, as CycloneDX.
    fn sbom(
        &self,
        name: &str,
        manifest: &str,
        dirs: &Dirs,
        mapped: &[(PathBuf, String)],
    ) -> anyhow::Result<PathBuf> {
        let mut cargo = self.cargo(dirs, mapped);
        cargo.args(["cyclonedx", "--quiet", "--manifest-path", &format!("{manifest}/Cargo.toml")]);
        cargo.args(["--format", "json", "--spec-version", "1.5", "--override-filename", "sbom"]);
        sh::run(&mut cargo)?;
        let written = dirs.source.join(manifest).join("sbom.json");
        let mut text = fs::read_to_string(&written).with_context(|| written.display().to_string())?;
        for (from, to) in mapped {
            text = text.replace(&*from.to_string_lossy(), to);
        }
        let sbom = dirs.generated.join(format!("{name}.cdx.json"));
        fs::write(&sbom, text)?;
        Ok(sbom)
    }

    /// Writes the image of the programs that a gateway and its operators need.
    fn image(&self, programs: &[PathBuf], sboms: &[PathBuf], dirs: &Dirs) -> anyhow::Result<PathBuf> {
        let commit = self.commit;
        let output = dirs.generated.join(image::file_name(commit));
        let of_image = |files: &[PathBuf], ending: &str| -> Vec<PathBuf> {
            let names = IMAGE_PROGRAMS.map(|name| format!("{name}{ending}"));
            files.iter().filter(|file| names.contains(&name(file))).cloned().collect()
        };
        let (programs, documents) = (of_image(programs, ""), of_image(sboms, ".cdx.json"));
        let contents = Contents { programs: &programs, documents: &documents, source: &dirs.source, commit };
        image::write(contents, &dirs.generated, &output)?;
        Ok(output)
    }

    fn wheel(&self, programs: &[PathBuf], sboms: &[PathBuf], dirs: &Dirs) -> anyhow::Result<PathBuf> {
        let contents = Contents { programs, documents: sboms, source: &dirs.source, commit: self.commit };
        wheel::write(contents, &dirs.generated)
    }

    fn deb(&self, dirs: &Dirs, mapped: &[(PathBuf, String)]) -> anyhow::Result<PathBuf> {
        let output = dirs.target.join("debian");
        remove(&output)?;
        let mut cargo = self.cargo(dirs, mapped);
        cargo.args(["deb", "--no-build", "--no-strip", "--locked", "--profile", self.profile]);
        cargo.args(["--manifest-path", "host/gateway/Cargo.toml", "--deb-version", &self.commit.deb_version]);
        sh::run(cargo.arg("--output").arg(&output))?;
        let made = fs::read_dir(&output)?.filter_map(|entry| Some(entry.ok()?.path()));
        made.into_iter()
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .with_context(|| format!("cargo-deb left no package in {}", output.display()))
    }
}

/// Maintainer of the package. The manifest of the gateway repeats this line.
const MAINTAINER: &str = "The Pointsman maintainers <maintainers@pointsman.dev>";

/// Returns a command that runs in a clone, with the toolchain that its `rust-toolchain.toml` names.
fn command(program: &str, source: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(source).env_remove("RUSTUP_TOOLCHAIN").env_remove("RUSTFLAGS").env_remove("CARGO");
    command
}

fn usual_cargo_home() -> anyhow::Result<PathBuf> {
    let home = || Some(PathBuf::from(env::var_os("HOME")?).join(".cargo"));
    env::var_os("CARGO_HOME").map(PathBuf::from).or_else(home).context("neither CARGO_HOME nor HOME is set")
}

/// Makes a cargo home at another path that shares the downloads of the default one.
pub(super) fn link_cargo_home(dir: &Path) -> anyhow::Result<()> {
    let usual = usual_cargo_home()?;
    fs::create_dir_all(dir)?;
    for name in ["registry", "git", "config.toml"] {
        let shared = usual.join(name);
        if shared.exists() {
            symlink(&shared, dir.join(name)).with_context(|| format!("linking {}", shared.display()))?;
        }
    }
    Ok(())
}
