//! `pointsman policy push` and `pull`: policies to and from an OCI image layout (`oci:DIR[:TAG]`) or a plain folder (`dir:PATH`).

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
};

use anyhow::{Context as _, bail};
use clap::Args;
use pointsman_policy_runtime::{Limits, digest};

use crate::{
    oci::{Artifact, Layout, Told, replace},
    output::print,
    policy_file::{read, refused},
};

/// What to put where.
#[derive(Debug, Args)]
pub struct PushArgs {
    /// The policy. Its signature, FILE.minisig, goes with it when it is there.
    file: PathBuf,
    /// `oci:DIR[:TAG]` (tag `latest` when not given) or `dir:FOLDER`.
    target: Place,
}

/// What to take from where.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// `oci:DIR[:TAG]` (tag `latest` when not given) or `dir:FOLDER/FILE.wasm`.
    source: Place,
    /// The file to write; its signature is written beside it, as FILE.minisig [default: NAME.wasm, here].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Where policies lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// An OCI image layout and a tag in it.
    Oci(PathBuf, String),
    /// A folder, or a file in one.
    Dir(PathBuf),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("oci://") {
            return Err("a registry over HTTP is not supported: push to a layout, oci:DIR:TAG, and copy that with an OCI tool".into());
        }
        if let Some(path) = text.strip_prefix("dir:").filter(|path| !path.is_empty()) {
            return Ok(Self::Dir(path.into()));
        }
        let layout = text.strip_prefix("oci:").filter(|path| !path.is_empty());
        let layout = layout.ok_or_else(|| format!("`{text}` is neither oci:DIR[:TAG] nor dir:PATH"))?;
        match layout.rsplit_once(':') {
            Some((folder, tag)) if !tag.contains('/') => {
                let first = tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
                let rest = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
                if folder.is_empty() || !first || tag.len() > 128 || !tag.chars().all(rest) {
                    return Err(format!("`{tag}` is no tag: up to 128 letters, digits, `_`, `.`, `-`"));
                }
                Ok(Self::Oci(folder.into(), tag.to_owned()))
            }
            _ => Ok(Self::Oci(layout.into(), "latest".to_owned())),
        }
    }
}

impl PushArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let wasm = read(&self.file)?;
        let found = pointsman_policy_runtime::inspect(&wasm, "{}", Limits::default())
            .map_err(|refusal| refused(&self.file, &refusal))?;
        // A policy that needs settings, or more than the default limits, is a policy all the same.
        let (name, version) = match found.policy {
            Ok(policy) => (policy.name, policy.version),
            Err(_) => (stem(&self.file), String::new()),
        };
        let told = Told {
            name,
            version,
            world: found.world.to_string(),
            imports: found.imports,
            exports: found.exports,
        };
        let artifact = Artifact { wasm, signature: signature(&self.file)?, told };
        let done = match &self.target {
            Place::Oci(folder, tag) => {
                let digest = Layout::create(folder)?.push(tag, &artifact)?;
                format!("{}:{tag}  manifest {digest}", folder.display())
            }
            Place::Dir(folder) => {
                let file = folder.join(self.file.file_name().context("the file has no name")?);
                write(&file, &artifact)?;
                file.display().to_string()
            }
        };
        print(&format!("{done}\npolicy sha256:{}\n", digest(&artifact.wasm)))?;
        Ok(ExitCode::SUCCESS)
    }
}

impl PullArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let artifact = match &self.source {
            Place::Oci(folder, tag) => Layout::open(folder)?.pull(tag)?,
            Place::Dir(file) => {
                let told = Told { name: stem(file), ..Told::default() };
                Artifact { wasm: read(file)?, signature: signature(file)?, told }
            }
        };
        let output = match &self.output {
            Some(output) => output.clone(),
            None => PathBuf::from(format!("{}.wasm", plain(&artifact.told.name)?)),
        };
        write(&output, &artifact)?;
        let signed = if artifact.signature.is_some() { ", with its signature" } else { "" };
        print(&format!("{}{signed}\npolicy sha256:{}\n", output.display(), digest(&artifact.wasm)))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// A name that may become a file's: it comes from whoever pushed.
fn plain(name: &str) -> anyhow::Result<&str> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if name.is_empty() || name.len() > 100 || !name.chars().all(good) {
        bail!("its name, `{}`, is none for a file: give -o FILE", name.escape_debug());
    }
    Ok(name)
}

fn stem(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Where a policy's signature lies.
fn beside(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".minisig");
    name.into()
}

fn signature(file: &Path) -> anyhow::Result<Option<String>> {
    let path = beside(file);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// The signature first: a daemon that watches the folder finds both when it finds the policy.
fn write(file: &Path, artifact: &Artifact) -> anyhow::Result<()> {
    if let Some(text) = &artifact.signature {
        let path = beside(file);
        replace(&path, text.as_bytes()).with_context(|| path.display().to_string())?;
    }
    replace(file, &artifact.wasm).with_context(|| file.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_what_is_none_is_named() {
        let oci = |folder: &str, tag: &str| Ok(Place::Oci(folder.into(), tag.into()));
        assert_eq!("oci:a/b:1.0".parse(), oci("a/b", "1.0"));
        assert_eq!("oci:/a:b/c".parse(), oci("/a:b/c", "latest"));
        assert_eq!("dir:x".parse(), Ok(Place::Dir("x".into())));
        for (text, part) in [
            ("oci://h/n:1", "over HTTP"),
            ("file.wasm", "neither"),
            ("oci:a:", "no tag"),
            ("oci:a:-x", "no tag"),
        ] {
            let error = text.parse::<Place>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_strangers_name_is_no_path() {
        assert!(plain("kv-aware").is_ok());
        for name in ["", "../up", "a/b", ".hidden", "a\nb"] {
            assert!(plain(name).is_err(), "{name}");
        }
    }
}
