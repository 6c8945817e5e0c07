"""Renders and checks the Kubernetes files; see check.sh, which installs what this needs.

Built-in kinds are validated against the schemas that the package kubernetes-validate ships, custom resources against
those of deploy/schemas, whose files name their sources. Prints a row for each overlay or set of values and release.
"""

import copy
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jsonschema
import kubernetes_validate
import yaml

DEPLOY = pathlib.Path(__file__).parent
NEWEST = "1.37"
# The oldest release that has every field of the files: `preStop.sleep` is on by default since it.
OLDEST = "1.30"
# The oldest release with image volumes.
OLDEST_IMAGE_VOLUMES = "1.31"
# Takes the place of a policy that an operator copies there.
POLICY = DEPLOY / "../tests/fixtures/guests/selector-0.1.0.wasm"
# Secrets that the operator makes.
SUPPLIED = {"pointsman-admin", "pointsman-picker"}
# Largest sum of the values of a ConfigMap that the API server takes.
CONFIG_MAP_BYTES = 1 << 20
# Sets of values for the chart. `chart-other` has what no overlay of the Kustomize files has.
VALUES = {
    "chart": "",
    "chart-complete": "monitoring.enabled=true autoscaling.enabled=true networkPolicy.enabled=true",
    "chart-envoy": "monitoring.enabled=true endpointPicker.enabled=true networkPolicy.enabled=true",
    "chart-policies-image": "policies.source=image policies.image.reference=registry.example/policies:1",
    "chart-policies-registry": """policies.source=registry policies.registry.artifacts[0].file=prefill.wasm
        policies.registry.artifacts[0].reference=registry.example/policies/prefill:1
        policies.registry.artifacts[1].file=decode-override.wasm
        policies.registry.artifacts[1].reference=registry.example/policies/decode-override:1""",
    "chart-other": """replicaCount=1 image.digest=sha256:%s image.pullPolicy=Always imagePullSecrets[0].name=registry
        podAnnotations.a=b podLabels.a=b nodeSelector.a=b tolerations[0].operator=Exists
        affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey=a
        priorityClassName=high service.type=LoadBalancer service.annotations.a=b
        podDisruptionBudget.maxUnavailable=25%% engines.discovery.resource=endpoint-slices restartOnConfigChange=true
        policies.source=persistentVolumeClaim policies.persistentVolumeClaim.claimName=policies
        monitoring.enabled=true monitoring.labels.release=prometheus monitoring.serviceMonitor.enabled=false
        monitoring.podMonitor.enabled=true networkPolicy.enabled=true
        networkPolicy.clientsFrom[0].podSelector.matchLabels.a=b networkPolicy.extraEgress[0].ports[0].port=4222
        env[0].name=POINTSMAN__ROUTING__HASH_SALT env[0].valueFrom.secretKeyRef.name=salt
        env[0].valueFrom.secretKeyRef.key=salt extraVolumes[0].name=models
        extraVolumes[0].persistentVolumeClaim.claimName=models extraVolumeMounts[0].name=models
        extraVolumeMounts[0].mountPath=/models""" % ("0" * 64),
}


def strict(schema):
    """Forbids fields that a schema does not name, as the API server reports them with strict validation."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    open_ended = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_ended:
        closed["additionalProperties"] = False
    return closed


def custom_resources():
    found = {}
    for path in (DEPLOY / "schemas").glob("*.json"):
        crd = json.loads(path.read_text())
        for version, schema in crd["versions"].items():
            found[(f"{crd['group']}/{version}", crd["kind"])] = strict(schema)
    return found


def invalid(document, version, custom):
    schema = custom.get((document.get("apiVersion"), document.get("kind")))
    try:
        if schema is None:
            kubernetes_validate.validate(document, version, strict=True)
        else:
            jsonschema.Draft202012Validator(schema).validate(document)
    except jsonschema.ValidationError as error:
        return [f"{'.'.join(str(part) for part in error.absolute_path)}: {error.message}"]
    except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.VersionNotSupportedError) as error:
        return [error.message]
    return []


def at(value, path):
    """The value at a path of keys, or None."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def items(value, path):
    return at(value, path) or []


