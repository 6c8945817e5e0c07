//! The files of `deploy/kubernetes`, as far as they can be checked without a cluster: against the binary, a
//! double of the API server and the documentation.
//!
//! `deploy/check.sh` renders them and checks them against the published schemas.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "tests and their helpers may fail"
)]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use pointsman_gateway::config::Config;
use serde_json::Value;

use crate::{helm_chart::root, programs::parses};

mod pod;
mod running;

/// Largest sum of the values of a ConfigMap that the API server takes, bytes.
const CONFIG_MAP_BYTES: usize = 1 << 20;
/// Files that are not a resource, patch or generator of a kustomization, relative to `deploy/kubernetes`.
const OTHER_FILES: [&str; 1] = ["components/autoscaling/prometheus-adapter.yaml"];
const RULES_HEAD: &str = "\
# Written from deploy/helm/pointsman/files/alerts.yaml by
#     UPDATE_DOCS=1 cargo nextest run --package pointsman-gateway --test it
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: pointsman
  labels: { app.kubernetes.io/name: pointsman }
spec:
";

fn files() -> PathBuf {
    root().join("deploy/kubernetes")
}

fn read(path: &str) -> String {
    let path = files().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn yaml(path: &str) -> Value {
    serde_yaml_ng::from_str(&read(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .map_or_else(Vec::new, |list| list.iter().map(|text| text.as_str().unwrap().to_owned()).collect())
}

/// The only container of the Deployment in a file, or of its init containers.
fn container(path: &str, kind: &str) -> Value {
    yaml(path)["spec"]["template"]["spec"][kind][0].clone()
}

/// Files at or below a directory of `deploy/kubernetes` that end so.
fn files_below(dir: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_below(&path, ending, found);
        } else if path.to_str().unwrap().ends_with(ending) {
            found.push(path);
        }
    }
}

fn kustomizations() -> Vec<PathBuf> {
    let mut found = Vec::new();
    files_below(&files(), "kustomization.yaml", &mut found);
    found
}

#[test]
fn every_file_is_an_object_that_a_kustomization_names() {
    let (mut all, mut named) = (Vec::new(), BTreeSet::new());
    files_below(&files(), ".yaml", &mut all);
    for file in kustomizations() {
        let dir = file.parent().unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let kustomization: Value = serde_yaml_ng::from_str(&text).unwrap();
        let mut names = strings(&kustomization["resources"]);
        names.extend(strings(&kustomization["components"]));
        let patches = kustomization["patches"].as_array().cloned().unwrap_or_default();
        names.extend(patches.iter().filter_map(|patch| Some(patch["path"].as_str()?.to_owned())));
        for name in names {
            let path = dir.join(&name).canonicalize().unwrap_or_else(|error| panic!("{name}: {error}"));
            named.insert(if path.is_dir() { path.join("kustomization.yaml") } else { path });
        }
    }
    assert!(all.len() > 20, "{}", all.len());
    for path in all {
        let name = path.strip_prefix(files()).unwrap().to_str().unwrap().to_owned();
        let object = yaml(&name);
        if OTHER_FILES.contains(&name.as_str()) {
            continue;
        }
        assert!(object["apiVersion"].is_string() && object["kind"].is_string(), "{name}");
        let top = name.starts_with("overlays/") || name == "base/kustomization.yaml";
        assert!(top || named.contains(&path), "no kustomization names {name}");
        assert!(name.ends_with("kustomization.yaml") || object["metadata"]["name"].is_string(), "{name}");
    }
}

#[test]
fn n6_commands_and_the_image_are_those_of_this_release() {
    let gateway = container("base/deployment.yaml", "containers");
    let pull = container("components/policies-oci/deployment.yaml", "initContainers");
    let image = format!("registry.example/pointsman:{}", env!("CARGO_PKG_VERSION"));
    for one in [&gateway, &pull] {
        assert_eq!(one["image"], image.as_str());
        let command = [vec!["pointsman".to_owned()], strings(&one["args"])].concat();
        // N6.2
        assert!(parses(&command), "{command:?}");
    }
    let dockerfile = fs::read_to_string(root().join("deploy/container/Dockerfile")).unwrap();
    // N6.2: the image has the program that `pointsman policy pull` runs.
    assert!(dockerfile.contains("target/dist/pointsman-policy"));
    assert!(dockerfile.contains("ENTRYPOINT [\"/usr/bin/pointsman\"]"));
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        let command = strings(&gateway[probe]["exec"]["command"]);
        assert_eq!(command[0], "/usr/bin/pointsman");
        // N6.2
        assert!(parses(&command), "{command:?}");
    }
    let pod = &yaml("base/deployment.yaml")["spec"]["template"]["spec"];
    let user = pod["securityContext"]["runAsUser"].as_u64().unwrap();
    assert!(dockerfile.contains(&format!("USER {user}:{user}")));
}

