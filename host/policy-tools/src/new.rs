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

mod sdk;
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
}

/// World of a policy, as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProjectWorld {
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
    /// A cargo package with the SDK's sources; by far the fastest.
    Rust,
    /// One file; componentize-py builds the component.
    Python,
    /// One file; componentize-js builds the component.
    Js,
    /// Like JavaScript, with types of the contract and of each fact.
    Ts,
}

impl NewArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let dir = self.dir.clone().unwrap_or_else(|| PathBuf::from(&self.name));
        let files = self.files();
        if depends_on(&files, &self.name) {
            bail!("`{}` is a crate that the project depends on; take another name", self.name);
        }
        make_empty(&dir)?;
        let write = |path: &Path, text: &str| {
            write_new(&dir.join(path), text).with_context(|| dir.join(path).display().to_string())
        };
        for (file, text) in files {
            write(Path::new(file), &text)?;
            print(&format!("wrote  {}\n", dir.join(file).display()))?;
        }
        if self.lang == ProjectLanguage::Rust {
            let files = sdk::files();
            for (file, text) in &files {
                write(&Path::new(sdk::DIR).join(file), text)?;
            }
            let sdk = dir.join(sdk::DIR);
            print(&format!("wrote  {}, {} files: the SDK of this release\n", sdk.display(), files.len()))?;
        }
        print(&format!("next   cd {}; README.md has the next commands\n", dir.display()))?;
        Ok(ExitCode::SUCCESS)
    }

    fn files(&self) -> Vec<(&'static str, String)> {
        match self.lang {
            ProjectLanguage::Rust => rust(&self.name, self.world),
            lang => script(&self.name, self.world, lang),
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

/// Returns whether the Rust project of these files depends on a crate of this name.
fn depends_on(files: &[(&'static str, String)], name: &str) -> bool {
    let manifest = files.iter().find(|(file, _)| *file == "Cargo.toml");
    let manifest = manifest.and_then(|(_, text)| text.parse::<toml::Table>().ok()).unwrap_or_default();
    manifest.get("dependencies").is_some_and(|all| all.get(name).is_some())
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
            let args =
                NewArgs { name: "my-rule".to_owned(), world: *world, lang: ProjectLanguage::Rust, dir: None };
            let files = args.files();
            for (file, text) in &files {
                assert!(!text.contains("{{") && !text.contains("}}"), "{world:?} {file}: {text}");
            }
            let text = |name| &files.iter().find(|(file, _)| *file == name).expect(name).1;
            assert_eq!(cases::parse(text("cases.toml"), &fact_table()).expect("well-formed cases").len(), 3);
            let manifest: toml::Table = text("Cargo.toml").parse().expect("well-formed manifest");
            let path = manifest["dependencies"]["pointsman-policy-sdk"]["path"].as_str();
            assert_eq!(path, Some(sdk::DIR));
        }
    }

    /// A project is all that its author has: what its files name must be in it, or be a command.
    #[test]
    fn no_template_names_a_file_of_the_repository() {
        for world in ProjectWorld::value_variants() {
            for lang in ProjectLanguage::value_variants() {
                let args = NewArgs { name: "my-rule".to_owned(), world: *world, lang: *lang, dir: None };
                for (file, text) in args.files() {
                    for part in ["wit/", "policies/", "docs/", "checkout", "xtask"] {
                        assert!(!text.contains(part), "{world:?} {lang:?} {file} names {part}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_script_template_is_filled_and_names_its_world() {
        for world in ProjectWorld::value_variants() {
            for (lang, rule) in [
                (ProjectLanguage::Python, "policy.py"),
                (ProjectLanguage::Js, "policy.js"),
                (ProjectLanguage::Ts, "policy.ts"),
            ] {
                let args = NewArgs { name: "my-rule".to_owned(), world: *world, lang, dir: None };
                let files = args.files();
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
