//! The files of a new project: templates, and the values that fill them.

use pointsman_guest_build::{
    JS_HELPER, JS_HELPER_TYPES, PYTHON_HELPER, TYPESCRIPT,
    typescript::{DECLARATIONS, declarations},
};

use super::{ProjectLanguage, ProjectWorld, sdk};

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
    ts: &'static str,
    /// A question to the script, and its answer, in JavaScript.
    js_case: (&'static str, &'static str),
}

/// Returns the files of a Rust project: paths and contents.
pub(super) fn rust(name: &str, world: ProjectWorld) -> Vec<(&'static str, String)> {
    let world = world.describe();
    let fill = |template: &str| {
        template
            .replace("{{name}}", name)
            .replace("{{feature}}", world.feature)
            .replace("{{function}}", world.function)
            .replace("{{slot}}", world.slot)
            .replace("{{sdk}}", sdk::DIR)
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

/// Differences between the script languages.
struct Script {
    title: &'static str,
    /// File of the policy, and its template.
    rule: (&'static str, &'static str),
    tool: &'static str,
    helper: (&'static str, &'static str),
    unit_test: &'static str,
    ignored: &'static str,
}

/// Returns the files of a project in Python, JavaScript or TypeScript: paths and contents.
pub(super) fn script(
    name: &str,
    world: ProjectWorld,
    language: ProjectLanguage,
) -> Vec<(&'static str, String)> {
    let world = world.describe();
    let script = language.script(&world);
    let (question, answer) = world.js_case;
    let fill = |template: &str| {
        template
            .replace("{{name}}", name)
            .replace("{{feature}}", world.feature)
            .replace("{{slot}}", world.slot)
            .replace("{{language}}", script.title)
            .replace("{{rule}}", script.rule.0)
            .replace("{{tool}}", script.tool)
            .replace("{{helper}}", script.helper.0)
            .replace("{{unit_test}}", script.unit_test)
            .replace("{{question}}", question)
            .replace("{{answer}}", answer)
            .replace("{{typescript}}", TYPESCRIPT.1)
            .replace("{{memory}}", SCRIPT_MEMORY)
    };
    let mut files = vec![
        ("policy.toml", fill(template!("policy.toml.in"))),
        (".gitignore", script.ignored.to_owned()),
        (script.rule.0, fill(script.rule.1)),
        (script.helper.0, script.helper.1.to_owned()),
        ("cases.toml", fill(world.cases)),
        ("README.md", fill(template!("README.script.md.in"))),
    ];
    files.extend(match language {
        ProjectLanguage::Js => vec![
            ("package.json", "{ \"private\": true, \"type\": \"module\" }\n".to_owned()),
            ("policy.test.mjs", fill(template!("policy.test.mjs.in"))),
        ],
        ProjectLanguage::Ts => vec![
            ("package.json", fill(template!("package.json.in"))),
            ("tsconfig.json", template!("tsconfig.json.in").to_owned()),
            (JS_HELPER_TYPES.0, JS_HELPER_TYPES.1.to_owned()),
            (DECLARATIONS, declarations()),
            ("policy.test.mjs", fill(template!("policy.test.mjs.in"))),
        ],
        _ => vec![("test_policy.py", fill(template!("test_policy.py.in")))],
    });
    files
}

impl ProjectLanguage {
    fn script(self, world: &World) -> Script {
        match self {
            Self::Js => Script {
                title: "JavaScript",
                rule: ("policy.js", world.js),
                tool: "componentize-js",
                helper: JS_HELPER,
                unit_test: "node --test",
                ignored: "/target\n/*.wasm\n",
            },
            Self::Ts => Script {
                title: "TypeScript",
                rule: ("policy.ts", world.ts),
                tool: "TypeScript and componentize-js",
                helper: JS_HELPER,
                unit_test: "npm install && npm test",
                // The compiler writes beside the sources for the unit tests.
                ignored: "/target\n/node_modules\n/*.wasm\n/*.js\n!/pointsman-policy.js\n",
            },
            _ => Script {
                title: "Python",
                rule: ("policy.py", world.python),
                tool: "componentize-py",
                helper: PYTHON_HELPER,
                unit_test: "python3 test_policy.py",
                ignored: "/target\n/*.wasm\n",
            },
        }
    }
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
                ts: template!("selector.ts.in"),
                js_case: (
                    r#"{ rows: [{ "active-requests": 3 }, { "active-requests": 1 }] }"#,
                    r#"{ row: 1, reason: "fewest active requests: 1" }"#,
                ),
            },
            Self::Scorer => World {
                feature: "scorer",
                function: "scorer",
                slot: "prefill",
                cases: template!("scorer.cases.toml.in"),
                rust: template!("scorer.rs.in"),
                python: template!("scorer.py.in"),
                js: template!("scorer.js.in"),
                ts: template!("scorer.ts.in"),
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
                ts: template!("filter.ts.in"),
                js_case: (
                    r#"{ rows: [{ "active-requests": 65 }, { "active-requests": 64 }] }"#,
                    "{ keep: [1] }",
                ),
            },
            Self::DecodeOverride => World {
                feature: "decode-override",
                function: "decode_override",
                slot: "decode-override",
                cases: template!("decode-override.cases.toml.in"),
                rust: template!("decode-override.rs.in"),
                python: template!("decode-override.py.in"),
                js: template!("decode-override.js.in"),
                ts: template!("decode-override.ts.in"),
                js_case: (
                    r#"{ request: { "prompt-tokens": 100 }, decode: { "local-prefill": 1 }, rows: [{}] }"#,
                    "{ plan: \"local\" }",
                ),
            },
        }
    }
}
