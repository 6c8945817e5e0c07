//! Whether the objects of one overlay fit each other: selectors, ports, volumes, roles, security.

use serde_json::{Map, Value, json};

/// Secrets that the operator makes.
const SUPPLIED: [&str; 2] = ["pointsman-admin", "pointsman-picker"];
/// Largest sum of the values of a ConfigMap, bytes.
const CONFIG_MAP_BYTES: usize = 1 << 20;

/// Kind and name of an object.
pub(super) fn name(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    format!("{}/{}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

/// What does not fit, in sentences.
pub(super) fn problems(objects: &[Value]) -> Vec<String> {
    let all = All { objects };
    let mut found = Vec::new();
    let Some(gateway) = all.of("Deployment").next() else { return vec!["there is no Deployment".to_owned()] };
    let pod = &gateway["spec"]["template"];
    for object in objects {
        let problems = match object["kind"].as_str().unwrap_or_default() {
            "Deployment" => all.deployment(object),
            "Service" | "PodDisruptionBudget" | "NetworkPolicy" => selects(object, pod),
            "ServiceMonitor" => all.service_monitor(object),
            "PodMonitor" => pod_monitor(object, pod),
            "InferencePool" => all.pool(object),
            "RoleBinding" => all.role_binding(object),
            "HorizontalPodAutoscaler" => all.autoscaler(object),
            "ConfigMap" => config_map(object),
            _ => Vec::new(),
        };
        found.extend(problems.into_iter().map(|problem| format!("{}: {problem}", name(object))));
        if object["metadata"]["namespace"] != gateway["metadata"]["namespace"] {
            found.push(format!("{}: the namespace is not that of the Deployment", name(object)));
        }
    }
    found
}

struct All<'a> {
    objects: &'a [Value],
}

impl<'a> All<'a> {
    fn of(&self, kind: &'static str) -> impl Iterator<Item = &'a Value> {
        self.objects.iter().filter(move |object| object["kind"] == kind)
    }

    fn find(&self, kind: &'static str, name: &Value) -> Option<&'a Value> {
        self.of(kind).find(|object| object["metadata"]["name"] == *name)
    }

    fn deployment(&self, deployment: &Value) -> Vec<String> {
        let pod = &deployment["spec"]["template"];
        let mut problems = unless(
            matches(&deployment["spec"]["selector"]["matchLabels"], &pod["metadata"]["labels"]),
            "the selector does not match the pods",
        );
        let account = &pod["spec"]["serviceAccountName"];
        problems
            .extend(unless(self.find("ServiceAccount", account).is_some(), "the service account is missing"));
        for constraint in list(&pod["spec"]["topologySpreadConstraints"]) {
            let labels = &constraint["labelSelector"]["matchLabels"];
            problems.extend(unless(
                matches(labels, &pod["metadata"]["labels"]),
                "a spread constraint does not match the pods",
            ));
        }
        let security = &pod["spec"]["securityContext"];
        let secure =
            security["runAsNonRoot"] == true && security["seccompProfile"]["type"] == "RuntimeDefault";
        problems.extend(unless(secure, "the pod is not restricted"));
        let containers: Vec<&Value> =
            ["initContainers", "containers"].iter().flat_map(|kind| list(&pod["spec"][kind])).collect();
        for volume in list(&pod["spec"]["volumes"]) {
            problems.extend(self.volume(volume));
            let mounts = containers.iter().flat_map(|container| list(&container["volumeMounts"]));
            let used = mounts.into_iter().any(|mount| mount["name"] == volume["name"]);
            problems.extend(unless(used, &format!("no container mounts the volume {}", volume["name"])));
        }
        for container in containers {
            problems.extend(check_container(container, &pod["spec"]["volumes"]));
        }
        problems
    }

    fn volume(&self, volume: &Value) -> Vec<String> {
        let mut problems = unless(
            volume.as_object().is_some_and(|keys| keys.len() == 2),
            &format!("the volume {} does not have exactly one source", volume["name"]),
        );
        for (source, key, kind) in [("configMap", "name", "ConfigMap"), ("secret", "secretName", "Secret")] {
            let source = &volume[source];
            let name = &source[key];
            let known = source.is_null()
                || source["optional"] == true
                || self.find(kind, name).is_some()
                || SUPPLIED.iter().any(|supplied| name == supplied);
            problems.extend(unless(known, &format!("the {kind} {name} is missing")));
        }
        problems
    }

    fn service_monitor(&self, monitor: &Value) -> Vec<String> {
        let wanted = &monitor["spec"]["selector"]["matchLabels"];
        let selected: Vec<&Value> =
            self.of("Service").filter(|service| matches(wanted, &service["metadata"]["labels"])).collect();
        let [service] = selected[..] else { return vec![format!("it selects {} services", selected.len())] };
        let label = monitor["spec"]["jobLabel"].as_str().unwrap_or_default();
        let mut problems = unless(
            service["metadata"]["labels"][label] == "pointsman",
            "the alert rules expect the job pointsman",
        );
        for endpoint in list(&monitor["spec"]["endpoints"]) {
            let known = list(&service["spec"]["ports"]).iter().any(|port| port["name"] == endpoint["port"]);
            problems.extend(unless(known, &format!("the service has no port {}", endpoint["port"])));
        }
        problems
    }

    fn pool(&self, pool: &Value) -> Vec<String> {
        let picker = &pool["spec"]["endpointPickerRef"];
        let Some(service) = self.find("Service", &picker["name"]) else {
            return vec!["the service of the picker is missing".to_owned()];
        };
        let known =
            list(&service["spec"]["ports"]).iter().any(|port| port["port"] == picker["port"]["number"]);
        unless(known, "the service of the picker does not have the port")
    }

    fn role_binding(&self, binding: &Value) -> Vec<String> {
        let role = self.find("Role", &binding["roleRef"]["name"]).is_some();
        let mut problems = unless(role, "the role is missing");
        for subject in list(&binding["subjects"]) {
            let account = self.find("ServiceAccount", &subject["name"]);
            let known =
                account.is_some_and(|account| account["metadata"]["namespace"] == subject["namespace"]);
            problems.extend(unless(known, "the service account is missing"));
        }
        problems
    }

    fn autoscaler(&self, scaler: &Value) -> Vec<String> {
        // Deployments of engines are the operator's.
        let target = self.find("Deployment", &scaler["spec"]["scaleTargetRef"]["name"]);
        let free = target.is_none_or(|target| target["spec"]["replicas"].is_null());
        unless(free, "the Deployment has a number of replicas, which each `apply` restores")
    }
}

/// Selectors match the gateways' pods, and ports are those of their containers.
fn selects(object: &Value, pod: &Value) -> Vec<String> {
    let spec = &object["spec"];
    let wanted = match object["kind"].as_str() {
        Some("Service") => &spec["selector"],
        Some("NetworkPolicy") => &spec["podSelector"]["matchLabels"],
        _ => &spec["selector"]["matchLabels"],
    };
    // An empty selector would mean all pods of the namespace.
    let mut problems =
        unless(matches(wanted, &pod["metadata"]["labels"]), "the selector does not match the pods");
    let own: Vec<&Value> = list(&pod["spec"]["containers"])
        .into_iter()
        .flat_map(|container| list(&container["ports"]))
        .collect();
    let targets = list(&spec["ports"]).into_iter().map(|port| &port["targetPort"]);
    let opened =
        list(&spec["ingress"]).into_iter().flat_map(|rule| list(&rule["ports"])).map(|port| &port["port"]);
    for port in targets.chain(opened) {
        // A number may be that of a component that is not used here.
        let known = port.is_number() || own.iter().any(|other| other["name"] == *port);
        problems.extend(unless(known, &format!("no container has the port {port}")));
    }
    problems
}

/// The monitor selects the gateways' pods, and ports are those of their containers.
fn pod_monitor(monitor: &Value, pod: &Value) -> Vec<String> {
    let labels = &pod["metadata"]["labels"];
    let mut problems = unless(
        matches(&monitor["spec"]["selector"]["matchLabels"], labels),
        "the selector does not match the pods",
    );
    let label = monitor["spec"]["jobLabel"].as_str().unwrap_or_default();
    problems.extend(unless(labels[label] == "pointsman", "the alert rules expect the job pointsman"));
    let ports = list(&pod["spec"]["containers"]).into_iter().flat_map(|container| list(&container["ports"]));
    let ports: Vec<&Value> = ports.map(|port| &port["name"]).collect();
    for endpoint in list(&monitor["spec"]["podMetricsEndpoints"]) {
        let known = ports.contains(&&endpoint["port"]);
        problems.extend(unless(known, &format!("no container has the port {}", endpoint["port"])));
    }
    problems
}

fn config_map(object: &Value) -> Vec<String> {
    let sizes = |key: &str| -> usize {
        let values = object[key].as_object().map(Map::values).into_iter().flatten();
        values.filter_map(Value::as_str).map(str::len).sum()
    };
    // Base64 has four characters for three bytes.
    let bytes = sizes("data") + sizes("binaryData") / 4 * 3;
    unless(bytes <= CONFIG_MAP_BYTES, &format!("{bytes} bytes are more than the API server takes"))
}

fn check_container(container: &Value, volumes: &Value) -> Vec<String> {
    let security = &container["securityContext"];
    let secure = security["allowPrivilegeEscalation"] == false
        && security["readOnlyRootFilesystem"] == true
        && security["capabilities"] == json!({ "drop": ["ALL"] });
    let mut problems = unless(secure, &format!("the container {} is not restricted", container["name"]));
    for mount in list(&container["volumeMounts"]) {
        let known = list(volumes).iter().any(|volume| volume["name"] == mount["name"]);
        problems.extend(unless(known, &format!("the volume {} is missing", mount["name"])));
    }
    problems
}

/// Whether a selector that is not empty matches labels.
fn matches(selector: &Value, labels: &Value) -> bool {
    let wanted = selector.as_object().filter(|wanted| !wanted.is_empty());
    wanted.is_some_and(|wanted| wanted.iter().all(|(key, value)| labels[key] == *value))
}

fn list(value: &Value) -> Vec<&Value> {
    value.as_array().map_or_else(Vec::new, |list| list.iter().collect())
}

fn unless(fits: bool, problem: &str) -> Vec<String> {
    if fits { Vec::new() } else { vec![problem.to_owned()] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects() -> Vec<Value> {
        let labels = json!({ "app": "pointsman" });
        let pod = json!({
            "serviceAccountName": "a",
            "securityContext": { "runAsNonRoot": true, "seccompProfile": { "type": "RuntimeDefault" } },
            "containers": [{
                "name": "pointsman",
                "ports": [{ "name": "http", "containerPort": 8080 }],
                "volumeMounts": [{ "name": "config" }],
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": { "drop": ["ALL"] },
                },
            }],
            "volumes": [{ "name": "config", "configMap": { "name": "c" } }],
        });
        vec![
            json!({
                "kind": "Deployment",
                "metadata": { "name": "d" },
                "spec": {
                    "selector": { "matchLabels": labels },
                    "template": { "metadata": { "labels": labels }, "spec": pod },
                },
            }),
            json!({ "kind": "ServiceAccount", "metadata": { "name": "a" } }),
            json!({ "kind": "ConfigMap", "metadata": { "name": "c" }, "data": { "k": "v" } }),
            json!({
                "kind": "Service",
                "metadata": { "name": "s" },
                "spec": { "selector": labels, "ports": [{ "targetPort": "http" }] },
            }),
            json!({
                "kind": "PodDisruptionBudget",
                "metadata": { "name": "p" },
                "spec": { "selector": { "matchLabels": labels } },
            }),
            json!({
                "kind": "PodMonitor",
                "metadata": { "name": "m" },
                "spec": {
                    "jobLabel": "app",
                    "selector": { "matchLabels": labels },
                    "podMetricsEndpoints": [{ "port": "http" }],
                },
            }),
        ]
    }

    #[test]
    fn objects_that_fit_have_no_problem_and_each_change_has_one() {
        assert_eq!(problems(&objects()), Vec::<String>::new());
        let changes = [
            (0, "/spec/template/metadata/labels/app", json!("other"), "does not match the pods"),
            (0, "/spec/template/spec/volumes/0/configMap/name", json!("x"), "the ConfigMap \"x\" is missing"),
            (0, "/spec/template/spec/volumes/0/name", json!("x"), "no container mounts the volume"),
            (0, "/spec/template/spec/containers/0/securityContext", json!({}), "is not restricted"),
            (1, "/metadata/name", json!("b"), "the service account is missing"),
            (2, "/data/k", json!("v".repeat((1 << 20) + 1)), "more than the API server takes"),
            (3, "/spec/ports/0/targetPort", json!("grpc"), "no container has the port"),
            (4, "/spec/selector", json!({}), "does not match the pods"),
            (4, "/metadata", json!({ "name": "p", "namespace": "n" }), "the namespace is not"),
            (5, "/spec/selector", json!({}), "does not match the pods"),
            (5, "/spec/jobLabel", json!("name"), "expect the job pointsman"),
            (5, "/spec/podMetricsEndpoints/0/port", json!("admin"), "no container has the port"),
        ];
        for (index, path, value, expected) in changes {
            let mut changed = objects();
            *changed[index].pointer_mut(path).unwrap() = value;
            let found = problems(&changed).join("\n");
            assert!(found.contains(expected), "{path}: {found}");
        }
    }
}
