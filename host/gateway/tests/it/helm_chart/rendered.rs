//! Tests of the rendered chart, with the real `helm`.

use super::*;

/// Flags that tell `helm template` that the cluster has both custom resources.
pub(super) const CUSTOM_RESOURCES: [&str; 2] =
    ["--api-versions=monitoring.coreos.com/v1", "--api-versions=inference.networking.k8s.io/v1"];

/// Each overlay, the values that give the same, and the objects that only the overlay has.
const OVERLAYS: [(&str, &[&str], &[&str]); 5] = [
    ("base", &[], &[]),
    (
        "overlays/complete",
        &["monitoring.enabled=true", "autoscaling.enabled=true", "networkPolicy.enabled=true"],
        // The operator's own, and a policy for a listener that is closed.
        &[
            "ConfigMap/pointsman-policies",
            "HorizontalPodAutoscaler/vllm-decode",
            "HorizontalPodAutoscaler/vllm-prefill",
            "NetworkPolicy/pointsman-picker",
        ],
    ),
    (
        "overlays/envoy",
        &["monitoring.enabled=true", "endpointPicker.enabled=true", "networkPolicy.enabled=true"],
        &[],
    ),
    (
        "overlays/policies-image",
        &["policies.source=image", "policies.image.reference=registry.example/policies:1.0.0"],
        &[],
    ),
    (
        "overlays/policies-oci",
        &[
            "policies.source=registry",
            "policies.registry.artifacts[0].file=prefill.wasm",
            "policies.registry.artifacts[0].reference=registry.example/policies/prefill:1.0.0",
        ],
        &[],
    ),
];

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn n6_the_chart_gives_the_objects_of_the_kustomize_files_for_equal_values() {
    let (Some(helm), Some(kubectl)) = (Helm::installed(), program("kubectl")) else { return };
    let dir = tempfile::tempdir().unwrap();
    copy(&root().join("deploy/kubernetes"), dir.path());
    let policy = root().join("tests/fixtures/guests/selector-0.1.0.wasm");
    fs::copy(policy, dir.path().join("overlays/complete/prefill.wasm")).unwrap();
    for (overlay, values, operators) in OVERLAYS {
        let ran = Command::new(&kubectl).arg("kustomize").arg(dir.path().join(overlay)).output().unwrap();
        assert!(ran.status.success(), "{overlay}: {}", String::from_utf8_lossy(&ran.stderr));
        let mut kustomize = objects(&String::from_utf8(ran.stdout).unwrap());
        for name in operators {
            assert!(kustomize.remove(*name).is_some(), "{overlay} has no {name}");
        }
        let chart = objects(&helm.template(&[values, CUSTOM_RESOURCES.as_slice()].concat()).unwrap());
        // N6.8
        assert_eq!(chart.keys().collect::<Vec<_>>(), kustomize.keys().collect::<Vec<_>>(), "{overlay}");
        for (name, object) in chart {
            // N6.8
            assert_eq!(object, kustomize[&name], "{overlay}: {name}");
        }
    }
}

#[test]
fn n6_helm_finds_nothing_to_complain_about_in_the_chart() {
    let Some(helm) = Helm::installed() else { return };
    let ran = helm.run(&["lint", "--strict", "--quiet", chart().to_str().unwrap()]);
    let text = String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap();
    // N6.9
    assert!(ran.status.success() && !text.contains("[WARNING]") && !text.contains("[ERROR]"), "{text}");
}

