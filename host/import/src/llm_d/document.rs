//! Finds the `EndpointPickerConfig` in a file: as a document of its own, inline in another one (KServe's
//! `LLMInferenceService`), or as a text in a `ConfigMap`, in Helm values or in arguments of a container.

use crate::{
    report::plain,
    yaml::{self, Node, Value},
};

/// Kind of the document.
const KIND: &str = "EndpointPickerConfig";

/// Returns the configuration of a file.
///
/// # Errors
/// The file is not YAML, or does not have exactly one configuration.
pub(super) fn find(text: &str) -> Result<Node, String> {
    let documents = yaml::parse(text).map_err(|problem| of_template(text, problem))?;
    let (mut found, preset) = (Vec::new(), documents.iter().find_map(of_kserve));
    for document in documents {
        if is_config(&document) { found.push(document) } else { find_embedded(&document, &mut found)? }
    }
    let count = found.len();
    match found.pop() {
        Some(config) if count == 1 => Ok(config),
        Some(_) => {
            Err(format!("{count} documents of the kind `{KIND}`: put the one to import in a file of its own"))
        }
        None => Err(preset.unwrap_or_else(|| format!(
            "no document of the kind `{KIND}`: give the endpoint picker's configuration, or a ConfigMap, Helm \
             values or an LLMInferenceService that contain it{}",
            hint(text)
        ))),
    }
}

/// Advice for files of other projects, by a word that only they have.
const OTHERS: [(&str, &str); 9] = [
    ("routerSpec", "production-stack: give the router's command line to `pointsman import vllm-router`"),
    (
        "servingEngineSpec",
        "production-stack: give the router's command line to `pointsman import vllm-router`",
    ),
    ("sglang_router", "sglang-router: give its command line to `pointsman import sglang-router`"),
    ("vllm-router", "vllm-router: give its command line to `pointsman import vllm-router`"),
    ("lightseekorg/smg", "smg: give its command line to `pointsman import sglang-router`"),
    ("sgl-router", "sgl-router: it has no import; see docs/import.md#without-an-import"),
    ("nvidia.com/dynamo", "Dynamo: its frontend has no import; see docs/import.md#without-an-import"),
    ("DynamoGraphDeployment", "Dynamo: its frontend has no import; see docs/import.md#without-an-import"),
    ("aibrix", "AIBrix: its gateway has no import; see docs/import.md#without-an-import"),
];

fn hint(text: &str) -> String {
    let other = OTHERS.iter().find(|(word, _)| text.contains(word));
    other.map_or_else(String::new, |(_, what)| format!(". This file looks like one of {what}"))
}

/// The problem of a file that is not YAML yet.
fn of_template(text: &str, problem: String) -> String {
    if !text.contains("{{") {
        return problem;
    }
    format!("{problem}. This file looks like a template of Helm: give what `helm template` makes of it")
}

/// Returns what to give instead of KServe's service whose scheduler has its configuration elsewhere.
fn of_kserve(document: &Node) -> Option<String> {
    let is_service = document.get("kind").and_then(Node::text) == Some("LLMInferenceService");
    let spec = document.get("spec").filter(|_| is_service)?;
    let scheduler = spec.get("router")?.get("scheduler")?;
    let at = |key: &str, of: &Node| of.get(key).and_then(Node::text).map_or_else(|| "?".to_owned(), plain);
    let config = scheduler.get("config");
    if let Some(named) = config.and_then(|config| config.get("ref")) {
        return Some(format!(
            "line {}: the `{KIND}` of this LLMInferenceService is in the ConfigMap `{}`, key `{}`: give that ConfigMap \
             (kubectl get configmap NAME -o yaml)",
            named.line,
            at("name", named),
            at("key", named)
        ));
    }
    let preset = if spec.get("prefill").is_some() { "pd" } else { "optimized-baseline" };
    config.is_none().then(|| {
        format!(
            "line {}: this LLMInferenceService has no `{KIND}`, so its scheduler has the one of KServe's preset: give \
             that one, whose name ends in `scheduler-eppconfig-{preset}` (kubectl get llminferenceserviceconfig -A -o \
             yaml)",
            scheduler.line
        )
    })
}

fn is_config(node: &Node) -> bool {
    node.get("kind").and_then(Node::text) == Some(KIND)
}