#[test]
fn n6_the_pod_gets_longer_to_end_than_its_drain_takes() {
    let config: Config = toml::from_str(&read("base/pointsman.toml")).unwrap();
    let pod = &yaml("base/deployment.yaml")["spec"]["template"]["spec"];
    let gateway = container("base/deployment.yaml", "containers");
    let pause = gateway["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap();
    // Half a second for connections, and two seconds each for the last lines of the decision log and spans.
    let drain = config.timeouts.drain.as_secs() + 5;
    // N6.4
    assert!(pod["terminationGracePeriodSeconds"].as_u64().unwrap() > pause + drain);
}

#[test]
fn n6_the_role_grants_the_discovery_and_its_namespace_is_that_of_the_files() {
    let config: Config = toml::from_str(&read("base/pointsman.toml")).unwrap();
    let source = &config.discovery.kubernetes[0];
    let rules = yaml("base/role.yaml")["rules"].clone();
    // N6.3
    assert_eq!(
        rules,
        serde_json::json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"] }])
    );
    for file in kustomizations() {
        let name = file.strip_prefix(files()).unwrap().to_str().unwrap().to_owned();
        let namespace = yaml(&name)["namespace"].clone();
        let component = name.starts_with("components/");
        assert!(component || namespace == source.namespace.as_str(), "{name}: {namespace}");
    }
    let pool = yaml("components/endpoint-picker/inferencepool.yaml");
    let labels = pool["spec"]["selector"]["matchLabels"].as_object().unwrap();
    assert!(
        labels.contains_key(&source.selector),
        "the pool and the gateways find different pods: {labels:?}"
    );
}

/// Names of `docs/metrics.md`.
fn metrics() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.to_owned()).collect()
}

/// Metrics that the rules of the adapter offer, by kind; each is checked against `known`.
fn offered(kind: &str, known: &BTreeSet<String>) -> BTreeSet<String> {
    let rules = yaml(OTHER_FILES[0])["rules"][kind].clone();
    let offer = |rule: &Value| {
        let series = rule["seriesQuery"].as_str().unwrap().split('{').next().unwrap().to_owned();
        let metric = series.strip_suffix("_bucket").unwrap_or(&series);
        // N6.5
        assert!(known.contains(metric), "{metric} is not a metric of the gateway");
        assert!(rule["metricsQuery"].as_str().unwrap().contains("<<.Series>>{<<.LabelMatchers>>}"));
        rule["name"]["as"].as_str().map_or(series, str::to_owned)
    };
    rules.as_array().unwrap().iter().map(offer).collect()
}

/// The first block of `docs/kubernetes.md` that is in a language and has this text.
fn block(language: &str, with: &str) -> String {
    let page = fs::read_to_string(root().join("docs/kubernetes.md")).unwrap();
    let mut blocks = page.split("\n```").filter_map(|block| block.strip_prefix(language));
    blocks.find(|block| block.contains(with)).unwrap().to_owned()
}