/// Values that the chart refuses, each with a part of the sentence.
pub(super) type Refused<'a> = &'a [(&'a [&'a str], &'a str)];

pub(super) fn are_refused(helm: &Helm, cases: Refused<'_>) {
    for (values, sentence) in cases {
        let refused = helm.template(values).err().unwrap_or_default();
        // N6.9
        assert!(refused.contains(sentence), "{values:?}: {refused}");
    }
}

#[test]
fn n6_values_that_are_unknown_or_cannot_work_are_refused_with_a_sentence() {
    let Some(helm) = Helm::installed() else { return };
    let picker = ["endpointPicker.enabled=true", CUSTOM_RESOURCES[1]];
    let policy = "networkPolicy.enabled=true";
    let cases: Refused<'_> = &[
        (&["replcaCount=3"], "additional properties 'replcaCount' not allowed"),
        (&["image.tg=1"], "additional properties 'tg' not allowed"),
        (&["replicaCount=0"], "got 0, want 1"),
        (&["--kube-version=1.29.0"], "requires kubeVersion: >=1.30.0-0"),
        (&["monitoring.enabled=true"], "needs the custom resources of the Prometheus Operator"),
        (
            &["monitoring.enabled=true", "monitoring.podMonitor.enabled=true", CUSTOM_RESOURCES[0]],
            "would be scraped twice: disable one",
        ),
        (
            &["endpointPicker.enabled=true"],
            "needs the custom resources of the Gateway API Inference Extension",
        ),
        (
            &[picker[0], picker[1], "engines.discovery.selector=app=vllm"],
            "select different pods: the pool says nothing of \"app=vllm\"",
        ),
        (
            &["config.policies.slots.prefill.shared_state=true"],
            "shared_state needs config.replicas.servers: 2 gateways would count alone",
        ),
        (
            &["--set-json=networkPolicy.adminFrom=[]"],
            "at '/networkPolicy/adminFrom': minItems: got 0, want 1",
        ),
        (
            &[policy, "config.replicas.servers={tls://u:p@nats}"],
            "networkPolicy.enabled cuts the gateways off from config.replicas.servers (tls://nats)",
        ),
        (
            &[policy, "config.traces.endpoint=http://otlp:4318/v1/traces"],
            "traces.endpoint (http://otlp:4318)",
        ),
        (&[policy, "config.auth.jwt.jwks_url=https://[fd00::1]:8443/a"], "jwks_url (https://[fd00::1]:8443)"),
        (
            &[policy, "config.discovery.etcd[0].endpoints={http://e}"],
            "discovery.etcd[0].endpoints (http://e)",
        ),
        (
            &[policy, "--set=configToml=[traces]\nendpoint = 'http://a'"],
            "configToml: traces.endpoint (http://a)",
        ),
        (&["config.replicas.name=a"], "config.replicas.name gives 2 gateways one name"),
        (&["config.server.listen=0.0.0.0:80"], "config.server.listen is written by the chart (0.0.0.0:8080)"),
        (
            &["--set-json=config.workers=[{\"url\":\"http://a:1\",\"id\":12345678901234567}]"],
            "Helm has rounded a whole number to 12345678901234568",
        ),
        (
            &["--set-json=engines.discovery.defaults.labels={}"],
            "got object, want boolean or number or string",
        ),
        (&["autoscaling.enabled=true"], "targetInflightRequests needs monitoring.enabled"),
        (&["autoscaling.enabled=true", "autoscaling.minReplicas=11"], "minReplicas 11 is above"),
    ];
    are_refused(&helm, cases);
}

#[test]
fn n6_names_of_digits_are_texts() {
    let Some(helm) = Helm::installed() else { return };
    let all = [
        "--namespace=20261130",
        "--set-string=priorityClassName=1234",
        "monitoring.enabled=true",
        "autoscaling.enabled=true",
        "networkPolicy.enabled=true",
        "endpointPicker.enabled=true",
    ];
    let text = helm.template_of("2026", &[&all[..], &CUSTOM_RESOURCES].concat()).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text).map(|one| Value::deserialize(one).unwrap());
    for object in documents.filter(|object| !object.is_null()) {
        let meta = &object["metadata"];
        let names = (&meta["namespace"], &meta["labels"]["app.kubernetes.io/instance"]);
        // N6.14
        assert_eq!(names, (&Value::from("20261130"), &Value::from("2026")), "{object}");
    }
    let pod = &objects(&text)["Deployment/2026-pointsman"]["spec"]["template"]["spec"];
    // N6.14
    assert_eq!(pod["priorityClassName"], "1234");
}