/// Collects the configurations that are texts within a document.
fn find_embedded(node: &Node, found: &mut Vec<Node>) -> Result<(), String> {
    match &node.value {
        Value::Scalar(text) if text.contains(KIND) => {
            let inside = |problem| format!("in the text that begins at line {}: {problem}", node.line);
            let parsed = match yaml::parse(text) {
                // A sentence that mentions the kind.
                Err(_) if !text.contains('\n') => return Ok(()),
                parsed => parsed.map_err(inside)?,
            };
            for mut inner in parsed {
                if is_config(&inner) {
                    // The line number of a block is the number of its first line with text.
                    let blank = text.chars().take_while(|letter| *letter == '\n').count();
                    inner.move_down((node.line - 1).saturating_sub(blank));
                    found.push(inner);
                }
            }
        }
        Value::Scalar(_) => {}
        Value::Map(_) if is_config(node) => found.push(node.clone()),
        Value::List(nodes) => nodes.iter().try_for_each(|node| find_embedded(node, found))?,
        Value::Map(entries) => entries.iter().try_for_each(|(_, node)| find_embedded(node, found))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "kind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n";

    fn indented(text: &str, by: usize) -> String {
        text.lines().map(|line| format!("{}{line}\n", " ".repeat(by))).collect()
    }

    #[test]
    fn s2_the_configuration_is_found_in_a_config_map_and_in_helm_values_with_the_file_s_lines() {
        let map = format!("kind: ConfigMap\ndata:\n  epp.yaml: |\n{}", indented(CONFIG, 4));
        let values = format!("a: 1\n---\ninferenceExtension:\n  custom:\n    x: |\n{}", indented(CONFIG, 6));
        let later = format!("data:\n  x: |\n\n\n{}", indented(CONFIG, 4));
        for (text, line) in [(CONFIG.to_owned(), 3), (map, 6), (values, 8), (later, 7)] {
            let config = find(&text).unwrap();
            let plugin = &config.get("plugins").unwrap().list()[0];
            // S2.1
            assert_eq!(plugin.get("type").unwrap().line, line, "{text}");
            assert!(text.lines().nth(line - 1).unwrap().contains("queue-scorer"), "{text}");
        }
    }

    #[test]
    fn s2_the_configuration_is_found_inline_and_in_arguments() {
        let inline = format!(
            "kind: LLMInferenceService\nspec:\n  router:\n    scheduler:\n      config:\n        inline:\n{}",
            indented(CONFIG, 10)
        );
        let arguments = format!("containers:\n- args:\n  - --config-text\n  - |\n{}", indented(CONFIG, 4));
        let json = r#"args: ["--config-text", '{"kind": "EndpointPickerConfig", "plugins": [{"type": "queue-scorer"}]}']"#;
        let said = "description: 'an EndpointPickerConfig: inline'\n";
        for (text, line) in
            [(inline, 9), (arguments, 7), (json.to_owned(), 1), (format!("{said}---\n{CONFIG}"), 5)]
        {
            let config = find(&text).unwrap();
            // S2.1
            assert_eq!(config.get("plugins").unwrap().list()[0].get("type").unwrap().line, line, "{text}");
        }
        for (text, expected) in [
            ("kind: DynamoGraphDeployment\n", "docs/import.md#without-an-import"),
            ("metadata:\n  labels: {model.aibrix.ai/name: m}\n", "docs/import.md#without-an-import"),
            ("image: aibrix/sglang\nargs: [-m, sglang_router.launch_router]\n", "import sglang-router"),
            ("{{- if .Values.x }}\na: {{ .Values.y }}\n", "helm template"),
        ] {
            // S2.1
            assert!(find(text).unwrap_err().contains(expected), "{text}: {:?}", find(text));
        }
        // S2.1
        assert!(find("routerSpec:\n  routingLogic: session\n").unwrap_err().contains("production-stack"));
    }

    #[test]
    fn s2_a_service_of_kserve_whose_configuration_is_elsewhere_names_it() {
        let service = "kind: LLMInferenceService\nspec:\n  router:\n    scheduler:";
        for (text, expected) in [
            (format!("{service} {{}}\n"), "ends in `scheduler-eppconfig-optimized-baseline`"),
            (format!("{service} {{}}\n  prefill: {{ replicas: 1 }}\n"), "ends in `scheduler-eppconfig-pd`"),
            (
                format!("{service}\n      config: {{ ref: {{ name: my-epp, key: epp.yaml }} }}\n"),
                "`my-epp`, key `epp.yaml`",
            ),
        ] {
            let refused = find(&text).unwrap_err();
            // S2.1
            assert!(refused.starts_with("line ") && refused.contains(expected), "{refused}");
        }
        // S2.1: one that has its own
        assert!(
            find(&format!("{service}\n      config:\n        inline:\n{}", indented(CONFIG, 10))).is_ok()
        );
    }

    #[test]
    fn s2_a_file_without_the_configuration_or_with_two_is_refused() {
        // S2.1
        assert!(find("kind: Pod\n").unwrap_err().contains("no document of the kind"));
        let two = format!("{CONFIG}---\n{CONFIG}");
        // S2.1
        assert!(find(&two).unwrap_err().starts_with("2 documents"));
        let broken = format!("data:\n  x: |\n{}    [\n", indented(CONFIG, 4));
        assert!(
            find(&broken).unwrap_err().starts_with("in the text that begins at line 3: "),
            "{:?}",
            find(&broken)
        );
    }
}
