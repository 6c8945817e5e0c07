//! `pointsman policy push` and `pull`: copies a policy to and from a registry (`HOST/REPOSITORY[:TAG]`), an
//! OCI image layout (`oci:DIR[:TAG]`) or a directory (`dir:PATH`).

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use clap::Args;
use pointsman_policy_runtime::{Limits, digest};

use crate::{
    oci::{Artifact, Layout, Metadata, RegistryArgs},
    output::print,
    place::Place,
    policy_file::{formulas, is_formula, read, refused},
    staged::{Staged, replace},
};

/// Arguments of `push`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PushArgs {
    /// The policy. Its signature, FILE.minisig, is pushed with it if it exists.
    file: PathBuf,
    /// HOST/REPOSITORY[:TAG][@DIGEST], oci:DIR[:TAG] or dir:DIR; the default tag is latest. A formula file
    /// goes to dir:DIR only.
    target: Place,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// Arguments of `pull`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PullArgs {
    /// HOST/REPOSITORY[:TAG][@DIGEST], oci:DIR[:TAG] or dir:DIR/FILE.wasm; the default tag is latest.
    source: Place,
    /// The file to write; a signature is written beside it, as FILE.minisig [default: ./NAME.wasm].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryArgs,
}

const EXAMPLES: &str = "\
Examples:
  pointsman policy push prefill.wasm registry.example.com/team/prefill:1.0.0
  pointsman policy pull registry.example.com/team/prefill:1.0.0 -o prefill.wasm
  pointsman policy push prefill.wasm oci:./layout:1.0.0
  pointsman policy pull oci:./layout:1.0.0 -o prefill.wasm

The digests of everything that is read are checked. Registries get the credentials of `docker login` \
($DOCKER_CONFIG/config.json or ~/.docker/config.json, with its credential helpers).
Exit code: 0 when the policy was copied, 2 when it was not.";

impl PushArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let (wasm, is_formula) = (read(&self.file)?, is_formula(&self.file));
        let is_directory = matches!(self.target, Place::Directory(_));
        let metadata = match is_formula {
            false => self.metadata(&wasm)?,
            true if is_directory => {
                formulas(&wasm, 0).map_err(|refusal| refused(&self.file, &refusal))?;
                Metadata::default()
            }
            true => bail!(
                "{}: registries and image layouts take components only: copy a formula file with dir:DIR",
                self.file.display()
            ),
        };
        let artifact = Artifact { signature: signature(&self.file)?, metadata, wasm };
        let done = match &self.target {
            Place::Layout(directory, tag) => {
                let manifest = Layout::create(directory)?.push(tag, &artifact)?;
                format!("{}:{tag}  manifest {manifest}", directory.display())
            }
            Place::Directory(directory) => {
                if !directory.is_dir() {
                    bail!("{}: no such directory; check the path, or create it first", directory.display());
                }
                let file = directory.join(self.file.file_name().context("the file has no name")?);
                let removed = write(&file, &artifact)?;
                format!("{}{removed}", file.display())
            }
            Place::Registry(reference) => {
                let manifest = self.registry.push(reference, &artifact)?;
                format!("{reference}  manifest {manifest}")
            }
        };
        print(&format!("{done}\npolicy sha256:{}\n", digest(&artifact.wasm)))?;
        Ok(ExitCode::SUCCESS)
    }

    fn metadata(&self, wasm: &[u8]) -> anyhow::Result<Metadata> {
        let found = pointsman_policy_runtime::inspect(wasm, "{}", Limits::default())
            .map_err(|refusal| refused(&self.file, &refusal))?;
        // A policy that needs settings, or more than the default limits, may be pushed as well.
        let (name, version) = match found.policy {
            Ok(policy) => (policy.name, policy.version),
            Err(_) => (stem(&self.file), String::new()),
        };
        let world = found.world.to_string();
        Ok(Metadata { name, version, world, imports: found.imports, exports: found.exports })
    }
}

impl PullArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let mut manifest = String::new();
        let artifact = match &self.source {
            Place::Layout(directory, tag) => Layout::open(directory)?.pull(tag)?,
            Place::Registry(reference) => {
                let (artifact, digest) = self.registry.pull(reference)?;
                manifest = format!("  manifest {digest}");
                artifact
            }
            Place::Directory(file) => {
                let metadata = Metadata { name: stem(file), ..Metadata::default() };
                Artifact { wasm: read(file)?, signature: signature(file)?, metadata }
            }
        };
        let output = match &self.output {
            Some(output) => output.clone(),
            None => PathBuf::from(format!("{}.wasm", file_name(&artifact.metadata.name)?)),
        };
        let removed = write(&output, &artifact)?;
        let signed = if artifact.signature.is_some() { ", with its signature" } else { "" };
        print(&format!(
            "{}{signed}{manifest}{removed}\npolicy sha256:{}\n",
            output.display(),
            digest(&artifact.wasm)
        ))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Returns a foreign name if it is safe as the name of a file.
fn file_name(name: &str) -> anyhow::Result<&str> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if name.is_empty() || name.len() > 100 || !name.chars().all(good) {
        bail!("the policy's name \"{}\" cannot be the name of a file: give -o FILE", name.escape_debug());
    }
    Ok(name)
}

fn stem(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the path of a policy's signature.
fn signature_path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".minisig");
    name.into()
}

fn signature(file: &Path) -> anyhow::Result<Option<String>> {
    let path = signature_path(file);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Writes a policy and its signature. Both are complete on disk before one of them is put in place: when a
/// write fails, the pair that was there stays whole. The signature comes first: a gateway that watches the
/// directory then finds both when it finds the policy. Removes the signature that belonged to the content
/// before, and returns a line about it.
fn write(file: &Path, artifact: &Artifact) -> anyhow::Result<String> {
    let path = signature_path(file);
    let stage = |path: &Path, bytes: &[u8]| {
        Staged::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
    };
    let signed = artifact.signature.as_ref().map(|text| stage(&path, text.as_bytes())).transpose()?;
    let policy = stage(file, &artifact.wasm)?;
    let Some(signed) = signed else { return write_unsigned(file, policy, &path) };
    let before = std::fs::read(&path);
    signed.put_in_place().with_context(|| path.display().to_string())?;
    policy.put_in_place().with_context(|| {
        let restored = match &before {
            Ok(text) => replace(&path, text),
            Err(_) => std::fs::remove_file(&path),
        };
        let error = restored.err().map(|error| format!("; {} is the new one: {error}", path.display()));
        format!("cannot replace {}{}", file.display(), error.unwrap_or_default())
    })?;
    Ok(String::new())
}

/// Puts a policy without a signature in place. The signature that is there goes first: if it stayed, the new
/// policy would be refused as `tampered`.
fn write_unsigned(file: &Path, policy: Staged, signature: &Path) -> anyhow::Result<String> {
    let taken = Staged::take_away(signature);
    let taken = taken.with_context(|| format!("cannot remove {}", signature.display()))?;
    if let Err(error) = policy.put_in_place() {
        let restored = taken.map_or(Ok(()), Staged::put_in_place);
        let lost = restored.err().map(|error| format!("; {} is missing: {error}", signature.display()));
        let problem = format!("cannot replace {}{}", file.display(), lost.unwrap_or_default());
        return Err(error).context(problem);
    }
    Ok(match taken {
        Some(_) => format!("\nremoved {}: this policy comes without a signature", signature.display()),
        None => String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_name_cannot_be_a_path() {
        assert!(file_name("kv-aware").is_ok());
        for name in ["", "../up", "a/b", ".hidden", "a\nb"] {
            assert!(file_name(name).is_err(), "{name}");
        }
    }
}