#[test]
fn n6_the_scaled_object_of_the_page_uses_metrics_and_keys_that_exist() {
    let object: Value = serde_yaml_ng::from_str(&block("yaml", "kind: ScaledObject")).unwrap();
    let (known, spec) = (metrics(), &object["spec"]);
    let config: Config = toml::from_str(&block("toml", "wait_for_workers")).unwrap();
    // N6.12
    config.check().unwrap();
    let (model, limit) = config.models.iter().find_map(|(n, it)| Some((n, it.wait_for_workers?))).unwrap();
    assert!(spec["cooldownPeriod"].as_u64().unwrap() > limit.as_secs(), "the pool ends before it serves");
    assert_eq!(spec["minReplicaCount"], 0);
    for trigger in spec["triggers"].as_array().unwrap() {
        let query = trigger["metadata"]["query"].as_str().unwrap();
        let (_, name) = query.split_once("pointsman_").unwrap();
        let name = format!("pointsman_{}", name.split('{').next().unwrap());
        // N6.12
        assert!(known.contains(&name), "{name} is not a metric of the gateway");
        assert!(query.contains(&format!("model=\"{model}\"")), "{query}");
        assert!(trigger["metadata"]["threshold"].is_string(), "KEDA takes texts");
    }
}

#[test]
fn n6_autoscalers_use_metrics_that_exist() {
    let known = metrics();
    let (custom, external) = (offered("custom", &known), offered("external", &known));
    let mut used = BTreeSet::new();
    for name in strings(&yaml("components/autoscaling/kustomization.yaml")["resources"]) {
        let scaler = yaml(&format!("components/autoscaling/{name}"));
        for metric in scaler["spec"]["metrics"].as_array().unwrap() {
            let (kind, offered) = match metric["type"].as_str().unwrap() {
                "Pods" => ("pods", &custom),
                "External" => ("external", &external),
                _ => continue,
            };
            let name = metric[kind]["metric"]["name"].as_str().unwrap().to_owned();
            // N6.5
            assert!(offered.contains(&name), "no rule of the adapter offers {name}");
            used.insert(name);
        }
    }
    let all: BTreeSet<_> = custom.union(&external).cloned().collect();
    assert_eq!(used, all, "a rule is not used");
}

#[test]
fn n6_the_rules_of_the_operator_are_those_of_prometheus() {
    let alerts = fs::read_to_string(root().join("deploy/helm/pointsman/files/alerts.yaml")).unwrap();
    let (_comment, groups) = alerts.split_once('\n').unwrap();
    let indented =
        groups.lines().map(|line| if line.is_empty() { "\n".to_owned() } else { format!("  {line}\n") });
    let text: String = RULES_HEAD.to_owned() + &indented.collect::<String>();
    let name = "components/monitoring/prometheus-rule.yaml";
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(files().join(name), &text).unwrap();
    }
    // N6.6
    assert_eq!(read(name), text, "the rules are stale: their head says how to write them");
    let alerts: Value = serde_yaml_ng::from_str(&alerts).unwrap();
    assert_eq!(yaml(name)["spec"], alerts);
}

#[test]
fn the_built_in_policies_fit_into_a_config_map_together() {
    use pointsman_embedded_policies as policies;
    let all = [
        policies::LEAST_LOADED,
        policies::KV_AWARE,
        policies::PREDICTED_LATENCY,
        policies::QUEUE_KV_PREFIX,
        policies::CACHE_AWARE,
        policies::LONGEST_PREFIX,
        policies::CONDITIONAL_DISAGG,
    ];
    let bytes: usize = all.iter().map(|policy| policy.len()).sum();
    println!("{} policies: {bytes} bytes, largest {}", all.len(), all.iter().map(|p| p.len()).max().unwrap());
    assert!(bytes < CONFIG_MAP_BYTES, "{bytes}");
}
