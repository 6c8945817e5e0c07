//! The files of a new project: templates, and the values that fill them.

use std::path::Path;

use pointsman_guest_build::{JS_HELPER, PYTHON_HELPER};

use super::{DEFAULT_SDK, ProjectLanguage, ProjectWorld};

/// Memory for an instance of a Python or JavaScript policy, bytes.
const SCRIPT_MEMORY: &str = "67108864";

/// Content of a template.
macro_rules! template {
    ($name:literal) => {
        include_str!(concat!("../../templates/", $name))
    };
}

/// Values and templates of a world.
struct World {
    /// Feature of the SDK, and name of the world in WIT.
    feature: &'static str,
    /// Name of the world in `export!` and `testing::run_…`.
    function: &'static str,
    /// A slot for policies of this world.
    slot: &'static str,
    cases: &'static str,
    rust: &'static str,
    python: &'static str,
    js: &'static str,
    /// A question to the script, and its answer, in JavaScript.
    js_case: (&'static str, &'static str),
}

/// Returns the files of a Rust project: paths and contents.
pub(super) fn rust(name: &str, world: ProjectWorld, sdk: Option<&Path>) -> Vec<(&'static str, String)> {
    let world = world.describe();
    let note = match sdk {
        Some(_) => "# The SDK that was given to `pointsman policy new`.",
        None => {
            "# SET THIS: the directory `policies/sdk` of a Pointsman checkout, absolute or relative to this file."
        }
    };
    let path = sdk.map_or_else(|| DEFAULT_SDK.to_owned(), |path| path.display().to_string());
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

/// Returns the files of a project in Python or JavaScript: paths and contents.
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
    let (helper, unit_test) = match language {
        ProjectLanguage::Js => (JS_HELPER, "node --test"),
        _ => (PYTHON_HELPER, "python3 test_policy.py"),
    };
    let (question, answer) = world.js_case;
    let fill = |template: &str| {
        template
            .replace("{{name}}", name)
            .replace("{{feature}}", world.feature)
            .replace("{{slot}}", world.slot)
            .replace("{{language}}", title)
            .replace("{{rule}}", rule)
            .replace("{{tool}}", tool)
            .replace("{{helper}}", helper.0)
            .replace("{{unit_test}}", unit_test)
            .replace("{{question}}", question)
            .replace("{{answer}}", answer)
            .replace("{{memory}}", SCRIPT_MEMORY)
    };
    let mut files = vec![
        ("policy.toml", fill(template!("policy.toml.in"))),
        (".gitignore", "/target\n/*.wasm\n".to_owned()),
        (rule, fill(text)),
        (helper.0, helper.1.to_owned()),
        ("cases.toml", fill(world.cases)),
        ("README.md", fill(template!("README.script.md.in"))),
    ];
    if language == ProjectLanguage::Js {
        files.push(("package.json", "{ \"private\": true, \"type\": \"module\" }\n".to_owned()));
        files.push(("policy.test.mjs", fill(template!("policy.test.mjs.in"))));
    } else {
        files.push(("test_policy.py", fill(template!("test_policy.py.in"))));
    }
    files
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
                js_case: (r#"{ rows: [{ "active-requests": 3 }, { "active-requests": 1 }] }"#, "{ row: 1 }"),
            },
            Self::Scorer => World {
                feature: "scorer",
                function: "scorer",
                slot: "prefill",
                cases: template!("scorer.cases.toml.in"),
                rust: template!("scorer.rs.in"),
                python: template!("scorer.py.in"),
                js: template!("scorer.js.in"),
                js_case: (r#"{ rows: [{ "active-requests": 2, "kv-usage": 0.5 }] }"#, "{ costs: [7] }"),
            },
            Self::Filter => World {
                feature: "filter",
                function: "filter",
                slot: "prefill",
                cases: template!("filter.cases.toml.in"),
                rust: template!("filter.rs.in"),
                python: template!("filter.py.in"),
                js: template!("filter.js.in"),
                js_case: (r#"{ rows: [{ "engine-queue": 9 }, { "engine-queue": 8 }] }"#, "{ keep: [1] }"),
            },
            Self::DecodeOverride => World {
                feature: "decode-override",
                function: "decode_override",
                slot: "decode-override",
                cases: template!("decode-override.cases.toml.in"),
                rust: template!("decode-override.rs.in"),
                python: template!("decode-override.py.in"),
                js: template!("decode-override.js.in"),
                js_case: (
                    r#"{ request: { "prompt-tokens": 100 }, decode: { "local-prefill": 1 }, rows: [{}] }"#,
                    "{ plan: \"local\" }",
                ),
            },
        }
    }
}
