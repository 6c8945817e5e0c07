//! `pointsman policy new`: a Rust project folder for a policy, from the templates beside this crate.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};

use crate::cli::say;

/// Name, world and places.
#[derive(Debug, Args)]
pub(crate) struct NewArgs {
    /// Its name, also its crate's: lower case letters, digits and single dashes.
    #[arg(value_parser = name)]
    name: String,
    /// The question it answers.
    #[arg(long)]
    world: ProjectWorld,
    /// The folder to write, which must be empty or not exist [default: ./NAME].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The SDK: folder `policies/sdk` of a Pointsman checkout. Without it, Cargo.toml says where to set it.
    #[arg(long, value_name = "PATH")]
    sdk: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ProjectWorld {
    /// Which row?
    Selector,
    /// What does each row cost?
    Scorer,
    /// Which rows may stay?
    Filter,
    /// Is remote prefill worth it, and how is decode to be routed?
    DecodeOverride,
}

/// What differs from world to world.
struct World {
    /// The SDK's feature, which is also the world's name in WIT.
    feature: &'static str,
    /// What `export!` and `testing::run_…` call it.
    function: &'static str,
    /// A slot that it may fill.
    slot: &'static str,
    rule: &'static str,
    cases: &'static str,
}

/// Where the SDK lies when nobody says: a checkout beside the project.
const USUAL_SDK: &str = "../pointsman/policies/sdk";

impl NewArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let dir = self.dir.clone().unwrap_or_else(|| PathBuf::from(&self.name));
        let sdk = self.sdk.as_deref().map(checked_sdk).transpose()?;
        make_empty(&dir)?;
        for (file, text) in self.files(sdk.as_deref()) {
            let path = dir.join(file);
            write_new(&path, &text).with_context(|| path.display().to_string())?;
            say(&format!("wrote  {}\n", path.display()))?;
        }
        if sdk.is_none() {
            say("next   set the path of the SDK in Cargo.toml\n")?;
        }
        say(&format!("next   cd {}; README.md has the three commands\n", dir.display()))?;
        Ok(ExitCode::SUCCESS)
    }

    fn files(&self, sdk: Option<&Path>) -> Vec<(&'static str, String)> {
        let world = self.world.describe();
        let note = match sdk {
            Some(_) => "# The SDK of the Pointsman checkout that this folder was made from.",
            None => {
                "# SET THIS: the folder `policies/sdk` of a Pointsman checkout, absolute or relative to this file."
            }
        };
        let path = sdk.map_or_else(|| USUAL_SDK.to_owned(), |path| path.display().to_string());
        let fill = |template: &str| {
            template
                .replace("{{name}}", &self.name)
                .replace("{{artifact}}", &self.name.replace('-', "_"))
                .replace("{{feature}}", world.feature)
                .replace("{{function}}", world.function)
                .replace("{{slot}}", world.slot)
                .replace("{{note}}", note)
                .replace("{{sdk}}", &toml::Value::String(path.clone()).to_string())
        };
        vec![
            ("Cargo.toml", fill(include_str!("../../../templates/policy/Cargo.toml.in"))),
            (".cargo/config.toml", fill(include_str!("../../../templates/policy/config.toml.in"))),
            (".gitignore", "/target\n".to_owned()),
            ("src/lib.rs", fill(world.rule)),
            ("cases.toml", fill(world.cases)),
            ("README.md", fill(include_str!("../../../templates/policy/README.md.in"))),
        ]
    }
}

impl ProjectWorld {
    fn describe(self) -> World {
        match self {
            Self::Selector => World {
                feature: "selector",
                function: "selector",
                slot: "prefill",
                rule: include_str!("../../../templates/policy/selector.rs.in"),
                cases: include_str!("../../../templates/policy/selector.cases.toml.in"),
            },
            Self::Scorer => World {
                feature: "scorer",
                function: "scorer",
                slot: "prefill",
                rule: include_str!("../../../templates/policy/scorer.rs.in"),
                cases: include_str!("../../../templates/policy/scorer.cases.toml.in"),
            },
            Self::Filter => World {
                feature: "filter",
                function: "filter",
                slot: "prefill",
                rule: include_str!("../../../templates/policy/filter.rs.in"),
                cases: include_str!("../../../templates/policy/filter.cases.toml.in"),
            },
            Self::DecodeOverride => World {
                feature: "decode-override",
                function: "decode_override",
                slot: "decode-override",
                rule: include_str!("../../../templates/policy/decode-override.rs.in"),
                cases: include_str!("../../../templates/policy/decode-override.cases.toml.in"),
            },
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
        Err("a name is lower case letters, digits and single dashes, and begins with a letter".to_owned())
    }
}

/// The SDK's folder as an absolute path, as the project may lie anywhere.
fn checked_sdk(path: &Path) -> anyhow::Result<PathBuf> {
    let path = path.canonicalize().with_context(|| format!("--sdk {}", path.display()))?;
    let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap_or_default();
    if !manifest.contains("name = \"pointsman-policy-sdk\"") {
        bail!("--sdk {}: not the folder of pointsman-policy-sdk", path.display());
    }
    Ok(path)
}

/// Makes the folder, or takes an empty one. Nothing of anybody's is written over.
fn make_empty(dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    let mut entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    match entries.next() {
        Some(_) => bail!("{}: the folder is not empty", dir.display()),
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
    use crate::cli::policy::cases;

    #[test]
    fn names_are_crate_names() {
        for sound in ["a", "shortest-queue", "p2c", "a-1"] {
            assert_eq!(name(sound), Ok(sound.to_owned()));
        }
        for wrong in ["", "Shortest", "-a", "a-", "a--b", "1a", "a_b", "a/b", "../a", "ä"] {
            assert!(name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_template_is_filled_and_its_cases_are_sound() {
        for world in ProjectWorld::value_variants() {
            let args = NewArgs { name: "my-rule".to_owned(), world: *world, dir: None, sdk: None };
            let odd = Path::new("/tmp/a \"quoted\" place");
            for sdk in [None, Some(odd)] {
                let files = args.files(sdk);
                for (file, text) in &files {
                    assert!(!text.contains("{{") && !text.contains("}}"), "{world:?} {file}: {text}");
                }
                let text = |name| &files.iter().find(|(file, _)| *file == name).expect(name).1;
                assert_eq!(cases::parse(text("cases.toml")).expect("sound cases").len(), 2);
                let manifest: toml::Table = text("Cargo.toml").parse().expect("sound manifest");
                let path = manifest["dependencies"]["pointsman-policy-sdk"]["path"].as_str();
                assert_eq!(path, Some(sdk.map_or(USUAL_SDK, |sdk| sdk.to_str().expect("text"))));
            }
        }
    }
}
