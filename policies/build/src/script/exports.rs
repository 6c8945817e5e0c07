//! What a script has to export for its world, and what to do when a tool says that it does not.

use crate::GuestBuildError;

/// Worlds of the contract: the key of policy.toml, the method of a rule, the interface, and the function of
/// the JavaScript helper.
const WORLDS: [(&str, &str, &str, &str); 4] = [
    ("selector", "select", "selecting", "selector"),
    ("scorer", "score", "scoring", "scorer"),
    ("filter", "keep", "filtering", "filter"),
    ("decode-override", "decide", "disaggregation", "decodeOverride"),
];

/// Puts advice in the place of a tool's words about an export of `world` that `file` lacks.
pub(super) fn explain(error: GuestBuildError, file: &str, world: &str) -> GuestBuildError {
    match error {
        GuestBuildError::Failed { package, output } => {
            let output = missing_export(&output, file, world).unwrap_or(output);
            GuestBuildError::Failed { package, output }
        }
        other => other,
    }
}

fn missing_export(output: &str, file: &str, world: &str) -> Option<String> {
    let world = world.strip_prefix("stateful-").unwrap_or(world);
    let (_, method, interface, helper) = WORLDS.into_iter().find(|(name, ..)| *name == world)?;
    let declared = format!("policy.toml says `world = \"{world}\"`");
    if let Some((_, class)) = output.rsplit_once("module 'policy' has no attribute '") {
        let class = class.strip_suffix('\'')?;
        return match class {
            "Policy" => Some(format!(
                "{file} exports no policy: end it with `pp.export(Rule, globals())`, where `Rule` is the class of the \
                 policy"
            )),
            class if class.to_lowercase() == interface => Some(format!(
                "{declared}, and the class that {file} exports has no `{method}`: write that method, or change `world`"
            )),
            _ => None,
        };
    }
    let (_, rest) = output.split_once("does not export a \"")?;
    let (found, _) = rest.split_once('"')?;
    let form = format!("`export const {{ policy, {interface} }} = {helper}({{ … }});`");
    if found == "policy" {
        return Some(format!("{file} does not export `policy`: write {form}"));
    }
    let is_interface = found == interface || found.contains(&format!("/{interface}@"));
    is_interface.then(|| {
        format!("{declared}, and {file} does not export `{interface}`: write {form}, or change `world`")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t3_a_script_without_an_export_of_its_world_is_told_what_to_write() {
        let python = |name: &str| format!("AttributeError: module 'policy' has no attribute '{name}'");
        let js = |what: &str| {
            format!(
                "Error: Unable to extract expected exports list\nError: \"source.js\" does not export a {what} as \
                 expected by the world.\n  Try defining it"
            )
        };
        let selecting = "\"pointsman:policy/selecting@0.1.1\" select function";
        for (output, file, world, advice) in [
            (
                python("Policy"),
                "policy.py",
                "selector",
                "policy.py exports no policy: end it with `pp.export(Rule, globals())`, where `Rule` is the class of \
                 the policy",
            ),
            (
                python("Selecting"),
                "policy.py",
                "stateful-selector",
                "policy.toml says `world = \"selector\"`, and the class that policy.py exports has no `select`: write \
                 that method, or change `world`",
            ),
            (
                js("\"policy\" interface"),
                "policy.ts",
                "decode-override",
                "policy.ts does not export `policy`: write `export const { policy, disaggregation } = \
                 decodeOverride({ … });`",
            ),
            (
                js(selecting),
                "policy.js",
                "selector",
                "policy.toml says `world = \"selector\"`, and policy.js does not export `selecting`: write `export \
                 const { policy, selecting } = selector({ … });`, or change `world`",
            ),
        ] {
            // T3.8
            assert_eq!(missing_export(&output, file, world).as_deref(), Some(advice));
        }
        for output in ["AttributeError: module 'policy' has no attribute 'other'", &js("\"other\" function")]
        {
            assert_eq!(missing_export(output, "policy.py", "selector"), None);
        }
        assert_eq!(missing_export(&python("Policy"), "policy.py", "unknown"), None);
    }
}