def matches(selector, labels):
    """Whether a selector that is not empty matches. An empty one would mean every pod of the namespace."""
    return bool(selector) and all((labels or {}).get(key) == value for key, value in selector.items())


class Objects:
    """The objects of one rendering, and what does not fit between them."""

    def __init__(self, objects):
        self.objects = objects
        self.gateway = next((one for one in objects if one["kind"] == "Deployment"), None)
        self.pod = at(self.gateway, "spec.template")
        self.labels = at(self.pod, "metadata.labels")
        self.ports = [port for one in items(self.pod, "spec.containers") for port in items(one, "ports")]

    def find(self, kind, name):
        return next((one for one in self.objects if one["kind"] == kind and one["metadata"]["name"] == name), None)

    def problems(self):
        if self.gateway is None:
            return ["there is no Deployment"]
        checks = {
            "Deployment": self.deployment, "Service": self.selects, "PodDisruptionBudget": self.selects,
            "NetworkPolicy": self.selects, "ServiceMonitor": self.service_monitor, "PodMonitor": self.pod_monitor,
            "InferencePool": self.pool, "RoleBinding": self.role_binding, "HorizontalPodAutoscaler": self.autoscaler,
            "ConfigMap": self.config_map,
        }
        found = []
        for one in self.objects:
            rows = list(checks.get(one["kind"], lambda _: [])(one))
            same = at(one, "metadata.namespace") == at(self.gateway, "metadata.namespace")
            rows.append((same, "the namespace is not that of the Deployment"))
            found += [f"{one['kind']}/{one['metadata']['name']}: {text}" for fits, text in rows if not fits]
        return found

    def deployment(self, one):
        pod = one["spec"]["template"]
        spec, labels = pod["spec"], at(pod, "metadata.labels")
        yield matches(at(one, "spec.selector.matchLabels"), labels), "the selector does not match the pods"
        account = self.find("ServiceAccount", spec.get("serviceAccountName"))
        yield account is not None, "the service account is missing"
        for constraint in items(spec, "topologySpreadConstraints"):
            fits = matches(at(constraint, "labelSelector.matchLabels"), labels)
            yield fits, "a spread constraint does not match the pods"
        profile = at(spec, "securityContext.seccompProfile.type")
        restricted = at(spec, "securityContext.runAsNonRoot") is True and profile == "RuntimeDefault"
        yield restricted, "the pod is not restricted"
        containers = items(spec, "initContainers") + items(spec, "containers")
        mounted = {mount["name"] for one in containers for mount in items(one, "volumeMounts")}
        volumes = {volume["name"] for volume in items(spec, "volumes")}
        for volume in items(spec, "volumes"):
            name = volume["name"]
            yield len(volume) == 2, f"the volume {name} does not have exactly one source"
            for source, key, kind in [("configMap", "name", "ConfigMap"), ("secret", "secretName", "Secret")]:
                value = volume.get(source)
                known = value is None or value.get("optional") is True or value.get(key) in SUPPLIED
                found = known or self.find(kind, value.get(key)) is not None
                yield found, f"the {kind} {value and value.get(key)} is missing"
            yield name in mounted, f"no container mounts the volume {name}"
        for container in containers:
            security = container.get("securityContext") or {}
            limited = (
                security.get("allowPrivilegeEscalation") is False
                and security.get("readOnlyRootFilesystem") is True
                and security.get("capabilities") == {"drop": ["ALL"]}
            )
            yield limited, f"the container {container['name']} is not restricted"
            for mount in items(container, "volumeMounts"):
                yield mount["name"] in volumes, f"the volume {mount['name']} is missing"

    def selects(self, one):
        path = {"Service": "spec.selector", "NetworkPolicy": "spec.podSelector.matchLabels"}
        wanted = at(one, path.get(one["kind"], "spec.selector.matchLabels"))
        yield matches(wanted, self.labels), "the selector does not match the pods"
        targets = [port.get("targetPort") for port in items(one, "spec.ports")]
        opened = [port["port"] for rule in items(one, "spec.ingress") for port in items(rule, "ports")]
        for port in targets + opened:
            # A number may be that of a component that is not used here.
            known = isinstance(port, int) or any(other.get("name") == port for other in self.ports)
            yield known, f"no container has the port {port}"

    def service_monitor(self, one):
        wanted = at(one, "spec.selector.matchLabels")
        services = [other for other in self.objects if other["kind"] == "Service"]
        chosen = [other for other in services if matches(wanted, at(other, "metadata.labels"))]
        yield len(chosen) == 1, f"it selects {len(chosen)} services"
        for service in chosen:
            job = (at(service, "metadata.labels") or {}).get(at(one, "spec.jobLabel"))
            yield job == "pointsman", "the alert rules expect the job pointsman"
            names = [port.get("name") for port in items(service, "spec.ports")]
            for endpoint in items(one, "spec.endpoints"):
                yield endpoint["port"] in names, f"the service has no port {endpoint['port']}"

    def pod_monitor(self, one):
        fits = matches(at(one, "spec.selector.matchLabels"), self.labels)
        yield fits, "the selector does not match the pods"
        job = (self.labels or {}).get(at(one, "spec.jobLabel"))
        yield job == "pointsman", "the alert rules expect the job pointsman"
        for endpoint in items(one, "spec.podMetricsEndpoints"):
            known = any(port.get("name") == endpoint["port"] for port in self.ports)
            yield known, f"no container has the port {endpoint['port']}"

    def pool(self, one):
        service = self.find("Service", at(one, "spec.endpointPickerRef.name"))
        yield service is not None, "the service of the picker is missing"
        ports = [port.get("port") for port in items(service, "spec.ports")]
        yield at(one, "spec.endpointPickerRef.port.number") in ports, "the service of the picker lacks the port"

    def role_binding(self, one):
        yield self.find("Role", at(one, "roleRef.name")) is not None, "the role is missing"
        for subject in items(one, "subjects"):
            account = self.find("ServiceAccount", subject["name"])
            known = account is not None and at(account, "metadata.namespace") == subject.get("namespace")
            yield known, "the service account is missing"

    def autoscaler(self, one):
        # Deployments of engines are the operator's.
        target = self.find("Deployment", at(one, "spec.scaleTargetRef.name"))
        free = target is None or at(target, "spec.replicas") is None
        yield free, "the Deployment has a number of replicas, which each `apply` restores"

    def config_map(self, one):
        def size(key):
            return sum(len(value.encode()) for value in (one.get(key) or {}).values() if isinstance(value, str))

        # Base64 has four characters for three bytes.
        total = size("data") + size("binaryData") // 4 * 3
        yield total <= CONFIG_MAP_BYTES, f"{total} bytes are more than the API server takes"


