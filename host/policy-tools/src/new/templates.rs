//! The files of a new project: which templates they are made of, and what is filled in.

use std::path::Path;

use super::{ProjectLanguage, ProjectWorld, USUAL_SDK};

/// Memory that a Python or JavaScript instance runs well in, bytes.
const SCRIPT_MEMORY: &str = "67108864";

/// A file of a template.
macro_rules! template {
    ($name:literal) => {
        include_str!(concat!("../../templates/", $name))
    };
}

/// What differs from world to world.
struct World {
    /// The SDK's feature, which is also the world's name in WIT.
    feature: &'static str,
    /// What `export!` and `testing::run_…` call it.
    function: &'static str,
    /// A slot that it may fill.
    slot: &'static str,
    cases: &'static str,
    rust: &'static str,
    python: &'static str,
    js: &'static str,
}

/// The files of a cargo package.
pub(super) fn rust(name: &str, world: ProjectWorld, sdk: Option<&Path>) -> Vec<(&'static str, String)> {
    let world = world.describe();
    let note = match sdk {
        Some(_) => "# The SDK of the Pointsman checkout that this folder was made from.",
        None => {
            "# SET THIS: the folder `policies/sdk` of a Pointsman checkout, absolute or relative to this file."
        }
    };
    let path = sdk.map_or_else(|| USUAL_SDK.to_owned(), |path| path.display().to_string());
    let fill = |template: &str| {
        template
            .replace("{{name}}", name)
            .replace("{{feature}}", world.feature)
            .replace("{{function}}", world.function)
            .replace("{{slot}}", world.slot)
            .replace("{{note}}", note)
            .replace("{{sdk}}", &toml::Value::String(path.clone()).to_string())
    };
    vec![
        ("Cargo.toml", fill(template!("Cargo.toml.in"))),
        (".cargo/config.toml", fill(template!("config.toml.in"))),
        (".gitignore", "/target\n/*.wasm\n".to_owned()),
        ("src/lib.rs", fill(world.rust)),
        ("cases.toml", fill(world.cases)),
        ("README.md", fill(template!("README.md.in"))),
    ]
}

/// The files of a policy that is one script.
pub(super) fn script(
    name: &str,
    world: ProjectWorld,
    language: ProjectLanguage,
) -> Vec<(&'static str, String)> {
    let world = world.describe();
    let (title, rule, tool, text) = match language {
        ProjectLanguage::Js => ("JavaScript", "policy.js", "componentize-js", world.js),
        _ => ("Python", "policy.py", "componentize-py", world.python),
    };
    let fill = |template: &str| {
        template
            .replace("{{name}}", name)
            .replace("{{feature}}", world.feature)
            .replace("{{slot}}", world.slot)
            .replace("{{language}}", title)
            .replace("{{rule}}", rule)
            .replace("{{tool}}", tool)
            .replace("{{memory}}", SCRIPT_MEMORY)
    };
    vec![
        ("policy.toml", fill(template!("policy.toml.in"))),
        (".gitignore", "/target\n/*.wasm\n".to_owned()),
        (rule, fill(text)),
        ("cases.toml", fill(world.cases)),
        ("README.md", fill(template!("README.script.md.in"))),
    ]
}

impl ProjectWorld {
    fn describe(self) -> World {
        match self {
            Self::Selector => World {
                feature: "selector",
                function: "selector",
                slot: "prefill",
                cases: template!("selector.cases.toml.in"),
                rust: template!("selector.rs.in"),
                python: template!("selector.py.in"),
                js: template!("selector.js.in"),
            },
            Self::Scorer => World {
                feature: "scorer",
                function: "scorer",
                slot: "prefill",
                cases: template!("scorer.cases.toml.in"),
                rust: template!("scorer.rs.in"),
                python: template!("scorer.py.in"),
                js: template!("scorer.js.in"),
            },
            Self::Filter => World {
                feature: "filter",
                function: "filter",
                slot: "prefill",
                cases: template!("filter.cases.toml.in"),
                rust: template!("filter.rs.in"),
                python: template!("filter.py.in"),
                js: template!("filter.js.in"),
            },
            Self::DecodeOverride => World {
                feature: "decode-override",
                function: "decode_override",
                slot: "decode-override",
                cases: template!("decode-override.cases.toml.in"),
                rust: template!("decode-override.rs.in"),
                python: template!("decode-override.py.in"),
                js: template!("decode-override.js.in"),
            },
        }
    }
}
