//! `pointsman policy new`: creates a project for a policy. The content of its files is in `templates`.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};

use crate::output::print;

mod templates;

use templates::{rust, script};

/// Arguments of `new`.
#[derive(Debug, Args)]
pub struct NewArgs {
    /// Name of the policy and its crate: lower case letters, digits and single dashes.
    #[arg(value_parser = name)]
    name: String,
    /// World of the policy: the question that it answers.
    #[arg(long)]
    world: ProjectWorld,
    /// Language of the policy.
    #[arg(long, value_enum, default_value = "rust")]
    lang: ProjectLanguage,
    /// Project directory; must be empty or not exist [default: ./NAME].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Directory `policies/sdk` of a Pointsman checkout, for Rust; without it, set the path in Cargo.toml.
    #[arg(long, value_name = "PATH")]
    sdk: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ProjectWorld {
    /// Chooses a worker.
    Selector,
    /// Assigns a cost to each worker.
    Scorer,
    /// Removes workers.
    Filter,
    /// Decides between remote and local prefill, and how decode is routed.
    DecodeOverride,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ProjectLanguage {
    /// A cargo package that uses the SDK; by far the fastest.
    Rust,
    /// One file; componentize-py builds the component.
    Python,
    /// One file; componentize-js builds the component.
    Js,
}

/// Path of the SDK without `--sdk`: in a checkout beside the project.
const DEFAULT_SDK: &str = "../pointsman/policies/sdk";

impl NewArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let dir = self.dir.clone().unwrap_or_else(|| PathBuf::from(&self.name));
        let sdk = self.sdk.as_deref().map(checked_sdk).transpose()?;
        make_empty(&dir)?;
        for (file, text) in self.files(sdk.as_deref()) {
            let path = dir.join(file);
            write_new(&path, &text).with_context(|| path.display().to_string())?;
            print(&format!("wrote  {}\n", path.display()))?;
        }
        if self.lang == ProjectLanguage::Rust && sdk.is_none() {
            print("next   set the path of the SDK in Cargo.toml\n")?;
        }
        print(&format!("next   cd {}; README.md has the next commands\n", dir.display()))?;
        Ok(ExitCode::SUCCESS)
    }

    fn files(&self, sdk: Option<&Path>) -> Vec<(&'static str, String)> {
        match self.lang {
            ProjectLanguage::Rust => rust(&self.name, self.world, sdk),
            ProjectLanguage::Python | ProjectLanguage::Js => script(&self.name, self.world, self.lang),
        }
    }
}

fn name(text: &str) -> Result<String, String> {
    let letters = |part: &str| part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let sound = text.starts_with(|first: char| first.is_ascii_lowercase())
        && text.split('-').all(|part| !part.is_empty() && letters(part));
    if sound {
        Ok(text.to_owned())
    } else {
        Err("use lower case letters, digits and single dashes, and begin with a letter".to_owned())
    }
}

/// Returns the SDK's directory as an absolute path, because the project may be anywhere.
fn checked_sdk(path: &Path) -> anyhow::Result<PathBuf> {
    let path = path.canonicalize().with_context(|| format!("--sdk {}", path.display()))?;
    let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap_or_default();
    if !manifest.contains("name = \"pointsman-policy-sdk\"") {
        bail!("--sdk {}: not the directory of the crate pointsman-policy-sdk", path.display());
    }
    Ok(path)
}

/// Creates the directory, or accepts an empty one. Never overwrites a file.
fn make_empty(dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    let mut entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    match entries.next() {
        Some(_) => bail!("{}: the directory is not empty; name another one with --dir", dir.display()),
        None => Ok(()),
    }
}

fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::File::create_new(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::fact_table;
    use pointsman_policy_cases as cases;

    #[test]
    fn names_are_crate_names() {
        for valid in ["a", "shortest-queue", "p2c", "a-1"] {
            assert_eq!(name(valid), Ok(valid.to_owned()));
        }
        for wrong in ["", "Shortest", "-a", "a-", "a--b", "1a", "a_b", "a/b", "../a", "ä"] {
            assert!(name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_rust_template_is_filled_and_its_cases_are_well_formed() {
        for world in ProjectWorld::value_variants() {
            let args = NewArgs {
                name: "my-rule".to_owned(),
                world: *world,
                lang: ProjectLanguage::Rust,
                dir: None,
                sdk: None,
            };
            let odd = Path::new("/tmp/a \"quoted\" place");
            for sdk in [None, Some(odd)] {
                let files = args.files(sdk);
                for (file, text) in &files {
                    assert!(!text.contains("{{") && !text.contains("}}"), "{world:?} {file}: {text}");
                }
                let text = |name| &files.iter().find(|(file, _)| *file == name).expect(name).1;
                assert_eq!(
                    cases::parse(text("cases.toml"), &fact_table()).expect("well-formed cases").len(),
                    3
                );
                let manifest: toml::Table = text("Cargo.toml").parse().expect("well-formed manifest");
                let path = manifest["dependencies"]["pointsman-policy-sdk"]["path"].as_str();
                assert_eq!(path, Some(sdk.map_or(DEFAULT_SDK, |sdk| sdk.to_str().expect("text"))));
            }
        }
    }

    #[test]
    fn every_script_template_is_filled_and_names_its_world() {
        for world in ProjectWorld::value_variants() {
            for (lang, rule) in [(ProjectLanguage::Python, "policy.py"), (ProjectLanguage::Js, "policy.js")] {
                let args = NewArgs { name: "my-rule".to_owned(), world: *world, lang, dir: None, sdk: None };
                let files = args.files(None);
                for (file, text) in &files {
                    assert!(!text.contains("{{") && !text.contains("}}"), "{world:?} {file}: {text}");
                }
                let text = |name| &files.iter().find(|(file, _)| *file == name).expect(name).1;
                assert_eq!(
                    cases::parse(text("cases.toml"), &fact_table()).expect("well-formed cases").len(),
                    3
                );
                assert!(text(rule).contains("my-rule"));
                let manifest: toml::Table = text("policy.toml").parse().expect("well-formed manifest");
                assert_eq!(manifest["name"].as_str(), Some("my-rule"));
                let worlds = ["selector", "scorer", "filter", "decode-override"];
                assert!(manifest["world"].as_str().is_some_and(|world| worlds.contains(&world)));
            }
        }
    }
}