def self_test():
    """Objects that fit have no problem, and each change of them has one."""
    objects = list(yaml.safe_load_all("""
kind: Deployment
metadata: {name: d}
spec:
  selector: {matchLabels: {app: pointsman}}
  template:
    metadata: {labels: {app: pointsman}}
    spec:
      serviceAccountName: a
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: pointsman
        ports: [{name: http, containerPort: 8080}]
        volumeMounts: [{name: config}]
        securityContext:
          {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      volumes: [{name: config, configMap: {name: c}}]
---
{kind: ServiceAccount, metadata: {name: a}}
---
{kind: ConfigMap, metadata: {name: c}, data: {k: v}}
---
{kind: Service, metadata: {name: s}, spec: {selector: {app: pointsman}, ports: [{targetPort: http}]}}
---
{kind: PodDisruptionBudget, metadata: {name: p}, spec: {selector: {matchLabels: {app: pointsman}}}}
---
kind: PodMonitor
metadata: {name: m}
spec: {jobLabel: app, selector: {matchLabels: {app: pointsman}}, podMetricsEndpoints: [{port: http}]}
"""))
    assert Objects(objects).problems() == [], Objects(objects).problems()
    for place, path, value, expected in [
        (0, "spec template metadata labels app", "other", "does not match the pods"),
        (0, "spec template spec volumes 0 configMap name", "x", "the ConfigMap x is missing"),
        (0, "spec template spec volumes 0 name", "x", "no container mounts the volume"),
        (0, "spec template spec containers 0 securityContext", {}, "is not restricted"),
        (1, "metadata name", "b", "the service account is missing"),
        (2, "data k", "v" * (CONFIG_MAP_BYTES + 1), "more than the API server takes"),
        (3, "spec ports 0 targetPort", "grpc", "no container has the port"),
        (4, "spec selector", {}, "does not match the pods"),
        (4, "metadata", {"name": "p", "namespace": "n"}, "the namespace is not"),
        (5, "spec selector", {}, "does not match the pods"),
        (5, "spec jobLabel", "name", "expect the job pointsman"),
        (5, "spec podMetricsEndpoints 0 port", "admin", "no container has the port"),
    ]:
        changed = copy.deepcopy(objects)
        *parents, last = [int(key) if key.isdigit() else key for key in path.split()]
        parent = changed[place]
        for key in parents:
            parent = parent[key]
        parent[last] = value
        found = "\n".join(Objects(changed).problems())
        assert expected in found, f"{path}: {found}"