#[test]
fn n6_labels_and_annotations_of_the_chart_are_refused_with_a_sentence() {
    let Some(helm) = Helm::installed() else { return };
    let cases: Refused<'_> = &[
        (
            &[r"podLabels.app\.kubernetes\.io/name=x"],
            "podLabels has \"app.kubernetes.io/name\", which the chart sets: remove it",
        ),
        (
            &["podAnnotations.checksum/config=x", "restartOnConfigChange=true"],
            "podAnnotations has \"checksum/c",
        ),
        (&[r"monitoring.labels.helm\.sh/chart=x"], "monitoring.labels has \"helm.sh/chart\""),
    ];
    are_refused(&helm, cases);
}

#[test]
fn n6_servers_that_the_network_policy_may_reach_are_not_refused() {
    let Some(helm) = Helm::installed() else { return };
    let policy = "networkPolicy.enabled=true";
    let (otlp, engines) = ("config.traces.endpoint=http://otlp:4318", "--set-json=networkPolicy.engines");
    for values in [
        &[policy, "config.auth.jwt.jwks_url=https://[fd00::1]/a"][..],
        &[policy, "config.traces.endpoint=http://127.0.0.1:4318"],
        &[policy, otlp, &format!(r#"{engines}=[{{"namespaceSelector":{{}}}}]"#)],
        &[policy, otlp, &format!(r#"{engines}=[{{"ipBlock":{{"cidr":"10.0.0.0/8"}}}}]"#)],
    ] {
        // N6.9
        assert_eq!(helm.template(values).err(), None, "{values:?}");
    }
    let other = [policy, "config.traces.endpoint=http://127.0.0.1.example:4318"];
    // N6.9
    assert!(helm.template(&other).is_err(), "a name that begins as a loopback address");
}

#[test]
fn n6_sources_of_policies_that_cannot_work_are_refused_with_a_sentence() {
    let Some(helm) = Helm::installed() else { return };
    let cases: Refused<'_> = &[
        (&["policies.source=git"], "'configMap', 'image', 'registry', 'persistentVolumeClaim'"),
        (&["policies.source=image"], "policies.image.reference is empty"),
        (
            &["policies.source=image", "policies.image.reference=a", "--kube-version=1.30.0"],
            "Kubernetes v1.30.0 has no image volumes",
        ),
        (&["policies.source=registry"], "policies.registry.artifacts is empty"),
        (
            &[
                "policies.source=registry",
                "policies.registry.artifacts[0].file=a.b.wasm",
                "policies.registry.artifacts[0].reference=r",
                "policies.registry.artifacts[1].file=a_b.wasm",
                "policies.registry.artifacts[1].reference=r",
            ],
            "the files a.b.wasm and a_b.wasm give the init containers one name, pull-a-b: rename one",
        ),
        (&["policies.source=persistentVolumeClaim"], "claimName is empty"),
    ];
    are_refused(&helm, cases);
}

#[test]
fn n6_secrets_in_the_configuration_are_refused_with_a_sentence() {
    let Some(helm) = Helm::installed() else { return };
    let cases: Refused<'_> = &[
        (&["config.server.admin_token=x"], "put it in a Secret and name it in `env`"),
        (
            &["config.server.admin_token=x", "monitoring.enabled=true", CUSTOM_RESOURCES[0]],
            "config.server.admin_token and monitoring.enabled give the gateway two tokens",
        ),
        (&["config.routing.hash_salt=x"], "config.routing.hash_salt is a secret"),
        (&["config.workers[0].api_key=x"], "config.workers[0].api_key is a secret"),
        (&["--set=configToml=[decisions]\nlog_salt = 'x'"], "configToml: decisions.log_salt is a secret"),
    ];
    are_refused(&helm, cases);
}

#[test]
fn n6_the_same_keys_are_welcome_where_they_fit() {
    let Some(helm) = Helm::installed() else { return };
    let picker = ["endpointPicker.enabled=true", CUSTOM_RESOURCES[1]];
    let fits: [&[&str]; 6] = [
        &["podAnnotations.checksum/config=x"],
        &[r"podLabels.helm\.sh/chart=x"],
        &["config.server.admin_token.env=TOKEN"],
        &["config.replicas.name=a", "replicaCount=1"],
        &["config.policies.slots.prefill.shared_state=true", "config.replicas.servers={nats://nats:4222}"],
        &[
            picker[0],
            picker[1],
            "engines.discovery.selector=app=vllm",
            "endpointPicker.inferencePool.matchLabels.app=vllm",
        ],
    ];
    for values in fits {
        // N6.9
        assert!(helm.template(values).is_ok(), "{values:?}");
    }
}

/// Values with every type of TOML. Whole numbers of YAML are floats for Helm, and large ones have an
/// exponent. The gateway takes neither.
const VALUES: &str = r#"
config:
  index: { byte_budget: 9007199254740991 }
  routing: { cost: { temperature: 1, overlap_score_credit: 0.25 } }
  tenants: { "*": { weight: 2.0, models: { "org/model.1": { concurrency: 8 } } } }
  traces: { headers: { authorization: "Bearer \"a\\b\" <é>" } }
  replicas: { servers: ["nats://a:4222", "nats://b:4222"] }
  policies: { pins: {}, trusted_keys: [] }
  discovery:
    max_workers: 8192
    kubernetes: [{ name: more, namespace: other, selector: app=sglang, port: "8000,8001" }]
  workers:
    - { url: "http://10.0.0.1:8000", role: decode, engine: vllm, labels: { zone: a } }
engines: { discovery: { port: 8000, resource: endpoint-slices, scheme: https, defaults: { engine: vllm, dp_size: 2 } } }
"#;
/// The same keys in TOML, with what the chart adds.
const TOML: &str = r#"
[server]
listen = "0.0.0.0:8080"
admin_listen = "127.0.0.1:9090"
threads = 2
[policies]
dir = "/etc/pointsman/policies.d"
compile_cache = "/var/cache/pointsman"
[timeouts]
drain = "2m"
[queue]
limit = 1000
[routing]
busy = { prefill = { engine_queue = 16 }, decode = { engine_queue = 16 }, aggregated = { engine_queue = 16 } }
cost = { temperature = 1.0, overlap_score_credit = 0.25 }
[index]
byte_budget = 9007199254740991
[tenants."*"]
weight = 2.0
models = { "org/model.1" = { concurrency = 8 } }
[traces]
headers = { authorization = 'Bearer "a\b" <é>' }
[replicas]
servers = ["nats://a:4222", "nats://b:4222"]
[discovery]
max_workers = 8192
[[discovery.kubernetes]]
name = "engines"
namespace = "serving"
selector = "pointsman.dev/engine"
port = "8000"
resource = "endpoint-slices"
scheme = "https"
defaults = { engine = "vllm", dp_size = "2" }
[[discovery.kubernetes]]
name = "more"
namespace = "other"
selector = "app=sglang"
port = "8000,8001"
[[workers]]
url = "http://10.0.0.1:8000"
role = "decode"
engine = "vllm"
labels = { zone = "a" }
"#;

#[test]
fn n6_the_configuration_of_values_is_that_of_the_same_keys_in_toml() {
    let Some(helm) = Helm::installed() else { return };
    let dir = tempfile::tempdir().unwrap();
    let values = dir.path().join("values.yaml");
    fs::write(&values, VALUES).unwrap();
    let chart = objects(&helm.template(&[&format!("--values={}", values.display())]).unwrap());
    // N6.10
    assert_eq!(chart["ConfigMap/pointsman"]["data"]["pointsman.toml"], configuration(TOML));
    let rules = &chart["Role/pointsman"]["rules"];
    // N6.10
    assert_eq!(
        rules,
        &serde_json::json!([{
            "apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"],
        }])
    );

    fs::write(&values, TOML).unwrap();
    let chart = objects(&helm.template(&[&format!("--set-file=configToml={}", values.display())]).unwrap());
    // N6.10
    assert_eq!(chart["ConfigMap/pointsman"]["data"]["pointsman.toml"], configuration(TOML));
}

#[test]
fn n6_a_pod_of_the_chart_gets_longer_to_end_than_its_drain_takes() {
    let Some(helm) = Helm::installed() else { return };
    let text =
        helm.template(&["drainSeconds=3600", "preStopSeconds=20", "restartOnConfigChange=true"]).unwrap();
    let chart = objects(&text);
    let pod = &chart["Deployment/pointsman"]["spec"]["template"];
    let drain = &chart["ConfigMap/pointsman"]["data"]["pointsman.toml"]["timeouts"]["drain"];
    assert_eq!(drain, "1h");
    // N6.4
    assert!(pod["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap() > 3600 + 20 + 5);
    assert_eq!(pod["metadata"]["annotations"]["checksum/config"].as_str().unwrap().len(), 64);
}

/// Kubernetes before 1.33 refuses a sleep of 0 s.
#[test]
fn n6_a_pod_without_time_before_its_drain_has_no_hook() {
    let Some(helm) = Helm::installed() else { return };
    let hook = |values: &[&str]| {
        let chart = objects(&helm.template(values).unwrap());
        chart["Deployment/pointsman"]["spec"]["template"]["spec"]["containers"][0]["lifecycle"].clone()
    };
    // N6.13
    assert_eq!(hook(&["preStopSeconds=0"]), Value::Null);
    assert_eq!(hook(&[])["preStop"]["sleep"]["seconds"], 5);
}

#[test]
fn n6_two_releases_in_one_namespace_have_different_names_and_selectors() {
    let Some(helm) = Helm::installed() else { return };
    let values =
        [CUSTOM_RESOURCES[0], CUSTOM_RESOURCES[1], "monitoring.enabled=true", "endpointPicker.enabled=true"];
    let text = helm.template_of("blue", &values).unwrap();
    assert!(text.contains("app.kubernetes.io/instance: \"blue\""), "{text}");
    let all = objects(&text);
    // N6.9
    assert!(all.keys().all(|name| name.contains("/blue-pointsman")), "{:?}", all.keys());
}

#[test]
fn n6_helm_tells_what_to_do_after_the_installation() {
    let Some(helm) = Helm::installed() else { return };
    let chart = chart();
    let mut arguments = vec!["install", "pointsman", chart.to_str().unwrap(), "--namespace=serving"];
    arguments.extend([
        "--dry-run=client",
        "--set=endpointPicker.enabled=true",
        "--set=monitoring.enabled=true",
    ]);
    // A dry run on the client's side knows no custom resources.
    arguments.extend(["--set=endpointPicker.inferencePool.create=false"]);
    let off = ["serviceMonitor", "prometheusRule"].map(|one| format!("--set=monitoring.{one}.enabled=false"));
    arguments.extend(off.iter().map(String::as_str));
    let ran = helm.run(&arguments);
    let text = String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap();
    let notes = text.split("NOTES:").nth(1).unwrap_or_else(|| panic!("{text}"));
    let wanted = [
        "image.repository is still registry.example/pointsman",
        "create secret generic pointsman-admin",
        "Reads of the admin listener need no token",
        "create secret tls pointsman-picker",
        "--namespace serving rollout status deployment/pointsman",
        "port-forward service/pointsman 8080:80",
        "create configmap pointsman-policies --from-file=prefill.wasm",
    ];
    for one in wanted {
        // N6.9
        assert!(notes.contains(one), "{one}: {notes}");
    }
}