def run(*command):
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(f"`{' '.join(map(str, command))}` ended with {ran.returncode}: {ran.stdout}{ran.stderr}")
    return ran.stdout


def rendered(work):
    """Name and text of each overlay, and of the chart for each set of values."""
    source = work / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", source)
    shutil.copy(POLICY, source / "overlays/complete/prefill.wasm")
    kustomize = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]
    for overlay in [source / "base", *sorted((source / "overlays").iterdir())]:
        yield overlay.name, run(*kustomize, overlay)
    chart = DEPLOY / "helm/pointsman"
    run("helm", "lint", "--strict", "--quiet", chart)
    for name, values in VALUES.items():
        sets = [word for value in values.split() for word in ["--set", value]]
        resources = ["monitoring.coreos.com/v1", "inference.networking.k8s.io/v1"]
        versions = [word for resource in resources for word in ["--api-versions", resource]]
        yield name, run("helm", "template", "pointsman", chart, "--namespace", "serving", *versions, *sets)


def main():
    self_test()
    failed, custom = 0, custom_resources()
    with tempfile.TemporaryDirectory(prefix="pointsman-kubernetes-") as work:
        output = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else f"{work}/rendered")
        output.mkdir(parents=True, exist_ok=True)
        for name, text in rendered(pathlib.Path(work)):
            (output / f"{name}.yaml").write_text(text)
            objects = [one for one in yaml.safe_load_all(text) if one is not None]
            rows = {"references between objects": Objects(objects).problems()}
            for release in [OLDEST_IMAGE_VOLUMES if name.endswith("policies-image") else OLDEST, NEWEST]:
                problems = [
                    f"{one.get('kind')}/{at(one, 'metadata.name')}: {problem}"
                    for one in objects
                    for problem in invalid(one, release, custom)
                ]
                rows[f"{len(objects)} objects, schemas of {release}"] = problems
            for what, problems in rows.items():
                print(f"| {name + ': ' + what:<60} | {'FAILED' if problems else 'ok':<6} |")
                print("".join(f"  {problem}\n" for problem in problems), end="")
                failed += len(problems)
    sys.exit(f"{failed} problems; see the rows marked FAILED" if failed else 0)


main()
